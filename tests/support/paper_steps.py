"""Losses of the papers whose credit differs between tokens or turns: batches, turns, critics.

Written as `paper_formulas`, before a look at `trainers/`. `PAPERS` names every formula by recipe.
"""

from __future__ import annotations

from collections.abc import Callable

import paper_advantages as adv
import paper_formulas as one_outcome
import torch
from paper_advantages import Advantages, Episodes, Token
from paper_formulas import (
    Result,
    clipped,
    each,
    episode_mean_of_means,
    k3,
    ratio,
    token_mean,
    total,
)
from torch import Tensor


def reinforce_plus_plus(
    episodes: Episodes, beta: float = 0.01, clip: float = 0.2, guard: float = 0.0
) -> Result:
    """2501.03262, eqs. 3-8: PPO's clip, the token KL in the reward, whitened over the batch."""
    a = adv.reinforce_plus_plus(episodes, beta, guard)
    return a, -token_mean(each(episodes, a, lambda t, x: clipped(ratio(t), x, clip, clip)))


def reinforce_plus_plus_baseline(
    episodes: Episodes, beta: float = 0.01, clip: float = 0.2, guard: float = 0.0
) -> Result:
    """2501.03262, eqs. 9-11: r - mean of the group, whitened over the batch, -λ·k2 to π_ref."""

    def term(token: Token, a: float) -> Tensor:
        return clipped(ratio(token), a, clip, clip) - beta * (token.new - token.ref) ** 2 / 2

    a = adv.whitened(adv.centred(episodes), guard)
    return a, -token_mean(each(episodes, a, term))


def turn_grpo(
    episodes: Episodes,
    coef: float = 1.0,
    clip: float = 0.2,
    beta: float = 0.04,
    guard: float = 0.0,
    cumulative: float | None = None,
) -> Result:
    """2505.11821, eqs. 3 and 6: MT-GRPO; ε, β and λ unstated. `cumulative` takes the authors'
    second estimator, with this discount."""
    if cumulative is None:
        a = adv.turn_and_outcome(episodes, coef, guard)
    else:
        a = adv.turn_returns_by_index(episodes, cumulative, guard)
    terms = each(episodes, a, lambda t, x: clipped(ratio(t), x, clip, clip) - beta * k3(t))
    return a, -episode_mean_of_means(terms)


def turn_ratio(tokens: list[Token]) -> Tensor:
    """π(a_h|s_h)/π_old(a_h|s_h): the action is the whole turn."""
    return torch.exp(total([token.new - token.old for token in tokens]))


def of_turns(episodes: Episodes, advantages: Advantages, clip: float) -> Tensor:
    """-1/(number of turns) Σ over turns of the clipped objective of the turn."""
    terms = []
    for one, row in zip(episodes, advantages, strict=True):
        start = 0
        for turn in one.turns:
            terms.append(clipped(turn_ratio(turn.tokens), row[start], clip, clip))
            start += len(turn.tokens)
    return -total(terms) / len(terms)


def turn_ppo(
    episodes: Episodes,
    gamma: float = 0.99,
    lam: float = 0.9,
    clip: float = 0.2,
    by_turn: bool = True,
) -> Result:
    """2512.17008, section 4: PPO in the turn MDP. The ratio and the clip are those of a turn."""
    a = adv.turn_gae(episodes, gamma, lam)
    if by_turn:
        return a, of_turns(episodes, a, clip)
    return a, -token_mean(each(episodes, a, lambda t, x: clipped(ratio(t), x, clip, clip)))


def gigpo(
    episodes: Episodes,
    gamma: float = 0.95,
    coef: float = 1.0,
    clip: float = 0.2,
    beta: float = 0.01,
    guard: float = 0.0,
    by_turn: bool = True,
) -> Result:
    """2505.10978, eq. 9: 1/(NT) ΣΣ min(ρ·A, clip(ρ)·A) - β·KL, ρ the ratio of a turn's action."""
    a = adv.group_in_group(episodes, gamma, coef, guard)
    kl = token_mean(each(episodes, a, lambda t, _: k3(t)))
    if by_turn:
        return a, of_turns(episodes, a, clip) + beta * kl
    terms = each(episodes, a, lambda t, x: clipped(ratio(t), x, clip, clip))
    return a, -token_mean(terms) + beta * kl


def ppo(episodes: Episodes, gamma: float = 0.99, lam: float = 0.95, clip: float = 0.2) -> Result:
    """1707.06347, eqs. 7, 11, 12 and table 3: E_t over all time steps."""
    a = adv.gae(episodes, gamma, lam)
    return a, -token_mean(each(episodes, a, lambda t, x: clipped(ratio(t), x, clip, clip)))


def ppo_penalty(
    episodes: Episodes, beta: float = 1.0, gamma: float = 0.99, lam: float = 0.95
) -> Result:
    """1707.06347, eq. 8: E_t[r·A - β·KL(π_old, π)]; the KL of a state by its one sample."""
    a = adv.gae(episodes, gamma, lam)
    terms = each(episodes, a, lambda t, x: ratio(t) * x - beta * (t.old - t.new))
    return a, -token_mean(terms)


def next_beta(beta: float, measured: float, target: float) -> float:
    """1707.06347, section 4: halved below target/1.5, doubled above 1.5·target."""
    if measured < target / 1.5:
        return beta / 2
    return beta * 2 if measured > target * 1.5 else beta


def vapo(
    episodes: Episodes,
    alpha: float = 0.05,
    coef: float = 0.1,
    right: float = 1.0,
    divisor: int | None = None,
) -> Result:
    """2504.05118, eqs. 8, 10, 12: clip 0.2/0.28, token mean, -0.1 · mean log π of right answers.

    The last mean is over the tokens of right answers alone; `divisor` replaces their number.
    """
    a = adv.length_adaptive(episodes, alpha)
    policy = token_mean(each(episodes, a, lambda t, x: clipped(ratio(t), x, 0.2, 0.28)))
    passed = [t.new for one in episodes if (one.reward or 0.0) >= right for t in one.tokens]
    imitation = total(passed) / (divisor or max(len(passed), 1))
    return a, -policy - coef * imitation


def value_targets(recipe: str, episodes: Episodes) -> Advantages:
    """What the critic learns: A + V in PPO, the plain return (λ = 1) in VAPO (2504.05118, eq. 6),
    A + V of the turn at its first token in turn-PPO."""
    if recipe == "vapo":
        a = adv.gae(episodes, 1.0, 1.0)
    elif recipe == "turn_ppo":
        a = adv.turn_gae(episodes)
    else:
        a = adv.gae(episodes, 0.99, 0.95)
    return [
        [x + token.value for x, token in zip(row, one.tokens, strict=True)]
        for one, row in zip(episodes, a, strict=True)
    ]


def distill(episodes: Episodes, gamma: float = 0.0) -> Result:
    """Lu 2025, "On-policy distillation": the advantage is the negative reverse KL of the sampled
    token, discounted by 0, in an importance-weighted policy gradient, averaged over tokens.
    """
    ratios = [[token.teacher - token.old for token in one.tokens] for one in episodes]
    a = [
        [sum(gamma**k * later for k, later in enumerate(row[t:])) for t in range(len(row))]
        for row in ratios
    ]
    terms = one_outcome.each(episodes, a, lambda t, x: one_outcome.ratio(t) * x)
    return a, -one_outcome.total([one_outcome.total(row) for row in terms]) / sum(map(len, terms))


PAPERS: dict[str, Callable[..., Result]] = {
    "reinforce": one_outcome.reinforce,
    "rloo": one_outcome.rloo,
    "remax": one_outcome.remax,
    "opo": one_outcome.opo,
    "grpo": one_outcome.grpo,
    "dr_grpo": one_outcome.dr_grpo,
    "dapo": one_outcome.dapo,
    "maxrl": one_outcome.maxrl,
    "mgpo": one_outcome.mgpo,
    "pass_at_k": one_outcome.pass_at_k,
    "gdpo": one_outcome.gdpo,
    "otb": one_outcome.otb,
    "gspo": one_outcome.gspo,
    "luspo": one_outcome.luspo,
    "gmpo": one_outcome.gmpo,
    "cispo": one_outcome.cispo,
    "sapo": one_outcome.sapo,
    "topr": one_outcome.topr,
    "dppo": one_outcome.dppo,
    "vespo": one_outcome.vespo,
    "clip_cov": one_outcome.clip_cov,
    "kl_cov": one_outcome.kl_cov,
    "simko": one_outcome.simko,
    "prorl": one_outcome.prorl,
    "reinforce++": reinforce_plus_plus,
    "reinforce++_baseline": reinforce_plus_plus_baseline,
    "turn_grpo": turn_grpo,
    "turn_ppo": turn_ppo,
    "gigpo": gigpo,
    "ppo": ppo,
    "ppo_penalty": ppo_penalty,
    "vapo": vapo,
    "distill": distill,
}
