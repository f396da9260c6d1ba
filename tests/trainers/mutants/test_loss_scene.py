"""The scene on which losses are judged reaches what it is meant to reach."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from loss_scene import BAND, SHAPES, SURROGATES, assert_same, judged, rows_of, scene, shaped
from trainer_cases import batch_of

from agentrl.trainers.algorithms.losses import PolicyLoss, by_episode, by_token
from agentrl.trainers.algorithms.surrogates import (
    cispo,
    gmpo,
    gspo,
    importance_weighted,
    policy_gradient,
    sapo,
    topr,
    topr_token,
    vespo,
)


def test_the_scene_clips_something_everywhere():
    """A check that never meets a clipped token would prove little."""
    batch, output = scene(shaped(*SHAPES)[1])
    soft = (policy_gradient, importance_weighted, sapo, topr_token, topr, vespo, cispo)
    for surrogate in SURROGATES:
        metrics = PolicyLoss(surrogate, by_token)(output, batch)[1]
        hard = getattr(surrogate, "func", surrogate) not in soft
        assert (metrics["clip_low"] + metrics["clip_high"] > 0) == hard, surrogate


def test_an_episode_keeps_the_rows_that_its_ratio_needs():
    """Rows without an advantage of their own still belong to their episode's sequence ratio."""
    batch, output = scene(shaped(*SHAPES)[1])
    quiet = replace(batch, advantages_BT=batch.advantages_BT.clone())
    quiet.advantages_BT[1] = quiet.advantages_BT[3] = 0.0
    few = quiet.informative()
    assert few.episode_B.tolist() == [0, 0, 1, 3]
    for surrogate in (partial(gspo, **BAND), gmpo, topr, vespo):
        loss = PolicyLoss(surrogate, by_episode)
        whole = judged(loss, quiet, output)
        kept = rows_of(output, [0, 1, 2, 4], few.ids_BT.shape[1])
        assert_same(whole, judged(loss, few, kept, output.logprobs_BT), (quiet, quiet))


def test_batches_carry_top_tokens_through_micro_batches():
    batch, _ = scene(shaped(*SHAPES)[0])
    assert batch_of(shaped(*SHAPES)[0]).top_ids_BTK is None
    for part in batch.split(20):
        assert part.top_ids_BTK.shape == part.top_logprobs_BTK.shape == (*part.ids_BT.shape, 2)
        assert (part.silent().top_logprobs_BTK[~part.mask_BT] == 0).all()
