"""From preferences to a policy: SFT, reward model, best answers, GRPO and DPO on a tiny model.

The stages are those of `rlhf_recipe.toml`, which `agentrl train` runs as well.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from agentrl import Limits, Task, ToolEnv
from agentrl.verifiers import RewardModel

HERE = Path(__file__).parent
load_reward_model = cache(RewardModel.load)


class Answers(ToolEnv):
    """Answer a prompt; a reward model says how well."""

    id = "answers-v0"
    limits = Limits(turns=1, wall_s=60)

    def __init__(self, prompts: str, reward_model: str) -> None:
        self.rows = [json.loads(one)["prompt"] for one in Path(prompts).read_text().splitlines()]
        self.verifier = load_reward_model(reward_model)

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Every tenth prompt is a test."""
        for at, prompt in enumerate(self.rows):
            if (at % 10 == 0) == (split == "test"):
                yield Task(id=f"prompt-{at}", instruction=prompt, threshold=0.5)


def polite(prompt: str, answer: str) -> float:
    """The rule behind the preferences: a polite answer says yes and who asked."""
    return float(answer == f"Yes {prompt.split()[0]}, I will {prompt.split(': ')[1][:-1]}.")


if __name__ == "__main__":
    from agentrl.trainers.models.tiny import build_model, build_tokenizer
    from agentrl.trainers.pipeline import run_offline

    tasks = [f"{verb} the {what}" for verb in ("open", "close", "sell") for what in ("box", "door")]
    rows = []
    for name, task in itertools.product(
        ["Ada", "Bob", "Cat", "Dan", "Eve", "Fay", "Gus", "Hal"], tasks
    ):
        yes, no = f"Yes {name}, I will {task}.", f"No {name}, I will not {task}."
        rows.append({"prompt": f"{name} asks: {task}?", "chosen": yes, "rejected": no})
    random.Random(0).shuffle(rows)
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mixed = [
        {"prompt": r["prompt"], "response": r[k]} for r in rows for k in ("chosen", "rejected")
    ]
    Path("answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mixed))
    texts = [f"<|im_start|>user\n{row[key]}<|im_end|>\n" for row in rows for key in row]
    build_model("base", build_tokenizer(texts, 280, map(chr, range(32, 127))), width=64, context=64)
    places = [f"card.judge={__file__}:polite", f"grpo.env={__file__}:Answers"]
    result = run_offline(HERE / "rlhf_recipe.toml", Path("runs/rlhf"), overrides=places)
    for stage in result["stages"]:
        print(stage["name"], stage["card"].get("judge") or stage["after"]["accuracy"])
