"""Asynchronous training: rounds that play ahead of the learner, in a child process."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import require
from helpers import process, tiny_model_folder, wait_for
from run_cases import run, settings
from scripted_rounds import LOST, WON, Scripted
from transformers import AutoModelForCausalLM

from agentrl.chat.settings import ChatSettings
from agentrl.engines.base import Sampling
from agentrl.errors import ChildLost, ConfigError
from agentrl.records.files import iter_episodes, read_metrics
from agentrl.rollout.child import ChildPlan, ChildRollouts
from agentrl.specs import EnvSpec, RunSpec
from agentrl.trainers.algorithms.recipes import recipe
from agentrl.trainers.config import write_config
from agentrl.trainers.folder import latest_checkpoint
from agentrl.trainers.learner import recipe_of
from agentrl.trainers.loop import train
from agentrl.trainers.rounds import Rounds
from agentrl.trainers.run import Run
from agentrl.waits import FOLDER


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = latest_checkpoint(folder)
    assert checkpoint is not None
    return AutoModelForCausalLM.from_pretrained(checkpoint.model).state_dict()


def test_no_staleness_equals_the_synchronous_run_bit_for_bit(model, tmp_path):
    rows = run(settings(model), tmp_path / "sync" / "x")
    again = run(settings(model, mode="async", max_staleness=0), tmp_path / "async" / "x")
    assert rows == again
    first, second = weights_of(tmp_path / "sync" / "x"), weights_of(tmp_path / "async" / "x")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_round_is_played_by_weights_of_at_most_that_staleness(model, tmp_path):
    config = settings(model, mode="async", max_staleness=2, deterministic=False, steps=6)
    run(config, tmp_path / "x")
    rows = read_metrics(tmp_path / "x" / "metrics.jsonl")
    oldest = [row["staleness/max"] for row in rows if "staleness/max" in row]
    assert len(oldest) == 6 and max(oldest) <= 2 and oldest[0] == 0
    episodes = [e for e in iter_episodes(tmp_path / "x" / "episodes.jsonl")]
    keys = Counter(e.key for e in episodes if e.key.phase == "train")
    assert set(keys.values()) == {1} and len(keys) == 6 * 4 * 4
    begun = [(e.key.round, e.version) for e in episodes if e.key.phase == "train"]
    assert all(max(0, number - 2) <= version <= number for number, version in begun)
    assert any(version < number for number, version in begun)


def ahead(script: Scripted, depth: int, steps: int = 5) -> Rounds:
    return Rounds(script, script, 4, recipe("grpo"), ahead=depth, steps=steps)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_rounds_are_dispatched_that_far_ahead_and_learned_from_in_order(depth):
    script = Scripted()
    rounds = ahead(script, depth)
    for number in range(5):
        played = rounds.play(number)
        dispatched = [round_of for round_of, _, _ in script.draws]
        assert dispatched == list(range(min(5, number + depth + 1)))
        assert [group.task.id for group in played.groups] == [
            f"t{4 * number + place}" for place in range(4)
        ]
        assert script.seen == 4 * (number + 1)


def test_rounds_that_play_ahead_go_out_again_with_the_same_tasks(tmp_path):
    script = Scripted()
    rounds = ahead(script, 2)
    rounds.play(0)
    rounds.save(tmp_path)
    later = Scripted()
    later.numbers = script.numbers  # the source goes on where it was
    resumed = ahead(later, 2)
    resumed.load(tmp_path)
    assert [g.task.id for g in resumed.play(1).groups] == ["t4", "t5", "t6", "t7"]
    assert [g.task.id for g in resumed.play(2).groups] == ["t8", "t9", "t10", "t11"]
    assert [g.task.id for g in resumed.play(3).groups] == ["t12", "t13", "t14", "t15"]


def test_refilling_a_round_that_played_ahead_draws_when_it_is_due():
    script = Scripted(WON, LOST, rest=(1.0, 0.0, 1.0))
    rounds = Rounds(script, script, 2, recipe("dapo"), ahead=1, steps=3)
    played = rounds.play(0)
    assert script.draws[:2] == [(0, 0, 2), (1, 0, 2)]
    assert {draw[:2] for draw in script.draws[2:]} == {(0, 1)}
    assert len(played.refilled) == 2


def test_stale_rounds_are_corrected_unless_that_is_declined(model):
    def corrections(**changes) -> list[str]:
        config = settings(model, mode="async", deterministic=False, **changes)
        return [part.label for part in recipe_of(config).corrections]

    assert corrections() == ["truncated_is"]
    assert corrections(loss={"corrections": []}) == []
    assert corrections(loss={"mis_high": 3.0}) == ["masked_is"]
    assert corrections(max_staleness=0) == []


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"deterministic": True}, "deterministic"),
        ({"max_staleness": -1}, "max_staleness"),
        ({"engine": {"routing": "replay"}}, "engine.routing"),
        ({"engine": {"name": "vllm", "sleep": True}}, "engine.sleep"),
    ],
)
def test_what_cannot_be_asynchronous_is_refused(model, changes, setting):
    with pytest.raises(ConfigError) as refused:
        settings(model, **{"mode": "async", "deterministic": False, **changes})
    assert refused.value.setting == setting


def test_a_child_that_is_killed_ends_the_run_and_resume_goes_on(model, tmp_path):
    config = settings(model, mode="async", deterministic=False, steps=6)
    with Run(config, tmp_path / "x") as opened:
        record = opened.record

        def kill_after_two(rounds, metrics):
            record(rounds, metrics)
            if rounds == 2:
                os.kill(opened.rollouts._carrier.process.pid, signal.SIGKILL)

        opened.record = kill_after_two
        with pytest.raises(ChildLost, match="was killed by SIGKILL"):
            train(opened)
    run(config, tmp_path / "x", resume=True)
    steps = [row["step"] for row in read_metrics(tmp_path / "x" / "metrics.jsonl")]
    assert steps == [0, 1, 2, 3, 4, 5, 6]
    trained = [
        e.key for e in iter_episodes(tmp_path / "x" / "episodes.jsonl") if e.key.phase == "train"
    ]
    assert set(Counter(trained).values()) == {1} and len(trained) == 6 * 4 * 4


def test_what_the_child_cannot_build_is_raised_here(model, tmp_path):
    plan = ChildPlan(
        spec=RunSpec(envs=(EnvSpec(id="nowhere-v0"),)),
        open_engine=partial(SimpleNamespace, context_length=8),
        model=str(model),
        chat=ChatSettings(),
        sampling=Sampling(),
        group_size=1,
        concurrency=1,
    )
    with pytest.raises(ConfigError) as refused:
        ChildRollouts(plan, log=tmp_path / "rollouts.log")
    assert any("process that plays the episodes" in note for note in refused.value.__notes__)


@pytest.mark.long
def test_vllm_in_the_child_plays_ahead(tmp_path):
    require("vllm")
    config = settings(
        tiny_model_folder(),
        mode="async",
        deterministic=False,
        eval_every=0,
        engine={"name": "vllm"},
        learning_rate=1e-2,
    )
    rows = run(config, tmp_path / "x")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert max(row["staleness/max"] for row in rows) in (1, 2)
    assert all(row["parity/probe_gap"] < 1e-3 for row in rows)
    assert all(row["engine/running_max"] > 1 for row in rows)


@pytest.mark.long
def test_killed_at_random_points_each_key_is_trained_once(model, tmp_path):
    """The trainer or its child is killed three times; the last start goes on to the end."""
    chance, folder = random.Random(0), tmp_path / "x"
    config = settings(model, mode="async", deterministic=False, steps=40, eval_every=0)
    write_config(config, tmp_path / "config.toml")
    words = [sys.executable, "-m", "agentrl.cli", "train", str(tmp_path / "config.toml")]
    words += ["--out", str(folder), "--resume"]
    for victim in ("trainer", "rollouts", "trainer"):
        report = folder / FOLDER / f"{victim}.json"
        report.unlink(missing_ok=True)
        before = len(history(folder))
        with process(*words, stderr=subprocess.DEVNULL) as trainer:
            wait_for(lambda: report.exists() and len(history(folder)) > before)  # noqa: B023
            time.sleep(chance.uniform(0, 0.3))
            pid = json.loads(report.read_text())["pid"] if report.exists() else trainer.pid
            os.kill(pid, signal.SIGKILL)
            trainer.wait(60)
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in history(folder)] == list(range(1, 41))
    assert max(row.get("staleness/max", 0) for row in history(folder)) <= 2
    episodes = list(iter_episodes(folder / "episodes.jsonl"))
    keys = [e.key._replace(attempt=0) for e in episodes if e.key.phase == "train"]
    assert len(set(keys)) == 40 * 4 * 4


def history(folder: Path) -> list[dict[str, float]]:
    path = folder / "metrics.jsonl"
    return read_metrics(path) if path.exists() else []
