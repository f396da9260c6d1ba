"""Credit below the episode: batch -> batch steps that say how much better each token or turn was
than expected.

Time is the line of an episode's trained tokens in the order of its rows (`Timeline`), or of its
turns. Observations take no time: nothing decays through them, their values are never read, and a
reward that stands on
    one belongs to the
last trained token before it. The outcome stands on the episode's last trained token. A limit that
ended an episode is graded like any other ending, so nothing is bootstrapped behind it.

Steps run once per round, over all groups, on a batch whose rows stand in the order of `pack`.
Statistics are over episodes or turns, never over rows. An episode that infrastructure failed is not
in the batch at all.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.trainers.algorithms.advantages import grpo, in_buckets, total_reward_E
from agentrl.trainers.algorithms.corrections import policy_ratio
from agentrl.trainers.algorithms.parts import needs
from agentrl.trainers.algorithms.timeline import Timeline, discounted
from agentrl.trainers.batch import TokenBatch

# --- one value per token ---


@needs("turns")
def reward_to_go(batch: TokenBatch, *, gamma: float = 1.0) -> TokenBatch:
    """The discounted rewards from each trained token on. With `whiten` after it: REINFORCE++.

    https://arxiv.org/abs/2501.03262. Its baseline form is `group_advantages` with `dr_grpo`, then
    `whiten`. Without a baseline nothing is centred here: a group of one, or of equal rewards, has
    its reward as
        advantage.
    """
    line = Timeline.of(batch)
    return replace(batch, advantages_BT=line.write(_returns(line, _share("gamma", gamma))))


def whiten(batch: TokenBatch, *, eps: float = 1e-8) -> TokenBatch:
    """(A - mean) / (std + eps) over all trained tokens of the round, ddof=1; exactly 0 where all
    are equal.

    Long episodes weigh more in the mean. Own rewards are in mean and deviation, so it biases what
    was unbiased. A group without signal gets an advantage other than 0 from the others' mean, which
    says nothing about its actions (`filter_groups` leaves it out beforehand). (OpenRLHF divides by
    the deviation of ddof=0, verl by √(var + eps).)
    """
    values_N = batch.advantages_BT[batch.mask_BT].double()
    if len(values_N) == 0 or bool((values_N == values_N[0]).all()):
        return replace(batch, advantages_BT=torch.zeros_like(batch.advantages_BT))
    scaled_BT = (batch.advantages_BT.double() - values_N.mean()) / (
        values_N.std(correction=1) + eps
    )
    return replace(
        batch, advantages_BT=torch.where(batch.mask_BT, scaled_BT, 0.0).to(batch.advantages_BT)
    )


@needs("critic", "turns")
def gae(batch: TokenBatch, *, gamma: float = 1.0, lam: float = 0.95) -> TokenBatch:
    """Σ_k (gamma·lam)^k · (r + gamma·V' - V) from each trained token on: generalised advantage
    estimation. https://arxiv.org/abs/1506.02438.

    Fills advantages and the critic's returns A + V. With gamma = lam = 1 it is the return minus V:
    unbiased whatever V is. Below, it is biased as far as V is wrong. A group of one is as good as
    any.

    Raises:
        ValueError: the batch has no values, or a reward stands before an episode's first trained
            token.
        ConfigError: an option is above 1.
    """
    line = Timeline.of(batch)
    values_N = line.read(_values(batch, "gae"))
    decay = _share("gamma", gamma), _share("lam", lam)
    advantages_N = generalised_advantages(line.rewards_N, values_N, line.last_N, *decay)
    return _estimated(line, advantages_N, advantages_N + values_N)


@needs("critic", "turns")
def length_adaptive_gae(
    batch: TokenBatch, *, gamma: float = 1.0, length_alpha: float = 0.05, value_lam: float = 1.0
) -> TokenBatch:
    """GAE with λ = 1 - 1/(length_alpha · l) for an episode of l trained tokens, and a λ of its own
    for returns. VAPO.

    https://arxiv.org/abs/2504.05118. Where length_alpha · l is below 1 the formula is negative and
    λ is 0: up to 20 tokens, by default. Raises as `gae` does.
    """
    line = Timeline.of(batch)
    values_N = line.read(_values(batch, "length_adaptive_gae"))
    lam_E = (1 - 1 / (length_alpha * batch.tokens_E.double().clamp(min=1))).clamp(0, 1)
    steps = line.rewards_N, values_N, line.last_N, _share("gamma", gamma)
    advantages_N = generalised_advantages(*steps, lam_E[line.episode_N])
    return _estimated(
        line,
        advantages_N,
        generalised_advantages(*steps, _share("value_lam", value_lam)) + values_N,
    )


@needs("critic", "proximal", "turns")
def vtrace(
    batch: TokenBatch,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    rho_high: float = 1.0,
    trace_high: float = 1.0,
) -> TokenBatch:
    """V-trace: returns and advantages of the policy that the update starts from, on what an older
    one sampled. IMPALA, https://arxiv.org/abs/1802.01561, section 4.1.

    With w = π_proximal/π_old of the token, ρ = min(w, rho_high) and c = lam · min(w, trace_high):
    the return is v = V + Σ_k gamma^k · (Π_{i<k} c_i) · ρ_k · (r_k + gamma·V_{k+1} - V_k), and the
    advantage is ρ · (r + gamma·v' - V). On-policy it is `gae` with λ = 1, or, for returns alone,
    with `lam`. The advantage holds the weight of its token: no correction by `truncated_is` beside
    it.

    Raises:
        ValueError: the batch has no values or no proximal log-probabilities, or a reward stands
            before an episode's first trained token.
        ConfigError: gamma or lam is above 1, or trace_high above rho_high.
    """
    if trace_high > rho_high:
        raise ConfigError(
            f"trace_high={trace_high} must not be above rho_high={rho_high} (IMPALA, section 4.1)"
        )
    line = Timeline.of(batch)
    values_N = line.read(_values(batch, "vtrace"))
    ratio_N = line.read(policy_ratio(batch, "token"))
    rho_N, trace_N = ratio_N.clamp(max=rho_high), ratio_N.clamp(max=trace_high)
    going_N = _share("gamma", gamma) * (~line.last_N).double()
    errors_N = rho_N * (line.rewards_N + going_N * values_N.roll(-1) - values_N)
    returns_N = values_N + discounted(errors_N, going_N * _share("lam", lam) * trace_N)
    better_N = rho_N * (line.rewards_N + going_N * returns_N.roll(-1) - values_N)
    return _estimated(line, better_N, returns_N)


def generalised_advantages(
    rewards_S: Tensor, values_S: Tensor, last_S: Tensor, gamma: float, lam: float | Tensor
) -> Tensor:
    """Σ_k (γλ)^k · (r + γV' - V), over the steps of any number of episodes one after another
    (float64).

    Args:
        rewards_S: reward of each step.
        values_S: V of the state each step acts in.
        last_S: True on the last step of each episode, behind which V is 0.
        gamma: discount per step.
        lam: λ, one for all or one for each step.
    """
    going_S = (~last_S).double()
    errors_S = rewards_S + gamma * going_S * values_S.roll(-1) - values_S
    return discounted(errors_S, gamma * lam * going_S)


@needs("group", "turns")
def optimal_baseline(batch: TokenBatch) -> TokenBatch:
    """Reward-to-go minus the baseline of least variance at that token, over the *other* episodes of
    the group.

    b_t = Σ W_t·G_t / Σ W_t, where W_t is the squared norm of the score function up to token t: the
    optimal token baseline, https://arxiv.org/abs/2602.07078. Approximation: the square for one
    token is (1-π)², that of the chosen logit alone; the whole gradient in the logits, 1 - 2π + Σπ²,
    lies between that and twice that. Other episodes only (the paper takes all), so the baseline
    depends on no action of the episode itself and the estimator is unbiased.

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
        weight_GT, return_GT = energy_N[at_GT] + 1e-30, returns_N[at_GT]
        for own, (begin, length) in enumerate(
            zip(begin_E[members_G], tokens_E[members_G], strict=True)
        ):
            others = torch.arange(len(members_G), device=steps.device) != own
            weight, gained = (
                weight_GT[others, :length],
                return_GT[own, :length] - return_GT[others, :length],
            )
            advantages_N[begin : begin + length] = (weight * gained).sum(0) / weight.sum(0)
    return replace(batch, advantages_BT=line.write(advantages_N))


# --- one value per turn ---


@needs("critic", "turns")
def turn_gae(batch: TokenBatch, *, gamma: float = 1.0, lam: float = 0.95) -> TokenBatch:
    """GAE whose steps are turns: V is read at a turn's first token, before which the policy had
    said nothing of it.

    Every token of a turn carries the turn's advantage, and its return for the critic to learn.
    Raises as `gae` does.
    """
    line = Timeline.of(batch)
    values_K = line.read(_values(batch, "turn_gae"))[line.first_K]
    decay = _share("gamma", gamma), _share("lam", lam)
    advantages_K = generalised_advantages(line.rewards_K, values_K, line.last_K, *decay)
    return _estimated(line, advantages_K[line.turn_N], (advantages_K + values_K)[line.turn_N])


@needs("group", "turns")
def turn_level(batch: TokenBatch, *, gamma: float = 1.0) -> TokenBatch:
    """Each turn's discounted return, normalised over the turns of the same index in its group (as
    `grpo` does).

    Turn-level credit from per-turn rewards, after https://arxiv.org/abs/2505.11821. Turn t of an
    episode is compared with turn t of its siblings, whatever they met there; a turn that no sibling
    reached has an advantage of 0. Biased as GRPO is.
    """
    line = Timeline.of(batch)
    keys = list(zip(batch.group_E[line.episode_K].tolist(), line.position_K.tolist(), strict=True))
    advantages_K = in_buckets(grpo, keys, _turn_returns(line, gamma).tolist())
    return replace(
        batch, advantages_BT=line.write(advantages_K.to(line.turn_N.device)[line.turn_N])
    )


@needs("group", "turns")
def gigpo(batch: TokenBatch, *, gamma: float = 0.95, step_weight: float = 1.0) -> TokenBatch:
    """Episode advantage + step_weight · step advantage: turns are compared where they met the same
    state. GiGPO.

    https://arxiv.org/abs/2505.10978. The episode's is that of `grpo` over the group's total
    rewards; the turn's is that of `grpo` over the discounted returns of all turns of the group with
    one anchor state (`state_BT`: what the policy was told right before the turn, the history left
    out). A state that was met once adds 0. The paper's F_norm is the standard deviation or 1; here
    it is the standard deviation, at both levels, so it is biased as GRPO is.

    Raises:
        ValueError: the batch has no states.
    """
    if batch.state_BT is None:
        raise ValueError("gigpo: batch.state_BT is None: pack gives it")
    line = Timeline.of(batch)
    states_K = batch.state_BT[line.row_N, line.column_N][line.first_K]
    keys = list(zip(batch.group_E[line.episode_K].tolist(), states_K.tolist(), strict=True))
    of_turn_K = in_buckets(grpo, keys, _turn_returns(line, gamma).tolist())
    of_episode_E = in_buckets(grpo, batch.group_E.tolist(), total_reward_E(batch).tolist())
    advantages_K = of_episode_E[line.episode_K.cpu()] + step_weight * of_turn_K
    return replace(
        batch, advantages_BT=line.write(advantages_K.to(line.turn_N.device)[line.turn_N])
    )


# --- before and after ---


@needs("reference")
def kl_in_reward(batch: TokenBatch, *, kl_reward_coef: float = 0.0) -> TokenBatch:
    """Take kl_reward_coef · log(π/π_ref) (k1) off the reward of every trained token. Comes before
    the advantages.

    π is the policy that the update starts from. With `reward_to_go`, or any unbiased form at
    discount 1, the expected gradient is that of E[R] - kl_reward_coef·KL(π‖π_ref) over whole
    episodes, the effect on later states included. A group of equal outcomes then differs by its KL
    alone, and a form that divides by a standard deviation blows that up to size 1: prefer one that
    does not.

    Raises:
        ValueError: the batch has no reference log-probabilities.
    """
    if batch.ref_logprobs_BT is None:
        raise ValueError(
            "kl_in_reward: batch.ref_logprobs_BT is None: score the batch under a reference"
        )
    price_BT = kl_reward_coef * (batch.anchor_BT - batch.ref_logprobs_BT).double()
    earned_BT = torch.zeros_like(price_BT) if batch.rewards_BT is None else batch.rewards_BT
    return replace(batch, rewards_BT=torch.where(batch.mask_BT, earned_BT - price_BT, earned_BT))


def overlong_punishment(
    batch: TokenBatch, *, overlong_tokens: int = 20480, overlong_cache: int = 4096
) -> TokenBatch:
    """DAPO's soft overlong punishment: from overlong_tokens - overlong_cache sampled tokens on, an
    episode pays in a straight line, up to 1 at overlong_tokens and beyond.

    https://arxiv.org/abs/2503.14476, eq. 13, with the numbers of the paper. It is a process reward
    on the episode's last trained token. Comes before the advantages.

    Raises:
        ConfigError: the cache is larger than the whole.
    """
    if overlong_cache > overlong_tokens:
        raise ConfigError(
            f"overlong_cache={overlong_cache} must not be above overlong_tokens={overlong_tokens}"
        )
    line = Timeline.of(batch)
    over_E = (batch.tokens_E.double() - (overlong_tokens - overlong_cache)) / overlong_cache
    price_N = torch.where(line.last_N, over_E.clamp(0, 1)[line.episode_N], 0.0)
    rewards_BT = torch.zeros(batch.mask_BT.shape, dtype=torch.float64, device=price_N.device)
    if batch.rewards_BT is not None:
        rewards_BT += batch.rewards_BT
    rewards_BT[line.row_N, line.column_N] -= price_N
    return replace(batch, rewards_BT=rewards_BT)


@needs("entropy")
def entropy_shaped(
    batch: TokenBatch, *, entropy_alpha: float = 0.4, entropy_kappa: float = 2.0
) -> TokenBatch:
    """A + min(entropy_alpha · H, |A| / entropy_kappa), H the token's entropy (detached). Comes
    after the advantages.

    https://arxiv.org/abs/2506.14758. The bonus never turns a sign, and an advantage of 0 stays 0.
    Biased towards tokens of high entropy, and meant to be.

    Raises:
        ValueError: the batch has no entropy.
        ConfigError: entropy_kappa is below 1, so that the bonus could turn a sign.
    """
    if batch.entropy_BT is None:
        raise ValueError("entropy_shaped: batch.entropy_BT is None: score the batch with entropy")
    if entropy_kappa < 1:
        raise ConfigError(
            f"entropy_kappa={entropy_kappa} must be at least 1, or the bonus could turn a sign"
        )
    bonus_BT = torch.minimum(
        entropy_alpha * batch.entropy_BT.detach(), batch.advantages_BT.abs() / entropy_kappa
    )
    return replace(
        batch, advantages_BT=torch.where(batch.mask_BT, batch.advantages_BT + bonus_BT, 0.0)
    )


def _returns(line: Timeline, gamma: float) -> Tensor:
    """Discounted rewards from each token on."""
    return discounted(line.rewards_N, gamma * (~line.last_N).double())


def _turn_returns(line: Timeline, gamma: float) -> Tensor:
    """Discounted rewards from each turn on."""
    return discounted(line.rewards_K, _share("gamma", gamma) * (~line.last_K).double())


def _estimated(line: Timeline, advantages_N: Tensor, returns_N: Tensor) -> TokenBatch:
    return replace(
        line.batch, advantages_BT=line.write(advantages_N), returns_BT=line.write(returns_N)
    )


def _values(batch: TokenBatch, step: str) -> Tensor:
    if batch.values_BT is None:
        raise ValueError(f"{step}: batch.values_BT is None: score the batch with a critic")
    return batch.values_BT


def _share(name: str, value: float) -> float:
    """The value, if it is from 0 to 1."""
    if not 0 <= value <= 1:
        raise ConfigError(f"{name}={value} must be from 0 to 1")
    return value
