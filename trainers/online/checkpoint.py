"""Checkpoints: `checkpoints/step_N/`, complete or not there, with a plain Hugging Face `model/`."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agentrl.errors import ConfigError
from agentrl.records.files import write_json_atomic

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
        """The folder of the adapters, where only those are trained; `model` has them merged in."""
        folder = self.folder / "adapter"
        return folder if folder.is_dir() else None

    @property
    def reference(self) -> Path | None:
        """The folder of the reference, where it is not the model that the run started from."""
        folder = self.folder / "reference"
        return folder if folder.is_dir() else None

    @property
    def critic(self) -> Path | None:
        """The folder of the critic and its optimizer, where the recipe had one."""
        folder = self.folder / "critic"
        return folder if folder.is_dir() else None

    @property
    def state(self) -> dict[str, Any]:
        """What else is needed to go on: "coefficients" of the recipe, and the "source" of tasks."""
        found: dict[str, Any] = json.loads((self.folder / "state.json").read_text())
        return found

    def load_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Restore the optimizer's state and the global random state."""
        state = torch.load(self.folder / "state.pt", weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])


def save(run_dir: Path, step: int, write: Callable[[Path], Mapping[str, Any]]) -> Checkpoint:
    """Write a checkpoint beside its place and move it there, so a crash leaves a whole one or none.

    Args:
        run_dir: the run folder.
        step: the round that begins from it.
        write: puts files into the folder it is given, and returns the rest as JSON values.
    """
    folder = run_dir / "checkpoints" / f"step_{step}"
    draft = folder.with_name(f".step_{step}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    write_json_atomic(draft / "state.json", {"step": step, **write(draft)})
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)
    return Checkpoint(folder, step)


def latest(run_dir: Path) -> Checkpoint | None:
    """The newest complete checkpoint of a run, if there is one.

    Raises:
        ConfigError: its state file is not readable.
    """
    found = checkpoints(run_dir)
    if not found:
        return None
    state = found[-1].folder / "state.json"
    try:
        json.loads(state.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"checkpoint {state} is damaged ({error}): delete its folder and resume again"
        ) from error
    return found[-1]


def checkpoints(run_dir: Path) -> list[Checkpoint]:
    """All complete checkpoints of a run, oldest first."""
    folder = run_dir / "checkpoints"
    names = [_NAME.match(entry.name) for entry in folder.iterdir()] if folder.is_dir() else []
    steps = sorted(int(match[1]) for match in names if match)
    return [Checkpoint(folder / f"step_{step}", step) for step in steps]


def prune(run_dir: Path, keep_last: int) -> None:
    """Delete all checkpoints but the last `keep_last`, and drafts that a crash left."""
    for old in checkpoints(run_dir)[:-keep_last]:
        shutil.rmtree(old.folder)
    for draft in (run_dir / "checkpoints").glob(".step_*"):
        shutil.rmtree(draft, ignore_errors=True)
