"""The run folder: who owns it, what is recorded in it, and where a run continues.

`config.toml`, `metrics.jsonl`, `episodes.jsonl`, `curriculum.jsonl`, `samples/`,
`checkpoints/step_N/`, `best/step_N/`, `report.html`.

A checkpoint and a best model are complete or absent: each is written beside its place and renamed.
A run that was killed continues from its last checkpoint and repeats what came after it. So a better
model replaces the best one only once a later checkpoint exists; until then both are kept, and a
resumed run drops the one that it will repeat.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

from agentrl.errors import ConfigError
from agentrl.records.files import (
    EpisodeWriter,
    MetricsWriter,
    read_episodes,
    read_metrics,
    set_aside,
    write_json_atomic,
)
from agentrl.trainers.batch import TokenBatch
from agentrl.trainers.config import TrainConfig, check_resumed, write_config
from agentrl.trainers.observe.metrics import prompt_of
from agentrl.trainers.observe.trackers import Tracker, open_trackers
from agentrl.trajectory import Episode, Group

_NAME = re.compile(r"^step_(\d+)$")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: the run continues with round `step`."""

    folder: Path
    step: int

    @property
    def model(self) -> Path:
        """The Hugging Face folder with weights, tokenizer and chat template."""
        return self.folder / "model"

    @property
    def adapter(self) -> Path | None:
        """The folder of the adapters, if only those train; `model` has them merged in."""
        return self._if_present("adapter")

    @property
    def reference(self) -> Path | None:
        """The folder of the reference, if it has moved since the start of the run."""
        return self._if_present("reference")

    @property
    def critic(self) -> Path | None:
        """The folder of the critic and its optimizer, if the recipe has one."""
        return self._if_present("critic")

    @property
    def state(self) -> dict[str, Any]:
        """What else is needed to continue: "coefficients" of the recipe, the "source" of tasks."""
        state: dict[str, Any] = json.loads((self.folder / "state.json").read_text())
        return state

    def load_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Restore the optimizer's state and the global random state."""
        state = torch.load(self.folder / "state.pt", weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])

    def _if_present(self, name: str) -> Path | None:
        folder = self.folder / name
        return folder if folder.is_dir() else None


def checkpoints(run_dir: Path) -> list[Checkpoint]:
    """List all complete checkpoints of a run, oldest first."""
    folder = run_dir / "checkpoints"
    names = [_NAME.match(entry.name) for entry in folder.iterdir()] if folder.is_dir() else []
    steps = sorted(int(match[1]) for match in names if match)
    return [Checkpoint(folder / f"step_{step}", step) for step in steps]


def latest_checkpoint(run_dir: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint of a run, if there is one.

    Raises:
        ConfigError: its state file is damaged.
    """
    complete = checkpoints(run_dir)
    if not complete:
        return None
    state = complete[-1].folder / "state.json"
    try:
        json.loads(state.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"checkpoint {state} is damaged ({error}): delete its folder and resume again"
        ) from error
    return complete[-1]


def save_checkpoint(
    run_dir: Path, step: int, write: Callable[[Path], Mapping[str, Any]]
) -> Checkpoint:
    """Write the checkpoint from which round `step` begins.

    Args:
        run_dir: the run folder.
        step: the round.
        write: puts files into the folder it is given and returns the rest as JSON values.
    """
    folder = run_dir / "checkpoints" / f"step_{step}"
    with _complete_or_absent(folder) as draft:
        write_json_atomic(draft / "state.json", {"step": step, **write(draft)})
    return Checkpoint(folder, step)


def prune_checkpoints(run_dir: Path, keep_last: int) -> None:
    """Delete all checkpoints except the last `keep_last`, and drafts that a crash left."""
    for checkpoint in checkpoints(run_dir)[:-keep_last]:
        shutil.rmtree(checkpoint.folder)
    _delete_drafts(run_dir / "checkpoints")


class BestModel(NamedTuple):
    """A model that was the best so far when it was evaluated."""

    folder: Path
    step: int
    pass_at_1: float

    @property
    def model(self) -> Path:
        """The Hugging Face folder."""
        return self.folder / "model"


def best_model(run_dir: Path) -> BestModel | None:
    """Return the best model that a run has kept; among equals the first."""
    kept = _kept_models(run_dir)
    return max(kept, key=lambda model: (model.pass_at_1, -model.step), default=None)


def offer_model(
    run_dir: Path, step: int, metrics: Mapping[str, float], write: Callable[[Path], object]
) -> None:
    """Keep the model after `step` rounds unless a kept one is as good.

    Args:
        run_dir: the run folder.
        step: number of rounds that the model has trained for.
        metrics: of its evaluation; without pass@1 nothing is kept.
        write: puts the model into the folder it is given.
    """
    score, best = metrics.get("eval/pass_at_1"), best_model(run_dir)
    if score is None or (best is not None and best.pass_at_1 >= score):
        return
    row = {name: value for name, value in metrics.items() if name.startswith("eval/")}
    with _complete_or_absent(run_dir / "best" / f"step_{step}") as draft:
        write(draft)
        write_json_atomic(draft / "best.json", {"step": step, "pass_at_1": score, **row})


def keep_only_best(run_dir: Path) -> None:
    """Delete models that are no longer the best, and drafts; call it after a checkpoint."""
    best = best_model(run_dir)
    for model in _kept_models(run_dir):
        if model != best:
            shutil.rmtree(model.folder)
    _delete_drafts(run_dir / "best")


def drop_models_after(run_dir: Path, start: int) -> None:
    """Delete models of rounds that a run which continues from round `start` plays again."""
    for model in _kept_models(run_dir):
        if model.step > start or start == 0:
            shutil.rmtree(model.folder)


def _kept_models(run_dir: Path) -> list[BestModel]:
    files = sorted((run_dir / "best").glob("step_*/best.json"))
    rows = {file.parent: json.loads(file.read_text()) for file in files}
    return [BestModel(folder, row["step"], row["pass_at_1"]) for folder, row in rows.items()]


@contextmanager
def _complete_or_absent(folder: Path) -> Iterator[Path]:
    """Yield a draft that replaces the folder at the end; a crash leaves only the draft."""
    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    yield draft
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)


def _delete_drafts(folder: Path) -> None:
    for draft in folder.glob(".step_*"):
        shutil.rmtree(draft, ignore_errors=True)


class RunFolder:
    """One run's folder. Nothing is written before `open`.

    Args:
        path: the folder.
        config: the run's settings.
        resume: continue from the last checkpoint (from the start if there is none).

    Attributes:
        checkpoint: where the run continues; None: at its start.
        start: the first round that is still to be played.
        changed: setting -> (old, new) of those that a resumed run changes.

    Raises:
        ConfigError: the folder holds another run; nothing in it is touched.
    """

    def __init__(self, path: Path, config: TrainConfig, *, resume: bool = False) -> None:
        begun = [file for file in path.glob("*.jsonl") if file.stat().st_size]
        if (begun or latest_checkpoint(path)) and not resume:
            raise ConfigError(
                f"{path} holds a run already: continue it with --resume, or choose another --out"
            )
        self.path, self._config = path, config
        self.changed = check_resumed(config, path / "config.toml") if resume else {}
        self.checkpoint = latest_checkpoint(path) if resume else None
        self.start = self.checkpoint.step if self.checkpoint else 0
        self._parts = ExitStack()
        self._trackers: list[Tracker] = []

    def open(self, config: TrainConfig) -> None:
        """Begin to record; rows of rounds that are played again are set aside.

        Args:
            config: the settings, with those filled in that were left to be detected.
        """
        self._config = config
        self.path.mkdir(parents=True, exist_ok=True)
        for name in ("metrics", "episodes", "curriculum", "samples/top", "samples/random"):
            set_aside(self.path / f"{name}.jsonl", self._is_played_again)
        drop_models_after(self.path, self.start)
        records_experts = config.engine.routing == "record"
        self._episodes = self._parts.enter_context(
            EpisodeWriter(self.path / "episodes.jsonl", experts=records_experts)
        )
        self._metrics = self._parts.enter_context(MetricsWriter(self.path / "metrics.jsonl"))
        self._samples = {
            kind: self._parts.enter_context(EpisodeWriter(self.path / "samples" / f"{kind}.jsonl"))
            for kind in ("top", "random")
        }
        write_config(self._config, self.path / "config.toml")

    def record(self, episode: Episode) -> None:
        """Append one line to `episodes.jsonl`."""
        self._episodes.write(episode)

    def log(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Append one line to `metrics.jsonl`, pass it to the trackers, and return it."""
        row = {"step": step, **metrics}
        self._metrics.write(row)
        for tracker in self._trackers:
            tracker.log(step, row)
        return row

    def put_aside(self, samples: Mapping[str, Sequence[Episode]]) -> None:
        """Append episodes for people to read to `samples/top.jsonl` and `samples/random.jsonl`."""
        for kind, episodes in samples.items():
            for episode in episodes:
                self._samples[kind].write(episode)

    def played_prompts(self) -> set[str]:
        """Return fingerprints of the prompts that were played before this part of the run."""
        if not self.start:
            return set()
        episodes = read_episodes(self.path / "episodes.jsonl")
        return {
            prompt_of(Group((episode,)))
            for key, episode in episodes.items()
            if key.phase == "train" and not key.draw and key.step < self.start
        }

    def note_choice(self, row: Mapping[str, Any]) -> None:
        """Append one line to `curriculum.jsonl`: which tasks a round chose and what it changed."""
        with MetricsWriter(self.path / "curriculum.jsonl") as writer:
            writer.write(row)

    def track(self, names: Sequence[str]) -> None:
        """Log metrics to these trackers as well.

        Raises:
            ConfigError: there is no such tracker, or its library is not installed.
        """
        self._trackers = open_trackers(names, self.path, self._config.model_dump(mode="json"))
        for tracker in self._trackers:
            self._parts.callback(tracker.close)

    def save(self, step: int, write: Callable[[Path], Mapping[str, Any]]) -> None:
        """Write the checkpoint from which round `step` begins, and drop old ones."""
        save_checkpoint(self.path, step, write)
        prune_checkpoints(self.path, self._config.keep_last)
        keep_only_best(self.path)

    def keep(self, batch: TokenBatch, step: int) -> Path:
        """Store a batch for people to look at."""
        path = self.path / f"broken_batch_{step}.pt"
        torch.save({field.name: getattr(batch, field.name) for field in fields(batch)}, path)
        return path

    def history(self) -> list[dict[str, Any]]:
        """Return all metrics recorded so far, one row per round."""
        return read_metrics(self.path / "metrics.jsonl")

    def close(self) -> None:
        """Close files and trackers; safe to call twice."""
        self._parts.close()

    def _is_played_again(self, row: Mapping[str, Any]) -> bool:
        """Whether a recorded row belongs to a round after the checkpoint."""
        # A row of metrics and an evaluation carry the number of rounds before them.
        key = row.get("key", {"phase": "eval", "round": row.get("step")})
        number: int = key["round"] if "round" in key else key["step"]  # as old records call it
        rounds = number if key["phase"] == "eval" else number + 1
        return self.start == 0 or rounds > self.start
