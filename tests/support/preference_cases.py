"""A tiny model, planted preferences, and rows of random tokens with observations between turns."""

from __future__ import annotations

import itertools
import json
import random
import string
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from agentrl.cli.app import main
from agentrl.trainers.models.tiny import build_model, build_tokenizer
from agentrl.trainers.offline.rows import PairRow, TokenRow

NAMES = "Ada Bob Cat Dan Eve Fay Gus Hal Ivy Jon"
TASKS = [f"{verb} the {what}" for verb in ("open", "close", "sell") for what in ("box", "door")]
JUDGE = """
def polite(prompt, answer):
    return float(answer.startswith("Yes "))
"""


def app(*words: str | Path) -> int:
    """The program in this process; returns its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["agentrl", *map(str, words)])
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def planted_pairs() -> list[dict[str, Any]]:
    """Sixty prompts with an answer that says yes, preferred, and one that says no."""
    rows = []
    for name, task in itertools.product(NAMES.split(), TASKS):
        yes, no = f"Yes {name}, I will {task}.", f"No {name}, I will not {task}."
        rows.append({"prompt": f"{name} asks: {task}?", "chosen": yes, "rejected": no})
    random.Random(0).shuffle(rows)
    return rows


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    """A JSONL file; returns its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@lru_cache
def tiny_policy(context: int = 128) -> str:
    """The folder of an untrained model whose tokenizer knows the planted words."""
    texts = [f"<|im_start|>user\n{row[key]}<|im_end|>\n" for row in planted_pairs() for key in row]
    tokenizer = build_tokenizer(texts, 280, string.printable)
    folder = Path(mkdtemp(prefix="agentrl-tiny-")) / "base"
    return str(build_model(folder, tokenizer, width=32, layers=1, context=context))


def random_row(rng: random.Random, vocab: int = 90) -> TokenRow:
    """Prompt, turn, observation, turn, and sometimes an observation at the end."""
    ids: list[int] = []
    mask: list[int] = []
    for own, longest in ((0, 5), (1, 6), (0, 7), (1, 6), (0, rng.choice([0, 3]))):
        size = rng.randint(1, longest) if longest else 0
        ids += [rng.randrange(vocab) for _ in range(size)]
        mask += [own] * size
    return TokenRow(tuple(ids), tuple(mask))


def random_pairs(count: int, seed: int = 0) -> list[PairRow]:
    """Pairs of such rows."""
    rng = random.Random(seed)
    return [PairRow(random_row(rng), random_row(rng)) for _ in range(count)]


def random_labels(count: int, seed: int = 0) -> list[TokenRow]:
    """Labelled rows of both kinds."""
    rng = random.Random(seed)
    return [labelled(random_row(rng), at % 2 == 0) for at in range(count)]


def labelled(row: TokenRow, desirable: bool) -> TokenRow:
    """The row as KTO takes it."""
    return replace(row, targets=(float(desirable),))
