"""Who waits for whom in a run: the chain from the trainer to the part that holds everything up."""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.waits import FOLDER, REPORT_S

SILENT_S = 10 * REPORT_S
"""A process that has not reported for this long is stopped, or its disk is full."""


@dataclass(frozen=True)
class WaitLink:
    """One link of the chain.

    Attributes:
        owner: who waits.
        what: what for.
        seconds: for how long.
        left_s: seconds until something ends the wait; None for no such limit.
    """

    owner: str
    what: str
    seconds: float
    left_s: float | None = None

    def in_words(self) -> str:
        """The link as a clause."""
        limit = "" if self.left_s is None else f" (ended in {max(0.0, self.left_s):.0f} s)"
        return f"{self.owner} waits {self.seconds:.0f} s for {self.what}{limit}"


@dataclass(frozen=True)
class Chain:
    """What holds up a run.

    Attributes:
        links: from the trainer to the culprit.
        problem: a process that is gone or silent; empty if all report.
        others: what the other episodes wait for -> how many do.
    """

    links: Sequence[WaitLink]
    problem: str = ""
    others: Mapping[str, int] | None = None

    def in_words(self) -> str:
        """The chain in one line."""
        parts = [link.in_words() for link in self.links]
        return " · ".join([*parts, *([self.problem] if self.problem else [])])


def explain_waits(run: Path) -> Chain:
    """The chain of waits of a run that is under way.

    Raises:
        ConfigError: no process of the run reports.
    """
    folder = run / FOLDER
    reports = {path.stem: _read(path) for path in sorted(folder.glob("*.json"))}
    if "trainer" not in reports:
        raise ConfigError(
            f"no process of {run} reports: `agentrl why` is for a training run that is under way",
            setting="run",
        )
    now = time.time()
    trainer = reports["trainer"]
    links = _links(trainer, now)[-1:]
    if problem := _problem(trainer, now):
        return Chain(links, problem)
    rollouts = reports.get("rollouts", trainer)
    episodes = _innermost([row for row in rollouts["waits"] if row["owner"]["phase"]])
    wanted = [row for row in episodes if _is_wanted(row, trainer)] or episodes
    counts = Counter(row["what"] for row in episodes) + Counter(rollouts["others"])
    waits_for_episodes = bool(links) and "episodes" in links[-1].what
    if waits_for_episodes and wanted:
        oldest = min(wanted, key=lambda row: float(row["since"]))
        links = [*links, _link(oldest, now)]
        counts[oldest["what"]] -= 1
        links += _links_of_engine(rollouts, oldest, now)
    return Chain(links, _problem(rollouts, now), {what: n for what, n in counts.items() if n})


def _innermost(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The wait of each owner that began last: it is inside of the others."""
    newest: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: float(row["since"])):
        newest[json.dumps(row["owner"])] = row
    return list(newest.values())


def _is_wanted(row: Mapping[str, Any], trainer: Mapping[str, Any]) -> bool:
    """Whether the trainer waits for this episode's round."""
    own = [w["owner"] for w in trainer["waits"] if w["owner"]["name"] == "trainer"]
    return bool(own) and own[-1]["round"] == row["owner"]["round"]


def _links_of_engine(
    rollouts: Mapping[str, Any], oldest: Mapping[str, Any], now: float
) -> list[WaitLink]:
    """What the engine itself waits for, where an episode waits for it."""
    if "engine" not in oldest["what"]:
        return []
    own = [row for row in rollouts["waits"] if row["owner"]["name"] == "engine"]
    return [_link(row, now) for row in own[:1]]


def _links(report: Mapping[str, Any], now: float) -> list[WaitLink]:
    return [_link(row, now) for row in report["waits"] if row["owner"]["name"] == "trainer"]


def _link(row: Mapping[str, Any], now: float) -> WaitLink:
    seconds = now - float(row["since"])
    limit = row["deadline_s"]
    return WaitLink(
        row["owner"]["name"], row["what"], seconds, None if limit is None else limit - seconds
    )


def _problem(report: Mapping[str, Any], now: float) -> str:
    name = f"the {report['role']} process (pid {report['pid']})"
    silent_s = now - float(report["time"])
    if report["host"] == socket.gethostname() and not _is_alive(int(report["pid"])):
        return f"{name} is dead since at most {silent_s:.0f} s: run the command with --resume"
    if silent_s > SILENT_S:
        return f"{name} has not reported for {silent_s:.0f} s: it is stopped, or its disk is full"
    return ""


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _read(path: Path) -> dict[str, Any]:
    try:
        row: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): try again", setting="run") from None
    return row
