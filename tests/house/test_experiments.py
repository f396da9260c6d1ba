"""Experiments and rows of the page run at their smallest size, from the first line to the last."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
from trl_templates import trl_tokenizer

from benchmarks import curriculum_samples, scheduler_overhead, turn_cost
from benchmarks.experiments import (
    branches,
    curricula,
    curricula_again,
    engine_parity,
    router_replay,
    shared_prompts,
    side_effects,
    update_growth,
)
from benchmarks.parts.update_work import TINY

pytestmark = pytest.mark.long

SMALL = replace(TINY, vocabulary=512, width=32, rows=4, turns=3, micro_rows=2)
ONE_ROUND = {
    "demonstrations": 16,
    "sft_steps": 1,
    "sft_band": (0.0, 1.0),
    "practice": 4,
    "rounds": 1,
    "tasks_per_step": 2,
    "group_size": 2,
}


@pytest.fixture
def written(monkeypatch):
    """Sections that would be written into the page: title -> body."""
    sections = {}
    for module in (shared_prompts, update_growth):
        monkeypatch.setattr(module, "write_section", sections.__setitem__)
    return sections


def test_scheduler_overhead(monkeypatch):
    monkeypatch.setattr(scheduler_overhead, "EPISODES", 10)
    monkeypatch.setattr(scheduler_overhead, "ROUNDS", 1)
    assert scheduler_overhead.measure().ours > 0


def test_turn_cost(monkeypatch):
    name = "0.4M model, as in the demo"
    monkeypatch.setattr(turn_cost, "SHAPES", {name: turn_cost.SHAPES[name]})
    (row,) = turn_cost.measure(1)
    assert row.ours > 0 and row.theirs > 0


@pytest.mark.parametrize("name", ["update_memory", "update_tokens"])
def test_an_update_row(monkeypatch, name):
    module = importlib.import_module(f"benchmarks.{name}")
    for work in ("TINY", "REAL"):
        monkeypatch.setattr(module, work, SMALL)
    assert module.measure(1).ours > 0


def test_shared_prompts(monkeypatch, written):
    small = {"GROUPS": 2, "EPISODES": 2, "STEPS": 1, "PAIRS": 1, "SHAPES": ((16, 8),)}
    for name, value in small.items():
        monkeypatch.setattr(shared_prompts, name, value)
    shared_prompts.main()
    assert "| 16 | 8 |" in written["Common beginnings read once"]


def test_update_growth(monkeypatch, written):
    monkeypatch.setattr(update_growth, "PAIRS", 1)
    monkeypatch.setattr(update_growth, "workloads", lambda: iter([("small", SMALL)]))
    update_growth.main()
    assert written["How the update grows"].count("\n") >= 2


def test_engine_parity():
    found = engine_parity.measure("transformers", engine_parity.TEMPLATES[0], 1)
    assert found._asdict()


def test_router_replay():
    assert list(router_replay.measure(next(iter(router_replay.FAMILIES)), 1))


def test_side_effects(monkeypatch, tmp_path):
    plan = replace(side_effects.PLAN, held_out=2, **ONE_ROUND)
    monkeypatch.setattr(side_effects, "PLAN", plan)
    for arm in side_effects.ARMS:
        assert side_effects.summary(side_effects.measure(tmp_path, 0, arm))["rounds"] == 1
    assert side_effects.picture(tmp_path).startswith("<svg")


def test_curricula_again(tmp_path):
    plan = curricula_again.PLANS["calc"]
    small = replace(plan, demo=replace(plan.demo, **ONE_ROUND), pool=8, held_out=2)
    result = curricula_again.compare(tmp_path, "calc", small, [0])
    assert set(result["episodes"]) == set(curricula_again.ARMS)


def test_curricula_and_its_row(monkeypatch, tmp_path, bubblewrap):
    monkeypatch.setattr(curricula, "PLAN", replace(curricula.PLAN, **ONE_ROUND))
    monkeypatch.setattr(curriculum_samples, "FOLDER", tmp_path)
    monkeypatch.setattr(curriculum_samples, "SEEDS", (0,))
    assert curriculum_samples.measure().n == 1
    assert "<svg" in curricula.picture(tmp_path, [0])


def test_branches(monkeypatch, tmp_path, capsys):
    path = tmp_path / "qwen3.jinja"
    path.write_text(trl_tokenizer("qwen3").chat_template)
    monkeypatch.setattr(branches, "EPISODES", 1)
    branches.main([str(path)])
    assert len(capsys.readouterr().out.splitlines()) == 3
