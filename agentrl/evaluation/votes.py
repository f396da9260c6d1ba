"""Best of k and majority of k: what k samples of a task are worth once one of them is chosen.

Both are means over draws of k of the n scored samples of a task, without replacement, so they
stand beside pass@k at the same sampling budget. Letters as in `passk`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

from agentrl.errors import ConfigError
from agentrl.trajectory import Episode

DRAWS = 2000
"""Draws of k samples that a majority is counted over, where there are more of them."""

Selector = Callable[[Episode], float | None]


def best_of_k(scores_n: Sequence[float], passed_n: Sequence[bool], k: int) -> float:
    """Probability that the sample with the highest score of k draws without replacement is solved.

    Exact: the r-th lowest of n scores is the highest of a draw with probability
    C(r-1, k-1) / C(n, k). Among equal scores one is chosen at random.

    Raises:
        ConfigError: not 1 ≤ k ≤ n, or the two differ in length.
    """
    n = _checked(scores_n, passed_n, k)
    shares: dict[float, list[bool]] = defaultdict(list)
    for score, passed in zip(scores_n, passed_n, strict=True):
        shares[score].append(passed)
    below, total = 0, 0.0
    for score in sorted(shares):
        upto = below + len(shares[score])
        total += (math.comb(upto, k) - math.comb(below, k)) * fmean(shares[score])
        below = upto
    return total / math.comb(n, k)


def majority_of_k(answers_n: Sequence[str], passed_n: Sequence[bool], k: int) -> float:
    """Probability that the commonest answer of k draws without replacement is solved.

    Self-consistency, Wang et al. 2022 (arXiv 2203.11171). Among equally common answers one is
    chosen at random. Exact where there are at most `DRAWS` draws, else over so many of them.

    Raises:
        ConfigError: not 1 ≤ k ≤ n, or the two differ in length.
    """
    n = _checked(answers_n, passed_n, k)
    if math.comb(n, k) <= DRAWS:
        draws: Iterable[Sequence[int]] = itertools.combinations(range(n), k)
    else:
        rng = random.Random(0)
        draws = (rng.sample(range(n), k) for _ in range(DRAWS))
    return fmean(_voted([(answers_n[index], passed_n[index]) for index in draw]) for draw in draws)


def _voted(ballots: Sequence[tuple[str, bool]]) -> float:
    votes: dict[str, list[bool]] = defaultdict(list)
    for answer, passed in ballots:
        votes[answer].append(passed)
    most = max(map(len, votes.values()))
    return fmean(fmean(each) for each in votes.values() if len(each) == most)


def _checked(values_n: Sequence[object], passed_n: Sequence[bool], k: int) -> int:
    n = len(passed_n)
    if len(values_n) != n:
        raise ConfigError(f"{len(values_n)} values do not go with {n} samples: give one for each")
    if not 1 <= k <= n:
        raise ConfigError(f"k={k} does not go with n={n} samples; choose 1 <= k <= n")
    return n


def answer_of(episode: Episode) -> str:
    """What an episode came to, to count votes: its artifacts, else its last words and calls, in
    small letters with single spaces.
    """
    if episode.artifacts:
        parts = sorted(episode.artifacts.items())
        return hashlib.sha256(repr(parts).encode()).hexdigest()
    said = [message for message in episode.messages if message.role == "assistant"]
    if not said:
        return ""
    calls = [getattr(call, "arguments", None) for call in said[-1].tool_calls]
    told = json.dumps([dict(call) for call in calls if call], sort_keys=True, default=str)
    return " ".join(said[-1].content.lower().split()) + (told if calls else "")


def likelihood_of(episode: Episode) -> float | None:
    """Mean log-probability of the sampled tokens, in nats; None where none were recorded."""
    found = [
        logprob
        for branch in episode.trajectories
        for logprob, trains in zip(branch.logprobs, branch.mask, strict=True)
        if trains
    ]
    return fmean(found) if found else None


SELECTORS: Mapping[str, Selector] = {
    "reward": lambda episode: episode.reward,
    "likelihood": likelihood_of,
}
"""What chooses among samples: the recorded reward, as a perfect judge would, and the policy's own
log-probability.
"""


def chosen(episodes: Iterable[Episode], ks: Iterable[int]) -> dict[str, dict[str, float | None]]:
    """Mean over tasks of majority and best of k, for each k as text: name -> k -> value.

    A task with fewer than k scored samples is left out, as in pass@k; None where all are. A
    selector that does not know every sample is left out.
    """
    by_task: dict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        if episode.passed is not None:
            by_task[episode.task.id].append(episode)
    rows = [[bool(one.passed) for one in each] for each in by_task.values()]
    answers = [[answer_of(one) for one in each] for each in by_task.values()]
    found = {"majority": _means(majority_of_k, answers, rows, ks)}
    for name, select in SELECTORS.items():
        scores = [[select(one) for one in each] for each in by_task.values()]
        known = [[score for score in each if score is not None] for each in scores]
        if scores and [len(each) for each in scores] == [len(each) for each in known]:
            found[f"best_by_{name}"] = _means(best_of_k, known, rows, ks)
    return found


def _means(
    estimator: Callable[..., float],
    values: Sequence[Sequence[object]],
    rows: Sequence[Sequence[bool]],
    ks: Iterable[int],
) -> dict[str, float | None]:
    means: dict[str, float | None] = {}
    for k in ks:
        pairs = [pair for pair in zip(values, rows, strict=True) if len(pair[1]) >= k]
        means[str(k)] = fmean(estimator(*pair, k) for pair in pairs) if pairs else None
    return means
