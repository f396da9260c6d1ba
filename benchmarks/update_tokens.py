"""Tokens per second of one optimizer step on episodes of many turns, against TRL's GRPO trainer.

Ours is the `update` of a training run, theirs `GRPOTrainer.train()` with generation replaced by the
same rows (`benchmarks/parts/update_sides.py`): same model, dtype, loss, optimizer (fused AdamW) and
padded tokens per micro-batch; steps take turns, and both gradients must have the same norm. TRL
runs at its fastest: no gradient checkpointing, no reference model, old log-probabilities not
computed again, its chunked output layer (always on; its Triton form and Hub kernels need a GPU).
Tokens are those of the rows, without padding.
"""

from __future__ import annotations

from benchmarks.parts.update_pairs import Pairs, measure_pairs, utilisation, worst
from benchmarks.parts.update_work import REAL, TINY, describe
from benchmarks.row import Row

PAIRS = 5


def measure(pairs: int = PAIRS) -> Row:
    """The row of the model where we are less far ahead; the notes have both."""
    found = [measure_pairs(work, pairs) for work in (TINY, REAL)]
    least = worst(found, lambda one: -one.speed)
    return Row(
        "update_tokens",
        round(least.tokens_per_s("ours"), 1),
        round(least.tokens_per_s("theirs"), 1),
        round(least.speed, 3),
        "tokens/s",
        pairs,
        "at least 1.5 times as many",
        "; ".join(_told(one) for one in found),
    )


def _told(one: Pairs) -> str:
    ours, theirs = (one.tokens_per_s(side) for side in ("ours", "theirs"))
    return (
        f"{one.work.name} model, vocabulary {one.work.vocabulary}: {ours:.0f} against {theirs:.0f}"
        f" tokens/s, {one.speed:.2f} times; {describe(one.batch)}; {utilisation(one)}"
    )
