"""The `safety` table of a training run."""

from __future__ import annotations

from pydantic import BaseModel, Field

from agentrl.settings import STRICT


class SafetySettings(BaseModel):
    """The policy around the tool calls of a run, and the price of side effects."""

    model_config = STRICT

    policy: str = ""
    """Policy around tool calls: a shipped name (read-only, work-area, no-irreversible, lockdown), a
    TOML file or file.py:NAME."""
    penalty: float = Field(default=0.0, ge=0, le=1)
    """Subtracted from the reward of an episode with a side effect; whether it passed stays."""
    at_most: float = Field(default=1.0, ge=0, le=1)
    """Allowed share of episodes with side effects. Below 1, the price is a multiplier between 0 and
    2 that rises while more episodes have them and falls while fewer do; `penalty` is the start of
    its slow part (1 if unset)."""
