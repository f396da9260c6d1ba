"""How an episode's tool calls went, read off the fixed form in which `agentrl.tools` words every
error.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from agentrl.trajectory import Episode

_ERROR = re.compile(r"error: (bad_call|unknown_tool|bad_arguments|tool_error|timeout): ")
_NOBODYS = {"bad_call": "(unreadable call)", "unknown_tool": "(unknown tool)"}


class Outcome(NamedTuple):
    """One answered call: the name that was called (empty where it could not be read) and the text
    of its error.
    """

    name: str
    error: str = ""

    @property
    def tool(self) -> str:
        """The tool's name; calls that reached none share a name in parentheses, since the agent may
        call anything.
        """
        kind = error_kind(self.error)
        return _NOBODYS.get(kind, self.name)


def error_kind(text: str) -> str:
    """Which fixed-form error a tool message is (see `agentrl.tools.ErrorKind`); empty if it is
    none.
    """
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
