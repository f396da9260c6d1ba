"""Surrogates and aggregates against TRL's own code and verl's definitions, on random masked
batches.

Where they differ, a test shows how: each of these is a line of the list in docs/trainers.md.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from trainer_cases import Golden
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.gmpo import GMPOTrainer

from agentrl.trainers.algorithms.losses import (
    PolicyLoss,
    by_constant,
    by_episode,
    by_episode_sum,
    by_token,
    keep,
    ppo_clip,
)
from agentrl.trainers.algorithms.recipes import recipe
from agentrl.trainers.algorithms.sequence_surrogates import gmpo, gspo, gspo_token, vespo
from agentrl.trainers.algorithms.surrogates import (
    cispo,
    dppo_kl,
    dppo_tv,
    policy_gradient,
    ppo_dual_clip,
    sapo,
)
from agentrl.trainers.batch import PolicyOutput
from agentrl.trainers.from_trl.translate import translate

ROWS, WIDTH = 6, 9
SEEDS = pytest.mark.parametrize("seed", range(5))


def random_batch(seed, advantage="token", spread=0.3):
    """One row per episode, tool output inside, padding behind; old logprobs in [-3, -0.1]."""
    generator = torch.Generator().manual_seed(seed)
    lengths_B = torch.randint(1, WIDTH + 1, (ROWS,), generator=generator)
    inside_BT = torch.arange(WIDTH) < lengths_B[:, None]
    mask_BT = inside_BT & (torch.rand(ROWS, WIDTH, generator=generator) < 0.7)
    mask_BT[:, 0] = True
    old_BT = -0.1 - 2.9 * torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    moved_BT = spread * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    advantages_BT = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    batch = replace(
        Golden.batch(),
        ids_BT=torch.ones(ROWS, WIDTH, dtype=torch.int64),
        mask_BT=mask_BT,
        attention_BT=inside_BT,
        old_logprobs_BT=old_BT,
        advantages_BT=(
            advantages_BT if advantage == "token" else advantages_BT[:, :1].expand(ROWS, WIDTH)
        ),
        turn_BT=torch.zeros(ROWS, WIDTH, dtype=torch.int32),
        version_BT=torch.zeros(ROWS, WIDTH, dtype=torch.int32),
        episode_B=torch.arange(ROWS),
        tokens_E=mask_BT.sum(1),
        n_tokens=int(mask_BT.sum()),
        n_episodes=ROWS,
        ref_logprobs_BT=None,
    )
    return batch, (old_BT + moved_BT).clamp(max=-0.01).requires_grad_()


def ours(surrogate, aggregate):
    loss = PolicyLoss(surrogate, aggregate)
    return lambda batch, logprobs_BT: loss(PolicyOutput(logprobs_BT), batch)[0]


def value_and_gradient(loss, batch, logprobs_BT):
    value = loss(batch, logprobs_BT)
    return value.detach(), keep(torch.autograd.grad(value, logprobs_BT)[0], batch.mask_BT)


def agree(first, second, batch, logprobs_BT):
    found, expected = (value_and_gradient(one, batch, logprobs_BT) for one in (first, second))
    return all(
        torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(found, expected, strict=True)
    )


# --- TRL


def trl(loss_type, level="token", trainer=GRPOTrainer, **changes):
    """TRL's loss on our batch: its own method, on a stand-in for the trainer that hands it our
    log-probabilities.
    """

    def loss(batch, logprobs_BT):
        scored = (logprobs_BT, torch.zeros_like(logprobs_BT), None)
        settings = {"epsilon_low": 0.2, "epsilon_high": 0.28, "delta": None} | changes
        options = {
            "sapo_temperature_pos": settings.pop("sapo_temperature_pos", 1.0),
            "sapo_temperature_neg": 1.05,
            "steps_per_generation": 1,
        }
        options |= {
            "vespo_k_pos": 2.0,
            "vespo_lambda_pos": 3.0,
            "vespo_k_neg": 3.0,
            "vespo_lambda_neg": 2.0,
        }
        self = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, **__: scored,
            get_gamma_weights=GRPOTrainer.get_gamma_weights,
            args=SimpleNamespace(
                delta=settings.pop("delta"), use_bias_correction_kl=True, **options
            ),
            accelerator=SimpleNamespace(
                num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x
            ),
            model=SimpleNamespace(training=True),
            _metrics=defaultdict(lambda: defaultdict(list)),
            loss_type=loss_type,
            importance_sampling_level=level,
            max_completion_length=WIDTH,
            beta=0.0,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            current_gradient_accumulation_steps=1,
            aux_loss_enabled=False,
            use_vllm=False,
            _entropy_bonus_enabled=False,
            **settings,
        )
        inputs = {
            "prompt_ids": batch.ids_BT[:, :1],
            "prompt_mask": torch.ones_like(batch.ids_BT[:, :1]),
            "completion_ids": batch.ids_BT,
            "completion_mask": batch.attention_BT.long(),
            "tool_mask": batch.mask_BT.long(),
            "advantages": (
                batch.advantages_BT[:, 0] if trainer is GMPOTrainer else batch.advantages_BT
            ),
            "old_per_token_logps": batch.old_logprobs_BT,
            "num_items_in_batch": torch.tensor(float(batch.n_tokens)),
        }
        return trainer._compute_loss(self, None, inputs)

    return loss


HIGHER = partial(ppo_clip, clip_high=0.28)
SEQUENCE = partial(gspo, clip_low=0.2, clip_high=0.28)
CONSTANT = partial(by_constant, norm_tokens=WIDTH)
TRL_CASES = {
    "grpo": (trl("grpo"), HIGHER, by_episode),
    "bnpo": (trl("bnpo"), HIGHER, by_token),
    "dr_grpo": (trl("dr_grpo"), HIGHER, CONSTANT),
    "dapo": (trl("dapo"), HIGHER, by_token),
    "grpo, sequence": (trl("grpo", "sequence"), SEQUENCE, by_episode),
    "dapo, sequence": (trl("dapo", "sequence"), SEQUENCE, by_token),
    "luspo": (trl("luspo", "sequence"), SEQUENCE, by_episode_sum),
    "delta": (
        trl("dapo", delta=1.5),
        partial(ppo_dual_clip, clip_high=0.28, dual_clip=1.5),
        by_token,
    ),
    "cispo": (trl("cispo", epsilon_high=5.0), cispo, by_token),
    "cispo, narrow": (trl("cispo", epsilon_high=1.2), partial(cispo, clip_high=0.2), by_token),
    "sapo": (trl("sapo"), sapo, by_episode),
    "vespo": (trl("vespo"), vespo, by_token),
}


@SEEDS
@pytest.mark.parametrize("name", TRL_CASES)
def test_trl_says_the_same(name, seed):
    theirs, surrogate, aggregate = TRL_CASES[name]
    assert agree(theirs, ours(surrogate, aggregate), *random_batch(seed, spread=0.6))


@SEEDS
def test_trls_gmpo_says_the_same(seed):
    theirs = trl("grpo", trainer=GMPOTrainer, epsilon_low=0.4, epsilon_high=0.4)
    assert agree(theirs, ours(gmpo, by_episode), *random_batch(seed, "episode", spread=0.6))


TRANSLATED = {
    **{kind: (kind, "token", {}) for kind in ("grpo", "bnpo", "dapo", "dr_grpo", "sapo", "vespo")},
    **{f"{kind}, sequence": (kind, "sequence", {}) for kind in ("grpo", "dapo", "luspo")},
    "cispo": ("cispo", "token", {"epsilon_high": 5.0}),
    "delta": ("dapo", "token", {"delta": 1.5}),
    "temperatures": ("sapo", "token", {"sapo_temperature_pos": 0.7}),
}


@pytest.mark.parametrize("name", TRANSLATED)
def test_a_translated_config_has_trls_loss(name):
    kind, level, changes = TRANSLATED[name]
    config = {"epsilon": 0.2, "epsilon_high": 0.28, "loss_type": kind} | changes
    config |= {"importance_sampling_level": level, "max_completion_length": WIDTH}
    found = translate(GRPOConfig(output_dir="x", use_cpu=True, bf16=False, **config).to_dict(), "x")
    row = recipe(found.settings["recipe"], **found.settings["loss"])
    theirs = trl(kind, level, **changes)
    assert agree(theirs, ours(row.surrogate, row.aggregate), *random_batch(1, spread=0.6))


def test_trls_cispo_bound_is_epsilon_high_itself():
    """With a bound that reads like PPO's, every token on-policy is scaled by it."""
    batch, _ = random_batch(0)
    logprobs_BT = batch.old_logprobs_BT.clone().requires_grad_()
    theirs = value_and_gradient(trl("cispo"), batch, logprobs_BT)[1]
    plain = value_and_gradient(ours(policy_gradient, by_token), batch, logprobs_BT)[1]
    assert torch.allclose(theirs, 0.28 * plain)
    assert torch.allclose(value_and_gradient(ours(cispo, by_token), batch, logprobs_BT)[1], plain)


def test_trls_delta_below_the_clip_trades_the_bounds():
    """Good tokens are clipped at delta, and bad ones bounded by 1 + epsilon_high."""
    batch, logprobs_BT = random_batch(0, spread=0.6)
    traded = partial(ppo_dual_clip, clip_high=0.1, dual_clip=1.28)
    assert agree(trl("dapo", delta=1.1), ours(traded, by_token), batch, logprobs_BT)
    meant = partial(ppo_dual_clip, clip_high=0.28, dual_clip=1.1)
    assert not agree(trl("dapo", delta=1.1), ours(meant, by_token), batch, logprobs_BT)


def test_trls_ratio_has_no_bound():
    batch, _ = random_batch(0)
    batch = replace(
        batch,
        advantages_BT=-torch.ones_like(batch.advantages_BT),
        old_logprobs_BT=batch.mask_BT * -30.0,
    )
    logprobs_BT = torch.full_like(batch.advantages_BT, -5.0).requires_grad_()
    found = [loss(batch, logprobs_BT).item() for loss in (trl("dapo"), ours(HIGHER, by_token))]
    assert torch.tensor(found).log().tolist() == pytest.approx([25.0, 20.0], abs=1e-5)


def _in_two(batch, logprobs_BT):
    """The first half of the episodes and the second, with the denominators of the whole."""
    for rows in (torch.arange(3), torch.arange(3, ROWS)):
        part = batch.rows(rows)
        yield part, logprobs_BT[rows, : part.ids_BT.shape[1]]


@pytest.mark.parametrize("name", ["bnpo", "grpo"])
def test_trls_micro_batches_of_bnpo_and_grpo_are_steps_of_their_own(name):
    """They divide by what the micro-batch holds: halves are averaged, not added, and tokens of bnpo
    weigh unequally.
    """
    theirs, surrogate, aggregate = TRL_CASES[name]
    batch, logprobs_BT = random_batch(1, spread=0.6)
    whole = theirs(batch, logprobs_BT).item()
    halves = [theirs(*part).item() for part in _in_two(batch, logprobs_BT)]
    assert sum(halves) != pytest.approx(whole, abs=1e-3)
    assert (sum(halves) / 2 == pytest.approx(whole, abs=1e-9)) == (name == "grpo")
    mine = [ours(surrogate, aggregate)(*part).item() for part in _in_two(batch, logprobs_BT)]
    assert sum(mine) == pytest.approx(whole, abs=1e-9)


def _as_two_rows(batch, logprobs_BT):
    """The longest episode cut into two rows, each with a part of its tokens."""
    longest = int(batch.tokens_E.argmax())
    order = torch.tensor([*range(ROWS), longest])
    two = batch.rows(order)
    late_T = batch.mask_BT[longest] & (batch.mask_BT[longest].cumsum(0) > 2)
    mask_BT = two.mask_BT.clone()
    mask_BT[longest], mask_BT[-1] = mask_BT[longest] & ~late_T, late_T
    return replace(two, mask_BT=mask_BT), logprobs_BT[order]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "grpo, sequence", "luspo", "sapo"])
def test_trl_counts_rows_where_we_count_episodes(name):
    theirs, surrogate, aggregate = TRL_CASES[name]
    batch, logprobs_BT = random_batch(2, spread=0.6)
    whole = theirs(batch, logprobs_BT).item()
    two = _as_two_rows(batch, logprobs_BT)
    assert ours(surrogate, aggregate)(*two).item() == pytest.approx(whole, abs=1e-6)
    assert theirs(*two).item() != pytest.approx(whole, abs=1e-4)


# --- verl


def verl_aggregate(mode, values_BT, mask_BT, tokens=None, rows=None, scale=None):
    """Its modes; `tokens` and `rows` are those of the step where it has been told them."""
    kept_BT = torch.where(mask_BT, values_BT, 0.0)
    if mode == "token-mean":
        return kept_BT.sum() / (tokens or mask_BT.sum())
    rows = rows or mask_BT.any(1).sum()
    if mode == "seq-mean-token-mean":
        return (kept_BT.sum(1) / (mask_BT.sum(1) + 1e-8)).sum() / rows
    total = kept_BT.sum() / rows
    return total if mode == "seq-mean-token-sum" else total / (scale or mask_BT.shape[1])


def _ratio(l_BT, o_BT):
    return (l_BT - o_BT).clamp(-20, 20).exp()


def _clip_loss(ratio, advantage, low, high):
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))


def verl_vanilla(l_BT, o_BT, a_BT, _, low=0.2, high=0.2, c=3.0):
    loss_BT = _clip_loss(_ratio(l_BT, o_BT), a_BT, low, high)
    return torch.where(a_BT < 0, torch.minimum(loss_BT, -a_BT * c), loss_BT)


def verl_dppo_tv(l_BT, o_BT, a_BT, _, bound=0.15, c=20.0):
    gap_BT = l_BT.detach().exp() - o_BT.exp()
    kept_BT = torch.where(a_BT > 0, gap_BT <= bound, gap_BT >= -bound)
    return -a_BT * _ratio(l_BT, o_BT).clamp(max=c).detach() * l_BT * kept_BT


def verl_dppo_kl(l_BT, o_BT, a_BT, _, bound=0.05, c=20.0):
    p_BT, q_BT = l_BT.detach().exp(), o_BT.exp()
    kl_BT = q_BT * (q_BT / p_BT).log() + (1 - q_BT) * ((1 - q_BT) / (1 - p_BT)).log()
    back_BT = torch.where(a_BT > 0, p_BT <= q_BT, p_BT >= q_BT)
    return -a_BT * _ratio(l_BT, o_BT).clamp(max=c).detach() * l_BT * ((kl_BT <= bound) | back_BT)


def _row_mean(values_BT, mask_BT):
    return torch.where(mask_BT, values_BT, 0.0).sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True)


def verl_gspo(l_BT, o_BT, a_BT, mask_BT):
    log_s_BT = l_BT - l_BT.detach() + _row_mean(l_BT - o_BT, mask_BT).detach()
    return _clip_loss(log_s_BT.clamp(max=10).exp(), a_BT, 3e-4, 4e-4)


def verl_sapo(l_BT, o_BT, a_BT, _):
    tau_BT = torch.full_like(a_BT, 1.05).masked_fill(a_BT > 0, 1.0)
    return -a_BT * torch.sigmoid(tau_BT * (_ratio(l_BT, o_BT) - 1)) * 4 / tau_BT


def verl_cispo(l_BT, o_BT, a_BT, _):
    return -_ratio(l_BT, o_BT).clamp(0.8, 1.2).detach() * a_BT * l_BT


def verl_geo_mean(l_BT, o_BT, a_BT, mask_BT, low=0.4, high=0.4):
    gap_BT, sign_BT = l_BT - o_BT, a_BT.sign()
    gap_BT = sign_BT * torch.minimum(sign_BT * gap_BT, sign_BT * gap_BT.clamp(-low, high))
    return (-_row_mean(a_BT, mask_BT) * _row_mean(gap_BT, mask_BT).exp()).mean()


def verl(per_token, mode, **told):
    return lambda batch, l_BT: verl_aggregate(
        mode,
        per_token(l_BT, batch.old_logprobs_BT, batch.advantages_BT, batch.mask_BT),
        batch.mask_BT,
        **told,
    )


def verl_gmpo(batch, l_BT):
    return verl_geo_mean(l_BT, batch.old_logprobs_BT, batch.advantages_BT, batch.mask_BT)


VERL_CASES = {
    "vanilla": (verl_vanilla, ppo_dual_clip),
    "dppo_tv": (verl_dppo_tv, dppo_tv),
    "dppo_kl": (verl_dppo_kl, dppo_kl),
    "gspo": (verl_gspo, gspo_token),
    "sapo": (verl_sapo, sapo),
    "gpg": (lambda l_BT, _, a_BT, __: -l_BT * a_BT, policy_gradient),
    "cispo": (verl_cispo, partial(cispo, clip_low=0.2, clip_high=0.2)),
}
VERL_MODES = {
    "token-mean": by_token,
    "seq-mean-token-mean": by_episode,
    "seq-mean-token-sum": by_episode_sum,
    "seq-mean-token-sum-norm": CONSTANT,
}


@SEEDS
@pytest.mark.parametrize("mode", VERL_MODES)
@pytest.mark.parametrize("name", VERL_CASES)
def test_verl_says_the_same(name, mode, seed):
    per_token, surrogate = VERL_CASES[name]
    assert agree(
        verl(per_token, mode), ours(surrogate, VERL_MODES[mode]), *random_batch(seed, spread=0.6)
    )


@SEEDS
def test_verls_geometric_mean_says_the_same_for_one_advantage_per_episode(seed):
    batch, logprobs_BT = random_batch(seed, "episode", spread=0.6)
    assert agree(verl_gmpo, ours(gmpo, by_episode), batch, logprobs_BT)


def test_verls_geometric_mean_clips_by_the_sign_of_each_token():
    assert not agree(verl_gmpo, ours(gmpo, by_episode), *random_batch(0, "token", spread=0.6))


def test_verls_geometric_mean_knows_only_its_micro_batch():
    batch, logprobs_BT = random_batch(3, "episode", spread=0.6)
    whole = verl_gmpo(batch, logprobs_BT).item()
    assert sum(verl_gmpo(*part).item() for part in _in_two(batch, logprobs_BT)) != pytest.approx(
        whole, abs=1e-3
    )
    mine = sum(ours(gmpo, by_episode)(*part).item() for part in _in_two(batch, logprobs_BT))
    assert mine == pytest.approx(whole, abs=1e-9)


def test_verls_modes_add_up_only_when_they_are_told_the_step():
    batch, logprobs_BT = random_batch(3, spread=0.6)
    for mode, aggregate in VERL_MODES.items():
        told = {"tokens": batch.n_tokens, "rows": batch.n_episodes, "scale": WIDTH}
        whole = ours(ppo_dual_clip, aggregate)(batch, logprobs_BT).item()
        for sizes, right in ((told, True), ({}, False)):
            parts = [
                verl(verl_vanilla, mode, **sizes)(*part).item()
                for part in _in_two(batch, logprobs_BT)
            ]
            assert (sum(parts) == pytest.approx(whole, abs=1e-6)) == right


def test_verls_constant_is_the_padded_width_unless_it_is_set():
    batch, logprobs_BT = random_batch(3, spread=0.6)
    wide = {
        name: torch.nn.functional.pad(getattr(batch, name), (0, 4))
        for name in ("ids_BT", "mask_BT", "attention_BT", "old_logprobs_BT", "advantages_BT")
    }
    padded = replace(batch, **wide), torch.nn.functional.pad(logprobs_BT, (0, 4))
    for loss, same in (
        (ours(ppo_dual_clip, CONSTANT), True),
        (verl(verl_vanilla, "seq-mean-token-sum-norm"), False),
    ):
        assert (
            loss(*padded).item() == pytest.approx(loss(batch, logprobs_BT).item(), abs=1e-9)
        ) == same


def test_verls_defaults_are_other_bounds():
    """DPPO's truncation is 3 there unless it is set, CISPO's band PPO's; papers and their followers
    take 20 and 5.
    """
    batch, logprobs_BT = random_batch(4, spread=1.5)
    for theirs, surrogate in ((partial(verl_dppo_tv, c=3.0), dppo_tv), (verl_cispo, cispo)):
        assert not agree(verl(theirs, "token-mean"), ours(surrogate, by_token), batch, logprobs_BT)
    mine = ours(partial(dppo_tv, ratio_max=3.0), by_token)
    assert agree(verl(partial(verl_dppo_tv, c=3.0), "token-mean"), mine, batch, logprobs_BT)


def test_verls_gspo_is_the_token_form():
    """One advantage per episode: the same gradient as the sequence form. One per token: another."""
    for advantage, same in (("episode", True), ("token", False)):
        batch, logprobs_BT = random_batch(4, advantage, spread=0.0)
        logprobs_BT = (batch.old_logprobs_BT + 1e-4).requires_grad_()
        assert (
            agree(
                ours(gspo, by_episode), verl(verl_gspo, "seq-mean-token-mean"), batch, logprobs_BT
            )
            == same
        )
