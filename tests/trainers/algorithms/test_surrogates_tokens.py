"""Surrogates at single tokens: slopes, certain and impossible tokens, DPPO's divergences, what
clips cut.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from trainer_cases import Golden, one_episode

from agentrl.trainers.algorithms.losses import by_episode, gradient_is_cut, ppo_clip
from agentrl.trainers.algorithms.surrogates import (
    cispo,
    dppo_kl,
    dppo_topk_kl,
    dppo_topk_tv,
    dppo_tv,
    episode_mean,
    gmpo,
    gspo,
    sapo,
    topr_token,
)
from agentrl.trainers.batch import PolicyOutput


def test_sapos_slope_is_one_at_the_anchor_and_never_zero():
    ratios = [0.2, 0.7, 1.0, 1.6, 4.0]
    leaf_BT, output, batch = one_episode(np.log(ratios), [0.0] * 5, [1.0] * 5)
    sapo(output, batch).sum().backward()
    slope = -leaf_BT.grad[0].numpy() / ratios
    assert slope[2] == pytest.approx(1.0)
    assert slope.min() > 0
    assert slope[0] < slope[1] < slope[2] > slope[3] > slope[4]


@pytest.mark.parametrize("surrogate", [dppo_tv, dppo_kl])
def test_dppo_ignores_rare_tokens_that_ppo_cuts_and_cuts_likely_ones_that_ppo_keeps(surrogate):
    anchor, policy = [0.001, 0.95, 0.95, 0.95], [0.01, 0.77, 0.77, 0.95]
    advantages = [1.0, -1.0, 1.0, 1.0]
    leaf_BT, output, batch = one_episode(np.log(policy), np.log(anchor), advantages)
    cut = gradient_is_cut(PolicyOutput(leaf_BT.detach()), batch, surrogate)[0].tolist()
    assert cut == [False, True, False, False], "a token that the step brings back is kept"
    assert gradient_is_cut(PolicyOutput(leaf_BT.detach()), batch, ppo_clip)[0].tolist() == [
        True,
        False,
        False,
        False,
    ]
    assert surrogate(output, batch)[0, 0].item() == pytest.approx(-10 * math.log(0.01))


@pytest.mark.parametrize("surrogate", [dppo_tv, dppo_kl, topr_token, cispo])
def test_certain_and_impossible_tokens_stay_finite(surrogate):
    leaf_BT, output, batch = one_episode(
        [0.0, 0.0, -0.5, -300.0, 0.0], [0.0, -0.5, 0.0, -0.1, -300.0], [1.0] * 5
    )
    loss = surrogate(output, batch).sum()
    loss.backward()
    assert loss.isfinite()
    assert leaf_BT.grad.isfinite().all()


def _vocabulary_case(sizes, seed):
    """Anchor and policy over five tokens at 40 positions; the anchor's `size` likeliest tokens for
    each size.
    """
    generator = torch.Generator().manual_seed(seed)
    anchor_TV, shift_TV = torch.randn(2, 40, 5, generator=generator, dtype=torch.float64)
    anchor_TV, policy_TV = (
        (2 * anchor_TV).log_softmax(1),
        (2 * anchor_TV + 1.5 * shift_TV).log_softmax(1),
    )
    ids_T = torch.randint(0, 5, (40,), generator=generator)
    drawn = [logp_TV.gather(1, ids_T[:, None])[:, 0] for logp_TV in (policy_TV, anchor_TV)]
    advantages = torch.randn(40, generator=generator).tolist()
    _, output, batch = one_episode(drawn[0].tolist(), drawn[1].tolist(), advantages)
    for size in sizes:
        top_logprobs_TK, top_ids_TK = anchor_TV.topk(size)
        yield (
            replace(output, top_logprobs_BTK=policy_TV.gather(1, top_ids_TK)[None]),
            replace(
                batch,
                ids_BT=ids_T[None],
                top_ids_BTK=top_ids_TK[None],
                top_logprobs_BTK=top_logprobs_TK[None],
            ),
            anchor_TV.exp(),
            policy_TV.exp(),
        )


@pytest.mark.parametrize(
    ("surrogate", "binary", "bound"), [(dppo_topk_tv, dppo_tv, 0.1), (dppo_topk_kl, dppo_kl, 0.05)]
)
def test_top_k_lies_between_binary_and_the_whole_vocabulary(surrogate, binary, bound):
    cases = list(_vocabulary_case((1, 2, 3, 5), seed=5))
    cuts = [
        gradient_is_cut(one[0], one[1], partial(surrogate, divergence_max=bound))[0]
        for one in cases
    ]
    output, batch, anchor_TV, policy_TV = cases[-1]
    tv_T, kl_T = (
        (policy_TV - anchor_TV).abs().sum(1) / 2,
        (anchor_TV * (anchor_TV / policy_TV).log()).sum(1),
    )
    away_T = ((output.logprobs_BT - batch.anchor_BT) * batch.advantages_BT)[0] > 0
    far_T = (tv_T if binary is dppo_tv else kl_T) > bound
    assert torch.equal(cuts[-1], far_T & away_T), "all five tokens: the divergence itself"
    cuts.insert(0, gradient_is_cut(output, batch, partial(binary, divergence_max=bound))[0])
    for coarse, fine in pairwise(cuts):
        assert not (coarse & ~fine).any(), "more outcomes never hide a divergence"
    assert 0 < int(cuts[0].sum()) < int(cuts[-1].sum()) < 40


def test_top_k_says_what_it_lacks():
    output, batch, *_ = next(_vocabulary_case((2,), seed=0))
    assert dppo_topk_tv.reads == dppo_topk_kl.changed(ratio_max=3.0).reads == {"anchor_top"}
    for lacking in (
        (replace(output, top_logprobs_BTK=None), batch),
        (output, replace(batch, top_ids_BTK=None)),
    ):
        with pytest.raises(ValueError, match="score the anchor's likeliest tokens under both"):
            dppo_topk_tv(*lacking)


def test_gmpo_clips_by_the_sign_of_the_episode():
    """One token of the episode has an advantage of the other sign; the clip still never raises the
    objective.
    """
    _, output, batch = one_episode([0.0, 0.0], [-1.0, 1.0], [3.0, -1.0])
    flipped = replace(batch, advantages_BT=-batch.advantages_BT)
    losses = [by_episode(gmpo(output, one), one).item() for one in (batch, flipped)]
    assert losses == pytest.approx([-math.exp((0.4 - 1) / 2), math.exp((1 - 0.4) / 2)])


def test_sequence_clips_cut_whole_episodes():
    output, batch = PolicyOutput(Golden.logprobs), Golden.batch()
    assert gradient_is_cut(output, batch, gspo)[:, :2].tolist() == [[True, True], [False, False]]
    assert not gradient_is_cut(output, batch, partial(gspo, clip_high=0.2)).any()
    assert episode_mean(batch.advantages_BT, batch)[:, 0].tolist() == [1.0, -0.5]
