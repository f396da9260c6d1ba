"""Tasks that were trained on, found before a held-out number is told."""

import pytest
from helpers import Echo, make_task

from agentrl.errors import TaskError
from agentrl.evaluation.overlap import find_overlap, overlap_words
from agentrl.evaluation.run import EvalPlan, EvalProgress, evaluate
from agentrl.records.taskfile import write_tasks
from agentrl.registry import factory

LONG = (
    "A shop sells {0} for three coins each and gives back one coin for every fifth piece. Say how"
    " many coins a customer pays in all who buys as many as there are days in the month of {1}"
)


def tasks_of(*rows):
    return [make_task(name, instruction=text, hidden={"answer": name}) for name, text in rows]


TRAINED = tasks_of(
    ("t0", LONG.format("pears", "May")),
    ("t1", "Add 3 and 4."),
    ("t2", "Name the capital of France."),
)


def found(*rows):
    return find_overlap(Echo(), tasks_of(*rows), "test", 0)


@pytest.fixture(autouse=True)
def splits(monkeypatch):
    monkeypatch.setattr(Echo, "tasks", lambda self, split, seed: iter(TRAINED))


def test_each_kind_is_found_once_and_other_tasks_are_not():
    got = found(
        ("same", "Add 3 and 4."),
        ("spaced", "name  the capital of\nFRANCE."),
        ("near", LONG.format("pears", "June")),
        ("other", LONG.format("apples", "June").replace("three", "nine")[:120]),
        ("new", "Add 3 and 5."),
    )
    assert {name: got[name] for name in ("exact", "normalised", "near")} == {
        "exact": 1,
        "normalised": 1,
        "near": 1,
    }
    assert got["tasks"] == ["near", "same", "spaced"] and got["n_trained"] == 3
    assert ["near", "t0", "near"] in got["pairs"]
    assert "3 of 5 tasks" in overlap_words(got)
    assert overlap_words(found(("new", "Add 3 and 5."))) == ""


def test_the_training_split_itself_and_one_split_are_not_compared():
    assert find_overlap(Echo(), TRAINED, "train", 0) is None
    one = type("One", (Echo,), {"one_split": True})
    assert find_overlap(one(), TRAINED, "test", 0) is None
    assert overlap_words(None) == ""


def test_a_file_that_was_trained_on(tmp_path):
    write_tasks(tmp_path / "train.jsonl", TRAINED)
    got = find_overlap(Echo(), TRAINED[:1], "test", 0, tmp_path / "train.jsonl")
    assert got["exact"] == 1 and got["n_trained"] == 3
    with pytest.raises(TaskError, match="no such file"):
        find_overlap(Echo(), TRAINED, "test", 0, tmp_path / "none.jsonl")


def test_an_evaluation_warns_before_it_plays():
    notes = []
    progress = EvalProgress(started=lambda total: notes.append(total), note=notes.append)
    result = evaluate(EvalPlan(Echo, "noop"), progress)
    assert "3 of 3 tasks" in notes[0] and notes[1] == 3
    assert result["overlap"]["exact"] == 3


def test_shipped_environments_keep_their_splits_apart():
    make = factory("calc-v0")
    tasks = list(zip(range(100), make().tasks("test", 0), strict=False))
    got = find_overlap(make(), [task for _, task in tasks], "test", 0)
    assert got["tasks"] == [] and got["n_trained"] == 200
