"""Process reward models on calc-v0: are labels right, and does a model learn them?

`python -m benchmarks.experiments.process_rewards [--folder DIR] [--tasks 96]` makes what is missing
in the folder and prints the figures of docs/experiments.md: four episodes of each task are
labelled. An interrupted run resumes. `turn_credit` measures whether credit by turns helps.

A turn of calc-v0 is right if the calculator said the next value that the expression needs, after
turns that were right; an answer is right if it is the answer. The task says all of these values.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from agentrl.evaluation.label import LABELS, LabelPlan, label_turns
from agentrl.evaluation.regrade import RegradePlan, recorded_tasks
from agentrl.evaluation.run import EvalPlan, evaluate
from agentrl.records.files import read_episodes, read_plain_rows
from agentrl.registry import factory
from agentrl.trainers.demo import DemoPlan, prepare_demo
from agentrl.trainers.offline.process_reward import area_under
from agentrl.trainers.offline.settings import StageSettings
from agentrl.trainers.offline.stage import RESULT, run_stage
from agentrl.types import Message, Task
from agentrl.verifiers import ProcessRewardModel
from agentrl.verifiers.answers.text import last_number

KNOBS: dict[str, Any] = {"operations": 3, "largest": 20}
POLICY_STEPS, COMPLETER_STEPS = 76, 150
"""Of supervised training: a policy that solves a third, and one that solves most."""
TEST_TASKS, SAMPLES, COMPLETIONS = 64, 4, 8


def right_turns(task: Task, messages: Sequence[Message], opening: int) -> list[bool]:
    """Of each turn, whether it is right."""
    assert task.oracle is not None
    said = [
        answer.content if answer is not None and answer.role == "tool" else message.content
        for message, answer in itertools.zip_longest(messages[opening:], messages[opening + 1 :])
        if message.role == "assistant"
    ]
    called = [bool(m.tool_calls) for m in messages[opening:] if m.role == "assistant"]
    wanted = iter([str(value) for value in values_of(task)])
    found, sound = [], True
    for text, is_call in zip(said, called, strict=True):
        sound = (sound and text == next(wanted, None)) if is_call else _is_answer(task, text)
        found.append(sound)
    return found


def values_of(task: Task) -> Iterator[int]:
    """What the calculator says to each call of the reference."""
    assert task.oracle is not None
    for call in task.oracle["calls"]:
        left, sign, right = (call["arguments"][name] for name in ("left", "operation", "right"))
        yield {"+": left + right, "-": left - right, "*": left * right}[sign]


def _is_answer(task: Task, text: str) -> bool:
    return last_number(text) == task.hidden["answer"]


def prepare(folder: Path, train_tasks: int) -> str:
    """A policy and its completer, of one tokenizer, and episodes of the policy; the completer."""
    made = []
    for name, steps in (("policy", POLICY_STEPS), ("completer", COMPLETER_STEPS)):
        place = folder / name / "warm_start"
        if not (place / "model.safetensors").exists():
            plan = DemoPlan(
                env="calc-v0", knobs=tuple(KNOBS.items()), demonstrations=1024, vocab_size=300,
                width=96, context=384, sft_steps=steps, sft_more=6,
                sft_band=(0.3 if name == "policy" else 0.8, 1.0),
            )  # fmt: skip
            prepare_demo(plan, 0, "auto", folder / name)
        made.append(str(place))
    for split, tasks in {"train": train_tasks, "test": TEST_TASKS}.items():
        make = factory("calc-v0", **KNOBS)
        plan_of = EvalPlan(
            make, f"hf:{made[0]}", split, tasks, SAMPLES, out=folder / f"play-{split}"
        )
        evaluate(plan_of)
    return made[1]


def exact(run: Path) -> Mapping[Any, list[bool]]:
    """Key of each episode of a run -> whether its turns are right."""
    episodes = list(read_episodes(run / "episodes.jsonl").values())
    _, _, found = recorded_tasks(RegradePlan(run), episodes)
    opening = {one.key: _first(one.messages) for one in episodes}
    return {
        one.key: right_turns(found[one.task.id][0], one.messages, opening[one.key])
        for one in episodes
    }


def _first(messages: Sequence[Message]) -> int:
    return next(at for at, one in enumerate(messages) if one.role == "assistant")


def agreement(labels: Path, run: Path) -> dict[str, Any]:
    """Share of the labelled turns whose label says what is so: hard (any completion passed) and
    soft (at least half did).
    """
    truth, counts = exact(run), {"turns": 0, "hard": 0, "soft": 0, "right": 0}
    for row in read_plain_rows(labels):
        key = type(next(iter(truth)))(*row["key"])
        for value, right in zip(row["labels"], truth[key], strict=True):
            if value is not None:
                counts["turns"] += 1
                counts["right"] += right
                counts["hard"] += (value > 0) == right
                counts["soft"] += (value >= 0.5) == right
    shares = {name: counts[name] / counts["turns"] for name in ("hard", "soft", "right")}
    return {**shares, "turns": counts["turns"]}


async def _chances(model: ProcessRewardModel, run: Path) -> list[tuple[float, bool]]:
    truth, found = exact(run), []
    for one in read_episodes(run / "episodes.jsonl").values():
        chances = await model.chances(one.messages, _first(one.messages))
        found += list(zip(chances, truth[one.key], strict=True))
    return found


def ranking(model: str, run: Path) -> dict[str, Any]:
    """How well a model ranks right turns above wrong ones, on episodes that it never saw."""
    pairs = asyncio.run(_chances(ProcessRewardModel.load(model), run))
    chance_S, right_S = torch.tensor(pairs, dtype=torch.float64).T
    return {"auc": area_under(right_S, chance_S), "turns": len(pairs)}


def learn(place: Path, start: str, labels: Path, kind: str) -> str:
    """Train a model on "hard" or "soft" labels; returns its folder."""
    row = {
        "stage": "process_reward", "model": start, "epochs": 6, "learning_rate": 1e-3,
        "batch_size": 16, "process": {"labels": kind},
        "data": {"files": [str(labels)], "held_out": 0.1},
    }  # fmt: skip
    going = (place / "config.toml").exists() and not (place / RESULT).exists()
    found = run_stage(StageSettings.model_validate(row), place, resume=going or place.exists())
    print("process_reward:", {k: found["after"][k] for k in ("auc", "loss", "calibration")})
    return str(found["model"])


def main() -> None:
    """Make what is missing, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/process_rewards"))
    parser.add_argument("--tasks", type=int, default=96)
    given = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    folder = given.folder
    completer = prepare(folder, given.tasks)
    plan = LabelPlan(folder / "play-train", f"hf:{completer}", folder / "labels", COMPLETIONS)
    print("labels:", label_turns(plan))
    print("agreement:", agreement(folder / "labels" / LABELS, folder / "play-train"))
    judge = learn(folder / f"prm-{given.tasks}", completer, plan.out / LABELS, "hard")
    print("ranking:", ranking(judge, folder / "play-test"))


if __name__ == "__main__":
    main()
