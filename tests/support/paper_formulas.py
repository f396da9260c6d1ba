"""The recipes' losses as their papers write them: one function per paper, loops over tokens.

Written from the papers before a look at `trainers/`; how open points are read stands in
`paper_advantages`. Every function takes the scored episodes of one round and gives the advantages
and the loss (the negated objective); autograd of the loss gives the gradient with respect to the
new log-probabilities. Keyword defaults are the paper's own numbers, where it has some; "unstated"
marks the others. `paper_steps.PAPERS` names them by recipe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import paper_advantages as adv
import torch
from paper_advantages import Advantages, Episode, Episodes, Token
from torch import Tensor

Terms = list[list[Tensor]]  # [episode][token], each the objective of one token
Result = tuple[Advantages, Tensor]


def ratio(token: Token) -> Tensor:
    return torch.exp(token.new - token.old)


def clipped(r: Tensor, a: float, low: float, high: float) -> Tensor:
    """1707.06347, eq. 7: min(r·A, clip(r, 1-ε, 1+ε)·A)."""
    return torch.minimum(r * a, torch.clamp(r, 1 - low, 1 + high) * a)


def k3(token: Token) -> Tensor:
    """2402.03300, eq. 4: π_ref/π - log(π_ref/π) - 1."""
    return torch.exp(token.ref - token.new) - (token.ref - token.new) - 1


def each(
    episodes: Episodes, advantages: Advantages, term: Callable[[Token, float], Tensor]
) -> Terms:
    """`term` at every token."""
    return [
        [term(token, a) for token, a in zip(one.tokens, row, strict=True)]
        for one, row in zip(episodes, advantages, strict=True)
    ]


def total(tensors: Sequence[Tensor]) -> Tensor:
    result = torch.zeros((), dtype=torch.float64)
    for one in tensors:
        result = result + one
    return result


def episode_mean_of_means(terms: Terms) -> Tensor:
    """1/G Σ_i 1/|o_i| Σ_t, averaged over prompts."""
    return total([total(row) / len(row) for row in terms]) / len(terms)


def episode_mean_of_sums(terms: Terms) -> Tensor:
    """1/G Σ_i Σ_t, averaged over prompts."""
    return total([total(row) for row in terms]) / len(terms)


def token_mean(terms: Terms) -> Tensor:
    """1/Σ|o_i| Σ_i Σ_t over the whole batch."""
    return total([total(row) for row in terms]) / sum(len(row) for row in terms)


def group_token_means(episodes: Episodes, terms: Terms) -> Tensor:
    """E_q [1/Σ_{i ≤ G}|o_i| Σ_i Σ_t]: the tokens of one prompt's answers share one divisor."""
    names = sorted({one.group for one in episodes})
    means = []
    for name in names:
        rows = [row for one, row in zip(episodes, terms, strict=True) if one.group == name]
        means.append(token_mean(rows))
    return total(means) / len(names)


def log_policy(episodes: Episodes, advantages: Advantages) -> Tensor:
    """-(1/N) Σ_i A_i·log π(y_i | x): the plain policy gradient of whole answers."""
    return -episode_mean_of_sums(each(episodes, advantages, lambda t, a: a * t.new))


def reinforce(episodes: Episodes, before: Sequence[float] = (), beta: float = 0.03) -> Result:
    """2402.14740, eqs. 2-5: (R - b)·∇log π(y|x), b the mean reward of training so far."""
    a = adv.moving_average(adv.with_kl(episodes, beta), before)
    return a, log_policy(episodes, a)


def rloo(episodes: Episodes, beta: float = 0.03) -> Result:
    """2402.14740, eqs. 2 and 6. An answer is one action; nothing is clipped."""
    a = adv.leave_one_out(adv.with_kl(episodes, beta))
    return a, log_policy(episodes, a)


def remax(episodes: Episodes) -> Result:
    """2310.10505, eq. 5 and algorithm 1."""
    a = adv.greedy_baseline(episodes)
    return a, log_policy(episodes, a)


def opo(episodes: Episodes) -> Result:
    """2505.23585, eqs. 4 and 8: exactly on-policy, no KL, no entropy."""
    a = adv.length_weighted(episodes)
    return a, log_policy(episodes, a)


def grpo(episodes: Episodes, clip: float = 0.2, beta: float = 0.04, guard: float = 0.0) -> Result:
    """2402.03300, eq. 3; ε unstated, β = 0.04."""
    a = adv.grpo(episodes, guard)
    terms = each(episodes, a, lambda t, x: clipped(ratio(t), x, clip, clip) - beta * k3(t))
    return a, -episode_mean_of_means(terms)


def dr_grpo(episodes: Episodes, clip: float = 0.2, budget: float = 1.0) -> Result:
    """2503.20783, figure 1 and listing 1: no std, no 1/|o|; the listing divides by a constant."""
    a = adv.centred(episodes)
    terms = each(episodes, a, lambda t, x: clipped(ratio(t), x, clip, clip))
    return a, -episode_mean_of_sums(terms) / budget


def overlong(length: int, longest: float, cache: float) -> float:
    """2503.14476, eq. 13: the soft overlong punishment."""
    if length <= longest - cache:
        return 0.0
    return (longest - cache - length) / cache if length <= longest else -1.0


def punished(episodes: Episodes, longest: float, cache: float) -> list[Episode]:
    """Each reward plus its overlong punishment."""
    return [
        Episode(
            one.group,
            (one.reward or 0.0) + overlong(len(one.tokens), longest, cache),
            one.turns,
            one.greedy,
            one.parts,
        )
        for one in episodes
    ]


def dapo(
    episodes: Episodes,
    longest: float = 20480,
    cache: float = 4096,
    guard: float = 0.0,
    per_group: bool = True,
) -> Result:
    """2503.14476, eqs. 8, 9, 13: clip 0.2/0.28, token mean, overlong punishment, no KL.

    Groups without a difference in rewards are drawn again by the caller (eq. 8, constraint).
    """
    a = adv.grpo(punished(episodes, longest, cache), guard)
    terms = each(episodes, a, lambda t, x: clipped(ratio(t), x, 0.2, 0.28))
    return a, -(group_token_means(episodes, terms) if per_group else token_mean(terms))


def maxrl(episodes: Episodes) -> Result:
    """2602.02710, eq. 10: on-policy, 1/N Σ (r - r̂)/r̂ · ∇log π(z|x)."""
    a = adv.maximum_likelihood(episodes)
    return a, log_policy(episodes, a)


def mgpo(
    episodes: Episodes, sharpness: float = 1.0, clip: float = 0.2, guard: float = 0.0
) -> Result:
    """2511.06221, section 3.2: GRPO with reweighted advantages; λ and ε unstated, no KL."""
    a = adv.max_entropy(episodes, sharpness, guard)
    return a, -episode_mean_of_means(
        each(episodes, a, lambda t, x: clipped(ratio(t), x, clip, clip))
    )


def pass_at_k(episodes: Episodes, k: int = 2) -> Result:
    """2505.15201, eqs. 19 and 33: Σ_i s_i·∇log p(x_i)."""
    a = adv.best_of_k(episodes, k)
    return a, log_policy(episodes, a)


def gdpo(
    episodes: Episodes, weights: dict[str, float], clip: float = 0.2, guard: float = 0.0
) -> Result:
    """2601.05242, eqs. 4-6 in the objective of GRPO."""
    a = adv.decoupled(episodes, weights, guard)
    return a, -episode_mean_of_means(
        each(episodes, a, lambda t, x: clipped(ratio(t), x, clip, clip))
    )


def otb(episodes: Episodes) -> Result:
    """2602.07078, theorem 3.1 and section 4: Σ_t (G_t - B_t)·∇log π(y_t), a mean over answers."""
    a = adv.optimal_token_baseline(episodes)
    return a, log_policy(episodes, a)


def geometric(tokens: Sequence[Token]) -> Tensor:
    """2507.18071, eq. 7: (π(y|x)/π_old(y|x))^(1/|y|)."""
    return torch.exp(total([token.new - token.old for token in tokens]) / len(tokens))


def gspo(episodes: Episodes, low: float = 3e-4, high: float = 4e-4, guard: float = 0.0) -> Result:
    """2507.18071, eqs. 5-7 and section 5.1: one ratio and one clip per answer."""
    a = adv.grpo(episodes, guard)
    terms = [
        clipped(geometric(one.tokens), row[0], low, high)
        for one, row in zip(episodes, a, strict=True)
    ]
    return a, -total(terms) / len(terms)


def luspo(episodes: Episodes, low: float = 3e-4, high: float = 4e-4, guard: float = 0.0) -> Result:
    """2602.05261, eq. 10: GSPO times |y_i|."""
    a = adv.grpo(episodes, guard)
    terms = [
        clipped(geometric(one.tokens), row[0], low, high) * len(one.tokens)
        for one, row in zip(episodes, a, strict=True)
    ]
    return a, -total(terms) / len(terms)


def gmpo(episodes: Episodes, width: float = 0.4, guard: float = 0.0) -> Result:
    """2507.20673, eq. 4: {Π_t |min(ρ·A, clip(ρ, e^-w, e^w)·A)|}^(1/|o|)·sgn(A), w = 0.4."""
    a = adv.grpo(episodes, guard)
    terms = []
    for one, row in zip(episodes, a, strict=True):
        product = torch.ones((), dtype=torch.float64)
        for token in one.tokens:
            r = ratio(token)
            bounded = torch.clamp(r, math.exp(-width), math.exp(width))
            product = product * torch.minimum(r * row[0], bounded * row[0]).abs()
        terms.append(math.copysign(1.0, row[0]) * product ** (1 / len(row)) if row[0] else product)
    return a, -total(terms) / len(terms)


def cispo(
    episodes: Episodes, high: float = 0.28, guard: float = 0.0, per_group: bool = True
) -> Result:
    """2506.13585, eqs. 4-5: sg(min(r, 1+ε))·A·log π, token mean; no lower bound; ε unstated."""
    a = adv.grpo(episodes, guard)
    terms = each(episodes, a, lambda t, x: torch.clamp(ratio(t).detach(), max=1 + high) * x * t.new)
    return a, -(group_token_means(episodes, terms) if per_group else token_mean(terms))


def sapo(episodes: Episodes, up: float = 1.0, down: float = 1.05, guard: float = 0.0) -> Result:
    """2511.20347, eqs. 5-6: σ(τ·(r-1))·4/τ·A, τ = 1.0 for A > 0 and 1.05 otherwise."""

    def term(token: Token, a: float) -> Tensor:
        tau = up if a > 0 else down
        return torch.sigmoid(tau * (ratio(token) - 1)) * 4 / tau * a

    a = adv.grpo(episodes, guard)
    return a, -episode_mean_of_means(each(episodes, a, term))


def product(tokens: Sequence[Token]) -> float:
    """π(y|x)/π_old(y|x), without a gradient."""
    return math.exp(sum(token.new.item() - token.old for token in tokens))


def topr(episodes: Episodes, baseline: float = 0.0) -> Result:
    """2503.14286, eq. 7: R·∇log π where R ≥ 0, [π/μ]₀¹·R·∇log π where R < 0; R = r - c."""
    a = [[one.total - baseline] * len(one.tokens) for one in episodes]
    taper = [
        [x * (1.0 if x >= 0 else min(product(one.tokens), 1.0)) for x in row]
        for one, row in zip(episodes, a, strict=True)
    ]
    return a, log_policy(episodes, taper)


def dppo(episodes: Episodes, delta: float = 0.15) -> Result:
    """2602.04879, eqs. 10-13, binary TV: r·A, without a gradient where the token moves on past δ.

    The advantage is r - mean(r), as in Dr. GRPO.
    """

    def term(token: Token, a: float) -> Tensor:
        r = ratio(token)
        moved = abs(math.exp(token.new.item()) - math.exp(token.old)) > delta
        away = (a > 0 and r.item() > 1) or (a < 0 and r.item() < 1)
        return torch.zeros_like(r) if moved and away else r * a

    a = adv.centred(episodes)
    return a, -episode_mean_of_sums(each(episodes, a, term))


def vespo(episodes: Episodes, guard: float = 0.0) -> Result:
    """2602.10693, eq. 12: φ(W)·A·∇log π(τ), φ = W^c₁·exp(c₂(1-W)).

    (c₁, c₂) is (2, 3) for A > 0, else (3, 2).
    """
    a = adv.grpo(episodes, guard)
    shaped = []
    for one, row in zip(episodes, a, strict=True):
        w = product(one.tokens)
        c1, c2 = (2, 3) if row[0] > 0 else (3, 2)
        shaped.append([x * w**c1 * math.exp(c2 * (1 - w)) for x in row])
    return a, log_policy(episodes, shaped)


def covariances(episodes: Episodes, advantages: Advantages) -> list[list[float]]:
    """2505.22617, eq. 9: (log π - its mean)·(A - its mean), over the tokens of the batch."""
    logs = adv.mean(token.new.item() for one in episodes for token in one.tokens)
    middle = adv.mean(x for row in advantages for x in row)
    return [
        [(token.new.item() - logs) * (x - middle) for token, x in zip(one.tokens, row, strict=True)]
        for one, row in zip(episodes, advantages, strict=True)
    ]


def clip_cov(
    episodes: Episodes, bounds: tuple[float, float] = (1.0, 5.0), guard: float = 0.0
) -> Result:
    """2505.22617, eqs. 10-11: r·A, 0 at tokens drawn from those whose covariance is in bounds.

    Here all of them are drawn; the paper draws the share 2e-4 of the batch's tokens at random.
    """
    a = adv.grpo(episodes, guard)
    cov = covariances(episodes, a)
    terms = [
        [
            ratio(token) * x * (0.0 if bounds[0] <= c <= bounds[1] else 1.0)
            for token, x, c in zip(one.tokens, row, near, strict=True)
        ]
        for one, row, near in zip(episodes, a, cov, strict=True)
    ]
    return a, -token_mean(terms)


def kl_cov(
    episodes: Episodes, share: float = 0.002, beta: float = 1.0, guard: float = 0.0
) -> Result:
    """2505.22617, eqs. 12-13: r·A, and -β·|log π_old/π| at the share of highest covariance."""
    a = adv.grpo(episodes, guard)
    cov = covariances(episodes, a)
    order = sorted((c for row in cov for c in row), reverse=True)
    least = order[max(1, int(share * len(order))) - 1]
    terms = [
        [
            ratio(token) * x - (beta * (token.new - token.old).abs() if c >= least else 0.0)
            for token, x, c in zip(one.tokens, row, near, strict=True)
        ]
        for one, row, near in zip(episodes, a, cov, strict=True)
    ]
    return a, -token_mean(terms)


def quantile(numbers: Sequence[float], q: float) -> float:
    """The q-quantile, linear between neighbours."""
    ordered = sorted(numbers)
    place = q * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def simko(
    episodes: Episodes,
    alpha: float = 0.01,
    strength: float = 1.1,
    q: float = 0.8,
    clip: float = 0.2,
    guard: float = 0.0,
    edge: float | None = None,
) -> Result:
    """2510.14807, eqs. 6-8: at tokens above the answer's q-quantile of entropy, right answers share
    α of the ratio among the top K, wrong ones push the first candidate λ = 1.1 times as hard.

    γ ← (1-α)·γ + α/K·Σ_k sg(γ/γ_k)·γ_k; the rest is GRPO. `edge` is one for all answers.
    """
    a = adv.grpo(episodes, guard)
    terms = []
    for one, row in zip(episodes, a, strict=True):
        above = quantile([token.entropy for token in one.tokens], q) if edge is None else edge
        terms.append([])
        for token, x in zip(one.tokens, row, strict=True):
            r = ratio(token)
            if token.entropy > above and x > 0:
                others = [
                    torch.exp(new - old)
                    for new, old in zip(token.top_new, token.top_old, strict=True)
                ]
                shared = total([(r / other).detach() * other for other in others]) / len(others)
                r = (1 - alpha) * r + alpha * shared
            harder = strength if token.entropy > above and x < 0 and token.is_top else 1.0
            terms[-1].append(clipped(r, harder * x, clip, clip))
    return a, -episode_mean_of_means(terms)


def prorl(episodes: Episodes, beta: float = 1e-4, guard: float = 0.0) -> Result:
    """2505.24864, eqs. 1, 2, 4: DAPO's token mean and sampling, clip 0.2/0.4, and -β·KL to a
    reference that is reset by hand when training stalls; β unstated."""
    a = adv.grpo(episodes, guard)
    terms = each(episodes, a, lambda t, x: clipped(ratio(t), x, 0.2, 0.4) - beta * k3(t))
    return a, -token_mean(terms)
