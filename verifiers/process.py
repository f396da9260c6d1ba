"""Process rewards: a number for every turn of the policy, beside the verdict on the whole episode.

They travel as `Score.turns` and reach their tokens by `agentrl.trajectory.token_rewards`. They
never change a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from agentrl.errors import ConfigError, VerifierError
from agentrl.types import Message, Score
from agentrl.verifiers.base import Submission, Verifier


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the policy.

    Attributes:
        index: from 0, in the order of play.
        said: the assistant's message.
        before: everything that was said before it.
        after: what the environment answered; empty if the episode ended here.
    """

    index: int
    said: Message
    before: tuple[Message, ...]
    after: tuple[Message, ...]


TurnScorer = Callable[[Submission, tuple[Turn, ...]], Awaitable[Sequence[float]]]
"""All turns at once, so that a model may judge them in one batch; gives one finite number for each.
"""


def turns_of(submission: Submission) -> tuple[Turn, ...]:
    """The policy's turns; assistant messages of the opening are the environment's, and none."""
    messages = submission.messages
    starts = [
        i
        for i, message in enumerate(messages)
        if message.role == "assistant" and i >= submission.opening
    ]
    ends = [*starts[1:], len(messages)]
    return tuple(
        Turn(index, messages[start], messages[:start], messages[start + 1 : end])
        for index, (start, end) in enumerate(zip(starts, ends, strict=True))
    )


def each_turn(score: Callable[[Turn], float]) -> TurnScorer:
    """A scorer of a plain function of one turn."""

    async def scorer(submission: Submission, turns: tuple[Turn, ...]) -> Sequence[float]:
        return [score(turn) for turn in turns]

    return scorer


def with_process_rewards(verifier: Verifier, scorers: Mapping[str, TurnScorer]) -> Verifier:
    """The given verifier, with named rewards for each turn beside its verdict.

    Verifiers that are made of others pass on what the Score holds only if they say so: let this be
        the outermost one.

    Raises:
        ConfigError: there is no scorer. The verifier itself raises VerifierError where a scorer
            gives another number of rewards than there are turns, or one that is not finite.
    """
    if not scorers:
        raise ConfigError("scorers={} is empty: name at least one process reward")

    async def verify(submission: Submission, /) -> Score:
        score = await verifier(submission)
        if score.value is None:
            return score
        turns = turns_of(submission)
        named = {
            name: await _scored(name, scorer, submission, turns) for name, scorer in scorers.items()
        }
        return replace(score, turns={**score.turns, **named})

    return verify


async def _scored(
    name: str, scorer: TurnScorer, submission: Submission, turns: tuple[Turn, ...]
) -> tuple[float, ...]:
    rewards = tuple(float(reward) for reward in await scorer(submission, turns))
    if len(rewards) != len(turns):
        raise VerifierError(
            f"process reward {name!r} gave {len(rewards)} numbers for {len(turns)} turns"
        )
    if not all(map(math.isfinite, rewards)):
        raise VerifierError(f"process reward {name!r} gave a number that is not finite: {rewards}")
    return rewards
