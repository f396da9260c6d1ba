"""Whole episodes: scripted policy, 6 tool calls, hidden tests in a clean grader, 8 at a time,
through `Rollouts`.

Episodes per second, in turns: ours through Docker, ours through bubblewrap, and theirs: the same
    environment, script,
verifier and `Rollouts`, whose sandboxes are plain containers worked by `exec_run`, a fresh one for
each episode and a fresh one for each grading (`benchmarks/parts/docker_exec.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any

from agentrl import Limits, Message, Task, ToolCall, ToolEnv, tool
from agentrl.policies.base import Scripted
from agentrl.rollout.play import Setting
from agentrl.rollout.rollouts import Rollouts
from agentrl.sandboxes import open_pool
from agentrl.verifiers.code.hidden_tests import hidden_tests
from benchmarks.parts.docker_exec import PlainPool
from benchmarks.parts.measuring import has, need
from benchmarks.row import Row

ROUNDS, SLOTS = 5, 8
EPISODES = {"docker": 80, "bubblewrap": 80, "theirs": 24}
WRONG, RIGHT = "return a - b", "return a + b"


class Repair(ToolEnv):
    """Look around, mend a line, look again."""

    id = "repair-v0"
    verifier = hidden_tests()
    limits = Limits(turns=8, tool_calls=8, wall_s=300)
    needs_sandbox = True

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Endless tasks, each with a file of its own text."""
        number = seed
        while True:
            text = f"# number {number}\ndef add(a, b):\n    {WRONG}\n"
            yield Task(
                id=f"repair-{number}",
                instruction="Repair solution.py.",
                files={
                    "solution.py": text,
                    "notes/README.md": f"Add two numbers: task {number}.\n",
                },
                hidden={
                    "entry_point": "add",
                    "cases": [{"args": [one, 3], "expected": one + 3} for one in range(5)],
                },
                artifacts=("solution.py",),
            )
            number += 1

    @tool(effect="write")
    async def shell(self, command: str) -> str:
        """Run a command."""
        done = await self.sandbox.exec(["sh", "-c", command])
        return done.stdout.decode(errors="replace")


COMMANDS = (
    "ls -R",
    "cat notes/README.md",
    "cat solution.py",
    "grep -n return solution.py",
    f"sed -i 's/{WRONG}/{RIGHT}/' solution.py",
    "cat solution.py",
)


def script(task: Task) -> Iterable[Message]:
    """One call per turn."""
    return (Message.assistant("", ToolCall("shell", {"command": command})) for command in COMMANDS)


def measure(rounds: int = ROUNDS, share: float = 1.0) -> Sequence[Row]:
    need("docker")
    kinds = [kind for kind in EPISODES if kind == "theirs" or has(kind)]
    pools: dict[str, Any] = {
        k: PlainPool(SLOTS) if k == "theirs" else open_pool(k, SLOTS) for k in kinds
    }
    players = {
        k: Rollouts(Setting(Repair, Scripted("script", script), pool), concurrency=SLOTS)
        for k, pool in pools.items()
    }
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    supply, step = Repair().tasks("train", 0), 0
    try:
        for kind in kinds:
            play(players[kind], supply, SLOTS, step)
        for _ in range(rounds):
            for kind in kinds:
                step += 1
                rates[kind].append(
                    play(players[kind], supply, max(SLOTS, int(EPISODES[kind] * share)), step)
                )
    finally:
        for player in players.values():
            player.close()
    return [_row(kind, rates) for kind in kinds if kind != "theirs"]


def _row(kind: str, rates: dict[str, list[float]]) -> Row:
    name = "episodes" if kind == "docker" else f"episodes_{kind}"
    ours, theirs = median(rates[kind]), median(rates["theirs"])
    notes = (
        f"{SLOTS} slots, {len(COMMANDS)} calls; a round is {EPISODES[kind]} episodes, of theirs"
        f" {EPISODES['theirs']}"
    )
    promise = "at least 10 times as many" if kind == "docker" else ""
    ratio = round(ours / theirs, 2)
    return Row(
        name,
        round(ours, 3),
        round(theirs, 3),
        ratio,
        "episodes/s",
        len(rates[kind]),
        promise,
        notes,
    )


def play(rollouts: Rollouts, supply: Iterator[Task], count: int, step: int) -> float:
    """Episodes per second of one dispatch."""
    tasks = [next(supply) for _ in range(count)]
    started = time.perf_counter()
    groups = rollouts.gather(tasks, step)
    elapsed = time.perf_counter() - started
    for group in groups:
        for episode in group.episodes:
            assert episode.passed and episode.counts.turns >= len(COMMANDS), episode
    return count / elapsed
