"""One side of the update rows in its own process: a step for every line on standard input, its cost
on standard output.

Ours is `agentrl.trainers.loop.update` as a run calls it. Theirs is TRL's
`GRPOTrainer.train()`, whole: only what generates and scores is replaced, by the same rows in TRL's
own layout (prompts padded on the left, completions on the right, `tool_mask` 0 on observations).
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from agentrl.trainers.batch import TokenBatch
from benchmarks.parts.update_work import Work, episodes, qwen2

RATE = 1e-6


class Meter:
    """Time and memory between two lines on standard input.

    Memory is what a step adds, at its peak, to the level with model and optimizer allocated:
        resident memory of the
    process, or allocated memory of the accelerator.
    """

    def start(self) -> None:
        """Wait for a line; end the process at the end of input."""
        if not sys.stdin.readline():
            raise SystemExit(0)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.level = torch.cuda.memory_allocated()
        else:
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            with open("/proc/self/clear_refs", "w") as refs:
                refs.write("5")  # the peak starts anew from here
            self.level = _resident("VmRSS")
        self.started = time.perf_counter()

    def stop(self, norm: float) -> None:
        """Print what the step took."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self.started
        peak = (
            torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _resident("VmHWM")
        )
        print(
            json.dumps({"seconds": seconds, "bytes": peak - self.level, "grad_norm": norm}),
            flush=True,
        )


def _resident(name: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name + ":"))


def ours(work: Work) -> None:
    """Steps of our update."""
    from agentrl.trainers.algorithms.recipes import recipe
    from agentrl.trainers.config import Compute, OptimizerSettings, TrainConfig
    from agentrl.trainers.learner import Learner
    from agentrl.trainers.models.scoring import frozen_logprobs, in_parts
    from agentrl.trainers.observe.metrics import UpdateLog

    model, meter, batch = qwen2(work), Meter(), episodes(work)
    if work.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if work.dtype == "bfloat16":
        from agentrl.trainers.models.loading import in_bfloat16

        in_bfloat16(model)
    width = batch.ids_BT.shape[1]
    config = TrainConfig(
        env="-",
        model="-",
        learning_rate=RATE,
        compute=Compute(micro_tokens=work.micro_rows * width),
        optimizer=OptimizerSettings(max_grad_norm=1e9),
    )
    learner = Learner(config, recipe("grpo"), model)
    batch = learner.recipe.advantage(batch)

    def score(part: TokenBatch) -> tuple[torch.Tensor]:
        return (frozen_logprobs(model, part.to(model.device)),)

    def sampled() -> TokenBatch:
        """The rows as if the policy had just sampled them."""
        (old_BT,) = in_parts(batch, score, config.compute.micro_tokens)
        return replace(batch, old_logprobs_BT=old_BT)

    step = 0
    while True:
        rows = sampled()
        meter.start()
        log = UpdateLog(rows, rows, step)
        learner.update(rows, step, log)
        meter.stop(log.metrics()["policy/grad_norm"])
        step += 1


def theirs(work: Work) -> None:
    """Steps of TRL's trainer."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from agentrl.trainers.models.tiny import build_tokenizer

    meter, batch = Meter(), episodes(work)
    prepared = _in_their_layout(batch)

    class Prepared(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            return {name: value.to(self.accelerator.device) for name, value in prepared.items()}

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            meter.start()

        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            grads = [
                parameter.grad for parameter in model.parameters() if parameter.grad is not None
            ]
            self.norm = float(torch.nn.utils.get_total_norm(grads))

        def on_step_end(self, *_: Any, **__: Any) -> None:
            meter.stop(self.norm)

    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(output_dir=folder, **_settings(work))
        trainer = Prepared(
            model=qwen2(work),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": "p"}] * 4),
            processing_class=build_tokenizer(["p"]),
            callbacks=[Watch()],
        )
        trainer.train()


def _settings(work: Work) -> dict[str, Any]:
    """TRL's settings: those of the comparison, then those that make it fastest."""
    return {
        "loss_type": "grpo",
        "beta": 0.0,
        "num_generations": work.rows,
        "per_device_train_batch_size": work.micro_rows,
        "gradient_accumulation_steps": work.rows // work.micro_rows,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1e9,
        "optim": "adamw_torch_fused",
        "bf16": work.dtype == "bfloat16",
        "gradient_checkpointing": work.checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "use_cpu": not torch.cuda.is_available(),
        "max_steps": 1000,
        "logging_steps": 10_000,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "disable_dropout": True,
    }


def _in_their_layout(batch: TokenBatch) -> dict[str, torch.Tensor]:
    """The rows as `_generate_and_score_completions` returns them."""
    from agentrl.trainers.algorithms.recipes import recipe
    from benchmarks.parts.update_work import PROMPT

    advantages_BT = recipe("grpo").advantage(batch).advantages_BT
    there_BT = batch.attention_BT.long()
    return {
        "prompt_ids": batch.ids_BT[:, :PROMPT],
        "prompt_mask": there_BT[:, :PROMPT],
        "completion_ids": batch.ids_BT[:, PROMPT:],
        "completion_mask": there_BT[:, PROMPT:],
        "tool_mask": batch.mask_BT[:, PROMPT:].long(),
        "advantages": advantages_BT.gather(1, batch.mask_BT.int().argmax(1, keepdim=True))[:, 0],
        "num_items_in_batch": torch.tensor(batch.n_tokens),
    }


SIDES: dict[str, Callable[[Work], None]] = {"ours": ours, "theirs": theirs}

if __name__ == "__main__":
    SIDES[sys.argv[1]](Work(**json.loads(sys.argv[2])))
