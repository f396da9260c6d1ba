"""Runs with a curriculum and with several environments, with a real tiny model."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
import tomllib
from itertools import chain

import pytest
from helpers import process
from run_cases import PARITY, TOLD, run, settings

from agentrl.errors import ConfigError
from agentrl.records.files import iter_episodes, read_metrics
from agentrl.trainers.config import read_config
from agentrl.trainers.run import Run
from agentrl.trainers.tasks import RunTasks

TWO = {
    "env": [
        {"id": PARITY, "floor": 0.5},
        {"id": TOLD, "name": "told", "settings": {}},
    ]
}
LEARN = {"curriculum": {"sampler": "learnability", "pool": 20}}


def chosen(folder):
    return [row for row in read_metrics(folder / "curriculum.jsonl")]


def listed(row):
    """The tasks of a row, of one environment or of several."""
    parts = [row] if "chosen" in row else [one for one in row.values() if isinstance(one, dict)]
    return [task for part in parts for task in part["chosen"]]


@pytest.mark.bit_equal
@pytest.mark.parametrize(
    "change",
    [
        LEARN,
        {"curriculum": {"sampler": "thompson", "pool": 40}, "loss": {"refill": True}},
        {"curriculum": {"sampler": "learnability", "pool": 20, "group_most": 6}},
        TWO | LEARN,
    ],
    ids=["learnability", "thompson-refill", "sizes", "two"],
)
def test_a_resumed_run_chooses_the_same_tasks(model, tmp_path, change):
    change = change | {"steps": 4, "eval_every": 0}
    whole = run(settings(model, **change), tmp_path / "a" / "x")
    run(settings(model, **change | {"steps": 2}), tmp_path / "b" / "x")
    assert run(settings(model, **change), tmp_path / "b" / "x", resume=True) == whole
    assert chosen(tmp_path / "b/x") == chosen(tmp_path / "a/x")
    played = {episode.key.task for episode in iter_episodes(tmp_path / "a/x/episodes.jsonl")}
    assert played == {task for row in chosen(tmp_path / "a/x") for task in listed(row)}


def test_two_environments_have_metrics_of_their_own_and_floors_that_hold(model, tmp_path):
    config = settings(model, **TWO, curriculum=LEARN["curriculum"], steps=12, eval_every=12)
    rows = run(config, tmp_path / "x")
    last = rows[-1]
    assert {"env/Parity/pass", "env/told/reward", "env/told/no_signal"} <= last.keys()
    assert {"eval/Parity/pass_at_1", "eval/told/pass_at_1", "eval/pass_at_1"} <= last.keys()
    assert last["eval/Parity/n_scored"] == last["eval/told/n_scored"] == 3
    shares = [row["env/Parity/share"] for row in rows if "env/Parity/share" in row]
    for start in range(3):
        assert sum(shares[start : start + 10]) >= 5 - 0.25  # a task of the four of a round
    envs = {one.env for one in iter_episodes(tmp_path / "x/episodes.jsonl")}
    assert envs == {"parity-v0", "told-v0"}
    assert "curriculum/told/pass_all" in last


@pytest.mark.long
def test_killed_and_resumed_the_same_tasks_are_chosen(model, tmp_path):
    toml = tmp_path / "c.toml"
    toml.write_text(
        f'model = "{model}"\nsteps = 6\ntasks_per_step = 4\ngroup_size = 4\ndeterministic = true\n'
        'save_every = 2\ncurriculum = {sampler = "learnability", pool = 20}\n'
        f'[[env]]\nid = "{PARITY}"\nfloor = 0.25\n[[env]]\nid = "{TOLD}"\n'
    )
    command = [sys.executable, "-m", "agentrl.cli", "train", str(toml), "--json", "--resume"]
    assert not subprocess.run([*command, "--out", str(tmp_path / "a/x")], timeout=200).returncode
    folder = tmp_path / "b" / "x"
    with process(*command, "--out", str(folder), stderr=subprocess.PIPE) as trains:
        until = time.monotonic() + 60
        while trains.poll() is None and time.monotonic() < until:
            if (folder / "checkpoints" / "step_2").exists():
                break
            time.sleep(0.01)
        trains.send_signal(signal.SIGKILL)
        trains.communicate(timeout=60)
    assert not subprocess.run([*command, "--out", str(folder)], timeout=200).returncode
    assert chosen(folder) == chosen(tmp_path / "a/x") and len(chosen(folder)) == 6


@pytest.mark.parametrize(
    ("lines", "sets", "sentence"),
    [
        ('env = "calc-v0"', ["curriculum.sampler=lernability"], "did you mean 'learnability'"),
        ('env = "calc-v0"', ["curriculum.sampler=band", "curriculum.low=0.9"],
         "the band from low=0.9 to high=0.8 is empty"),
        ('env = "calc-v0"', ["curriculum.explore=0.2"], "'curriculum.sampler' is missing: choose"),
        ('env = "calc-v0"', ["curriculum.sampler=band", "curriculum.lwo=0.1"],
         "'curriculum.lwo' is unknown: did you mean 'curriculum.low'"),
        ('env = "calc-v0"\ncurriculum = {sampler = "staged", target = 0.5, levels = [{}, {}]}',
         ["curriculum.sampler=uniform"],
         "'curriculum.target' is unknown: it belongs to 'staged'"),
        ('env = "calc-v0"', ["curriculum.sampler=thompson", "curriculum.sharpness=2"],
         "it belongs to 'learnability' or 'mgpo'"),
        ('env = "calc-v0"', ["curriculum.sampler=uniform", "curriculum.pool=8"],
         "curriculum.pool=8 holds fewer than the 32 tasks"),
        ('env = "calc-v0"', ["curriculum.sampler=uniform", "curriculum.group_most=4"],
         "curriculum.group_most=4 is below group_size=8"),
        ('env = "calc-v0"', ["curriculum.sampler=staged"], "give at least two"),
        ('env = "calc-v0"', ["curriculum.sampler=uniform", "curriculum.explore=0"],
         "curriculum.explore=0 must be greater than 0"),
        ('[[env]]\nid = "calc-v0"\n[[env]]\nid = "calc-v0"', [], "are called 'calc-v0'"),
        ('[[env]]\nid = "calc-v0"\nfloor = 0.7\n[[env]]\nid = "bugfix-v0"', ["env.1.floor=0.5"],
         "sum to 1.2, more than 1"),
        ('[[env]]\nid = "calc-v0"', ["env.3.floor=0.5"], "'3' is not a place in a list of 1"),
        ('[[env]]\nid = "calc-v0"', ["env.0.flor=0.5"], "'env.0.flor' is unknown: did you mean"),
    ],
)  # fmt: skip
def test_wrong_settings_get_one_sentence(tmp_path, lines, sets, sentence):
    toml = tmp_path / "c.toml"
    toml.write_text(f'model = "m"\n{lines}\n')
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        read_config(toml, sets)


@pytest.mark.parametrize(
    "change",
    [
        {"env": [{"id": PARITY, "name": "math"}, {"id": TOLD, "name": "math2"}]},
        {"curriculum": {"sampler": "uniform", "levels": [{}] * 11}, "held_out": {"tasks": 22}},
        {},
    ],
    ids=["names", "levels", "one"],
)
def test_held_out_tasks_are_compared_with_their_own_environment_only(model, monkeypatch, change):
    tasks = RunTasks(settings(model, **change))
    compared = []
    monkeypatch.setattr(
        "agentrl.trainers.tasks.find_overlap",
        lambda env, own, split, seed: compared.append([one.id for one in own]),
    )
    assert tasks.overlaps() == []
    assert sorted(chain(*compared)) == sorted(one.id for one in tasks.held_out)


def test_every_option_can_be_set_and_is_recorded(model, tmp_path):
    config = settings(model, **TWO, curriculum={"sampler": "band", "low": 0.3, "pool": 9})
    Run(config, tmp_path / "x").close()
    row = tomllib.loads((tmp_path / "x/config.toml").read_text())
    assert row["curriculum"]["low"] == 0.3 and row["env"][1]["name"] == "told"
    again = read_config(tmp_path / "x/config.toml")
    assert (again.curriculum, again.env) == (config.curriculum, config.env)


def test_environments_with_other_sandboxes_are_refused(model, tmp_path):
    other = tmp_path / "other.py"
    other.write_text(
        "from toy_envs import Parity\nfrom agentrl.sandboxes.base import SandboxLimits\n"
        "class Large(Parity):\n    id = 'large-v0'\n"
        "    sandbox_limits = SandboxLimits(memory_mb=1024)\n"
    )
    config = settings(model, env=[{"id": PARITY}, {"id": f"{other}:Large"}], eval_every=0)
    with pytest.raises(ConfigError, match="ask for sandboxes with different limits"):
        Run(config, tmp_path / "x")


def test_a_pool_that_rounds_would_empty_is_refused_before_anything_is_written(model, tmp_path):
    small = {"sampler": "uniform", "pool": 20, "rest": 5}
    with pytest.raises(ConfigError, match=r"holds 20 tasks, .* rest=5 may need 24"):
        Run(settings(model, curriculum=small), tmp_path / "x")
    assert not (tmp_path / "x").exists()
