"""Episodes as plain rows of JSON values, and back: the shape of a line of `episodes.jsonl`."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from agentrl.trajectory import (
    CallEvent,
    Counts,
    Episode,
    EpisodeKey,
    Segment,
    SegmentKind,
    Trajectory,
)
from agentrl.types import BadCall, EndReason, Message, Score, TaskView, ToolCall

Row = dict[str, Any]
_MOST_EXPERTS = 1 << 14
"""Layers with a router times experts of a token; large models have a thousand."""


def episode_row(episode: Episode, *, experts: bool = False) -> Row:
    """The row of an episode; a segment that branches share stands once.

    Args:
        experts: write which experts the tokens went to, where that is known.
    """
    segments: dict[Segment, int] = {}
    trajectories = [
        {
            "segments": [segments.setdefault(part, len(segments)) for part in branch.segments],
            "shared": branch.shared,
            **(_experts_row(branch.experts) if experts and branch.experts is not None else {}),
        }
        for branch in episode.trajectories
    ]
    task, score, counts = episode.task, episode.score, episode.counts
    return {
        "key": episode.key._asdict(),
        "seed": episode.seed,
        "version": episode.version,
        "env": episode.env,
        "task": _task_row(task),
        "start": episode.start,
        "end": episode.end.value,
        "score": _score_row(score),
        "counts": {**vars(counts), "by_tool": dict(counts.by_tool)},
        "messages": messages_row(episode.messages),
        "segments": [_segment_row(segment) for segment in segments],
        "trajectories": trajectories,
        "artifacts": {path: _content_row(content) for path, content in episode.artifacts.items()},
        "side_effects": None if episode.side_effects is None else dict(episode.side_effects),
        **({"events": [asdict(event) for event in episode.events]} if episode.events else {}),
        "failure": episode.failure,
    }


def key_of(row: Row) -> EpisodeKey:
    """The key of a row; records of format 2 and older call the round `step`."""
    return EpisodeKey(**{"round" if name == "step" else name: row[name] for name in row})


def _task_row(task: TaskView) -> Row:
    row = {name: getattr(task, name) for name in TaskView.model_fields if name != "sandbox"}
    if task.sandbox is not None:
        row["sandbox"] = task.sandbox.model_dump(mode="json", exclude_defaults=True)
    return row


def _score_row(score: Score) -> Row:
    row: Row = {"value": score.value, "parts": dict(score.parts), "why": score.why}
    if score.turns:
        row["turns"] = {name: list(rewards) for name, rewards in score.turns.items()}
    if score.unshaped is not None:
        row["unshaped"] = score.unshaped
    return row


def messages_row(messages: Sequence[Message]) -> list[Row]:
    """The rows of messages."""
    return [_message_row(message) for message in messages]


def _message_row(message: Message) -> Row:
    row: Row = {"role": message.role, "content": message.content}
    if message.tool_calls:
        row["tool_calls"] = [
            {"name": call.name, "arguments": dict(call.arguments), "id": call.id}
            if isinstance(call, ToolCall)
            else {"bad": call.text, "why": call.why}
            for call in message.tool_calls
        ]
    for name in ("name", "tool_call_id", "reasoning"):
        if text := getattr(message, name):
            row[name] = text
    return row


def _segment_row(segment: Segment) -> Row:
    row: Row = {"kind": segment.kind.value, "ids": segment.ids}
    if segment.kind is SegmentKind.SAMPLED:
        row.update(logprobs=segment.logprobs, version=segment.version, finish=segment.finish)
    return row


def _experts_row(experts: Any) -> Row:
    """An array of small integers as text: its numbers, little-endian, compressed by zlib."""
    plain = experts.astype(experts.dtype.newbyteorder("<"), order="C")
    text = base64.b64encode(zlib.compress(plain.tobytes())).decode()
    kind = plain.dtype.str.lstrip("|<")
    return {"experts": {"shape": plain.shape, "dtype": kind, "zlib": text}}


def _experts(row: Row | None, tokens: int) -> Any:
    """The array, of at most so many tokens; never more memory than its shape says."""
    if row is None:
        return None
    import numpy as np

    if row["dtype"] not in ("u1", "u2"):
        raise ValueError(f"experts are of dtype u1 or u2, not {row['dtype']!r}")
    match row["shape"]:
        case [int(n), int(layers), int(each)] if (
            0 <= n <= tokens and 0 <= layers * each <= _MOST_EXPERTS and layers >= 0
        ):
            size = n * layers * each * int(row["dtype"][1])
        case shape:
            raise ValueError(
                f"experts of shape {shape} are not those of {tokens} tokens, with at most"
                f" {_MOST_EXPERTS} a token"
            )
    unpacking = zlib.decompressobj()
    plain = unpacking.decompress(base64.b64decode(row["zlib"], validate=True), size + 1)
    if len(plain) != size or not unpacking.eof:
        raise ValueError(f"experts of shape {row['shape']} do not unpack to {size} bytes")
    return np.frombuffer(plain, f"<{row['dtype']}").reshape(row["shape"])


def _content_row(content: bytes) -> Row:
    try:
        return {"text": content.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}


def episode_of(row: Row) -> Episode:
    """The episode of a row.

    Raises:
        KeyError, TypeError, ValueError, IndexError, zlib.error: the row is not one of ours.
    """
    segments = [_segment(item) for item in row["segments"]]
    return Episode(
        key=key_of(row["key"]),
        seed=row.get("seed", 0),
        version=row.get("version"),
        env=row["env"],
        task=TaskView(**row["task"]),
        start=row["start"],
        messages=tuple(message_of(item) for item in row["messages"]),
        end=EndReason(row["end"]),
        score=_score(row["score"]),
        trajectories=tuple(
            Trajectory(
                tuple(segments[index] for index in item["segments"]),
                item["shared"],
                _experts(
                    item.get("experts"), sum(len(segments[index].ids) for index in item["segments"])
                ),
            )
            for item in row["trajectories"]
        ),
        counts=Counts(**row["counts"]),
        artifacts={path: _content(item) for path, item in row["artifacts"].items()},
        side_effects=row["side_effects"],
        events=tuple(
            CallEvent(**{**event, "taint": tuple(event["taint"])})
            for event in row.get("events", ())
        ),
        failure=row["failure"],
    )


def _score(row: Row) -> Score:
    turns = {name: tuple(rewards) for name, rewards in row.pop("turns", {}).items()}
    return Score(**row, turns=turns)


def message_of(row: Row) -> Message:
    """The message of a row; the row is used up.

    Raises:
        KeyError, TypeError, ValueError: the row is not one of ours.
    """
    calls = tuple(
        BadCall(call["bad"], call["why"]) if "bad" in call else ToolCall(**call)
        for call in row.pop("tool_calls", ())
    )
    return Message(**row, tool_calls=calls)


def _segment(row: Row) -> Segment:
    return Segment(
        SegmentKind(row["kind"]),
        tuple(row["ids"]),
        tuple(row.get("logprobs", ())),
        row.get("version", -1),
        row.get("finish"),
    )


def _content(row: Row) -> bytes:
    return (
        base64.b64decode(row["base64"], validate=True) if "base64" in row else row["text"].encode()
    )
