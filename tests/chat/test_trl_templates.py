"""Every chat template that TRL ships for text: nothing is set, and all of it works."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_tokenizers import CALL, EPISODE, TALK, TOOLS, text_of
from trl_templates import trl_names, trl_template, trl_tokenizer

from agentrl.chat.contract import exact, fragment, simulate
from agentrl.chat.parsers import FORMATS
from agentrl.chat.settings import ChatSettings
from agentrl.chat.tokens import Chat
from agentrl.engines.factory import check_model, open_chat
from agentrl.errors import ConfigError
from agentrl.evaluation.run import EvalPlan, evaluate
from agentrl.registry import factory
from agentrl.trainers.models.tiny import build_model
from agentrl.trainers.session import run_training
from agentrl.types import Message, ToolCall, ToolSpec

REFUSED: dict[str, str] = {}
"""Template -> what is wrong with it. None is refused."""

SPOKEN = {
    "atem": ("muse_glimmer",),
    "deepseek": ("deepseek_r1_distill", "deepseekv3"),
    "gemma": ("diffusion_gemma", "gemma4"),
    "glm": ("glm4moe",),
    "harmony": ("gptoss",),
    "hermes": ("cohere", "gemma", "llama3", "phi3", "qwen2_5", "qwen3", "qwen3_instruct_2507"),
    "lfm2": ("lfm2",),
    "llama_json": ("llama3_1", "llama3_2"),
    "xml": ("nemotron_3", "qwen3_5", "qwen3_6", "qwen3_8"),
}
"""Parser -> beginnings of the templates that it must be found for; the longest one counts."""

BY_USER = {"cohere", "cohere2", "gemma", "gemma3", "phi3", "phi3_5"}
"""Templates without a place for tool results."""

TYPED = [
    ToolSpec(
        "search",
        "Find it.",
        {
            "type": "object",
            "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
        },
    )
]


def expected_parser(name: str) -> str:
    starts = {start: parser for parser, names in SPOKEN.items() for start in names}
    return starts[max((start for start in starts if name.startswith(start)), key=len)]


def test_all_templates_are_here() -> None:
    assert len(trl_names()) >= 35
    assert len(REFUSED) <= 3


@pytest.mark.parametrize("name", trl_names())
def test_check_holds_with_nothing_set(name: str, tmp_path: Path) -> None:
    trl_tokenizer(name).save_pretrained(tmp_path)
    found = check_model(tmp_path)
    assert found["problems"] == []
    assert found["round_trip"] is True
    assert found["parser"] == expected_parser(name)
    assert found["tool_role"] == ("user" if name in BY_USER else "tool")
    assert found["on_rewrite"] == "branch"


@pytest.mark.parametrize("name", trl_names())
def test_what_is_played_is_what_trains_and_text_stays_text(name: str) -> None:
    chat = Chat(trl_tokenizer(name))
    for emit in (list, lambda ids: fragment(chat, ids)):
        played = simulate(chat, TALK, TOOLS, emit)
        assert all(exact(branch) for branch in played)
        trained = sum(branch.trajectory.trained for branch in played)
        assert trained == sum(len(ids) for branch in played for ids in branch.emitted)
    evil = "".join(sorted({t.content for t in chat.tokenizer.added_tokens_decoder.values()}))
    safe = "harmless"

    def opening(text: str) -> list[int]:
        said = [Message.system(text), Message.user(text), *EPISODE[2:3]]
        return chat.prompt_ids([*said, Message.tool(text, CALL)], TOOLS)

    special = {t for t, one in chat.tokenizer.added_tokens_decoder.items() if one.special}
    assert [t for t in opening(evil) if t in special] == [t for t in opening(safe) if t in special]


@pytest.mark.parametrize("name", trl_names())
def test_the_model_reads_how_to_call_its_tools(name: str) -> None:
    chat = Chat(trl_tokenizer(name))
    prompt = text_of(chat, chat.prompt_ids(EPISODE[:2], TOOLS))
    assert "search" in prompt
    assert "Be brief." in prompt
    described = "You can call these tools:" in prompt
    assert described == (not chat.shows_tools)
    if described:
        example = chat.template.encode_turn(prompt.partition("result:\n")[2])
        (call,) = chat.parse(example, chat.template.encode("words")).tool_calls
        assert isinstance(call, ToolCall)
        assert call.name == "TOOL"


@pytest.mark.parametrize("name", ["qwen3_6", "glm4moe", "muse_glimmer"])
def test_text_that_reads_as_a_number_stays_text_where_the_schema_says_so(name: str) -> None:
    chat = Chat(trl_tokenizer(name))
    call = ToolCall("search", {"query": "42", "limit": 3})
    ids = chat.turn_ids(Message.assistant("", call))
    assert chat.parse(ids, tools=TYPED).tool_calls == (call,)
    bare = text_of(chat, ids[:-1]).replace('"42"', "42")
    assert chat.parse(chat.template.encode(bare), tools=TYPED).tool_calls == (call,)
    (read,) = chat.parse(chat.template.encode(bare)).tool_calls
    assert read == ToolCall("search", {"query": 42, "limit": 3})


def test_a_prompt_that_opens_no_thinking_is_read_as_such() -> None:
    chat = Chat(trl_tokenizer("deepseekv3"))
    asked = chat.prompt_ids(EPISODE[:2], TOOLS)
    answered = chat.prompt_ids(EPISODE[:4], TOOLS)
    assert text_of(chat, asked).endswith("<think>\n")
    assert not text_of(chat, answered).endswith("<think>\n")
    ids = chat.template.encode("four")
    assert chat.parse(ids, asked) == Message("assistant", "", reasoning="four")
    assert chat.parse(ids, answered) == Message("assistant", "four")


def test_an_analysis_message_does_not_end_the_turn() -> None:
    chat = Chat(trl_tokenizer("gptoss"))
    stops = {text_of(chat, [token]) for token in chat.stop_ids}
    assert stops == {"<|call|>", "<|return|>", "<eos>"}
    text = (
        "<|channel|>analysis<|message|>Why.<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.search <|constrain|>json<|message|>{"query": "hello"}'
    )
    ids = [*chat.template.encode(text), chat.template.token("<|call|>")]
    assert chat.parse(ids) == Message("assistant", "", (CALL,), reasoning="Why.")


def test_settings_name_every_parser() -> None:
    schema = ChatSettings.model_json_schema()["properties"]["parser"]
    assert set(schema["enum"]) == {"auto", *FORMATS}


def test_a_base_model_takes_a_shipped_template_or_a_file(tmp_path: Path) -> None:
    tokenizer = trl_tokenizer("qwen2_5")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    (problem,) = check_model(tmp_path / "model")["problems"]
    assert "set chat.template to the name of a shipped one" in problem
    for template in ("chatml", "plain"):
        found = check_model(tmp_path / "model", ChatSettings(template=template))
        assert (found["problems"], found["round_trip"]) == ([], True)
    (tmp_path / "mine.jinja").write_text(trl_template("qwen3_6"))
    chat = open_chat(tmp_path / "model", ChatSettings(template=str(tmp_path / "mine.jinja")))
    assert chat.parser == "xml"
    with pytest.raises(ConfigError, match=r"chat\.template='none' is neither .*chatml, plain"):
        open_chat(tmp_path / "model", ChatSettings(template="none"))


FAMILIES = ("qwen3_6", "llama3_1", "gptoss", "gemma")


def models() -> list[object]:
    return [
        name if name in FAMILIES else pytest.param(name, marks=pytest.mark.long)
        for name in trl_names()
    ]


@pytest.mark.parametrize("name", models())
def test_a_model_trains_and_is_evaluated_with_nothing_set(name: str, tmp_path: Path) -> None:
    model = build_model(tmp_path / "model", trl_tokenizer(name), width=32, layers=1, context=2048)
    (tmp_path / "run.toml").write_text(
        f'env = "calc-v0"\nmodel = "{model}"\nsteps = 1\ntasks_per_step = 1\ngroup_size = 2\n'
    )
    trained = run_training(tmp_path / "run.toml", tmp_path / "run")
    assert f'parser = "{expected_parser(name)}"' in (tmp_path / "run" / "config.toml").read_text()
    result = evaluate(EvalPlan(factory("calc-v0"), f"hf:{trained['model']}", limit=1))
    assert result["chat"]["parser"] == expected_parser(name)
    assert result["n_episodes"] == 1
    assert result["n_failed_infra"] == 0
