"""bugfix-v0: repair the one wrong line of a small documented Python file; hidden tests judge the file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from agentrl.env import ToolEnv
from agentrl.envs.bugfix.generate import Knobs, generate
from agentrl.tools import tool
from agentrl.types import Limits, Message, Task, ToolCall
from agentrl.verifiers.hidden_tests import hidden_tests


class BugFix(ToolEnv):
    """Find the line that breaks its docstring, write it anew, submit.

    Args:
        knobs: fields of `agentrl.envs.bugfix.generate.Knobs`: how hard the programs are.
    """

    id: ClassVar[str] = "bugfix-v0"
    verifier = hidden_tests()
    limits = Limits(turns=8, tool_calls=12, bad_calls=1, wall_s=60, tool_s=10)
    needs_sandbox = True
    endless = True

    def __init__(self, **knobs: Any) -> None:
        self.knobs = Knobs(
            **{name: tuple(value) if isinstance(value, list) else value for name, value in knobs.items()}
        )

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Endless programs; no program of one split, renamed or not, is in the other."""
        for made in generate(seed, split, self.knobs):  # type: ignore[arg-type]
            yield made.to_task()

    def oracle_actions(self, task: Task) -> Iterable[Message]:
        """Read the file, write the one line anew, submit."""
        edit = {"line": task.oracle["line"], "text": task.oracle["text"]}
        for name, arguments in (("read_file", {"path": "solution.py"}), ("edit_line", edit), ("submit", {})):
            yield Message.assistant("", ToolCall(name, arguments))

    @tool
    async def list_files(self) -> str:
        """List the files of the work area."""
        return "\n".join(info.path for info in await self.sandbox.manifest() if info.kind == "file")

    @tool
    async def read_file(self, path: str) -> str:
        """Show a file with its line numbers."""
        lines = (await self._read(path)).splitlines()
        return "\n".join(f"{number} {line}" for number, line in enumerate(lines, 1))

    @tool(effect="write")
    async def edit_line(self, line: int, text: str) -> str:
        """Replace one line of solution.py.

        Args:
            line: its number, from 1.
            text: the whole new line, with its indentation.
        """
        lines = (await self._read("solution.py")).splitlines()
        if not 1 <= line <= len(lines):
            raise ValueError(f"line must be from 1 to {len(lines)}")
        lines[line - 1] = text
        await self.sandbox.put({"solution.py": ("\n".join(lines) + "\n").encode()})
        return "ok"

    @tool
    async def run_tests(self) -> str:
        """Run the visible tests and show the first failure."""
        result = await self.sandbox.exec(
            ["/usr/bin/python3", "-B", "test_solution.py"], timeout_s=self.limits.tool_s - 1
        )
        if result.timed_out:
            return "FAIL: timed out"
        return (result.stdout + result.stderr).decode(errors="replace").strip().rpartition("\n")[2]

    @tool
    def submit(self) -> str:
        """Hand in solution.py; this ends the episode."""
        self.finish()
        return "submitted"

    async def _read(self, path: str) -> str:
        found = await self.sandbox.get([path])
        if path not in found:
            raise FileNotFoundError(path)
        return found[path].decode(errors="replace")
