"""The run folder: who it belongs to, what is recorded in it, and where a run goes on.

`config.toml`, `metrics.jsonl`, `episodes.jsonl`, `curriculum.jsonl`, `samples/`,
`checkpoints/step_N/`, `best/step_N/`, `report.html`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from agentrl.errors import ConfigError
from agentrl.records.files import EpisodeWriter, MetricsWriter, read_metrics, set_aside
from agentrl.trainers.batch import TokenBatch
from agentrl.trainers.config import TrainConfig, check_resumed, write_config
from agentrl.trainers.observe.trackers import Tracker, open_trackers
from agentrl.trainers.online import best, checkpoint
from agentrl.trajectory import Episode


class RunFolder:
    """One run's folder. Nothing is written before `open`.

    Args:
        path: the folder.
        config: the run's settings.
        resume: go on from the last checkpoint (from the start if there is none).

    Attributes:
        found: the checkpoint that the run goes on from.
        start: the first round that is still to be played.
        changed: setting -> (old, new) of those that a resumed run changes.

    Raises:
        ConfigError: the folder holds another run; nothing in it is touched.
    """

    def __init__(self, path: Path, config: TrainConfig, *, resume: bool = False) -> None:
        begun = [file for file in path.glob("*.jsonl") if file.stat().st_size]
        if (begun or checkpoint.latest(path)) and not resume:
            raise ConfigError(
                f"{path} holds a run already: go on with it by --resume, or choose another --out"
            )
        self.path, self._config = path, config
        self.changed = check_resumed(config, path / "config.toml") if resume else {}
        self.found = checkpoint.latest(path) if resume else None
        self.start = self.found.step if self.found else 0
        self._parts = ExitStack()
        self._trackers: list[Tracker] = []

    def open(self, config: TrainConfig) -> None:
        """Begin to record; rows of rounds that are played again are set aside.

        Args:
            config: the settings, with what they left open found out.
        """
        self._config = config
        self.path.mkdir(parents=True, exist_ok=True)
        for name in ("metrics", "episodes", "curriculum", "samples/top", "samples/random"):
            set_aside(self.path / f"{name}.jsonl", self._is_redone)
        best.drop_after(self.path, self.start)
        writer = EpisodeWriter(
            self.path / "episodes.jsonl", experts=config.engine.routing == "record"
        )
        self._episodes = self._parts.enter_context(writer)
        self._metrics = self._parts.enter_context(MetricsWriter(self.path / "metrics.jsonl"))
        write_config(self._config, self.path / "config.toml")

    def record(self, episode: Episode) -> None:
        """Append one line to `episodes.jsonl`."""
        self._episodes.write(episode)

    def log(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Append one line to `metrics.jsonl` and tell the trackers; returns the row."""
        row = {"step": step, **metrics}
        self._metrics.write(row)
        for tracker in self._trackers:
            tracker.log(step, row)
        return row

    def note(self, row: Mapping[str, Any]) -> None:
        """Append one line to `curriculum.jsonl`: which tasks a round chose, and what it changed."""
        with MetricsWriter(self.path / "curriculum.jsonl") as writer:
            writer.write(row)

    def track(self, names: Sequence[str]) -> None:
        """Log to these as well.

        Raises:
            ConfigError: there is no such tracker, or its library is not installed.
        """
        self._trackers = open_trackers(names, self.path, self._config.model_dump(mode="json"))
        for tracker in self._trackers:
            self._parts.callback(tracker.close)

    def save(self, step: int, write: Callable[[Path], Mapping[str, Any]]) -> None:
        """Write the checkpoint from which round `step` begins, and drop old ones."""
        checkpoint.save(self.path, step, write)
        checkpoint.prune(self.path, self._config.keep_last)
        best.settle(self.path)

    def keep(self, batch: TokenBatch, step: int) -> Path:
        """Put a batch aside for people to look at."""
        path = self.path / f"broken_batch_{step}.pt"
        torch.save({one.name: getattr(batch, one.name) for one in fields(batch)}, path)
        return path

    def history(self) -> list[dict[str, Any]]:
        """All metrics recorded so far, one row per round."""
        return read_metrics(self.path / "metrics.jsonl")

    def close(self) -> None:
        """Close files and trackers; safe to call twice."""
        self._parts.close()

    def _is_redone(self, row: Mapping[str, Any]) -> bool:
        """Whether a recorded row belongs to a round after the checkpoint."""
        # A row of metrics and an evaluation carry the number of rounds before them.
        key = row.get("key", {"phase": "eval", "step": row.get("step")})
        rounds: int = key["step"] if key["phase"] == "eval" else key["step"] + 1
        return self.start == 0 or rounds > self.start
