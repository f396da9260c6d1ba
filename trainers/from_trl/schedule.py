"""Settings of TRL that say how a run goes: rounds, steps, optimizer, checkpoints, evaluation."""

from __future__ import annotations

import math
from typing import Any

from agentrl.errors import ConfigError
from agentrl.trainers.from_trl.arguments import Arguments, Translation
from agentrl.trainers.peers import TRL

_EIGHT_BITS = ("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit")


def translate_rounds(trl: Arguments, found: Translation) -> None:
    """How much is sampled and stepped in a round, and how many rounds there are."""
    for name in ("num_generations", "gradient_accumulation_steps", "num_iterations"):
        if not (trl[name] or 0) >= 1:
            raise ConfigError(f"{trl.shown(name)} of the GRPOConfig must be a count >= 1")
    held = trl["gradient_accumulation_steps"]
    per_batch = trl["steps_per_generation"] or held
    rows = trl["generation_batch_size"] or trl["per_device_train_batch_size"] * per_batch
    minibatches, epochs = max(1, per_batch // held), trl["num_iterations"]
    if per_batch % held and held % per_batch:
        found.differs.append(
            f"steps_per_generation={per_batch} is no multiple of"
            f" gradient_accumulation_steps={held}, so TRL's steps mix generations; here a round has"
            f" {minibatches} of its own"
        )
    elif held > per_batch:
        rows *= held // per_batch
    if trl.says("per_device_train_batch_size") or trl.says("gradient_accumulation_steps"):
        found.differs.append(
            f"{trl.shown('per_device_train_batch_size')} and"
            f" {trl.shown('gradient_accumulation_steps')} say how many rows fit a pass; here"
            " compute.micro_tokens does, in padded tokens, and never changes a step"
        )
    found.settings |= {
        "group_size": trl["num_generations"],
        "tasks_per_step": max(1, rows // trl["num_generations"]),
        "minibatches": minibatches,
        "temperature": trl["temperature"],
    }
    if epochs > 1:
        found.settings["loss"]["epochs"] = epochs
    if (most := trl["max_steps"]) > 0:
        found.settings["steps"] = math.ceil(most / (minibatches * epochs))
        trl["num_train_epochs"]  # which TRL leaves unread then
    else:
        found.differs.append(
            f"{trl.shown('num_train_epochs')} goes through a dataset; here a run has a number of"
            " rounds: set steps"
        )


def _in_rounds(steps: float, found: Translation) -> int:
    """Optimizer steps of TRL as rounds of ours."""
    epochs: int = found.settings["loss"].get("epochs", 1)
    return math.ceil(steps / (int(found.settings["minibatches"]) * epochs))


def translate_optimizer(trl: Arguments, found: Translation) -> None:
    """Learning rate, its schedule, and AdamW."""
    settings: dict[str, Any] = {
        "betas": [trl["adam_beta1"], trl["adam_beta2"]],
        "weight_decay": trl["weight_decay"],
        "max_grad_norm": float(trl["max_grad_norm"]) or math.inf,  # 0: TRL clips nothing
    }
    name = trl["optim"]
    if name in _EIGHT_BITS:
        settings["name"] = "adamw8bit"
    elif not name.startswith("adamw"):
        found.unmatched.append(f"optim={name!r}: optimizer.name is adamw or adamw8bit")
    found.settings |= {"learning_rate": trl["learning_rate"], "optimizer": settings}
    shape, warmup = trl["lr_scheduler_type"], trl["warmup_steps"]
    schedule: dict[str, Any] = {}
    if shape in ("linear", "cosine"):
        schedule |= {"final": 0.0} | ({"shape": shape} if shape != "linear" else {})
        found.differs.append(
            f"lr_scheduler_type={shape!r} falls with every optimizer step; here with every round,"
            " and the last round has a rate of 0: raise schedule.final if that matters"
        )
    elif not shape.startswith("constant"):
        found.unmatched.append(
            f"lr_scheduler_type={shape!r}: here the rate stays, or falls to schedule.final in a"
            " straight line or a cosine"
        )
    if 0 < warmup < 1:
        found.unmatched.append(f"warmup_steps={warmup!r}, a share: give schedule.warmup in rounds")
    elif warmup:
        schedule["warmup"] = _in_rounds(warmup, found)
    if schedule:
        found.settings["schedule"] = schedule


def translate_run(trl: Arguments, found: Translation) -> None:
    """What is saved, evaluated and spent."""
    settings = found.settings
    settings["seed"] = trl["seed"]
    compute = {
        "dtype": "bfloat16" if trl["bf16"] else "float32",
        "gradient_checkpointing": trl["gradient_checkpointing"],
    }
    if trl["disable_dropout"]:
        compute["dropout"] = 0.0
    else:
        found.differs.append(
            "disable_dropout=False: TRL trains with the dropout that a model asks for; here with"
            " compute.dropout, which is 0 unless it is set"
        )
    if trl["use_cpu"]:
        compute["device"] = "cpu"
    settings["compute"] = compute
    if trl["cast_lm_head_to_fp32"]:
        found.differs.append("cast_lm_head_to_fp32=True: the output layer is always float32 here")
    if trl["full_determinism"]:
        settings["deterministic"] = True
        found.differs.append(
            "full_determinism=True: here it is the sampler that is made repeatable"
        )
    if trl["save_strategy"] == "steps" and trl["save_steps"] >= 1:
        settings["save_every"] = _in_rounds(trl["save_steps"], found)
    else:
        found.unmatched.append(
            f"{trl.shown('save_strategy')}, {trl.shown('save_steps')}: give save_every in rounds"
        )
    if (kept := trl["save_total_limit"]) is None:
        found.differs.append("save_total_limit=None keeps every checkpoint; here keep_last does")
    else:
        settings["keep_last"] = kept
    _evaluation(trl, found)
    if trl["chat_template_kwargs"]:
        settings["chat"] = {"template_options": trl["chat_template_kwargs"]}
    for name in ("output_dir", "report_to", "resume_from_checkpoint"):
        if trl.says(name):
            found.differs.append(f"{trl.shown(name)}: {TRL[name]} of agentrl train")


def _evaluation(trl: Arguments, found: Translation) -> None:
    settings, strategy, steps = found.settings, trl["eval_strategy"], trl["eval_steps"]
    if strategy == "steps" and steps and steps >= 1:
        settings["eval_every"] = _in_rounds(steps, found)
    elif strategy != "no":
        found.unmatched.append(
            f"eval_strategy={strategy!r}, eval_steps={steps!r}: give eval_every in rounds"
        )
    elif trl.says("eval_steps"):
        found.differs.append(f"eval_steps={steps!r} changes nothing while eval_strategy is 'no'")
    if samples := trl["num_generations_eval"]:
        settings["held_out"] = {"samples": samples}
