"""Runs whose engine lives in a process of its own: the same numbers, and what its death costs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import require
from helpers import REPO, below, last_json, tiny_model_folder, wait_for
from run_cases import run, settings, timeless
from vllm_cases import Vllm, prompts_of

from agentrl.engines.base import EngineSettings, Sampling
from agentrl.engines.own_process import process
from agentrl.errors import ConfigError, EngineAway
from agentrl.records.files import read_episodes
from agentrl.trainers.loop import train
from agentrl.trainers.run import Run, Unheard
from agentrl.types import Ending, EndReason

OWN = {"process": True}


def kill_mid_rollout(engine) -> None:
    """Kill the engine's process as soon as it is to sample for an episode; the probe has no seat.

    It is stopped before it is asked, so that no answer comes first, however fast it is.
    """
    generate = engine.generate

    async def asked(*words, **named):
        if engine._seats and engine.generate is asked:
            engine.generate = generate
            process = engine._carrier.process
            process.send_signal(signal.SIGSTOP)
            threading.Thread(target=kill_when_asked, args=[engine, process]).start()
        return await generate(*words, **named)

    engine.generate = asked


def kill_when_asked(engine, process) -> None:
    wait_for(lambda: any(call.words[0] == "generate" and call.sent for call in calls_of(engine)))
    process.kill()


def calls_of(engine):
    with engine._lock:
        return list(engine._calls.values())


def test_a_process_of_its_own_changes_no_number(model, tmp_path):
    """Rewards, log-probabilities, gradients: bit for bit, in a deterministic run."""
    change = {"steps": 3, "eval_every": 0}
    here = run(settings(model, **change), tmp_path / "a" / "x")
    there = run(settings(model, **change, engine=OWN), tmp_path / "b" / "x")
    assert [row.pop("engine/restarts") for row in there] == [0, 0, 0]
    assert there == here
    assert "carries 'transformers'" in (tmp_path / "b/x/engine.log").read_text()


def test_training_goes_on_when_the_process_is_killed(model, tmp_path):
    """What was under way is played again, and parity is asked again before anything is learnt."""
    played, probed = [], []

    class Killer(Unheard):
        def on_phase(self, label, episodes):
            if len(played) == 1:
                kill_mid_rollout(opened.engine)
            played.append(label)

    config = settings(model, steps=3, eval_every=0, engine=OWN, compute={"lora_rank": 2})
    with Run(config, tmp_path / "x", events=Killer()) as opened:
        confirm = opened.parity.confirm
        opened.parity.confirm = lambda version: probed.append(version) or confirm(version)
        train(opened)
    rows = timeless(tmp_path / "x")
    assert [row["step"] for row in rows] == [1, 2, 3]
    restarts = [row["engine/restarts"] for row in rows]
    hit = restarts.index(1)
    assert sum(restarts) == 1 and hit >= 1
    assert probed == sorted([1, 2, 3, hit])
    assert all(row["parity/gap_max"] < 1e-4 for row in rows)
    assert all(row["episodes/failed_infra"] == 0 for row in rows)
    lines = (tmp_path / "x/episodes.jsonl").read_text().splitlines()
    lost = [row for row in map(json.loads, lines) if row["end"] == "engine_error"]
    assert {row["key"]["round"] for row in lost} == {hit}
    assert all(row["score"]["value"] is None and row["key"]["attempt"] == 0 for row in lost)
    assert all("was killed by SIGKILL" in row["failure"] for row in lost)


@pytest.mark.long
def test_a_run_whose_engine_keeps_dying_ends_with_one_sentence_and_can_be_resumed(
    model, tmp_path, monkeypatch
):
    monkeypatch.setattr(process, "BACK_OFF_S", ())

    class Killer(Unheard):
        def on_phase(self, label, episodes):
            if label.startswith("round 2"):
                kill_mid_rollout(opened.engine)

    config = settings(model, steps=2, eval_every=0, engine=OWN)
    said = r"was killed by SIGKILL; .*engine\.log says nothing; mend that"
    opened = Run(config, tmp_path / "x", events=Killer())
    with pytest.raises(EngineAway, match=said), opened:
        train(opened)
    with Run(settings(model, steps=2, eval_every=0), tmp_path / "x", resume=True) as opened:
        assert opened.folder.start == 1
        train(opened)
    assert [row["step"] for row in timeless(tmp_path / "x")] == [1, 2]


@pytest.mark.parametrize(
    ("engine", "has_process"),
    [
        ({}, False),
        ({"name": "vllm"}, True),
        ({"name": "vllm", "process": False}, False),
        ({"process": True}, True),
    ],
)
def test_vllm_has_a_process_unless_told_otherwise(engine, has_process):
    assert EngineSettings(**engine).has_process == has_process


def test_a_process_and_a_second_copy_are_one_too_many(model):
    with pytest.raises(ConfigError, match="process=true implies it"):
        settings(model, engine={"process": True, "own_weights": True})


@pytest.mark.long
def test_vllm_in_a_process_gives_the_numbers_of_vllm_in_ours(vllm):
    """Ids, log-probabilities, reasons and versions, before and after weights were replaced."""
    apart = Vllm(vllm.folder, process=True)
    prompts, sampling = prompts_of(12), Sampling(max_tokens=40)
    try:
        for version in range(3):
            model = vllm.moved(version) if version else vllm.model
            for each in (vllm, apart):
                each.load(model, version)
            here, there = vllm.sample(prompts, sampling), apart.sample(prompts, sampling)
            assert here == there and {one.version for one in there} == {version}
    finally:
        apart.close()


def carrier_below(pid: int) -> int | None:
    """The process that carries the engine of a program."""
    for each in below([pid]):
        try:
            words = Path(f"/proc/{each}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"agentrl.engines.own_process.child" in words:
            return each
    return None


def scored_in(lines: Path) -> int:
    """Episodes that were recorded and not lost."""
    text = lines.read_text() if lines.exists() else ""
    return sum('"engine_error"' not in line for line in text.splitlines())


def command_with_deaths(out: Path, *words: str | Path, signals) -> tuple[dict, str]:
    """Run a command and send signals to its engine's process, each after twenty further episodes;
    the JSON that it prints, and what it says.
    """
    lines = out / "episodes.jsonl"
    words = [sys.executable, "-m", "agentrl.cli", *map(str, words), "--out", str(out), "--json"]
    with subprocess.Popen(
        words, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as done:
        try:
            for number in signals:
                due = 20 + scored_in(lines)
                wait_for(lambda due=due: scored_in(lines) >= due, timeout_s=600)
                os.kill(carrier_below(done.pid) or 0, number)
            told, said = done.communicate(timeout=1200)
        finally:
            done.kill()
    assert done.returncode == 0, said
    return last_json(told), said


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_a_real_vllm_may_be_killed_and_stopped_in_training(tmp_path):
    require("vllm")
    file = tmp_path / "run.toml"
    row = ['env = "calc-v0"', f'model = "{tiny_model_folder()}"', "steps = 4", "group_size = 4"]
    row += ["tasks_per_step = 8", "learning_rate = 1e-3", "quiet_rounds = 99", "eval_every = 2"]
    row += ["held_out = {tasks = 8}"]
    file.write_text("\n".join([*row, 'engine = {name = "vllm", kv_cache_gib = 0.0625}']))
    signals = [signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]
    _, said = command_with_deaths(tmp_path / "x", "train", file, signals=signals)
    rows = [one for one in timeless(tmp_path / "x") if "engine/restarts" in one]
    assert [one["step"] for one in rows] == [1, 2, 3, 4]
    assert sum(one["engine/restarts"] for one in rows) == 3
    assert said.count("was killed by SIGKILL: ") == 2
    assert said.count("gave no sign of life for 31 s and was killed: ") == 1
    played = read_episodes(tmp_path / "x/episodes.jsonl")
    last = {(key.phase, key.step, key.task, key.sample): one for key, one in played.items()}
    assert len(last) == 4 * 32 + 3 * 8
    assert all(one.end.ending is not Ending.FAILED for one in last.values())
    lost = [one for one in played.values() if one.end.ending is Ending.FAILED]
    assert {one.end for one in lost} == {EndReason.ENGINE_ERROR}
    assert all(one.score.value is None for one in lost)


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_a_real_vllm_may_be_killed_twice_in_an_evaluation(tmp_path):
    require("vllm")
    words = ["eval", "calc-v0", "--policy", f"vllm:{tiny_model_folder()}", "--limit", "80"]
    words += ["--engine-option", "kv_cache_gib=0.0625", "--concurrency", "4"]
    found, said = command_with_deaths(tmp_path / "x", *words, signals=[signal.SIGKILL] * 2)
    assert found["n_episodes"] == 80 and found["n_failed_infra"] == 0
    assert found["n_retried"] > 0 and said.count("is started again") == 2
