"""What every offline stage asks of a Trainer: its arguments, optimizer, records and checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agentrl.engines.loading import best_device
from agentrl.records.files import MetricsWriter
from agentrl.trainers.models.optim import make_optimizer
from agentrl.trainers.offline.settings import StageSettings

Listen = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class StagePlan:
    """How long a stage trains, and in what pieces.

    Attributes:
        steps: optimizer steps.
        micro_rows: of one forward pass.
        accumulate: forward passes of one step; the last may be smaller.
    """

    steps: int
    micro_rows: int
    accumulate: int

    @classmethod
    def of(cls, settings: StageSettings, rows: int) -> StagePlan:
        """The plan of a stage with so many rows."""
        batch = min(settings.batch_size, rows)
        micro = min(settings.micro_rows or batch, batch)
        steps = settings.steps or settings.epochs * math.ceil(rows / batch)
        return cls(steps, micro, math.ceil(batch / micro))


def arguments(settings: StageSettings, plan: StagePlan, scratch: Path) -> dict[str, Any]:
    """Arguments of a Trainer: our rows as they are, checkpoints in `scratch`, nothing printed."""
    on_cpu = settings.compute.device == "cpu" or best_device() == "cpu"
    return {
        "output_dir": str(scratch),
        "max_steps": plan.steps,
        "per_device_train_batch_size": plan.micro_rows,
        "gradient_accumulation_steps": plan.accumulate,
        "max_grad_norm": settings.optimizer.max_grad_norm,
        "seed": settings.seed % 2**31,
        "logging_steps": 1,  # means over several steps would differ in a stage that was resumed
        "logging_first_step": True,
        "save_strategy": "steps",
        "save_steps": settings.save_every,
        "save_total_limit": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": on_cpu,
        "bf16": False,
        "gradient_checkpointing": False,
        "remove_unused_columns": False,
    }


def optimizers(settings: StageSettings, model: torch.nn.Module, steps: int) -> tuple[Any, Any]:
    """Optimizer and learning rate of a stage, as a Trainer takes them."""
    built = make_optimizer(model.parameters(), settings.learning_rate, settings.optimizer)
    share = settings.schedule.share
    return built, torch.optim.lr_scheduler.LambdaLR(built, lambda step: share(step, steps))


def fit(
    trainer: Any,
    writer: MetricsWriter,
    listen: Listen,
    claim: Callable[[], None],
    *,
    resume: bool,
) -> None:
    """Train, record what is logged, and go on from the last checkpoint where there is one.

    Args:
        claim: is called right before.
    """
    from transformers.trainer_callback import PrinterCallback

    trainer.add_callback(_recorder(writer, listen))
    trainer.remove_callback(PrinterCallback)
    found = _whole(Path(trainer.args.output_dir)) if resume else {}
    claim()
    trainer.train(resume_from_checkpoint=str(found[max(found)]) if found else None)


def last_step(scratch: Path) -> int:
    """The step of the newest checkpoint to go on from; 0 without one."""
    return max(_whole(scratch), default=0)


def _whole(scratch: Path) -> dict[int, Path]:
    """Step -> checkpoint, without those that were being written when the process ended: a Trainer
    writes its state last.
    """
    found = {}
    for path in scratch.glob("checkpoint-*"):
        try:
            json.loads((path / "trainer_state.json").read_bytes())
        except (FileNotFoundError, ValueError):
            continue
        found[int(path.name.rpartition("-")[2])] = path
    return found


def _recorder(writer: MetricsWriter, listen: Listen) -> Any:
    from transformers import TrainerCallback

    class _Recorder(TrainerCallback):
        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
        ) -> None:
            if not logs or "loss" not in logs:
                return
            row = {"step": int(state.global_step)}
            row |= {f"train/{name}": value for name, value in logs.items() if name != "epoch"}
            writer.write(row)
            listen(row)

    return _Recorder()
