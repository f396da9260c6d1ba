"""Signs that alignment will go wrong, as its rows show them before it trains."""

from __future__ import annotations

import random
from dataclasses import replace

from agentrl.trainers.offline.preference import pair_warnings
from agentrl.trainers.offline.rows import PairRow, TokenRow


def row(rng: random.Random, length: int = 1000) -> TokenRow:
    """Half of the tokens are one of ten, as in text."""
    ids = (rng.randrange(rng.choice((10, 500))) for _ in range(length))
    return TokenRow((1, *ids), (0,) + (1,) * length)


def test_alike_responses_are_named_and_unlike_ones_are_not() -> None:
    rng = random.Random(0)
    unlike = [PairRow(row(rng), row(rng)) for _ in range(200)]
    assert list(pair_warnings(unlike, 0.1)) == []
    alike = [
        PairRow(one.chosen, replace(one.chosen, ids=(*one.chosen.ids[:-1], 501)))
        for one in unlike[:3]
    ]
    (sign,) = pair_warnings(alike, 0.1)
    assert "100% of pairs share over 90% of their tokens" in sign
