from __future__ import annotations

import ast
import gzip
import json
import math
from pathlib import Path

import pytest
from helpers import calls_of, same
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.chat import parsing
from agentrl.chat.parsers import FORMATS, FORMATTERS, PARSERS
from agentrl.chat.parsing import Parsed, split_reasoning
from agentrl.types import BadCall, Message, ToolCall

NAMES = sorted(PARSERS)
SENTENCES = {
    value for value in vars(parsing).values() if isinstance(value, str) and value.startswith("The ")
}


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
    "<arg_key>a</arg_key>",
    "</arg_value>",
    "</atem:parameter>",
    "<|tool_call_end|>",
    "<｜tool▁call▁end｜>",
    "<|END_ACTION|>",
    "[TOOL_CALLS]",
    "<|end|>",
    "<|start|>assistant",
    "<|message|>",
    "<|eom|>",
    "<tool_call|>",
)
plain_text = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
tricky_text = st.one_of(
    plain_text,
    st.lists(
        st.sampled_from(
            [*MARKS, '"', "'", "\\", "\n", " ", "{", "}", "[", "]", "(", ")", "1", "true", "é", "x"]
        )
    ).map("".join),
)
numbers = st.one_of(
    st.integers(-(10**20), 10**20), st.floats(allow_nan=False, allow_infinity=False)
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, tricky_text),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(tricky_text, inner, max_size=3)
    ),
    max_leaves=8,
)
tool_names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.\-]{0,12}", fullmatch=True)
xml_keys = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters='<>\n"'), min_size=1, max_size=8
)
RAW = ("xml", "glm", "atem")


def tool_calls(keys: st.SearchStrategy[str]) -> st.SearchStrategy[list[ToolCall]]:
    return st.lists(
        st.builds(ToolCall, tool_names, st.dictionaries(keys, values, max_size=3)), max_size=3
    )


# Words only: content that itself has the shape of a call is a call, in every format.
words = (
    st.lists(st.from_regex(r"[A-Za-z,.!? ]{1,12}", fullmatch=True), max_size=4)
    .map("\n".join)
    .map(str.strip)
)
words = words.map(lambda text: parsing.join_pieces(text.split("\n")))


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_parse_inverts_format(name: str, data: st.DataObject) -> None:
    content = data.draw(words)
    wanted = data.draw(tool_calls(xml_keys if name in RAW else tricky_text))
    reasoning = data.draw(words)
    text = FORMATS[name].turn(Message("assistant", content, tuple(wanted), reasoning=reasoning))
    assert same(PARSERS[name](text), Parsed(content, reasoning, tuple(wanted)))


@pytest.mark.parametrize("name", NAMES)
def test_bad_calls_are_written_back_as_they_were(name: str) -> None:
    text = {
        "hermes": '<tool_call>{"name": 1}</tool_call>',
        "xml": "<tool_call>nothing</tool_call>",
        "llama_json": '{"name": 1, "parameters": {}}',
        "python": "[f(1)]",
        "glm": "<tool_call>f<arg_key>a</tool_call>",
        "deepseek": "<｜tool▁call▁begin｜>f<｜tool▁call▁end｜>",
        "cohere": "<|START_ACTION|>[1]<|END_ACTION|>",
        "mistral": '[TOOL_CALLS]{"name": 1}',
        "lfm2": "<|tool_call_start|>[f(1)]<|tool_call_end|>",
        "gemma": "<|tool_call>call:f{a}<tool_call|>",
        "harmony": " to=functions.f<|message|>{}}<|end|><|start|>assistant",
        "atem": " to=f<|message|>nothing<|eom|><|start|>assistant",
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
                    ToolCall(
                        name, {key: options[0] for key, options in arguments.items() if options}
                    )
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
        (call,) = calls_of("python", text)
        if tree.args:
            assert call == BadCall(text, parsing.POSITIONAL)
            continue
        named += 1
        assert call == ToolCall(
            ast.unparse(tree.func),
            {arg.arg: _listed(ast.literal_eval(arg.value)) for arg in tree.keywords},
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
    "<|start|>assistant",
    " to=functions.f",
    "<|channel|>analysis",
    "<|message|>",
    '<atem:invoke name="f">',
    "<atem:function_calls>",
    "<|tool_call>call:f{",
    '<|"|>',
    "a:",
    "<|tool_call_start|>[",
    "'",
    "f(a='",
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n",
    "<|START_ACTION|>",
    "f[ARGS]",
]
PIECES += [
    "f(",
    "[f(a=",
    ")",
    "]",
    "}",
    "{",
    "\\",
    '"',
    "'",
    '"""',
    "\n",
    "1e999",
    "NaN",
    "-",
    "**{",
    ",",
    ";",
    "\0",
]
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
    good = tuple(call for call in parsed.calls if isinstance(call, ToolCall))
    assert PARSERS[name](FORMATTERS[name]("", good)).calls == good


DEEP = 50_000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": ' + "[" * DEEP),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": '
            + "[" * 100
            + "]" * 100
            + "}}</tool_call>",
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": ' + '{"a":' * DEEP + "}</tool_call>",
        ),
        ("llama_json", '{"name": "f", "parameters": {"a": ' + "[" * DEEP),
        ("xml", "<tool_call><function=f>" + "<parameter=a>" * DEEP),
        ("python", "[f(a=" + "[" * DEEP + "]" * DEEP + ")]"),
        ("python", "f(a=" + "(" * 250 + ")" * 250 + ")"),
        ("python", "f(a=" + "-" * DEEP + "1)"),
        ("python", "f(a=" + "1+" * DEEP + "1)"),
        ("python", "f(a=" + "not " * DEEP + "1)"),
        ("python", "[" + "f(a=" * DEEP),
        ("lfm2", "<|tool_call_start|>[f(a=" + "[" * DEEP + "]" * DEEP + ")]<|tool_call_end|>"),
        ("gemma", "<|tool_call>call:f{a:" + "[" * DEEP + "]" * DEEP + "}<tool_call|>"),
        ("gemma", "<|tool_call>call:f{a:" + "{a:" * DEEP),
        ("harmony", " to=functions.f<|message|>" + '{"a":' * DEEP),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>" + '{"a":' * DEEP),
        ("mistral", "[TOOL_CALLS]" + "[" * DEEP),
        ("cohere", "<|START_ACTION|>" + "[" * DEEP),
    ],
)
def test_huge_nesting_is_a_bad_call(name: str, text: str) -> None:
    found = calls_of(name, text)
    assert found
    assert isinstance(found[0], BadCall)
    assert found[0].why in SENTENCES


def test_a_json_value_in_xml_that_is_too_deep_stays_text() -> None:
    deep = "[" * DEEP + "]" * DEEP
    text = f"<tool_call><function=f><parameter=a>{deep}</parameter></function></tool_call>"
    assert calls_of("xml", text) == (ToolCall("f", {"a": deep}),)


OPENINGS = [
    "<tool_call>",
    "<tool_call>{",
    '<tool_call>{"a',
    "<tool_call><function=f><parameter=a>",
    "<parameter=a>",
]
OPENINGS += ["<|message|>", " to=f<|message|>", "<|start|>assistant", "<|channel|>"]
OPENINGS += ["<atem:function_calls>", '<atem:invoke name="f"><atem:parameter name="a">']
OPENINGS += [
    "<|tool_call>",
    "<|tool_call>call:f{a:{",
    "<|tool_call_start|>[f(a='",
    "[TOOL_CALLS][{",
]
OPENINGS += ["<tool_call>f<arg_key>a</arg_key><arg_value>", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"]
OPENINGS += ["{\n", "[f(a=", "f(a=", 'f("""', "[{", "<|python_tag|>", '{"name":\n', "<think>"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.timeout(20)
def test_many_openings_are_no_denial_of_service(name: str) -> None:
    for piece in OPENINGS:
        PARSERS[name](piece * 1000)
        PARSERS[name](f"{piece}\n" * 1000)


@pytest.mark.parametrize("name", NAMES)
def test_arguments_that_are_no_json_cannot_be_written(name: str) -> None:
    with pytest.raises(ValueError, match=r"not JSON compliant|Out of range"):
        FORMATTERS[name]("", [ToolCall("f", {"a": math.nan})])


def test_reasoning_is_a_leading_block() -> None:
    assert split_reasoning("\n<think>\na\n</think>\n\nb") == ("a", "\n\nb")
    assert split_reasoning("<think>never closed <tool_call>") == ("never closed <tool_call>", "")
    assert split_reasoning("b <think>a</think>") == ("", "b <think>a</think>")
    assert (
        calls_of("hermes", '<think><tool_call>{"name": "f", "arguments": {}}</tool_call></think>no')
        == ()
    )
