"""Suites: read from a file, killed and interrupted, gone on with, and bounded."""

import json
import os
import signal
import subprocess
import sys

import pytest
from helpers import wait_for

from agentrl.errors import ConfigError
from agentrl.evaluation.run import evaluate
from agentrl.evaluation.suite import read_suite, run_suite
from agentrl.records.files import iter_episodes

SLOW = """
import asyncio

from agentrl.envs.calc import Calculator


class Slow(Calculator):
    id = "slow-v0"

    async def setup(self):
        await asyncio.sleep(0.05)
"""
SUITE = """
[defaults]
limit = 12
samples = 2
k = [1, 2]
concurrency = 2

[[eval]]
env = ["slow.py:Slow", "calc-v0"]
policy = ["oracle", "noop"]
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "suite.toml").write_text(SUITE)
    return tmp_path


def test_a_safety_policy_and_the_options_of_a_served_model_are_said_in_the_file(folder):
    path, served = folder / "suite.toml", "[defaults.served]\nretries = 0\ntop_p = 0.9\n"
    asked = 'policy_file = "lockdown"\npolicy = "openai:m@http://localhost:1/v1"\n'
    path.write_text(f"{served}[[eval]]\nenv = 'calc-v0'\n{asked}")
    (cell,) = read_suite(path, folder / "out")
    assert (cell.plan.policy_file, cell.plan.served.retries) == ("lockdown", 0)
    assert cell.plan.served.sampling == {"top_p": 0.9}
    path.write_text(path.read_text().replace("retries = 0", "retries = -1"))
    with pytest.raises(ConfigError, match=r"served\.retries=-1 must be"):
        read_suite(path, folder / "out")


def start(folder, out):
    program = [sys.executable, "-m", "agentrl.cli", "suite", "suite.toml", "--out", out, "--json"]
    return subprocess.Popen(
        program,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def finish(folder, out):
    playing = start(folder, out)
    said, _ = playing.communicate(timeout=120)
    return playing.returncode, json.loads(said.splitlines()[-1])


def recorded(out):
    return [e.key for path in sorted(out.glob("*/episodes.jsonl")) for e in iter_episodes(path)]


def test_killed_and_interrupted_no_episode_is_played_twice_and_none_is_lost(folder):
    code, whole = finish(folder, "whole")
    assert code == 0 and len(whole["rows"]) == 4 and whole["stopped"] == ""
    assert [row["pass_at"] for row in whole["rows"]][:2] == [
        {"1": 1.0, "2": 1.0},
        {"1": 0.0, "2": 0.0},
    ]
    out = folder / "cut"
    killed = start(folder, "cut")
    wait_for(lambda: len(recorded(out)) >= 5, 60)
    killed.kill()
    killed.communicate()
    before = recorded(out)
    assert 5 <= len(before) < 24

    playing = start(folder, "cut")
    wait_for(lambda: len(recorded(out)) >= 30, 60)
    playing.send_signal(signal.SIGINT)
    said, _ = playing.communicate(timeout=60)
    assert playing.returncode == 130
    cut = json.loads(said.splitlines()[-1])
    assert cut["stopped"] == "interrupted" and len(cut["rows"]) == 2 and cut["n_missing"] == 2
    result = json.loads((out / "slow.py-Slow-noop" / "eval.json").read_text())
    assert result["stopped"] == "interrupted" and 0 < result["n_episodes"] < 24
    assert result["n_missing"] == 24 - result["n_episodes"] and result["pass_at"]["1"] == 0.0

    code, again = finish(folder, "cut")
    assert code == 0 and again["rows"] == whole["rows"]
    keys = recorded(out)
    assert len(keys) == len(set(keys)) == 4 * 24 and set(before) < set(keys)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "has no evaluations"),
        ("[[eval]]\npolicy = 'oracle'\n", "evaluation 1: setting 'env' is missing"),
        ("[[eval]]\nenv = 'calc-v0'\nlimit = 1\nsample = 2\n", "setting 'sample' is unknown"),
        ("[[eval]]\nenv = 'calc-v0'\nlimit = 'x'\n", "limit='x' must be a whole number"),
        ("[[eval]]\nenv = 'calc-v0'\nk = [3]\n", "k=[3] must be from 1 to samples=1"),
        ("[[eval]]\nenv = 'calk-v0'\n", "did you mean 'calc-v0'"),
        ("[[eval]]\nenv = 'calc-v0'\n" * 2, "two evaluations are named 'calc-v0 oracle'"),
        (
            "[[eval]]\nenv='calc-v0'\nname='a b'\n[[eval]]\nenv='calc-v0'\nname='a-b'\n",
            "two evaluations are named",
        ),
        ("[[evals]]\n", "table 'evals' is unknown"),
        ("[[eval]\n", "is not valid TOML"),
        ("[[eval]]\nenv = 'calc-v0'\nprice = '-1,2'\n", "--price -1,2 must be US dollars"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path, text, part):
    (tmp_path / "suite.toml").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_suite(tmp_path / "suite.toml", tmp_path / "out")
    assert part in str(error.value)


def test_a_bound_is_of_the_whole_suite_and_a_higher_one_goes_on(tmp_path):
    (tmp_path / "suite.toml").write_text(
        "[defaults]\nlimit = 4\nconcurrency = 1\n[[eval]]\nenv = 'calc-v0'\nname = 'a'\n"
        "[[eval]]\nenv = 'calc-v0'\nname = 'b'\n"
    )
    cells = read_suite(tmp_path / "suite.toml", tmp_path / "out")

    def run(cell):
        # An oracle has no tokens, so its turns stand for them here.
        result = evaluate(cell.plan)
        return result | {"cost": result["cost"] | {"sampled_tokens": result["cost"]["turns"]}}

    found = run_suite(cells, tmp_path / "out", run, max_tokens=100)
    assert found["stopped"] == "" and [row["n_episodes"] for row in found["rows"]] == [4, 4]
    tokens = []

    def bounded(cell):
        tokens.append(cell.plan.max_tokens)
        return run(cell)

    run_suite(cells, tmp_path / "out", bounded, max_tokens=100)
    assert tokens == [100, 100 - 12]
