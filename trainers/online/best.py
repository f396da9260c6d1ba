"""The model of the best held-out pass@1: `best/step_N/`, complete or not there.

A run that was killed goes on from its last checkpoint and plays what came after it again. So a
model that is better takes the place of the one before only when a checkpoint has been written
behind both; until then both are there, and a resumed run drops what it will play again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from agentrl.records.files import write_json_atomic


class Best(NamedTuple):
    """A model that was the best so far when it was measured."""

    folder: Path
    step: int
    pass_at_1: float

    @property
    def model(self) -> Path:
        """The Hugging Face folder."""
        return self.folder / "model"


def found(run_dir: Path) -> Best | None:
    """The best model of a run; of equals the first. None: none was kept."""
    return max(_all(run_dir), key=lambda one: (one.pass_at_1, -one.step), default=None)


def offer(
    run_dir: Path, step: int, metrics: Mapping[str, float], write: Callable[[Path], object]
) -> None:
    """Keep the model after `step` rounds if no kept one is as good.

    Args:
        metrics: of its evaluation; where pass@1 is not known, nothing is kept.
        write: puts the model into the folder it is given.
    """
    score, best = metrics.get("eval/pass_at_1"), found(run_dir)
    if score is None or (best is not None and best.pass_at_1 >= score):
        return
    folder = run_dir / "best" / f"step_{step}"
    draft = folder.with_name(f".step_{step}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    write(draft)
    row = {name: value for name, value in metrics.items() if name.startswith("eval/")}
    write_json_atomic(draft / "best.json", {"step": step, "pass_at_1": score, **row})
    draft.rename(folder)


def settle(run_dir: Path) -> None:
    """Drop what is no longer the best, and drafts that a crash left; a checkpoint stands behind
    all that is there.
    """
    best = found(run_dir)
    for one in _all(run_dir):
        if one != best:
            shutil.rmtree(one.folder)
    for draft in (run_dir / "best").glob(".step_*"):
        shutil.rmtree(draft, ignore_errors=True)


def drop_after(run_dir: Path, start: int) -> None:
    """Drop models of rounds that a run which goes on from round `start` plays again."""
    for one in _all(run_dir):
        if one.step > start or start == 0:
            shutil.rmtree(one.folder)


def _all(run_dir: Path) -> list[Best]:
    rows = {file.parent: json.loads(file.read_text()) for file in _files(run_dir)}
    return [Best(folder, row["step"], row["pass_at_1"]) for folder, row in rows.items()]


def _files(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "best").glob("step_*/best.json"))
