"""The papers' formulas as our recipes have them: one option for each thing that differs, which has
our value unless it is given the paper's. Which deviation each undoes is in `paper_differs`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import paper_advantages as adv
import paper_formulas as one
import paper_steps as steps
import torch
from paper_advantages import Advantages, Episode, Episodes, Token
from paper_formulas import Result, clipped, each, k3, ratio, token_mean, total
from torch import Tensor

EPS, WHITEN_EPS = 1e-6, 1e-8
"""Of every deviation we divide by, in a group and over a round. No paper has a number for it."""
NORM = 4096
COVARIANCES, SHARE, ALPHA, HIGH, DELTA = (0.05, 5.0), 0.6, 0.4, 0.3, 0.05
"""Numbers that cut something in short episodes: of Clip-Cov, KL-Cov, VAPO, CISPO, DPPO."""


def logged(token: Token, a: float) -> Tensor:
    return a * token.new


def weighted(token: Token, a: float) -> Tensor:
    return ratio(token) * a


def clipped_at_02(token: Token, a: float) -> Tensor:
    return clipped(ratio(token), a, 0.2, 0.2)


def summed(
    credit: Callable[..., Advantages], term: Callable[[Token, float], Tensor], norm: int = 1
):
    """The mean over episodes of summed terms; further options are those of the credit."""

    def ours(episodes: Episodes, *, term=term, norm: int = norm, **options: Any) -> Result:
        a = credit(episodes, **options)
        return a, -one.episode_mean_of_sums(each(episodes, a, term)) / norm

    return ours


def with_signal(episodes: Episodes) -> list[Episode]:
    """2503.14476, eq. 8: groups whose answers all earn the same are drawn again, so not here."""
    return [
        own for own in episodes if len({other.total for other in adv.group_of(episodes, own)}) > 1
    ]


def reinforce(episodes: Episodes, others: bool = True, beta: float = 0.0) -> Advantages:
    episodes = adv.with_kl(episodes, beta)
    return adv.mean_of_the_others(episodes) if others else adv.moving_average(episodes)


def rloo(episodes: Episodes, beta: float = 0.0) -> Advantages:
    return adv.leave_one_out(adv.with_kl(episodes, beta))


def token_baseline(
    episodes: Episodes, own: bool = False, chosen: bool = True, ended: bool = True
) -> Advantages:
    """The optimal token baseline.

    Args:
        own: an answer is in its own baseline.
        chosen: a token's energy is (1-π)², else 1 - 2π + Σπ².
        ended: an answer that has ended counts with its last token.
    """
    futures = [adv.to_go(adv.token_rewards(episode)) for episode in episodes]
    energies = [
        list(
            itertools.accumulate(
                (1 - math.exp(t.old)) ** 2 if chosen else 1 - 2 * math.exp(t.old) + t.probs_squared
                for t in episode.tokens
            )
        )
        for episode in episodes
    ]
    result: Advantages = []
    for i, episode in enumerate(episodes):
        row = []
        for t, future in enumerate(futures[i]):
            at = {
                j: min(t, len(futures[j]) - 1)
                for j, other in enumerate(episodes)
                if other.group == episode.group
                and (own or j != i)
                and (ended or t < len(futures[j]))
            }
            weight = sum(energies[j][s] for j, s in at.items())
            known = sum(energies[j][s] * futures[j][s] for j, s in at.items())
            row.append(future - known / weight if at else 0.0)
        result.append(row)
    return result


def best_of_two(episodes: Episodes, of_two: bool = True) -> Advantages:
    """PKPO at k = 2, less 2·(the mean best of two others) if `of_two`."""
    if not of_two:
        return adv.best_of_k(episodes, 2)
    result = []
    for own in episodes:
        others = [other.total for other in adv.group_of(episodes, own) if other is not own]
        advantage = 0.0
        if len(others) > 1:
            best = adv.mean(max(pair) for pair in itertools.combinations(others, 2))
            advantage = 2 * (adv.mean(max(own.total, other) for other in others) - best)
        result.append([advantage] * len(own.tokens))
    return result


def topr(episodes: Episodes, centred: bool = True) -> Result:
    if not centred:
        return one.topr(episodes)
    a = adv.centred(episodes)
    taper = [
        [x * (1.0 if x >= 0 else min(one.product(e.tokens), 1.0)) for x in row]
        for e, row in zip(episodes, a, strict=True)
    ]
    return a, one.log_policy(episodes, taper)


def dppo(episodes: Episodes, as_log: bool = True, norm: int = NORM) -> Result:
    """DPPO, as -sg(min(ρ, 20))·A·log π if `as_log`."""

    def term(token: Token, x: float) -> Tensor:
        r = ratio(token)
        moved = abs(math.exp(token.new.item()) - math.exp(token.old)) > DELTA
        away = (x > 0 and r.item() > 1) or (x < 0 and r.item() < 1)
        objective = torch.clamp(r.detach(), max=20.0) * x * token.new if as_log else r * x
        return objective * (0.0 if moved and away else 1.0)

    a = adv.centred(episodes)
    return a, -one.episode_mean_of_sums(each(episodes, a, term)) / norm


def vespo(episodes: Episodes, by_token: bool = True) -> Result:
    a, loss = one.vespo(episodes, EPS)
    tokens = sum(len(episode.tokens) for episode in episodes)
    return a, loss * len(episodes) / tokens if by_token else loss


def covariances(episodes: Episodes, a: Advantages, before: bool) -> list[list[float]]:
    """Those of the paper; `before`: with log π before the policy moved."""
    if before:
        still = [
            replace(e, turns=[adv.Turn([replace(t, new=torch.tensor(t.old)) for t in e.tokens])])
            for e in episodes
        ]
        return one.covariances(still, a)
    return one.covariances(episodes, a)


def clip_cov(episodes: Episodes, clip: bool = True, before: bool = True) -> Result:
    a, (low, high) = adv.grpo(episodes, EPS), COVARIANCES
    terms = each(episodes, a, clipped_at_02 if clip else weighted)
    kept = [
        [term * (not low < c < high) for term, c in zip(row, near, strict=True)]
        for row, near in zip(terms, covariances(episodes, a, before), strict=True)
    ]
    return a, -token_mean(kept)


def kl_cov(
    episodes: Episodes, before: bool = True, positive: bool = True, up: bool = True
) -> Result:
    a = adv.grpo(episodes, EPS)
    cov = covariances(episodes, a, before)
    order = sorted((c for row in cov for c in row), reverse=True)
    count = math.ceil(SHARE * len(order)) if up else max(1, int(SHARE * len(order)))
    least = order[count - 1]
    terms = [
        [
            ratio(t) * x - ((t.new - t.old).abs() if c >= least and (c > 0 or not positive) else 0)
            for t, x, c in zip(episode.tokens, row, near, strict=True)
        ]
        for episode, row, near in zip(episodes, a, cov, strict=True)
    ]
    return a, -token_mean(terms)


def simko(episodes: Episodes, of_the_step: bool = True) -> Result:
    order = sorted((t.entropy for e in episodes for t in e.tokens), reverse=True)
    edge = order[math.ceil(0.2 * len(order)) - 1] - 1e-12 if of_the_step else None
    return one.simko(episodes, edge=edge, guard=EPS)


def prorl(episodes: Episodes, with_ratio: bool = True) -> Result:
    def term(t: Token, x: float) -> Tensor:
        kl = ratio(t) * k3(t) if with_ratio else k3(t)
        return clipped(ratio(t), x, 0.2, 0.4) - 1e-3 * kl

    a = adv.grpo(episodes, EPS)
    return a, -token_mean(each(episodes, a, term))


def turn_ppo(
    episodes: Episodes,
    by_turn: bool = False,
    white: bool = True,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> Result:
    a = adv.turn_gae(episodes, gamma, lam)
    a = adv.whitened(a, WHITEN_EPS) if white else a
    by_token = -token_mean(each(episodes, a, clipped_at_02))
    return a, steps.of_turns(episodes, a, 0.2) if by_turn else by_token


def gigpo(episodes: Episodes, by_turn: bool = False, beta: float = 0.0) -> Result:
    if by_turn:
        return steps.gigpo(episodes, beta=beta, guard=EPS)
    a = adv.group_in_group(episodes, guard=EPS)
    terms = each(episodes, a, lambda t, x: clipped_at_02(t, x) - beta * k3(t))
    return a, -one.episode_mean_of_means(terms)


def ppo(episodes: Episodes, white: bool = True, gamma: float = 1.0, term=clipped_at_02) -> Result:
    a = adv.gae(episodes, gamma)
    a = adv.whitened(a, WHITEN_EPS) if white else a
    return a, -token_mean(each(episodes, a, term))


def penalty(token: Token, a: float, sampled: bool = True) -> Tensor:
    """r·A less the KL of a state: r - 1 - log r, or -log r."""
    r, log_r = ratio(token), token.new - token.old
    return r * a - (r - 1 - log_r if sampled else -log_r)


def vapo(episodes: Episodes, floor: bool = True) -> Result:
    a: Advantages = []
    for episode in episodes:
        lam = 1 - 1 / (ALPHA * len(episode.tokens))
        a += adv.gae([episode], 1.0, max(0.0, lam) if floor else lam)
    policy = token_mean(each(episodes, a, lambda t, x: clipped(ratio(t), x, 0.2, 0.28)))
    right = [t.new for e in episodes if (e.reward or 0.0) >= 1 for t in e.tokens]
    return a, -policy - 0.1 * total(right) / max(len(right), 1)
