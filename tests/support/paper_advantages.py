"""Advantages as the papers write them, token by token in plain Python.

Written from the papers (and, where a paper leaves an operation open, its authors' own code), before
a look at `trainers/`. Slow on purpose: loops, no masks, no padding, no shapes. An `Episode` holds
sampled tokens alone; what tools answered is not in it, and a fork is not visible in it.

What the papers leave open, and how it is read here:
- an episode without a reward (`None`) was never sampled: it is in no mean and has no token;
- groups have one size in every paper; where failures make them unequal, a mean over "prompts and
  their G answers" is one mean over all scored episodes;
- a group of one episode has nothing to be compared with: its advantage is 0, and so is that of a
  group whose rewards are all equal (0/0 in the formula);
- `std` is the sample's (divisor n-1), without an epsilon unless `guard` gives one;
- turn rewards belong to the last token of their turn, the outcome to the last token of the episode.

Numbers of equations and sections are cited from memory: they may be off by one between versions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor


@dataclass
class Token:
    """One sampled token. `new` and `top_new` are leaves of the gradient, all else is given; `name`
    is for whoever asks which one it was.
    """

    new: Tensor
    old: float
    ref: float = 0.0
    teacher: float = 0.0
    value: float = 0.0
    entropy: float = 0.0
    probs_squared: float = 0.0
    top_new: list[Tensor] = field(default_factory=list)
    top_old: list[float] = field(default_factory=list)
    is_top: bool = False
    name: int = 0


@dataclass
class Turn:
    """What the policy said between two answers of the world; `state` names what it saw."""

    tokens: list[Token]
    reward: float = 0.0
    state: str = ""


@dataclass
class Episode:
    """One answer to the prompt `group`; `reward` is its outcome, None where it failed."""

    group: int
    reward: float | None
    turns: list[Turn]
    greedy: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def tokens(self) -> list[Token]:
        return [token for turn in self.turns for token in turn.tokens]

    @property
    def total(self) -> float:
        """The return r(x, y): the outcome and whatever the turns earned."""
        assert self.reward is not None
        return self.reward + sum(turn.reward for turn in self.turns)


Advantages = list[list[float]]  # [episode][token]
Episodes = Sequence[Episode]


def mean(numbers: Iterable[float]) -> float:
    numbers = list(numbers)
    return sum(numbers) / len(numbers)


def std(numbers: Sequence[float], ddof: int = 1) -> float:
    middle = mean(numbers)
    return math.sqrt(sum((x - middle) ** 2 for x in numbers) / (len(numbers) - ddof))


def z_score(x: float, numbers: Sequence[float], guard: float = 0.0) -> float:
    """(x - mean)/std, 0 where all numbers are equal or there is but one."""
    if len(numbers) < 2 or max(numbers) - min(numbers) < 1e-12:
        return 0.0
    return (x - mean(numbers)) / (std(numbers) + guard)


def group_of(episodes: Episodes, one: Episode) -> list[Episode]:
    return [other for other in episodes if other.group == one.group]


def with_kl(episodes: Episodes, beta: float) -> list[Episode]:
    """2402.14740, eq. 2: the reward less β·log π(y|x)/π_ref(y|x)."""
    return [
        replace(one, reward=(one.reward or 0.0) - beta * sum(t.old - t.ref for t in one.tokens))
        for one in episodes
    ]


def of_outcomes(formula: Callable[[float, list[float]], float], episodes: Episodes) -> Advantages:
    """One number per episode, from its return and those of its group, at each of its tokens."""
    result = []
    for one in episodes:
        returns = [other.total for other in group_of(episodes, one)]
        result.append([formula(one.total, returns)] * len(one.tokens))
    return result


def grpo(episodes: Episodes, guard: float = 0.0) -> Advantages:
    """2402.03300, section 4.1.2: Â = (r - mean(r)) / std(r)."""
    return of_outcomes(lambda r, group: z_score(r, group, guard), episodes)


def centred(episodes: Episodes) -> Advantages:
    """2503.20783, section 3.2 (Dr. GRPO): Â = r - mean(r)."""
    return of_outcomes(lambda r, group: r - mean(group), episodes)


def leave_one_out(episodes: Episodes) -> Advantages:
    """2402.14740, RLOO: r - 1/(k-1) · sum of the others of the prompt."""

    def formula(r: float, group: list[float]) -> float:
        return 0.0 if len(group) < 2 else r - (sum(group) - r) / (len(group) - 1)

    return of_outcomes(formula, episodes)


def moving_average(episodes: Episodes, before: Sequence[float] = ()) -> Advantages:
    """2402.14740, REINFORCE with baseline: r - the mean of all rewards seen in training so far."""
    seen = [*before, *(episode.total for episode in episodes)]
    return [[one.total - mean(seen)] * len(one.tokens) for one in episodes]


def mean_of_the_others(episodes: Episodes) -> Advantages:
    """r - the mean of all other episodes of the round, whatever their prompt."""
    everything = sum(episode.total for episode in episodes)
    others = len(episodes) - 1
    if not others:
        return [[0.0] * len(one.tokens) for one in episodes]
    return [[one.total - (everything - one.total) / others] * len(one.tokens) for one in episodes]


def greedy_baseline(episodes: Episodes) -> Advantages:
    """2310.10505, ReMax, eq. 5: r(x, y) - r(x, ȳ), ȳ the greedy answer."""
    return [[one.total - one.greedy] * len(one.tokens) for one in episodes]


def length_weighted(episodes: Episodes) -> Advantages:
    """2505.23585, OPO: r - Σ l·r / Σ l over the prompt's answers, l their lengths."""
    result = []
    for one in episodes:
        group = group_of(episodes, one)
        weighted = sum(len(other.tokens) * other.total for other in group)
        baseline = weighted / sum(len(other.tokens) for other in group)
        result.append([one.total - baseline] * len(one.tokens))
    return result


def maximum_likelihood(episodes: Episodes) -> Advantages:
    """2602.02710, MaxRL: (r - r̂)/r̂, r̂ the mean of the prompt's answers; 0 if none passed."""
    return of_outcomes(lambda r, g: (r - mean(g)) / mean(g) if mean(g) > 0 else 0.0, episodes)


def max_entropy(episodes: Episodes, sharpness: float = 1.0, guard: float = 0.0) -> Advantages:
    """2511.06221, MGPO: exp(-λ·KL(p ‖ ½)) · that of GRPO, p the share of right answers."""

    def weight(group: list[float]) -> float:
        p = mean(group)
        divergence = sum(q * math.log(q / 0.5) for q in (p, 1 - p) if q > 0)
        return math.exp(-sharpness * divergence)

    return of_outcomes(lambda r, group: weight(group) * z_score(r, group, guard), episodes)


def best_of_k(episodes: Episodes, k: int) -> Advantages:
    """2505.15201, PKPO, eq. 33: n·s_i, s_i the weight of an answer in the gradient of E[max of k].

    s_i = C(n,k)⁻¹ · Σ over the k-subsets I with i of max(I) - max(I without i), for k of at least
    2. The factor n turns the paper's sum over answers into a mean over answers.
    """
    result = []
    for one in episodes:
        others = [other.total for other in group_of(episodes, one) if other is not one]
        n = len(others) + 1
        gains = [
            max(one.total, *rest) - max(rest) for rest in itertools.combinations(others, k - 1)
        ]
        advantage = n * sum(gains) / math.comb(n, k) if n >= k else 0.0
        result.append([advantage] * len(one.tokens))
    return result


def decoupled(episodes: Episodes, weights: dict[str, float], guard: float = 0.0) -> Advantages:
    """2601.05242, GDPO, eqs. 4-6: z-score each reward in its group, sum, z-score in the batch."""
    sums = []
    for one in episodes:
        group = group_of(episodes, one)
        sums.append(
            sum(
                weight * z_score(one.parts[name], [other.parts[name] for other in group], guard)
                for name, weight in weights.items()
            )
        )
    return [
        [z_score(x, sums, guard)] * len(one.tokens) for x, one in zip(sums, episodes, strict=True)
    ]


def token_rewards(episode: Episode) -> list[float]:
    """Rewards at the tokens that earned them."""
    rewards: list[float] = []
    for turn in episode.turns:
        rewards += [0.0] * (len(turn.tokens) - 1) + [turn.reward]
    assert episode.reward is not None
    rewards[-1] += episode.reward
    return rewards


def to_go(rewards: Sequence[float], gamma: float = 1.0) -> list[float]:
    """Σ_{k ≥ t} γ^(k-t)·r_k for each t."""
    return [
        sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards)))
        for t in range(len(rewards))
    ]


def optimal_token_baseline(episodes: Episodes) -> Advantages:
    """2602.07078, OTB: G_t - Σ_i G_t·W_t / Σ_i W_t over the prompt's answers that reach token t.

    W_t = Σ_{j ≤ t} (1 - 2π_j + Σ_v π(v)²): the squared norm of the logits' gradient up to t.
    """
    futures, energies = [], []
    for one in episodes:
        futures.append(to_go(token_rewards(one)))
        steps = [1 - 2 * math.exp(t.old) + t.probs_squared for t in one.tokens]
        energies.append(list(itertools.accumulate(steps)))
    result: Advantages = []
    for one, future in zip(episodes, futures, strict=True):
        row = []
        for t in range(len(future)):
            there = [
                i
                for i, other in enumerate(episodes)
                if other.group == one.group and len(other.tokens) > t
            ]
            weights = sum(energies[i][t] for i in there)
            row.append(future[t] - sum(futures[i][t] * energies[i][t] for i in there) / weights)
        result.append(row)
    return result


def whitened(advantages: Advantages, guard: float = 0.0) -> Advantages:
    """2501.03262, eq. 8: (A - mean)/std over all tokens of the batch."""
    everything = [x for row in advantages for x in row]
    return [[z_score(x, everything, guard) for x in row] for row in advantages]


def reinforce_plus_plus(episodes: Episodes, beta: float = 0.0, guard: float = 0.0) -> Advantages:
    """2501.03262, eqs. 5-8: r - β·Σ_{i ≥ t} log(π_old/π_ref), whitened over the batch's tokens."""
    rows = []
    for one in episodes:
        paid = [-beta * (token.old - token.ref) for token in one.tokens]
        rows.append(to_go([r + p for r, p in zip(token_rewards(one), paid, strict=True)]))
    return whitened(rows, guard)


def turn_and_outcome(episodes: Episodes, coef: float = 1.0, guard: float = 0.0) -> Advantages:
    """2505.11821, MT-GRPO, eq. 6: Â_turn + λ·Â_outcome before the last turn, Â_outcome in it.

    Both are z-scores over the group: of the rewards of the turn with this index, of the outcomes.
    """
    result = []
    for one in episodes:
        group = group_of(episodes, one)
        outcomes = [other.reward or 0.0 for other in group]
        outcome = z_score(one.reward or 0.0, outcomes, guard)
        row = []
        for k, turn in enumerate(one.turns):
            peers = [other.turns[k].reward for other in group if len(other.turns) > k]
            before = z_score(turn.reward, peers, guard) + coef * outcome
            row += [outcome if k == len(one.turns) - 1 else before] * len(turn.tokens)
        result.append(row)
    return result


def turn_returns(episode: Episode, gamma: float) -> list[float]:
    """The discounted return from each turn on; the outcome is earned in the last one."""
    rewards = [turn.reward for turn in episode.turns]
    rewards[-1] += episode.reward or 0.0
    return to_go(rewards, gamma)


def turn_returns_by_index(episodes: Episodes, gamma: float, guard: float = 0.0) -> Advantages:
    """2505.11821, the variant "cae" of the authors' code: the return from a turn on, as a z-score
    over the group's turns of the same index.
    """
    result = []
    for one in episodes:
        row = []
        for k, turn in enumerate(one.turns):
            peers = [
                turn_returns(other, gamma)[k]
                for other in group_of(episodes, one)
                if len(other.turns) > k
            ]
            row += [z_score(turn_returns(one, gamma)[k], peers, guard)] * len(turn.tokens)
        result.append(row)
    return result


def group_in_group(
    episodes: Episodes, gamma: float = 0.95, coef: float = 1.0, guard: float = 0.0
) -> Advantages:
    """2505.10978, GiGPO, eqs. 3, 7, 8: A^E + ω·A^S, A^S the z-score of the discounted return among
    all turns of the prompt that met the same state."""
    result = []
    for one, outer in zip(episodes, grpo(episodes, guard), strict=True):
        row = []
        for k, turn in enumerate(one.turns):
            peers = [
                turn_returns(other, gamma)[j]
                for other in group_of(episodes, one)
                for j, met in enumerate(other.turns)
                if met.state == turn.state
            ]
            inner = z_score(turn_returns(one, gamma)[k], peers, guard)
            row += [outer[0] + coef * inner] * len(turn.tokens)
        result.append(row)
    return result


def gae_of(
    rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float
) -> list[float]:
    """1506.02438, eq. 16: Σ_l (γλ)^l·δ_{t+l}, δ_t = r_t + γ·V_{t+1} - V_t, V = 0 after the end."""
    after = [*values[1:], 0.0]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    return to_go(deltas, gamma * lam)


def gae(episodes: Episodes, gamma: float = 1.0, lam: float = 0.95) -> Advantages:
    """1707.06347, eqs. 11-12: GAE over the sampled tokens."""
    return [
        gae_of(token_rewards(one), [token.value for token in one.tokens], gamma, lam)
        for one in episodes
    ]


def length_adaptive(episodes: Episodes, alpha: float = 0.05, gamma: float = 1.0) -> Advantages:
    """2504.05118, VAPO, eq. 8: GAE with λ = 1 - 1/(α·l), l the length of the answer."""
    result = []
    for one in episodes:
        lam = 1 - 1 / (alpha * len(one.tokens))
        values = [token.value for token in one.tokens]
        result.append(gae_of(token_rewards(one), values, gamma, lam))
    return result


def turn_gae(episodes: Episodes, gamma: float = 0.99, lam: float = 0.9) -> Advantages:
    """2512.17008, turn-PPO, section 4: GAE whose steps are turns; V where the turn begins."""
    result = []
    for one in episodes:
        rewards = [turn.reward for turn in one.turns]
        rewards[-1] += one.reward or 0.0
        values = [turn.tokens[0].value for turn in one.turns]
        steps = gae_of(rewards, values, gamma, lam)
        result.append([a for a, turn in zip(steps, one.turns, strict=True) for _ in turn.tokens])
    return result
