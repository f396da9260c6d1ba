"""Answers of a model to prompts, exact to the token, and judges that rank them."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from agentrl.aio import LoopThread
from agentrl.chat.tokens import Chat
from agentrl.engines.base import Generation, Sampling
from agentrl.engines.factory import open_engine
from agentrl.errors import UserError, VerifierError
from agentrl.rollout.play import derive_seed
from agentrl.trainers.offline.data.nouns import Messages, Pair, Response
from agentrl.trainers.offline.settings import SampleSettings
from agentrl.trajectory import Segment, Trajectory
from agentrl.types import EndReason, Message, Task
from agentrl.verifiers.base import Submission
from agentrl.verifiers.models.constitution import (
    Constitution,
    conversation,
    read_constitution,
    revise,
    served,
)
from agentrl.verifiers.models.judge import asks, rubric
from agentrl.verifiers.models.named import constitution_of, load_rule, reward_model, rule_of

Result = TypeVar("Result")

Judge = Callable[[Sequence[tuple[Messages, Message]]], list[float | None]]
"""Scores of prompts and answers; None where the judge failed, so that nothing is known."""


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
        found = _alone(everything())
    finally:
        model.train(was_training)
    return [[answer for answer in group if answer is not None] for group in found]


def _answer(chat: Chat, prompt: Messages, ids: list[int], said: Generation) -> OwnAnswer:
    sampled = Segment.sampled(said.ids, said.logprobs, said.version, said.finish)
    branch = Trajectory((Segment.prompt(ids), sampled))
    return OwnAnswer(prompt, chat.parse(said.ids, ids), said.finish == "stop", branch)


def open_judge(name: str) -> Judge:
    """The judge of a name: all that `named_reward` knows; of reward models the number itself.

    Raises:
        ConfigError: there is none.
    """
    if found := rule_of(name):
        rule = load_rule(*found)
        return lambda said: [
            _verdict(name, rule(prompt[-1].content, answer.content)) for prompt, answer in said
        ]
    if constitution := constitution_of(name):
        return partial(_graded, constitution)
    model = reward_model(name)

    def score(said: Sequence[tuple[Messages, Message]]) -> list[float | None]:
        async def everything() -> list[float | None]:
            whole = [(*prompt, answer) for prompt, answer in said]
            return list(await asyncio.gather(*(model.score(messages) for messages in whole)))

        return _alone(everything())

    return score


def _graded(
    constitution: Constitution, said: Sequence[tuple[Messages, Message]]
) -> list[float | None]:
    """Grades of answers by a constitution."""

    async def everything() -> list[float | None]:
        policy = served(constitution.model)
        verify = rubric(asks(policy), constitution.principles)

        async def one(number: int, prompt: Messages, answer: Message) -> float | None:
            task = Task(id=f"answer-{number}", instruction=conversation(prompt))
            given = Submission(task, (*prompt, answer), EndReason.ANSWERED, seed=number)
            try:
                return (await verify(given)).value
            except VerifierError:
                return None

        try:
            return list(await asyncio.gather(*(one(n, *each) for n, each in enumerate(said))))
        finally:
            await policy.close()

    return _alone(everything())


def revisions(answers: Sequence[Sequence[Candidate]], name: str) -> list[list[Candidate]]:
    """What a constitution makes of the answers to each prompt; those are left out of which the
    model made nothing.

    Raises:
        ConfigError: the file is no constitution.
    """
    constitution = read_constitution(name)

    async def everything() -> list[list[Candidate | None]]:
        policy = served(constitution.model)
        ask = asks(policy)

        async def one(number: int, answer: Candidate) -> Candidate | None:
            said, principles = answer.message.content, constitution.principles
            try:
                text = await revise(ask, principles, answer.prompt, said, number)
            except VerifierError:
                return None
            return Candidate(answer.prompt, Message.assistant(text), True)

        numbers = itertools.count()
        try:
            groups = [asyncio.gather(*(one(next(numbers), a) for a in group)) for group in answers]
            return [list(group) for group in await asyncio.gather(*groups)]
        finally:
            await policy.close()

    return [[one for one in group if one is not None] for group in _alone(everything())]


def _alone(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine on a loop of its own."""
    loop = LoopThread("agentrl-judge")
    try:
        return loop.run(work)
    finally:
        loop.close()


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


def best_against_worst(answers: Sequence[Sequence[Candidate]], judge: Judge) -> list[Pair]:
    """Of each prompt, the best answer against the worst; prompts whose answers tie are left out, as
    are answers at which the judge failed.

    An answer that did not end by itself is never the best.

    Raises:
        UserError: the judge failed at more than half of the answers.
    """
    scores = judge([(one.prompt, one.message) for group in answers for one in group])
    if 2 * (failed := scores.count(None)) > len(scores):
        raise UserError(
            f"the judge failed at {failed} of {len(scores)} answers: look at what it says, as by"
            " `agentrl eval chat-v0` with it as the reward"
        )
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
