"""Names of settings in TRL and verl, and what they are called here.

Used by the error about an unknown setting. The full table, with what differs in meaning, is
docs/coming_from.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

TRL = {
    "beta": "loss.kl_coef",
    "epsilon": "loss.clip_low and loss.clip_high",
    "epsilon_high": "loss.clip_high",
    "delta": "loss.dual_clip",
    "num_generations": "group_size",
    "num_iterations": "loss.epochs",
    "max_steps": "steps",
    "steps_per_generation": "minibatches",
    "generation_batch_size": "tasks_per_step (times group_size)",
    "per_device_train_batch_size": "compute.micro_tokens (and tasks_per_step, the size of a round)",
    "gradient_accumulation_steps": "compute.micro_tokens (in padded tokens)",
    "max_completion_length": "limits.turn_tokens (and loss.norm_tokens for dr_grpo)",
    "scale_rewards": 'the credit: loss.credit = "grpo" for group, "dr_grpo" for none',
    "loss_type": "recipe and loss.aggregate",
    "importance_sampling_level": 'loss.surrogate = "gspo" for sequence',
    "mask_truncated_completions": "loss.drop_truncated",
    "warmup_steps": "schedule.warmup",
    "lr_scheduler_type": "schedule.shape and schedule.final",
    "bf16": "compute.dtype",
    "model_name_or_path": "model",
    "output_dir": "the option --out",
    "save_steps": "save_every",
    "eval_steps": "eval_every",
}
"""Setting of `trl.GRPOConfig` -> ours."""

VERL = {
    "adv_estimator": "recipe",
    "kl_loss_coef": "loss.kl_coef",
    "kl_ctrl.kl_coef": "loss.kl_reward_coef",
    "clip_ratio": "loss.clip_low and loss.clip_high",
    "clip_ratio_low": "loss.clip_low",
    "clip_ratio_high": "loss.clip_high",
    "clip_ratio_c": "loss.dual_clip",
    "loss_agg_mode": "loss.aggregate",
    "loss_mode": "loss.surrogate",
    "entropy_coeff": "loss.entropy_coef",
    "ppo_epochs": "loss.epochs",
    "ppo_mini_batch_size": "minibatches (their number, not their size)",
    "ppo_micro_batch_size_per_gpu": "compute.micro_tokens (in padded tokens)",
    "train_batch_size": "tasks_per_step",
    "rollout.n": "group_size",
    "optim.lr": "learning_rate",
    "grad_clip": "optimizer.max_grad_norm",
    "filter_groups.enable": "loss.refill",
    "model.path": "model",
    "total_training_steps": "steps",
    "test_freq": "eval_every",
    "save_freq": "save_every",
}
"""Setting of verl -> ours, by as much of the end of its dotted name as is unambiguous."""


def peer_hint(name: str, value: Any = None) -> str | None:
    """Half a sentence that gives our name of a TRL or verl setting; None if it is neither's.

    Args:
        name: the setting, dotted where it is in tables.
        value: its value; in a table, the first setting that is known counts.
    """
    for dotted in _dotted_names(name, value):
        last = dotted.rpartition(".")[2]
        if last in TRL:
            return f"TRL's {last} is {TRL[last]} here"
        for theirs, ours in VERL.items():
            if f".{dotted}".endswith(f".{theirs}"):
                return f"verl's {theirs} is {ours} here"
    return None


def _dotted_names(name: str, value: Any) -> Iterator[str]:
    yield name
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _dotted_names(f"{name}.{key}", inner)
