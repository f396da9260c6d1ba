"""Does the demo learn from the reward? The same run with the rewards of every group shuffled among
its episodes.

`python -m benchmarks.experiments.shuffled_rewards [SEED ...]` prints held-out pass@1 before and
after for each seed. The gain must stay below 0.1: then what the demo gains comes from the reward,
not from the warm
    start or the loop.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from agentrl.errors import TrainingError
from agentrl.trainers.algorithms.advantages import GroupAdvantage, grpo, over_groups
from agentrl.trainers.demo import DemoPlan, prepare_demo
from agentrl.trainers.loop import train
from agentrl.trainers.run import Run


def shuffled(advantage: GroupAdvantage, chance: random.Random) -> GroupAdvantage:
    """The given advantages, of rewards that were dealt to the wrong episodes of the group."""

    def advantages(rewards_G: Sequence[float | None]) -> tuple[float | None, ...]:
        return advantage(chance.sample(list(rewards_G), len(rewards_G)))

    return advantages


def gain(seed: int) -> tuple[float, float]:
    """Held-out pass@1 before and after."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        config = prepare_demo(DemoPlan(), seed, "auto", folder)
        with Run(config, folder) as run:
            run.learner.recipe = replace(
                run.learner.recipe, credit=(over_groups(shuffled(grpo, random.Random(seed))),)
            )
            try:
                train(run)
            except TrainingError as stopped:
                print(f"seed {seed}: {stopped}", file=sys.stderr)
            before = next(
                row["eval/pass_at_1"] for row in run.folder.history() if "eval/pass_at_1" in row
            )
            return before, run.evaluate(config.steps + 1)["eval/pass_at_1"]


if __name__ == "__main__":
    for chosen in map(int, sys.argv[1:] or ("0", "1", "2")):
        before, after = gain(chosen)
        print(
            f"seed {chosen}: {before:.3f} before, {after:.3f} after, gain {after - before:+.3f}",
            flush=True,
        )
