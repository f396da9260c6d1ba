"""Corrections, selections and KL terms against TRL's own code and verl's definitions, on random
masked batches.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from trainer_cases import logprobs_for, random_batch
from trl import GRPOTrainer

from agentrl.trainers.algorithms.corrections import (
    clip_cov,
    covariance,
    drop_off_policy_negatives,
    masked_is,
    select_kl_cov,
    train_high_entropy,
    truncated_is,
)
from agentrl.trainers.algorithms.losses import PolicyLoss, by_token, keep, ppo_clip
from agentrl.trainers.algorithms.regularisers import kl_penalty
from agentrl.trainers.batch import PolicyOutput


def peer_ratio(batch, level):
    """exp of o - q, of the token or of the sum over the row: the formula of TRL 1.16 and verl
    0.9.1.
    """
    gap_BT = (batch.proximal_logprobs_BT - batch.old_logprobs_BT) * batch.mask_BT
    return (gap_BT if level == "token" else gap_BT.sum(1, keepdim=True)).exp().expand_as(gap_BT)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("seed", range(3))
def test_trl_and_verl_importance_weights(level, seed):
    batch = random_batch(seed)
    there, ratio_BT = batch.mask_BT, peer_ratio(batch, level)
    cut = truncated_is(batch, tis_level=level, tis_low=0.4, tis_high=1.3).weights_BT
    assert torch.allclose(cut[there], ratio_BT.clamp(0.4, 1.3)[there], atol=1e-6)
    outside_BT = (ratio_BT < 0.4) | (ratio_BT > 1.3)
    assert outside_BT[there].any()
    kept = masked_is(batch, mis_level=level, mis_low=0.4, mis_high=1.3).weights_BT
    assert torch.allclose(kept[there], ratio_BT.masked_fill(outside_BT, 0.0)[there], atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_trl_off_policy_mask(seed):
    batch = random_batch(seed)
    kept_B1 = GRPOTrainer.get_off_policy_mask(
        advantages=batch.advantages_BT[:, :1],
        per_token_logps=batch.proximal_logprobs_BT,
        sampling_per_token_logps=batch.old_logprobs_BT,
        mask=batch.mask_BT.double(),
        off_policy_threshold=0.02,
    )
    found_BT = drop_off_policy_negatives(batch, off_policy_limit=0.02).weights_BT
    assert (kept_B1 == 0).any()
    assert torch.equal(found_BT[batch.mask_BT], kept_B1.expand_as(found_BT)[batch.mask_BT])


def test_trl_high_entropy_mask():
    """The same tokens on one process and one micro-batch, where the share is no tie of two quantile
    rules.
    """
    batch = random_batch(5)
    accelerator = SimpleNamespace(pad_across_processes=lambda x, **_: x, gather=lambda x: x)
    this = SimpleNamespace(accelerator=accelerator)
    trl_BT = GRPOTrainer.get_high_entropy_mask(this, batch.entropy_BT, batch.mask_BT, 1 - 0.25)
    found_BT = train_high_entropy(batch, entropy_share=0.25).weights_BT
    assert torch.equal(found_BT[batch.mask_BT] == 1, trl_BT[batch.mask_BT])


def trl_loss(batch, logprobs_BT, entropy_BT, ratio_BT, **settings):
    """TRL's dapo loss with all it has beside the surrogate, by its own method on a stand-in for its
    trainer.
    """
    accelerator = SimpleNamespace(
        num_processes=1,
        gather=lambda x: x,
        reduce=lambda x, **_: x,
        pad_across_processes=lambda x, **_: x,
    )
    stand_in = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs_BT, entropy_BT, None),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        args=SimpleNamespace(
            delta=None, use_bias_correction_kl=settings.pop("rho"), steps_per_generation=1
        ),
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
        loss_type="dapo",
        importance_sampling_level="token",
        epsilon_low=0.2,
        epsilon_high=0.2,
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled=False,
        **settings,
    )
    stand_in.get_high_entropy_mask = partial(GRPOTrainer.get_high_entropy_mask, stand_in)
    inputs = {
        "prompt_ids": batch.ids_BT[:, :1],
        "prompt_mask": torch.ones_like(batch.ids_BT[:, :1]),
        "completion_ids": batch.ids_BT,
        "completion_mask": batch.mask_BT.double(),
        "advantages": batch.advantages_BT[:, 0],
        "old_per_token_logps": batch.proximal_logprobs_BT,
        "sampling_per_token_logps": batch.old_logprobs_BT,
        "ref_per_token_logps": batch.ref_logprobs_BT,
        "importance_sampling_ratio": ratio_BT,
        "num_items_in_batch": torch.tensor(batch.n_tokens),
    }
    return GRPOTrainer._compute_loss(stand_in, None, inputs)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("rho", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_the_whole_of_trls_loss(seed, rho, level):
    """At the first optimizer step: entropy mask, off-policy mask, truncated weights and KL, by
    TRL's own code.
    """
    batch = random_batch(seed)
    batch = replace(batch, ref_logprobs_BT=logprobs_for(batch, seed=seed + 9, scale=0.3).detach())
    logprobs_BT = batch.proximal_logprobs_BT.clone().requires_grad_()
    ratio_BT = peer_ratio(batch, level).clamp(0.4, 1.3)
    settings = {
        "rho": rho,
        "beta": 0.1,
        "top_entropy_quantile": 0.25,
        "off_policy_mask_threshold": 0.02,
    }
    expected = trl_loss(batch, logprobs_BT, batch.entropy_BT, ratio_BT, **settings)
    steps = (
        partial(truncated_is, tis_level=level, tis_low=0.4, tis_high=1.3),
        partial(drop_off_policy_negatives, off_policy_limit=0.02),
        partial(train_high_entropy, entropy_share=0.25),
    )
    for step in steps:
        batch = step(batch)
    loss = PolicyLoss(ppo_clip, by_token, (partial(kl_penalty, kl_coef=0.1, kl_ratio=rho),))
    found, _ = loss(PolicyOutput(logprobs_BT), batch)
    assert float(found.detach()) == pytest.approx(float(expected.detach()), abs=1e-6)
    pairs = [torch.autograd.grad(value, logprobs_BT)[0] for value in (found, expected)]
    assert torch.allclose(pairs[0], keep(pairs[1], batch.mask_BT), atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_verl_covariances(seed):
    batch = random_batch(seed)
    mask_BT, count = batch.mask_BT, int(batch.mask_BT.sum())
    advantages_N, logprobs_N = batch.advantages_BT[mask_BT], batch.proximal_logprobs_BT[mask_BT]
    cov_N = (advantages_N - advantages_N.mean()) * (logprobs_N - logprobs_N.mean())
    assert torch.allclose(covariance(batch)[mask_BT], cov_N, atol=1e-12)
    share = 4 / count
    top = cov_N.topk(4).indices
    assert select_kl_cov(batch, kl_cov_share=share).selected_BT[mask_BT].nonzero()[
        :, 0
    ].tolist() == sorted(top.tolist())
    cut_N = clip_cov(batch, cov_share=share, cov_low=0.1, cov_high=1.0).weights_BT[mask_BT] == 0
    between_N = (cov_N > 0.1) & (cov_N < 1.0)
    assert int(cut_N.sum()) == min(4, int(between_N.sum()))
    assert between_N[cut_N].all()
