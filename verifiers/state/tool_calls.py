"""Tool calls against the calls that a task permits, after the AST check of the Berkeley
Function-Calling Leaderboard.

`hidden["calls"]` lists the expected calls, each `{name: {argument: [permitted values]}}`, as BFCL's
`ground_truth`. An empty list demands that no call is made. `hidden["functions"]`, if given, holds
their declarations (BFCL's `function`), from which types and required arguments are read. The rules
are in the docstring of `tool_calls`.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import TaskError
from agentrl.types import Json, Score, Task, ToolCall
from agentrl.verifiers.base import Submission
from agentrl.verifiers.state.rows import count_pairs

NormalText = Callable[[str], str]
_IGNORED = re.compile(r"[ ,./\-_*^]")
_REALS = ("float", "number", "double")


def bfcl_text(text: str) -> str:
    """Text as BFCL compares it: no case, no space, none of `,./-_*^`, and one kind of quotes."""
    return _IGNORED.sub("", text).lower().replace("'", '"')


@dataclass(frozen=True, slots=True)
class ExpectedCall:
    """One call that has to be made.

    Attributes:
        permitted: argument -> permitted values; "" among them: it may be left out.
        types: argument -> its declaration; empty where the task declares no functions.
        required: arguments that its declaration demands.
    """

    name: str
    permitted: Mapping[str, list[Json]]
    types: Mapping[str, Json] = field(default_factory=dict)
    required: frozenset[str] = frozenset()


def tool_calls(*, normal: NormalText = bfcl_text) -> Callable[[Submission], Awaitable[Score]]:
    """A verifier: 1.0 if the calls of the episode are the expected ones, each once and no others;
    else 0.0.

    All assistant turns count together, so a call too many is wrong whenever it is made, and so is
    text that was meant as a call and is none. Which turn makes which call, and in what order, is
    free.

    * The name is exact. Every argument given is one that the task lists; one that is left out has
      "" among its permitted values and is not required by its declaration.
    * Types are exact, at any depth: `True` is not 1, 1.0 is not 1, null is not "". One exception: a
      whole number stands for the equal float where the permitted value is a float or the argument
      (or the item of an array) is declared as one, and there a float for an equal whole number.
    * Texts are equal after `normal`, floats if they are the same number. "" given as a value is
      right where "" is permitted and every other permitted value is text or null.
    * An array matches item by item, in order. An object holds for each key a list of permitted
      values; no other keys. An empty list of permitted values permits the empty array.

    BFCL differs in three points: it pairs parallel calls greedily, does not look at types inside
        objects, and permits
    a whole number for a float at the top level only.

    Args:
        normal: what is made equal in texts. BFCL's own is lenient: "1.5" and "15" are equal after
            it.

    The verifier raises TaskError if the task lists no calls, or in another form. `parts["matched"]`
    is the share of expected calls that were made.
    """

    async def verify(submission: Submission) -> Score:
        wants = expected_calls(submission.task)
        made = [call for message in submission.messages for call in message.tool_calls]
        calls = [call for call in made if isinstance(call, ToolCall)]
        found = count_pairs(wants, calls, lambda want, call: fits(want, call, normal))
        right = found == len(wants) == len(made)
        share = found / len(wants) if wants else float(right)
        why = f"{found} of {len(wants)} expected calls among {len(made)} calls"
        return Score(float(right), {"matched": share}, why)

    return verify


def expected_calls(task: Task) -> list[ExpectedCall]:
    """The calls in `hidden["calls"]`.

    Raises:
        TaskError: they are not there, or a call is not of the form `{name: {argument: [permitted
            values]}}`.
    """
    calls = task.hidden.get("calls")
    if not isinstance(calls, list):
        raise TaskError(
            f"task {task.id!r}: field hidden.calls is {calls!r}; give a list, empty if no call is"
            " right"
        )
    functions = task.hidden.get("functions", [])
    if not isinstance(functions, list) or not all(map(_is_declaration, functions)):
        raise TaskError(
            f"task {task.id!r}: field hidden.functions must list declarations, each with a name"
            " and, if wanted, parameters as a JSON schema of an object"
        )
    declared = {item["name"]: item.get("parameters", {}) for item in functions}
    expected = []
    for index, call in enumerate(calls):
        if not isinstance(call, dict) or len(call) != 1 or not _is_permission(*call.values()):
            form = "{name: {argument: [permitted values]}}, with objects in the same form"
            raise TaskError(
                f"task {task.id!r}: field hidden.calls[{index}] is {call!r}; write it as {form}"
            )
        ((name, permitted),) = call.items()
        schema = declared.get(name, {})
        expected.append(
            ExpectedCall(
                name, permitted, schema.get("properties", {}), frozenset(schema.get("required", ()))
            )
        )
    return expected


def _is_declaration(value: Json) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return False
    schema = value.get("parameters", {})
    return (
        isinstance(schema, dict)
        and isinstance(schema.get("properties", {}), dict)
        and isinstance(schema.get("required", []), list | tuple)
    )


def _is_permission(value: Json) -> bool:
    """Whether a value is an object of lists of permitted values, and all objects among these are,
    too.
    """
    return isinstance(value, dict) and all(
        isinstance(item, list) and _is_readable(item) for item in value.values()
    )


def _is_readable(value: Json) -> bool:
    if isinstance(value, list):
        return all(map(_is_readable, value))
    return _is_permission(value) if isinstance(value, dict) else True


def fits(want: ExpectedCall, call: ToolCall, normal: NormalText = bfcl_text) -> bool:
    """Whether a call is the expected one."""
    if call.name != want.name or not want.required <= set(call.arguments):
        return False
    return _object_fits(want.permitted, call.arguments, want.types, normal)


def _object_fits(
    permitted: Mapping[str, list[Json]],
    given: Mapping[str, Json],
    types: Mapping[str, Json],
    normal: NormalText,
) -> bool:
    if not set(given) <= set(permitted):
        return False
    return all(
        (
            any(
                _value_fits(want, given[name], types.get(name, {}), normal)
                for want in _choices(wants)
            )
            if name in given
            else "" in wants
        )
        for name, wants in permitted.items()
    )


def _choices(permitted: list[Json]) -> list[Json]:
    """The values that may be given: "" only where text is expected, as it mostly says that nothing
    need be given.
    """
    values = [value for value in permitted if value != ""]
    if len(values) < len(permitted) and all(
        value is None or isinstance(value, str) for value in values
    ):
        return permitted
    return values if permitted else [[]]


def _value_fits(want: Json, given: Json, declared: Mapping[str, Any], normal: NormalText) -> bool:
    if isinstance(want, bool) or isinstance(given, bool) or want is None or given is None:
        return want is given
    if isinstance(want, int | float) and isinstance(given, int | float):
        real = isinstance(want, float) or declared.get("type") in _REALS
        return want == given and (real or type(given) is int)
    if type(want) is not type(given):
        return False
    if isinstance(want, str):
        return (given == "") if want == "" else normal(given) == normal(want)
    if isinstance(want, list):
        items = declared.get("items") or {}
        return len(want) == len(given) and all(
            _value_fits(each, item, items, normal) for each, item in zip(want, given, strict=True)
        )
    return isinstance(want, dict) and _object_fits(
        want, given, declared.get("properties") or {}, normal
    )
