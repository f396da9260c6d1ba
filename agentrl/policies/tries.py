"""What went wrong in one try at a server, its name, and whether another try is worth it."""

from __future__ import annotations

import random
import re
import time
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, NamedTuple

from agentrl.errors import AnswerFailed, ConfigError, EngineAway, EngineError
from agentrl.policies.replies import line_of
from agentrl.types import EndReason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from openai import APIStatusError, BadRequestError

_TOO_LONG = re.compile(
    r"context.{0,20}(length|window|size)|prompt is too long|too many tokens", re.IGNORECASE
)
_FILTER = re.compile(r"content.?(filter|policy|management)|responsible.?ai", re.IGNORECASE)
_NO_ROOM = (408, 409, 429, 502, 503, 504)
_TOO_MANY = (429, 503)
_FOR_ALL = (401, 403, 404)
# As httpx says it: the head of an answer had come, so the server was at its text.
_CUT = "without sending complete message body"
_FIRST_S, _LONGEST_S = 0.5, 8.0


class Trouble(NamedTuple):
    """Why a try gave no reply.

    Attributes:
        error: what it is called if no try is left.
        cause: what it came from, never itself; None if that is not known.
        again: whether the same request may pass later.
        asked_s: how long the server, which has too many requests, asks to wait before that; None if
            it does not.
    """

    error: EngineError
    cause: BaseException | None
    again: bool = True
    asked_s: float | None = None


def backoff_s(tries: int) -> float:
    """How long to wait after so many tries: twice as long each time, less up to a half by chance,
    so that those who failed together do not come together.
    """
    longest_s: float = min(_LONGEST_S, _FIRST_S * 2 ** (tries - 1))
    return longest_s * random.uniform(0.5, 1.0)


def trouble_of(error: Exception, name: str, timeout_s: float) -> Trouble | EndReason | None:
    """What an exception of a try means; None if it is not the server's.

    An ending is what the server says of the conversation itself.

    Raises:
        ConfigError: it is wrong for every episode alike.
    """
    import openai

    if isinstance(error, AnswerFailed):
        return Trouble(error, error.__cause__)
    if isinstance(error, TimeoutError | openai.APITimeoutError):
        return Trouble(AnswerFailed(f"{name}: timed out after {timeout_s:g} s"), error)
    if isinstance(error, openai.APIStatusError):
        return _status(error, name)
    if isinstance(error, openai.APIConnectionError):
        if _CUT in str(error.__cause__):
            return Trouble(AnswerFailed(f"{name}: the answer was cut: {error.__cause__}"), error)
        return Trouble(EngineAway(f"{name}: {line_of(error)}"), error)
    if isinstance(error, openai.OpenAIError):
        return Trouble(AnswerFailed(f"{name}: {type(error).__name__}: {line_of(error)}"), error)
    return None


def _status(error: APIStatusError, name: str) -> Trouble | EndReason:
    import openai

    status, said = error.status_code, line_of(error)
    if isinstance(error, openai.BadRequestError) and (reason := _refusal(error)) is not None:
        return reason
    if status in _FOR_ALL or error.code == "insufficient_quota":
        raise ConfigError(f"{name}: the server says no ({status}): {said}") from error
    kind = EngineAway if status in _NO_ROOM else AnswerFailed
    again = status in _NO_ROOM or status >= 500
    asked_s = asked_wait_s(error.response.headers) if status in _TOO_MANY else None
    return Trouble(kind(f"{name}: {type(error).__name__}: {said}"), error, again, asked_s)


def asked_wait_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks to wait: Retry-After as seconds or a date (RFC 9110, 10.2.3), or
    `retry-after-ms`; None if it does not, or cannot be read.
    """
    for name, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            seconds = float(headers[name]) * scale
        except (KeyError, ValueError):
            continue
        if 0 <= seconds < float("inf"):
            return seconds
    try:
        date = parsedate_to_datetime(headers.get("retry-after", ""))
    except (ValueError, OverflowError):  # the second for a time zone beyond all measure
        return None
    return max(0.0, date.timestamp() - time.time())


def _refusal(error: BadRequestError) -> EndReason | None:
    """Why a server refuses this conversation; None where the request itself is wrong."""
    if error.code == "context_length_exceeded" or _TOO_LONG.search(error.message):
        return EndReason.CONTEXT_LENGTH
    if error.code == "content_filter" or _FILTER.search(error.message):
        return EndReason.CONTENT_FILTER
    return None
