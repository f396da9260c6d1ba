"""The process in which math-verify compares answers; it runs as a script, apart from the library.

Standard input has one JSON list `[gold, target, cpu_s]` a line; standard output answers each with one JSON object. Each
comparison is a child of its own, forked from this warm process: what an answer does to memory, caches or the clock ends
with it. The limits are the kernel's, so that no computation in C outlasts them, and they count processor time, so that
a busy machine changes no verdict.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import resource
import signal
import sys
from importlib import import_module
from itertools import product
from typing import Any

MEMORY_BYTES = 1 << 30
_PR_SET_PDEATHSIG = 1
_USUAL = ("\\frac{1}{2}", "x^2+2x", "(1, 2)", "[0,\\infty)", "3\\sqrt{2}-i", "x = 5", "\\text{Mary}", "\\pi")
"""Compared at the start: children inherit the parser's tables and what is imported late, which halves their work."""


def main() -> None:
    """Answer requests until standard input ends."""
    _die_with_parent()
    logging.disable()
    library = import_module("math_verify")
    for first, second in product(_USUAL, repeat=2):
        compare(library, f"\\boxed{{{first}}}", f"\\boxed{{{second}}}")
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(library, *json.loads(line))), flush=True)


def compare(library: Any, gold: str, target: str | None) -> dict[str, bool]:
    """Whether the gold can be read as mathematics, and, given a target, whether the two are equal.

    The library's own time limits are off: they are signal handlers, which end nothing that runs in C.
    """
    golds = library.parse(gold, parsing_timeout=None)
    if target is None or not golds or isinstance(golds[0], str):
        return {"readable": bool(golds) and not isinstance(golds[0], str), "equal": False}
    targets = library.parse(target, parsing_timeout=None)
    return {"readable": True, "equal": bool(library.verify(golds, targets, timeout_seconds=None))}


def _answer(library: Any, gold: str, target: str | None, cpu_s: float) -> dict[str, Any]:
    """What a child finds, or how it ended."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        _be_child(writing, cpu_s, library, gold, target)
    os.close(writing)
    with open(reading, "rb") as stream:
        found = stream.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        return {"ended": signal.Signals(-status).name}
    with contextlib.suppress(ValueError):
        return dict(json.loads(found))
    return {"ended": f"exit code {status}"}


def _be_child(writing: int, cpu_s: float, library: Any, gold: str, target: str | None) -> None:
    try:
        _die_with_parent()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # nobody handles SIGPROF, so the kernel ends this process
        os.write(writing, json.dumps(compare(library, gold, target)).encode())
    finally:
        os._exit(0)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
