"""Who answers what a rule asks: nobody, a script, a person at the terminal, or a webhook.

The `[approval]` table of a policy file says which: `kind = "none"`, `"scripted"` with
`answers = {"tool or rule" = "approve"}`, `"terminal"`, or `"webhook"` with `url`, `timeout_s`.
Who does not answer has denied.
"""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.errors import ConfigError
from agentrl.records.plain import plain
from agentrl.safety.globs import path_matches

Answer = Literal["approve", "deny"]
_MOST_ANSWER_BYTES = 10_000
_MOST_SHOWN = 10_000


@dataclass(frozen=True, slots=True)
class Request:
    """What an approver is asked.

    Attributes:
        preview: truthful lines of what the call would do.
        tool: its name.
        arguments: of the call.
        rule: id of the rule that asks.
        task: id of the task.
    """

    preview: str
    tool: str
    arguments: Mapping[str, Any]
    rule: str
    task: str


@dataclass(frozen=True, slots=True)
class Approval:
    """An answer, and who gave it in which words; for the record."""

    answer: Answer
    by: str


class Approver(Protocol):
    """Answers requests; whatever goes wrong while it is asked is a denial that says so."""

    deterministic: bool

    async def answer(self, request: Request) -> Approval:
        """Answer one request; never raises for an approver that cannot be reached."""
        ...


class Nobody:
    """Denies: nobody was named who could answer."""

    deterministic = True

    async def answer(self, request: Request) -> Approval:
        """Deny."""
        return Approval("deny", "nobody to ask")


@dataclass(frozen=True)
class ScriptedApprover:
    """Answers by patterns of tools and rule ids; what none of them names is denied.

    Attributes:
        answers: pattern -> answer; the first that matches counts.
    """

    answers: Mapping[str, Answer]
    deterministic = True

    async def answer(self, request: Request) -> Approval:
        """The first answer whose pattern is the rule's id or the tool's name."""
        for pattern, given in self.answers.items():
            if path_matches(pattern, request.rule) or path_matches(pattern, request.tool):
                return Approval(given, f"script: {given}")
        return Approval("deny", "script: names neither the tool nor the rule")


class AtTerminal:
    """Shows a person what a call would do and waits for `y`; one question at a time."""

    deterministic = False

    def __init__(self, read: Callable[[], str] | None = None) -> None:
        self._read = read or (lambda: sys.stdin.readline())
        self._turn = asyncio.Lock()

    async def answer(self, request: Request) -> Approval:
        """`y` or `yes` approves; anything else, the end of input included, denies.

        Nobody is asked about what cannot be shown whole.
        """
        if len(request.preview) > _MOST_SHOWN:
            return Approval("deny", f"terminal: more than {_MOST_SHOWN} characters to show")
        async with self._turn:
            shown, rule = plain(request.preview, lines=True), plain(request.rule)
            print(
                f"\n{shown}\nallow this (rule {rule})? [y/N] ",
                end="",
                file=sys.stderr,
                flush=True,
            )
            line = await asyncio.to_thread(self._read)
        said = line.strip().lower()
        if not line:
            return Approval("deny", "terminal: no answer")
        return Approval("approve" if said in ("y", "yes") else "deny", f"terminal: {said[:20]}")


@dataclass(frozen=True)
class Webhook:
    """Posts `{"tool", "arguments", "rule", "task", "preview"}` and reads `{"decision": "approve"}`.

    Attributes:
        url: by http or https.
        timeout_s: seconds without an answer after which the call is denied.
    """

    url: str
    timeout_s: float = 30.0
    deterministic = False

    async def answer(self, request: Request) -> Approval:
        """What the server says; no or another answer denies and says so."""
        try:
            async with asyncio.timeout(self.timeout_s + 1):
                said = await asyncio.to_thread(self._ask, request)
        except (OSError, ValueError, TimeoutError, urllib.error.URLError) as error:
            why = " ".join(str(error).split())[:120] or type(error).__name__
            return Approval("deny", f"webhook did not answer: {why}")
        if said not in ("approve", "deny"):
            return Approval("deny", f"webhook gave no decision: {said!r:.60}")
        return Approval("approve" if said == "approve" else "deny", f"webhook: {said}")

    def _ask(self, request: Request) -> Any:
        body = {name: getattr(request, name) for name in Request.__slots__}
        data = json.dumps(body, default=str).encode()
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(self.url, data, headers, method="POST")
        with urllib.request.urlopen(asked, timeout=self.timeout_s) as reply:
            found = json.loads(reply.read(_MOST_ANSWER_BYTES))
        return found.get("decision") if isinstance(found, dict) else None


class ApprovalSettings(BaseModel):
    """The `[approval]` table of a policy."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    kind: Literal["none", "scripted", "terminal", "webhook"] = "none"
    answers: dict[str, Answer] = {}
    url: str = Field(default="", pattern="^(https?://.+)?$")
    timeout_s: float = Field(default=30.0, gt=0)


def open_approver(table: Mapping[str, Any], where: str) -> Approver:
    """The approver of a policy's `[approval]` table.

    Raises:
        ConfigError: one sentence with the field, its value and the fix.
    """
    try:
        settings = ApprovalSettings.model_validate(table)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(map(str, problem["loc"]))
        raise ConfigError(
            f"{where}: approval.{field}={problem['input']!r}: {problem['msg'].lower()}"
        ) from None
    if settings.kind == "webhook" and not settings.url:
        raise ConfigError(f"{where}: approval.url is missing: kind='webhook' needs one")
    if settings.kind == "scripted" and not settings.answers:
        raise ConfigError(f"{where}: approval.answers is missing: kind='scripted' needs them")
    if settings.kind == "scripted":
        return ScriptedApprover(settings.answers)
    if settings.kind == "webhook":
        return Webhook(settings.url, settings.timeout_s)
    return AtTerminal() if settings.kind == "terminal" else Nobody()
