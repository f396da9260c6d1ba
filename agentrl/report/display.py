"""Progress on a terminal: bars with a live pass rate. Everything goes to stderr; results go to
stdout.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

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
from agentrl.report.signs import alarms
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


class TrainingDisplay:
    """The events of a training run on the terminal: a bar that moves with every episode, a line for
    every round, and each alarm once.

    Attributes:
        rows: metrics of the rounds so far, by which alarms are judged.
    """

    def __init__(self, bar: EpisodeBar, steps: int) -> None:
        self._bar, self._steps = bar, steps
        self.rows: list[dict[str, Any]] = []
        self._raised: set[str] = set()

    def say(self, sentence: str) -> None:
        """Print a sentence."""
        console.print(sentence, highlight=False, soft_wrap=True)

    def on_phase(self, label: str, episodes: int) -> None:
        """Restart the bar."""
        self._bar.restart(label, episodes)

    def on_episode(self, episode: Episode) -> None:
        """Move the bar."""
        self._bar.episode(episode)

    def on_round(self, row: Mapping[str, Any]) -> None:
        """Print the round, and alarms that hold for the first time."""
        self.say(describe_round(row, self._steps))
        self.rows.append(dict(row))
        for name, sentence in alarms(self.rows).items():
            if name not in self._raised:
                self._raised.add(name)
                self.on_warning(sentence)

    def on_evaluation(self, summary: Mapping[str, Any]) -> None:
        """Nothing: the line of the round says it."""

    def on_warning(self, sentence: str) -> None:
        """Print a warning."""
        console.print(
            plain(sentence), style="yellow", markup=False, highlight=False, soft_wrap=True
        )


_ROUND_WORDS = {
    "reward/mean": "reward {:.3f}",
    "groups/no_signal": "no signal {:.0%}",
    "refill/episodes": "refilled {:.0f}",
    "refill/thrown_share": "thrown away {:.0%}",
    "value/explained_variance": "explained {:.2f}",
    "policy/entropy": "entropy {:.3f}",
    "policy/kl": "kl {:.4f}",
    "policy/ref_kl": "to the reference {:.3f}",
    "policy/teacher_kl": "to the teacher {:.3f}",
    "length/sampled_mean": "tokens {:.0f}",
    "time/rollout_s": "rollout {:.1f} s",
    "time/update_s": "update {:.1f} s",
    "time/trainer_idle": "trainer idle {:.0%}",
    "staleness/mean": "staleness {:.1f}",
    "staleness/max": "at most {:.0f}",
    "eval/pass_at_1": "[bold]held-out pass@1 {:.3f}[/bold]",
    "eval/failed_infra": "failed by infrastructure {:.0f}",
}


def describe_round(row: Mapping[str, Any], steps: int) -> str:
    """Describe a round in one line."""
    shown = {name: row[name] for name in _ROUND_WORDS if name in row}
    if not shown.get("eval/failed_infra"):
        shown.pop("eval/failed_infra", None)
    if not shown.get("refill/episodes"):
        shown.pop("refill/episodes", None)
        shown.pop("refill/thrown_share", None)  # without refill it repeats the share without signal
    if not shown.get("staleness/max"):  # a synchronous round: rollout and update say it all
        for name in ("time/trainer_idle", "staleness/mean", "staleness/max"):
            shown.pop(name, None)
    words = "  ".join(_ROUND_WORDS[name].format(value) for name, value in shown.items())
    return f"round {row['step']:>{len(str(steps))}}/{steps}  {words}"
