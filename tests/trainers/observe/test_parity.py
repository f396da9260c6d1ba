"""Sampler against trainer: a real engine that is stale, warm, truncated, half precise or perturbed
is named as that.
"""

from __future__ import annotations

import asyncio
import copy
import re
from dataclasses import replace

import pytest
import torch
from trainer_cases import batch_of, group, logprobs_for, tiny_model

from agentrl.engines.base import Sampling
from agentrl.engines.transformers import TransformersEngine
from agentrl.errors import ConfigError
from agentrl.trainers.batch import PolicyOutput
from agentrl.trainers.models.loading import in_bfloat16
from agentrl.trainers.models.weights import PolicyWeights
from agentrl.trainers.observe import parity
from agentrl.trainers.observe.parity import Finding, Movement, ParityError, Thresholds, Tokens
from agentrl.trainers.observe.probe import Probe

PROMPT = tuple(range(3, 15))


class Loop:
    """A trainer's model, an engine with weights of its own, and a probe; `step` moves the trainer."""

    def __init__(self, temperature=1.0, sampling=None):
        self.model = tiny_model()
        self.engine = TransformersEngine(copy.deepcopy(self.model), frozenset({96}))
        self.probe = Probe(PROMPT, temperature, answers=6)
        self.sampling = sampling
        self.version = 0

    def step(self, size=0.02, *, load=True):
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.add_(size * torch.randn(weight.shape, generator=generator))
        self.version += 1
        if load:
            self.engine.load(PolicyWeights(self.model), self.version)

    def look(self):
        probe, engine = self.probe, self.engine
        if self.sampling is not None:
            probe = copy.copy(probe)
            probe._sampling = replace(probe._sampling, **self.sampling)
        return self.probe.read(self.model, asyncio.run(probe.ask(engine)), self.version)

    def close(self):
        asyncio.run(self.engine.close())


@pytest.fixture
def loop():
    opened = Loop()
    yield opened
    opened.close()


def causes(report):
    return [finding.cause for finding in report.findings]


def test_an_engine_that_follows_is_passed(loop):
    assert loop.look().findings == ()
    for size in (0.02, 1e-6, 0.0, 0.05):
        loop.step(size)
        report = loop.look()
        assert report.findings == () and report.metrics["parity/probe_gap"] < 1e-5
        if size > 1e-3:
            assert report.metrics["parity/probe_moved"] > 1e-3
            assert report.metrics.get("parity/probe_followed", 1.0) == pytest.approx(1, abs=0.01)


def test_an_engine_that_was_not_loaded_is_named(loop):
    loop.look()
    loop.step(load=False)
    report = loop.look()
    assert (
        causes(report)[:1] == ["stale weights"]
        and "version 0 after version 1" in report.findings[0].message
    )
    with pytest.raises(ParityError, match="stale weights: the engine samples with version 0"):
        parity.enforce(report.findings)


@pytest.mark.parametrize("size", [0.02, 3e-5])
def test_a_load_that_changed_nothing_is_named_however_small_the_step(loop, size):
    """As vLLM's `reload_weights` on the CPU: it returns at once, and the version counts on."""
    loop.look()
    loop.step(size, load=False)
    loop.engine.version = loop.version
    report = loop.look()
    assert causes(report)[:1] == ["stale weights"] and report.findings[0].stops
    assert "engine's by 0: " in report.findings[0].message
    assert report.metrics["parity/probe_followed"] == 0


def test_steps_too_small_to_see_add_up(loop):
    loop.look()
    seen = []
    while not seen and loop.version < 400:
        loop.step(2e-7, load=False)
        loop.engine.version = loop.version
        seen = causes(loop.look())
    assert seen == ["stale weights"] and loop.version > 1


def test_a_half_loaded_engine_is_named(loop):
    loop.look()
    loop.step(load=False)
    loop.engine.version = loop.version
    with torch.no_grad():
        loop.engine.model.model.norm.weight.copy_(loop.model.model.norm.weight)
    assert causes(loop.look()) in (["stale weights", "other weights"], ["other weights"])


def test_a_prefix_cache_of_older_weights_is_named(loop):
    loop.look()
    first = asyncio.run(loop.probe.ask(loop.engine))
    loop.step()
    report = loop.probe.read(loop.model, [replace(one, version=1) for one in first], 1)
    assert causes(report)[:1] == ["stale weights"]


@pytest.mark.parametrize(
    ("sampling", "cause", "setting"),
    [
        ({"temperature": 1.3}, "temperature", r"temperature=1\.3 "),
        ({"temperature": 0.6}, "temperature", r"temperature=0\.6 "),
        ({"top_k": 7}, "top-k", r"top_k=7 "),
        ({"top_p": 0.7}, "top-p", r"top_p=0\.7\d* "),
    ],
)
def test_wrong_sampling_is_named_with_its_value(sampling, cause, setting):
    loop = Loop(sampling=sampling)
    report = loop.look()
    assert causes(report) == [cause] and report.findings[0].stops
    assert re.search(setting, report.findings[0].message), report.findings
    loop.close()


def test_the_scorers_temperature_counts():
    loop = Loop(temperature=0.7)
    assert loop.look().findings == ()
    loop.sampling = {"temperature": 1.0}
    assert re.search(r"temperature=1 in", loop.look().findings[0].message)
    loop.close()


def test_other_weights_are_named(loop):
    with torch.no_grad():
        loop.engine.model.model.layers[0].mlp.down_proj.weight.add_(0.3 * torch.randn(32, 64))
    report = loop.look()
    assert causes(report) == ["other weights"] and report.findings[0].stops


def test_half_precision_is_named_and_only_warned_of(loop):
    loop.engine.model = copy.deepcopy(loop.model).to(torch.bfloat16)
    report = loop.look()
    assert causes(report) == ["precision"]
    assert parity.enforce(report.findings) == report.findings
    loop.model = loop.model.to(torch.bfloat16)
    assert Loop.look(loop).findings == ()


# The pure parts


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


def test_what_the_sampler_read_off_the_trainers_own_logits_is_precision():
    logits_NV = torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
    targets_N = torch.arange(64) % 50
    own_N = logits_NV.double().log_softmax(-1)[torch.arange(64), targets_N]
    for sampler_N, cause in (
        (own_N, "precision"),
        (logits_NV.div(0.7).log_softmax(-1)[range(64), targets_N], "temp"),
    ):
        found = parity.explanations(logits_NV, targets_N, sampler_N.double(), 1.0)
        gap = max(
            float((sampler_N - own_N).abs().mean()), 0.01
        )  # the scorer multiplied in another precision
        (said,) = parity.check({"parity/gap_mean": gap}, Thresholds(), found)
        assert said.cause.startswith(cause) and said.stops == (cause == "temp")


def test_a_policy_that_computes_in_bfloat16_may_be_a_little_apart():
    model = tiny_model()
    assert Thresholds.of(model) == Thresholds()
    in_bfloat16(model)
    assert Thresholds.of(model).warn_gap == 0.02


def test_findings_by_thresholds():
    thresholds = Thresholds()
    assert parity.check({"parity/gap_mean": 1e-3}, thresholds) == ()
    assert parity.check({"parity/gap_mean": 0.05}, thresholds)[0].stops is False
    assert parity.check({"parity/gap_mean": 0.11}, thresholds)[0].stops is True
    assert parity.check({"parity/gap_mean": float("nan")}, thresholds)[0].stops is True
    assert parity.check({"parity/gap_p99": 0.6}, thresholds)[0].cause == "precision"
    found = parity.check({"ratio/corrected_effective": 0.3}, thresholds)
    assert found == (Finding("off-policy", False, found[0].message),)
    stale = parity.check(
        {"ratio/corrected_effective": 0.3}, thresholds, movement=Movement(1e-2, 0.0, 1e-6)
    )
    assert [one.cause for one in stale] == ["stale weights", "off-policy"]
    assert parity.check({}, thresholds, movement=Movement(1e-2, 1e-2, 1e-6)) == ()
    assert parity.check({}, thresholds, movement=Movement(1e-2, 0.0, 1e-2)) == ()
    assert all("\n" not in one.message for one in (*found, *stale))


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
        "check",
        lambda metrics, *rest, real=parity.check, **named: real(
            {name: value for name, value in metrics.items() if value == value}, *rest, **named
        ),
        test_findings_by_thresholds,
    ),
}


@pytest.mark.parametrize("defect", MUTANTS)
def test_each_defect_is_caught(defect, monkeypatch):
    name, mutant, check = MUTANTS[defect]
    check()
    monkeypatch.setattr(parity, name, mutant)
    with pytest.raises((AssertionError, IndexError)):
        check()


def test_an_engine_that_is_never_compared_with_itself_is_caught(loop, monkeypatch):
    monkeypatch.setattr(Movement, "is_stale", property(lambda movement: False))
    with pytest.raises(AssertionError):
        test_a_load_that_changed_nothing_is_named_however_small_the_step(loop, 3e-5)


def test_the_probe_of_a_training_run(tmp_path):
    """As the loop uses it: the engine on its own thread, a prompt of the chat template, weights
    that move.
    """
    from pathlib import Path

    from agentrl.trainers.config import check_config
    from agentrl.trainers.models.tiny import build_model, build_tokenizer
    from agentrl.trainers.online.run import Run
    from agentrl.types import Message

    told = ["<|im_start|>user\nsay 3<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"] * 8
    model = build_model(tmp_path / "m", build_tokenizer(told, 280), width=32, layers=1, context=256)
    env = f"{Path(__file__).parents[2] / 'support/toy_envs.py'}:Parity"
    with Run(
        check_config({"env": env, "model": str(model), "steps": 1}, "test"), tmp_path / "run"
    ) as run:
        probe = Probe(
            run.chat.prompt_ids([Message.user("say 3")], ()),
            run.config.temperature,
            pad_id=run.pad_id,
        )
        for version in range(3):
            run.rollouts.sync(run.learner.weights(), version)
            report = probe.read(run.learner.model, run.rollouts.run(probe.ask(run.engine)), version)
            assert (
                parity.enforce(report.findings) == () and report.metrics["parity/probe_gap"] < 1e-5
            )
            with torch.no_grad():
                run.learner.model.model.embed_tokens.weight.mul_(1.05)
        assert report.metrics["parity/probe_moved"] > 1e-4
