"""An environment whose tools take seconds, with a heavy tail: what asynchronous training is for."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections import defaultdict
from collections.abc import Iterator
from typing import ClassVar

from agentrl import EndReason, Limits, Message, Score, Step, Task, ToolEnv
from agentrl.verifiers.base import Submission

TAIL = 1.5
"""Exponent of the Pareto distribution of delays: the mean exists, the variance does not."""
LEAST_S = float(os.environ.get("AGENTRL_BENCH_LEAST_S", "0.1"))
"""Shortest delay; the mean is three times that."""
MOST = 60.0
"""Longest delay, as a multiple of the shortest."""
TURNS = 6


async def has_even_length(submission: Submission) -> Score:
    """1 where the last answer has an even number of characters, which a random model meets."""
    return Score(float(len(submission.answer) % 2 == 0))


class SlowTools(ToolEnv):
    """Every turn waits for a tool. The n-th episode of a task has the same delays in every run."""

    id = "slow-tools-v0"
    verifier = has_even_length
    limits = Limits(turns=TURNS, turn_tokens=16, episode_tokens=400, wall_s=300)
    episodes: ClassVar[defaultdict[str, itertools.count[int]]] = defaultdict(itertools.count)

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Tasks that differ in their id, without end."""
        return (
            Task(id=f"{split}-{number}", instruction="Say something.", hidden={})
            for number in itertools.count()
        )

    async def setup(self) -> None:
        """Draw the delays."""
        name = self.task.id
        chance = random.Random(f"{name}/{next(self.episodes[name])}")
        delays = (min(chance.paretovariate(TAIL), MOST) * LEAST_S for _ in range(TURNS))
        self.delays = list(delays)

    async def on_text(self, message: Message) -> Step:
        """Wait for the tool."""
        await asyncio.sleep(self.delays.pop())
        return Step((Message.user("go on"),)) if self.delays else Step(end=EndReason.ANSWERED)
