"""bugfix-v0: repair the one wrong line of a small documented Python file; hidden tests judge the
file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any, ClassVar

from agentrl.env import ToolEnv
from agentrl.envs.bugfix.generate import Knobs, generate
from agentrl.errors import ConfigError
from agentrl.safety.writes import WriteSet
from agentrl.tools import tool
from agentrl.types import Limits, Message, Task, ToolCall
from agentrl.verifiers import hidden_tests, if_submitted, remembered
from agentrl.verifiers.code.hidden_tests import met_a_limit

FILE = "solution.py"
_TOKEN = re.compile(r"\w+|//|[<>=!]=|[^\s\w]")


class BugFix(ToolEnv):
    """Find the line that breaks its docstring, mend it, submit.

    Only submitted work is judged. Otherwise a malformed last call would cost nothing, and training
    would soon produce them.

    Args:
        knobs: fields of `agentrl.envs.bugfix.generate.Knobs`: how hard the programs are.
    """

    id: ClassVar[str] = "bugfix-v0"
    verifier = if_submitted(remembered(hidden_tests(), unless=met_a_limit))
    limits = Limits(turns=8, tool_calls=12, bad_calls=1, turn_tokens=128, wall_s=60, tool_s=10)
    needs_sandbox = True
    untrusted = True
    endless = True
    writes = WriteSet(files=(FILE,))

    def __init__(self, **knobs: Any) -> None:
        known = [field.name for field in fields(Knobs)]
        unknown = [name for name in knobs if name not in known]
        if unknown:
            raise ConfigError(
                f"bugfix-v0 does not take setting {unknown[0]!r}: its settings are"
                f" {', '.join(known)}"
            )
        chosen = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in knobs.items()
        }
        self.knobs = Knobs(**chosen)  # type: ignore[arg-type]

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Endless programs; no program of one split, renamed or not, is in the other."""
        for made in generate(seed, split, self.knobs):  # type: ignore[arg-type]
            yield made.to_task()

    def oracle_actions(self, task: Task) -> Iterable[Message]:
        """Read the file, change what is wrong in the one line, submit."""
        line = task.oracle["line"]
        old, new = smallest_edit(task.files[FILE].splitlines()[line - 1], task.oracle["text"])
        edit = {"line": line, "old": old, "new": new}
        for name, arguments in (("read_file", {"path": FILE}), ("edit", edit), ("submit", {})):
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
    async def edit(self, line: int, old: str, new: str) -> str:
        """Replace a piece of text in one line of solution.py.

        Args:
            line: its number, from 1.
            old: the text to replace; it must stand in the line exactly once.
            new: what to put in its place.
        """
        lines = (await self._read(FILE)).splitlines()
        if not 1 <= line <= len(lines):
            raise ValueError(f"line must be from 1 to {len(lines)}")
        if lines[line - 1].count(old) != 1:
            raise ValueError(f"old must stand in line {line} exactly once")
        lines[line - 1] = lines[line - 1].replace(old, new)
        await self.sandbox.put({FILE: ("\n".join(lines) + "\n").encode()})
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


def smallest_edit(broken: str, fixed: str) -> tuple[str, str]:
    """The shortest whole-token replacement (old, new) between two lines; `old` occurs once."""
    old, new = (
        [(match.start(), match.end()) for match in _TOKEN.finditer(line)]
        for line in (broken, fixed)
    )
    same = [broken[slice(*a)] == fixed[slice(*b)] for a, b in zip(old, new, strict=False)]
    behind = [
        broken[slice(*a)] == fixed[slice(*b)]
        for a, b in zip(reversed(old), reversed(new), strict=False)
    ]
    start = same.index(False) if False in same else len(same)
    tail = min(
        behind.index(False) if False in behind else len(behind), min(len(old), len(new)) - start
    )
    stop_old, stop_new = len(old) - tail, len(new) - tail
    while True:
        if start < min(stop_old, stop_new):
            before = broken[old[start][0] : old[stop_old - 1][1]]
            if broken.count(before) == 1:
                return before, fixed[new[start][0] : new[stop_new - 1][1]]
        if start > 0:
            start -= 1
        elif stop_old < len(old):
            stop_old, stop_new = stop_old + 1, stop_new + 1
        else:
            return broken, fixed
