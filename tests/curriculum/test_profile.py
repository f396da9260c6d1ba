"""`agentrl profile`: counts, what is expected of samplers, the page, and what a run starts from."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from agentrl.cli import app as cli
from agentrl.curriculum.pool import PoolSource
from agentrl.curriculum.profile import Profile
from agentrl.curriculum.settings import EnvTable, Learnability
from agentrl.curriculum.source import parts_of
from agentrl.errors import UserError
from agentrl.report.profile_page import profile_page

ENV = """
from agentrl import Task, ToolEnv
from agentrl.verifiers.answers.text import exact_match

class Mine(ToolEnv):
    \"\"\"Say the word; the reference is right for two of three.\"\"\"

    id = "mine-v0"
    verifier = exact_match()

    def tasks(self, split, seed):
        for number in range(30):
            said = "yes" if number % 3 else "no"
            yield Task(id=f"{split}-{number}", instruction=f"{number}", hidden={"answer": "yes"},
                       oracle={"answer": said})
"""


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(ENV)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["agentrl", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return call


def test_the_command_says_it_draws_it_and_saves_it(run, tmp_path):
    command = ("profile", "mine.py:Mine", "--policy", "oracle", "--tasks", 12, "--samples", 4)
    code, out, _ = run(*command, "--json", "--save", "p.json", "--out", "records")
    row = json.loads(out.splitlines()[-1])
    assert code == 0 and row["mean"] == pytest.approx(2 / 3) and row["n_tasks"] == 12
    assert row["pass_rates"]["train-0"] == [0, 4] and row["pass_rates"]["train-1"] == [4, 4]
    assert set(row["signal"]) == {"4", "8", "16"}
    assert row["signal"]["4"] < row["signal"]["8"] < row["signal"]["16"]
    assert (tmp_path / "records/profile.html").read_text().count("<rect") == 20
    code, out, _ = run(*command, "--out", "records")  # all of it is recorded already
    assert code == 0 and "33% never solved, 67% always" in out and "learnability" in out
    start = str(tmp_path / "p.json")
    parts = parts_of([EnvTable(id=f"{tmp_path}/mine.py:Mine")])
    source = PoolSource(parts[0], Learnability(pool=20, start=start), 0)
    assert source.beliefs.seen_N.sum() == 12
    assert source.beliefs.prior == tuple(row["prior"])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--policy", "orcale"), "--policy 'orcale' is unknown"),
        (("--policy", "oracle", "--samples", 1), "--samples"),
        (("--policy", "oracle", "--save", "not/there.json"), "not is not a folder: create it"),
        (("--policy", "oracle", "--split", "dev"), "must be 'train' or 'test'"),
        ((), "policy"),
    ],
)
def test_bad_input_gets_one_sentence(run, options, sentence):
    code, _, err = run("profile", "calc-v0", *options)
    assert code == 2 and sentence in err and err.count("\n") == 1


def made_up(rates, samples=16):
    rng = np.random.default_rng(0)
    return {f"t{i}": (int(rng.binomial(samples, p)), samples) for i, p in enumerate(rates)}


def test_a_profile_foretells_what_groups_will_show():
    rates = np.random.default_rng(1).beta(0.4, 0.8, 600)
    profile = Profile.of(made_up(rates))
    for size in (4, 8, 16):
        truth = float((1 - rates**size - (1 - rates) ** size).mean())
        assert profile.signal(size) == pytest.approx(truth, abs=0.03)
    bins = profile.histogram()
    assert sum(bins["counted"]) == pytest.approx(1) and sum(bins["posterior"]) == pytest.approx(1)
    by_name = {row["sampler"]: row for row in profile.spending(32, 8)}
    assert by_name["uniform"]["times"] == 1
    for name in ("learnability", "band", "thompson", "mgpo"):
        assert by_name[name]["times"] > 1.2
        assert by_name[name]["episodes_per_group"] == pytest.approx(8 / by_name[name]["signal"])


def test_what_was_lost_is_in_no_rate_and_names_reach_no_markup():
    with pytest.raises(UserError, match="no episode was scored"):
        Profile.of({"a": (0, 0)})
    row = Profile.of({"<script>": (1, 2), "lost": (0, 0)}).row(8, 4)
    assert row["n_tasks"] == 1
    facts = {"env": "e", "policy": "p", "split": "train", "seed": 0}
    counts = {"n_episodes": 4, "n_failed_infra": 2, "n_refused": 0}
    page = profile_page({**facts, **row, **counts})
    assert "<script>" not in page and "&lt;script&gt;" in page and "failed by infra" in page
