"""Runs that go on: after their end, after a kill at any moment, as the same run. Real tiny models
on the CPU.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from helpers import process
from run_cases import PARITY, run, settings, timeless

from agentrl.errors import ConfigError
from agentrl.records.files import read_episodes, read_metrics
from agentrl.trainers.folder import checkpoints, latest_checkpoint, prune_checkpoints
from agentrl.trainers.loop import train
from agentrl.trainers.run import Run


@pytest.mark.bit_equal
def test_a_resumed_run_equals_an_uninterrupted_one(model, tmp_path):
    whole = run(settings(model), tmp_path / "a" / "x")
    run(settings(model, steps=2), tmp_path / "b" / "x")
    assert run(settings(model), tmp_path / "b" / "x", resume=True) == whole
    assert (
        read_episodes(tmp_path / "a/x/episodes.jsonl").keys()
        == read_episodes(tmp_path / "b/x/episodes.jsonl").keys()
    )


@pytest.mark.bit_equal
def test_a_refilled_run_resumes_where_it_drew(model, tmp_path):
    change = {"loss": {"refill": True}, "group_size": 2, "steps": 4}
    whole = run(settings(model, **change), tmp_path / "a" / "x")
    run(settings(model, **change | {"steps": 2}), tmp_path / "b" / "x")
    assert run(settings(model, **change), tmp_path / "b" / "x", resume=True) == whole


def kill_loop(model, folder, kills, env=PARITY):
    """Kill training processes at random moments until so many have landed; every run, resumed,
    equals a whole one.
    """
    toml = folder / "config.toml"
    toml.write_text(
        f'env = "{env}"\nmodel = "{model}"\nsteps = 8\ntasks_per_step = 4\ngroup_size ='
        " 4\nlearning_rate = 1e-3\ndeterministic = true\neval_every = 3\nheld_out = {tasks = 6,"
        " samples = 2}\nsave_every = 2\nminibatches = 2\nquiet_rounds = 99\n"
    )
    chance = random.Random(7)
    command = [sys.executable, "-m", "agentrl.cli", "train", str(toml), "--json", "--resume"]
    whole = subprocess.run(
        [*command, "--out", str(folder / "a/x")], capture_output=True, text=True, timeout=200
    )
    assert whole.returncode == 0, whole.stderr
    while kills > 0:
        run = folder / f"killed-{kills}" / "x"
        landed = killed_and_resumed(
            [*command, "--out", str(run)], run / "metrics.jsonl", kills, chance
        )
        assert timeless(run) == timeless(folder / "a/x")
        assert (
            read_episodes(run / "episodes.jsonl").keys()
            == read_episodes(folder / "a/x/episodes.jsonl").keys()
        )
        kills -= landed


def killed_and_resumed(command, metrics, kills, chance):
    """Start a run again and again until it ends, killing it at most `kills` times; returns how many
    kills landed.
    """
    landed = 0
    while True:
        with process(*command, stderr=subprocess.PIPE) as trains:
            if landed < kills:
                before, size = time.monotonic(), metrics.stat().st_size if metrics.exists() else 0
                # Wait until it trains again, then let it live for a moment: most kills hit a round,
                # not the start.
                while trains.poll() is None and time.monotonic() - before < 60:
                    if metrics.exists() and metrics.stat().st_size > size:
                        break
                    time.sleep(0.01)
                time.sleep(chance.random() * 0.4)
                trains.send_signal(signal.SIGKILL)
            _, errors = trains.communicate(timeout=200)
        if trains.returncode == 0:
            return landed
        assert trains.returncode == -signal.SIGKILL, errors.decode()
        landed += 1


def test_killed_twice_and_resumed(model, tmp_path):
    kill_loop(model, tmp_path, 2)


@pytest.mark.long
def test_killed_ten_times_and_resumed(model, tmp_path, bubblewrap):
    kill_loop(model, tmp_path, 10, PARITY.replace(":Parity", ":SandboxParity"))


def test_a_checkpoint_is_whole_or_absent(model, tmp_path):
    run(settings(model, steps=3, keep_last=2), tmp_path / "a")
    assert [found.step for found in checkpoints(tmp_path / "a")] == [2, 3]
    (tmp_path / "a/checkpoints/.step_4.1").mkdir()
    (tmp_path / "a/checkpoints/.step_4.1/model").mkdir()
    assert latest_checkpoint(tmp_path / "a").step == 3
    prune_checkpoints(tmp_path / "a", 1)
    assert [path.name for path in (tmp_path / "a/checkpoints").iterdir()] == ["step_3"]


def test_what_a_resumed_run_writes_again_is_set_aside(model, tmp_path):
    folder = tmp_path / "b" / "x"
    whole = run(settings(model, save_every=2), tmp_path / "a" / "x")
    run(settings(model, steps=3, save_every=2), folder)
    shutil.rmtree(folder / "checkpoints" / "step_3")
    rows, episodes = (
        read_metrics(folder / "metrics.jsonl"),
        read_episodes(folder / "episodes.jsonl"),
    )
    with Run(settings(model, save_every=2), folder, resume=True) as opened:
        assert opened.folder.start == 2
        assert [row["step"] for row in opened.folder.history()] == [0, 1, 2]
        left = read_episodes(folder / "episodes.jsonl")
        assert {key.step for key in left if key.phase == "train"} == {0, 1}
        assert {key.step for key in left if key.phase == "eval"} == {0, 2}
        aside = read_episodes(folder / "episodes.jsonl.redone")
        assert left.keys() | aside.keys() == episodes.keys() and not left.keys() & aside.keys()
        assert read_metrics(folder / "metrics.jsonl.redone") == rows[3:]
        train(opened)
    assert timeless(folder) == whole


def test_a_resumed_run_stays_the_same_run(model, tmp_path):
    run(settings(model, steps=1), tmp_path / "a")
    with pytest.raises(ConfigError, match="run with seed=0, not 1: resume it with that"):
        Run(settings(model, seed=1), tmp_path / "a", resume=True)
    with Run(settings(model, learning_rate=5e-4), tmp_path / "a", resume=True) as opened:
        assert opened.folder.changed == {"steps": (1, 5), "learning_rate": (1e-3, 5e-4)}
