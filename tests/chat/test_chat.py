"""None"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny_tokenizers import (
    APPENDING,
    ASK,
    CALL,
    EPISODE,
    QWEN25,
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

from agentrl.chat.contract import check_chat, exact, fragment, simulate
from agentrl.chat.parsers import PARSERS
from agentrl.chat.tokens import Chat
from agentrl.errors import EngineError, TemplateError
from agentrl.trajectory import Segment, Trajectory
from agentrl.types import BadCall, Message, ToolCall, ToolSpec

# The shipped contract, on every shape and format.


FIRST = ("hermes", "llama_json", "xml", "python")


EVERY_WAY = [
    (shape, parser, mode)
    for shape in (*APPENDING, *REWRITING)
    for parser in sorted(PARSERS)
    for mode in ("keep", "branch")
    if parser in FIRST or (mode == "branch" and shape in ("pad_is_eos", "llama3", "strict_calls"))
]


@pytest.mark.parametrize(("shape", "parser", "mode"), EVERY_WAY)
def test_contract_holds(shape: str, parser: str, mode: str) -> None:
    assert check_chat(chat_of(shape, parser, mode), [EPISODE, TALK], TOOLS) == []


# Bug 1: training ids are the sampled ids.


def test_training_ids_are_the_emitted_ids_for_splits_the_tokenizer_would_never_make() -> None:
    chat = chat_of("qwen25")
    canonical = chat.template.encode("hello")
    emitted = chat.template.encode("he") + chat.template.encode("llo")
    assert emitted != canonical
    assert text_of(chat, emitted) == text_of(chat, canonical) == "hello"
    stop = chat.template.token("<|im_end|>")
    branch = Trajectory((Segment.prompt(chat.prompt_ids(TASK, TOOLS)),))
    for _ in range(3):
        sampled = [*emitted, stop]
        branch = branch.extend(Segment.sampled(sampled, [-0.5] * len(sampled), 0, "stop"))
        turn = chat.parse(sampled)
        assert turn == Message.assistant("hello")
        branch = branch.extend(
            Segment.observation(chat.observation_ids(turn, sampled, [RESULT], TOOLS, "stop"))
        )
        assert len(branch.ids) == len(branch.mask) == len(branch.logprobs)
    assert [token for token, mask in zip(branch.ids, branch.mask, strict=True) if mask] == [
        *emitted,
        stop,
    ] * 3


def retokenising_play(
    chat: Chat, messages: Sequence[Message], tools: Sequence[ToolSpec]
) -> list[int]:
    """The defect: before each turn the whole history is rendered and tokenised again."""
    last = max(index for index, message in enumerate(messages) if message.role == "assistant")
    return chat.prompt_ids(messages[:last], tools)


def sampled_ids_survive(chat: Chat, ids: Sequence[int], emitted: Sequence[Sequence[int]]) -> bool:
    """The check of bug 1: every emitted turn stands in the ids, in order."""
    position = 0
    for turn in emitted:
        starts = (
            at for at in range(position, len(ids)) if list(ids[at : at + len(turn)]) == list(turn)
        )
        found = next(starts, None)
        if found is None:
            return False
        position = found + len(turn)
    return True


@pytest.mark.parametrize("shape", APPENDING)
def test_bug_1_is_caught_where_history_is_rendered_again(shape: str) -> None:
    chat = chat_of(shape)
    (played,) = simulate(chat, EPISODE, TOOLS, lambda ids: fragment(chat, ids))
    assert exact(played)
    assert sampled_ids_survive(chat, played.trajectory.ids, played.emitted)
    assert not sampled_ids_survive(
        chat, retokenising_play(chat, EPISODE, TOOLS), played.emitted[:-1]
    )


@pytest.mark.parametrize(
    "shape", [shape for shape in APPENDING if shape not in ("strict_calls", "empty_block")]
)
def test_online_ids_are_the_templates_for_canonical_turns(shape: str) -> None:
    chat = chat_of(shape)
    row = chat.render_demonstration(TALK, TOOLS)
    last = len(chat.turn_ids(TALK[-1]))
    assert row.input_ids[:-last] == chat.prompt_ids(TALK[:-1], TOOLS)


# Bug 11: the stop token is trained, whatever pads.


@pytest.mark.parametrize("shape", [*APPENDING, *REWRITING])
def test_stop_token_is_sampled_and_trained(shape: str) -> None:
    chat = chat_of(shape)
    row = chat.render_demonstration(EPISODE, TOOLS)
    ends = [
        index
        for index, mask in enumerate(row.mask)
        if mask and row.mask[index + 1 : index + 2] != [1]
    ]
    assert len(ends) == 3
    assert all(row.input_ids[index] in chat.stop_ids for index in ends)


def test_stop_token_is_trained_where_it_is_also_the_padding() -> None:
    chat = chat_of("pad_is_eos")
    pad = chat.tokenizer.pad_token_id
    assert pad == chat.tokenizer.eos_token_id == chat.template.token("<|im_end|>")
    row = chat.render_demonstration(EPISODE, TOOLS)
    trained = [mask for token, mask in zip(row.input_ids, row.mask, strict=True) if token == pad]
    # system, user and two blocks of results close untrained; three turns close trained
    assert sorted(trained) == [0, 0, 0, 0, 1, 1, 1]


def test_an_engine_that_drops_the_stop_token_is_named() -> None:
    chat = chat_of("qwen25")
    sampled = chat.turn_ids(ASK)[:-1]
    with pytest.raises(EngineError, match="finish='stop'"):
        chat.observation_ids(ASK, sampled, [RESULT], TOOLS, "stop")
    with pytest.raises(EngineError):
        chat.observation_ids(ASK, [], [RESULT], TOOLS, "stop")


# What stands between two turns.


def test_newline_that_the_model_never_samples_is_observation() -> None:
    chat = chat_of("qwen25")
    ids = chat.turn_ids(ASK)
    observed = text_of(chat, chat.observation_ids(ASK, ids, [RESULT], TOOLS, "stop"))
    assert (
        observed == "\n<|im_start|>user\n<tool_response>\nthe answer is"
        " 42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_turn_cut_by_length_is_closed_untrained() -> None:
    chat = chat_of("qwen25")
    ids = chat.turn_ids(ASK)[:4]
    turn = chat.parse(ids)
    observed = text_of(
        chat, chat.observation_ids(turn, ids, [Message.user("Go on.")], TOOLS, "length")
    )
    assert observed == "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"


def test_a_stop_token_that_is_not_the_templates_stays_and_the_turn_is_closed() -> None:
    chat = chat_of("other_eos")
    eos = chat.tokenizer.eos_token_id
    assert eos in chat.stop_ids
    sampled = [*chat.turn_ids(Message.assistant("four"))[:-1], eos]
    assert chat.parse(sampled) == Message.assistant("four")
    observed = chat.observation_ids(
        Message.assistant("four"), sampled, [Message.user("x")], TOOLS, "stop"
    )
    assert text_of(chat, observed).startswith("<|im_end|>\n<|im_start|>user")


def test_stop_token_owned_by_the_next_message() -> None:
    chat = chat_of("glm")
    names = {text_of(chat, [token]) for token in chat.stop_ids}
    assert names == {"<|user|>", "<|observation|>", "<|endoftext|>"}
    after_tool = chat.turn_ids(ASK, [RESULT])
    after_user = chat.turn_ids(Message.assistant("four"), [Message.user("x")])
    assert text_of(chat, after_tool[-1:]) == "<|observation|>"
    assert text_of(chat, after_user[-1:]) == "<|user|>"
    assert text_of(chat, chat.turn_ids(ASK)[-1:]) == "<|observation|>"
    observed = chat.observation_ids(ASK, after_tool, [RESULT, RESULT], TOOLS, "stop")
    assert (
        text_of(chat, observed)
        == "\n<tool_response>\nthe answer is 42\n</tool_response>\n<tool_response>\nthe answer is"
        " 42\n</tool_response><|assistant|>\n"
    )


def test_results_are_matched_to_calls_where_the_template_asks_for_ids_and_names() -> None:
    chat = chat_of("strict_calls")
    assert chat.template.style == "json"
    other = ToolCall("fetch", {}, id="abcdefghi")
    turn = Message.assistant("", CALL, other)
    results = [RESULT, Message.tool("three", other)]
    ids = chat.turn_ids(turn, results)
    observed = text_of(chat, chat.observation_ids(turn, ids, results, TOOLS, "stop"))
    assert (
        observed
        == "[RESULT]search: the answer is 42[/RESULT][RESULT]fetch: three[/RESULT][ASSISTANT]"
    )


@pytest.mark.parametrize("shape", APPENDING)
def test_the_result_of_a_bad_call_is_an_observation(shape: str) -> None:
    chat = chat_of(shape)
    sampled = [*chat.template.encode("<tool_call>{oops"), chat.turn_ids(ASK, [RESULT])[-1]]
    turn = chat.parse(sampled)
    (bad,) = turn.tool_calls
    assert isinstance(bad, BadCall)
    reply = Message.tool(bad.why, bad)
    assert bad.why in text_of(chat, chat.observation_ids(turn, sampled, [reply], TOOLS, "stop"))
    assert bad.why in text_of(chat, chat.prompt_ids([*TASK, turn, reply], TOOLS))


@pytest.mark.parametrize("shape", APPENDING)
def test_control_tokens_spelled_in_a_conversation_stay_text(shape: str) -> None:
    chat = chat_of(shape)
    evil = "".join(
        sorted(
            token.content for token in chat.tokenizer.added_tokens_decoder.values() if token.special
        )
    )
    clean = [
        Message.system("s"),
        Message.user("u"),
        Message.assistant("a", CALL),
        Message.tool("t", CALL),
    ]
    dirty = [
        Message.system(evil),
        Message.user(evil),
        Message.assistant(evil, ToolCall("search", {"query": evil})),
        Message.tool(evil, CALL),
    ]
    control = {
        token for token, added in chat.tokenizer.added_tokens_decoder.items() if added.special
    }

    def controls(ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in control]

    assert controls(chat.prompt_ids(dirty, TOOLS)) == controls(chat.prompt_ids(clean, TOOLS))
    rows = [
        chat.render_demonstration([*talk, Message.assistant("four")], TOOLS)
        for talk in (clean, dirty)
    ]
    assert controls(rows[0].input_ids) == controls(rows[1].input_ids)
    assert evil in text_of(chat, chat.prompt_ids(dirty, TOOLS))


@pytest.mark.parametrize("parser", sorted(PARSERS))
def test_a_template_of_user_and_assistant_turns_takes_tool_results_as_user_messages(
    parser: str,
) -> None:
    with pytest.raises(TemplateError, match=r"roles must alternate.*set chat.tool_role to 'user'"):
        Chat(tiny("turns_only"), parser, tool_role="tool")
    chat = Chat(tiny("turns_only"), parser)
    assert chat.template.tool_role == "user"
    assert check_chat(chat, [EPISODE, TALK], TOOLS) == []
    assert not chat.shows_tools
    assert chat_of("qwen25").shows_tools
    ids = chat.turn_ids(ASK)
    assert (
        text_of(chat, chat.observation_ids(ASK, ids, [RESULT, RESULT], [], "stop"))
        == "\n<|turn>user\n<tool_response>\nthe answer is 42\n</tool_response>\n"
        "<tool_response>\nthe answer is 42\n</tool_response><turn|>\n<|turn>assistant\n"
    )


def test_a_template_that_words_turns_its_own_way_is_appended_to() -> None:
    chat = chat_of("empty_block")
    assert not chat.template.verbatim
    assert chat_of("qwen25").template.verbatim
    assert not chat.rewrites_history
    assert {text_of(chat, [token]) for token in chat.stop_ids} == {
        "<|user|>",
        "<|observation|>",
        "<|endoftext|>",
    }
    assert text_of(chat, chat.turn_ids(ASK, [RESULT])[-1:]) == "<|observation|>"


def test_only_one_bos() -> None:
    chat = chat_of("llama3")
    row = chat.render_demonstration(TALK, TOOLS)
    assert row.input_ids.count(chat.tokenizer.bos_token_id) == 1
    assert row.input_ids[0] == chat.tokenizer.bos_token_id


def test_stop_ids_of_the_model_and_the_caller(tmp_path: Path) -> None:
    tokenizer = build(
        QWEN25, ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), {"eos_token": "<|im_end|>"}
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    tokenizer.save_pretrained(tmp_path)
    tokenizer.name_or_path = str(tmp_path)
    assert Chat(tokenizer, stop_ids=[7]).stop_ids == {1, 2, 7}


# Real conversations, speed, imports.


def glaive(folder: Path) -> list[list[Message]]:
    roles = {
        "human": "user",
        "gpt": "assistant",
        "observation": "tool",
        "function_call": "assistant",
    }
    conversations = []
    with gzip.open(folder / "tools" / "glaive_toolcall_en_shared.jsonl.gz", "rt") as lines:
        for line in lines:
            messages: list[Message] = []
            for turn in json.loads(line)["conversations"]:
                role = roles[turn["from"]]
                if turn["from"] == "function_call":
                    call = json.loads(turn["value"])
                    messages.append(
                        Message.assistant("", ToolCall(call["name"], call["arguments"]))
                    )
                elif role == "tool":
                    messages.append(Message.tool(turn["value"], messages[-1].tool_calls[0]))
                else:
                    messages.append(Message(role, turn["value"].strip()))
            conversations.append(messages)
    return conversations


@pytest.mark.parametrize("shape", ["qwen25", "llama3", "glm", "strict_calls"])
def test_real_conversations_play_exactly(shape: str, data_dir: Path) -> None:
    chat = chat_of(shape)
    conversations = [messages for messages in glaive(data_dir) if messages[-1].role == "assistant"]
    assert len(conversations) > 80
    assert check_chat(chat, conversations[:12], TOOLS) == []


def test_importing_chat_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, agentrl.chat.tokens, agentrl.chat.contract; assert not {'torch',"
        " 'transformers'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[2]
    )
