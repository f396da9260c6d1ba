"""Pairs and labels from recorded episodes: of one task, those that passed against those that
failed.

The tokens stay as they were sampled, and the mask is the trajectory's own: observations never
train.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from agentrl.errors import UserError
from agentrl.records.files import read_episodes
from agentrl.registry import factory
from agentrl.trainers.offline.data.nouns import Conversation, Example, Kind, Label, Pair, Response
from agentrl.trajectory import Episode, Trajectory
from agentrl.types import Message, ToolSpec


@dataclass(frozen=True)
class Mined:
    """What some episodes held.

    Attributes:
        episodes: all that were read.
        unanimous: tasks whose scored episodes all passed or all failed: they prefer nothing.
    """

    examples: list[Example]
    episodes: int
    unanimous: int


def mine(path: Path, kind: Kind) -> Mined:
    """Examples of a kind from an `episodes.jsonl`.

    Pairs join a passed and a failed episode of one task, environment and start state; each episode
    stands in one pair at most. Labels say whether an episode passed; conversations are those that
    did. Episodes that infrastructure failed say nothing, and neither do those of more than one
    branch of history.

    Raises:
        UserError: no episode can be used.
    """
    if kind == "steps":
        raise UserError(
            f"{path}: its turns have no labels: make them by `agentrl label {path.parent} --policy"
            " hf:MODEL`, and give its labels.jsonl"
        )
    read = list(read_episodes(path).values())
    usable = [one for one in read if one.passed is not None and _spoke(one)]
    if not usable:
        raise UserError(f"{path}: none of {len(read)} episodes can be used: {_reasons(read)}")
    if kind == "conversations":
        passed = [as_conversation(one) for one in usable if one.passed]
        return Mined(list(passed), len(read), 0)
    if kind == "labels":
        labels = [Label(opening_of(one), _response(one), bool(one.passed)) for one in usable]
        return Mined(list(labels), len(read), 0)
    groups: dict[tuple[str, str, str], list[Episode]] = defaultdict(list)
    for one in usable:
        groups[one.env, one.task.id, one.start].append(one)
    pairs = [pair for group in groups.values() for pair in _pairs(group)]
    split = sum(len({bool(one.passed) for one in group}) == 2 for group in groups.values())
    return Mined(list(pairs), len(read), len(groups) - split)


def _reasons(read: list[Episode]) -> str:
    """Why no episode can be used, and what to do."""
    scored = [one for one in read if one.passed is not None]
    branched = sum(len(one.trajectories) > 1 for one in scored)
    counts = {
        "have no score, because infrastructure failed (see `failure` in their rows, then play them"
        " again)": len(read) - len(scored),
        "hold several branches of history (only online training learns from those)": branched,
        "hold no words of the policy (see their `end`)": len(scored) - branched,
    }
    return "; ".join(f"{count} {why}" for why, count in counts.items() if count) or "it is empty"


def _pairs(group: list[Episode]) -> list[Pair]:
    passed = [one for one in group if one.passed]
    failed = [one for one in group if not one.passed]
    return [
        Pair(opening_of(good), _response(good), _response(bad))
        for good, bad in zip(passed, failed, strict=False)
        if opening_of(good) == opening_of(bad) and _response(good) != _response(bad)
    ]


def opening_of(episode: Episode) -> tuple[Message, ...]:
    """What an episode's policy was asked: all before its first turn."""
    messages = episode.messages
    first = next(i for i, message in enumerate(messages) if message.role == "assistant")
    return messages[:first]


def as_conversation(episode: Episode) -> Conversation:
    """What an episode's policy said, to be imitated."""
    return Conversation(until_last_turn(episode), *_tokens_of(episode))


def _response(episode: Episode) -> Response:
    after = until_last_turn(episode)[len(opening_of(episode)) :]
    return Response(after, *_tokens_of(episode))


def _tokens_of(episode: Episode) -> tuple[Trajectory | None, tuple[ToolSpec, ...]]:
    """The recorded tokens; for a policy that spoke messages, the tools that its prompt shows."""
    if episode.trajectories:
        return episode.trajectories[0], ()
    return None, _tools(episode.env)


@cache
def _tools(env: str) -> tuple[ToolSpec, ...]:
    return tuple(factory(env)().tools)


def until_last_turn(episode: Episode) -> tuple[Message, ...]:
    """An episode up to its last turn: what the world answered after it teaches nothing."""
    messages = episode.messages
    last = max(i for i, message in enumerate(messages) if message.role == "assistant")
    return messages[: last + 1]


def _spoke(episode: Episode) -> bool:
    """Whether there is a turn to learn from, in one branch."""
    turns = [message for message in episode.messages if message.role == "assistant"]
    said = bool(turns) and bool(turns[-1].content.strip() or turns[-1].tool_calls)
    return said and len(episode.trajectories) <= 1
