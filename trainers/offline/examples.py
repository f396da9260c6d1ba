"""What offline stages learn from: conversations, pairs, labels and labelled turns.

`read_row` reads one row of a public preference file. Its keys decide its form:

| form | keys |
| --- | --- |
| messages, ShareGPT | `messages` or `conversations`, with `role`/`content` or `from`/`value` |
| question, answer | `prompt` or `instruction` (+ `input`); `response`, `completion` or `output` |
| pair | `chosen`, `rejected`, and a prompt; without one, both begin with it (HH text, messages) |
| choice | two numbered responses, and a `label` or votes (`annotator1` …) for the better one |
| label | a conversation or a question and answer, and a `label`: true or false |
| turns | `messages`, `opening`, and one of `labels` per turn, as `agentrl label` writes them |
| ratings | a prompt and a list of `responses` or `completions`, each with a number |
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from agentrl.records.rows import message_of
from agentrl.trajectory import Trajectory
from agentrl.types import Message, Role, ToolCall, ToolSpec

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
        margin: by how much, if ratings or votes tell; else None.
        subset: name of the file's subset, for separate accuracies.
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
            raise ValueError("chosen equals rejected: the pair teaches nothing")


@dataclass(frozen=True)
class Label:
    """A response that was labelled desirable or not."""

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


Row = Mapping[str, Any]

ROLES: dict[str, Role] = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip
"""Names of roles in public files -> ours."""

_HH = re.compile(r"\n\n(Human|Assistant):")
_ANSWERS = ("response", "completion", "output", "answer")
_NUMBERED = (("output_1", "output_2"), ("response1", "response2"), ("response_0", "response_1"))
_SCORES = ("score", "rating", "overall_score", "reward")
_TEXTS = ("text", "content", "response", "completion")


class TieError(ValueError):
    """A row that prefers neither response; it is counted, and is nobody's fault."""


def read_row(row: Any) -> Iterator[Example]:
    """The examples of one row: one, or for ratings the best response against the worst.

    Raises:
        TieError: the row prefers nothing.
        ValueError: it has no form that is known, or what it holds cannot be learnt from.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"the row must be an object, not {type(row).__name__}")
    subset = str(row.get("subset") or "")
    numbered = next((names for names in _NUMBERED if names[0] in row and names[1] in row), None)
    rated = next((name for name in ("responses", "completions") if _is_list(row.get(name))), None)
    if "chosen" in row and "rejected" in row:
        yield _pair(row, subset)
    elif numbered:
        yield _choice(row, numbered, subset)
    elif rated:
        yield _best_and_worst(_prompt_of(row), row[rated], subset)
    elif _is_list(row.get("labels")) and "messages" in row:
        yield _steps(row)
    elif isinstance(row.get("label"), bool):
        *prompt, answer = _whole(row)
        yield Label(tuple(prompt), Response((answer,)), row["label"])
    else:
        yield Conversation(_whole(row))


def messages_of(value: Any, role: Literal["user", "assistant"]) -> Messages:
    """Messages from text, one message, or a list of them.

    Args:
        role: of bare text, unless it is a dialogue in the manner of HH.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(value, str):
        return _dialogue(value) if _HH.match(value) else (Message(role, value),)
    rows = value if _is_list(value) else [value]
    return tuple(map(_message, rows))


def _message(row: Any) -> Message:
    if not isinstance(row, Mapping):
        raise ValueError(f"a message must be an object, not {type(row).__name__}")
    named = row.get("role", row.get("from"))
    role, text = ROLES.get(str(named)), row.get("content", row.get("value"))
    if role is None:
        raise ValueError(f"role {named!r} is not one of {', '.join(ROLES)}")
    calls = tuple(map(_call, row.get("tool_calls") or ())) if role == "assistant" else ()
    return Message(role, _text(text, "content") if text is not None or not calls else "", calls)


def _call(row: Any) -> ToolCall:
    function = row.get("function", row) if isinstance(row, Mapping) else {}
    if not isinstance(function.get("arguments"), Mapping):
        raise ValueError("the arguments of a tool call are not an object")
    return ToolCall(str(function.get("name")), function["arguments"], str(row.get("id") or ""))


def _dialogue(text: str) -> Messages:
    """Turns of a text such as "\\n\\nHuman: Hi\\n\\nAssistant: Hello"."""
    parts = _HH.split(text)[1:]
    return tuple(
        Message("user" if who == "Human" else "assistant", said.strip())
        for who, said in zip(parts[::2], parts[1::2], strict=True)
    )


def _pair(row: Row, subset: str) -> Pair:
    chosen, rejected = (messages_of(row[name], "assistant") for name in ("chosen", "rejected"))
    has_prompt = any(name in row for name in ("prompt", "conversations", "messages", "instruction"))
    prompt = _prompt_of(row) if has_prompt else ()
    if not has_prompt:
        shared = _common(chosen, rejected)
        prompt = chosen[:shared]
    else:  # UltraFeedback repeats the prompt in both
        repeated = chosen[: len(prompt)] == prompt == rejected[: len(prompt)]
        shared = len(prompt) if repeated else 0
    first, second = chosen[shared:], rejected[shared:]
    if len(first) != 1 or len(second) != 1:
        raise ValueError("chosen and rejected do not answer one prompt by one message each")
    margin = row.get("margin")
    if margin is None and {"score_chosen", "score_rejected"} <= row.keys():
        margin = row["score_chosen"] - row["score_rejected"]
    return Pair(prompt, Response(first), Response(second), margin, subset)


def _common(left: Sequence[Message], right: Sequence[Message]) -> int:
    """How many messages both begin with, short of the last."""
    longest = min(len(left), len(right)) - 1
    pairs = zip(left[:longest], right[:longest], strict=True)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), longest)


def _choice(row: Row, names: tuple[str, str], subset: str) -> Pair:
    both = [Response((Message.assistant(_text(row[name], name)),)) for name in names]
    votes = [row[name] for name in sorted(row) if re.fullmatch(r"annotator\d+", name)]
    votes = votes or [row.get("label", row.get("preference"))]
    first, second = (sum(str(vote) == name for vote in votes) for name in ("1", "2"))
    if first == second:
        raise TieError("the votes prefer neither response")
    better, worse = both if first > second else both[::-1]
    margin = abs(first - second) / len(votes) if len(votes) > 1 else None
    return Pair(_prompt_of(row), better, worse, margin, subset)


def _best_and_worst(prompt: Messages, rows: Sequence[Any], subset: str) -> Pair:
    rated = [(_score(row), _answer(row)) for row in rows]
    low, high = min(rated, key=lambda one: one[0]), max(rated, key=lambda one: one[0])
    if low[0] == high[0]:
        raise TieError("all responses are rated alike")
    return Pair(prompt, Response((high[1],)), Response((low[1],)), high[0] - low[0], subset)


def _steps(row: Row) -> Steps:
    try:
        messages = tuple(message_of(dict(one)) for one in row["messages"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"a message is not as `agentrl label` writes it ({error!r})") from error
    first = next((at for at, one in enumerate(messages) if one.role == "assistant"), 0)
    labels = [None if one is None else float(one) for one in row["labels"]]
    return Steps(messages, int(row.get("opening", first)), tuple(labels))


def _score(row: Any) -> float:
    found = next((row[name] for name in _SCORES if row.get(name) is not None), None)
    if found is None and isinstance(row.get("annotations"), Mapping):
        numbers = [one.get("Rating") for one in row["annotations"].values()]
        numbers = [float(one) for one in numbers if str(one).replace(".", "").isdigit()]
        found = fmean(numbers) if numbers else None
    if found is None:
        raise ValueError(f"a response has no number under {', '.join(_SCORES)}")
    return float(found)


def _answer(row: Row) -> Message:
    name = next((name for name in _TEXTS if name in row), "text")
    return Message.assistant(_text(row.get(name), name))


def _whole(row: Row) -> Messages:
    """A conversation that ends with an answer."""
    for name in ("messages", "conversations"):
        if name in row:
            return messages_of(row[name], "user")
    answer = next((name for name in _ANSWERS if name in row), None)
    if answer is None:
        raise ValueError(f"no known form of data has the keys {', '.join(sorted(row))}")
    return _prompt_of(row) + messages_of(row[answer], "assistant")


def _prompt_of(row: Row) -> Messages:
    for name in ("prompt", "conversations", "messages"):
        if name in row:
            return messages_of(row[name], "user")
    parts = [_text(row[name], name) for name in ("instruction", "input") if row.get(name)]
    if not parts:
        raise ValueError("there is no prompt")
    opening = [Message.system(row["system"])] if row.get("system") else []
    return (*opening, Message.user("\n\n".join(parts)))


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, not {type(value).__name__}")
    return value


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
