"""What reading common beginnings once saves: the passes of a round's update, as trees and as rows.

`python -m benchmarks.experiments.shared_prompts` writes a section of docs/experiments.md: a round
of 24 groups of 8 episodes on random tokens, in four optimizer steps of whole groups, forward and
backward through a model of the demo's size. Both ways alternate in one process; seconds are
processor time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import torch

from agentrl.trainers.batch import TokenBatch, pack
from agentrl.trainers.models import scoring
from agentrl.trainers.models.scoring import token_logprobs
from agentrl.trajectory import Group, Segment, Trajectory
from benchmarks.parts.page import write_section
from benchmarks.parts.update_work import Work, draw, episode, qwen2
from benchmarks.row import machine

GROUPS, EPISODES, STEPS, PAIRS = 24, 8, 4, 3
SHAPES = ((142, 38), (32, 148))
"""Tokens of the prompt, and of the rest of an episode; the first is what the demo has."""
MODEL = Work(
    "0.4M", vocabulary=400, width=128, layers=2, heads=4, inner=512, rows=0, turns=0, micro_rows=0
)


def steps(prompt: int, rest: int) -> list[TokenBatch]:
    """The batches of a round's optimizer steps."""
    chance, batches = random.Random(0), []
    for _ in range(STEPS):
        groups = []
        for _ in range(GROUPS // STEPS):
            opening = Segment.prompt(draw(chance, MODEL, prompt))
            rows = []
            for sample in range(EPISODES):
                said = Segment.sampled(draw(chance, MODEL, rest), [-1.0] * rest, 0, "stop")
                rows.append(episode(sample, Trajectory((opening, said))))
            groups.append(Group(tuple(rows)))
        batches.append(pack(groups, 0))
    return batches


@contextmanager
def _as_rows() -> Iterator[None]:
    asked, scoring.takes_trees = scoring.takes_trees, lambda model: False
    try:
        yield
    finally:
        scoring.takes_trees = asked


def seconds(model: torch.nn.Module, batches: list[TokenBatch]) -> float:
    """Processor time of one round's passes."""
    began = time.process_time()
    for batch in batches:
        token_logprobs(model, batch).logprobs_BT.sum().backward()
        model.zero_grad()
    return time.process_time() - began


def main() -> None:
    """Measure and write."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    model = qwen2(MODEL)
    lines = [
        "| prompt | rest | as rows s | as trees s | times |",
        "| --- | --- | --- | --- | --- |",
    ]
    for prompt, rest in SHAPES:
        batches, trees, rows = steps(prompt, rest), list[float](), list[float]()
        for _ in range(PAIRS + 1):  # the first pair warms up
            trees.append(seconds(model, batches))
            with _as_rows():
                rows.append(seconds(model, batches))
        ours, theirs = median(trees[1:]), median(rows[1:])
        lines.append(f"| {prompt} | {rest} | {theirs:.2f} | {ours:.2f} | {theirs / ours:.2f} |")
        print(lines[-1], flush=True)
    body = (
        f"Written by `python -m benchmarks.experiments.shared_prompts`: {GROUPS} groups of"
        f" {EPISODES} episodes in {STEPS} optimizer steps, forward and backward through a Qwen2 of"
        f" width {MODEL.width} with {MODEL.layers} layers, float32, one thread; tokens of the"
        f" prompt and of the rest of an episode; medians of {PAIRS} pairs. {machine()}.\n\n"
    )
    write_section("Common beginnings read once", body + "\n".join(lines))


if __name__ == "__main__":
    main()
