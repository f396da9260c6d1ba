"""How an episode's tool calls went, read from the fixed form of their errors."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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
    """Tool → {"calls", "errors", "timeouts"} over all episodes, most called first; a time-out is an
    error as well.
    """
    calls: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    timeouts: Counter[str] = Counter()
    for episode in episodes:
        for outcome in outcomes(episode):
            calls[outcome.tool] += 1
            errors[outcome.tool] += bool(outcome.error)
            timeouts[outcome.tool] += error_kind(outcome.error) == "timeout"
    return {
        name: {"calls": count, "errors": errors[name], "timeouts": timeouts[name]}
        for name, count in calls.most_common()
    }


def failed_at_reset(episode: Episode) -> bool:
    """Whether infrastructure failed it before the agent could say anything."""
    return episode.reward is None and not any(
        message.role == "assistant" for message in episode.messages
    )


def per_success(episodes: Sequence[Episode]) -> dict[str, float | None]:
    """What one solved sample took, failed and lost ones included: turns, calls, tokens, seconds and
    US dollars; None where nothing was solved, or a price is not known.
    """
    solved = sum(episode.passed is True for episode in episodes)
    totals: dict[str, float | None] = {
        name: math.fsum(getattr(episode.counts, name) for episode in episodes)
        for name in ("turns", "tool_calls", "sampled_tokens", "prompt_tokens", "wall_s")
    }
    totals["usd"] = total_usd(episodes)
    return {
        name: total / solved if solved and total is not None else None
        for name, total in totals.items()
    }


def total_usd(episodes: Sequence[Episode]) -> float | None:
    """The sum of prices; None where one is not known, as it would be too low."""
    prices = [episode.counts.usd for episode in episodes]
    known = [price for price in prices if price is not None]
    return math.fsum(known) if known and len(known) == len(prices) else None
