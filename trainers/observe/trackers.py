"""Where metrics go beside `metrics.jsonl`: TensorBoard, Weights & Biases, Trackio, each by its own
library.

A tracker gets the same rows as `metrics.jsonl`, their finite numbers only; that file stays the
record of the run.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from agentrl.errors import ConfigError

PROJECT = "agentrl"


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

    library = ("torch.utils.tensorboard", "tensorboard")

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        library = _library(*self.library)
        self._writer = library.SummaryWriter(str(folder / "tensorboard"))
        self._writer.add_text(
            "config", "\n".join(f"    {name} = {value!r}" for name, value in config.items()), 0
        )

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Write one scalar per number."""
        for name, value in numbers(row).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WandB:
    """A run of Weights & Biases, named after the run folder; `WANDB_MODE` and `WANDB_PROJECT` hold
    as usual.

    The run's id is kept in `<folder>/wandb-id`, so a resumed run goes on with its curves. Steps
    only rise there: what is played again is left as it was, with a warning of W&B's own.
    """

    library = ("wandb", "wandb")

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        library = _library(*self.library)
        self._run: Any = library.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            dir=str(folder),
            config=dict(config),
            id=_kept(folder / "wandb-id"),
            resume="allow",
        )

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Log the numbers of one step."""
        self._run.log(numbers(row), step=step)

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None


class Trackio:
    """A run of Trackio (local, the interface of W&B), named after the run folder."""

    library = ("trackio", "trackio")

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        library = _library(*self.library)
        self._run: Any = library.init(
            project=PROJECT, name=folder.name, config=dict(config), embed=False
        )

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Log the numbers of one step."""
        self._run.log(numbers(row), step=step)

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None


TRACKERS: dict[str, type[TensorBoard | WandB | Trackio]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
}


def check_trackers(names: Sequence[str]) -> None:
    """Refuse what cannot be opened, before anything else is.

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
        _library(*TRACKERS[name].library)


def open_trackers(names: Sequence[str], folder: Path, config: Mapping[str, Any]) -> list[Tracker]:
    """Open the named trackers; none is left open when one cannot be.

    Args:
        names: of `TRACKERS`; a name that stands twice is opened once.
        folder: of the run; its last part is the run's name.
        config: settings, shown beside the curves.

    Raises:
        ConfigError: a name is unknown, or its library is not installed.
    """
    check_trackers(names)
    opened: list[Tracker] = []
    try:
        for name in dict.fromkeys(names):
            opened.append(TRACKERS[name](folder, config))
    except BaseException:
        for tracker in opened:
            tracker.close()
        raise
    return opened


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row but its step: what a curve can show."""
    found = {
        name: value
        for name, value in row.items()
        if isinstance(value, int | float) and name != "step"
    }
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}


def _library(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"tracker {package!r} needs a library ({error}): pip install {package}"
        ) from error


def _kept(file: Path) -> str:
    """The name that the file holds; a new one at first."""
    if not file.exists():
        file.write_text(secrets.token_hex(8))
    return file.read_text()
