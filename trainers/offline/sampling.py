"""A model's own answers to prompts, exact to the token; who ranks them, and who revises them."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from agentrl.aio import run_alone
from agentrl.chat.tokens import Chat
from agentrl.engines.base import Sampling
from agentrl.engines.factory import open_engine
from agentrl.errors import UserError, VerifierError
from agentrl.records.files import RowWriter, read_plain_rows
from agentrl.rollout.play import derive_seed
from agentrl.trainers.offline.examples import Messages, Pair, Response
from agentrl.trainers.offline.settings import SampleSettings
from agentrl.trajectory import Segment, Trajectory
from agentrl.types import EndReason, Message, Task
from agentrl.verifiers.base import Submission
from agentrl.verifiers.models.constitution import (
    Constitution,
    conversation,
    open_judge_policy,
    read_constitution,
    revise,
)
from agentrl.verifiers.models.judge import Ask, asks, rubric
from agentrl.verifiers.models.named import constitution_of, load_rule, reward_model, rule_of

Result = TypeVar("Result")

CONCURRENCY = 16
"""Requests to a served model at the same time."""
REPORTED_EVERY = 200
"""Replies between two reports of their number."""


@dataclass(frozen=True)
class SampledAnswer:
    """An answer to a prompt.

    Attributes:
        finished: whether it ended by itself.
        branch: prompt and answer as they were sampled; None where no tokens were recorded.
    """

    prompt: Messages
    message: Message
    finished: bool = True
    branch: Trajectory | None = None

    @property
    def tokens(self) -> int:
        """Number of sampled tokens."""
        return self.branch.trained if self.branch else 0

    @property
    def is_empty(self) -> bool:
        """Whether it holds neither text nor calls."""
        return not (self.message.content.strip() or self.message.tool_calls)

    @property
    def response(self) -> Response:
        """The answer as part of an example."""
        return Response((self.message,), self.branch)


def answers_to(
    model: Any, chat: Chat, prompts: Sequence[Messages], settings: SampleSettings, seed: int
) -> list[list[SampledAnswer]]:
    """`settings.answers` (at least one) answers to each prompt; a prompt that leaves no room for
    one gets none.
    """
    engine = open_engine(model, chat)
    was_training = model.training
    model.eval()

    async def answer(prompt: Messages, number: int) -> SampledAnswer | None:
        ids = chat.prompt_ids(prompt, ())
        room = min(settings.max_tokens, engine.context_length - len(ids))
        if room < 1:
            return None
        sampling = Sampling(settings.temperature, max_tokens=room)
        answer_seed = derive_seed(seed, repr(prompt), number)
        generation = await engine.generate(ids, sampling, seed=answer_seed)
        sampled = Segment.sampled(
            generation.ids, generation.logprobs, generation.version, generation.finish
        )
        branch = Trajectory((Segment.prompt(ids), sampled))
        message = chat.parse(generation.ids, ids)
        return SampledAnswer(prompt, message, generation.finish == "stop", branch)

    async def answer_all() -> list[list[SampledAnswer | None]]:
        count = max(1, settings.answers)
        groups = [asyncio.gather(*(answer(prompt, n) for n in range(count))) for prompt in prompts]
        try:
            return [list(group) for group in await asyncio.gather(*groups)]
        finally:
            await engine.close()

    try:
        groups = run_alone(answer_all())
    finally:
        model.train(was_training)
    return [[each for each in group if each is not None] for group in groups]


def best_against_worst(
    answers: Sequence[Sequence[SampledAnswer]], scores: Sequence[float | None]
) -> list[Pair]:
    """For each prompt, a pair of the best and the worst answer.

    Prompts whose answers tie are left out, as are answers without a score or text. An answer that
    did not end by itself is never the best.

    Args:
        scores: of the answers to the first prompt, to the second, and so on.
    """
    left, pairs = iter(scores), []
    for group in answers:
        scored = [(next(left), answer) for answer in group]
        ranked = [
            (score, answer) for score, answer in scored if score is not None and not answer.is_empty
        ]
        finished = [pair for pair in ranked if pair[1].finished]
        if not finished:
            continue
        best_score, best = max(finished, key=lambda pair: pair[0])
        worst_score, worst = min(ranked, key=lambda pair: pair[0])
        if best_score > worst_score:
            margin = best_score - worst_score
            # The gap is infinite where the judge could not read the worst answer.
            known = margin if math.isfinite(margin) else None
            pairs.append(Pair(best.prompt, best.response, worst.response, known))
    return pairs


# --- judges


@dataclass
class Replies:
    """Replies of served models, kept in a file, so that nothing is paid for twice.

    Attributes:
        path: of the file; None: they are not kept.
        note: is told how many have come.
        failed: why judge or reviser failed, and how often.
    """

    path: Path | None = None
    note: Callable[[str], None] = lambda sentence: None
    failed: Counter[str] = field(default_factory=Counter)
    _known: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            self._known = {row["asked"]: row["said"] for row in read_plain_rows(self.path)}

    @contextmanager
    def cached(self, model: str, ask: Ask) -> Iterator[Ask]:
        """The same model, asked only what it was not asked before."""
        writer = RowWriter(self.path) if self.path is not None else None
        count = itertools.count(1)

        async def ask_once(messages: Sequence[Message], seed: int) -> str:
            text = repr((model, [(each.role, each.content) for each in messages], seed))
            key = hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()
            if key not in self._known:
                reply = self._known[key] = await ask(messages, seed)
                if writer is not None:
                    writer.write({"asked": key, "said": reply})
                if (number := next(count)) % REPORTED_EVERY == 0:
                    self.note(f"{number} replies of {model}")
            return self._known[key]

        try:
            yield ask_once
        finally:
            if writer is not None:
                writer.close()

    def gather(
        self, work: Sequence[Awaitable[Result]], close: Callable[[], Awaitable[None]] | None = None
    ) -> list[Result | None]:
        """The results in order; None, counted in `failed`, where a verifier failed."""

        async def settle(one: Awaitable[Result]) -> Result | None:
            try:
                return await one
            except VerifierError as error:
                self.failed[str(error)] += 1
                return None

        async def settle_all() -> list[Result | None]:
            try:
                return list(await asyncio.gather(*map(settle, work)))
            finally:
                if close is not None:
                    await close()

        return run_alone(settle_all())

    def refuse_most_failed(self, who: str, results: Sequence[Any]) -> None:
        """Raise UserError where more than half of the results are missing."""
        missing = sum(result is None for result in results)
        if 2 * missing > len(results):
            reason = self.failed.most_common(1)[0][0]
            raise UserError(
                f"the {who} failed at {missing} of {len(results)} answers: {reason[:300]}"
            )


Judged = Sequence[tuple[Messages, Message]]
Judge = Callable[[Judged, Replies], list[float | None]]
"""Scores of prompts and answers; None where the judge failed, so that nothing is known."""


def open_judge(name: str) -> Judge:
    """The judge of a name: all that `named_reward` knows; of reward models the number itself.

    Raises:
        ConfigError: there is none.
    """
    if rule := rule_of(name):
        return partial(_judge_by_rule, name, load_rule(*rule))
    if constitution := constitution_of(name):
        return partial(_judge_by_constitution, constitution)
    model = reward_model(name)

    def judge(judged: Judged, replies: Replies) -> list[float | None]:
        return replies.gather([model.score((*prompt, answer)) for prompt, answer in judged])

    return judge


def score_answers(
    answers: Sequence[Sequence[SampledAnswer]], judge: Judge, replies: Replies
) -> list[float | None]:
    """Scores of all answers, in order.

    Raises:
        UserError: the judge failed at more than half of them.
    """
    judged = [(answer.prompt, answer.message) for group in answers for answer in group]
    scores = judge(judged, replies)
    replies.refuse_most_failed("judge", scores)
    return scores


def revise_answers(
    answers: Sequence[Sequence[SampledAnswer]], name: str, replies: Replies
) -> list[list[SampledAnswer]]:
    """The answers to each prompt as a constitution's model revises them; some may be missing.

    Raises:
        ConfigError: the file is no constitution.
        UserError: the model failed at more than half of the answers.
    """
    constitution = read_constitution(name)
    policy = open_judge_policy(constitution, CONCURRENCY)
    flat = [answer for group in answers for answer in group]
    with replies.cached(policy.name, asks(policy)) as ask:
        work = [
            revise(ask, constitution.principles, answer.prompt, answer.message.content, number)
            for number, answer in enumerate(flat)
        ]
        texts = replies.gather(work, policy.close)
    replies.refuse_most_failed("model that revises", texts)
    left = iter(texts)
    revised = []
    for group in answers:
        pairs = [(answer, next(left)) for answer in group]
        revised.append(
            [
                SampledAnswer(old.prompt, Message.assistant(text))
                for old, text in pairs
                if text is not None
            ]
        )
    return revised


def _judge_by_rule(
    name: str, rule: Callable[[str, str], float], judged: Judged, replies: Replies
) -> list[float | None]:
    """What a function returns; minus infinity for an answer that it cannot read.

    Raises:
        UserError: it raises, or returns no number that can be ranked.
    """
    scores: list[float | None] = []
    for prompt, answer in judged:
        try:
            score = float(rule(prompt[-1].content, answer.content))
        except Exception as error:
            raise UserError(f"judge {name} failed: {type(error).__name__}: {error}") from error
        if math.isnan(score) or score == math.inf:
            raise UserError(
                f"judge {name} gave {score} for an answer: return a finite number, or -inf for an"
                " answer that cannot be judged"
            )
        scores.append(score)
    return scores


def _judge_by_constitution(
    constitution: Constitution, judged: Judged, replies: Replies
) -> list[float | None]:
    policy = open_judge_policy(constitution, CONCURRENCY)
    with replies.cached(policy.name, asks(policy)) as ask:
        verify = rubric(ask, constitution.principles)

        async def grade(number: int, prompt: Messages, answer: Message) -> float | None:
            task = Task(id=f"answer-{number}", instruction=conversation(prompt))
            messages = (*prompt, answer)
            submission = Submission(task, messages, EndReason.ANSWERED, seed=number)
            return (await verify(submission)).value

        return replies.gather([grade(n, *each) for n, each in enumerate(judged)], policy.close)
