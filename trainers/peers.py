"""Names that settings have in TRL and verl, and what the same thing is called here.

One table for two readers: the sentence that refuses an unknown setting, and the translation of a
whole `GRPOConfig` (`from_trl`). A name that means the same in both, as `learning_rate`, is not in
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

TRL = {
    "beta": "loss.kl_coef",
    "use_bias_correction_kl": "loss.kl_ratio",
    "epsilon": "loss.clip_low and loss.clip_high",
    "epsilon_high": "loss.clip_high (for cispo: epsilon_high - 1)",
    "delta": "loss.dual_clip",
    "num_generations": "group_size",
    "num_generations_eval": "held_out.samples",
    "generation_batch_size": "tasks_per_step (times group_size)",
    "steps_per_generation": "minibatches",
    "num_iterations": "loss.epochs",
    "max_steps": "steps (in rounds, of minibatches times loss.epochs optimizer steps)",
    "top_p": "for agentrl eval alone: training scores the whole distribution",
    "top_k": "for agentrl eval alone: training scores the whole distribution",
    "min_p": "not offered: training scores the whole distribution",
    "repetition_penalty": "not offered: training scores the whole distribution",
    "max_completion_length": "a limit of the environment (and loss.norm_tokens for dr_grpo)",
    "max_tool_calling_iterations": "a limit of the environment",
    "scale_rewards": 'the credit: loss.credit = "grpo" for group, "dr_grpo" for none',
    "multi_objective_aggregation": 'the credit: loss.credit = "gdpo" for normalize_then_sum',
    "reward_weights": "loss.part_weights (by name)",
    "loss_type": "recipe and loss.aggregate",
    "importance_sampling_level": 'loss.surrogate = "gspo" for sequence',
    "mask_truncated_completions": "loss.drop_truncated",
    "top_entropy_quantile": "loss.entropy_share",
    "use_adaptive_entropy": "loss.entropy_target",
    "off_policy_mask_threshold": "loss.off_policy_limit",
    "vllm_importance_sampling_mode": "loss.mis_level or loss.tis_level",
    "vllm_importance_sampling_clip_max": "loss.mis_high or loss.tis_high",
    "vllm_importance_sampling_clip_min": "loss.mis_low or loss.tis_low",
    "vllm_importance_sampling_cap": "loss.tis_high",
    "sapo_temperature_pos": "loss.tau_pos",
    "sapo_temperature_neg": "loss.tau_neg",
    "vespo_k_pos": "loss.k_pos",
    "vespo_k_neg": "loss.k_neg",
    "vespo_lambda_pos": "loss.lambda_pos",
    "vespo_lambda_neg": "loss.lambda_neg",
    "router_aux_loss_coef": "loss.load_balance_coef",
    "sync_ref_model": "loss.reference_decay (which moves the reference after every round)",
    "ref_model_mixup_alpha": "loss.reference_decay (1 - alpha)",
    "ref_model_sync_steps": "loss.reset_every (in rounds; the reference becomes the policy)",
    "per_device_train_batch_size": "compute.micro_tokens (in padded tokens)",
    "gradient_accumulation_steps": "compute.micro_tokens (in padded tokens)",
    "weight_decay": "optimizer.weight_decay",
    "max_grad_norm": "optimizer.max_grad_norm",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "optim": "optimizer.name",
    "lr_scheduler_type": "schedule.shape and schedule.final",
    "warmup_steps": "schedule.warmup",
    "warmup_ratio": "schedule.warmup",
    "bf16": "compute.dtype",
    "disable_dropout": "compute.dropout (which is 0 unless it is set)",
    "gradient_checkpointing": "compute.gradient_checkpointing",
    "use_cpu": "compute.device",
    "chat_template_kwargs": "chat.template_options",
    "save_steps": "save_every",
    "save_total_limit": "keep_last",
    "eval_steps": "eval_every",
    "full_determinism": "deterministic",
    "output_dir": "the option --out",
    "report_to": "the option --log-to",
    "resume_from_checkpoint": "the option --resume",
    "model_name_or_path": "model",
}
"""Setting of `trl.GRPOConfig` (or of its command line) -> ours."""

VERL = {
    "adv_estimator": "recipe",
    "norm_adv_by_std_in_grpo": 'the credit: loss.credit = "grpo" for true, "dr_grpo" for false',
    "use_kl_in_reward": "loss.kl_reward_coef",
    "kl_ctrl.kl_coef": "loss.kl_reward_coef",
    "use_kl_loss": "loss.kl_coef",
    "kl_loss_coef": "loss.kl_coef",
    "kl_loss_type": "loss.kl_estimator",
    "kl_penalty": "loss.kl_estimator",
    "clip_ratio": "loss.clip_low and loss.clip_high",
    "clip_ratio_low": "loss.clip_low",
    "clip_ratio_high": "loss.clip_high",
    "clip_ratio_c": "loss.dual_clip",
    "loss_agg_mode": "loss.aggregate",
    "loss_scale_factor": "loss.norm_tokens",
    "loss_mode": "loss.surrogate",
    "entropy_coeff": "loss.entropy_coef",
    "ppo_kl_coef": "loss.kl_cov_coef",
    "kl_cov_ratio": "loss.kl_cov_share",
    "clip_cov_ratio": "loss.cov_share",
    "clip_cov_lb": "loss.cov_low",
    "clip_cov_ub": "loss.cov_high",
    "ppo_epochs": "loss.epochs",
    "ppo_mini_batch_size": "minibatches (their number, not their size)",
    "ppo_micro_batch_size": "compute.micro_tokens (in padded tokens)",
    "ppo_micro_batch_size_per_gpu": "compute.micro_tokens (in padded tokens)",
    "ppo_max_token_len_per_gpu": "compute.micro_tokens",
    "train_batch_size": "tasks_per_step",
    "rollout.n": "group_size",
    "rollout.temperature": "temperature",
    "rollout.name": "engine.name",
    "router_replay.mode": 'engine.routing = "replay" (R3)',
    "val_kwargs.n": "held_out.samples",
    "rollout_is": "loss.tis_level",
    "rollout_is_threshold": "loss.tis_high",
    "rollout_rs": "loss.reject_level",
    "cliprange_value": "loss.critic.value_clip",
    "critic_warmup": "loss.critic.warmup",
    "optim.lr": "learning_rate",
    "grad_clip": "optimizer.max_grad_norm",
    "lr_warmup_steps": "schedule.warmup",
    "filter_groups.enable": "loss.refill",
    "model.path": "model",
    "lora_rank": "compute.lora_rank",
    "enable_gradient_checkpointing": "compute.gradient_checkpointing",
    "total_training_steps": "steps",
    "total_epochs": "steps",
    "test_freq": "eval_every",
    "save_freq": "save_every",
}
"""Setting of verl, by as much of the end of its dotted name as tells it from others -> ours."""


def peer_hint(name: str, value: Any = None) -> str | None:
    """What a setting of TRL or verl is called here, as half a sentence; None if it is neither's.

    Args:
        name: the setting, dotted where it stands in tables.
        value: what it was set to; of a table, the first setting inside that is known answers.
    """
    for dotted in _dotted(name, value):
        last = dotted.rpartition(".")[2]
        if last in TRL:
            return f"TRL's {last} is {TRL[last]} here"
        for known, ours in VERL.items():
            if f".{dotted}".endswith(f".{known}"):
                return f"verl's {known} is {ours} here"
    return None


def _dotted(name: str, value: Any) -> Iterator[str]:
    """The name itself, then the names of all settings in its table."""
    yield name
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _dotted(f"{name}.{key}", inner)
