"""Training runs of tiny real models: one played to its end, and all that it recorded but times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.records.files import read_metrics
from agentrl.trainers.config import TrainConfig, check_config
from agentrl.trainers.loop import train
from agentrl.trainers.run import Run, Unheard
from agentrl.trajectory import Episode

TOYS = Path(__file__).parent / "toy_envs.py"
PARITY, TOLD = f"{TOYS}:Parity", f"{TOYS}:Told"


class Heard(Unheard):
    """Events of a run, kept in the order in which they came."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.episodes: list[Episode] = []
        self.warnings: list[str] = []

    def on_phase(self, label: str, episodes: int) -> None:
        self.phases.append(label)

    def on_episode(self, episode: Episode) -> None:
        self.episodes.append(episode)

    def on_warning(self, sentence: str) -> None:
        self.warnings.append(sentence)


def settings(model: Path, **changes: Any) -> TrainConfig:
    """Five rounds of a toy in which the first letter decides; evaluations, checkpoints and two
    steps a round.
    """
    row: dict[str, Any] = {
        "env": PARITY,
        "model": str(model),
        "steps": 5,
        "tasks_per_step": 4,
        "group_size": 4,
        "learning_rate": 1e-3,
        "deterministic": True,
        "eval_every": 2,
        "held_out": {"tasks": 6},
        "save_every": 1,
        "minibatches": 2,
        "compute": {"micro_tokens": 512},
    }
    return check_config(row | changes, "test")


def run(config: TrainConfig, folder: Path, **options: Any) -> list[dict[str, Any]]:
    """Train to the end; the rows of `timeless`."""
    with Run(config, folder, **options) as opened:
        train(opened)
    return timeless(folder)


def timeless(folder: Path) -> list[dict[str, Any]]:
    """All metrics but times, exactly as recorded."""
    rows = read_metrics(folder / "metrics.jsonl")
    return [
        {name: value for name, value in row.items() if not name.startswith("time/")} for row in rows
    ]
