"""Progress on a terminal: bars with a live pass rate. Everything goes to stderr; results go to
stdout.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from agentrl.records.plain import plain
from agentrl.trajectory import Episode

console = Console(stderr=True)


class EpisodeBar:
    """Counts finished episodes; may be told from any thread."""

    def __init__(self, progress: Progress, label: str) -> None:
        self._progress = progress
        self._task = progress.add_task(label, total=None, rate="")
        self._lock = threading.Lock()
        self._label = label
        self.restart(label)

    def restart(self, label: str, total: int | None = None) -> None:
        """Begin counting anew."""
        with self._lock:
            self._passed = self._scored = self._failed = 0
            self._progress.reset(self._task, total=total, description=plain(label), rate="")

    def episode(self, episode: Episode) -> None:
        """One more."""
        with self._lock:
            self._failed += episode.passed is None
            self._scored += episode.passed is not None
            self._passed += episode.passed is True
            rate = f"pass {self._passed / self._scored:.3f}" if self._scored else ""
            if self._failed:
                rate += f"  [red]{self._failed} failed by infrastructure[/red]"
            self._progress.update(self._task, advance=1, rate=rate)


@contextmanager
def _progress(*more: ProgressColumn, quiet: bool = False) -> Iterator[Progress]:
    """What all bars look like; silent with `quiet` or when stderr is no terminal."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        *more,
    )
    with Progress(
        *columns, console=console, disable=quiet or not console.is_terminal, transient=True
    ) as progress:
        yield progress


@contextmanager
def episode_bar(label: str, *, quiet: bool = False) -> Iterator[EpisodeBar]:
    """A bar for as long as the block lasts; silent with `quiet` or when stderr is no terminal."""
    with _progress(TextColumn("{task.fields[rate]}"), quiet=quiet) as progress:
        yield EpisodeBar(progress, label)


@contextmanager
def step_bar(label: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar over named steps; call it with the name of each before it begins.

    Where stderr is no terminal, each step is a line there.
    """
    with _progress() as progress:
        bar = progress.add_task(label, total=total, completed=-1)
        begun = itertools.count(1)

        def step(name: str) -> None:
            if not console.is_terminal:
                print(plain(f"{label}: {next(begun)} of {total}, {name}"), file=sys.stderr)
            progress.update(bar, advance=1, description=plain(f"{label} · {name}"))

        yield step


@contextmanager
def count_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for as long as the block lasts; call it with how many are done, and of how many."""
    with _progress() as progress:
        bar = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)
