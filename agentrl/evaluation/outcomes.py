"""How an episode's tool calls went, read from the fixed form of their errors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple, get_args

from agentrl.calls import ErrorKind
from agentrl.trajectory import Episode

_ERROR = re.compile(f"error: ({'|'.join(get_args(ErrorKind))}): ")
_NO_TOOL = {"bad_call": "(unreadable call)", "unknown_tool": "(unknown tool)"}


class Outcome(NamedTuple):
    """One answered call.

    Attributes:
        name: the name that was called; empty where the call could not be read.
        error: text of the error; empty if there was none.
    """

    name: str
    error: str = ""

    @property
    def tool(self) -> str:
        """The tool's name; calls that named no tool share a name in parentheses."""
        return _NO_TOOL.get(error_kind(self.error), self.name)


def error_kind(text: str) -> str:
    """Which `agentrl.calls.ErrorKind` a tool message is; empty if it is no error."""
    found = _ERROR.match(text)
    return found[1] if found else ""


def outcomes(episode: Episode) -> Iterator[Outcome]:
    """Every answered call of an episode, in order."""
    for message in episode.messages:
        if message.role == "tool":
            yield Outcome(message.name, message.content if error_kind(message.content) else "")


def tool_counts(episodes: Iterable[Episode]) -> dict[str, dict[str, int]]:
    """Tool → {"calls", "errors"} over all episodes, most called first."""
    calls: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    for episode in episodes:
        for outcome in outcomes(episode):
            calls[outcome.tool] += 1
            errors[outcome.tool] += bool(outcome.error)
    return {name: {"calls": count, "errors": errors[name]} for name, count in calls.most_common()}
