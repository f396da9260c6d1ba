"""The process in which math-verify compares answers; it runs as a script, apart from the library.

Standard input has one JSON list `[gold, target, cpu_s]` a line; standard output answers each with
one JSON object, before the next is asked. This process reads nothing: a child forked from it does,
warm from the start. Where a comparison ends the child, its parent answers and forks the next. The
limits are the kernel's, so that no computation in C outlasts them, and they count processor time,
so that a busy machine changes no verdict.
"""

from __future__ import annotations

import ctypes
import json
import logging
import mmap
import os
import resource
import signal
import sys
from importlib import import_module
from itertools import product
from typing import Any

MEMORY_BYTES = 1 << 30
CLOSE = 1e-6
_ENOUGH = 200  # comparisons of one child: what they leave in its memory goes with it
_ENDED, _FULL, _BROKEN = 0, 3, 4
_PR_SET_PDEATHSIG = 1
_USUAL = (
    "\\frac{1}{2}",
    "x^2+2x",
    "(1, 2)",
    "[0,\\infty)",
    "3\\sqrt{2}-i",
    "x = 5",
    "\\text{Mary}",
    "\\pi",
)
"""Compared at the start: children inherit tables and late imports, which halves their work."""


def main() -> None:
    """Fork children until one of them finds that standard input ended."""
    _die_with_parent()
    logging.disable()
    library = import_module("math_verify")
    for first, second in product(_USUAL, repeat=2):
        compare(library, f"\\boxed{{{first}}}", f"\\boxed{{{second}}}")
    busy = mmap.mmap(-1, 1)
    print(json.dumps({"ready": True}), flush=True)
    status = _FULL
    while status != _ENDED:
        child = os.fork()
        if not child:
            _serve(library, busy)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if busy[0]:  # without this, an answer that nobody waits for would be taken for the next one
            busy[0] = 0
            ended = signal.Signals(-status).name if status < 0 else f"exit code {status}"
            print(json.dumps({"ended": ended}), flush=True)
        elif status == _BROKEN:
            return


def compare(library: Any, gold: str, target: str | None) -> dict[str, bool | str]:
    """Whether the gold can be read as mathematics, and, given a target, whether the two are equal.

    `target` in the answer is the text in which the library found the answer.

    The library's own time limits are off: they are signal handlers, which end nothing that runs in
    C.
    """
    golds = library.parse(gold, parsing_timeout=None)
    if target is None or not golds or isinstance(golds[0], str):
        return {"readable": bool(golds) and not isinstance(golds[0], str), "equal": False}
    targets = library.parse(target, parsing_timeout=None)
    equal = bool(library.verify(golds, targets, timeout_seconds=None))
    texts = [item for item in targets if isinstance(item, str)]
    units = (1, 100, 0.01) if "%" in gold + target else (1,)
    equal = equal and any(not _far(golds[0], targets[0], unit) for unit in units)
    return {"readable": True, "equal": equal, "target": texts[-1] if texts else ""}


def _far(gold: Any, target: Any, unit: float) -> bool:
    """Whether two numbers, or numbers in two collections, differ by more than a relative 1e-6.

    The library rounds to six decimals, which makes every small number zero.
    """
    if getattr(gold, "is_number", False) and getattr(target, "is_number", False):
        one, other = _value(gold), _value(target) * unit
        return abs(one - other) > CLOSE * max(abs(one), abs(other))
    parts, others = getattr(gold, "args", ()), getattr(target, "args", ())
    if not parts or len(parts) != len(others):
        return False
    return any(all(_far(part, other, unit) for other in others) for part in parts)


def _value(number: Any) -> complex:
    """The number; `doit` multiplies what the parser left as `50 * 1/100`."""
    return complex(number.doit().evalf(20))


def _serve(library: Any, busy: mmap.mmap) -> None:
    """Answer requests, and leave this process by none but its exit."""
    status = _BROKEN
    try:
        _die_with_parent()
        most = resource.getrlimit(resource.RLIMIT_AS)[1]
        memory = MEMORY_BYTES if most == resource.RLIM_INFINITY else min(MEMORY_BYTES, most)
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for _ in range(_ENOUGH):
            line = sys.stdin.readline()
            if not line:
                status = _ENDED
                return
            gold, target, cpu_s = json.loads(line)
            busy[0] = 1
            signal.setitimer(
                signal.ITIMER_PROF, cpu_s
            )  # nobody handles SIGPROF, so the kernel ends this process
            found = json.dumps(compare(library, gold, target))
            signal.setitimer(signal.ITIMER_PROF, 0)
            busy[0] = 0
            print(found, flush=True)
        status = _FULL
    finally:
        os._exit(status)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
