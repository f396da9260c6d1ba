"""After every load the engine answers the same prompt with the same seeds, and the trainer scores
what it said.

Both must agree, and the engine must have moved where the trainer moved: an engine that keeps older
    weights, or a prefix
cache made with them, gives the same answer again. Asking by the engine's ordinary `generate` tests
the path that rollouts take, whatever the engine, and needs no scoring of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentrl.engines.base import Engine, Generation, Sampling
from agentrl.trainers.batch import PolicyOutput, TokenBatch, pack
from agentrl.trainers.models.scoring import frozen_logprobs
from agentrl.trainers.observe.parity import (
    Finding,
    Movement,
    Thresholds,
    check,
    explain,
    gap_metrics,
    trained_tokens,
)
from agentrl.trajectory import Episode, EpisodeKey, Group, Segment, Trajectory
from agentrl.types import EndReason, Score, TaskView


@dataclass(frozen=True, eq=False)
class Look:
    """One answer: the tokens with the engine's log-probabilities (`old_logprobs_BT`), and the
    trainer's of the same.
    """

    batch: TokenBatch
    trainer_BT: Tensor


@dataclass(frozen=True)
class Report:
    """What a look found: metrics, and what is wrong."""

    metrics: dict[str, float]
    findings: tuple[Finding, ...]


class Probe:
    """Compares an engine with the model that it should sample with.

    Looks are compared with the last one from which the trainer has measurably moved, so that steps
    too small to be told from rounding add up until they can be.

    Args:
        prompt_ids: the fixed prompt; any that the model has something to say to.
        temperature: of sampler and scorer.
        pad_id: any valid id.
        answers: continuations, each with a seed of its own.
        tokens: length of each.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        temperature: float,
        *,
        pad_id: int = 0,
        answers: int = 4,
        tokens: int = 16,
    ) -> None:
        self._prompt_ids = tuple(prompt_ids)
        self._sampling = Sampling(temperature=temperature, max_tokens=tokens)
        self._pad_id = pad_id
        self._answers = answers
        self._before: Look | None = None

    async def ask(self, engine: Engine) -> tuple[Generation, ...]:
        """The engine's answers, sampled as rollouts are.

        Raises:
            EngineError: sampling failed.
        """
        asked = (
            engine.generate(self._prompt_ids, self._sampling, seed=seed)
            for seed in range(self._answers)
        )
        return tuple(await asyncio.gather(*asked))

    def read(self, model: Any, answers: Sequence[Generation], version: int) -> Report:
        """Compare the answers with the trainer's model.

        Args:
            model: the trainer's.
            answers: of `ask`.
            version: that was loaded last.
        """
        batch, temperature = self._pack(answers), self._sampling.temperature
        now = Look(batch, _scores(model, batch, temperature))
        metrics = gap_metrics([trained_tokens(PolicyOutput(now.trainer_BT), batch)])
        movement = None
        if (before := self._before) is not None:
            movement = moved(before, _scores(model, before.batch, temperature), now)
        if movement is None or movement.is_conclusive:
            self._before = now
        thresholds = Thresholds.of(model)
        causes = (
            ()
            if metrics["parity/gap_mean"] <= thresholds.warn_gap
            else explain(model, batch, temperature)
        )
        findings = (*_versions(answers, version), *check(metrics, thresholds, causes, movement))
        shown = {"parity/probe_gap": metrics["parity/gap_mean"]}
        if movement is not None:
            shown["parity/probe_moved"] = movement.trainer
            if movement.is_conclusive and movement.engine < float("inf"):
                shown["parity/probe_followed"] = movement.engine / movement.trainer
        return Report(shown, findings)

    def _pack(self, answers: Sequence[Generation]) -> TokenBatch:
        """The answers as rows, on the way that every episode takes."""
        episodes = [
            Episode(
                EpisodeKey("probe", 0, "probe", index),
                "probe",
                TaskView(id="probe", instruction="probe"),
                "",
                (),
                EndReason.ANSWERED,
                Score(0.0),
                (Trajectory((Segment.prompt(self._prompt_ids), _segment(answer))),),
            )
            for index, answer in enumerate(answers)
        ]
        return pack([Group(tuple(episodes))], self._pad_id)


def moved(before: Look, trainer_BT: Tensor, now: Look) -> Movement:
    """How far trainer and engine moved on the tokens that both looks have in common.

    Args:
        trainer_BT: what the trainer now says of the tokens of the earlier look.
    """
    width = min(before.batch.ids_BT.shape[1], now.batch.ids_BT.shape[1])
    same_BT = before.batch.ids_BT[:, :width] == now.batch.ids_BT[:, :width]
    both_BT = before.batch.mask_BT[:, :width] & now.batch.mask_BT[:, :width]
    # Behind the first token that differs, the same id stands in another context.
    common_BT = both_BT & same_BT.int().cumprod(1).bool()
    mask_BT = torch.zeros_like(before.batch.mask_BT)
    mask_BT[:, :width] = common_BT
    engine = float("inf")
    if common_BT.any():
        change_BT = now.batch.old_logprobs_BT[:, :width] - before.batch.old_logprobs_BT[:, :width]
        engine = _rms(change_BT[common_BT])
    else:
        mask_BT = before.batch.mask_BT
    trainer = _rms((trainer_BT - before.trainer_BT)[mask_BT])
    noise = _rms((before.batch.old_logprobs_BT - before.trainer_BT)[before.batch.mask_BT])
    return Movement(trainer, engine, noise)


def _scores(model: Any, batch: TokenBatch, temperature: float) -> Tensor:
    """Log-probabilities as updates compute them, without dropout."""
    was_training = model.training
    model.eval()
    try:
        return frozen_logprobs(model, batch.to(model.device), temperature).to(batch.mask_BT.device)
    finally:
        model.train(was_training)


def _segment(answer: Generation) -> Segment:
    return Segment.sampled(answer.ids, answer.logprobs, answer.version, answer.finish)


def _versions(answers: Sequence[Generation], version: int) -> tuple[Finding, ...]:
    """An engine that says itself that it was not loaded."""
    if all(answer.version == version for answer in answers):
        return ()
    said = f"the engine samples with version {answers[0].version} after version {version} was due"
    return (Finding("stale weights", True, f"stale weights: {said}: load it after every update"),)


def _rms(values_N: Tensor) -> float:
    return float(values_N.double().square().mean().sqrt())
