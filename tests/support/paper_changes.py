"""Where a recipe is not its paper, and the paper's formula with that one change in it.

Every entry is held by `test_papers`: with the paper's formula the numbers differ, with the change
they agree, and with `settings`, where there are some, the recipe is the paper's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import paper_advantages as adv
import paper_formulas as one
import paper_steps as steps
import torch
from paper_advantages import Advantages, Episode, Episodes, Token
from paper_formulas import (
    Result,
    clipped,
    each,
    episode_mean_of_means,
    episode_mean_of_sums,
    k3,
    ratio,
    token_mean,
    total,
)
from torch import Tensor

EPS, WHITEN_EPS = 1e-6, 1e-8
"""Everywhere: std + 1e-6 in a group, std + 1e-8 where a round is whitened; no paper has a number."""
NORM_TOKENS = 4096


@dataclass(frozen=True)
class Difference:
    """One recipe's: the sentence, the changed formula, settings that undo it (None: there are
    none).
    """

    sentence: str
    ours: Callable[[Episodes], Result]
    settings: dict[str, Any] | None = None


def weighted(episodes: Episodes, a: Advantages) -> Tensor:
    """-(1/N) Σ_i Σ_t ρ·A: the ratio to the sampler in the place of log π."""
    return -episode_mean_of_sums(each(episodes, a, lambda t, x: ratio(t) * x))


def clipped_sum(episodes: Episodes, a: Advantages) -> Tensor:
    """-(1/N) Σ_i Σ_t of PPO's clip at 0.2."""
    return -episode_mean_of_sums(each(episodes, a, lambda t, x: clipped(ratio(t), x, 0.2, 0.2)))


def with_loss(
    credit: Callable[[Episodes], Advantages], loss: Callable[[Episodes, Advantages], Tensor]
) -> Callable[[Episodes], Result]:
    def both(episodes: Episodes) -> Result:
        a = credit(episodes)
        return a, loss(episodes, a)

    return both


def over_norm(episodes: Episodes, a: Advantages) -> Tensor:
    return clipped_sum(episodes, a) / NORM_TOKENS


def with_signal(episodes: Episodes) -> list[Episode]:
    """2503.14476, eq. 8: groups whose answers all earn the same are drawn again, so not here."""
    return [
        one for one in episodes if len({other.total for other in adv.group_of(episodes, one)}) > 1
    ]


def of_the_others(episodes: Episodes) -> Advantages:
    """The optimal token baseline over the other answers, (1-π)² for a token; an answer that ended
    counts with its last token.
    """
    futures = [adv.to_go(adv.token_rewards(one)) for one in episodes]
    energies = [
        list(itertools.accumulate((1 - math.exp(t.old)) ** 2 for t in one.tokens))
        for one in episodes
    ]
    result: Advantages = []
    for i, own in enumerate(episodes):
        others = [j for j, o in enumerate(episodes) if o.group == own.group and j != i]
        row = []
        for t, future in enumerate(futures[i]):
            at = {j: min(t, len(futures[j]) - 1) for j in others}
            weight = sum(energies[j][s] for j, s in at.items())
            known = sum(energies[j][s] * futures[j][s] for j, s in at.items())
            row.append(future - known / weight if others else 0.0)
        result.append(row)
    return result


def dppo_as_log(episodes: Episodes, a: Advantages) -> Tensor:
    """DPPO as -sg(min(ρ, 20))·A·log π over a constant: the value differs, the gradient does not
    while ρ < 20.
    """

    def term(token: Token, x: float) -> Tensor:
        r = ratio(token).detach()
        moved = abs(math.exp(token.new.item()) - math.exp(token.old)) > 0.15
        away = (x > 0 and r.item() > 1) or (x < 0 and r.item() < 1)
        return torch.clamp(r, max=20.0) * x * token.new * (0.0 if moved and away else 1.0)

    return -episode_mean_of_sums(each(episodes, a, term)) / NORM_TOKENS


def topr_centred(episodes: Episodes) -> Result:
    """TOPR with the group's mean as baseline."""
    a = adv.centred(episodes)
    taper = [
        [x * (1.0 if x >= 0 else min(one.product(e.tokens), 1.0)) for x in row]
        for e, row in zip(episodes, a, strict=True)
    ]
    return a, one.log_policy(episodes, taper)


def vespo_by_token(episodes: Episodes) -> Result:
    a, loss = one.vespo(episodes, EPS)
    return a, loss * len(episodes) / sum(len(episode.tokens) for episode in episodes)


def before_the_step(episodes: Episodes, a: Advantages) -> list[list[float]]:
    """Covariances with log π of the sampler, as they are before the policy moves."""
    logs = adv.mean(token.old for episode in episodes for token in episode.tokens)
    middle = adv.mean(x for row in a for x in row)
    return [
        [(t.old - logs) * (x - middle) for t, x in zip(episode.tokens, row, strict=True)]
        for episode, row in zip(episodes, a, strict=True)
    ]


def clip_cov_and_ppo(episodes: Episodes, low: float, high: float) -> Result:
    """Clip-Cov beside PPO's clip."""
    a = adv.grpo(episodes, EPS)
    kept = [[not low < c < high for c in row] for row in before_the_step(episodes, a)]
    terms = [
        [keep * term for keep, term in zip(row, objectives, strict=True)]
        for row, objectives in zip(
            kept, each(episodes, a, lambda t, x: clipped(ratio(t), x, 0.2, 0.2)), strict=True
        )
    ]
    return a, -token_mean(terms)


def kl_cov_of_positive(episodes: Episodes, share: float) -> Result:
    """KL-Cov at the share, rounded up, of highest covariance above 0."""
    a = adv.grpo(episodes, EPS)
    cov = before_the_step(episodes, a)
    order = sorted((c for row in cov for c in row), reverse=True)
    least = order[math.ceil(share * len(order)) - 1]
    terms = [
        [
            ratio(t) * x - ((t.new - t.old).abs() if c >= least and c > 0 else 0.0)
            for t, x, c in zip(episode.tokens, row, near, strict=True)
        ]
        for episode, row, near in zip(episodes, a, cov, strict=True)
    ]
    return a, -token_mean(terms)


def simko_of_the_step(episodes: Episodes) -> Result:
    """SimKO whose forks are the fifth of highest entropy of all tokens of the step."""
    order = sorted((t.entropy for e in episodes for t in e.tokens), reverse=True)
    return one.simko(episodes, edge=order[math.ceil(0.2 * len(order)) - 1] - 1e-12, guard=EPS)


def prorl_with_ratio(episodes: Episodes) -> Result:
    """ProRL with ρ·k3."""
    a = adv.grpo(episodes, EPS)
    terms = each(episodes, a, lambda t, x: clipped(ratio(t), x, 0.2, 0.4) - 1e-3 * ratio(t) * k3(t))
    return a, -token_mean(terms)


def whitened_gae(credit: Callable[[Episodes], Advantages]) -> Callable[[Episodes], Advantages]:
    return lambda episodes: adv.whitened(credit(episodes), WHITEN_EPS)


def clipped_tokens(episodes: Episodes, a: Advantages) -> Tensor:
    return -token_mean(each(episodes, a, lambda t, x: clipped(ratio(t), x, 0.2, 0.2)))


def clipped_episodes(episodes: Episodes, a: Advantages) -> Tensor:
    return -episode_mean_of_means(each(episodes, a, lambda t, x: clipped(ratio(t), x, 0.2, 0.2)))


def penalty_k3(episodes: Episodes, a: Advantages) -> Tensor:
    """r·A - β·(r - 1 - log r)."""
    return -token_mean(
        each(episodes, a, lambda t, x: ratio(t) * x - (ratio(t) - 1 - (t.new - t.old)))
    )


def vapo_floored(episodes: Episodes, alpha: float) -> Result:
    """VAPO with λ held above 0 and the imitation over all tokens."""
    a: Advantages = []
    for episode in episodes:
        lam = max(0.0, 1 - 1 / (alpha * len(episode.tokens)))
        a += adv.gae([episode], 1.0, lam)
    policy = token_mean(each(episodes, a, lambda t, x: clipped(ratio(t), x, 0.2, 0.28)))
    passed = [t.new for e in episodes if (e.reward or 0.0) >= 1 for t in e.tokens]
    return a, -policy - 0.1 * total(passed) / sum(len(e.tokens) for e in episodes)


GRADIENT = {"surrogate": "policy_gradient"}
GRADIENT_SUM = {"surrogate": "policy_gradient", "aggregate": "episode_sum"}
RATIO = "the ratio to the sampler stands in place of log π, so that a second step is corrected"
CLIP = "PPO's clip of 0.2 stands in place of the bare log π, so that a second step is bounded"

DIFFERS: dict[str, Difference] = {
    "reinforce": Difference(
        "The baseline is the mean reward of the round's other episodes, not of all rewards seen in"
        f" training; {RATIO}; no KL in the reward.",
        with_loss(adv.mean_of_the_others, weighted),
    ),
    "rloo": Difference(
        "Every token's ratio is clipped at 0.2, where the paper takes the answer as one action and"
        " clips nothing; no KL in the reward.",
        with_loss(adv.leave_one_out, clipped_sum),
        GRADIENT,
    ),
    "remax": Difference(
        "The ratio to the sampler stands in place of log π, so that a second step is corrected; no"
        " KL in the reward.",
        with_loss(adv.greedy_baseline, weighted),
        GRADIENT,
    ),
    "opo": Difference(
        "Strictly on-policy steps are not enforced (`epochs` and `minibatches` may be more than 1):"
        f" {RATIO}.",
        with_loss(adv.length_weighted, weighted),
        GRADIENT,
    ),
    "grpo": Difference(
        "No KL to a reference (the paper: 0.04 · k3, without the ratio).",
        partial(one.grpo, beta=0.0, guard=EPS),
        {"kl_coef": 0.04, "kl_ratio": False},
    ),
    "dr_grpo": Difference(
        "The sum over tokens is divided by the constant `norm_tokens`, as in the paper's listing;"
        " its equation has no divisor.",
        partial(one.dr_grpo, budget=NORM_TOKENS),
        {"norm_tokens": 1},
    ),
    "dapo": Difference(
        "No overlong punishment in the reward, and the token mean is over the whole step, where the"
        " equation has one per prompt (the authors' code: over the minibatch).",
        partial(one.dapo, longest=math.inf, guard=EPS, per_group=False),
    ),
    "maxrl": Difference(
        f"{CLIP}; the sum over tokens is divided by `norm_tokens`.",
        with_loss(adv.maximum_likelihood, over_norm),
        GRADIENT_SUM,
    ),
    "pass_at_k": Difference(
        "The baseline is the paper's leave-one-out one (a group of at most k says nothing), not"
        f" leave-one-out-minus-one; {CLIP}; the sum is divided by `norm_tokens`.",
        with_loss(partial(adv.best_of_k, k=2, baseline="loo"), over_norm),
    ),
    "otb": Difference(
        "The baseline is over the other answers alone, a token's energy is (1-π)² and not"
        f" 1-2π+Σπ², and an answer that ended counts with its last token; {RATIO}.",
        with_loss(of_the_others, weighted),
    ),
    "cispo": Difference(
        "The token mean is over the whole step, where the equation has one per prompt; groups"
        " without signal are not drawn again and long answers are not punished; the bound 1+4 is"
        " ours, the paper has no number.",
        partial(one.cispo, high=4.0, guard=EPS, per_group=False),
    ),
    "topr": Difference(
        "The reward is centred on its group's mean, where the paper has a constant baseline.",
        topr_centred,
    ),
    "dppo": Difference(
        "The loss is -ρ·A·log π with ρ held fixed and at most 20 (its gradient is that of -ρ·A),"
        " divided by `norm_tokens`.",
        with_loss(adv.centred, dppo_as_log),
    ),
    "vespo": Difference(
        "The mean is over the step's tokens, where the equation sums the tokens of an answer and"
        " takes the mean over answers.",
        vespo_by_token,
        {"aggregate": "episode_sum"},
    ),
    "clip_cov": Difference(
        "PPO's clip of 0.2 stays beside the selection, as in the authors' code, and covariances are"
        " of the policy before the step, not as it moves.",
        partial(clip_cov_and_ppo, low=0.05, high=5.0),
    ),
    "kl_cov": Difference(
        "Covariances are of the policy before the step, only those above 0 count, and the share is"
        " rounded up.",
        partial(kl_cov_of_positive, share=0.3),
    ),
    "simko": Difference(
        "Forks are the fifth of highest entropy of the whole step, where the paper takes the"
        " quantile of each answer; the sign of the advantage stands for right and wrong.",
        simko_of_the_step,
    ),
    "prorl": Difference(
        "The KL is ρ·k3, and the reference is reset every 200 rounds, where the authors reset it by"
        " hand when training stalls.",
        prorl_with_ratio,
        {"kl_ratio": False},
    ),
    "reinforce++": Difference(
        "No token KL in the reward.",
        partial(steps.reinforce_plus_plus, beta=0.0, guard=WHITEN_EPS),
        {"kl_reward_coef": 0.01},
    ),
    "reinforce++_baseline": Difference(
        "No KL to a reference (the paper: k2, without the ratio).",
        partial(steps.reinforce_plus_plus_baseline, beta=0.0, guard=WHITEN_EPS),
        {"kl_coef": 0.01, "kl_estimator": "k2", "kl_ratio": False},
    ),
    "turn_grpo": Difference(
        "A turn's advantage is the z-score of its return among its siblings' turns of the same"
        " index (the authors' second estimator, for any number of turns), not the z-score of its"
        " own reward plus that of the outcome; no KL.",
        partial(steps.turn_grpo, cumulative=1.0, beta=0.0, guard=EPS),
    ),
    "turn_ppo": Difference(
        "Ratio, clip and mean are of tokens, not of turns; advantages are whitened over the round;"
        " gamma is 1 and lam 0.95 (the paper: 0.99 and 0.9).",
        with_loss(whitened_gae(partial(adv.turn_gae, gamma=1.0, lam=0.95)), clipped_tokens),
    ),
    "gigpo": Difference(
        "Ratio and clip are of tokens, and every episode weighs the same, where the equation has"
        " the ratio of a turn's action and a mean over turns; no KL.",
        with_loss(partial(adv.group_in_group, guard=EPS), clipped_episodes),
    ),
    "ppo": Difference(
        "Advantages are whitened over the round and gamma is 1 (the paper: 0.99, no whitening); the"
        " critic is a model of its own, and no entropy bonus is in the loss.",
        with_loss(whitened_gae(partial(adv.gae, gamma=1.0)), clipped_tokens),
    ),
    "ppo_penalty": Difference(
        "As `ppo`; and the KL of a state is ρ - 1 - log ρ of its one sample, where the paper sums"
        " over actions.",
        with_loss(whitened_gae(partial(adv.gae, gamma=1.0)), penalty_k3),
    ),
    "vapo": Difference(
        "The imitation of right answers is divided by all tokens of the step, where the paper"
        " divides by those of right answers (at 10 % passing: a tenth of its strength); λ is not"
        " below 0 for answers shorter than 1/alpha tokens.",
        partial(vapo_floored, alpha=0.4),
    ),
}
