"""`@tool` turns a typed method with a Google-style docstring into a tool; `call_tool` runs one for
the agent.

Whatever the agent does wrong comes back as a short text of a fixed form, `error: <kind>:
<sentence>`, and is counted.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import re
import typing
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeVar, overload

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model

from agentrl.aio import is_cancelled, run_in_thread
from agentrl.errors import AgentRLError, ContractError
from agentrl.types import BadCall, ToolCall, ToolSpec

Effect = Literal["read", "write", "network", "irreversible"]
ErrorKind = Literal["bad_call", "unknown_tool", "bad_arguments", "tool_error", "timeout"]
Function = TypeVar("Function", bound=Callable[..., Any])

_MARK = "__agentrl_effect__"
_KNOWN = "__agentrl_tools__"
_FIELD = "arg_"
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_ERROR_CHARS = 400


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What one call gave: the text for the agent, and which fixed-form error it is, if it is one."""

    text: str
    error: ErrorKind | None = None


@dataclass(frozen=True)
class Tool:
    """A function that the agent can call, its description, and the model that its arguments must
    fit.
    """

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
    """Mark a typed, documented method of an environment as a tool.

    Args:
        function: the method, when used without parentheses.
        effect: what it may change in the world: read, write, network or irreversible.

    Raises:
        ContractError: it is no method, a parameter has no type, or there is no docstring.
    """

    def mark(marked: Function) -> Function:
        if not inspect.getdoc(marked):
            raise ContractError(
                f"tool {marked.__name__!r} needs a docstring: the model reads its first paragraph"
            )
        if next(iter(inspect.signature(marked).parameters), "") != "self":
            raise ContractError(
                f"tool {marked.__name__!r} must be a method: its first parameter is self"
            )
        for name, parameter in inspect.signature(marked).parameters.items():
            if name != "self" and parameter.annotation is inspect.Parameter.empty:
                raise ContractError(f"tool {marked.__name__!r}: parameter {name!r} needs a type")
            if name != "self" and parameter.kind not in _NAMED:
                raise ContractError(
                    f"tool {marked.__name__!r}: parameter {name!r} must be one that can be named"
                )
        setattr(marked, _MARK, effect)
        return marked

    return mark if function is None else mark(function)


def tools_of(owner: type) -> Mapping[str, Tool]:
    """The tools of a class, by name, in the order in which they are written (base classes first).

    A subclass takes a tool away with `name = None`.

    Raises:
        ContractError: a tool cannot be described, or is overridden by what is no tool.
    """
    known: Mapping[str, Tool] | None = vars(owner).get(_KNOWN)
    if known is None:
        known = MappingProxyType(_find_tools(owner))
        setattr(owner, _KNOWN, known)
    return known


def _find_tools(owner: type) -> dict[str, Tool]:
    marked: dict[str, Callable[..., Any]] = {}
    for base in reversed(owner.__mro__):
        for name, item in vars(base).items():
            if hasattr(item, _MARK):
                marked[name] = item
            elif name in marked and item is None:
                del marked[name]
            elif name in marked:
                raise ContractError(
                    f"{base.__name__}.{name} overrides a tool: mark it with @tool or set it to None"
                )
    return {name: _build(name, function) for name, function in marked.items()}


def _build(name: str, function: Callable[..., Any]) -> Tool:
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ContractError(
            f"tool {name!r}: {error}; its parameter types must be known in its module"
        ) from error
    summary, described = _read_docstring(inspect.getdoc(function) or "")
    parameters = {
        key: item for key, item in inspect.signature(function).parameters.items() if key != "self"
    }
    unknown = set(described) - set(parameters)
    if unknown:
        raise ContractError(
            f"tool {name!r}: its docstring describes {sorted(unknown)}, which it does not take"
        )
    # Fields have names of their own, since pydantic keeps some (`json`, `copy`, `model_...`) to
    # itself.
    fields: dict[str, Any] = {
        _FIELD + key: (hints[key], Field(_default(item), alias=key, description=described.get(key)))
        for key, item in parameters.items()
    }
    config = ConfigDict(extra="forbid", strict=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = create_model(name, __config__=config, **fields)
            schema = model.model_json_schema()
    except (PydanticUserError, TypeError, ValueError, UserWarning) as error:
        why = str(error).strip().partition("\n")[0]
        raise ContractError(
            f"tool {name!r}: its parameters cannot be described in JSON: {why}"
        ) from error
    schema.pop("title", None)
    for field in schema.get("properties", {}).values():
        field.pop("title", None)
    return Tool(ToolSpec(name, summary, schema, getattr(function, _MARK)), function, model)


def _default(parameter: inspect.Parameter) -> Any:
    return ... if parameter.default is inspect.Parameter.empty else parameter.default


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a Google-style docstring into its first paragraph and the texts under `Args:`."""
    summary = " ".join(text.split("\n\n", 1)[0].split())
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)*)", text, re.MULTILINE)
    described: dict[str, str] = {}
    name = ""
    lines = (section[1] if section else "").splitlines()
    indent = next((len(line) - len(line.lstrip()) for line in lines if line.strip()), 0)
    for line in lines:
        entry = re.match(rf"^\s{{{indent}}}(\w+)(?: \([^)]*\))?: *(.*)$", line)
        if entry:
            name = entry[1]
            described[name] = entry[2].strip()
        elif name and line.strip():
            described[name] += " " + line.strip()
    return summary, described


async def call_tool(
    tools: Mapping[str, Tool], call: ToolCall | BadCall, timeout_s: float
) -> ToolResult:
    """Run one call; plain functions run in a thread. Only broken infrastructure raises.

    Raises:
        InfraError: the sandbox or another part below the tool is gone.
    """
    if isinstance(call, BadCall):
        return _error("bad_call", call.why)
    chosen = tools.get(call.name)
    if chosen is None:
        return _error(
            "unknown_tool", f"no tool is named {call.name!r}; the tools are {', '.join(tools)}"
        )
    try:
        arguments = chosen.arguments.model_validate_json(json.dumps(dict(call.arguments)))
    except (ValidationError, ValueError, TypeError, RecursionError) as error:
        return _error("bad_arguments", _why_refused(error))
    values = {
        name.removeprefix(_FIELD): getattr(arguments, name)
        for name in chosen.arguments.model_fields
    }
    clock = asyncio.timeout(timeout_s)
    try:
        async with clock:
            return ToolResult(_text(await _invoke(chosen.function, values)))
    except AgentRLError:
        raise
    except asyncio.CancelledError as error:
        if is_cancelled():
            raise
        return _raised(error)
    except TimeoutError as error:
        return (
            _error("timeout", f"{call.name} took longer than {timeout_s:g} s")
            if clock.expired()
            else _raised(error)
        )
    except (
        Exception,
        SystemExit,
    ) as error:
        return _raised(error)


async def _invoke(function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    target = function.func if isinstance(function, functools.partial) else function
    if inspect.iscoroutinefunction(target):
        return await function(**values)
    return await run_in_thread(functools.partial(function, **values))


def _text(result: object) -> str:
    return _sayable(
        result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    )


def _sayable(text: str) -> str:
    """The text with lone surrogates (a file name that is no UTF-8) replaced: no tokenizer takes
    them.
    """
    return text if text.isascii() else text.encode(errors="replace").decode()


def _raised(error: BaseException) -> ToolResult:
    return _error("tool_error", f"{type(error).__name__}: {error}")


def _error(kind: ErrorKind, sentence: str) -> ToolResult:
    text = _sayable(" ".join(sentence.split()))
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
    return f"{text[:head]}\n[{len(text) - head - tail} characters cut]\n{text[len(text) - tail :]}"
