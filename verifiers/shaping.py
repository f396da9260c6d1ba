"""Shaping terms: small rewards and penalties for how something was done, beside whether it was
right.

A term has a name, is capped, and is logged apart as `shaping/<name>`. It moves the reward and never
the verdict: the value before shaping stays in `Score.unshaped`, and `Episode.passed` is read from
that one. So no sum of terms makes an episode pass that did not, or fail that passed, whatever the
threshold. A score without value stays without.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from agentrl.errors import ConfigError, ContractError
from agentrl.types import BadCall, Message, Score
from agentrl.verifiers.base import Submission, Verifier


@dataclass(frozen=True, slots=True)
class Term:
    """One shaping term.

    Attributes:
        cap: the term is at most this far from 0, whatever `measure` gives.
        measure: the submission -> the uncapped term.
    """

    name: str
    cap: float
    measure: Callable[[Submission], float]

    def __post_init__(self) -> None:
        if not 0 < self.cap < math.inf:
            raise ConfigError(
                f"cap={self.cap} of the shaping term {self.name!r} must be positive and finite"
            )

    def __call__(self, submission: Submission) -> float:
        """The capped term.

        Raises:
            ValueError: the measure is not a number.
        """
        value = self.measure(submission)
        if math.isnan(value):
            raise ValueError(f"the shaping term {self.name!r} is not a number")
        return max(-self.cap, min(self.cap, value))


def shaped(verifier: Verifier, *terms: Term) -> Callable[[Submission], Awaitable[Score]]:
    """The verifier's score with the terms added to its value; `unshaped` keeps the value, so
    `passed` stays.

    Raises:
        ConfigError: two terms have one name.
    """
    if len({term.name for term in terms}) < len(terms):
        raise ConfigError(
            f"terms={[term.name for term in terms]} must have different names, as each is logged"
            " apart"
        )

    async def verify(submission: Submission) -> Score:
        score = await verifier(submission)
        if score.value is None:
            return score
        added = {f"shaping/{term.name}": term(submission) for term in terms}
        value = math.fsum((score.value, *added.values()))
        return replace(score, value=value, parts={**score.parts, **added}, unshaped=score.verdict)

    return verify


def format_reward(
    *, cap: float = 0.1, well_formed: Callable[[Message], bool] | None = None
) -> Term:
    """cap · the share of well-formed assistant turns; 0 where nothing was said.

    Args:
        cap: the reward of an episode without a flaw.
        well_formed: what a turn must be; by default, none of its calls was unreadable.
    """
    holds = well_formed or _is_readable

    def measure(submission: Submission) -> float:
        turns = [message for message in submission.messages if message.role == "assistant"]
        return cap * sum(map(holds, turns)) / len(turns) if turns else 0.0

    return Term("format", cap, measure)


def length_penalty(
    *, limit: int, cache: int, cap: float = 1.0, length: Callable[[Submission], int] | None = None
) -> Term:
    """cap · DAPO's soft overlong punishment of what the agent said.

    Args:
        limit: L_max, in the unit of `length`.
        cache: L_cache: the punishment starts at limit − cache.
        length: of an episode; by default the characters of what the assistant said and called.

    Raises:
        ConfigError: not 0 < cache <= limit.
    """
    if not 0 < cache <= limit:
        raise ConfigError(f"cache={cache} must be positive and at most limit={limit}")
    count = length or (lambda submission: len(said(submission)))
    return Term(
        "length", cap, lambda submission: cap * soft_overlong(count(submission), limit, cache)
    )


def repetition_penalty(*, n: int = 4, cap: float = 0.5) -> Term:
    """−cap · the share of word n-grams of what the agent said that it had said before.

    Raises:
        ConfigError: n is less than 1.
    """
    if n < 1:
        raise ConfigError(f"n={n} must be at least 1")
    return Term(
        "repetition", cap, lambda submission: -cap * repeated_share(said(submission).split(), n)
    )


def side_effect_penalty(weight: Callable[[], float], *, cap: float = 1.0) -> Term:
    """−weight of an episode with a side effect, 0 of one without; logged as `shaping/side_effects`.

    Args:
        weight: asked at every episode, as a multiplier may move.
        cap: the term never falls below −cap.
    """

    def measure(submission: Submission) -> float:
        if submission.side_effects is None:
            raise ContractError(
                f"task {submission.task.id}: safety.penalty and safety.at_most need an environment"
                " that says what may change: set its writes, or leave both out"
            )
        return -weight() if submission.side_effects else 0.0

    return Term("side_effects", cap, measure)


def soft_overlong(length: int, limit: int, cache: int) -> float:
    """DAPO's soft overlong punishment, in [−1, 0] (Yu et al. 2025, equation 13).

    0 up to limit − cache; then ((limit − cache) − length) / cache; −1 beyond the limit.
    """
    return max(-1.0, min(0.0, (limit - cache - length) / cache))


def repeated_share(words: Sequence[str], n: int) -> float:
    """1 − distinct n-grams / n-grams, in [0, 1); 0 where there are fewer than n words (Yeo et al.
    2025).
    """
    grams = [tuple(words[index : index + n]) for index in range(len(words) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def said(submission: Submission) -> str:
    """All that the assistant wrote: reasoning, content, and the calls it made, as text."""
    pieces: list[str] = []
    for message in submission.messages:
        if message.role == "assistant":
            calls = [
                (
                    call.text
                    if isinstance(call, BadCall)
                    else f"{call.name} {json.dumps(dict(call.arguments))}"
                )
                for call in message.tool_calls
            ]
            pieces += [message.reasoning, message.content, *calls]
    return "\n".join(filter(None, pieces))


def _is_readable(message: Message) -> bool:
    return not any(isinstance(call, BadCall) for call in message.tool_calls)
