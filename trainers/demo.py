"""`agentrl demo`: from nothing to an agent that repairs programs, on two cores, in minutes.

    oracle episodes -> tokenizer and tiny model -> short supervised warm start -> GRPO on hidden
    tests -> report

The model starts low because the warm start is short; every demonstration is a correct one.
"""

from __future__ import annotations

import itertools
import os
import string
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.chat.parsers import format_hermes
from agentrl.engines.base import EngineSettings
from agentrl.engines.factory import open_chat, open_engine
from agentrl.engines.loading import load_model
from agentrl.engines.vllm import refuse_missing
from agentrl.env import ToolEnv
from agentrl.errors import ConfigError, SandboxLost, TrainingError
from agentrl.policies.base import Scripted, TokenPolicy
from agentrl.records.files import write_json_atomic
from agentrl.registry import factory
from agentrl.report.display import console, episode_bar
from agentrl.rollout.play import Setting, derive_seed
from agentrl.rollout.rollouts import Rollouts
from agentrl.runner import pool_for
from agentrl.sandboxes import TRUSTED, open_pool
from agentrl.settings import check
from agentrl.trainers.config import TrainConfig, check_config
from agentrl.trainers.models.optim import MuonAdamW
from agentrl.trainers.models.tiny import build_model, build_tokenizer
from agentrl.trainers.offline.sft import demonstrations, sft
from agentrl.trainers.session import train_with_display
from agentrl.trajectory import Episode
from agentrl.types import Message, Task

_SFT_TRIES = 8
_PRACTISED_AT_ONCE = 64


@dataclass(frozen=True)
class DemoPlan:
    """What the demo does; every number is printed when it starts."""

    env: str = "bugfix-v0"
    knobs: tuple[tuple[str, Any], ...] = (
        ("kinds", ("operator",)),
        ("symbols", ("+", "-", "*")),
        ("names", 8),
        ("function_names", 4),
    )
    demonstrations: int = 512
    vocab_size: int = 400
    width: int = 128
    layers: int = 2
    context: int = 512
    sft_steps: int = 38
    sft_more: int = 6
    sft_band: tuple[float, float] = (0.38, 0.45)
    sft_batch: int = 32
    rounds: int = 36
    tasks_per_step: int = 24
    group_size: int = 8
    learning_rate: float = 4.5e-4
    entropy_coef: float = 0.0
    minibatches: int = 4
    epochs: int = 2
    micro_tokens: int = 32768  # a whole minibatch, whose groups then share their prompts
    practice: int = 192
    held_out: int = 256


def run_demo(
    seed: int = 0,
    sandbox: str = "auto",
    folder: Path = Path("runs/demo-0"),
    plan: DemoPlan | None = None,
    engine: str = "transformers",
) -> dict[str, Any]:
    """Run the whole story and leave a run folder with `report.html`.

    Returns:
        pass@1 on held-out tasks before and after, their intervals, the seconds of each stage, and
        where things are.

    Raises:
        ConfigError: the folder holds an earlier run.
    """
    plan = plan or DemoPlan()
    clock = _Clock()
    settings = check(EngineSettings, {"name": engine}, "demo")
    refuse_missing(settings)
    config = prepare_demo(plan, seed, sandbox, folder, clock.lap)
    config = config.model_copy(update={"engine": settings})
    trained = train_with_display(config, folder)
    clock.lap("training")
    result = _summary(trained, folder, clock, config)
    write_json_atomic(folder / "demo.json", result)
    _say(result)
    return result


def prepare_demo(
    plan: DemoPlan,
    seed: int,
    sandbox: str,
    folder: Path,
    lap: Callable[[str], None] = lambda stage: None,
) -> TrainConfig:
    """Everything before reinforcement learning: demonstrations, tokenizer, model, warm start.

    Returns:
        the settings of the training run, whose `model` is the warm start.

    Raises:
        ConfigError: the folder holds an earlier run.
    """
    if (folder / "metrics.jsonl").exists():
        raise ConfigError(f"run folder {folder} is in use: choose another with --out, or delete it")
    torch.set_flush_denormal(True)
    make = factory(plan.env, **dict(plan.knobs))
    sandbox = _trusting(sandbox)
    threads = torch.get_num_threads()
    console.print(
        f"[bold]agentrl demo[/bold]  {plan.env} {dict(plan.knobs)}  seed {seed}  {threads} threads",
        soft_wrap=True,
    )
    episodes = _oracle_episodes(make, plan, seed, sandbox)
    lap("demonstrations")
    start = _warm_start(episodes, make, plan, seed, folder, sandbox)
    lap("warm_start")
    row = {
        "env": plan.env,
        "env_settings": {name: list(v) if isinstance(v, tuple) else v for name, v in plan.knobs},
        "model": str(start),
        "seed": seed,
        "steps": plan.rounds,
        "tasks_per_step": plan.tasks_per_step,
        "group_size": plan.group_size,
        "sandbox": sandbox,
        "deterministic": True,
        "eval_every": plan.rounds,
        "held_out": {"tasks": plan.held_out},
        "save_every": plan.rounds,
        "recipe": "grpo",
        "loss": {
            "clip_high": 0.28,
            "aggregate": "token",
            "entropy_coef": plan.entropy_coef,
            "filter_groups": True,
            "epochs": plan.epochs,
        },
        "learning_rate": plan.learning_rate,
        "schedule": {"warmup": 4, "final": 0.1},
        "minibatches": plan.minibatches,
        "compute": {"micro_tokens": plan.micro_tokens},
    }
    return check_config(row, "demo")


def _trusting(sandbox: str) -> str:
    """Without an isolating sandbox the demo trusts its programs: all come from its own model."""
    pool = open_pool(sandbox)
    pool.tell()
    return pool.backend.name if pool.backend.is_boundary else TRUSTED


def _oracle_episodes(
    make: Callable[[], ToolEnv], plan: DemoPlan, seed: int, sandbox: str
) -> list[Episode]:
    """Play the reference solutions of training tasks in the sandbox; all of them must pass."""
    env = make()
    tasks = list(
        itertools.islice(
            env.tasks("train", derive_seed(seed, "demonstrations")), plan.demonstrations
        )
    )
    setting = Setting(
        make, Scripted("oracle", env.oracle_actions), pool_for(env, sandbox), "oracle", seed
    )
    with episode_bar("demonstrations") as bar:
        bar.restart("demonstrations", len(tasks))
        rollouts = Rollouts(setting, concurrency=16, on_episode=bar.episode)
        try:
            groups = rollouts.gather(tasks, 0)
        finally:
            rollouts.close()
    return [episode for group in groups for episode in group.episodes]


def _warm_start(
    episodes: list[Episode],
    make: Callable[[], ToolEnv],
    plan: DemoPlan,
    seed: int,
    folder: Path,
    sandbox: str,
) -> Path:
    """Tokenizer, model and a short supervised fine-tuning; returns the model folder."""
    tokenizer = build_tokenizer(_texts(episodes), plan.vocab_size, string.printable)
    shape = {"width": plan.width, "layers": plan.layers, "context": plan.context}
    source = build_model(folder / "warm_start", tokenizer, seed=seed, **shape)
    model, chat = load_model(source), open_chat(source)
    rows = demonstrations(episodes, chat, make().tools)
    console.print(
        f"model: {sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)}"
        f" tokens; warm start: {plan.sft_steps} steps of {plan.sft_batch} out of {len(rows)}"
        " demonstrations",
        soft_wrap=True,
    )
    practised = list(
        itertools.islice(make().tasks("train", derive_seed(seed, "practice")), plan.practice)
    )
    policy = TokenPolicy(open_engine(model, chat), chat)
    rollouts = _practice(policy, make, derive_seed(seed, "practice"), sandbox)

    def measure() -> float:
        rate = _pass_at_1(rollouts, practised)
        console.print(
            f"warm start: pass@1 {rate:.2f} on other training tasks; wanted: {low}–{high}"
        )
        return rate

    low, high = plan.sft_band
    below = weights = _copy_of(model)

    def remember(step: int, loss: float) -> None:
        nonlocal below
        below = _copy_of(model)
        _show_loss(step, loss)

    try:
        for again in range(_SFT_TRIES):
            below = weights
            sft(
                model,
                chat,
                rows,
                steps=plan.sft_more if again else plan.sft_steps,
                batch_size=plan.sft_batch,
                optimizer=MuonAdamW,
                seed=derive_seed(seed, again) % 2**31,
                on_step=remember,
            )
            weights, rate = _copy_of(model), measure()
            if rate >= low:
                break
        else:
            raise TrainingError(
                f"the warm start of {plan.env} ends at pass@1 {rate:.2f} after {_SFT_TRIES} rounds"
                f" of demonstrations, below the {low} where training should begin: choose easier"
                " tasks, or raise sft_steps or sft_more of the plan"
            )
        if rate > high:
            _step_back(model, below, weights, measure, (low, high))
    finally:
        rollouts.close()
    model.save_pretrained(source)
    return source


def _copy_of(model: Any) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def _step_back(
    model: Any,
    below: Mapping[str, Tensor],
    above: Mapping[str, Tensor],
    measure: Callable[[], float],
    band: tuple[float, float],
) -> None:
    """Find a model within the band on the straight line between two states of a warm start.

    A few steps lie between the two, so the pass rate rises along the line; halving finds the band
    without training.
    """
    low, high = band
    start, end = 0.0, 1.0
    for _ in range(6):
        share = (start + end) / 2
        between = {name: torch.lerp(below[name], above[name], share) for name in above}
        model.load_state_dict(between)
        rate = measure()
        if low <= rate <= high:
            return
        start, end = (share, end) if rate < low else (start, share)


def _practice(
    policy: TokenPolicy, make: Callable[[], ToolEnv], seed: int, sandbox: str
) -> Rollouts:
    """Plays the model as it is at the time, to tell when the warm start has done enough."""
    pool = pool_for(make(), sandbox, _PRACTISED_AT_ONCE)
    setting = Setting(make, policy, pool, "practice", seed)
    return Rollouts(setting, concurrency=_PRACTISED_AT_ONCE)


def _pass_at_1(rollouts: Rollouts, tasks: list[Task]) -> float:
    """On training tasks that nothing was demonstrated of."""
    episodes = [one for group in rollouts.gather(tasks, 0) for one in group.episodes]
    scored = [one.passed for one in episodes if one.passed is not None]
    if not scored:
        raise SandboxLost("infrastructure failed every practice episode: see `agentrl doctor`")
    return sum(scored) / len(scored)


def _texts(episodes: Iterable[Episode]) -> list[str]:
    """What the tokenizer is learnt from: the conversations as the model will see and write them."""
    return ["".join(map(_as_text, episode.messages)) for episode in episodes]


def _as_text(message: Message) -> str:
    content = format_hermes(message.content, message.tool_calls)
    return f"<|im_start|>{message.role}\n{content}<|im_end|>\n"


def _show_loss(step: int, loss: float) -> None:
    console.print(f"warm start  step {step:>4}  loss {loss:.3f}", highlight=False, soft_wrap=True)


class _Clock:
    """Seconds of each stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = round(now - self._last, 1)
        self._last = now

    @property
    def total(self) -> float:
        return round(time.perf_counter() - self._start, 1)


def _summary(
    trained: dict[str, Any], folder: Path, clock: _Clock, config: TrainConfig
) -> dict[str, Any]:
    """The demo's JSON: what was promised, measured."""
    rows = {row["step"]: row for row in trained["eval"]}
    before, after = rows[0], rows[config.steps]
    return {
        "pass_at_1": {"before": before.get("eval/pass_at_1"), "after": after.get("eval/pass_at_1")},
        "ci95": {
            name: [row.get("eval/ci95_low"), row.get("eval/ci95_high")]
            for name, row in (("before", before), ("after", after))
        },
        "held_out_tasks": config.held_out.tasks,
        "held_out_scored": {
            "before": int(before["eval/n_scored"]),
            "after": int(after["eval/n_scored"]),
        },
        "episodes_trained": config.steps * config.tasks_per_step * config.group_size,
        "seed": config.seed,
        "seconds": {**clock.seconds, "total": clock.total},
        "cores": len(os.sched_getaffinity(0)),
        "run": trained["run"],
        "model": trained["model"],
        "report": trained["report"],
    }


def _say(result: dict[str, Any]) -> None:
    before, after = result["pass_at_1"]["before"], result["pass_at_1"]["after"]
    tasks, seconds = result["held_out_tasks"], result["seconds"]["total"]
    if before is None or after is None:
        print(
            "held-out pass@1 unknown: infrastructure failed every held-out task; see `failure` in"
            " episodes.jsonl"
        )
    else:
        print(
            f"held-out pass@1: {before:.3f} before, {after:.3f} after ({tasks} tasks,"
            f" {seconds:.0f} s)"
        )
        if (lost := 2 * tasks - sum(result["held_out_scored"].values())) > 0:
            print(
                f"infrastructure failed {lost} of these {2 * tasks} evaluations; they are in"
                " neither figure"
            )
    print(f"report: {result['report']}")
