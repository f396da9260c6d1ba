"""Gaps between sampler and trainer by hand: means, ratios, effective sample size, thresholds, and
wrong copies of each.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from trainer_cases import batch_of, group, logprobs_for, tiny_model

from agentrl.engines.base import Sampling
from agentrl.errors import ConfigError
from agentrl.trainers.batch import PolicyOutput
from agentrl.trainers.models.loading import in_bfloat16
from agentrl.trainers.observe import parity
from agentrl.trainers.observe.parity import Tokens


def tokens(trainer, sampler, anchor=None, weights=None):
    columns = (trainer, sampler, anchor or sampler, weights or [1.0] * len(trainer))
    return Tokens(*(torch.tensor(column, dtype=torch.float64) for column in columns))


def test_gaps_by_hand():
    part = tokens([-1.0, -0.5, -2.0], [-1.5, -0.5, -1.0])
    metrics = parity.gap_metrics([part])
    assert metrics["parity/gap_mean"] == pytest.approx(0.5)
    assert metrics["parity/gap_max"] == metrics["parity/gap_p99"] == pytest.approx(1.0)
    # (e^.5 - 1 - .5 + 0 + e^-1 - 1 + 1) / 3
    assert metrics["parity/kl"] == pytest.approx((0.1487212707 + 0.3678794412) / 3)
    assert parity.gap_metrics([]) == parity.gap_metrics([tokens([], [])]) == {}


def test_ratios_before_and_after_correction_by_hand():
    part = tokens([0.0, -1.0], [-1.0, -1.0], anchor=[-0.5, -1.0], weights=[0.5, 1.0])
    metrics = parity.ratio_metrics([part])
    assert metrics["ratio/raw_p99"] == pytest.approx(2.7182818285)
    assert metrics["ratio/corrected_p99"] == pytest.approx(1.0)
    assert metrics["ratio/corrected_p01"] == pytest.approx(0.5 * 1.6487212707)
    assert metrics["ratio/raw_effective"] == pytest.approx(
        3.7182818285**2 / (2 * (2.7182818285**2 + 1))
    )


def test_the_effective_sample_size_by_hand():
    assert parity.effective_share(torch.tensor([1.0, 1.0, 1.0, 1.0])) == 1
    assert parity.effective_share(torch.tensor([1.0, 0.0, 0.0, 0.0])) == 0.25
    assert parity.effective_share(torch.zeros(3)) == 0


def test_what_stands_at_mask_0_and_micro_batches_change_nothing():
    batch = batch_of(group(1.0, 0.0, 1.0), group(0.0, 1.0, task="u"))
    logprobs_BT = logprobs_for(batch).detach()
    whole = [parity.trained_tokens(PolicyOutput(logprobs_BT), batch)]
    noisy = PolicyOutput(torch.where(batch.mask_BT, logprobs_BT, torch.nan))
    noise_BT = torch.where(batch.mask_BT, batch.old_logprobs_BT, 1e6)
    parts = [parity.trained_tokens(noisy, replace(batch, old_logprobs_BT=noise_BT))]
    assert parity.gap_metrics(parts) == parity.gap_metrics(whole)
    split = []
    for index in batch.chunks(16):
        micro = batch.rows(index)
        split.append(
            parity.trained_tokens(PolicyOutput(logprobs_BT[index, : micro.ids_BT.shape[1]]), micro)
        )
    assert len(split) > 1
    for measure in (parity.gap_metrics, parity.ratio_metrics):
        assert measure(split) == pytest.approx(measure(whole))


def test_a_policy_that_computes_in_bfloat16_may_be_a_little_apart():
    model = tiny_model()
    assert parity.largest_gap(model) == 1e-3
    in_bfloat16(model)
    assert parity.largest_gap(model) == 0.02


def test_gaps_are_judged_by_thresholds():
    model = tiny_model()
    batch = batch_of(group(1.0, 0.0))

    def judged(gap):
        return parity.judge_gap(model, batch, {"parity/gap_mean": gap}, 1.0)

    assert parity.judge_gap(model, batch, {}, 1.0) == judged(1e-3) == []
    for gap, stops in ((0.05, False), (0.11, True), (float("nan"), True)):
        (found,) = judged(gap)
        assert (found.cause, found.stops) == ("disagreement", stops)
        assert "\n" not in found.message
    assert parity.judge_ratios({"ratio/corrected_effective": 0.5}) == []
    (found,) = parity.judge_ratios({"ratio/corrected_effective": 0.3})
    assert (found.cause, found.stops) == ("off-policy", False) and "30% of the" in found.message


@pytest.mark.parametrize(
    ("sampling", "sentence"),
    [
        ({"top_p": 0.9}, "top_p=0.9 truncates the distribution that is sampled.*: use top_p=1.0"),
        ({"top_k": 20}, "top_k=20 truncates .* use top_k=0"),
        ({"temperature": 0.0}, "temperature=0 samples greedily"),
        ({"temperature": 0.8}, "temperature=0.8 is not the scorer's temperature=1.0"),
    ],
)
def test_what_cannot_agree_is_refused(sampling, sentence):
    with pytest.raises(ConfigError, match=sentence):
        parity.check_sampling(Sampling(**sampling), 1.0)
    parity.check_sampling(Sampling(temperature=0.8), 0.8)


# Defects that the checks above must see: each is put in, and the named check has to fail


def _mean_over_all(parts):
    return {
        "parity/gap_mean": float((parts[0].trainer_N - parts[0].sampler_N).mean())
    } | dict.fromkeys(("parity/gap_p99", "parity/gap_max", "parity/kl"), 0.0)


def _unmasked(output, batch):
    flat = (
        output.logprobs_BT,
        batch.old_logprobs_BT,
        batch.anchor_BT,
        torch.ones_like(batch.old_logprobs_BT),
    )
    return Tokens(*(one.flatten().double() for one in flat))


MUTANTS = {
    "a signed gap cancels out": ("gap_metrics", _mean_over_all, test_gaps_by_hand),
    "the mask is forgotten": (
        "trained_tokens",
        _unmasked,
        test_what_stands_at_mask_0_and_micro_batches_change_nothing,
    ),
    "the effective size is no share": (
        "effective_share",
        lambda weights_N: (
            float(weights_N.sum()) ** 2 / float(weights_N.square().sum().clamp(min=1e-9))
        ),
        test_the_effective_sample_size_by_hand,
    ),
    "corrections are left out": (
        "ratio_metrics",
        lambda parts, real=parity.ratio_metrics: real(
            [part._replace(weights_N=part.weights_N * 0 + 1) for part in parts]
        ),
        test_ratios_before_and_after_correction_by_hand,
    ),
    "NaN passes": (
        "judge_gap",
        lambda model, batch, metrics, warmth, real=parity.judge_gap: real(
            model, batch, {name: value for name, value in metrics.items() if value == value}, warmth
        ),
        test_gaps_are_judged_by_thresholds,
    ),
}


@pytest.mark.parametrize("defect", MUTANTS)
def test_each_defect_is_caught(defect, monkeypatch):
    name, mutant, check = MUTANTS[defect]
    check()
    monkeypatch.setattr(parity, name, mutant)
    with pytest.raises((AssertionError, IndexError, ValueError)):
        check()
