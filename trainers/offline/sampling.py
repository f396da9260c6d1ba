"""Answers of a model to prompts, exact to the token, and pairs of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.aio import run_alone
from agentrl.chat.tokens import Chat
from agentrl.engines.base import Generation, Sampling
from agentrl.engines.factory import open_engine
from agentrl.rollout.play import derive_seed
from agentrl.trainers.offline.data.nouns import Messages, Pair, Response
from agentrl.trainers.offline.settings import SampleSettings
from agentrl.trajectory import Segment, Trajectory
from agentrl.types import Message


@dataclass(frozen=True)
class Candidate:
    """What was said to a prompt.

    Attributes:
        finished: whether it ended by itself.
    """

    prompt: Messages
    message: Message
    finished: bool


@dataclass(frozen=True)
class OwnAnswer(Candidate):
    """What the model itself said: prompt and answer as they were sampled."""

    branch: Trajectory

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

    try:
        found = run_alone(everything())
    finally:
        model.train(was_training)
    return [[answer for answer in group if answer is not None] for group in found]


def _answer(chat: Chat, prompt: Messages, ids: list[int], said: Generation) -> OwnAnswer:
    sampled = Segment.sampled(said.ids, said.logprobs, said.version, said.finish)
    branch = Trajectory((Segment.prompt(ids), sampled))
    return OwnAnswer(prompt, chat.parse(said.ids, ids), said.finish == "stop", branch)


def best_against_worst(
    answers: Sequence[Sequence[Candidate]], scores: Sequence[float | None]
) -> list[Pair]:
    """Of each prompt, the best answer against the worst; prompts whose answers tie are left out, as
    are answers without a score. An answer that did not end by itself is never the best.

    Args:
        scores: of the answers to the first prompt, to the second, and so on.
    """
    left, pairs = iter(scores), []
    for group in answers:
        ranked = [(score, one) for one in group if (score := next(left)) is not None]
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


def _says(answer: Candidate) -> bool:
    return bool(answer.message.content.strip() or answer.message.tool_calls)


def _response(answer: Candidate) -> Response:
    branch = answer.branch if isinstance(answer, OwnAnswer) else None
    return Response((answer.message,), branch)
