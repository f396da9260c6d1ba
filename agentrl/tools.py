"""`@tool` makes a typed, documented method a tool; `check_call` and `CheckedCall.run` run it.

Every mistake of the agent comes back as a short text, `error: <kind>: <sentence>`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import re
import typing
import warnings
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar, get_args, overload

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model

from agentrl.aio import is_cancelled, run_in_thread
from agentrl.calls import ToolResult, printable
from agentrl.errors import ContractError, InfraError, NoSandbox
from agentrl.types import BadCall, Effect, ToolCall, ToolSpec
from agentrl.waits import waiting

Function = TypeVar("Function", bound=Callable[..., Any])

_MARK = "__agentrl_mark__"
_KNOWN = "__agentrl_tools__"
_FIELD = "arg_"
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class Tool:
    """A function that the agent can call, with its description and the model of its arguments.

    `arguments` is None for a tool of `from_schema`, whose function takes all arguments as one dict.
    """

    spec: ToolSpec
    function: Callable[..., Any]
    arguments: type[BaseModel] | None = None

    @classmethod
    def from_schema(
        cls,
        name: str,
        schema: Mapping[str, Any],
        call: Callable[[dict[str, Any]], Awaitable[Any]],
        *,
        description: str = "",
        effect: Effect = "write",
        shell: str = "",
        reversible: bool = False,
    ) -> Tool:
        """A tool that is described by a JSON schema, such as one of a tool server.

        Args:
            name: as the model calls it.
            schema: JSON schema of an object; required and unknown parameters are checked here,
                their types by whoever answers the call.
            call: takes the arguments; what it raises becomes an error result.
            description: what the model is told.
            effect, shell, reversible: as for `tool`.
        """
        spec = ToolSpec(name, description, dict(schema), effect, shell, reversible)
        return cls(spec, call)

    def bind(self, owner: object) -> Tool:
        """The same tool as a bound method of `owner`."""
        return Tool(self.spec, functools.partial(self.function, owner), self.arguments)

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments of a call.

        Raises:
            ValueError: they do not fit, or are not plain JSON.
        """
        text = json.dumps(dict(arguments))
        if self.arguments is None:
            self._check_names(arguments)
            values: dict[str, Any] = json.loads(text)
            return values
        model = self.arguments.model_validate_json(text)
        return {
            name.removeprefix(_FIELD): getattr(model, name) for name in self.arguments.model_fields
        }

    def _check_names(self, arguments: Mapping[str, Any]) -> None:
        schema = self.spec.parameters
        for name in schema.get("required", ()):
            if name not in arguments:
                raise ValueError(f"{name}: field required")
        if schema.get("additionalProperties", True) is False:
            for name in arguments.keys() - schema.get("properties", {}).keys():
                raise ValueError(f"{name}: unknown parameter")


@overload
def tool(function: Function) -> Function: ...
@overload
def tool(
    *, effect: Effect = "read", shell: str = "", reversible: bool = False
) -> Callable[[Function], Function]: ...
def tool(
    function: Function | None = None,
    *,
    effect: Effect = "read",
    shell: str = "",
    reversible: bool = False,
) -> Any:
    """Mark a typed, documented method of an environment as a tool.

    Args:
        function: the method, when used without parentheses.
        effect: what it may change in the world: read, write, network or irreversible.
        shell: the parameter that is a command for a shell; a policy then judges what it says.
        reversible: whether all that it changes is in the work area, so that a snapshot undoes it.

    Raises:
        ContractError: it is no method, a parameter has no type, an effect or a parameter does not
            exist, or there is no docstring.
    """
    if effect not in get_args(Effect):
        raise ContractError(f"effect={effect!r} is unknown: use {', '.join(get_args(Effect))}")

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
        if shell and shell not in inspect.signature(marked).parameters:
            raise ContractError(f"tool {marked.__name__!r}: shell={shell!r} is no parameter of it")
        setattr(marked, _MARK, (effect, shell, reversible))
        return marked

    return mark if function is None else mark(function)


def tools_of(owner: type) -> Mapping[str, Tool]:
    """The tools of a class, by name, in the order in which they are written (base classes first).

    A subclass takes a tool away with `name = None`.

    Raises:
        ContractError: a tool cannot be described, or something that is no tool overrides it.
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
    # Prefixed, because pydantic reserves some field names (`json`, `copy`, `model_...`).
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
    return Tool(ToolSpec(name, summary, schema, *getattr(function, _MARK)), function, model)


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


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """A call whose tool exists and whose arguments fit it."""

    call: ToolCall
    tool: Tool
    values: Mapping[str, Any]

    async def run(self, timeout_s: float) -> ToolResult:
        """Run the tool; a plain function runs in a thread. What the tool raises is a result.

        Raises:
            InfraError: the sandbox or another part below the tool is gone.
            NoSandbox: the environment does not say that it needs one.
        """
        clock = asyncio.timeout(timeout_s)
        try:
            with waiting(f"tool {self.call.name!r}", timeout_s):
                async with clock:
                    if self.tool.arguments is None:
                        return ToolResult(_text(await self.tool.function(self.values)))
                    return ToolResult(_text(await _invoke(self.tool.function, self.values)))
        except (InfraError, NoSandbox):
            raise
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            return _raised(error)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a tool may raise anything
            if isinstance(error, TimeoutError) and clock.expired():
                late = f"{self.call.name} took longer than {timeout_s:g} s"
                return ToolResult.failed("timeout", late)
            return _raised(error)


def check_call(tools: Mapping[str, Tool], call: ToolCall | BadCall) -> CheckedCall | ToolResult:
    """The call, ready to run, or the error that the agent sees."""
    if isinstance(call, BadCall):
        return ToolResult.failed("bad_call", call.why)
    chosen = tools.get(call.name)
    if chosen is None:
        known = ", ".join(tools)
        return ToolResult.failed(
            "unknown_tool", f"no tool is named {call.name!r}; the tools are {known}"
        )
    try:
        return CheckedCall(call, chosen, chosen.read(call.arguments))
    except (ValueError, TypeError, RecursionError) as error:
        return ToolResult.failed("bad_arguments", _why_refused(error, chosen))


async def _invoke(function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    target = function.func if isinstance(function, functools.partial) else function
    if inspect.iscoroutinefunction(target):
        return await function(**values)
    return await run_in_thread(functools.partial(function, **values))


def _text(result: object) -> str:
    if not isinstance(result, str):
        result = json.dumps(result, ensure_ascii=False, default=str)
    return printable(result)


def _raised(error: BaseException) -> ToolResult:
    return ToolResult.failed("tool_error", f"{type(error).__name__}: {error}")


def _why_refused(error: Exception, chosen: Tool) -> str:
    if not isinstance(error, ValidationError):
        own = chosen.arguments is None and isinstance(error, ValueError)
        return str(error) if own else "the arguments are not plain JSON"
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
