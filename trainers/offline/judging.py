"""Who ranks a model's own answers, and who writes them anew."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.aio import run_alone
from agentrl.errors import UserError, VerifierError
from agentrl.records.files import RowWriter, read_plain_rows
from agentrl.trainers.offline.data.nouns import Messages
from agentrl.trainers.offline.sampling import Candidate
from agentrl.types import EndReason, Message, Task
from agentrl.verifiers.base import Submission
from agentrl.verifiers.models.constitution import (
    Constitution,
    conversation,
    read_constitution,
    revise,
    served,
)
from agentrl.verifiers.models.judge import Ask, asks, rubric
from agentrl.verifiers.models.named import constitution_of, load_rule, reward_model, rule_of

Said = Sequence[tuple[Messages, Message]]
AT_ONCE = 16
"""Requests to a served model at the same time."""
TOLD_EVERY = 200
"""Replies between two sentences about them."""


@dataclass
class Replies:
    """Replies of served models, kept in a file: what was paid for is not asked again.

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
    def of(self, model: str, ask: Ask) -> Iterator[Ask]:
        """The same model, asked only for what it was not asked before."""
        writer = RowWriter(self.path) if self.path is not None else None
        count = itertools.count(1)

        async def remembered(messages: Sequence[Message], seed: int) -> str:
            text = repr((model, [(one.role, one.content) for one in messages], seed))
            key = hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()
            if key not in self._known:
                said = self._known[key] = await ask(messages, seed)
                if writer is not None:
                    writer.write({"asked": key, "said": said})
                if (come := next(count)) % TOLD_EVERY == 0:
                    self.note(f"{come} replies of {model}")
            return self._known[key]

        try:
            yield remembered
        finally:
            if writer is not None:
                writer.close()


Judge = Callable[[Said, Replies], list[float | None]]
"""Scores of prompts and answers; None where the judge failed, so that nothing is known."""


def open_judge(name: str) -> Judge:
    """The judge of a name: all that `named_reward` knows; of reward models the number itself.

    Raises:
        ConfigError: there is none.
    """
    if found := rule_of(name):
        return partial(_by_rule, name, load_rule(*found))
    if constitution := constitution_of(name):
        return partial(_by_constitution, constitution)
    model = reward_model(name)

    def score(said: Said, replies: Replies) -> list[float | None]:
        async def one(messages: Messages) -> float | None:
            try:
                return await model.score(messages)
            except VerifierError as error:
                replies.failed[str(error)] += 1
                return None

        async def everything() -> list[float | None]:
            return list(await asyncio.gather(*(one((*prompt, answer)) for prompt, answer in said)))

        return run_alone(everything())

    return score


def scores_of(answers: Sequence[Sequence[Candidate]], judge: Judge, replies: Replies) -> list[Any]:
    """Scores of all answers, in order.

    Raises:
        UserError: the judge failed at more than half of them.
    """
    scores = judge([(one.prompt, one.message) for group in answers for one in group], replies)
    _refuse_half("judge", scores.count(None), len(scores), replies)
    return scores


def revisions(
    answers: Sequence[Sequence[Candidate]], name: str, replies: Replies
) -> list[list[Candidate]]:
    """What a constitution's model makes of the answers to each prompt; nothing of some.

    Raises:
        ConfigError: the file is no constitution.
        UserError: it made nothing of more than half of them.
    """
    constitution = read_constitution(name)
    policy = served(constitution, AT_ONCE)

    async def everything() -> list[list[Candidate | None]]:
        async def one(number: int, answer: Candidate) -> Candidate | None:
            said, principles = answer.message.content, constitution.principles
            try:
                text = await revise(ask, principles, answer.prompt, said, number)
            except VerifierError as error:
                replies.failed[str(error)] += 1
                return None
            return Candidate(answer.prompt, Message.assistant(text), True)

        numbers = itertools.count()
        try:
            groups = [asyncio.gather(*(one(next(numbers), a) for a in group)) for group in answers]
            return [list(group) for group in await asyncio.gather(*groups)]
        finally:
            await policy.close()

    with replies.of(policy.name, asks(policy)) as ask:
        found = run_alone(everything())
    asked = sum(map(len, found))
    _refuse_half("model that revises", sum(group.count(None) for group in found), asked, replies)
    return [[one for one in group if one is not None] for group in found]


def _by_rule(
    name: str, rule: Callable[[str, str], float], said: Said, _: Replies
) -> list[float | None]:
    """What a function says; minus infinity where it could not read an answer.

    Raises:
        UserError: it raises, or gives no number that can be ranked.
    """
    found: list[float | None] = []
    for prompt, answer in said:
        try:
            number = float(rule(prompt[-1].content, answer.content))
        except Exception as error:
            raise UserError(f"judge {name} failed: {type(error).__name__}: {error}") from error
        if math.isnan(number) or number == math.inf:
            raise UserError(
                f"judge {name} gave {number} for an answer: return a finite number, or -inf for an"
                " answer that cannot be judged"
            )
        found.append(number)
    return found


def _by_constitution(
    constitution: Constitution, said: Said, replies: Replies
) -> list[float | None]:
    policy = served(constitution, AT_ONCE)

    async def everything() -> list[float | None]:
        verify = rubric(ask, constitution.principles)

        async def one(number: int, prompt: Messages, answer: Message) -> float | None:
            task = Task(id=f"answer-{number}", instruction=conversation(prompt))
            given = Submission(task, (*prompt, answer), EndReason.ANSWERED, seed=number)
            try:
                return (await verify(given)).value
            except VerifierError as error:
                replies.failed[str(error)] += 1
                return None

        try:
            return list(await asyncio.gather(*(one(n, *each) for n, each in enumerate(said))))
        finally:
            await policy.close()

    with replies.of(policy.name, asks(policy)) as ask:
        return run_alone(everything())


def _refuse_half(who: str, failed: int, count: int, replies: Replies) -> None:
    if 2 * failed > count:
        why = replies.failed.most_common(1)[0][0]
        raise UserError(f"the {who} failed at {failed} of {count} answers: {why[:300]}")
