"""What a run keeps an eye on: that sampler and trainer agree, prompts that came again, and what
people should read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from agentrl.engines.base import Engine, Sampling
from agentrl.records.files import EpisodeWriter, read_episodes
from agentrl.rollout.rollouts import Rollouts
from agentrl.trainers.batch import TokenBatch
from agentrl.trainers.observe.metrics import prompt_of, repeat_metrics, to_read
from agentrl.trainers.observe.parity import (
    Finding,
    Thresholds,
    check,
    check_sampling,
    enforce,
    explain,
)
from agentrl.trainers.observe.probe import Probe
from agentrl.trajectory import Group


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
        self._temperature = sampling.temperature
        self._probe = Probe(prompt_ids, sampling.temperature)
        self._seen: set[str] = set()
        self._said: set[str] = set()

    def open(self, folder: Path, played: Path, step: int, parts: ExitStack) -> None:
        """Open the files for readers, look at the engine for the first time, and remember what was
        played before.
        """
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
        """Ask the probe's prompt after a load: the engine must agree with the trainer, and have
        moved with it.

        Raises:
            ParityError: it has not.
        """
        report = self._probe.read(
            self._model, self._rollouts.run(self._probe.ask(self._engine)), version
        )
        self._warn(report.findings)
        return dict(report.metrics)

    def agree(self, gap: dict[str, float], mini: TokenBatch) -> dict[str, float]:
        """Judge the gap between sampler and trainer before a round's first update; the same gap.

        Raises:
            ParityError: it is too wide; the message says why.
        """
        thresholds = Thresholds.of(self._model)
        wide = not gap.get("parity/gap_mean", 0.0) <= thresholds.warn_gap
        causes = explain(self._model, mini, self._temperature) if wide else ()
        self._warn(check(gap, thresholds, causes))
        return gap

    def effective(self, ratios: dict[str, float]) -> dict[str, float]:
        """Warn where few tokens carry all the weight; the same metrics."""
        self._warn(check(ratios, Thresholds()))
        return ratios

    def noticed(self, groups: Sequence[Group], seed: int) -> dict[str, float]:
        """Put episodes of a round aside for readers; metrics of prompts that came again."""
        metrics = repeat_metrics(groups, self._seen)
        self._seen |= {prompt_of(group) for group in groups}
        for kind, episodes in to_read(groups, seed).items():
            for episode in episodes:
                self._samples[kind].write(episode)
        return metrics

    def _warn(self, findings: Sequence[Finding]) -> None:
        """Raise what stops the run; say the rest, each cause once."""
        for finding in enforce(findings):
            if finding.cause not in self._said:
                self._said.add(finding.cause)
                self._listen("warning", finding.message)
