"""A critic that every token matters to, its settings, and batches with values and returns."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from trainer_cases import tiny_model

from agentrl.trainers.config import CriticSettings

STEADY = CriticSettings(learning_rate=3e-3, epochs=2, value_clip=0.5)


def opinionated(dtype=torch.float64, seed=0):
    """A critic whose head and backbone are random, so that every token matters to it."""
    from transformers import AutoModelForTokenClassification

    torch.manual_seed(seed)
    config = tiny_model().config
    config.num_labels = 1
    return AutoModelForTokenClassification.from_config(config).to(dtype).eval()


def learned(batch, seed=0, spread=1.0):
    """The batch with values and returns that differ from token to token; NaN wherever nothing was
    sampled.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = [
        spread * torch.randn(batch.mask_BT.shape, generator=generator, dtype=torch.float64)
        for _ in range(2)
    ]
    values_BT, returns_BT = (torch.where(batch.mask_BT, one, math.nan) for one in drawn)
    return replace(batch, values_BT=values_BT, returns_BT=returns_BT)
