"""Trackers: the real libraries where they are installed, and one sentence where they are not."""

from __future__ import annotations

import importlib
import json
import math
import sys

import pytest

from agentrl.errors import ConfigError
from agentrl.trainers.observe import trackers
from agentrl.trainers.observe.trackers import TRACKERS, numbers, open_trackers

ROWS = [
    {"step": 1, "reward/mean": 0.25, "policy/kl": math.nan, "note": "text"},
    {"step": 2, "reward/mean": 0.5, "episodes/total": 16},
]


def log_all(opened):
    for tracker in opened:
        for row in ROWS:
            tracker.log(row["step"], row)
        tracker.close()
        tracker.close()


def test_only_finite_numbers_are_shown():
    assert numbers(ROWS[0]) == {"reward/mean": 0.25}
    assert numbers({"step": 3, "a": 1, "b": math.inf, "c": None, "d": [1]}) == {"a": 1.0}


@pytest.mark.filterwarnings("default")
def test_tensorboard_writes_what_its_own_reader_reads(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_all(open_trackers(["tensorboard"], tmp_path / "run", {"steps": 2}))
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("reward/mean")] == [
        (1, 0.25),
        (2, 0.5),
    ]
    assert "policy/kl" not in found.Tags()["scalars"] and "note" not in found.Tags()["scalars"]
    assert found.Tags()["tensors"] == ["config/text_summary"]


@pytest.mark.filterwarnings("default")
def test_wandb_writes_a_run_without_a_network(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tmp_path / "run").mkdir()
    opened = open_trackers(["wandb"], tmp_path / "run", {"steps": 2})
    logged = wandb.run.id, wandb.run.name, wandb.run.project, dict(wandb.run.config)
    log_all(opened)
    assert logged == ((tmp_path / "run" / "wandb-id").read_text(), "run", "agentrl", {"steps": 2})
    (file,) = (tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb")
    assert b"reward/mean" in file.read_bytes() and wandb.run is None
    again = open_trackers(["wandb"], tmp_path / "run", {})
    assert wandb.run.id == logged[0]
    log_all(again)


@pytest.mark.filterwarnings("default")
def test_trackio_keeps_a_run_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    pytest.importorskip("trackio")
    log_all(open_trackers(["trackio"], tmp_path / "run", {"steps": 2}))
    from trackio.sqlite_storage import SQLiteStorage

    logs = SQLiteStorage.get_logs("agentrl", "run")
    assert [(row["step"], row["reward/mean"]) for row in logs] == [(1, 0.25), (2, 0.5)]


class Fake:
    """A library with the interface that W&B and Trackio share."""

    def __init__(self):
        self.started, self.rows, self.finished = {}, [], 0

    def init(self, **settings):
        self.started = settings
        return self

    def log(self, row, step):
        self.rows.append((step, row))

    def finish(self):
        self.finished += 1


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_rows_reach_the_library_and_the_run_ends_once(name, tmp_path, monkeypatch):
    library = Fake()
    monkeypatch.setitem(sys.modules, name, library)
    log_all(open_trackers([name, name], tmp_path, {"steps": 2}))
    assert library.rows == [
        (1, {"reward/mean": 0.25}),
        (2, {"reward/mean": 0.5, "episodes/total": 16.0}),
    ]
    assert library.finished == 1 and library.started["config"] == {"steps": 2}
    assert library.started["name"] == tmp_path.name and json.dumps(library.started)


@pytest.mark.parametrize("name", TRACKERS)
def test_a_library_that_is_missing_is_named_with_its_command(name, tmp_path, monkeypatch):
    def missing(module):
        raise ModuleNotFoundError(f"No module named {module!r}")

    monkeypatch.setattr(trackers, "import_module", missing)
    with pytest.raises(
        ConfigError, match=f"tracker '{name}' needs a library .*: pip install {name}$"
    ):
        open_trackers([name], tmp_path, {})
    assert importlib.import_module("json")


def test_a_name_that_is_none_gets_the_nearest_before_anything_is_opened(tmp_path, monkeypatch):
    library = Fake()
    monkeypatch.setitem(sys.modules, "wandb", library)
    with pytest.raises(
        ConfigError, match="there is no tracker 'tensorbord'; did you mean 'tensorboard'"
    ):
        open_trackers(["wandb", "tensorbord"], tmp_path, {})
    assert library.started == {}


def test_none_is_left_open_when_one_cannot_be(tmp_path, monkeypatch):
    library = Fake()
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.setitem(sys.modules, "trackio", object())  # it has no `init`
    with pytest.raises(AttributeError, match="init"):
        open_trackers(["wandb", "trackio"], tmp_path, {})
    assert library.finished == 1
    assert open_trackers([], tmp_path, {}) == []
