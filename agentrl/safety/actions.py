"""What a call would do, as actions that a policy can judge."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.safety.globs import any_matches
from agentrl.safety.policy import EFFECTS, Action
from agentrl.safety.shell import ANYTHING, HERE, Access, CommandLine, read_command, resolve
from agentrl.sandboxes.base import Sandbox
from agentrl.types import Effect, ToolCall, ToolSpec, relative_path


def actions_of(
    call: ToolCall,
    tool: ToolSpec,
    path_names: Sequence[str],
    taint: tuple[str, ...] = (),
    places: frozenset[str] = HERE,
) -> tuple[tuple[Action, ...], frozenset[str]]:
    """The actions of a call, and where a later shell command may begin.

    Args:
        call: its arguments fit the tool.
        tool: with the defaults of its parameters.
        path_names: patterns of names of arguments that are paths.
        taint: sources of untrusted text that stands in the arguments.
        places: directories in which a shell command may begin.
    """
    arguments = with_defaults(call, tool)
    writes = tool.effect != "read"
    accesses = tuple(
        access
        for name, value in arguments.items()
        for access in _accesses(value, path_names, writes, any_matches(path_names, name))
    )
    if not tool.shell:
        return (Action(tool.name, tool.effect, arguments, accesses, (), taint),), places
    command = arguments.get(tool.shell)
    line = read_command(command, places) if isinstance(command, str) else _NO_TEXT
    actions = tuple(
        Action(
            tool.name,
            step.effect,
            arguments,
            (*accesses, *step.accesses),
            step.argv,
            taint,
            shell=True,
            understood=not step.why,
        )
        for step in line.steps
    )
    nothing = Action(tool.name, "read", arguments, accesses, (), taint, shell=True)
    return actions or (nothing,), line.places


def strictest(actions: Sequence[Action]) -> Effect:
    """The strictest effect of the actions."""
    return max((action.effect for action in actions), key=EFFECTS.index)


def with_defaults(call: ToolCall, tool: ToolSpec) -> Mapping[str, Any]:
    """The arguments, with the defaults of those that are not given."""
    properties = tool.parameters.get("properties", {})
    defaults = {name: row["default"] for name, row in properties.items() if "default" in row}
    return {**defaults, **call.arguments}


def _accesses(
    value: Any, path_names: Sequence[str], writes: bool, is_path: bool, depth: int = 0
) -> Iterator[Access]:
    """The paths in a value: itself where it is one, else those in its lists and tables."""
    below = depth + 1
    if depth > _DEEPEST:
        yield from ANYTHING
    elif isinstance(value, list):
        for item in value:
            yield from _accesses(item, path_names, writes, is_path, below)
    elif isinstance(value, dict):
        found = [
            access
            for name, item in value.items()
            for access in _accesses(item, path_names, writes, any_matches(path_names, name), below)
        ]
        in_list = is_path and depth > 0 and bool(found)
        yield from found if in_list or not is_path else ANYTHING
    elif is_path and isinstance(value, str):
        for path in resolve(value):
            yield Access(path, writes)
    elif is_path and value is not None:
        yield from ANYTHING


_DEEPEST = 20
_NO_TEXT = CommandLine(read_command("\0").steps, HERE)


async def with_known_moves(
    actions: tuple[Action, ...], places: frozenset[str], sandbox: Sandbox | None
) -> tuple[Action, ...]:
    """The actions; a move of nothing but files of the work area says so: it is not deep.

    The words of `mv` do not tell a file from a folder with all that lies below it. Believed is only
    what cannot become untrue before the command runs: it is the only step of its line, begins in
    the work area, and nothing else runs in the sandbox.

    Args:
        actions: of one call.
        places: directories in which its command may begin.
        sandbox: the episode's; None if it has none.

    Raises:
        SandboxLost: the sandbox does not answer.
    """
    if len(actions) != 1 or sandbox is None or places != HERE or actions[0].argv[:1] != ("mv",):
        return actions
    (action,) = actions
    words = [posixpath.normpath(word) for word in action.argv[1:] if not word.startswith("-")]
    named = [access.path for access in action.accesses]
    # Of each source the path itself and the one that it gets in a folder; the target is left over.
    sources = [path for path, _ in zip(named[::2], named[1::2], strict=False)]
    if not sources or sources != words[:-1]:
        return actions
    if any(access.expands for access in action.accesses) or await sandbox.running():
        return actions
    if not await _are_files(sources, sandbox):
        return actions
    return (replace(action, accesses=tuple(replace(one, deep=False) for one in action.accesses)),)


async def _are_files(paths: Sequence[str], sandbox: Sandbox) -> bool:
    for path in paths:
        try:
            listed = await sandbox.list(posixpath.dirname(relative_path(path)) or ".")
        except (OSError, ValueError):  # no such folder, behind a link, or outside of the work area
            return False
        if not any(info.path == path and info.kind == "file" for info in listed):
            return False
    return True
