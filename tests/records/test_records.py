"""Records: lossless, last key wins, and a crash costs at most the line it tore."""

from __future__ import annotations

import base64
import copy
import json
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from record_cases import episodes, simple, write

from agentrl.errors import ContractError, UserError
from agentrl.records.files import (
    EpisodeFile,
    EpisodeWriter,
    RecordWarning,
    iter_episodes,
    read_episodes,
    set_aside,
)
from agentrl.records.rows import episode_of, episode_row
from agentrl.trajectory import EpisodeKey, Segment, Trajectory
from agentrl.types import Message, Score, TaskView, ToolCall


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
    assert row["v"] == 3
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


def test_an_episode_is_read_again_by_its_key(tmp_path):
    path = tmp_path / "e.jsonl"
    write(path, simple(0, 0.0), simple(1, 0.25), simple(0, 0.5))
    with path.open("ab") as file:
        file.write(b"\n\n{torn")
    episodes = EpisodeFile(path)
    with pytest.warns(RecordWarning, match="torn"):
        seen = list(episodes)
    assert [one.reward for one in seen] == [0.0, 0.25, 0.5]
    assert episodes.read([seen[1].key, seen[0].key]) == {seen[1].key: seen[1], seen[0].key: seen[2]}
    with pytest.raises(KeyError):
        EpisodeFile(path).read([seen[0].key])


def test_a_file_that_was_replaced_meanwhile_is_not_read_by_old_places(tmp_path):
    path = tmp_path / "e.jsonl"
    write(path, simple(0, 0.0), simple(1, 0.5))
    episodes = EpisodeFile(path)
    keys = [one.key for one in episodes]
    set_aside(path, lambda row: row["key"]["sample"] == 0)
    write(path, simple(0, 0.0))
    with pytest.raises(UserError, match="was replaced while it was read"):
        episodes.read(keys)
    path.unlink()
    with pytest.raises(UserError, match="was replaced while it was read"):
        episodes.read(keys)
    write(path, simple(0, 0.0), simple(1, 0.5))
    write(path, simple(1, 1.0))
    assert [one.reward for one in episodes.read(keys).values()] == [0.0, 0.5], "as it was iterated"
    assert [one.reward for one in episodes] == [0.0, 0.5, 1.0]
    assert [one.reward for one in episodes.read(keys).values()] == [0.0, 1.0]


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


@pytest.mark.parametrize(
    ("shape", "size", "said"),
    [
        ((4, 2, 2), 1 << 24, "do not unpack to 16 bytes"),
        ((4, 2, 2), 15, "do not unpack to 16 bytes"),
        ((4, 1 << 12, 1 << 12), 1 << 26, "at most 16384 a token"),
        ((5, 2, 2), 20, "not those of 4 tokens"),
        ((4, -1, -2), 8, "not those of 4 tokens"),
        ((16,), 16, "not those of 4 tokens"),
    ],
)
def test_experts_take_no_more_memory_than_their_shape_says(shape, size, said):
    branch = Trajectory((Segment.prompt((1, 2, 3, 4)),), experts=np.ones((4, 2, 2), np.uint8))
    episode = simple(trajectories=(branch,))
    row = json.loads(json.dumps(episode_row(episode, experts=True)))
    (read,) = episode_of(copy.deepcopy(row)).trajectories
    assert (read.experts == branch.experts).all()
    text = base64.b64encode(zlib.compress(bytes(size))).decode()
    row["trajectories"][0]["experts"] = {"shape": list(shape), "dtype": "u1", "zlib": text}
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=said):
            episode_of(row)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


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
