"""Served models: requests, replies, and what every failure of a server is called."""

from __future__ import annotations

import itertools
import json
import sys

import pytest
from chat_server import Answer, chat_server, completion, failure
from helpers import Echo, last_json, run_cli
from served_cases import act

from agentrl.errors import ConfigError, EngineError
from agentrl.policies import bounded
from agentrl.policies.replies import request_messages
from agentrl.policies.served import Prices, ServedPolicy
from agentrl.types import BadCall, EndReason, Limits, Message, ToolCall


def test_a_request_says_what_is_asked_for(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    with chat_server(completion("hello")) as server:
        said = act(server, tools=Echo().tools, temperature=0.5, limits=Limits(turn_tokens=9))
    (request,) = server.requests
    assert said[:2] == (Message.assistant("hello"), None) and said[2][:2] == (3, 7)
    assert request["messages"] == [{"role": "user", "content": "hi"}] and request["model"] == "m"
    assert (request["temperature"], request["max_completion_tokens"]) == (0.5, 9)
    assert [each["function"]["name"] for each in request["tools"]] == ["say", "submit"]
    assert server.keys == ["Bearer sesame"]


def test_what_nobody_asked_for_is_not_sent():
    with chat_server(completion()) as server:
        act(server)
    assert not {"temperature", "tools"} & server.requests[0].keys() and server.keys == [
        "Bearer no-key"
    ]


def test_equal_seeds_ask_alike_and_turns_do_not():
    with chat_server(completion()) as server:
        act(server, seed=3), act(server, seed=3), act(server, seed=4)
    seeds = [request["seed"] for request in server.requests]
    assert seeds[0] == seeds[1] != seeds[2] and all(0 <= seed < 2**31 for seed in seeds)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"text": "yes"}', ToolCall("say", {"text": "yes"}, "id0")),
        ({"text": "yes"}, ToolCall("say", {"text": "yes"}, "id0")),
        ("", ToolCall("say", {}, "id0")),
        ('{"text": ', BadCall('say({"text": )', "The tool call is not valid JSON.")),
        ("[1]", BadCall("say([1])", "The arguments of the tool call are not a JSON object.")),
        (
            '{"a": NaN}',
            BadCall('say({"a": NaN})', "The tool call holds a number that is not finite."),
        ),
        (
            '{"a": 1, "a": 2}',
            BadCall('say({"a": 1, "a": 2})', "The tool call gives the same key twice."),
        ),
    ],
)
def test_calls_are_read_strictly(written, read):
    with chat_server(completion(None, calls=[("say", written)], finish="tool_calls")) as server:
        assert act(server)[0] == Message("assistant", "", (read,))


def test_reasoning_and_refusals_are_read():
    with chat_server(
        completion("4", reasoning_content=" two and two "), completion(None, refusal="I won't")
    ) as server:
        assert act(server)[0] == Message("assistant", "4", reasoning="two and two")
        assert act(server)[:2] == (Message.assistant("I won't"), EndReason.REFUSED)


def test_history_goes_back_with_ids_that_match():
    turn = Message.assistant(
        "so", ToolCall("a.b", {"x": 1}), BadCall("a(", "bad"), ToolCall("c", {}, "own")
    )
    results = [Message.tool(str(i), each) for i, each in enumerate(turn.tool_calls)]
    rows = request_messages([Message.system("s"), turn, *results])
    calls = rows[1]["tool_calls"]
    assert [row["tool_call_id"] for row in rows[2:]] == [each["id"] for each in calls] and calls[2][
        "id"
    ] == "own"
    assert len({each["id"] for each in calls}) == 3
    assert [each["function"]["name"] for each in calls] == ["a_b", "unreadable_call", "c"]
    assert json.loads(calls[1]["function"]["arguments"]) == {"text": "a("}


@pytest.mark.parametrize("status", [429, 500, 503, 409])
def test_what_passes_is_tried_again_by_the_client(status):
    with chat_server(failure(status), completion("then")) as server:
        assert act(server)[0].content == "then"
    assert len(server.requests) == 2


GARBAGE = {
    "not JSON": Answer("<html>", kind="text/html"),
    "broken JSON": Answer('{"choices": ['),
    "no choices": Answer({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}),
    "null": Answer("null"),
    "text is a number": completion(7),
    "no usage": Answer({"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]}),
    "no finish": completion("x", finish=None),
    "negative tokens": completion("x", usage=(-1, 2)),
    "an end of its own": completion("x", finish="abort"),
}


@pytest.mark.parametrize("answer", GARBAGE.values(), ids=GARBAGE)
def test_an_answer_that_is_none_is_an_engine_error(answer):
    with chat_server(answer) as server, pytest.raises(EngineError, match="openai:m@http"):
        act(server)


def test_answers_that_are_none_end_an_evaluation_and_do_not_hang_it():
    answers = itertools.cycle(GARBAGE.values())
    with chat_server(lambda request: next(answers)) as server:
        policy = ("--policy", f"openai:m@{server.url}", "--policy-option", "retries=0")
        out = run_cli("eval", "calc-v0", "--limit", "8", *policy, "--json", timeout=60)
    result = last_json(out.stdout)
    assert (out.returncode, result["n_failed_infra"]) == (1, 8), out.stderr
    assert result["end_reasons"] == {"engine_error": 8}


def test_a_server_that_fails_for_good_is_an_engine_error():
    with chat_server(failure(500, "on fire")) as server:
        with pytest.raises(EngineError, match="on fire"):
            act(server, retries=1)
        assert len(server.requests) == 2
    with pytest.raises(EngineError, match="Connection error"):
        act(server, retries=0)


@pytest.mark.parametrize("status", [200, 400])
def test_an_answer_without_an_end_is_none(status, monkeypatch):
    monkeypatch.setattr(bounded, "MOST_BYTES", 5000)
    with chat_server(Answer(" " * 5001, status), completion("then")) as server:
        with pytest.raises(EngineError, match=r"openai:m@.*longer than 5000 bytes"):
            act(server, retries=0)
        assert act(server)[0].content == "then"


def test_ids_are_held_against_what_is_counted_and_asked_for():
    def told(count, usage):
        answer = completion("x", usage=(2, usage))
        rows = [{"logprob": -1.0}] * count
        more = {"token_ids": [1] * count, "logprobs": {"content": rows}, "prompt_token_ids": [1, 2]}
        answer.body["choices"][0].update(more)
        return answer

    limits = Limits(turn_tokens=9)
    for count, usage in ((10, 10), (5000, 1), (2, 1)):
        with chat_server(told(count, usage)) as server, pytest.raises(EngineError, match="ids, co"):
            act(server, limits=limits, retries=0)
    with chat_server(told(9, 9)) as server:
        assert act(server, limits=limits)[2].sampled_tokens == 9


def test_a_server_that_is_silent_is_an_engine_error():
    with (
        chat_server(Answer("", hang=True)) as server,
        pytest.raises(EngineError, match=r"timed out|TimeoutError"),
    ):
        act(server, timeout_s=0.1, retries=0)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_is_wrong_for_every_episode_is_one_sentence(status):
    wanted = rf"\({status}\).*wrong key or model"
    with (
        chat_server(failure(status, "wrong key or model")) as server,
        pytest.raises(ConfigError, match=wanted),
    ):
        act(server)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "answer",
    [
        failure(400, "no", code="context_length_exceeded"),
        failure(400, "This model's maximum context length is 512 tokens."),
        failure(400, "the request exceeds the available context size"),
    ],
)
def test_a_conversation_that_is_too_long_is_a_limit_and_no_failure(answer):
    with chat_server(answer) as server:
        assert act(server)[:2] == (Message.assistant(""), EndReason.CONTEXT_LENGTH)


def test_another_bad_request_is_a_failure():
    with (
        chat_server(failure(400, "unknown field")) as server,
        pytest.raises(EngineError, match="unknown field"),
    ):
        act(server)


def test_limits_of_tokens_hold_even_if_the_server_does_not_keep_them():
    with chat_server(
        completion("cut", finish="length"), completion("long", usage=(5, 600))
    ) as server:
        assert act(server)[1] is EndReason.MAX_TOKENS
        assert act(server)[1] is EndReason.MAX_TOKENS


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"model": ""}, "model=''"),
        ({"base_url": "localhost:8000"}, "base_url='localhost:8000'"),
        ({"base_url": "http://me:secret@localhost:8000/v1"}, "^base_url of .*OPENAI_API_KEY$"),
        ({"prices": Prices(-1, 0)}, r"prices=\(-1, 0\)"),
        ({"base_url": "https://api.openai.com/v1"}, "OPENAI_API_KEY"),
    ],
)
def test_bad_settings_are_named(settings, part):
    with pytest.raises(ConfigError, match=part):
        ServedPolicy(**{"model": "m", "base_url": "http://localhost:1/v1", **settings})


def test_without_the_client_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ConfigError, match=r"agentrl\[judge\]"):
        ServedPolicy("m", "http://localhost:1/v1")


def test_the_key_is_not_shown():
    assert "sesame" not in repr(ServedPolicy("m", "http://localhost:1/v1", api_key="sesame"))


def test_a_count_that_no_server_can_mean_is_no_answer():
    with (
        chat_server(completion("hi", usage=(10**400, 3))) as server,
        pytest.raises(EngineError, match="prompt_tokens"),
    ):
        act(server, prices=Prices(1.0, 1.0), retries=0)
