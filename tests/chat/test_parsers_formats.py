"""Parsers, format by format: what is a call, what is text, and why a call is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import calls_of, same

from agentrl.chat import parsing
from agentrl.chat.parsers import FORMATTERS, PARSERS
from agentrl.chat.parsing import Parsed
from agentrl.types import BadCall, ToolCall


def test_hermes_takes_several_calls_and_the_text_around_them() -> None:
    first = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    second = '<tool_call>\n{"arguments": {"a": 1}, "name": "g"}\n</tool_call>'
    text = f"One.\n{first} Two. {second}\nThree."
    assert PARSERS["hermes"](text) == Parsed(
        "One.\nTwo.\nThree.", "", (ToolCall("f", {}), ToolCall("g", {"a": 1}))
    )


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ('{"name": "f", "arguments": {}', parsing.NOT_JSON),
        ("f(a=1)", parsing.NOT_JSON),
        ("", parsing.NOT_JSON),
        ("[]", parsing.NOT_OBJECT),
        ('{"arguments": {}}', parsing.NO_NAME),
        ('{"name": "", "arguments": {}}', parsing.NO_NAME),
        ('{"name": 3, "arguments": {}}', parsing.NO_NAME),
        ('{"name": "f"}', parsing.BAD_ARGUMENTS),
        ('{"name": "f", "parameters": {}}', parsing.BAD_ARGUMENTS),
        ('{"name": "f", "arguments": [1]}', parsing.BAD_ARGUMENTS),
        ('{"name": "f", "arguments": null}', parsing.BAD_ARGUMENTS),
        ('{"name": "f", "arguments": "[1]"}', parsing.BAD_ARGUMENTS),
        ('{"name": "f", "arguments": "{"}', parsing.NOT_JSON),
        ('{"name": "f", "arguments": {"a": 1, "a": 2}}', parsing.DUPLICATE),
        ('{"name": "f", "name": "g", "arguments": {}}', parsing.DUPLICATE),
        ('{"name": "f", "arguments": {"a": NaN}}', parsing.NOT_FINITE),
        ('{"name": "f", "arguments": {"a": -Infinity}}', parsing.NOT_FINITE),
        ('{"name": "f", "arguments": {"a": 1e999}}', parsing.NOT_FINITE),
        ('{"name": "f", "arguments": {"a": "\\ud800"}}', parsing.NOT_JSON),
        ('{"name": "f", "arguments": {}} and more', parsing.TRAILING),
        ('```json\n{"name": "f", "arguments": {}}\n```', parsing.NOT_JSON),
    ],
)
def test_hermes_refuses(body: str, why: str) -> None:
    text = f"<tool_call>{body}</tool_call>"
    assert PARSERS["hermes"](f"before {text} after") == Parsed(
        "before\nafter", "", (BadCall(text, why),)
    )


def test_hermes_decodes_arguments_given_as_a_string_once() -> None:
    inner = json.dumps({"a": '{"b": 1}'})
    text = f'<tool_call>{{"name": "f", "arguments": {json.dumps(inner)}}}</tool_call>'
    assert calls_of("hermes", text) == (ToolCall("f", {"a": '{"b": 1}'}),)


def test_hermes_block_that_is_not_closed_is_bad_up_to_the_next_block() -> None:
    good = '{"name": "f", "arguments": {}}'
    found = calls_of("hermes", f"<tool_call>{good}\n<tool_call>{good}</tool_call><tool_call>{good}")
    assert found == (
        BadCall(f"<tool_call>{good}\n", parsing.UNTERMINATED),
        ToolCall("f", {}),
        BadCall(f"<tool_call>{good}", parsing.UNTERMINATED),
    )


def test_hermes_tags_inside_strings_are_text() -> None:
    wanted = ToolCall("write", {"text": "</tool_call><tool_call>"})
    assert calls_of("hermes", FORMATTERS["hermes"]("", [wanted])) == (wanted,)


def test_a_fence_around_hermes_tags_changes_nothing() -> None:
    assert calls_of(
        "hermes", '```\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n```'
    ) == (ToolCall("f", {}),)


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "parameters": {"a": 1}}',
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}',
        '[{"name": "f", "parameters": {"a": 1}}]',
        '```json\n{"name": "f", "parameters": {"a": 1}}\n```',
        '  {\n  "name": "f",\n  "parameters": {"a": 1}\n}\n',
        '{"type": "function", "name": "f", "parameters": "{\\"a\\": 1}"}',
    ],
)
def test_llama_json_spellings_of_one_call(text: str) -> None:
    assert PARSERS["llama_json"](text) == Parsed("", "", (ToolCall("f", {"a": 1}),))


@pytest.mark.parametrize("separator", ["\n", "; ", ", ", ";\n", ""])
def test_llama_json_several_objects(separator: str) -> None:
    text = separator.join(
        '{"name": "f", "parameters": {"a": NUMBER}}'.replace("NUMBER", str(index))
        for index in range(3)
    )
    wanted = tuple(ToolCall("f", {"a": index}) for index in range(3))
    assert PARSERS["llama_json"](f"Words.\n{text}\nMore.") == Parsed("Words.\nMore.", "", wanted)


@pytest.mark.parametrize(
    "text", ['{"answer": 4}', 'Use {"name": "f", "parameters": {}} for it.', "{not json}", "[1, 2]"]
)
def test_llama_json_leaves_other_json_in_the_content(text: str) -> None:
    assert PARSERS["llama_json"](text) == Parsed(text, "", ())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"name": "f", "parameters": {"a":', parsing.NOT_JSON),
        ('{"name": "f"}', parsing.BAD_ARGUMENTS),
        ('{"parameters": {}}', parsing.NO_NAME),
        ("<|python_tag|>print(1)", parsing.NOT_JSON),
        ('{"name": "f", "parameters": {"a": NaN}}', parsing.NOT_FINITE),
    ],
)
def test_llama_json_refuses(text: str, why: str) -> None:
    assert calls_of("llama_json", text) == (BadCall(text, why),)


def test_llama_json_goes_on_behind_a_broken_object() -> None:
    found = calls_of(
        "llama_json", '{"name": "f", "parameters": {bad}}\n{"name": "g", "parameters": {}}'
    )
    assert found == (
        BadCall('{"name": "f", "parameters": {bad}}', parsing.NOT_JSON),
        ToolCall("g", {}),
    )


def test_xml_values_are_json_where_they_parse() -> None:
    written = {
        "a": "1",
        "b": "1.5",
        "c": "true",
        "d": '{"x": [1]}',
        "e": "plain words",
        "f": '"1"',
        "g": "NaN",
        "h": "",
    }
    wanted = {
        "a": 1,
        "b": 1.5,
        "c": True,
        "d": {"x": [1]},
        "e": "plain words",
        "f": "1",
        "g": "NaN",
        "h": "",
    }
    text = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in written.items())
    assert same(
        calls_of("xml", f"<tool_call>\n<function=f>\n{text}</function>\n</tool_call>"),
        (ToolCall("f", wanted),),
    )


def test_xml_keeps_the_lines_of_a_value() -> None:
    wanted = ToolCall("write", {"text": "\n  def f():\n    return '</tool_call>'\n\n"})
    text = FORMATTERS["xml"]("", [wanted])
    assert "def f():\n    return" in text
    assert calls_of("xml", text) == (wanted,)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ('{"name": "f", "arguments": {}}', parsing.BAD_XML),
        ("<function=f>", parsing.BAD_XML),
        ("<function=>\n</function>", parsing.BAD_XML),
        ("<function=f>words</function>", parsing.BAD_XML),
        ("<function=f><parameter=a>1</function>", parsing.BAD_XML),
        (
            "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>",
            parsing.DUPLICATE,
        ),
        ("<function=f></function> words", parsing.TRAILING),
    ],
)
def test_xml_refuses(body: str, why: str) -> None:
    text = f"<tool_call>{body}</tool_call>"
    assert calls_of("xml", text) == (BadCall(text, why),)
    assert calls_of("xml", f"<tool_call>{body}") == (
        BadCall(f"<tool_call>{body}", parsing.UNTERMINATED),
    )


@pytest.mark.parametrize("label", ["", "a>b", "a\nb", "<"])
def test_xml_cannot_write_such_names(label: str) -> None:
    with pytest.raises(ValueError, match="cannot be written"):
        FORMATTERS["xml"]("", [ToolCall("f", {label: 1})])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("f(a=1)", [ToolCall("f", {"a": 1})]),
        ("[f(a=1), g.h(b='x')]", [ToolCall("f", {"a": 1}), ToolCall("g.h", {"b": "x"})]),
        ("f(a=1)\ng()", [ToolCall("f", {"a": 1}), ToolCall("g", {})]),
        (
            "```python\nf(a=(1, -2.5), b={'k': [None, True]})\n```",
            [ToolCall("f", {"a": [1, -2.5], "b": {"k": [None, True]}})],
        ),
        (
            'f(code="""\ndef g():\n    return ")"\n""")',
            [ToolCall("f", {"code": '\ndef g():\n    return ")"\n'})],
        ),
        ("f(**{'class': 1}, a='\\d')", [ToolCall("f", {"class": 1, "a": "\\d"})]),
        ('f(text="""\n```\ng(a=1)\n```\n""")', [ToolCall("f", {"text": "\n```\ng(a=1)\n```\n"})]),
        ("[f(a='it''s')]", [ToolCall("f", {"a": "its"})]),
    ],
)
def test_python_reads(text: str, wanted: list[ToolCall]) -> None:
    assert PARSERS["python"](text) == Parsed("", "", tuple(wanted))
    assert (
        PARSERS["python"](f"Words first.\n{text}\nAnd after.").content == "Words first.\nAnd after."
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("f(1)", parsing.POSITIONAL),
        ("f(a=b)", parsing.NOT_LITERAL),
        ("f(a=__import__('os'))", parsing.NOT_LITERAL),
        ("f(a=1+1)", parsing.NOT_LITERAL),
        ("f(a={1, 2})", parsing.NOT_LITERAL),
        ("f(a={1: 2})", parsing.NOT_LITERAL),
        ("f(a=b'x')", parsing.NOT_LITERAL),
        ("f(a=1j)", parsing.NOT_LITERAL),
        ("f(a=...)", parsing.NOT_LITERAL),
        ("f(a=f'{x}')", parsing.NOT_LITERAL),
        ("f(a='\\ud800')", parsing.NOT_LITERAL),
        ("f(a=1, a=2)", parsing.DUPLICATE),
        ("f(a=1, **{'a': 2})", parsing.DUPLICATE),
        ("f(a={'k': 1, 'k': 2})", parsing.DUPLICATE),
        ("f(a=1e999)", parsing.NOT_FINITE),
        ("f(a=-1e999)", parsing.NOT_FINITE),
        ("f(a=", parsing.UNTERMINATED),
        ("[f(a=1)", parsing.UNTERMINATED),
        ("[f(a='x)]", parsing.UNTERMINATED),
    ],
)
def test_python_refuses(text: str, why: str) -> None:
    assert calls_of("python", text) == (BadCall(text, why),)


@pytest.mark.parametrize(
    "text",
    [
        "Note (see below).",
        "f(x) is a function",
        "f(x",
        "[1, 2]",
        "It is f(a=1).",
        "Try this:\n```python\nx = g(1)\nf(a=1)\n```",
        "```python\nimport os\nprint(1)\n```",
    ],
)
def test_python_leaves_prose_alone(text: str) -> None:
    assert PARSERS["python"](text) == Parsed(text, "", ())


def test_python_never_runs_anything(tmp_path: Path) -> None:
    target = tmp_path / "run"
    calls_of("python", f"f(a=open({str(target)!r}, 'w'))")
    calls_of("python", f"[f(a=[open({str(target)!r}, 'w') for _ in (1,)])]")
    assert not target.exists()
