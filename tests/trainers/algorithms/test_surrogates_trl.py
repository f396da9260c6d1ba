"""Surrogates and aggregates against TRL's own code, on random masked batches.

Where they differ on purpose, a test shows how.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from surrogate_cases import (
    CONSTANT,
    ROWS,
    SEEDS,
    WIDTH,
    agree,
    in_two,
    ours,
    random_batch,
    value_and_gradient,
)
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOTrainer

from agentrl.trainers.algorithms.losses import by_episode, by_episode_sum, by_token, ppo_clip
from agentrl.trainers.algorithms.recipes import recipe
from agentrl.trainers.algorithms.surrogates import (
    cispo,
    gmpo,
    gspo,
    policy_gradient,
    ppo_dual_clip,
    sapo,
    vespo,
)


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


CLIP = {"clip_low": 0.2, "clip_high": 0.28}
SETTINGS = {
    "grpo": (trl("grpo"), "grpo", CLIP),
    "bnpo": (trl("bnpo"), "grpo", CLIP | {"aggregate": "token"}),
    "dapo": (trl("dapo"), "grpo", CLIP | {"aggregate": "token"}),
    "dr_grpo": (
        trl("dr_grpo"),
        "grpo",
        CLIP | {"aggregate": {"name": "constant", "norm_tokens": WIDTH}},
    ),
    "luspo": (trl("luspo", "sequence"), "luspo", CLIP),
    "grpo, sequence": (trl("grpo", "sequence"), "gspo", CLIP),
    "cispo": (trl("cispo", epsilon_high=5.0), "cispo", {"clip_high": 4.0}),
    "sapo": (trl("sapo", sapo_temperature_pos=0.7), "sapo", {"tau_pos": 0.7}),
    "vespo": (trl("vespo"), "vespo", {}),
    "delta": (trl("dapo", delta=1.5), "grpo", CLIP | {"aggregate": "token", "dual_clip": 1.5}),
}
"""Rows of docs/coming_from.md: TRL's loss, our recipe and our settings."""


@pytest.mark.parametrize("name", SETTINGS)
def test_the_settings_that_the_docs_name_give_trls_loss(name):
    theirs, chosen, settings = SETTINGS[name]
    row = recipe(chosen, **settings)
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


@pytest.mark.parametrize("name", ["bnpo", "grpo"])
def test_trls_micro_batches_of_bnpo_and_grpo_are_steps_of_their_own(name):
    """They divide by what the micro-batch holds: halves are averaged, not added, and tokens of bnpo
    weigh unequally.
    """
    theirs, surrogate, aggregate = TRL_CASES[name]
    batch, logprobs_BT = random_batch(1, spread=0.6)
    whole = theirs(batch, logprobs_BT).item()
    halves = [theirs(*part).item() for part in in_two(batch, logprobs_BT)]
    assert sum(halves) != pytest.approx(whole, abs=1e-3)
    assert (sum(halves) / 2 == pytest.approx(whole, abs=1e-9)) == (name == "grpo")
    mine = [ours(surrogate, aggregate)(*part).item() for part in in_two(batch, logprobs_BT)]
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
