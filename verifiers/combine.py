"""Verifiers made of verifiers.

Each part has a name. Its value is logged in `Score.parts` under that name, its own parts under
`name/part`, and its reason in `why`. Where a part has no value, or its machinery fails, the whole
has none, and says which part it was: a failure is never a number. What is combined is verdicts:
shaping is added to the whole, and a shaped part is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, pstdev
from weakref import WeakValueDictionary

from agentrl.errors import ConfigError, ContractError, InfraError, TaskError
from agentrl.types import EndReason, Score, Task
from agentrl.verifiers.base import Submission, Verifier

Parts = Mapping[str, Verifier]
Combine = Callable[[Sequence[float]], float]
Combined = Callable[[Submission], Awaitable[Score]]
PASSES = 1.0
"""The value from which a part of `all_of` or a gate has passed."""


def if_submitted(verifier: Verifier) -> Verifier:
    """The given verifier for episodes that the agent handed in itself, 0.0 for all others."""

    async def verify(submission: Submission, /) -> Score:
        if submission.end not in (EndReason.SUBMITTED, EndReason.ANSWERED):
            return Score(
                0.0, {}, f"nothing was handed in: the episode ended by {submission.end.value}"
            )
        return await verifier(submission)

    return verify


def weighted(parts: Mapping[str, tuple[Verifier, float]]) -> Combined:
    """Σ weight · value over the parts; a part of weight 0 is a metric, logged alone.

    The sum is not divided by the weights: where a right solution is to be worth 1.0, let them add
    up to 1.

    Raises:
        ConfigError: a weight is not finite, or there is no part.
    """
    for name, (_, weight) in parts.items():
        if not math.isfinite(weight):
            raise ConfigError(f"weight of {name!r} is {weight}; give a finite number")
    weights = [weight for _, weight in parts.values()]
    return _combined(
        {name: verifier for name, (verifier, _) in parts.items()},
        lambda values: math.fsum(
            weight * value for weight, value in zip(weights, values, strict=True)
        ),
    )


def all_of(parts: Parts) -> Combined:
    """1.0 if every part is worth at least 1.0, else 0.0.

    Raises:
        ConfigError: there is no part.
    """
    return _combined(parts, lambda values: float(min(values) >= PASSES))


def ensemble_min(parts: Parts) -> Combined:
    """The lowest value of the parts (worst-case optimisation, Coste et al. 2023).

    Raises:
        ConfigError: there is no part.
    """
    return _combined(parts, min)


def ensemble_lower(parts: Parts, k: float = 1.0) -> Combined:
    """mean − k · std of the parts' values: disagreement costs, so what fools one judge pays less.

    The standard deviation is that of the parts themselves (ddof = 0): none for a single part.

    Raises:
        ConfigError: k is negative or not finite, or there is no part.
    """
    if not 0 <= k < math.inf:
        raise ConfigError(f"k={k} must be at least 0 and finite")
    return _combined(parts, lambda values: fmean(values) - k * pstdev(values))


def gated(gates: Parts, verifier: Verifier) -> Combined:
    """The verifier's own score if each gate is worth at least 1.0; else 0.0, without asking it.

    Gates are asked one after the other until one is closed. The verifier's parts keep their names.

    Raises:
        ConfigError: there is no gate.
    """
    _check(gates)

    async def verify(submission: Submission) -> Score:
        logged: dict[str, float] = {}
        for name, gate in gates.items():
            score = await _judgement(name, gate, submission)
            if score.value is None:
                return _lost(name, score)
            logged |= _logged(name, score)
            if score.value < PASSES:
                return Score(0.0, logged, f"{name}: {score.why}")
        score = await verifier(submission)
        return replace(score, parts={**logged, **score.parts})

    return verify


def first_of(parts: Mapping[str, tuple[Callable[[Task], bool], Verifier]]) -> Combined:
    """The first verifier whose predicate holds for the task; the others are not asked.

    The predicate sees the task and not the episode, so that the agent cannot choose its judge.

    Raises:
        ConfigError: there is no part.
        TaskError: (when asked) no predicate holds for the task.
    """
    _check(parts)

    async def verify(submission: Submission) -> Score:
        task = submission.task
        for name, (applies, verifier) in parts.items():
            if applies(task):
                score = await _ask(name, verifier, submission)
                if score.value is None:
                    return _lost(name, score)
                return replace(score, parts=_logged(name, score), why=f"{name}: {score.why}")
        raise TaskError(
            f"task {task.id!r}: none of {', '.join(parts)} applies to it; mend field hidden"
        )

    return verify


def has_hidden(*names: str) -> Callable[[Task], bool]:
    """A predicate for `first_of`: the task's hidden part has these fields."""
    return lambda task: set(names) <= set(task.hidden)


def _combined(parts: Parts, combine: Combine) -> Combined:
    """All parts at the same time, then one number of theirs."""
    _check(parts)

    async def verify(submission: Submission) -> Score:
        jobs = (_judgement(name, verifier, submission) for name, verifier in parts.items())
        answers = await asyncio.gather(*jobs, return_exceptions=True)
        logged: dict[str, float] = {}
        turns: dict[str, tuple[float, ...]] = {}
        whys: dict[str, str] = {}
        for name, answer in zip(parts, answers, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            if answer.value is None:
                return _lost(name, answer)
            logged |= _logged(name, answer)
            whys[name] = answer.why
            turns |= {f"{name}/{term}": rewards for term, rewards in answer.turns.items()}
        why = "; ".join(f"{name} {logged[name]:g}{_because(whys[name])}" for name in parts)
        return Score(combine([logged[name] for name in parts]), logged, why, turns)

    return verify


def _because(why: str) -> str:
    return f" ({why})" if why else ""


def _check(parts: Mapping[str, object]) -> None:
    if not parts:
        raise ConfigError("parts is empty; name at least one verifier")
    odd = [name for name in parts if not name or "/" in name]
    if odd:
        raise ConfigError(f"the name {odd[0]!r} of a part must not be empty or hold '/'")


async def _ask(name: str, verifier: Verifier, submission: Submission) -> Score:
    """One part's score; what its machinery raises is raised again with the part's name."""
    try:
        return await verifier(submission)
    except InfraError as error:
        raise type(error)(f"{name}: {error}") from error


async def _judgement(name: str, verifier: Verifier, submission: Submission) -> Score:
    """One part's score, which no shaping has changed."""
    score = await _ask(name, verifier, submission)
    if score.unshaped is not None:
        raise ContractError(f"the part {name!r} is shaped; shape the combined verifier instead")
    return score


def _lost(name: str, score: Score) -> Score:
    return Score.failed(f"{name}: {score.why}")


def _logged(name: str, score: Score) -> dict[str, float]:
    assert score.value is not None
    return {name: score.value, **{f"{name}/{part}": value for part, value in score.parts.items()}}


def remembered(
    verifier: Verifier, *, unless: Callable[[Score], bool] = lambda score: False, size: int = 4096
) -> Verifier:
    """The given verifier, asked once for equal artifacts of an equal task.

    Only for verdicts that depend on the artifacts alone: no random cases, nothing said. A group of
    episodes often leaves the same file several times. Failures are not remembered, nor what
    `unless` picks out, such as verdicts of a clock. Who asks for a verdict that is being reached
    waits for it.
    """
    known: OrderedDict[str, Score] = OrderedDict()
    locks: WeakValueDictionary[tuple[int, str], asyncio.Lock] = WeakValueDictionary()

    async def verify(submission: Submission, /) -> Score:
        content = _content(submission)
        lock = locks.setdefault((id(asyncio.get_running_loop()), content), asyncio.Lock())
        async with lock:
            if content in known:
                return known[content]
            score = await verifier(submission)
            if score.unshaped is not None:
                raise ContractError(
                    "remembered() was given a shaped verifier; shape what it gives instead"
                )
            if score.value is not None and not unless(score):
                known[content] = score
            while len(known) > size:
                known.popitem(last=False)
            return score

    return verify


def _content(submission: Submission) -> str:
    digest = hashlib.sha256(submission.task.fingerprint().encode())
    for path, content in sorted(submission.artifacts.items()):
        digest.update(f"{len(path)} {path} {len(content)} ".encode() + content)
    return digest.hexdigest()
