"""What both sides of the update rows train on: a model of random weights and episodes of many
turns.

Letters: B rows, T their longest length in tokens, V vocabulary.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

import torch

from agentrl.trainers.batch import TokenBatch, pack
from agentrl.trajectory import Episode, EpisodeKey, Group, Segment, Trajectory
from agentrl.types import EndReason, Score, TaskView

PROMPT, SAMPLED, OBSERVED = 32, 16, 52  # tokens of an opening, a turn, an observation


@dataclass(frozen=True)
class Work:
    """One workload.

    Attributes:
        name: of the model.
        vocabulary, width, layers, heads, inner: a Qwen2 with tied embeddings; `inner` is the size
            of its feed-forward.
        rows: B, episodes of an optimizer step: one group.
        turns: of the longest episode; the others have 2 up to it, evenly spread, unless `equal`.
        equal: every episode has that many turns, so that nobody pads.
        micro_rows: rows of a micro-batch; ours may put more short ones into as many padded tokens.
        checkpointing: gradient checkpointing, on both sides.
        dtype: "float32", or "bfloat16": weights in float32, forward pass under autocast.
    """

    name: str
    vocabulary: int
    width: int
    layers: int
    heads: int
    inner: int
    rows: int
    turns: int
    micro_rows: int
    equal: bool = False
    checkpointing: bool = False
    dtype: str = "float32"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


TINY = Work(
    "1M", vocabulary=4096, width=128, layers=2, heads=4, inner=256, rows=32, turns=8, micro_rows=16
)
REAL = Work(
    "93M",
    vocabulary=151_936,
    width=512,
    layers=4,
    heads=8,
    inner=2048,
    rows=8,
    turns=8,
    micro_rows=4,
)


def qwen2(work: Work) -> Any:
    """The model, in float32, on the accelerator where there is one."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=work.vocabulary,
        hidden_size=work.width,
        num_hidden_layers=work.layers,
        num_attention_heads=work.heads,
        num_key_value_heads=max(1, work.heads // 4),
        intermediate_size=work.inner,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).to("cuda" if torch.cuda.is_available() else "cpu")


def episodes(work: Work) -> TokenBatch:
    """Packed episodes: 75 % of their tokens are prompt and observations; rewards alternate."""
    chance, played = random.Random(0), []
    for sample in range(work.rows):
        turns = work.turns if work.equal else 2 + round((work.turns - 2) * sample / (work.rows - 1))
        segments = [Segment.prompt(draw(chance, work, PROMPT))]
        for turn in range(turns):
            if turn:
                segments.append(Segment.observation(draw(chance, work, OBSERVED)))
            segments.append(
                Segment.sampled(draw(chance, work, SAMPLED), [-1.0] * SAMPLED, 0, "stop")
            )
        played.append(episode(sample, Trajectory(tuple(segments))))
    return pack([Group(tuple(played))], 0)


def draw(chance: random.Random, work: Work, count: int) -> list[int]:
    """Tokens of the workload's vocabulary."""
    return chance.choices(range(5, work.vocabulary), k=count)


def episode(sample: int, trajectory: Trajectory) -> Episode:
    """One that trains; every second one passed."""
    key, view = EpisodeKey("bench", 0, "t", sample), TaskView(id="t", instruction="")
    score = Score(float(sample % 2))
    return Episode(key, "bench-v0", view, "start", (), EndReason.SUBMITTED, score, (trajectory,))


def describe(batch: TokenBatch) -> str:
    """The shape of the rows, in words."""
    tokens, trained = int(batch.attention_BT.sum()), batch.n_tokens
    return (
        f"{len(batch)} rows of {int(batch.lengths_B.min())}–{int(batch.lengths_B.max())} tokens, "
        f"{tokens} in all, {1 - trained / tokens:.0%} prompt and observations"
    )
