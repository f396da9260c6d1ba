"""Answers of a model to prompts, exact to the token, and judges that rank them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.aio import LoopThread
from agentrl.chat.tokens import Chat
from agentrl.engines.base import Generation, Sampling
from agentrl.engines.factory import open_engine
from agentrl.errors import UserError
from agentrl.rollout.play import derive_seed
from agentrl.trainers.offline.data.nouns import Messages, Pair, Response
from agentrl.trainers.offline.settings import SampleSettings
from agentrl.trajectory import Segment, Trajectory
from agentrl.types import Message
from agentrl.verifiers.models.named import load_rule, reward_model, rule_of

Judge = Callable[[Sequence[tuple[Messages, Message]]], list[float]]


@dataclass(frozen=True)
class OwnAnswer:
    """What a model said to a prompt.

    Attributes:
        branch: prompt and answer, as they were sampled.
        finished: whether it ended by itself.
    """

    prompt: Messages
    message: Message
    branch: Trajectory
    finished: bool

    @property
    def tokens(self) -> int:
        """Sampled tokens."""
        return self.branch.trained


def answers_to(
    model: Any, chat: Chat, prompts: Sequence[Messages], how: SampleSettings, seed: int
) -> list[list[OwnAnswer]]:
    """`how.answers` (at least one) answers to each prompt; prompts that leave no room get none."""
    engine = open_engine(model, chat)
    was_training = model.training
    model.eval()

    async def one(prompt: Messages, number: int) -> OwnAnswer | None:
        ids = chat.prompt_ids(prompt, ())
        room = min(how.max_tokens, engine.context_length - len(ids))
        if room < 1:
            return None
        sampling = Sampling(how.temperature, max_tokens=room)
        drawn = derive_seed(seed, repr(prompt), number)
        return _answer(chat, prompt, ids, await engine.generate(ids, sampling, seed=drawn))

    async def everything() -> list[list[OwnAnswer | None]]:
        count = max(1, how.answers)
        groups = [asyncio.gather(*(one(prompt, n) for n in range(count))) for prompt in prompts]
        try:
            return [list(group) for group in await asyncio.gather(*groups)]
        finally:
            await engine.close()

    loop = LoopThread("agentrl-answers")
    try:
        found = loop.run(everything())
    finally:
        loop.close()
        model.train(was_training)
    return [[answer for answer in group if answer is not None] for group in found]


def _answer(chat: Chat, prompt: Messages, ids: list[int], said: Generation) -> OwnAnswer:
    sampled = Segment.sampled(said.ids, said.logprobs, said.version, said.finish)
    branch = Trajectory((Segment.prompt(ids), sampled))
    return OwnAnswer(prompt, chat.parse(said.ids, ids), branch, said.finish == "stop")


def open_judge(name: str) -> Judge:
    """The judge of a name: `path/to/file.py:function`, or a reward model in a folder or served.

    Raises:
        ConfigError: there is none.
    """
    if found := rule_of(name):
        rule = load_rule(*found)
        return lambda said: [
            _verdict(name, rule(prompt[-1].content, answer.content)) for prompt, answer in said
        ]
    model = reward_model(name)

    def score(said: Sequence[tuple[Messages, Message]]) -> list[float]:
        async def everything() -> list[float]:
            whole = [(*prompt, answer) for prompt, answer in said]
            return list(await asyncio.gather(*(model.score(messages) for messages in whole)))

        loop = LoopThread("agentrl-judge")
        try:
            return loop.run(everything())
        finally:
            loop.close()

    return score


def _verdict(judge: str, value: Any) -> float:
    """What a function said of an answer; minus infinity where it could not read it.

    Raises:
        UserError: it is no number that can be ranked.
    """
    number = float(value)
    if math.isnan(number) or number == math.inf:
        raise UserError(
            f"judge {judge} gave {number} for an answer: return a finite number, or -inf for an"
            " answer that cannot be judged"
        )
    return number


def best_against_worst(answers: Sequence[Sequence[OwnAnswer]], judge: Judge) -> list[Pair]:
    """Of each prompt, the best answer against the worst; prompts whose answers tie are left out.

    An answer that did not end by itself is never the best.
    """
    scores = iter(judge([(one.prompt, one.message) for group in answers for one in group]))
    pairs = []
    for group in answers:
        ranked = [(next(scores), one) for one in group]
        whole = [(score, one) for score, one in ranked if one.finished and _says(one)]
        if not whole:
            continue
        best = max(whole, key=lambda pair: pair[0])
        worst = min([pair for pair in ranked if _says(pair[1])], key=lambda pair: pair[0])
        if best[0] > worst[0]:
            gap = best[0] - worst[0]  # endless where the judge could not read the worst
            margin = gap if math.isfinite(gap) else None
            pairs.append(Pair(best[1].prompt, _response(best[1]), _response(worst[1]), margin))
    return pairs


def _says(answer: OwnAnswer) -> bool:
    return bool(answer.message.content.strip() or answer.message.tool_calls)


def _response(answer: OwnAnswer) -> Response:
    return Response((answer.message,), answer.branch)
