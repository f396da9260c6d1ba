"""Records: lossless, last key wins, and a crash costs at most the line it tore."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings

import pytest
from helpers import process, wait_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.errors import ContractError, UserError
from agentrl.records.files import (
    EpisodeWriter,
    MetricsWriter,
    RecordWarning,
    iter_episodes,
    read_episodes,
    read_metrics,
    set_aside,
    write_json_atomic,
)
from agentrl.trajectory import Counts, Episode, EpisodeKey, Segment, Trajectory
from agentrl.types import BadCall, Ending, EndReason, Message, Score, TaskView, ToolCall

FINITE = st.floats(allow_nan=False, allow_infinity=False)
CLEAN = st.text(max_size=12)
TURNS = st.dictionaries(st.text(max_size=12), st.lists(FINITE, max_size=3).map(tuple), max_size=2)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | CLEAN
    | st.sampled_from(["\ud800", "\x00"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(CLEAN, inner, max_size=3),
    max_leaves=6,
)
OBJECT = st.dictionaries(CLEAN, JSON, max_size=3)
PATHS = st.from_regex(r"[a-zé][a-z0-9_]{0,6}(/[a-z]{1,4})?\.py", fullmatch=True)
IDS = st.lists(st.integers(0, 200_000), max_size=6)
CALLS = st.builds(ToolCall, CLEAN, OBJECT, CLEAN) | st.builds(BadCall, CLEAN, CLEAN)
MESSAGES = st.builds(
    Message,
    st.sampled_from(["system", "user", "tool"]),
    CLEAN,
    name=CLEAN,
    tool_call_id=CLEAN,
    reasoning=CLEAN,
) | st.builds(
    Message,
    st.just("assistant"),
    CLEAN,
    tool_calls=st.lists(CALLS, max_size=3).map(tuple),
    reasoning=CLEAN,
)


@st.composite
def sampled(draw):
    logprobs = draw(st.lists(st.floats(-1e6, 1e-5), min_size=1, max_size=6))
    ids = draw(st.lists(st.integers(0, 200_000), min_size=len(logprobs), max_size=len(logprobs)))
    return Segment.sampled(
        ids, logprobs, draw(st.integers(0, 99)), draw(st.sampled_from(["stop", "length"]))
    )


LATER = st.lists(sampled() | IDS.map(Segment.observation), max_size=4)


@st.composite
def branches(draw):
    result = []
    for _ in range(draw(st.integers(0, 3))):
        if result and draw(st.booleans()):
            parent = draw(st.sampled_from(result))
            branch = parent.fork(draw(st.integers(1, len(parent.segments))))
        else:
            branch = Trajectory((Segment.prompt(draw(IDS)),))
        result.append(branch.extend(*draw(LATER)))
    return tuple(result)


@st.composite
def episodes(draw):
    end = draw(st.sampled_from(EndReason))
    failed = end.ending is Ending.FAILED
    parts = draw(st.dictionaries(CLEAN, st.floats(allow_nan=False), max_size=3))
    return Episode(
        key=EpisodeKey(
            draw(CLEAN),
            draw(st.integers()),
            draw(CLEAN),
            draw(st.integers()),
            draw(st.integers(0, 3)),
        ),
        env=draw(CLEAN),
        task=TaskView(
            id=draw(st.text(min_size=1, max_size=5)),
            instruction=draw(CLEAN),
            files=draw(st.dictionaries(PATHS, CLEAN, max_size=2)),
            artifacts=draw(st.lists(PATHS, max_size=2).map(tuple)),
            threshold=draw(FINITE),
            seed=draw(st.integers()),
            metadata=draw(OBJECT),
        ),
        start=draw(CLEAN),
        messages=draw(st.lists(MESSAGES, max_size=4).map(tuple)),
        end=end,
        score=Score(None, parts, "it broke")
        if failed
        else Score(draw(FINITE), parts, draw(CLEAN), draw(TURNS)),
        trajectories=draw(branches()),
        counts=Counts(
            turns=draw(st.integers(0)),
            wall_s=draw(FINITE),
            usd=draw(st.none() | FINITE),
            by_tool=draw(st.dictionaries(CLEAN, st.integers())),
        ),
        artifacts=draw(
            st.dictionaries(PATHS, st.binary(max_size=8) | CLEAN.map(str.encode), max_size=3)
        ),
        side_effects=draw(st.none() | st.dictionaries(CLEAN, CLEAN, max_size=2)),
        failure=draw(CLEAN),
    )


def simple(sample=0, reward=1.0, **changes):
    fields = {
        "key": EpisodeKey("run", 0, "task", sample),
        "env": "calc-v0",
        "task": TaskView(id="task", instruction="add"),
        "start": "s",
        "messages": (Message.user("add"), Message.assistant("3")),
        "end": EndReason.ANSWERED,
        "score": Score(reward),
    }
    return Episode(**{**fields, **changes})


def write(path, *episodes):
    with EpisodeWriter(path) as writer:
        for episode in episodes:
            writer.write(episode)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(episodes())
def test_an_episode_comes_back_as_it_was(tmp_path_factory, episode):
    path = tmp_path_factory.mktemp("records") / "episodes.jsonl"
    write(path, episode)
    (read,) = iter_episodes(path)
    assert read == episode
    assert read_episodes(path) == {episode.key: episode}
    assert isinstance(read.key, EpisodeKey)
    (line,) = path.read_bytes().splitlines(keepends=True)
    assert line.endswith(b"\n")
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not strict JSON"))


def test_nonfinite_numbers_and_lone_surrogates_come_back(tmp_path):
    call = ToolCall(
        "f",
        {
            "x": float("nan"),
            "y": [float("inf"), {"z": -float("inf")}],
            "s": "\udc80",
            "nonfinite": 1,
        },
    )
    write(
        tmp_path / "e.jsonl",
        simple(messages=(Message.assistant("", call),), score=Score(0.0, {"kl": float("inf")})),
    )
    (read,) = iter_episodes(tmp_path / "e.jsonl")
    arguments = read.messages[0].tool_calls[0].arguments
    assert arguments["x"] != arguments["x"]
    assert arguments["y"] == [float("inf"), {"z": -float("inf")}] and arguments["s"] == "\udc80"
    assert arguments["nonfinite"] == 1 and read.score.parts == {"kl": float("inf")}


def test_a_shared_segment_is_stored_once(tmp_path):
    main = Trajectory((Segment.prompt([70001, 70002]), Segment.sampled([70003], [-0.5], 3, "stop")))
    branch = main.fork().extend(Segment.observation([70004]))
    copy = Trajectory(
        tuple(Segment(s.kind, s.ids, s.logprobs, s.version, s.finish) for s in branch.segments), 2
    )
    write(tmp_path / "e.jsonl", simple(trajectories=(main, copy)))
    line = (tmp_path / "e.jsonl").read_text()
    assert line.count("70001") == line.count("70003") == line.count("70004") == 1
    (read,) = iter_episodes(tmp_path / "e.jsonl")
    assert read.trajectories == (main, branch)
    assert read.trajectories[0].segments[0] is read.trajectories[1].segments[0]


def test_artifacts_are_text_where_they_can_be(tmp_path):
    write(tmp_path / "e.jsonl", simple(artifacts={"a.py": "é\r\n".encode(), "b.bin": b"\xff\x00"}))
    row = json.loads((tmp_path / "e.jsonl").read_text())
    assert row["v"] == 2
    assert row["artifacts"] == {"a.py": {"text": "é\r\n"}, "b.bin": {"base64": "/wA="}}


def test_the_last_record_of_a_key_counts(tmp_path):
    path = tmp_path / "deep" / "episodes.jsonl"
    write(path, simple(0, 0.0), simple(1, 0.5))
    write(path, simple(0, 1.0))
    assert [episode.reward for episode in iter_episodes(path)] == [0.0, 0.5, 1.0]
    assert {key.sample: episode.reward for key, episode in read_episodes(path).items()} == {
        0: 1.0,
        1: 0.5,
    }


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
        (b'{"v":1}\n', "e.jsonl:2 is not a record .*KeyError"),
        (b'{"v":3}\n', "e.jsonl:2 has format version 3 .*upgrade"),
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


def test_records_of_version_1_are_read_and_their_side_effects_were_not_measured(tmp_path):
    path = tmp_path / "e.jsonl"
    write(path, simple(0), simple(1, side_effects={}), simple(2, side_effects={"a.py": "changed"}))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["v"], row["side_effects"] = 1, row["side_effects"] or {}
        del row["counts"]["denied"]
    old = tmp_path / "old.jsonl"
    old.write_text("".join(json.dumps(row) + "\n" for row in rows))
    now, then = ([e.side_effects for e in iter_episodes(file)] for file in (path, old))
    assert now == [None, {}, {"a.py": "changed"}]
    assert then == [None, None, {"a.py": "changed"}]
    assert [episode.counts.denied for episode in iter_episodes(old)] == [0, 0, 0]


def test_an_invalid_episode_is_not_read(tmp_path):
    path = tmp_path / "e.jsonl"
    write(path, simple(0))
    path.write_text(path.read_text().replace('"answered"', '"sandbox_lost"'))
    with pytest.raises(UserError, match=r"e\.jsonl:1 .*does not go with score"):
        read_episodes(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match="no records at"):
        read_episodes(tmp_path / "none.jsonl")


def test_what_json_cannot_say_is_refused_and_leaves_no_trace(tmp_path):
    path = tmp_path / "e.jsonl"
    with EpisodeWriter(path) as writer:
        with pytest.raises(ContractError, match="cannot be written as JSON"):
            writer.write(simple(task=TaskView(id="t", instruction="", metadata={"x": {1, 2}})))
        loop: list = []
        loop.append(loop)
        with pytest.raises(ContractError, match="cannot be written as JSON"):
            writer.write(
                simple(
                    task=TaskView.model_construct(
                        **{**dict(simple().task), "metadata": {"x": loop}}
                    )
                )
            )
        writer.write(simple())
    assert len(read_episodes(path)) == 1
    with pytest.raises(ValueError, match="closed"):
        writer.write(simple())


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


def test_writing_an_episode_is_cheap(tmp_path):
    """Median over 300 episodes of 300 tokens, in processor time: others may be at work, too."""
    turns = []
    for turn in range(5):
        turns.append(
            Segment.sampled(
                range(30), [-(turn + 1) / (token + 3) for token in range(30)], 7, "stop"
            )
        )
        turns.append(Segment.observation(range(1000, 1024)))
    branch = Trajectory((Segment.prompt(range(30)), *turns))
    assert len(branch.ids) == 300
    episode = simple(trajectories=(branch,))
    seconds = []
    with EpisodeWriter(tmp_path / "e.jsonl") as writer:
        for _ in range(300):
            begun = time.process_time()
            writer.write(episode)
            seconds.append(time.process_time() - begun)
    assert sorted(seconds)[150] < 0.001
    print(f"median {sorted(seconds)[150] * 1e3:.3f} ms")


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
