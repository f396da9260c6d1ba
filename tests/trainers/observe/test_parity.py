"""Sampler and trainer compared round by round: what must not differ stops the run, and nothing else
does.
"""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace

import pytest
import torch
from trainer_cases import tiny_model

from agentrl.engines.base import Sampling
from agentrl.engines.transformers import TransformersEngine
from agentrl.trainers.batch import PolicyOutput
from agentrl.trainers.models.scoring import frozen_logprobs
from agentrl.trainers.models.weights import PolicyWeights
from agentrl.trainers.observe import parity
from agentrl.trainers.observe.parity import ParityCheck, ParityError

PROMPT = tuple(range(3, 15))


class Here:
    """Probes an engine without a loop thread."""

    def __init__(self, engine):
        self._engine = engine

    def probe(self, prompt_ids, sampling, seeds):
        async def ask():
            asked = (self._engine.generate(prompt_ids, sampling, seed=seed) for seed in seeds)
            return tuple(await asyncio.gather(*asked))

        return asyncio.run(ask())


class Run:
    """A trainer's model, an engine with weights of its own, and a check of both.

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
        self.parity = ParityCheck(
            self.model,
            self.engine,
            Here(self.engine),
            PROMPT,
            Sampling(temperature=temperature),
            self.warnings.append,
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
        return self.parity.confirm(self.version)

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
    with pytest.raises(ParityError, match=r"stale weights|disagreement"):
        run.confirm()


@pytest.mark.parametrize("sampling", [{"temperature": 2.0}, {"temperature": 0.4}, {"top_k": 7}])
def test_wrong_sampling_stops_the_run(sampling):
    run = Run(sampling=sampling)
    with pytest.raises(ParityError, match=r"disagree by .* temperature"):
        run.confirm()
    run.close()


def test_the_scorers_temperature_counts():
    run = Run(temperature=0.7)
    run.confirm()
    assert run.warnings == []
    run.close()
    run = Run(temperature=0.7, sampling={"temperature": 1.5})
    with pytest.raises(ParityError):
        run.confirm()
    run.close()


def test_other_weights_stop_the_run(run):
    with torch.no_grad():
        run.engine.model.model.layers[0].mlp.down_proj.weight.add_(0.3 * torch.randn(32, 64))
    with pytest.raises(ParityError, match="the trainer's weights"):
        run.confirm()


def test_half_precision_is_named_once_and_only_warned_of(run):
    run.engine.model = copy.deepcopy(run.model).to(torch.bfloat16)
    run.confirm()
    run.confirm()
    (warning,) = run.warnings
    assert warning.startswith("disagreement: ") and "dtype" in warning
    run.model.to(torch.bfloat16)
    run.warnings.clear()
    run.parity._warned.clear()
    run.confirm()
    assert run.warnings == []


def seen(run):
    """The answers of the probe as a batch, and the gap of the trainer as it is now."""
    answers = run.parity._ask()
    batch = parity.pack_answers(PROMPT, answers)
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
        run.parity.judge_gap(gap, batch)
        assert run.model.training and run.warnings[0].startswith("dropout: ")
    else:
        with pytest.raises(ParityError, match=r"dropout: .* set compute\.dropout=0"):
            run.parity.judge_gap(gap, batch)


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_dropout_hides_no_other_gap(run, dropout):
    """What is left without it is judged by the usual limits."""
    run.confirm()
    torch.manual_seed(0)
    for layer in run.model.model.layers:
        layer.self_attn.attention_dropout = dropout
    run.model.config.attention_dropout = dropout
    run.model.train()
    batch = seen(run)[1]
    for noise, cause in ((0.0, "dropout"), (0.3, "disagreement")):
        run.model.eval()
        sampler_BT = frozen_logprobs(run.model, batch)
        run.model.train()
        sampler_BT = sampler_BT + noise * torch.randn(batch.mask_BT.shape)
        wrong = replace(batch, old_logprobs_BT=torch.where(batch.mask_BT, sampler_BT, 0.0))
        torch.manual_seed(1)
        output = PolicyOutput(frozen_logprobs(run.model, wrong))
        gap = parity.gap_metrics([parity.trained_tokens(output, wrong)])
        (found,) = parity.judge_gap(run.model, wrong, gap, 1.0)
        assert (found.cause, found.stops) == (cause, cause == "disagreement")


@pytest.mark.parametrize("change", [lambda ids: ids[1:], lambda ids: (7, *ids)])
def test_an_engine_that_reads_other_ids_is_stopped(run, change):
    generate = run.engine.generate
    run.engine.generate = lambda ids, asked, seed: generate(change(tuple(ids)), asked, seed=seed)
    with pytest.raises(ParityError, match="template"):
        run.confirm()


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_the_engine_did_not_read_are_named(run, seed):
    """As a template makes them that rewrites what was said before."""
    run.confirm()
    gap, batch = seen(run)
    run.parity.judge_gap(gap, batch)
    place = int(torch.randint(2, len(PROMPT), (), generator=torch.Generator().manual_seed(seed)))
    batch.ids_BT[:, place] = 60
    logprobs_BT = frozen_logprobs(run.model, batch)
    gap = parity.gap_metrics([parity.trained_tokens(PolicyOutput(logprobs_BT), batch)])
    with pytest.raises(ParityError, match="on its probe the engine agrees"):
        run.parity.judge_gap(gap, batch)


def test_a_gap_is_judged_by_what_the_recipe_cuts_for_it(run):
    run.confirm()
    run.engine.model = copy.deepcopy(run.model).to(torch.bfloat16)
    batch = seen(run)[1]
    gap = {"parity/gap_mean": 1e-4, "parity/cut": 0.002}
    run.parity.judge_gap(gap, batch)
    assert run.warnings == []
    run.parity.judge_gap(gap | {"parity/cut": 0.3}, batch)
    (warning,) = run.warnings
    assert "alone the recipe cuts 0.3 of the tokens" in warning


def test_an_engine_that_is_never_compared_with_itself_is_caught(run, monkeypatch):
    monkeypatch.setattr(parity, "distances", lambda *looks: (1.0, 1.0, 0.0))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_a_load_that_changed_nothing_is_named_however_small_the_step(run, 3e-5)
