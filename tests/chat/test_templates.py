"""Templates that rewrite history, and templates, settings and calls that are refused."""

from __future__ import annotations

import pytest
from tiny_tokenizers import (
    ASK,
    CALL,
    EPISODE,
    RESULT,
    REWRITING,
    TALK,
    TASK,
    TOOLS,
    build,
    chat_of,
    text_of,
    tiny,
)

from agentrl.chat.contract import check_chat
from agentrl.chat.tokens import Chat
from agentrl.errors import ConfigError, TemplateError
from agentrl.types import Message

# Templates that rewrite history.


THOUGHT = Message("assistant", "four", reasoning="because it is four")


@pytest.mark.parametrize("shape", REWRITING)
def test_rewriting_is_refused_unless_the_caller_chooses(shape: str) -> None:
    with pytest.raises(
        TemplateError, match=rf"tiny-{shape}.*on_rewrite='branch'.*on_rewrite='keep'"
    ):
        chat_of(shape, mode="refuse")
    assert Chat(tiny(shape)).on_rewrite == "branch"
    assert chat_of(shape).rewrites_history
    assert not chat_of("qwen25").rewrites_history


def test_branches_open_exactly_where_history_changes() -> None:
    chat = chat_of("qwen3", mode="branch")
    asking = Message("assistant", "I will ask.", (CALL,), reasoning="I do not know")
    assert not chat.needs_new_branch([*TASK, asking], [RESULT], TOOLS)
    assert not chat.needs_new_branch([*TASK, asking, RESULT, THOUGHT], [RESULT], TOOLS)
    assert chat.needs_new_branch([*TASK, asking, RESULT, THOUGHT], [Message.user("Sure?")], TOOLS)
    assert not chat.needs_new_branch(
        [*TASK, Message.assistant("four")], [Message.user("Sure?")], TOOLS
    )
    keeping = chat_of("qwen3", mode="keep")
    assert not keeping.needs_new_branch([*TASK, THOUGHT], [Message.user("Sure?")], TOOLS)


def test_dropped_reasoning_is_seen_even_where_its_words_stand_in_the_answer() -> None:
    chat = chat_of("qwen3", mode="branch")
    echo = Message("assistant", "four or four", reasoning="four")
    assert chat.needs_new_branch([*TASK, echo], [Message.user("Sure? four")], TOOLS)


def test_demonstrations_split_into_the_branches_of_online_play() -> None:
    talk = [*TASK, THOUGHT, Message.user("Sure?"), Message.assistant("yes")]
    chat = chat_of("qwen3", mode="branch")
    first, second = chat.render_demonstrations(talk, TOOLS)
    assert "because it is four" in text_of(chat, first.input_ids)
    assert "because it is four" not in text_of(chat, second.input_ids)
    assert sum(second.mask) == len(chat.turn_ids(talk[-1]))
    with pytest.raises(TemplateError, match="needs 2 branches"):
        chat.render_demonstration(talk, TOOLS)
    kept = chat_of("qwen3", mode="keep").render_demonstration(talk, TOOLS)
    assert "because it is four" in text_of(chat, kept.input_ids)


def test_a_generation_prompt_that_opens_the_thinking() -> None:
    chat = chat_of("qwen3_thinking")
    assert text_of(chat, chat.prompt_ids(TASK, TOOLS)).endswith("<think>\n")
    ids = chat.turn_ids(THOUGHT)
    assert text_of(chat, ids) == "because it is four\n</think>\n\nfour<|im_end|>"
    assert chat.parse(ids) == THOUGHT
    assert chat.parse(ids[:5]).content == ""
    assert chat.parse(ids[:5]).reasoning
    assert chat.parse(chat.turn_ids(Message.assistant("four"))) == Message.assistant("four")


# Templates and inputs that are refused.


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ("counting", r"is not prefix-stable.*chat\.on_rewrite to 'branch'"),
        ("numbered", r"depending on its place.*chat\.on_rewrite to 'branch'"),
        ("no_control", "no special token between"),
    ],
)
@pytest.mark.parametrize("mode", ["refuse", "keep"])
def test_unusable_templates_are_refused_by_name(shape: str, sentence: str, mode: str) -> None:
    with pytest.raises(
        TemplateError, match=rf"tiny-{shape}.*{sentence}.*; \w+|{sentence}"
    ) as caught:
        chat_of(shape, mode=mode)
    assert "\n" not in str(caught.value)
    assert f"tiny-{shape}" in str(caught.value)


@pytest.mark.parametrize("shape", ["counting", "numbered"])
def test_text_that_depends_on_its_place_takes_a_branch_for_every_turn(shape: str) -> None:
    chat = chat_of(shape, mode="branch")
    assert check_chat(chat, [EPISODE, TALK], TOOLS) == []
    rows = chat.render_demonstrations(EPISODE, TOOLS)
    assert len(rows) > 1
    before = [
        text_of(chat, row.input_ids[:start])
        for row in rows
        for start in range(1, len(row.mask))
        if row.mask[start] and not row.mask[start - 1]
    ]
    turns = [index for index, message in enumerate(EPISODE) if message.role == "assistant"]
    assert before == [chat.template.render(EPISODE[:turn], TOOLS) for turn in turns]


def test_results_that_a_template_drops_are_sent_as_user_messages() -> None:
    chat = chat_of("deaf")
    assert chat.template.tool_role == "user"
    assert check_chat(chat, [EPISODE, TALK], TOOLS) == []
    with pytest.raises(TemplateError, match=r"tiny-deaf.*drops.*set chat.tool_role to 'user'"):
        Chat(tiny("deaf"), tool_role="tool")


def test_a_tokenizer_without_template_is_refused() -> None:
    with pytest.raises(TemplateError, match=r"has no chat template; set chat\.template to"):
        Chat(build(None, ("<|im_end|>",), {"eos_token": "<|im_end|>"}))


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"parser='json'.*hermes"):
        chat_of("qwen25", "json")
    with pytest.raises(ConfigError, match="on_rewrite='drop'"):
        chat_of("qwen25", mode="drop")
    with pytest.raises(ConfigError, match="tool_role='none'"):
        Chat(tiny("qwen25"), tool_role="none")


def test_wrong_calls_are_refused() -> None:
    chat = chat_of("qwen25")
    for messages in ([], [*TASK, ASK]):
        with pytest.raises(ValueError, match="a prompt ends with"):
            chat.prompt_ids(messages, TOOLS)
    for new in ([], [ASK]):
        with pytest.raises(ValueError, match="new_messages"):
            chat.observation_ids(ASK, chat.turn_ids(ASK), new, TOOLS, "stop")
    for messages in (TASK, [ASK], [*TASK, ASK, ASK]):
        with pytest.raises(ValueError, match="alternates"):
            chat.render_demonstration(messages, TOOLS)


def test_a_conversation_that_the_template_refuses_is_a_template_error() -> None:
    stray = Message("tool", "x", tool_call_id="nobody")
    with pytest.raises(
        TemplateError, match=r"refuses the roles \(.*user, tool\): a tool result needs its call"
    ):
        chat_of("strict_calls").prompt_ids([Message.user("x"), stray], TOOLS)
