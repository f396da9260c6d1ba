"""Files of records under torn lines, full disks and killed writers, and files of metrics."""

from __future__ import annotations

import json
import os
import sys
import warnings

import pytest
from helpers import process, wait_for
from record_cases import simple, write

from agentrl.errors import ContractError, UserError
from agentrl.records.files import (
    EpisodeWriter,
    MetricsWriter,
    RecordWarning,
    read_episodes,
    read_metrics,
    set_aside,
    write_json_atomic,
)


def test_a_line_torn_at_any_byte_is_set_aside(tmp_path):
    path = tmp_path / "episodes.jsonl"
    write(path, simple(0), simple(1))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first + 1, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.warns(RecordWarning, match=r"episodes\.jsonl:2: the last line is torn"):
            assert len(read_episodes(path)) == 1
        with (
            pytest.warns(RecordWarning, match=r"episodes\.jsonl:2: .*episodes\.jsonl\.torn"),
            EpisodeWriter(path) as writer,
        ):
            writer.write(simple(2))
        assert [key.sample for key in read_episodes(path)] == [0, 2]
        side = path.with_name("episodes.jsonl.torn")
        assert side.read_bytes() == whole[first:cut] + b"\n"
        side.unlink()


def test_a_whole_last_line_without_newline_is_a_record(tmp_path):
    path = tmp_path / "episodes.jsonl"
    write(path, simple(0))
    path.write_bytes(path.read_bytes()[:-1])
    assert len(read_episodes(path)) == 1
    write(path, simple(1))
    assert len(read_episodes(path)) == 2


def test_a_file_that_holds_only_a_torn_line(tmp_path):
    path = tmp_path / "episodes.jsonl"
    path.write_bytes(b'{"v":1,"key":["r')
    with pytest.warns(RecordWarning, match=":1:"):
        EpisodeWriter(path).close()
    assert path.read_bytes() == b"" and read_episodes(path) == {}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"v":1,"key"\n', "e.jsonl:2 is not a record .*delete that line"),
        (b"\xff\n", "e.jsonl:2 is not a record"),
        (b"[1]\n", "e.jsonl:2 is not a record"),
        (b'{"v":1}\n', "e.jsonl:2 is not a record .*KeyError.*; give a file of such records"),
        (b'{"v":4}\n', "e.jsonl:2 has format version 4 .*upgrade"),
        (b'{"v":1,"nonfinite":[[["x","y"],"nan"]]}\n', "e.jsonl:2 is not a record"),
    ],
)
def test_a_broken_line_elsewhere_is_named(tmp_path, line, says):
    path = tmp_path / "e.jsonl"
    write(path, simple(0))
    path.write_bytes(path.read_bytes() + line + path.read_bytes())
    with pytest.raises(UserError, match=says) as caught:
        read_episodes(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match="no records at"):
        read_episodes(tmp_path / "none.jsonl")


def test_a_full_disk_leaves_the_file_at_its_last_whole_line(tmp_path, monkeypatch):
    path = tmp_path / "e.jsonl"
    real = os.write
    with EpisodeWriter(path, fsync=True) as writer:
        writer.write(simple(0))
        calls = []

        def failing(file, data):
            calls.append(data)
            if len(calls) == 2:
                raise OSError(28, "No space left on device")
            return real(file, data[:10])

        monkeypatch.setattr(os, "write", failing)
        with pytest.raises(OSError, match="No space"):
            writer.write(simple(1))
        monkeypatch.undo()
        writer.write(simple(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [key.sample for key in read_episodes(path)] == [0, 2]


KILLED = """
import sys
from agentrl.records.files import MetricsWriter
with MetricsWriter(sys.argv[1]) as writer:
    print("ready", flush=True)
    for step in range(10**9):
        writer.write({"step": step, "filler": "x" * 3000})
"""


def test_a_killed_writer_loses_nothing_it_had_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with process(sys.executable, "-c", KILLED, path) as writer:
        assert writer.stdout.readline() == b"ready\n"
        wait_for(lambda: path.stat().st_size > 100_000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordWarning)
        with MetricsWriter(path) as writer:
            done = len(read_metrics(path))
            writer.write({"step": done})
    steps = [row["step"] for row in read_metrics(path)]
    assert done > 0 and steps == list(range(done + 1))


def test_metrics_keep_the_last_record_of_a_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"step": 2, "loss": 0.1 + 0.2})
        writer.write({"step": 1, "policy/kl": float("nan"), "policy/ratio_max": float("inf")})
        writer.write({"step": 2, "loss": 1e-300, "note": "again"})
    row = json.loads(path.read_text().splitlines()[1])
    assert row["policy/kl"] is None and row["nonfinite"] == [
        [["policy/kl"], "nan"],
        [["policy/ratio_max"], "inf"],
    ]
    first, second = read_metrics(path)
    assert (
        first["step"] == 1
        and first["policy/kl"] != first["policy/kl"]
        and first["policy/ratio_max"] == float("inf")
    )
    assert second == {"step": 2, "loss": 1e-300, "note": "again"}


@pytest.mark.parametrize(
    "bad", [{}, {"step": "1"}, {"step": True}, {"step": 1, "v": 2}, {"step": 1, "x": object()}]
)
def test_metrics_refuse_what_they_cannot_hold(tmp_path, bad):
    with MetricsWriter(tmp_path / "m.jsonl") as writer, pytest.raises(ContractError):
        writer.write(bad)
    assert read_metrics(tmp_path / "m.jsonl") == []


def test_json_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "sub" / "eval.json"
    write_json_atomic(path, {"a": "é\ud800"})
    for bad in (object(), {"x": float("nan")}):
        with pytest.raises(ContractError, match=r"eval\.json"):
            write_json_atomic(path, bad)
    assert json.loads(path.read_text()) == {"a": "é\ud800"}
    assert [entry.name for entry in path.parent.iterdir()] == ["eval.json"]


def test_rows_set_aside_are_neither_lost_nor_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert set_aside(path, lambda row: True) == 0 and not list(tmp_path.iterdir())
    with MetricsWriter(path) as writer:
        for step in range(4):
            writer.write({"step": step, "loss": float("nan")})
    with path.open("ab") as file:
        file.write(b'{"v":1,"st')
    whole = path.read_bytes()
    assert set_aside(path, lambda row: row["step"] > 7) == 0 and path.read_bytes() == whole
    assert [item.name for item in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert set_aside(path, lambda row: row["step"] > 1) == 2
    with pytest.warns(RecordWarning, match="torn"):
        assert [row["step"] for row in read_metrics(path)] == [0, 1]
    assert [row["step"] for row in read_metrics(f"{path}.redone")] == [2, 3]
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"no record\n", lines[1]]))
    broken = path.read_bytes()
    with pytest.raises(UserError, match=r"metrics\.jsonl:2 is not a record"):
        set_aside(path, lambda row: False)
    assert path.read_bytes() == broken and sorted(item.suffix for item in tmp_path.iterdir()) == [
        ".jsonl",
        ".redone",
    ]
