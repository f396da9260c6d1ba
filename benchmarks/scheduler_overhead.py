"""What the rollout itself costs: 1,000 concurrent episodes of a tool that does nothing, records on.

Wall time over environment steps. One step is one turn: the script's message, the check of the
    call's arguments, the
tool, the observation. Opening, grading and the record of each episode are in the wall time too.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median

from agentrl import Limits, Message, Score, Task, ToolCall, ToolEnv, tool
from agentrl.policies.base import Scripted
from agentrl.records.files import EpisodeWriter, read_episodes
from agentrl.rollout.play import Setting
from agentrl.rollout.rollouts import Rollouts
from agentrl.verifiers.base import Submission
from benchmarks.row import Row, alone

EPISODES, TURNS, ROUNDS = 1000, 10, 5


async def one(submission: Submission) -> Score:
    """The verifier that always says 1."""
    return Score(1.0)


class Null(ToolEnv):
    """Does nothing, `TURNS` times."""

    id = "null-v0"
    verifier = one
    limits = Limits(turns=TURNS, tool_calls=TURNS, wall_s=300)

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Tasks that differ in their id."""
        return (Task(id=f"null-{number}", instruction="Do nothing.") for number in range(EPISODES))

    @tool
    async def nothing(self, turn: int) -> str:
        """Do nothing."""
        return "done"


def script(task: Task) -> Iterable[Message]:
    """A call per turn."""
    return (Message.assistant("", ToolCall("nothing", {"turn": turn})) for turn in range(TURNS))


def measure() -> Row:
    """Median over rounds of milliseconds per environment step."""
    with tempfile.TemporaryDirectory() as folder:
        play(Path(folder) / "warm-up.jsonl")
        values = [play(Path(folder) / f"{number}.jsonl") for number in range(ROUNDS)]
    notes = f"{EPISODES} episodes at a time, {TURNS} steps each"
    return alone(
        "scheduler_overhead",
        median(values),
        "ms",
        ROUNDS,
        promise="at most 0.3 ms per step",
        notes=notes,
    )


def play(records: Path) -> float:
    """Milliseconds per environment step of one dispatch of all episodes."""
    tasks = list(Null().tasks("train", 0))
    with EpisodeWriter(records) as writer:
        setting = Setting(Null, Scripted("null", script))
        rollouts = Rollouts(setting, concurrency=EPISODES, on_episode=writer.write)
        try:
            started = time.perf_counter()
            rollouts.gather(tasks, 0)
            elapsed = time.perf_counter() - started
        finally:
            rollouts.close()
    episodes = read_episodes(records).values()
    steps = sum(episode.counts.turns for episode in episodes)
    assert steps == EPISODES * TURNS and all(episode.passed for episode in episodes), (
        "an episode went wrong"
    )
    return elapsed / steps * 1e3
