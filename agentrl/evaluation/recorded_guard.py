"""The safety policy that a run was played under, for episodes that go on from its own."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.calls import CallContext, Decision, Guard, Opening, ToolResult
from agentrl.errors import ConfigError, ReplayDiverged
from agentrl.evaluation.plan import PLAN
from agentrl.safety.loading import check_policy, read_policy
from agentrl.sandboxes.base import Sandbox
from agentrl.specs import GuardSpec
from agentrl.trajectory import Episode
from agentrl.types import Message, ToolCall, ToolSpec


def recorded_guard(run: Path, episodes: Sequence[Episode]) -> Callable[[], Guard] | None:
    """Builds the guard that stood around the calls of a run's episodes; None where none did.

    Raises:
        ConfigError: there was one, and its policy is not recorded, is Python code, or would wait
            for a person or a server.
    """
    if found := _table(run / PLAN, json.loads).get("safety"):
        return GuardSpec.of(check_policy(found, f"policy of {run / PLAN}"), deterministic=True)
    name = _table(run / "config.toml", tomllib.loads).get("safety", {}).get("policy", "")
    if ".py:" in name:
        raise ConfigError(
            f"{run} was played under the safety policy {name}, which a record may not run: its"
            " calls are not run again without it"
        )
    if name:
        return GuardSpec.of(read_policy(name), deterministic=True)
    if any(one.events for one in episodes):
        raise ConfigError(
            f"{run} was played under a safety policy that it does not record: give the folder in"
            " which it was played, with its plan.json or config.toml"
        )
    return None


def as_recorded(
    make: Callable[[], Guard] | None, episode: Episode, turns: int
) -> Callable[[], Guard] | None:
    """The same guards, which run no call of the first turns that was not run in the recording."""
    if make is None:
        return None
    stopped = {
        (event.turn, event.index)
        for event in episode.events
        if event.turn <= turns and event.verdict in ("deny", "preview")
    }
    return lambda: _AsRecorded(make(), stopped)


class _AsRecorded(Guard):
    """A guard whose policy may have changed since the recording.

    Args:
        stopped: turn and index of the calls that did not run.
    """

    def __init__(self, guard: Guard, stopped: set[tuple[int, int]]) -> None:
        self._guard, self._stopped = guard, stopped

    async def start(self, opening: Opening, sandbox: Sandbox | None, seed: int) -> Opening:
        return await self._guard.start(opening, sandbox, seed)

    async def before(self, call: ToolCall, tool: ToolSpec, context: CallContext) -> Decision:
        decision = await self._guard.before(call, tool, context)
        if decision.result is None and (context.turn, context.index) in self._stopped:
            raise ReplayDiverged(
                f"the call of {call.name} in turn {context.turn} did not run in the recording, and"
                " the safety policy lets it run now"
            )
        return decision

    async def after(
        self, call: ToolCall, result: ToolResult, context: CallContext
    ) -> Decision | None:
        return await self._guard.after(call, result, context)

    def removed(self) -> Collection[str]:
        return self._guard.removed()

    def found(self, messages: Sequence[Message], files: Mapping[str, bytes]) -> dict[str, str]:
        return self._guard.found(messages, files)


def _table(path: Path, read: Callable[[str], Any]) -> dict[str, Any]:
    """What a file of the run says; empty where there is none.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        found = read(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}): restore it") from error
    return found if isinstance(found, dict) else {}
