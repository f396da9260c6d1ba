"""Token ids and log-probabilities of served models, as vLLM and as SGLang tell them."""

from __future__ import annotations

import json

import pytest
from chat_server import chat_server, completion
from helpers import Echo, play_one

from agentrl.errors import ConfigError, UserError
from agentrl.policies.options import ServedOptions
from agentrl.policies.served import ServedPolicy
from agentrl.trainers.batch import pack
from agentrl.trajectory import Group, SegmentKind
from agentrl.types import EndReason

SAY = {"calls": [("say", '{"text": "a"}')], "finish": "tool_calls"}
PROMPT, SAID, TOLD, YES = [1, 2, 3], [4, 5], [6, 7], [8, 9]


def vllm(prompt, ids, logprobs, content=None, **more):
    answer = completion(content, usage=(len(prompt), len(ids)), **more)
    answer.body["prompt_token_ids"] = prompt
    rows = [{"token": "x", "logprob": logprob} for logprob in logprobs]
    answer.body["choices"][0] |= {"token_ids": ids, "logprobs": {"content": rows}}
    return answer


def sglang(prompt, ids, logprobs, content=None, **more):
    answer = completion(content, usage=(len(prompt), len(ids)), **more)
    rows = [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)]
    answer.body["choices"][0] |= {
        "prompt_token_ids": prompt,
        "meta_info": {"output_token_logprobs": rows},
    }
    return answer


def play(*answers, tokens=True):
    with chat_server(*answers) as server:
        options = ServedOptions(tokens=tokens, retries=0)
        episode = play_one(Echo, ServedPolicy("m", server.url, options=options))
    return episode, server.requests


@pytest.mark.parametrize("told", [vllm, sglang])
def test_an_episode_is_token_exact_and_can_be_packed(told):
    second = PROMPT + SAID + TOLD
    answers = told(PROMPT, SAID, [-0.5, -0.25], **SAY), told(second, YES, [-1.0, -2.0], "yes")
    episode, requests = play(*answers)
    (branch,) = episode.trajectories
    assert branch.ids == tuple(second + YES) and branch.mask == (0, 0, 0, 1, 1, 0, 0, 1, 1)
    assert branch.logprobs == (0, 0, 0, -0.5, -0.25, 0, 0, -1.0, -2.0)
    assert [segment.finish for segment in branch.segments if segment.finish] == ["stop", "stop"]
    batch = pack([Group((episode,))], 0)
    assert batch.mask_BT.sum() == 4
    for name in ("logprobs", "return_token_ids", "return_prompt_token_ids", "return_meta_info"):
        assert all(request[name] is True for request in requests)


def test_a_history_that_the_server_writes_anew_is_a_new_branch():
    answers = vllm(PROMPT, SAID, [-0.5, -0.25], **SAY), vllm([1, 2, 3, 44, 6], YES, [-1, -2], "yes")
    episode, _ = play(*answers)
    assert [branch.ids for branch in episode.trajectories] == [
        (1, 2, 3, 4, 5),
        (1, 2, 3, 44, 6, 8, 9),
    ]
    assert [branch.mask for branch in episode.trajectories] == [(0, 0, 0, 1, 1), (0,) * 5 + (1, 1)]
    kinds = {segment.kind for branch in episode.trajectories for segment in branch.segments}
    assert kinds == {SegmentKind.PROMPT, SegmentKind.SAMPLED}


def test_a_turn_that_was_cut_is_kept_as_cut():
    episode, _ = play(vllm(PROMPT, SAID, [-0.5, -0.25], "ye", finish="length"))
    assert episode.end is EndReason.MAX_TOKENS
    assert episode.trajectories[0].segments[-1].finish == "length"


def test_a_server_that_tells_no_tokens_is_one_sentence():
    with pytest.raises(ConfigError, match=r"tells no token ids with log-probabilities: serve"):
        play(completion("yes"))


def test_without_asking_there_are_no_tokens_and_training_says_so():
    episode, (request,) = play(vllm(PROMPT, SAID, [-0.5, -0.25], "yes"), tokens=False)
    assert episode.trajectories == () and "logprobs" not in request
    with pytest.raises(UserError, match="tokens=true"):
        pack([Group((episode,))], 0)


@pytest.mark.parametrize(
    "wrong",
    [
        vllm(PROMPT, SAID, [-0.5], "yes"),
        vllm(PROMPT, SAID, [0.5, -0.5], "yes"),
        vllm(PROMPT, [-4, 5], [-0.5, -0.5], "yes"),
    ],
)
def test_tokens_that_are_none_are_no_turn(wrong):
    opening = vllm(PROMPT, SAID, [-0.5, -0.25], **SAY)
    episode, _ = play(opening, wrong, wrong)
    assert episode.end in (EndReason.ENGINE_ERROR, EndReason.AGENT_FAULT)


def test_parameters_of_a_request_are_passed_on_and_ours_are_not_touched():
    with chat_server(completion("yes")) as server:
        options = ServedOptions.read(
            {"top_p": 0.9, "chat_template_kwargs": {"enable_thinking": False}}, "--policy-option"
        )
        play_one(Echo, ServedPolicy("m", server.url, options=options))
    (request,) = server.requests
    assert request["top_p"] == 0.9
    assert request["chat_template_kwargs"] == {"enable_thinking": False}
    assert request["model"] == "m" and json.dumps(request)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"timeout_s": 0}, r"--policy-option timeout_s=0: .* greater than 0"),
        ({"retries": -1}, r"--policy-option retries=-1: .* greater than or equal to 0"),
        ({"retries": "many"}, r"--policy-option retries=many: input should be a valid integer"),
        ({"timout_s": 3}, "timout_s is no option of a served model: timeout_s is"),
        ({"temperature": 1}, "temperature is decided by the episode or an option of its own"),
        ({"messages": []}, "messages is decided by the episode"),
    ],
)
def test_options_that_are_wrong_are_named(row, said):
    with pytest.raises(ConfigError, match=said):
        ServedOptions.read(row, "--policy-option")


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("back", [False, True])
def test_reasoning_is_kept_apart_and_no_call_is_read_in_it(field, back):
    thought = '<tool_call>{"name": "say", "arguments": {"text": "thought"}}</tool_call>'
    with chat_server(completion("", **SAY, **{field: thought}), completion("yes")) as server:
        options = ServedOptions(send_reasoning=back)
        episode = play_one(Echo, ServedPolicy("m", server.url, options=options))
    turn = next(message for message in episode.messages if message.role == "assistant")
    assert turn.reasoning == thought and turn.content == "" and episode.counts.tool_calls == 1
    sent = server.requests[1]["messages"]
    assert [row.get("reasoning_content") for row in sent if row["role"] == "assistant"] == [
        thought if back else None
    ]
    assert all(thought not in str(row["content"]) for row in sent)


def test_a_refusal_of_the_model_is_graded_and_named():
    episode, _ = play(completion(None, refusal="I will not"), tokens=False)
    assert (episode.end, episode.score.value) == (EndReason.REFUSED, 0.0)
    assert episode.messages[-1].content == "I will not"
