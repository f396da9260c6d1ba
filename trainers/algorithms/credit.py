"""Credit below the episode: how much better each token or turn was than expected.

Time is the line of an episode's trained tokens in the order of its rows (`Timeline`), or of its
turns. Observations take no time: nothing decays through them, their values are never read, and a
reward on one belongs to the last trained token before it. The outcome is on the episode's last
trained token. An episode that a limit ended is graded like any other, so nothing is bootstrapped
after it.

Steps run once per round, over all groups, on a batch whose rows are in the order of `pack`.
Statistics are over episodes or turns, never over rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from pydantic import model_validator
from torch import Tensor

from agentrl.settings import SettingError
from agentrl.trainers.algorithms.advantages import grpo, in_buckets, total_reward_E
from agentrl.trainers.algorithms.corrections import policy_ratio
from agentrl.trainers.algorithms.parts import (
    AtLeastOne,
    Bound,
    Count,
    NonNegative,
    Options,
    Share,
    step,
)
from agentrl.trainers.algorithms.timeline import Timeline, discounted
from agentrl.trainers.batch import TokenBatch


class Discount(Options):
    gamma: Share = 1.0
    """Discount per trained token, or per turn where steps are turns."""


class Trace(Discount):
    lam: Share = 0.95
    """λ of generalised advantage estimation: lower means less variance and more of V's bias."""


# --- one value per token ---


@step(Discount, reads=("turns",))
def reward_to_go(batch: TokenBatch, options: Discount) -> TokenBatch:
    """The discounted rewards from each trained token on. With `whiten` after it: REINFORCE++.

    https://arxiv.org/abs/2501.03262. Nothing is centred here: in a group of one, or of equal
    rewards, the advantage is the reward.
    """
    line = Timeline.of(batch)
    return replace(batch, advantages_BT=line.write(_returns(line, options.gamma)))


class WhitenDeviation(Options):
    eps: NonNegative = 1e-8
    """Added to the standard deviation."""


@step(WhitenDeviation, expects=("advantages",))
def whiten(batch: TokenBatch, options: WhitenDeviation) -> TokenBatch:
    """(A - mean) / (std + eps) over all trained tokens of the round, ddof=1; exactly 0 where all
    are equal.

    Long episodes weigh more in the mean. An episode's own reward is in mean and deviation, so this
    biases what was unbiased. A group without signal gets a nonzero advantage from the other groups'
    mean (`filter_groups` leaves it out beforehand). (OpenRLHF divides by the deviation of ddof=0,
    verl by √(var + eps).)
    """
    values_N = batch.advantages_BT[batch.mask_BT].double()
    if len(values_N) == 0 or bool((values_N == values_N[0]).all()):
        return replace(batch, advantages_BT=torch.zeros_like(batch.advantages_BT))
    centred_BT = batch.advantages_BT.double() - values_N.mean()
    scaled_BT = centred_BT / (values_N.std(correction=1) + options.eps)
    return replace(
        batch, advantages_BT=torch.where(batch.mask_BT, scaled_BT, 0.0).to(batch.advantages_BT)
    )


@step(Trace, reads=("critic", "turns"))
def gae(batch: TokenBatch, options: Trace) -> TokenBatch:
    """Σ_k (gamma·lam)^k · (r + gamma·V' - V) from each trained token on: generalised advantage
    estimation.

    https://arxiv.org/abs/1506.02438. Fills advantages and the critic's returns A + V. With gamma =
    lam = 1 it is the return minus V: unbiased whatever V is. Below 1 it is as biased as V is wrong.

    Raises:
        ValueError: the batch has no values, or a reward comes before an episode's first trained
            token.
    """
    line = Timeline.of(batch)
    values_N = line.read(_values(batch, "gae"))
    advantages_N = generalised_advantages(
        line.rewards_N, values_N, line.last_N, options.gamma, options.lam
    )
    return _estimated(line, advantages_N, advantages_N + values_N)


class LengthTrace(Discount):
    length_alpha: NonNegative = 0.05
    """α of λ = 1 - 1/(α·tokens)."""
    value_lam: Share = 1.0
    """λ of the returns that the critic learns from."""


@step(LengthTrace, reads=("critic", "turns"))
def length_adaptive_gae(batch: TokenBatch, options: LengthTrace) -> TokenBatch:
    """GAE with λ = 1 - 1/(length_alpha · l) for an episode of l trained tokens, and another λ for
    the returns. VAPO.

    https://arxiv.org/abs/2504.05118. λ is 0 where length_alpha · l is below 1, which by default is
    up to 20 tokens. Raises as `gae` does.
    """
    line = Timeline.of(batch)
    values_N = line.read(_values(batch, "length_adaptive_gae"))
    tokens_E = batch.tokens_E.double().clamp(min=1)
    lam_E = (1 - 1 / (options.length_alpha * tokens_E)).clamp(0, 1)
    steps = line.rewards_N, values_N, line.last_N, options.gamma
    advantages_N = generalised_advantages(*steps, lam_E[line.episode_N])
    returns_N = generalised_advantages(*steps, options.value_lam) + values_N
    return _estimated(line, advantages_N, returns_N)


class VTrace(Discount):
    lam: Share = 1.0
    """λ of the trace."""
    rho_high: Bound = 1.0
    """Largest weight of a temporal difference."""
    trace_high: Bound = 1.0
    """Largest weight of what comes after a token."""

    @model_validator(mode="after")
    def _ordered(self) -> VTrace:
        if self.trace_high > self.rho_high:
            raise SettingError(f"must be at most rho_high={self.rho_high}", "trace_high")
        return self


@step(VTrace, reads=("critic", "proximal", "turns"))
def vtrace(batch: TokenBatch, options: VTrace) -> TokenBatch:
    """V-trace: returns and advantages of the policy that the update starts from, on tokens that an
    older one sampled.

    IMPALA, https://arxiv.org/abs/1802.01561, section 4.1. With w = π_proximal/π_old of the token,
    ρ = min(w, rho_high) and c = lam · min(w, trace_high): the return is v = V + Σ_k gamma^k ·
    (Π_{i<k} c_i) · ρ_k · (r_k + gamma·V_{k+1} - V_k), and the advantage is ρ · (r + gamma·v' - V).
    On-policy it is `gae` with λ = 1, or, for the returns alone, with `lam`. The advantage already
    holds the weight of its token: do not add a correction by `truncated_is`. Raises as `gae` does,
    and where the batch has no proximal log-probabilities.
    """
    line = Timeline.of(batch)
    values_N = line.read(_values(batch, "vtrace"))
    ratio_N = line.read(policy_ratio(batch, "token"))
    rho_N = ratio_N.clamp(max=options.rho_high)
    trace_N = ratio_N.clamp(max=options.trace_high)
    discount_N = options.gamma * (~line.last_N).double()
    errors_N = rho_N * (line.rewards_N + discount_N * values_N.roll(-1) - values_N)
    returns_N = values_N + discounted(errors_N, discount_N * options.lam * trace_N)
    advantages_N = rho_N * (line.rewards_N + discount_N * returns_N.roll(-1) - values_N)
    return _estimated(line, advantages_N, returns_N)


def generalised_advantages(
    rewards_S: Tensor, values_S: Tensor, last_S: Tensor, gamma: float, lam: float | Tensor
) -> Tensor:
    """Σ_k (γλ)^k · (r + γV' - V) over the steps of any number of episodes in sequence, float64.

    Args:
        values_S: V of the state in which each step acts.
        last_S: True on the last step of each episode; V is 0 after it.
        lam: λ, one for all steps or one for each.
    """
    going_S = (~last_S).double()
    errors_S = rewards_S + gamma * going_S * values_S.roll(-1) - values_S
    return discounted(errors_S, gamma * lam * going_S)


@step(reads=("group", "turns"))
def optimal_baseline(batch: TokenBatch) -> TokenBatch:
    """Reward-to-go minus the baseline of least variance at that token, over the *other* episodes of
    the group.

    b_t = Σ W_t·G_t / Σ W_t, where W_t is the squared norm of the score function up to token t: the
    optimal token baseline, https://arxiv.org/abs/2602.07078. Approximation: the square for one
    token is (1-π)², that of the chosen logit alone; the gradient in all logits, 1 - 2π + Σπ², is
    between that and twice that. Because the baseline is over other episodes (the paper takes all),
    it depends on no action of the episode itself and the estimator is unbiased.

    An episode that is shorter than t counts with its last token. A group of one, or of equal
    returns: 0.
    """
    line = Timeline.of(batch)
    surprise_N = -torch.expm1(line.read(batch.old_logprobs_BT).clamp(max=0))
    tokens_E = torch.bincount(line.episode_N, minlength=len(batch.reward_E))
    begin_E = tokens_E.cumsum(0) - tokens_E
    returns_N = _returns(line, 1.0)
    energy_N = surprise_N.square().cumsum(0)
    energy_N = energy_N - (energy_N - surprise_N.square())[begin_E[line.episode_N]]
    advantages_N = torch.zeros_like(returns_N)
    played = torch.nonzero(tokens_E).flatten()
    for group in batch.group_E[played].unique().tolist():
        members_G = played[batch.group_E[played] == group]
        if len(members_G) < 2:
            continue
        steps = torch.arange(int(tokens_E[members_G].max()), device=tokens_E.device)
        at_GT = begin_E[members_G, None] + torch.minimum(steps, tokens_E[members_G, None] - 1)
        # 1e-30: tokens of probability 1 have no weight, and 0/0 would be NaN.
        weight_GT, return_GT = energy_N[at_GT] + 1e-30, returns_N[at_GT]
        spans = zip(begin_E[members_G], tokens_E[members_G], strict=True)
        for own, (begin, length) in enumerate(spans):
            others = torch.arange(len(members_G), device=steps.device) != own
            weight = weight_GT[others, :length]
            gained = return_GT[own, :length] - return_GT[others, :length]
            advantages_N[begin : begin + length] = (weight * gained).sum(0) / weight.sum(0)
    return replace(batch, advantages_BT=line.write(advantages_N))


# --- one value per turn ---


@step(Trace, reads=("critic", "turns"))
def turn_gae(batch: TokenBatch, options: Trace) -> TokenBatch:
    """GAE whose steps are turns: V is read at a turn's first token, before the policy has sampled
    anything.

    Every token of a turn carries the turn's advantage, and its return for the critic to learn.
    Raises as `gae` does.
    """
    line = Timeline.of(batch)
    values_K = line.read(_values(batch, "turn_gae"))[line.first_K]
    advantages_K = generalised_advantages(
        line.rewards_K, values_K, line.last_K, options.gamma, options.lam
    )
    return _estimated(line, advantages_K[line.turn_N], (advantages_K + values_K)[line.turn_N])


@step(Discount, reads=("group", "turns"))
def turn_level(batch: TokenBatch, options: Discount) -> TokenBatch:
    """Each turn's discounted return, normalised over the turns of the same index in its group (as
    `grpo` does).

    Turn-level credit from per-turn rewards, after https://arxiv.org/abs/2505.11821. Turn t of an
    episode is compared with turn t of its siblings, whatever they met there; a turn that no sibling
    reached has an advantage of 0. Biased as GRPO is.
    """
    line = Timeline.of(batch)
    keys = list(zip(batch.group_E[line.episode_K].tolist(), line.position_K.tolist(), strict=True))
    advantages_K = in_buckets(grpo, keys, _turn_returns(line, options.gamma).tolist())
    return replace(
        batch, advantages_BT=line.write(advantages_K.to(line.turn_N.device)[line.turn_N])
    )


class StepWeight(Options):
    gamma: Share = 0.95
    """Discount per turn."""
    step_weight: NonNegative = 1.0
    """Weight of the turn's advantage, relative to the episode's."""


@step(StepWeight, reads=("group", "turns"))
def gigpo(batch: TokenBatch, options: StepWeight) -> TokenBatch:
    """Episode advantage + step_weight · step advantage: turns are compared where they met the same
    state. GiGPO.

    https://arxiv.org/abs/2505.10978. The episode's is that of `grpo` over the group's total
    rewards; the turn's is that of `grpo` over the discounted returns of all turns of the group with
    one anchor state (`state_BT`: what the policy was told right before the turn, without the
    history). A state that was met once adds 0. The paper's F_norm is the standard deviation or 1;
    here it is the standard deviation, at both levels, so it is biased as GRPO is.
    """
    if batch.state_BT is None:
        raise ValueError("gigpo: batch.state_BT is None: pack gives it")
    line = Timeline.of(batch)
    states_K = batch.state_BT[line.row_N, line.column_N][line.first_K]
    keys = list(zip(batch.group_E[line.episode_K].tolist(), states_K.tolist(), strict=True))
    of_turn_K = in_buckets(grpo, keys, _turn_returns(line, options.gamma).tolist())
    of_episode_E = in_buckets(grpo, batch.group_E.tolist(), total_reward_E(batch).tolist())
    advantages_K = of_episode_E[line.episode_K.cpu()] + options.step_weight * of_turn_K
    return replace(
        batch, advantages_BT=line.write(advantages_K.to(line.turn_N.device)[line.turn_N])
    )


# --- rewards before the advantages, and advantages afterwards ---


class RewardPrice(Options):
    kl_reward_coef: NonNegative = 0.0
    """Price of one nat of log(π/π_ref), in units of the reward."""


@step(RewardPrice, reads=("reference",))
def kl_in_reward(batch: TokenBatch, options: RewardPrice) -> TokenBatch:
    """Subtract kl_reward_coef · log(π/π_ref) (k1) from the reward of every trained token. Comes
    before the advantages.

    π is the policy that the update starts from. With `reward_to_go`, or any unbiased form at
    discount 1, the expected gradient is that of E[R] - kl_reward_coef·KL(π‖π_ref) over whole
    episodes, including the effect on later states. A group of equal outcomes then differs by its KL
    alone, which a form that divides by a standard deviation scales up to size 1: prefer one that
    does not.
    """
    if batch.ref_logprobs_BT is None:
        raise ValueError(
            "kl_in_reward: batch.ref_logprobs_BT is None: score the batch under a reference"
        )
    price_BT = options.kl_reward_coef * (batch.anchor_BT - batch.ref_logprobs_BT).double()
    earned_BT = torch.zeros_like(price_BT) if batch.rewards_BT is None else batch.rewards_BT
    return replace(batch, rewards_BT=torch.where(batch.mask_BT, earned_BT - price_BT, earned_BT))


class Overlong(Options):
    overlong_tokens: Count = 20480
    """Sampled tokens at which an episode pays 1."""
    overlong_cache: Count = 4096
    """Tokens before that over which the price rises."""

    @model_validator(mode="after")
    def _ordered(self) -> Overlong:
        if self.overlong_cache > self.overlong_tokens:
            raise SettingError(
                f"must be at most overlong_tokens={self.overlong_tokens}", "overlong_cache"
            )
        return self


@step(Overlong)
def overlong_punishment(batch: TokenBatch, options: Overlong) -> TokenBatch:
    """DAPO's soft overlong punishment: from overlong_tokens - overlong_cache sampled tokens on, an
    episode pays linearly more, up to 1 at overlong_tokens.

    https://arxiv.org/abs/2503.14476, eq. 13, with the numbers of the paper. It is a process reward
    on the episode's last trained token. Comes before the advantages.
    """
    line = Timeline.of(batch)
    free_tokens = options.overlong_tokens - options.overlong_cache
    over_E = (batch.tokens_E.double() - free_tokens) / options.overlong_cache
    price_N = torch.where(line.last_N, over_E.clamp(0, 1)[line.episode_N], 0.0)
    rewards_BT = torch.zeros(batch.mask_BT.shape, dtype=torch.float64, device=price_N.device)
    if batch.rewards_BT is not None:
        rewards_BT += batch.rewards_BT
    rewards_BT[line.row_N, line.column_N] -= price_N
    return replace(batch, rewards_BT=rewards_BT)


class EntropyShape(Options):
    entropy_alpha: NonNegative = 0.4
    """Bonus per nat of entropy."""
    entropy_kappa: AtLeastOne = 2.0
    """The bonus is at most |A| / kappa; at least 1, or it could turn a sign."""


@step(EntropyShape, reads=("entropy",), expects=("advantages",))
def entropy_shaped(batch: TokenBatch, options: EntropyShape) -> TokenBatch:
    """A + min(entropy_alpha · H, |A| / entropy_kappa), H the token's entropy (detached). Comes
    after the advantages.

    https://arxiv.org/abs/2506.14758. The bonus never turns a sign, and an advantage of 0 stays 0.
    Deliberately biased towards tokens of high entropy.
    """
    if batch.entropy_BT is None:
        raise ValueError("entropy_shaped: batch.entropy_BT is None: score the batch with entropy")
    bonus_BT = options.entropy_alpha * batch.entropy_BT.detach()
    bonus_BT = torch.minimum(bonus_BT, batch.advantages_BT.abs() / options.entropy_kappa)
    return replace(
        batch, advantages_BT=torch.where(batch.mask_BT, batch.advantages_BT + bonus_BT, 0.0)
    )


def _returns(line: Timeline, gamma: float) -> Tensor:
    """Discounted rewards from each token on."""
    return discounted(line.rewards_N, gamma * (~line.last_N).double())


def _turn_returns(line: Timeline, gamma: float) -> Tensor:
    """Discounted rewards from each turn on."""
    return discounted(line.rewards_K, gamma * (~line.last_K).double())


def _estimated(line: Timeline, advantages_N: Tensor, returns_N: Tensor) -> TokenBatch:
    return replace(
        line.batch, advantages_BT=line.write(advantages_N), returns_BT=line.write(returns_N)
    )


def _values(batch: TokenBatch, name: str) -> Tensor:
    if batch.values_BT is None:
        raise ValueError(f"{name}: batch.values_BT is None: score the batch with a critic")
    return batch.values_BT
