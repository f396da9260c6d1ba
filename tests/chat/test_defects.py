"""Chats that are wrong on purpose: the contract of a template catches each."""

from __future__ import annotations

import re

import pytest
from tiny_tokenizers import tiny

from agentrl.chat.contract import check_chat
from agentrl.chat.parsers import PARSERS
from agentrl.chat.tokens import Chat, Demonstration
from agentrl.types import Message


class RepeatsStop(Chat):
    def observation_ids(self, turn, sampled_ids, new_messages, tools, finish):
        return super().observation_ids(turn, [], new_messages, tools, "length")


class DropsClosing(Chat):
    def observation_ids(self, turn, sampled_ids, new_messages, tools, finish):
        return super().observation_ids(
            turn, self.turn_ids(turn, new_messages), new_messages, tools, "stop"
        )


class TokenisesTheTurnAgain(Chat):
    def observation_ids(self, turn, sampled_ids, new_messages, tools, finish):
        whole = self.turn_ids(turn, new_messages) + super().observation_ids(
            turn, self.turn_ids(turn, new_messages), new_messages, tools, "stop"
        )
        return whole[len(sampled_ids) :]


class MasksByPadding(Chat):
    def render_demonstrations(self, messages, tools):
        rows = super().render_demonstrations(messages, tools)
        pad = self.tokenizer.eos_token_id
        return [
            Demonstration(ids, [int(m and t != pad) for t, m in zip(ids, mask, strict=True)])
            for ids, mask in rows
        ]


class NeverStops(Chat):
    def turn_ids(self, message, new_messages=(), before=()):
        return super().turn_ids(message, new_messages, before)[:-1]


class LosesNewline(Chat):
    def observation_ids(self, turn, sampled_ids, new_messages, tools, finish):
        ids = super().observation_ids(turn, sampled_ids, new_messages, tools, finish)
        newline = self.template.encode("\n")
        return ids[1:] if ids[:1] == newline else ids


class SkipsControlTokens(Chat):
    def parse(self, ids, before=(), tools=()):
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True).replace("<tool_call>", "")
        parsed = PARSERS[self.parser](text)
        return Message("assistant", parsed.content, parsed.calls, reasoning=parsed.reasoning)


class TrustsToolText(Chat):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.template.guard = lambda text, pattern=None: text


@pytest.mark.parametrize(
    ("defect", "sentence"),
    [
        (RepeatsStop, "repeats the stop token"),
        (DropsClosing, "is not closed by the stop token"),
        (TokenisesTheTurnAgain, "depend on how the engine split"),
        (MasksByPadding, "a demonstration's ids or mask differ"),
        (NeverStops, "does not end with a trained stop token|EngineError"),
        (LosesNewline, "do not spell what the template writes"),
        (SkipsControlTokens, "does not give the turn back"),
        (TrustsToolText, "becomes that control token"),
    ],
)
def test_contract_catches(defect: type[Chat], sentence: str) -> None:
    problems = check_chat(defect(tiny("pad_is_eos")))
    assert problems
    assert any(re.search(sentence, problem) for problem in problems), problems
