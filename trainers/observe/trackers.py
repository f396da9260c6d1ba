"""Where metrics go besides `metrics.jsonl`: TensorBoard, Weights & Biases, Trackio, each by its own
library.

A tracker gets the finite numbers of the same rows; `metrics.jsonl` stays the record of the run.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from agentrl.errors import ConfigError

PROJECT = "agentrl"
TRACKERS = {
    "tensorboard": "torch.utils.tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
}
"""Name of a tracker, and of the package that it needs -> the module that is imported."""


class Tracker(Protocol):
    """Shows metrics somewhere."""

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Take the metrics of one step; steps rise, except where a resumed run repeats some."""
        ...

    def close(self) -> None:
        """Write what is left and end; safe to call twice."""
        ...


class TensorBoard:
    """Event files under `<folder>/tensorboard`; `tensorboard --logdir` over them shows the run."""

    def __init__(self, library: Any, folder: Path, config: Mapping[str, Any]) -> None:
        self._writer = library.SummaryWriter(str(folder / "tensorboard"))
        settings = "\n".join(f"    {name} = {value!r}" for name, value in config.items())
        self._writer.add_text("config", settings, 0)

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Write one scalar per number."""
        for name, value in numbers(row).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class HostedRun:
    """A run of Weights & Biases, or of Trackio, which has the same interface."""

    def __init__(self, library: Any, options: Mapping[str, Any]) -> None:
        self._run: Any = library.init(**options)

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Log the numbers of one step."""
        self._run.log(numbers(row), step=step)

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that cannot be opened, before anything else is.

    Raises:
        ConfigError: a name is unknown, or its library is not installed.
    """
    for name in names:
        if name not in TRACKERS:
            near = get_close_matches(name, TRACKERS, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"there is no tracker {name!r}; did you mean {near!r}? (known:"
                f" {', '.join(TRACKERS)})"
            )
        _import(name)


def open_trackers(names: Sequence[str], folder: Path, config: Mapping[str, Any]) -> list[Tracker]:
    """Open the named trackers; none is left open if one cannot be.

    W&B's `WANDB_MODE` and `WANDB_PROJECT` work as usual. The id of its run is kept in
    `<folder>/wandb-id`, so a resumed run continues its curves. Its steps only rise, so
    repeated rounds keep their first values, with a warning of W&B's own.

    Args:
        names: of `TRACKERS`; a repeated name is opened once.
        folder: of the run; its last part is the run's name.
        config: settings, shown with the curves.

    Raises:
        ConfigError: a name is unknown, or its library is not installed.
    """
    check_trackers(names)
    with ExitStack() as opened:
        trackers = list[Tracker]()
        for name in dict.fromkeys(names):
            trackers.append(_open(name, folder, config))
            opened.callback(trackers[-1].close)
        opened.pop_all()
    return trackers


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a row but its step: what a curve can show."""
    values = {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, int | float) and name != "step"
    }
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _open(name: str, folder: Path, config: Mapping[str, Any]) -> Tracker:
    library = _import(name)
    if name == "tensorboard":
        return TensorBoard(library, folder, config)
    options: dict[str, Any] = {"project": PROJECT, "name": folder.name, "config": dict(config)}
    if name == "trackio":
        return HostedRun(library, options | {"embed": False})
    id_file = folder / "wandb-id"
    if not id_file.exists():
        id_file.write_text(secrets.token_hex(8))
    options |= {"project": os.environ.get("WANDB_PROJECT", PROJECT), "dir": str(folder)}
    return HostedRun(library, options | {"id": id_file.read_text(), "resume": "allow"})


def _import(name: str) -> Any:
    try:
        return import_module(TRACKERS[name])
    except ImportError as error:
        raise ConfigError(
            f"tracker {name!r} needs a library ({error}): pip install {name}"
        ) from error
