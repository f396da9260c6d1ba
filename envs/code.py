"""code-v0: programming tasks from a task file; hidden tests judge the declared files."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

from agentrl.env import ToolEnv
from agentrl.errors import ConfigError
from agentrl.records.taskfile import read_tasks
from agentrl.safety.writes import WriteSet
from agentrl.tools import tool
from agentrl.types import Limits, Message, Task, ToolCall
from agentrl.verifiers import Verifier, hidden_tests, remembered
from agentrl.verifiers.code.hidden_tests import met_a_limit

_SHIPPED = Path(__file__).parent / "data" / "code_sample.jsonl"


class Code(ToolEnv):
    """Write the files that a task asks for; try them out in the sandbox; submit.

    Args:
        tasks_file: JSON lines, one task each (docs/verifiers.md); default: a few shipped ones.
        held_out: share of the tasks in the split "test", chosen by a hash of their content; 0 puts
            every task in both splits.
    """

    id: ClassVar[str] = "code-v0"
    system = "Solve the task by writing the file it names. Try your code, then submit."
    verifier: Verifier = remembered(hidden_tests(), unless=met_a_limit)
    limits = Limits(turns=16, tool_calls=32, wall_s=120, tool_s=20)
    needs_sandbox = True
    untrusted = True
    screened = True

    def __init__(self, tasks_file: str = "", held_out: float = 0.0) -> None:
        self.tasks_file = Path(tasks_file) if tasks_file else _SHIPPED
        self.held_out = held_out
        self.one_split = held_out == 0
        if not 0 <= held_out < 1:
            raise ConfigError(f"code-v0: held_out={held_out} must be at least 0 and below 1")

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """The file's tasks in an order that the seed fixes (seed 0: the order of the file)."""
        if split not in ("train", "test"):
            raise ConfigError(f"code-v0: split={split!r} must be 'train' or 'test'")
        chosen = [task for task in _load(self.tasks_file) if self._is_in(split, task)]
        if seed:
            random.Random(seed).shuffle(chosen)
        yield from chosen

    async def setup(self) -> None:
        """The files of the solution may change; whatever else does is a side effect."""
        self.writes = WriteSet(files=self.task.artifacts)

    def oracle_actions(self, task: Task) -> Iterable[Message]:
        """Write every file of the reference solution, then submit."""
        for path, text in task.oracle["files"].items():
            yield Message.assistant("", ToolCall("write_file", {"path": path, "text": text}))
        yield Message.assistant("", ToolCall("submit", {}))

    @tool
    async def list_files(self) -> str:
        """List the files of the work area."""
        files = [info for info in await self.sandbox.manifest() if info.kind == "file"]
        return "\n".join(f"{info.path} ({info.size} bytes)" for info in files)

    @tool
    async def read_file(self, path: str) -> str:
        """Show a text file of the work area."""
        found = await self.sandbox.get([path])
        if path not in found:
            raise FileNotFoundError(path)
        return found[path].decode(errors="replace")

    @tool(effect="write")
    async def write_file(self, path: str, text: str) -> str:
        """Create or replace a text file of the work area."""
        await self.sandbox.put({path: text.encode()})
        return f"wrote {len(text)} characters to {path}"

    @tool(effect="write")
    async def run_python(self, code: str) -> str:
        """Run Python code in the work area and show what it prints.

        Args:
            code: a program; it may import the files of the work area.
        """
        argv = ["/usr/bin/python3", "-B", "-c", code]
        result = await self.sandbox.exec(argv, timeout_s=self.limits.tool_s - 1)
        ending = "timed out" if result.timed_out else f"exit code {result.exit_code}"
        return f"{(result.stdout + result.stderr).decode(errors='replace')}[{ending}]"

    @tool
    def submit(self) -> str:
        """Hand in the work; this ends the episode."""
        self.finish()
        return "submitted"

    def _is_in(self, split: str, task: Task) -> bool:
        share = int(task.fingerprint(), 16) / 16 ** len(task.fingerprint())
        return self.held_out == 0 or (share < self.held_out) == (split == "test")


@lru_cache(maxsize=8)
def _load(path: Path) -> tuple[Task, ...]:
    return tuple(read_tasks(path))
