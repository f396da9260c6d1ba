"""`from agentrl import ToolEnv, tool, Task` in a fresh interpreter, beyond what the bare
interpreter takes.
"""

from __future__ import annotations

import subprocess
import sys
import time
from statistics import median

from benchmarks.row import Row, alone

ROUNDS = 21


def measure() -> Row:
    """Both commands in turn, so that a busy moment of the machine meets both."""
    code = "from agentrl import ToolEnv, tool, Task"
    _seconds(code)
    pairs = [(_seconds("pass"), _seconds(code)) for _ in range(ROUNDS)]
    bare, ours = (median(values) for values in zip(*pairs, strict=True))
    notes = f"bare interpreter {bare:.3f} s, with the import {ours:.3f} s"
    return alone("import_time", ours - bare, "s", ROUNDS, promise="at most 0.3 s", notes=notes)


def _seconds(code: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - started
