"""From preferences to a policy: the stages of a recipe on a tiny model, by default those of
`rlhf_recipe.toml`. Argument: another recipe, as `examples/ppo_rlhf.toml`. Writes into the folder
that it is run in, and wants one without a folder `run`.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path


def polite(prompt: str, answer: str) -> float:
    """The rule behind the preferences: say yes."""
    return float(answer.startswith("Yes "))


if __name__ == "__main__":
    from agentrl.errors import UserError
    from agentrl.trainers.models.tiny import build_model, build_tokenizer
    from agentrl.trainers.pipeline import run_offline

    rows = []
    for name, do, what in itertools.product(["Ada", "Bob", "Cat", "Dan"], "abcd", "xyz"):
        yes, no = f"Yes {name}, I will {do} {what}.", f"Well {name}, I will {do} {what}."
        rows.append({"prompt": f"{name} asks: {do} {what}?", "chosen": yes, "rejected": no})
    random.Random(0).shuffle(rows)
    mixed = [
        {"prompt": r["prompt"], "response": r[k]} for r in rows for k in ("chosen", "rejected")
    ]
    for path, table in (("pairs.jsonl", rows), ("answers.jsonl", mixed)):
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in table))
    texts = [f"<|im_start|>user\n{text}<|im_end|>\n" for row in rows for text in row.values()]
    build_model("base", build_tokenizer(texts, 280, map(chr, range(32, 127))), width=64, context=96)
    recipe = Path(sys.argv[1] if sys.argv[1:] else Path(__file__).with_name("rlhf_recipe.toml"))
    try:
        found = run_offline(recipe, Path("run"), overrides=[f"card.judge={__file__}:polite"])
    except UserError as error:
        sys.exit(f"{error} (this script: run it in another folder)")
    for stage in found["stages"]:
        print(stage["name"], stage["card"].get("judge") or stage["after"]["accuracy"])
