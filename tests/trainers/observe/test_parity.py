"""Sampler and trainer compared round by round: what must not differ is named, and nothing else."""

from __future__ import annotations

import asyncio
import copy
import re
from dataclasses import replace

import pytest
import torch
from trainer_cases import tiny_model

from agentrl.engines.base import Sampling
from agentrl.engines.transformers import TransformersEngine
from agentrl.trainers.batch import PolicyOutput
from agentrl.trainers.models.scoring import frozen_logprobs
from agentrl.trainers.models.weights import PolicyWeights
from agentrl.trainers.observe import parity, watch
from agentrl.trainers.observe.parity import ParityError
from agentrl.trainers.observe.watch import Watch

PROMPT = tuple(range(3, 15))


class Here:
    """Runs what a run gives to its loop thread."""

    run = staticmethod(asyncio.run)


class Run:
    """A trainer's model, an engine with weights of its own, and a watch over both.

    Args:
        temperature: of the trainer, and of the sampler unless `sampling` says otherwise.
        sampling: what the engine does instead of what it is asked for.
    """

    def __init__(self, temperature=1.0, sampling=None):
        self.model = tiny_model()
        self.engine = TransformersEngine(copy.deepcopy(self.model), frozenset({96}))
        if sampling:
            generate = self.engine.generate
            self.engine.generate = lambda ids, asked, seed: generate(
                ids, replace(asked, **sampling), seed=seed
            )
        self.warnings = []
        self.watch = Watch(
            self.model,
            self.engine,
            Here,
            PROMPT,
            Sampling(temperature=temperature),
            lambda kind, said: self.warnings.append(said),
        )
        self.version = 0

    def step(self, size=0.02, *, load=True):
        """Move the trainer by a random step; the engine follows if it is loaded."""
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.add_(size * torch.randn(weight.shape, generator=generator))
        self.version += 1
        if load:
            self.engine.load(PolicyWeights(self.model), self.version)

    def pretend(self):
        """Let the engine count a load on that changed nothing, as vLLM's on the CPU does."""
        self.engine.version = self.version

    def confirm(self):
        return self.watch.confirm(self.version)

    def close(self):
        asyncio.run(self.engine.close())


@pytest.fixture
def run():
    opened = Run()
    yield opened
    opened.close()


def test_an_engine_that_follows_is_passed(run):
    run.confirm()
    for size in (0.02, 1e-6, 0.0, 0.05):
        run.step(size)
        metrics = run.confirm()
        assert run.warnings == [] and metrics["parity/probe_gap"] < 1e-5
        if size > 1e-3:
            assert metrics["parity/probe_moved"] > 1e-3
            assert metrics.get("parity/probe_followed", 1.0) == pytest.approx(1, abs=0.01)


def test_an_engine_that_says_an_old_version_is_named(run):
    run.confirm()
    run.step(load=False)
    with pytest.raises(ParityError, match=r"stale weights: .* version 0 after 1 was loaded"):
        run.confirm()


@pytest.mark.parametrize("size", [0.02, 3e-5])
def test_a_load_that_changed_nothing_is_named_however_small_the_step(run, size):
    run.confirm()
    run.step(size, load=False)
    run.pretend()
    with pytest.raises(ParityError, match=r"stale weights: .* nats and the engine by 0: load it"):
        run.confirm()


def test_steps_too_small_to_see_add_up(run):
    run.confirm()
    with pytest.raises(ParityError, match="stale weights"):
        while run.version < 400:
            run.step(2e-7, load=False)
            run.pretend()
            run.confirm()
    assert run.version > 1


def test_a_half_loaded_engine_is_named(run):
    run.confirm()
    run.step(load=False)
    run.pretend()
    with torch.no_grad():
        run.engine.model.model.norm.weight.copy_(run.model.model.norm.weight)
    with pytest.raises(ParityError, match=r"stale weights|other weights"):
        run.confirm()


@pytest.mark.parametrize(
    ("sampling", "sentence"),
    [
        ({"temperature": 1.3}, r"temperature: .* at temperature=1\.3 in"),
        ({"temperature": 0.6}, r"temperature: .* at temperature=0\.6 in"),
        ({"top_k": 7}, "truncation: .* switch its top-p and top-k off"),
        ({"top_p": 0.7}, "truncation: .* switch its top-p and top-k off"),
    ],
)
def test_wrong_sampling_is_named(sampling, sentence):
    run = Run(sampling=sampling)
    with pytest.raises(ParityError, match=sentence):
        run.confirm()
    run.close()


def test_the_scorers_temperature_counts():
    run = Run(temperature=0.7)
    run.confirm()
    assert run.warnings == []
    run.close()
    run = Run(temperature=0.7, sampling={"temperature": 1.0})
    with pytest.raises(ParityError, match=r"at temperature=1 in"):
        run.confirm()
    run.close()


def test_other_weights_are_named(run):
    with torch.no_grad():
        run.engine.model.model.layers[0].mlp.down_proj.weight.add_(0.3 * torch.randn(32, 64))
    with pytest.raises(ParityError, match=r"other weights: .* no setting explains it"):
        run.confirm()


def test_half_precision_is_named_once_and_only_warned_of(run):
    run.engine.model = copy.deepcopy(run.model).to(torch.bfloat16)
    run.confirm()
    run.confirm()
    (warning,) = run.warnings
    assert warning.startswith("dtype: ")
    run.model.to(torch.bfloat16)
    run.warnings.clear()
    run.watch._said.clear()
    run.confirm()
    assert run.warnings == []


def seen(run):
    """The answers of the probe as a batch, and the gap of the trainer as it is now."""
    answers = asyncio.run(run.watch._ask())
    batch = watch._packed(PROMPT, answers)
    logprobs_BT = frozen_logprobs(run.model, batch)
    return parity.gap_metrics([parity.trained_tokens(PolicyOutput(logprobs_BT), batch)]), batch


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("asked", [False, True])
def test_dropout_is_named_and_stops_only_where_nobody_asked_for_it(run, asked, seed):
    run.confirm()
    torch.manual_seed(seed)
    for layer in run.model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    run.model.config.attention_dropout = 0.3 if asked else 0.0
    run.model.train()
    gap, batch = seen(run)
    if asked:
        run.watch.agree(gap, batch)
        assert run.model.training and run.warnings[0].startswith("dropout: ")
    else:
        with pytest.raises(ParityError, match=r"dropout: .* so set compute\.dropout=0"):
            run.watch.agree(gap, batch)


@pytest.mark.parametrize("loud", [0.1, 0.5])
def test_dropout_hides_no_other_gap(run, loud):
    """What is left without it is judged by the usual limits and causes."""
    run.confirm()
    torch.manual_seed(0)
    for layer in run.model.model.layers:
        layer.self_attn.attention_dropout = loud
    run.model.config.attention_dropout = loud
    run.model.train()
    gap, batch = seen(run)
    for warmth, cause in ((1.0, "dropout"), (1.5, "temperature"), (None, "other weights|template")):
        with parity._eval(run.model):
            if warmth:
                said_BT = frozen_logprobs(run.model, batch, warmth)
            else:
                noise_BT = torch.randn(batch.mask_BT.shape) * 0.3
                said_BT = frozen_logprobs(run.model, batch) + noise_BT
        wrong = replace(batch, old_logprobs_BT=torch.where(batch.mask_BT, said_BT, 0.0))
        torch.manual_seed(1)
        output = PolicyOutput(frozen_logprobs(run.model, wrong))
        gap = parity.gap_metrics([parity.trained_tokens(output, wrong)])
        (found,) = parity.judge_gap(run.model, wrong, gap, 1.0)
        assert re.fullmatch(cause, found.cause) and found.stops == (cause != "dropout")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda ids: ids[1:], "template: .* if the trainer's rows began without their first"),
        (lambda ids: (7, *ids), "template: .* if the trainer's rows began with token 7"),
    ],
)
def test_an_engine_that_reads_other_ids_is_named(run, change, sentence):
    run.model.config.bos_token_id = 7
    generate = run.engine.generate
    run.engine.generate = lambda ids, asked, seed: generate(change(tuple(ids)), asked, seed=seed)
    with pytest.raises(ParityError, match=sentence):
        run.confirm()


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_the_engine_did_not_read_are_named(run, seed):
    """As a template makes them that rewrites what was said before."""
    run.confirm()
    gap, batch = seen(run)
    run.watch.agree(gap, batch)
    place = int(torch.randint(2, len(PROMPT), (), generator=torch.Generator().manual_seed(seed)))
    batch.ids_BT[:, place] = 60
    logprobs_BT = frozen_logprobs(run.model, batch)
    gap = parity.gap_metrics([parity.trained_tokens(PolicyOutput(logprobs_BT), batch)])
    with pytest.raises(ParityError, match=r"template: .* these rows are not what it read"):
        run.watch.agree(gap, batch)


def test_a_gap_is_judged_by_what_the_recipe_cuts_for_it(run):
    run.confirm()
    run.engine.model = copy.deepcopy(run.model).to(torch.bfloat16)
    batch = seen(run)[1]
    gap = {"parity/gap_mean": 1e-4, "parity/cut": 0.002}
    run.watch.agree(gap, batch)
    assert run.warnings == []
    run.watch.agree(gap | {"parity/cut": 0.3}, batch)
    (warning,) = run.warnings
    assert warning.startswith("dtype: ") and "alone the recipe cuts 0.3 of the tokens" in warning


def test_an_engine_that_is_never_compared_with_itself_is_caught(run, monkeypatch):
    monkeypatch.setattr(watch, "moved", lambda *looks: (1.0, 1.0, 0.0))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_a_load_that_changed_nothing_is_named_however_small_the_step(run, 3e-5)
