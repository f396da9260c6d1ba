"""`@tool` turns a typed function with a Google-style docstring into a tool; `call_tool` runs one for the agent.

Whatever the agent does wrong comes back as a short text of a fixed form, `error: <kind>: <sentence>`, and is counted.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from agentrl.errors import AgentRLError, ContractError
from agentrl.types import BadCall, ToolCall, ToolSpec

Effect = Literal["read", "write", "network", "irreversible"]
ErrorKind = Literal["bad_call", "unknown_tool", "bad_arguments", "tool_error", "timeout"]
Function = TypeVar("Function", bound=Callable[..., Any])

_MARK = "__agentrl_effect__"
_ERROR_CHARS = 400


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What one call gave: the text for the agent, and which fixed-form error it is, if it is one."""

    text: str
    error: ErrorKind | None = None


@dataclass(frozen=True)
class Tool:
    """A function that the agent can call, its description, and the model that its arguments must fit."""

    spec: ToolSpec
    function: Callable[..., Any]
    arguments: type[BaseModel]

    def bind(self, owner: object) -> Tool:
        """The same tool as a bound method of `owner`."""
        return Tool(self.spec, functools.partial(self.function, owner), self.arguments)


@overload
def tool(function: Function) -> Function: ...
@overload
def tool(*, effect: Effect = "read") -> Callable[[Function], Function]: ...
def tool(function: Function | None = None, *, effect: Effect = "read") -> Any:
    """Mark a typed, documented function or method as a tool.

    Args:
        function: the function, when used without parentheses.
        effect: what it may change in the world: read, write, network or irreversible.

    Raises:
        ContractError: a parameter has no type, or there is no docstring.
    """

    def mark(marked: Function) -> Function:
        if not inspect.getdoc(marked):
            raise ContractError(f"tool {marked.__name__!r} needs a docstring: its first paragraph is what the model reads")
        for name, parameter in inspect.signature(marked).parameters.items():
            if name != "self" and parameter.annotation is inspect.Parameter.empty:
                raise ContractError(f"tool {marked.__name__!r}: parameter {name!r} needs a type")
            if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
                raise ContractError(f"tool {marked.__name__!r}: parameter {name!r} must be named, not * or **")
        setattr(marked, _MARK, effect)
        return marked

    return mark if function is None else mark(function)


@functools.cache
def tools_of(owner: type) -> Mapping[str, Tool]:
    """The tools of a class, by name, in the order in which they are written (base classes first)."""
    marked: dict[str, Callable[..., Any]] = {}
    for base in reversed(owner.__mro__):
        marked |= {name: item for name, item in vars(base).items() if hasattr(item, _MARK)}
    return {name: _build(function) for name, function in marked.items()}


def _build(function: Callable[..., Any]) -> Tool:
    hints = typing.get_type_hints(function, include_extras=True)
    summary, described = _read_docstring(inspect.getdoc(function) or "")
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self":
            continue
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        fields[name] = (hints[name], Field(default, description=described.get(name)))
    unknown = set(described) - set(fields)
    if unknown:
        raise ContractError(f"tool {function.__name__!r}: its docstring describes {sorted(unknown)}, which it does not take")
    model = create_model(function.__name__, __config__=ConfigDict(extra="forbid", strict=True), **fields)
    schema = model.model_json_schema()
    schema.pop("title", None)
    for field in schema.get("properties", {}).values():
        field.pop("title", None)
    return Tool(ToolSpec(function.__name__, summary, schema, getattr(function, _MARK)), function, model)


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a Google-style docstring into its first paragraph and the texts under `Args:`."""
    summary = " ".join(text.split("\n\n", 1)[0].split())
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)*)", text, re.MULTILINE)
    described: dict[str, str] = {}
    name = ""
    for line in (section[1] if section else "").splitlines():
        entry = re.match(r"^ {2,4}(\w+)(?: \([^)]*\))?: *(.*)$", line)
        if entry:
            name = entry[1]
            described[name] = entry[2].strip()
        elif name and line.strip():
            described[name] += " " + line.strip()
    return summary, described


async def call_tool(tools: Mapping[str, Tool], call: ToolCall | BadCall, timeout_s: float) -> ToolResult:
    """Run one call; plain functions run in a thread. Only broken infrastructure raises.

    Raises:
        InfraError: the sandbox or another part below the tool is gone.
    """
    if isinstance(call, BadCall):
        return _error("bad_call", call.why)
    chosen = tools.get(call.name)
    if chosen is None:
        return _error("unknown_tool", f"no tool is named {call.name!r}; the tools are {', '.join(tools)}")
    try:
        arguments = chosen.arguments.model_validate_json(json.dumps(dict(call.arguments)))
    except (ValidationError, ValueError) as error:
        return _error("bad_arguments", _why_refused(error))
    values = {name: getattr(arguments, name) for name in type(arguments).model_fields}
    try:
        async with asyncio.timeout(timeout_s):
            result = await _invoke(chosen.function, values)
    except AgentRLError:
        raise
    except TimeoutError:
        return _error("timeout", f"{call.name} took longer than {timeout_s:g} s")
    except Exception as error:  # noqa: BLE001 - the boundary: what a tool raises is an answer to the agent
        return _error("tool_error", f"{type(error).__name__}: {error}")
    return ToolResult(result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str))


async def _invoke(function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    target = function.func if isinstance(function, functools.partial) else function
    if inspect.iscoroutinefunction(target):
        return await function(**values)
    return await asyncio.to_thread(function, **values)


def _error(kind: ErrorKind, sentence: str) -> ToolResult:
    text = " ".join(sentence.split())
    return ToolResult(f"error: {kind}: {text[:_ERROR_CHARS]}", kind)


def _why_refused(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return "the arguments are not plain JSON"
    parts = []
    for problem in error.errors(include_url=False, include_input=False, include_context=False)[:3]:
        where = ".".join(str(step) for step in problem["loc"]) or "arguments"
        parts.append(f"{where}: {problem['msg'].lower()}")
    return "; ".join(parts)


def clip_text(text: str, limit: int) -> str:
    """Cut the middle out of a text longer than `limit` characters and say how much is gone."""
    if len(text) <= limit:
        return text
    head, tail = limit * 2 // 3, limit // 3
    return f"{text[:head]}\n[{len(text) - head - tail} characters cut]\n{text[-tail:]}"
