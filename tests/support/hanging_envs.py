"""An environment of which one part hangs until a file exists."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from agentrl import EndReason, Limits, Message, Score, Step, Task, ToolEnv, tool


class Hanging(ToolEnv):
    """Hangs in its reset, its answer, its tool or its verifier."""

    id = "hanging-v0"
    limits = Limits(turns=3, turn_tokens=6, episode_tokens=60, wall_s=90, tool_s=80)

    def __init__(self, part: str, gate: str) -> None:
        self.part, self.gate, self.verifier = part, Path(gate), self._judge

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        return (Task(id=f"{split}-{n}", instruction="say", hidden={}) for n in range(40))

    async def _judge(self, submission: object) -> Score:
        await self._hang("verifier")
        return Score(1.0)

    async def setup(self) -> None:
        await self._hang("reset")

    async def on_text(self, message: Message) -> Step:
        await self._hang("answer")
        return Step(end=EndReason.ANSWERED)

    @tool
    async def press(self) -> str:
        """Press the button."""
        await self._hang("tool")
        return "pressed"

    async def _hang(self, part: str) -> None:
        while part == self.part and not self.gate.exists():
            await asyncio.sleep(0.02)
