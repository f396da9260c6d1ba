"""What offline training learns from, as conversations: one response, two of them, a judged one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from agentrl.trajectory import Trajectory
from agentrl.types import Message, ToolSpec

Kind = Literal["conversations", "pairs", "labels", "steps"]
Messages = tuple[Message, ...]


@dataclass(frozen=True)
class Conversation:
    """A whole conversation; every assistant message in it may be imitated.

    Attributes:
        branch: the tokens as they were sampled, where they were recorded.
        tools: that its prompt shows, where the tokens were not recorded.
    """

    messages: Messages
    branch: Trajectory | None = None
    tools: tuple[ToolSpec, ...] = ()

    def __post_init__(self) -> None:
        if not any(message.role == "assistant" for message in self.messages):
            raise ValueError("no assistant message: there is nothing to learn")
        _refuse_empty(self.messages[-1], "the last message")

    @property
    def prompt(self) -> Messages:
        """What comes before the first assistant message."""
        first = next(i for i, message in enumerate(self.messages) if message.role == "assistant")
        return self.messages[:first]


@dataclass(frozen=True)
class Response:
    """What followed a prompt: one assistant message, or all that an agent's episode holds.

    Attributes:
        messages: after the prompt; the last assistant message is the response.
        branch: the tokens as they were sampled, where they were recorded.
        tools: that the prompt shows, where the tokens were not recorded.
    """

    messages: Messages
    branch: Trajectory | None = None
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True)
class Pair:
    """Two responses to one prompt, of which the first was preferred.

    Attributes:
        margin: by how much, where ratings or votes say so; else None.
        subset: of the file, for accuracies apart.
    """

    prompt: Messages
    chosen: Response
    rejected: Response
    margin: float | None = None
    subset: str = ""

    def __post_init__(self) -> None:
        _refuse_empty(self.chosen.messages[-1], "chosen")
        _refuse_empty(self.rejected.messages[-1], "rejected")
        _refuse_no_prompt(self.prompt)
        if self.margin is not None and not _is_finite(self.margin):
            raise ValueError(f"margin={self.margin!r} must be a finite number")
        if self.chosen == self.rejected:
            raise ValueError("chosen equals rejected: the pair says nothing")


@dataclass(frozen=True)
class Label:
    """A response that was found desirable or not, without another one beside it."""

    prompt: Messages
    response: Response
    desirable: bool

    def __post_init__(self) -> None:
        _refuse_empty(self.response.messages[-1], "the response")
        _refuse_no_prompt(self.prompt)


@dataclass(frozen=True)
class Steps:
    """A conversation whose turns were labelled, as `agentrl label` does.

    Attributes:
        opening: messages before the policy's first turn.
        labels: of each turn, the chance that an episode passes which has come so far; None where
            nobody knows.
    """

    messages: Messages
    opening: int
    labels: tuple[float | None, ...]

    def __post_init__(self) -> None:
        turns = sum(message.role == "assistant" for message in self.messages[self.opening :])
        if turns != len(self.labels):
            raise ValueError(f"{len(self.labels)} labels for {turns} turns")
        if any(one is not None and not 0 <= one <= 1 for one in self.labels):
            raise ValueError("labels are not from 0 to 1")
        if all(one is None for one in self.labels):
            raise ValueError("no turn has a label: there is nothing to learn")

    @property
    def prompt(self) -> Messages:
        """What comes before the policy's first turn."""
        return self.messages[: self.opening]


Example = Conversation | Pair | Label | Steps


def asks_for_one_turn(example: Example) -> bool:
    """Whether a prompt is answered by text alone: agents' episodes are played in environments."""
    said: Conversation | Response
    match example:
        case Steps():
            return False
        case Conversation():
            said = example
        case Pair():
            said = example.chosen
        case Label():
            said = example.response
    return said.branch is None and not said.tools


def as_conversations(examples: list[Example]) -> Iterator[Conversation]:
    """What may be imitated: whole conversations, chosen and desirable responses."""
    for one in examples:
        match one:
            case Conversation():
                yield one
            case Pair():
                yield _imitable(one.prompt, one.chosen)
            case Label(desirable=True):
                yield _imitable(one.prompt, one.response)


def as_steps(examples: list[Example]) -> Iterator[Steps]:
    """Conversations whose turns have labels."""
    return (one for one in examples if isinstance(one, Steps))


def as_labels(examples: list[Example]) -> Iterator[Label]:
    """Labels as they are; a pair is a desirable response and an undesirable one."""
    for one in examples:
        match one:
            case Label():
                yield one
            case Pair():
                yield Label(one.prompt, one.chosen, True)
                yield Label(one.prompt, one.rejected, False)


def as_pairs(examples: list[Example]) -> Iterator[Pair]:
    """The pairs among them: labels are never paired up, which would make preferences up."""
    return (one for one in examples if isinstance(one, Pair))


def _imitable(prompt: Messages, response: Response) -> Conversation:
    return Conversation(prompt + response.messages, response.branch, response.tools)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _refuse_empty(message: Message, what: str) -> None:
    if message.role != "assistant":
        raise ValueError(f"{what} is not an assistant message")
    if not message.content.strip() and not message.tool_calls:
        raise ValueError(f"{what} is empty")


def _refuse_no_prompt(prompt: Messages) -> None:
    if not prompt or prompt[-1].role == "assistant":
        raise ValueError("the prompt does not end with a message to the assistant")
