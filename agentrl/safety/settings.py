"""The `safety` table of a training run."""

from __future__ import annotations

from pydantic import BaseModel, Field

from agentrl.settings import STRICT


class SafetySettings(BaseModel):
    """What stands around the tool calls of a run, and what side effects cost."""

    model_config = STRICT

    policy: str = ""
    """Shipped name (read-only, work-area, no-irreversible, lockdown), TOML file or file.py:NAME."""
    penalty: float = Field(default=0.0, ge=0, le=1)
    """Taken off the reward of an episode with a side effect; whether it passed stays."""
    at_most: float = Field(default=1.0, ge=0, le=1)
    """Share of episodes with side effects that is allowed; below 1 the penalty is a multiplier
    between 0 and 2 that holds the rate of each round under it; `penalty` is where it begins."""
