"""What every kind of stage has in common: its protocol, and how a Trainer is run."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from agentrl.chat.tokens import Chat
from agentrl.engines.loading import best_device
from agentrl.errors import ConfigError
from agentrl.records.files import MetricsWriter
from agentrl.trainers.models.optim import make_optimizer
from agentrl.trainers.offline.examples import Kind
from agentrl.trainers.offline.settings import StageSettings

Listen = Callable[[Mapping[str, Any]], None]


class Stage(ABC):
    """One kind of offline stage.

    `run_stage` calls `encode`, `build`, `warnings_before`, `measure`, trains, then calls `measure`,
    `warnings_after` and `save`.

    Attributes:
        examples: the kind of examples that it learns from.
        model: what trains; None before `build`.
    """

    examples: Kind

    def __init__(self, settings: StageSettings) -> None:
        self.settings = settings
        self.model: Any = None

    @abstractmethod
    def encode(self, chat: Chat, example: Any) -> Sequence[Any]:
        """The rows of one example."""

    @abstractmethod
    def build(self, chat: Chat, rows: Sequence[Any], scratch: Path) -> Any:
        """Load the model and return its Trainer, which writes checkpoints into `scratch`."""

    @abstractmethod
    def measure(self, rows: Sequence[Any]) -> dict[str, Any]:
        """Measure the model on held-out rows, of which there is at least one."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the model."""

    def warnings_before(self, rows: Sequence[Any]) -> list[str]:
        """What is wrong with the rows that will train."""
        return []

    def warnings_after(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
        """What is wrong with the result, as held-out rows show."""
        return []

    def micro_rows(self, rows: int) -> int:
        """Rows of one forward pass, where `rows` train."""
        batch = min(self.settings.batch_size, rows)
        return min(self.settings.micro_rows or batch, batch)

    def steps(self, rows: int) -> int:
        """Optimizer steps of the whole stage, where `rows` train."""
        batch = min(self.settings.batch_size, rows)
        return self.settings.steps or self.settings.epochs * math.ceil(rows / batch)

    def arguments(self, rows: int, scratch: Path) -> dict[str, Any]:
        """Arguments of a Trainer: our rows as they are, checkpoints in `scratch`, no printing."""
        settings, micro_rows = self.settings, self.micro_rows(rows)
        batch = min(settings.batch_size, rows)
        return {
            "output_dir": str(scratch),
            "max_steps": self.steps(rows),
            "per_device_train_batch_size": micro_rows,
            "gradient_accumulation_steps": math.ceil(batch / micro_rows),
            "max_grad_norm": settings.optimizer.max_grad_norm,
            "seed": settings.seed % 2**31,
            "logging_steps": 1,  # means over several steps would differ in a stage that was resumed
            "logging_first_step": True,
            "save_strategy": "steps",
            "save_steps": settings.save_every,
            "save_total_limit": 1,
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": settings.compute.device == "cpu" or best_device() == "cpu",
            "bf16": False,  # the model computes in bfloat16 by itself where that is asked for
            "gradient_checkpointing": False,
            "remove_unused_columns": False,
        }

    def optimizers(self, rows: int) -> tuple[Any, Any]:
        """Optimizer and learning-rate schedule, as a Trainer takes them."""
        settings, steps = self.settings, self.steps(rows)
        optimizer = make_optimizer(
            self.model.parameters(), settings.learning_rate, settings.optimizer
        )
        share = settings.schedule.share
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: share(at, steps))

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """Draw new weights from the stage's seed; the global random state is left alone."""
        with torch.random.fork_rng():
            torch.manual_seed(self.settings.seed % 2**63)
            yield


def padding_id(chat: Chat) -> int:
    """The tokenizer's padding token, which reward models need."""
    pad_id = chat.tokenizer.pad_token_id
    if not isinstance(pad_id, int):
        raise ConfigError("the tokenizer has no padding token: set tokenizer.pad_token and save it")
    return pad_id


def fit(trainer: Any, writer: MetricsWriter, listen: Listen, *, resume: bool) -> None:
    """Train and record what is logged; with `resume`, continue from the last checkpoint if any."""
    from transformers.trainer_callback import PrinterCallback

    trainer.add_callback(_recorder(writer, listen))
    trainer.remove_callback(PrinterCallback)
    checkpoints = whole_checkpoints(Path(trainer.args.output_dir)) if resume else {}
    newest = str(checkpoints[max(checkpoints)]) if checkpoints else None
    trainer.train(resume_from_checkpoint=newest)


def whole_checkpoints(scratch: Path) -> dict[int, Path]:
    """Step -> checkpoint. A checkpoint that was being written when the process ended is left out:
    a Trainer writes its state last.
    """
    checkpoints = {}
    for path in scratch.glob("checkpoint-*"):
        try:
            json.loads((path / "trainer_state.json").read_bytes())
        except (FileNotFoundError, ValueError):
            continue
        checkpoints[int(path.name.rpartition("-")[2])] = path
    return checkpoints


def _recorder(writer: MetricsWriter, listen: Listen) -> Any:
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):
        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
        ) -> None:
            if not logs or "loss" not in logs:
                return
            row = {"step": int(state.global_step)}
            row |= {f"train/{name}": value for name, value in logs.items() if name != "epoch"}
            writer.write(row)
            listen(row)

    return Recorder()
