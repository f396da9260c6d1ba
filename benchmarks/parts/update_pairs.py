"""Both sides of the update rows, a process each, steps in turns."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from agentrl.trainers.batch import TokenBatch
from benchmarks.parts.update_sides import SIDES
from benchmarks.parts.update_work import Work, episodes
from benchmarks.row import Absent

SAME = 1e-3


@dataclass(frozen=True)
class Pairs:
    """What was measured of one workload: per step and side, {"seconds", "bytes", "grad_norm"}."""

    work: Work
    steps: dict[str, list[dict[str, float]]]

    @property
    def batch(self) -> TokenBatch:
        return episodes(self.work)

    def median(self, side: str, what: str) -> float:
        return median(step[what] for step in self.steps[side])

    def tokens_per_s(self, side: str) -> float:
        """Tokens of the rows, padding not counted, per second."""
        return float(self.batch.attention_BT.sum()) / self.median(side, "seconds")

    @property
    def speed(self) -> float:
        """Median over pairs of how many times faster ours is."""
        return self._ratio("seconds", "theirs", "ours")

    @property
    def memory(self) -> float:
        """Median over pairs of our peak over theirs."""
        return self._ratio("bytes", "ours", "theirs")

    def _ratio(self, what: str, above: str, below: str) -> float:
        return median(
            a[what] / b[what] for a, b in zip(self.steps[above], self.steps[below], strict=True)
        )


def measure_pairs(work: Work, count: int) -> Pairs:
    """So many steps of each side in turns, after one that warms up.

    Raises:
        Absent: TRL is not installed.
        RuntimeError: a side died, or the two gradients differ: then they do not do the same work.
    """
    try:
        import trl  # noqa: F401
    except ImportError:
        raise Absent("TRL is missing: pip install 'agentrl[train]'") from None
    steps: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    with ExitStack() as stack:
        workers = {side: stack.enter_context(_Worker(side, work)) for side in SIDES}
        for number in range(count + 1):
            taken = {side: worker.step() for side, worker in workers.items()}
            ours, theirs = (taken[side]["grad_norm"] for side in ("ours", "theirs"))
            if not abs(ours - theirs) <= SAME * abs(theirs):
                raise RuntimeError(
                    f"{work}: gradient norms {ours} and {theirs} differ: the sides do different"
                    " work"
                )
            if number:
                for side, step in taken.items():
                    steps[side].append(step)
    return Pairs(work, steps)


class _Worker:
    """A process that does a step when told to."""

    def __init__(self, side: str, work: Work) -> None:
        command = [
            sys.executable,
            "-m",
            "benchmarks.parts.update_sides",
            side,
            json.dumps(work.as_json()),
        ]
        self.name = f"{side} on {work.name}"
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:  # closes the pipes
            self.process.stdin.close()  # type: ignore[union-attr]
            self.process.wait(60)

    def step(self) -> dict[str, float]:
        """What one step took."""
        print("go", file=self.process.stdin, flush=True)
        for line in self.process.stdout or ():
            if line.startswith('{"seconds"'):
                found: dict[str, float] = json.loads(line)
                return found
        raise RuntimeError(f"{self.name} died: see what it said above")


def needed_flops(work: Work, batch: TokenBatch) -> float:
    """Floating-point operations that a step cannot do without: 6 per weight and token in the
    backbone, 6 per weight of the output layer and trained token, and causal attention; what is
    recomputed or padded does not count."""
    lengths = batch.lengths_B.double()
    kv = work.width // work.heads * max(1, work.heads // 4)
    layer = 2 * work.width * (work.width + kv) + 3 * work.width * work.inner
    attention = 6 * work.layers * work.width * float(lengths.square().sum())
    return float(
        6 * work.layers * layer * float(lengths.sum())
        + 6 * work.vocabulary * work.width * batch.n_tokens
        + attention
    )


def ceiling_flops(dtype: torch.dtype, size: int = 4096) -> float:
    """Floating-point operations per second of a large square matrix product on this device: the
    ceiling of an MFU.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = size if device == "cuda" else size // 2
    a = torch.randn(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(8):
        started = time.perf_counter()
        a @ a
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def utilisation(pairs: Pairs) -> str:
    """MFU of both sides and the ceiling it is measured against, in words."""
    dtype = getattr(torch, pairs.work.dtype)
    ceiling, needed = ceiling_flops(dtype), needed_flops(pairs.work, pairs.batch)
    shares = {side: needed / pairs.median(side, "seconds") / ceiling for side in SIDES}
    return (
        f"MFU ours {shares['ours']:.0%}, theirs {shares['theirs']:.0%} of {ceiling / 1e12:.2g}"
        f" TFLOP/s (a {pairs.work.dtype} matrix product on this device)"
    )


def worst(found: Sequence[Pairs], what: Any) -> Pairs:
    """The workload that speaks least for us."""
    return max(found, key=what)
