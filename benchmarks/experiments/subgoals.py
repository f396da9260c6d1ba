"""An environment of three steps, each with a reward of its own: for credit by turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from agentrl.envs.calc import Calculator
from agentrl.verifiers import numeric, with_process_rewards
from agentrl.verifiers.base import Submission
from agentrl.verifiers.process import Turn


async def steps_done(submission: Submission, turns: tuple[Turn, ...]) -> Sequence[float]:
    """A third for each turn that makes the next of the three calculations."""
    left = list(submission.task.oracle["calls"])
    rewards = []
    for turn in turns:
        made = [
            {"name": call.name, "arguments": dict(call.arguments)} for call in turn.said.tool_calls
        ]
        is_next = bool(left) and left[0] in made
        if is_next:
            left.pop(0)
        rewards.append(1 / 3 if is_next else 0.0)
    return rewards


class Subgoals(Calculator):
    """An expression of three operations on small numbers, worked out one at a time."""

    id: ClassVar[str] = "subgoals-v0"
    verifier = with_process_rewards(numeric(), {"step": steps_done})

    def __init__(self) -> None:
        super().__init__(operations=3, largest=20)
