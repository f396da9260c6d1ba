"""Tools: what the model is told, and what it gets when it is wrong."""

from __future__ import annotations

import asyncio
import threading
from typing import Literal, Optional

import pytest
from helpers import wait_for
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from agentrl.calls import ToolResult
from agentrl.errors import ContractError, SandboxLost
from agentrl.tools import check_call, clip_text, tool, tools_of
from agentrl.types import BadCall, ToolCall

GO = threading.Event()


@pytest.fixture
def held():
    """Functions that hang do so until the end of the test: who waits for them waits for ever."""
    GO.clear()
    yield
    GO.set()


class Place(BaseModel):
    city: str
    zip: int = 0


class Kit:
    """Tools of every kind."""

    log: list[str]

    @tool(effect="network")
    async def find(
        self,
        query: str,
        where: Place,
        tags: list[str],
        mode: Literal["fast", "slow"] = "fast",
        limit: Optional[int] = None,  # noqa: UP045 - both spellings must work
        json: bool = False,
        copy: int | str = 3,
        model_name: str = "",
    ) -> str:
        """Search for places
        of any kind.

        More that the model is not told.

        Args:
            query: what to look for,
                over two lines: as here.
            where (Place): near what.
            mode: how hard to try.

        Returns:
            nothing: of note.
        """
        return f"{query} {where.city} {tags} {mode} {limit} {json} {copy}"

    @tool
    def plain(self, held: bool = False) -> str:
        """Wait until the test lets go."""
        assert not held or GO.wait(1000)
        return threading.current_thread().name

    @tool
    async def slow(self) -> str:
        """Sleep for long."""
        await asyncio.sleep(1000)
        return ""

    @tool
    async def give(self, what: str) -> object:
        """Return or raise something."""
        loop: list[object] = []
        loop.append(loop)
        values = {
            "none": None,
            "dict": {"a": {1, 2}},
            "loop": loop,
            "surrogate": "a\udcffb",
            "huge": "x" * 100_000,
        }
        if what in values:
            return values[what]
        raise {
            "timeout": TimeoutError("mine"),
            "exit": SystemExit(3),
            "cancelled": asyncio.CancelledError("inner"),
            "stop": StopAsyncIteration("x"),
            "newline": ValueError("two\nlines"),
            "empty": ValueError(),
            "long": ValueError("y" * 10_000),
            "lost": SandboxLost("gone"),
        }[what]

    @tool
    def throw(self, what: str) -> str:
        """Raise from a thread."""
        raise {"stop": StopIteration("x"), "exit": SystemExit(3), "value": ValueError("bad")}[what]


async def run_call(tools, wanted, timeout_s: float) -> ToolResult:
    checked = check_call(tools, wanted)
    return checked if isinstance(checked, ToolResult) else await checked.run(timeout_s)


def ask(name: str, arguments=None, timeout_s: float = 60.0):
    bound = {key: entry.bind(Kit()) for key, entry in tools_of(Kit).items()}
    wanted = name if isinstance(name, BadCall) else ToolCall(name, arguments or {})
    return asyncio.run(run_call(bound, wanted, timeout_s))


# What the model is told


def test_the_schema_comes_from_types_and_docstring():
    spec = tools_of(Kit)["find"].spec
    assert spec.name == "find" and spec.effect == "network"
    assert spec.description == "Search for places of any kind."
    properties = spec.parameters["properties"]
    assert list(properties) == [
        "query",
        "where",
        "tags",
        "mode",
        "limit",
        "json",
        "copy",
        "model_name",
    ]
    assert spec.parameters["required"] == ["query", "where", "tags"]
    assert spec.parameters["additionalProperties"] is False
    assert properties["query"] == {
        "type": "string",
        "description": "what to look for, over two lines: as here.",
    }
    assert properties["where"]["description"] == "near what."
    assert spec.parameters["$defs"]["Place"]["properties"]["city"]["type"] == "string"
    assert properties["tags"] == {"type": "array", "items": {"type": "string"}}
    assert (
        properties["mode"]["enum"] == ["fast", "slow"] and properties["mode"]["default"] == "fast"
    )
    assert {"type": "null"} in properties["limit"]["anyOf"] and properties["limit"][
        "default"
    ] is None
    assert spec.schema()["function"]["parameters"] == spec.parameters
    assert list(tools_of(Kit)) == ["find", "plain", "slow", "give", "throw"]


def test_what_cannot_be_described_is_refused():
    with pytest.raises(ContractError, match="needs a docstring"):

        @tool
        def silent(self, a: int) -> str:
            return ""

    with pytest.raises(ContractError, match="'a' needs a type"):

        @tool
        def untyped(self, a) -> str:
            """Do."""

    with pytest.raises(ContractError, match="must be one that can be named"):

        @tool
        def starred(self, *a: int) -> str:
            """Do."""

    with pytest.raises(ContractError, match="must be a method"):

        @tool
        def alone(a: int) -> str:
            """Do."""


def test_what_cannot_be_described_when_the_class_is_looked_at():
    class Made:
        @tool
        def f(self, a: int) -> str:
            """Do.

            Args:
                b: does not exist.
            """

    class Local:
        @tool
        def f(self, a: Unknown) -> str:  # noqa: F821
            """Do."""

    class Odd:
        @tool
        def f(self, a: threading.Lock) -> str:
            """Do."""

    for owner, match in (
        (Made, "describes"),
        (Local, "must be known"),
        (Odd, "cannot be described"),
    ):
        with pytest.raises(ContractError, match=match):
            tools_of(owner)


def test_overriding_a_tool():
    class Better(Kit):
        @tool
        async def slow(self) -> str:
            """Be quick."""
            return "quick"

        throw = None

    class Forgot(Kit):
        async def slow(self) -> str:
            """Be quick."""
            return "quick"

    assert tools_of(Better)["slow"].spec.description == "Be quick." and "throw" not in tools_of(
        Better
    )
    assert list(tools_of(Better)) == ["find", "plain", "slow", "give"]
    with pytest.raises(ContractError, match=r"Forgot\.slow overrides a tool"):
        tools_of(Forgot)


# What it gets


def test_a_good_call_is_answered():
    given = {
        "query": "q",
        "where": {"city": "Bonn"},
        "tags": ["a"],
        "json": True,
        "copy": "x",
        "limit": 2,
    }
    result = ask("find", given)
    assert result.error is None and result.text == "q Bonn ['a'] fast 2 True x"


@pytest.mark.parametrize(
    ("name", "arguments", "kind", "part"),
    [
        ("fnid", {}, "unknown_tool", "the tools are find, plain"),
        (BadCall("{", "this is no JSON"), None, "bad_call", "this is no JSON"),
        ("find", {"query": 1, "where": {"city": "x"}, "tags": []}, "bad_arguments", "query: "),
        (
            "find",
            {"query": "1", "where": {}, "tags": []},
            "bad_arguments",
            "where.city: field required",
        ),
        ("find", {"query": "1", "where": {"city": "x"}, "tags": "ab"}, "bad_arguments", "tags: "),
        (
            "find",
            {"query": "1", "where": {"city": "x"}, "tags": [], "mode": "x"},
            "bad_arguments",
            "mode: ",
        ),
        ("plain", {"secs": 1}, "bad_arguments", "secs: extra inputs"),
        ("plain", {"held": "1"}, "bad_arguments", "held: "),
        ("plain", {"held": {1, 2}}, "bad_arguments", "plain JSON"),
        ("give", {"what": "\ud83d"}, "bad_arguments", ""),
        ("give", {"what": "newline"}, "tool_error", "ValueError: two lines"),
        ("give", {"what": "empty"}, "tool_error", "ValueError:"),
        ("give", {"what": "nothing such"}, "tool_error", "KeyError: 'nothing such'"),
        ("give", {"what": "timeout"}, "tool_error", "TimeoutError: mine"),
        ("give", {"what": "exit"}, "tool_error", "SystemExit: 3"),
        ("give", {"what": "cancelled"}, "tool_error", "CancelledError: inner"),
        ("give", {"what": "stop"}, "tool_error", "StopAsyncIteration"),
        ("give", {"what": "loop"}, "tool_error", "Circular reference"),
        ("throw", {"what": "value"}, "tool_error", "ValueError: bad"),
        ("throw", {"what": "stop"}, "tool_error", "StopIteration"),
        ("throw", {"what": "exit"}, "tool_error", "SystemExit: 3"),
    ],
)
def test_every_mistake_is_an_answer_of_one_form(name, arguments, kind, part):
    result = ask(name, arguments)
    assert result.error == kind, result
    assert result.text.startswith(f"error: {kind}: ") and part in result.text
    assert "\n" not in result.text and len(result.text) < 500


def test_arguments_nested_beyond_all_measure_are_an_answer():
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert ask("give", {"what": deep}).error == "bad_arguments"


def test_long_error_texts_are_cut():
    assert len(ask("give", {"what": "long"}).text) < 450


def test_what_is_no_text_is_written_as_json():
    assert ask("give", {"what": "none"}).text == "null"
    assert ask("give", {"what": "dict"}).text == '{"a": "{1, 2}"}'
    assert ask("give", {"what": "surrogate"}).text == "a?b"


@given(st.text(alphabet=st.characters(exclude_categories=[]), max_size=20))
@settings(max_examples=50, deadline=None)
def test_any_name_and_argument_is_an_answer_that_can_be_encoded(text):
    for result in (ask(text), ask("give", {"what": text}), ask("give", {text: 1})):
        assert result.error is not None
        result.text.encode()


@pytest.mark.parametrize(("name", "arguments"), [("slow", {}), ("plain", {"held": True})])
def test_a_tool_that_hangs_is_a_timeout(held, name, arguments):
    result = ask(name, arguments, timeout_s=0.05)
    assert result.text == f"error: timeout: {name} took longer than 0.05 s"


def test_a_lost_sandbox_is_no_answer():
    with pytest.raises(SandboxLost):
        ask("give", {"what": "lost"})


def test_hanging_functions_hold_up_no_other(held):
    async def run():
        bound = {key: entry.bind(Kit()) for key, entry in tools_of(Kit).items()}
        hang, quick = ToolCall("plain", {"held": True}), ToolCall("plain", {})
        stuck = await asyncio.gather(*(run_call(bound, hang, 0.05) for _ in range(40)))
        assert {answer.error for answer in stuck} == {"timeout"}
        return await asyncio.gather(*(run_call(bound, quick, 60) for _ in range(40)))

    assert [answer.error for answer in asyncio.run(run())] == [None] * 40


def test_worker_threads_end_when_idle():
    ask("plain", {})
    wait_for(lambda: not any(thread.name == "agentrl-worker" for thread in threading.enumerate()))


@given(st.text(max_size=400), st.integers(1, 200))
def test_clipped_texts_keep_head_and_tail(text, limit):
    clipped = clip_text(text, limit)
    assert (
        clipped == text
        if len(text) <= limit
        else len(clipped) <= limit + 40 and " characters cut]" in clipped
    )
