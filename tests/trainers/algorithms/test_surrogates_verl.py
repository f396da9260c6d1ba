"""Surrogates and aggregates against verl's definitions, on random masked batches.

Where they differ on purpose, a test shows how.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from surrogate_cases import CONSTANT, SEEDS, WIDTH, agree, in_two, ours, random_batch

from agentrl.trainers.algorithms.losses import by_episode, by_episode_sum, by_token
from agentrl.trainers.algorithms.surrogates import (
    cispo,
    dppo_kl,
    dppo_tv,
    gmpo,
    gspo,
    gspo_token,
    policy_gradient,
    ppo_dual_clip,
    sapo,
)


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
    assert sum(verl_gmpo(*part).item() for part in in_two(batch, logprobs_BT)) != pytest.approx(
        whole, abs=1e-3
    )
    mine = sum(ours(gmpo, by_episode)(*part).item() for part in in_two(batch, logprobs_BT))
    assert mine == pytest.approx(whole, abs=1e-9)


def test_verls_modes_add_up_only_when_they_are_told_the_step():
    batch, logprobs_BT = random_batch(3, spread=0.6)
    for mode, aggregate in VERL_MODES.items():
        told = {"tokens": batch.n_tokens, "rows": batch.n_episodes, "scale": WIDTH}
        whole = ours(ppo_dual_clip, aggregate)(batch, logprobs_BT).item()
        for sizes, right in ((told, True), ({}, False)):
            parts = [
                verl(verl_vanilla, mode, **sizes)(*part).item()
                for part in in_two(batch, logprobs_BT)
            ]
            assert (sum(parts) == pytest.approx(whole, abs=1e-6)) == right


def test_verls_constant_is_the_padded_width_unless_it_is_set():
    batch, logprobs_BT = random_batch(3, spread=0.6)
    wide = {
        name: torch.nn.functional.pad(getattr(batch, name), (0, 4))
        for name in (
            *("ids_BT", "mask_BT", "attention_BT"),
            *("version_BT", "old_logprobs_BT", "advantages_BT"),
        )
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
