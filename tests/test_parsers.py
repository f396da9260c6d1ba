from __future__ import annotations

import ast
import gzip
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import parsing
from agentrl.parsers import FORMATTERS, PARSERS
from agentrl.parsing import Parsed, format_reasoning, split_reasoning
from agentrl.types import BadCall, ToolCall

NAMES = sorted(PARSERS)
SENTENCES = {value for value in vars(parsing).values() if isinstance(value, str) and value.startswith("The ")}


def calls(name: str, text: str) -> tuple:
    return PARSERS[name](text).calls


# Round trip.

MARKS = (
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "</parameter>",
    "</function>",
    "<parameter=a>",
    "</think>",
    "```",
)
plain_text = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
tricky_text = st.one_of(
    plain_text,
    st.lists(
        st.sampled_from([*MARKS, '"', "'", "\\", "\n", " ", "{", "}", "[", "]", "(", ")", "1", "true", "é", "x"])
    ).map("".join),
)
numbers = st.one_of(st.integers(-(10**20), 10**20), st.floats(allow_nan=False, allow_infinity=False))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, tricky_text),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(tricky_text, inner, max_size=3)),
    max_leaves=8,
)
tool_names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.\-]{0,12}", fullmatch=True)
xml_keys = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="<>\n"), min_size=1, max_size=8)


def tool_calls(keys: st.SearchStrategy[str]) -> st.SearchStrategy[list[ToolCall]]:
    return st.lists(st.builds(ToolCall, tool_names, st.dictionaries(keys, values, max_size=3)), max_size=3)


# Words only: content that itself has the shape of a call is a call, in every format.
words = st.lists(st.from_regex(r"[A-Za-z,.!? ]{1,12}", fullmatch=True), max_size=4).map("\n".join).map(str.strip)
words = words.map(lambda text: parsing.join_pieces(text.split("\n")))


def same(left: object, right: object) -> bool:
    """Equality that tells 1 from True and -0.0 from 0.0."""
    return left == right and repr(left) == repr(right)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_parse_inverts_format(name: str, data: st.DataObject) -> None:
    content = data.draw(words)
    wanted = data.draw(tool_calls(xml_keys if name == "xml" else tricky_text))
    reasoning = data.draw(words)
    text = format_reasoning(reasoning) + FORMATTERS[name](content, wanted)
    assert same(PARSERS[name](text), Parsed(content, reasoning, tuple(wanted)))


@pytest.mark.parametrize("name", NAMES)
def test_bad_calls_are_written_back_as_they_were(name: str) -> None:
    text = {
        "hermes": '<tool_call>{"name": 1}</tool_call>',
        "xml": "<tool_call>nothing</tool_call>",
        "llama_json": '{"name": 1, "parameters": {}}',
        "python": "[f(1)]",
    }[name]
    good = FORMATTERS[name]("", [ToolCall("g", {"a": 1})])
    first = PARSERS[name](f"{text}\n{good}")
    assert [type(call) for call in first.calls] == [BadCall, ToolCall]
    assert PARSERS[name](FORMATTERS[name]("", first.calls)).calls[1] == first.calls[1]


# Real conversations and gold calls.


def rows(path: Path) -> list[dict]:
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


def glaive_calls(folder: Path) -> list[tuple[str, list[ToolCall]]]:
    found = []
    for row in rows(folder / "tools" / "glaive_toolcall_en_shared.jsonl.gz"):
        said = ""
        for turn in row["conversations"]:
            if turn["from"] == "function_call":
                call = json.loads(turn["value"])
                found.append(("", [ToolCall(call["name"], call["arguments"])]))
            elif turn["from"] == "gpt":
                said = turn["value"].strip()
                found.append((said, []))
    return found


def gold_calls(folder: Path) -> list[tuple[str, list[ToolCall]]]:
    found = []
    for file in sorted((folder / "tools" / "bfcl").glob("*_shared.jsonl.gz")):
        for row in rows(file):
            truth = row["ground_truth"] or []
            if truth and isinstance(truth[0], dict):
                wanted = [
                    ToolCall(name, {key: options[0] for key, options in arguments.items() if options})
                    for entry in truth
                    for name, arguments in entry.items()
                ]
                found.append(("", wanted))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_round_trip_of_real_calls(name: str, data_dir: Path) -> None:
    samples = glaive_calls(data_dir) + gold_calls(data_dir)
    wanted_calls = [call for _, wanted in samples for call in wanted]
    assert len(samples) > 900
    assert len(wanted_calls) > 800
    for content, wanted in samples:
        parsed = PARSERS[name](FORMATTERS[name](content, wanted))
        assert same(parsed.calls, tuple(wanted))
        assert parsed.content.split() == content.split()


def test_python_reads_the_gold_calls_of_real_multi_turn_tasks(data_dir: Path) -> None:
    texts = [
        text
        for row in rows(data_dir / "tools" / "bfcl" / "multi_turn_base_shared.jsonl.gz")
        for turn in row["ground_truth"]
        for text in turn
    ]
    assert len(texts) > 400
    named = 0
    for text in texts:
        tree = ast.parse(text, mode="eval").body
        assert isinstance(tree, ast.Call)
        (call,) = calls("python", text)
        if tree.args:
            assert call == BadCall(text, parsing.POSITIONAL)
            continue
        named += 1
        assert call == ToolCall(
            ast.unparse(tree.func), {arg.arg: _listed(ast.literal_eval(arg.value)) for arg in tree.keywords}
        )
    assert named > 300


def _listed(value: object) -> object:
    return json.loads(json.dumps(value))


# No input raises.

PIECES = [
    *MARKS,
    "<think>",
    "<function=f>",
    "<parameter=",
    ">",
    '{"name": "f", "arguments": {',
    '"parameters": {',
    "}}",
]
PIECES += ["f(", "[f(a=", ")", "]", "}", "{", "\\", '"', "'", '"""', "\n", "1e999", "NaN", "-", "**{", ",", ";", "\0"]
soup = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=25).map("".join)


@pytest.mark.parametrize("name", NAMES)
@given(text=st.one_of(st.text(), soup))
@settings(max_examples=200, deadline=None)
def test_no_text_raises_and_every_reason_is_a_fixed_sentence(name: str, text: str) -> None:
    parsed = PARSERS[name](text)
    for call in parsed.calls:
        if isinstance(call, BadCall):
            assert call.why in SENTENCES
            assert call.text in text
        else:
            assert call.name.strip()
            json.dumps(dict(call.arguments), allow_nan=False).encode()
    assert PARSERS[name](text) == parsed


DEEP = 50_000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": ' + "[" * DEEP),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 100 + "]" * 100 + "}}</tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + '{"a":' * DEEP + "}</tool_call>"),
        ("llama_json", '{"name": "f", "parameters": {"a": ' + "[" * DEEP),
        ("xml", "<tool_call><function=f>" + "<parameter=a>" * DEEP),
        ("python", "[f(a=" + "[" * DEEP + "]" * DEEP + ")]"),
        ("python", "f(a=" + "(" * 250 + ")" * 250 + ")"),
        ("python", "f(a=" + "-" * DEEP + "1)"),
        ("python", "f(a=" + "1+" * DEEP + "1)"),
        ("python", "f(a=" + "not " * DEEP + "1)"),
        ("python", "[" + "f(a=" * DEEP),
    ],
)
def test_huge_nesting_is_a_bad_call(name: str, text: str) -> None:
    found = calls(name, text)
    assert found
    assert isinstance(found[0], BadCall)
    assert found[0].why in SENTENCES


def test_a_json_value_in_xml_that_is_too_deep_stays_text() -> None:
    deep = "[" * DEEP + "]" * DEEP
    text = f"<tool_call><function=f><parameter=a>{deep}</parameter></function></tool_call>"
    assert calls("xml", text) == (ToolCall("f", {"a": deep}),)


OPENINGS = ["<tool_call>", "<tool_call>{", '<tool_call>{"a', "<tool_call><function=f><parameter=a>", "<parameter=a>"]
OPENINGS += ["{\n", "[f(a=", "f(a=", 'f("""', "[{", "<|python_tag|>", '{"name":\n', "<think>"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.timeout(20)
def test_many_openings_are_no_denial_of_service(name: str) -> None:
    for piece in OPENINGS:
        PARSERS[name](piece * 1000)
        PARSERS[name](f"{piece}\n" * 1000)


# Defined behaviour, format by format.


def test_hermes_takes_several_calls_and_the_text_around_them() -> None:
    first = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    second = '<tool_call>\n{"arguments": {"a": 1}, "name": "g"}\n</tool_call>'
    text = f"One.\n{first} Two. {second}\nThree."
    assert PARSERS["hermes"](text) == Parsed("One.\nTwo.\nThree.", "", (ToolCall("f", {}), ToolCall("g", {"a": 1})))


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
    assert PARSERS["hermes"](f"before {text} after") == Parsed("before\nafter", "", (BadCall(text, why),))


def test_hermes_decodes_arguments_given_as_a_string_once() -> None:
    inner = json.dumps({"a": '{"b": 1}'})
    text = f'<tool_call>{{"name": "f", "arguments": {json.dumps(inner)}}}</tool_call>'
    assert calls("hermes", text) == (ToolCall("f", {"a": '{"b": 1}'}),)


def test_hermes_block_that_is_not_closed_is_bad_up_to_the_next_block() -> None:
    good = '{"name": "f", "arguments": {}}'
    found = calls("hermes", f"<tool_call>{good}\n<tool_call>{good}</tool_call><tool_call>{good}")
    assert found == (
        BadCall(f"<tool_call>{good}\n", parsing.UNTERMINATED),
        ToolCall("f", {}),
        BadCall(f"<tool_call>{good}", parsing.UNTERMINATED),
    )


def test_hermes_tags_inside_strings_are_text() -> None:
    wanted = ToolCall("write", {"text": "</tool_call><tool_call>"})
    assert calls("hermes", FORMATTERS["hermes"]("", [wanted])) == (wanted,)


def test_a_fence_around_hermes_tags_changes_nothing() -> None:
    assert calls("hermes", '```\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n```') == (ToolCall("f", {}),)


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
        '{"name": "f", "parameters": {"a": NUMBER}}'.replace("NUMBER", str(index)) for index in range(3)
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
    assert calls("llama_json", text) == (BadCall(text, why),)


def test_llama_json_goes_on_behind_a_broken_object() -> None:
    found = calls("llama_json", '{"name": "f", "parameters": {bad}}\n{"name": "g", "parameters": {}}')
    assert found == (BadCall('{"name": "f", "parameters": {bad}}', parsing.NOT_JSON), ToolCall("g", {}))


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
    wanted = {"a": 1, "b": 1.5, "c": True, "d": {"x": [1]}, "e": "plain words", "f": "1", "g": "NaN", "h": ""}
    text = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in written.items())
    assert same(calls("xml", f"<tool_call>\n<function=f>\n{text}</function>\n</tool_call>"), (ToolCall("f", wanted),))


def test_xml_keeps_the_lines_of_a_value() -> None:
    wanted = ToolCall("write", {"text": "\n  def f():\n    return '</tool_call>'\n\n"})
    text = FORMATTERS["xml"]("", [wanted])
    assert "def f():\n    return" in text
    assert calls("xml", text) == (wanted,)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ('{"name": "f", "arguments": {}}', parsing.BAD_XML),
        ("<function=f>", parsing.BAD_XML),
        ("<function=>\n</function>", parsing.BAD_XML),
        ("<function=f>words</function>", parsing.BAD_XML),
        ("<function=f><parameter=a>1</function>", parsing.BAD_XML),
        ("<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>", parsing.DUPLICATE),
        ("<function=f></function> words", parsing.TRAILING),
    ],
)
def test_xml_refuses(body: str, why: str) -> None:
    text = f"<tool_call>{body}</tool_call>"
    assert calls("xml", text) == (BadCall(text, why),)
    assert calls("xml", f"<tool_call>{body}") == (BadCall(f"<tool_call>{body}", parsing.UNTERMINATED),)


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
        ('f(code="""\ndef g():\n    return ")"\n""")', [ToolCall("f", {"code": '\ndef g():\n    return ")"\n'})]),
        ("f(**{'class': 1}, a='\\d')", [ToolCall("f", {"class": 1, "a": "\\d"})]),
        ('f(text="""\n```\ng(a=1)\n```\n""")', [ToolCall("f", {"text": "\n```\ng(a=1)\n```\n"})]),
        ("[f(a='it''s')]", [ToolCall("f", {"a": "its"})]),
    ],
)
def test_python_reads(text: str, wanted: list[ToolCall]) -> None:
    assert PARSERS["python"](text) == Parsed("", "", tuple(wanted))
    assert PARSERS["python"](f"Words first.\n{text}\nAnd after.").content == "Words first.\nAnd after."


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
    assert calls("python", text) == (BadCall(text, why),)


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
    calls("python", f"f(a=open({str(target)!r}, 'w'))")
    calls("python", f"[f(a=[open({str(target)!r}, 'w') for _ in (1,)])]")
    assert not target.exists()


@pytest.mark.parametrize("name", NAMES)
def test_arguments_that_are_no_json_cannot_be_written(name: str) -> None:
    with pytest.raises(ValueError, match=r"not JSON compliant|Out of range"):
        FORMATTERS[name]("", [ToolCall("f", {"a": math.nan})])


def test_reasoning_is_a_leading_block() -> None:
    assert split_reasoning("\n<think>\na\n</think>\n\nb") == ("a", "\n\nb")
    assert split_reasoning("<think>never closed <tool_call>") == ("never closed <tool_call>", "")
    assert split_reasoning("b <think>a</think>") == ("", "b <think>a</think>")
    assert calls("hermes", '<think><tool_call>{"name": "f", "arguments": {}}</tool_call></think>no') == ()
