"""What a policy and the ledger add to one tool call: the same episode with and without them.

A tool that answers at once, `CALLS` calls an episode. With them, each call is judged by the shipped
policy `work-area`, its arguments are looked up in what tools said, and the ledger compares files
and processes of the sandbox at the end; the sandbox's own time, which both have, is not in it. A
second row is the ledger alone, for an episode whose work area has 200 files.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from statistics import median

from agentrl import Limits, Score, TaskView, ToolCall, ToolEnv, tool
from agentrl.calls import Guard
from agentrl.runner import Runner
from agentrl.safety.ledger import Before, side_effects
from agentrl.safety.loading import read_policy
from agentrl.safety.writes import WriteSet
from agentrl.sandboxes import open_pool
from agentrl.specs import GuardSpec
from agentrl.types import Message
from agentrl.verifiers.base import Submission
from benchmarks.row import Row, alone

CALLS, EPISODES, FILES = 20, 60, 200


async def one(submission: Submission) -> Score:
    """The verifier that always says 1."""
    return Score(1.0)


class Notes(ToolEnv):
    """One tool that writes and one that runs commands; neither does anything."""

    id = "notes-v0"
    verifier = one
    limits = Limits(turns=2 * CALLS, tool_calls=2 * CALLS)
    writes = WriteSet(state=("notes/**",))

    @tool(effect="write")
    async def write(self, path: str, text: str) -> str:
        """Write."""
        return "wrote 12 characters to the file"

    @tool(effect="write", shell="command")
    async def run(self, command: str) -> str:
        """Run."""
        return "README.md  src  tests"


def measure() -> list[Row]:
    """Median milliseconds that are added to a call; and those of the ledger of an episode."""
    guard = GuardSpec.of(read_policy("work-area"))
    asyncio.run(_episode(guard))
    pairs = [(asyncio.run(_episode(guard)), asyncio.run(_episode(None))) for _ in range(EPISODES)]
    added = median(guarded - bare for guarded, bare in pairs) * 1e3
    ledger = asyncio.run(_ledger())
    return [
        alone(
            "safety_overhead",
            added,
            "ms",
            EPISODES,
            promise="at most 0.2 ms per call",
            notes=f"policy work-area and ledger, {CALLS} calls, half of them shell commands",
        ),
        alone(
            "safety_ledger",
            ledger * 1e3,
            "ms",
            EPISODES,
            promise="at most 5 ms per episode",
            notes=f"bubblewrap, {FILES} files; the manifest of the start is taken anyway",
        ),
    ]


async def _episode(guard: Callable[[], Guard] | None) -> float:
    """Median seconds of a call."""
    runner = Runner(Notes())
    await runner.reset(
        TaskView(id="t", instruction="Keep my notes."), guard=guard() if guard else None
    )
    seconds = []
    for number in range(CALLS):
        wanted = (
            ToolCall("write", {"path": f"notes/{number}.txt", "text": "some words of a note"})
            if number % 2
            else ToolCall("run", {"command": f"ls -la src && grep -n note_{number} src/*.py"})
        )
        begun = time.perf_counter()
        step = await runner.step(Message.assistant("", wanted))
        seconds.append(time.perf_counter() - begun)
        assert not step.messages[0].content.startswith("error"), step.messages[0].content
    await runner.side_effects()
    return median(seconds)


async def _ledger() -> float:
    """Median seconds for the side effects of an episode."""
    pool = open_pool("bubblewrap", 1)
    seconds = []
    try:
        async with pool.lease("agent") as sandbox:
            await sandbox.put({f"d{n % 10}/f{n}.txt": b"x" * 5000 for n in range(FILES)})
            before = Before(await sandbox.manifest(everywhere=True), {})
            for _ in range(EPISODES):
                begun = time.perf_counter()
                found = await side_effects(before, {}, WriteSet(), sandbox)
                seconds.append(time.perf_counter() - begun)
                assert not found, found
    finally:
        await pool.close()
    return median(seconds)
