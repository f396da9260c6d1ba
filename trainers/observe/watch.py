"""Watches a run: does the engine sample with the trainer's weights, and what should people read?

After every load the engine answers the same prompt with the same seeds, by the ordinary `generate`,
and the trainer scores its answers. Both must agree, and the engine must have moved where the
trainer moved: one that keeps older weights, or a prefix cache made with them, answers as before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.engines.base import Engine, Generation, Measured, Restarted, Sampling
from agentrl.engines.routing import replayed_routing
from agentrl.errors import EngineLost
from agentrl.records.files import EpisodeWriter, read_episodes
from agentrl.rollout.rollouts import Rollouts
from agentrl.trainers.batch import PolicyOutput, TokenBatch, pack
from agentrl.trainers.models.scoring import frozen_logprobs
from agentrl.trainers.observe.metrics import prompt_of, repeat_metrics, to_read
from agentrl.trainers.observe.parity import (
    Disagreement,
    ParityError,
    check_sampling,
    gap_metrics,
    judge_gap,
    judge_ratios,
    trained_tokens,
)
from agentrl.trajectory import Episode, EpisodeKey, Group, Segment, Trajectory
from agentrl.types import EndReason, Score, TaskView

ANSWERS, ANSWER_TOKENS = 4, 16
"""How many answers the probe compares, and their length."""


class Watch:
    """Keeps an eye on one run; leaving the stack closes its files.

    Args:
        model: the trainer's.
        engine: the sampler.
        rollouts: whose loop thread the engine lives on.
        prompt_ids: what the probe asks.
        sampling: of the rollouts; its temperature must be the scorer's.
        listen: is told ("warning", sentence).

    Raises:
        ConfigError: the sampler's distribution is not the one that is scored.
    """

    def __init__(
        self,
        model: Any,
        engine: Engine,
        rollouts: Rollouts,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        listen: Callable[[str, Any], None],
    ) -> None:
        check_sampling(sampling, sampling.temperature)
        self._model, self._engine, self._rollouts, self._listen = model, engine, rollouts, listen
        self._prompt_ids, self._temperature = tuple(prompt_ids), sampling.temperature
        self._before: Look | None = None
        self._probed = float("inf")
        self._restarts = 0
        self._seen: set[str] = set()
        self._said: set[str] = set()

    def open(self, folder: Path, played: Path, step: int, parts: ExitStack) -> None:
        """Open the files for readers, remember the prompts played before, and probe the engine."""
        self._samples = {
            kind: parts.enter_context(EpisodeWriter(folder / "samples" / f"{kind}.jsonl"))
            for kind in ("top", "random")
        }
        if step:
            before = (
                e
                for key, e in read_episodes(played).items()
                if key.phase == "train" and not key.draw and key.step < step
            )
            self._seen |= {prompt_of(Group((episode,))) for episode in before}
        self.confirm(step)

    def confirm(self, version: int) -> dict[str, float]:
        """Probe the engine after a load: `parity/probe_gap`, `_moved` and `_followed`.

        It compares with the last probe since which the trainer has moved by more than rounding:
        steps that are smaller add up until they can be measured.

        Raises:
            ParityError: the engine samples with other weights.
        """
        self._restarts = self._starts
        answers = self._rollouts.run(self._ask())
        batch = _packed(self._prompt_ids, answers)
        now = Look(batch, _scores(self._model, batch, self._temperature))
        gap = gap_metrics([trained_tokens(PolicyOutput(now.trainer_BT), batch)])
        metrics, found = {"parity/probe_gap": gap["parity/gap_mean"]}, list[Disagreement]()
        if said := sorted({answer.version for answer in answers} - {version}):
            found.append(_stale(f"it samples with version {said[0]} after {version} was loaded"))
        if (before := self._before) is not None:
            trainer_BT = _scores(self._model, before.batch, self._temperature)
            trainer, engine, noise = moved(before, trainer_BT, now)
            metrics["parity/probe_moved"] = trainer
            if trainer <= max(4 * noise, 1e-5):
                now = before
            elif engine < float("inf"):
                metrics["parity/probe_followed"] = engine / trainer
                if engine < trainer / 2:
                    words = (
                        f"the trainer moved by {trainer:.2g} nats and the engine by {engine:.2g}"
                    )
                    found.append(_stale(f"on a fixed prompt {words}"))
        self._before, self._probed = now, gap["parity/gap_mean"]
        self._report([*found, *judge_gap(self._model, batch, gap, self._temperature)])
        return metrics

    def confirm_restarted(self, version: int) -> None:
        """Probe the engine, before anything is learnt, if its process was started again meanwhile.

        Raises:
            ParityError: the engine samples with other weights.
        """
        if self._starts != self._restarts:
            self.confirm(version)

    @property
    def _starts(self) -> int:
        """How often the engine's process was started again."""
        return self._engine.restarts if isinstance(self._engine, Restarted) else 0

    def agree(self, gap: dict[str, float], mini: TokenBatch) -> dict[str, float]:
        """Judge the gap between sampler and trainer before a round's first update; the same gap.

        Raises:
            ParityError: it is too wide; the message names the likeliest cause.
        """
        self._report(judge_gap(self._model, mini, gap, self._temperature, self._probed))
        return gap

    def effective(self, ratios: dict[str, float]) -> dict[str, float]:
        """Warn where few tokens carry all the weight; the same metrics."""
        self._report(judge_ratios(ratios))
        return ratios

    def noticed(self, groups: Sequence[Group], seed: int) -> dict[str, float]:
        """Put episodes of a round aside for readers; metrics of prompts that came again, and what
        the engine counted.
        """
        metrics = repeat_metrics(groups, self._seen)
        if isinstance(self._engine, Measured):
            metrics |= self._engine.metrics()
        self._seen |= {prompt_of(group) for group in groups}
        for kind, episodes in to_read(groups, seed).items():
            for episode in episodes:
                self._samples[kind].write(episode)
        return metrics

    async def _ask(self) -> tuple[Generation, ...]:
        sampling = Sampling(temperature=self._temperature, max_tokens=ANSWER_TOKENS)
        ids, seeds = self._prompt_ids, range(ANSWERS)
        while True:
            asked = (self._engine.generate(ids, sampling, seed=seed) for seed in seeds)
            try:
                return tuple(await asyncio.gather(*asked))
            except EngineLost:  # the next process answers; there is an end to them
                continue

    def _report(self, found: Sequence[Disagreement]) -> None:
        """Raise what stops the run; tell the rest, each cause once."""
        for one in sorted(found, key=lambda one: not one.stops):
            if one.stops:
                raise ParityError(one.message)
            if one.cause not in self._said:
                self._said.add(one.cause)
                self._listen("warning", one.message)


@dataclass(frozen=True, eq=False)
class Look:
    """The engine's answers with its log-probabilities (`old_logprobs_BT`), and the trainer's."""

    batch: TokenBatch
    trainer_BT: Tensor


def moved(before: Look, trainer_BT: Tensor, now: Look) -> tuple[float, float, float]:
    """How far trainer and engine moved on the tokens that both looks have in common.

    Args:
        trainer_BT: what the trainer now says of the tokens of the earlier look.

    Returns:
        root mean squares (nats): of the trainer's change; of the engine's, infinite where it draws
        other tokens from the start; of the distance between both at the earlier look.
    """
    width = min(before.batch.ids_BT.shape[1], now.batch.ids_BT.shape[1])
    same_BT = before.batch.ids_BT[:, :width] == now.batch.ids_BT[:, :width]
    both_BT = before.batch.mask_BT[:, :width] & now.batch.mask_BT[:, :width]
    # Behind the first token that differs, the same id stands in another context.
    common_BT = both_BT & same_BT.int().cumprod(1).bool()
    mask_BT, engine = before.batch.mask_BT, float("inf")
    if common_BT.any():
        change_BT = now.batch.old_logprobs_BT[:, :width] - before.batch.old_logprobs_BT[:, :width]
        engine = _rms(change_BT[common_BT])
        mask_BT = torch.nn.functional.pad(common_BT, (0, mask_BT.shape[1] - width))
    trainer = _rms((trainer_BT - before.trainer_BT)[mask_BT])
    noise = _rms((before.batch.old_logprobs_BT - before.trainer_BT)[before.batch.mask_BT])
    return trainer, engine, noise


def _packed(prompt_ids: Sequence[int], answers: Sequence[Generation]) -> TokenBatch:
    """The answers as rows, made as those of every episode are."""
    prompt, task = Segment.prompt(prompt_ids), TaskView(id="probe", instruction="probe")
    episodes = list[Episode]()
    for index, one in enumerate(answers):
        sampled = Segment.sampled(one.ids, one.logprobs, one.version, one.finish)
        branch = Trajectory((prompt, sampled)).routed(one.per_token.get("routing"))
        key, end = EpisodeKey("probe", 0, "probe", index), EndReason.ANSWERED
        episodes.append(Episode(key, "probe", task, "", (), end, Score(0.0), (branch,)))
    return pack([Group(tuple(episodes))], pad_id=0)


def _scores(model: Any, batch: TokenBatch, temperature: float) -> Tensor:
    """Log-probabilities as updates compute them, without dropout."""
    was_training = model.training
    model.eval()
    try:
        with replayed_routing(model, batch.experts_BTLK):
            said_BT = frozen_logprobs(model, batch.to(model.device), temperature)
        return said_BT.to(batch.mask_BT.device)
    finally:
        model.train(was_training)


def _stale(why: str) -> Disagreement:
    said = f"stale weights: the engine keeps older weights: {why}: load it after every update"
    return Disagreement("stale weights", True, said)


def _rms(values_N: Tensor) -> float:
    return float(values_N.double().square().mean().sqrt())
