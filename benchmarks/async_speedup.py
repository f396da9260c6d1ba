"""Episodes per second of training where tools take seconds with a heavy tail: asynchronous with a
staleness of at most 2 updates, against synchronous with all episodes of a step at once.

Both sides play the same delays in the same number of slots: 8 tasks × 8 episodes × 6 turns, each
turn waiting for a Pareto-distributed time (exponent 1.5). The model is tiny, so waiting dominates.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from agentrl.engines.loading import load_model, load_tokenizer
from agentrl.evaluation.forecast import forecast, read_times
from agentrl.records.files import iter_episodes, read_metrics
from agentrl.trainers.config import check_config
from agentrl.trainers.loop import train
from agentrl.trainers.models.tiny import build_model, build_tokenizer
from agentrl.trainers.run import Run
from benchmarks.parts import slow_tools
from benchmarks.row import Row

TASKS, GROUP, STEPS = 8, 8, 24


def measure(steps: int = STEPS) -> Sequence[Row]:
    """One row for each bound of staleness."""
    with tempfile.TemporaryDirectory() as folder:
        texts = ["<|im_start|>user\nSay something.<|im_end|>\n<|im_start|>assistant\nyes"] * 9
        model = build_model(
            Path(folder) / "model", build_tokenizer(texts), width=32, layers=2, context=512
        )
        _end_turns_early(model)
        wall_s, worst = {}, {}
        for staleness in (0, 1, 2):
            run = Path(folder) / f"staleness-{staleness}"
            wall_s[staleness] = _train(model, run, steps, staleness)
            metrics = read_metrics(run / "metrics.jsonl")
            worst[staleness] = max(row.get("staleness/max", 0.0) for row in metrics)
            _check_every_draw_trained(run, steps)
        times = read_times(Path(folder) / "staleness-0")
        predicted = {row.staleness: row.speedup for row in forecast(times, (1, 2))}
    episodes = steps * TASKS * GROUP
    rate = {staleness: episodes / seconds for staleness, seconds in wall_s.items()}
    return [
        Row(
            "async_speedup" if staleness == 2 else f"async_speedup_{staleness}",
            round(rate[staleness], 2),
            round(rate[0], 2),
            round(rate[staleness] / rate[0], 2),
            "episodes/s",
            1,
            "at least 2" if staleness == 2 else "at least 1.6",
            f"max_staleness={staleness}, worst seen {worst[staleness]:g}; `agentrl plan` predicts"
            f" {predicted[staleness]:.2f} from the synchronous run; {steps} steps of"
            f" {TASKS} × {GROUP} episodes; every episode that was drawn is trained",
        )
        for staleness in (2, 1)
    ]


def _end_turns_early(folder: Path) -> None:
    """Change a random model so that it ends most turns within a few tokens; a turn that meets its
    limit of tokens would end the episode.
    """
    model: Any = load_model(folder)
    tokenizer = load_tokenizer(folder)
    ids = tokenizer("<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
        direction = states.mean(0) / states.mean(0).norm()
        model.get_output_embeddings().weight[tokenizer.eos_token_id] += 2.5 * direction
    model.save_pretrained(folder)


def _train(model: Path, folder: Path, steps: int, staleness: int) -> float:
    """Seconds of training, without opening and closing."""
    config = check_config(
        {
            "env": f"{Path(slow_tools.__file__)}:SlowTools",
            "model": str(model),
            "steps": steps,
            "tasks_per_step": TASKS,
            "group_size": GROUP,
            "mode": "async" if staleness else "sync",
            "max_staleness": staleness,
            "learning_rate": 1e-5,
            "save_every": steps,
            "quiet_rounds": steps,
        },
        "benchmark",
    )
    slow_tools.SlowTools.episodes.clear()
    with Run(config, folder) as run:
        started = time.perf_counter()
        train(run)
        return time.perf_counter() - started


def _check_every_draw_trained(folder: Path, steps: int) -> None:
    """Trained and drawn episodes are the same, so their mean duration is, too."""
    groups: dict[tuple[int, str], int] = defaultdict(int)
    for episode in iter_episodes(folder / "episodes.jsonl"):
        groups[episode.key.round, episode.key.task] += 1
    trained = fmean(groups.values())
    if len(groups) != steps * TASKS or trained != GROUP:
        raise AssertionError(f"{folder} trained {len(groups)} groups of {trained} episodes")
