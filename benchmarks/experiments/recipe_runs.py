"""Runs that compare recipes: the same warm starts, the same number of sampled episodes.

A run is a folder with `result.json`; what is missing is played, so a comparison can be stopped and
gone on with, and several processes may share a folder.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from agentrl.records.files import read_episodes, write_json_atomic
from agentrl.trainers.algorithms.recipes import recipe
from agentrl.trainers.config import OptimizerSettings, check_config
from agentrl.trainers.demo import DemoPlan, prepare_demo
from agentrl.trainers.loop import TrainingError, train
from agentrl.trainers.run import Run
from agentrl.trajectory import Episode

PLANS = {
    "calc-v0": DemoPlan(
        env="calc-v0",
        knobs=(("operations", 1), ("largest", 99)),
        demonstrations=512,
        vocab_size=300,
        width=96,
        context=256,
        sft_steps=56,
        sft_more=12,  # with 4, two of five starts ended at 0.16
        sft_band=(0.3, 1.0),
        tasks_per_step=16,
        group_size=8,
        practice=128,
        held_out=256,
    ),
    "bugfix-v0": DemoPlan(tasks_per_step=16, group_size=8, held_out=256),
    "subgoals": DemoPlan(
        env=f"{Path(__file__).with_name('subgoals.py')}:Subgoals",
        knobs=(),
        demonstrations=768,
        vocab_size=300,
        width=96,
        context=384,
        sft_steps=110,
        sft_more=8,
        sft_band=(0.15, 1.0),
        tasks_per_step=16,
        group_size=8,
        practice=128,
        held_out=256,
    ),
}
ROUNDS = 40
"""Of a recipe without refill; others play fewer, until they have sampled as many episodes."""
CRITIC = {"learning_rate": 3e-3, "epochs": 4, "warmup": 5}
"""Of the recipes that have one: so small a model learns little at the default rate."""
ABANDONED_S = 3600


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        start: seed of the warm start; all recipes share it.
        seed: of the run.
        rate: learning rate of the policy.
        arm: name of what is changed; empty where the recipe is as it is.
        change: settings on top of those of every run.
    """

    env: str
    recipe: str
    start: int
    seed: int
    rate: float
    arm: str = ""
    change: Mapping[str, Any] = field(default_factory=dict)

    def place(self, folder: Path) -> Path:
        """The folder of the run."""
        name = f"start{self.start}-seed{self.seed}-{self.rate:g}"
        return folder / self.env / (self.arm or self.recipe) / name


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        passed: held-out task -> whether its one sample passed, after the last round; of a run that
            stopped early, when it was last evaluated.
        before: pass@1 of the warm start on the same tasks.
        episodes: sampled in training, those of refills included.
        clipped: share of the rounds whose mean gradient norm was above the bound.
        surprise_passed, surprise_failed: mean -log π of the sampled tokens in the training episodes
            of the last five rounds, an estimate of the entropy per token (nats).
        failed_tokens: sampled tokens of a held-out episode that failed, mean.
        stopped: why it ended early; empty if it did not.
    """

    job: Job
    passed: Mapping[str, bool]
    before: float
    episodes: int
    rounds: int
    clipped: float
    surprise_passed: float | None
    surprise_failed: float | None
    failed_tokens: float | None
    seconds: float
    stopped: str = ""

    @property
    def pass_at_1(self) -> float:
        """Share of the held-out tasks that pass."""
        return fmean(self.passed.values())


def play(folder: Path, job: Job, rounds: int = ROUNDS) -> bool:
    """One run, unless the folder has it or another process is at it; whether the folder has it."""
    place = job.place(folder)
    if (place / "result.json").exists():
        return True
    if (place / "begun").exists():
        if time.time() - (place / "begun").stat().st_mtime < ABANDONED_S:
            return False
        shutil.rmtree(place)
    try:
        place.mkdir(parents=True)
    except FileExistsError:
        return False
    (place / "begun").touch()
    began, stopped = time.monotonic(), ""
    try:
        _to_the_budget(folder, job, place / "run", rounds)
    except TrainingError as error:
        stopped = str(error)
    found = _result(job, place / "run", time.monotonic() - began, stopped)
    write_json_atomic(place / "result.json", asdict(found))
    shutil.rmtree(place / "run" / "checkpoints", ignore_errors=True)
    return True


def results(folder: Path) -> Iterator[Result]:
    """All that is there."""
    for path in sorted(folder.glob("*/*/*/result.json")):
        row = json.loads(path.read_text())
        yield Result(**row | {"job": Job(**row["job"])})


def _to_the_budget(folder: Path, job: Job, run_folder: Path, rounds: int) -> None:
    """Train in pieces, each of which ends on the held-out tasks, until all episodes are sampled."""
    plan = PLANS[job.env]
    size = job.change.get("tasks_per_step", plan.tasks_per_step)
    budget, begun = rounds * size * job.change.get("group_size", plan.group_size), 0
    steps = rounds
    if recipe(job.recipe).refill:
        steps = max(1, int(rounds / 1.5))
    while True:
        config = check_config(_settings(folder, job, steps), "recipes")
        with Run(config, run_folder, resume=begun > 0) as run:
            train(run)
            sampled = _sampled(run.folder.history())
            left = budget - sampled
            if left < sampled / steps / 2:
                return
            begun, steps = steps, steps + max(1, round(left / (sampled / steps)))


def _sampled(rows: list[dict[str, Any]]) -> int:
    return sum(int(row.get("episodes/total", 0) + row.get("refill/episodes", 0)) for row in rows)


def _settings(folder: Path, job: Job, steps: int) -> dict[str, Any]:
    loss: dict[str, Any] = {"critic": CRITIC} if "critic" in recipe(job.recipe).needs else {}
    return {
        **warm_start(folder, job.env, job.start),
        **{"recipe": job.recipe, "loss": loss, "seed": job.seed, "learning_rate": job.rate},
        **{"steps": steps, "save_every": steps, "keep_last": 1, "eval_every": steps},
        "minibatches": 1 if recipe(job.recipe).one_step else 4,
        "schedule": {"warmup": 4},
        "quiet_rounds": steps,  # each run samples as many episodes, and ends on the held-out tasks
        **job.change,
    }


def warm_start(folder: Path, env: str, start: int) -> dict[str, Any]:
    """The settings that all runs from one warm start share; the model is made once."""
    place = folder / env / "warm" / str(start)
    shared = place / "shared.json"
    if not shared.exists():
        config = prepare_demo(PLANS[env], start, "auto", place / "run")
        write_json_atomic(shared, config.model_dump(mode="json"))
    row: dict[str, Any] = json.loads(shared.read_text())
    return row


def _result(job: Job, run_folder: Path, seconds: float, stopped: str) -> Result:
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    episodes = list(read_episodes(run_folder / "episodes.jsonl").values())
    last = max((row["step"] for row in rows), default=0)
    judged = [one for one in episodes if one.key.phase == "eval" and one.passed is not None]
    judged_last = max(one.key.step for one in judged)  # a run that stopped has what it had before
    ended = [one for one in judged if one.key.step == judged_last]
    late = [one for one in episodes if one.key.phase == "train" and one.key.step >= last - 5]
    trained = [row for row in rows if "policy/grad_norm" in row]
    bound = OptimizerSettings().max_grad_norm
    failed = [one.counts.sampled_tokens for one in ended if not one.passed]
    return Result(
        job,
        {one.task.id: bool(one.passed) for one in ended},
        next(row["eval/pass_at_1"] for row in rows if "eval/pass_at_1" in row),
        _sampled(rows),
        last,
        fmean(row["policy/grad_norm"] > bound for row in trained) if trained else 0.0,
        _surprise(late, True),
        _surprise(late, False),
        fmean(failed) if failed else None,
        seconds,
        stopped,
    )


def _surprise(episodes: list[Episode], passed: bool) -> float | None:
    found = [
        -logprob
        for one in episodes
        if one.passed is passed
        for trajectory in one.trajectories
        for segment in trajectory.segments[trajectory.shared :]
        for logprob in segment.logprobs
    ]
    return fmean(found) if found else None
