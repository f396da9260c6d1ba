"""A `trl.GRPOConfig` as settings of ours, with what differs in meaning and what has no match.

Every setting of TRL that is not at its default is in the result, in a sentence on what differs, or
in the list of what has no match: nothing is left out in silence.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from agentrl.errors import ConfigError
from agentrl.trainers.algorithms.recipes import recipe
from agentrl.trainers.config import apply_override, check_config
from agentrl.trainers.peers import TRL

_AGGREGATES = {
    "grpo": "episode",
    "sapo": "episode",
    "bnpo": "token",
    "dapo": "token",
    "cispo": "token",
    "vespo": "token",
    "luspo": "episode_sum",
    "dr_grpo": "constant",
}
"""TRL's loss_type -> our aggregate."""

_LOSSES = {
    "grpo": "TRL averages every micro-batch by itself; here the optimizer step is averaged",
    "bnpo": "TRL divides by the tokens of the micro-batch; here by those of the optimizer step",
    "dapo": "TRL's dapo is the mean over tokens alone, and so it is here; our recipe dapo also"
    " refills groups without signal and clips higher",
    "cispo": "TRL's upper bound is epsilon_high itself; ours is 1 + clip_high",
    "luspo": "TRL averages over rows; here over episodes",
}
"""TRL's loss_type -> what differs."""

_OWN_OF = ("cispo", "sapo", "vespo", "luspo")
"""Values of loss_type that are recipes here."""

_OPTIMIZERS = {"adamw8bit": ("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit")}


@dataclass
class Translation:
    """What became of a GRPOConfig.

    Attributes:
        settings: rows of a config file, by name; `env` and `model` are not among them unless told.
        differs: sentences on settings that mean something else here.
        unmatched: sentences on settings that have no match.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    differs: list[str] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)

    def toml(self, source: str) -> str:
        """A config file, with the sentences as comments at its head."""
        lines = [f"Translated from {source}, a trl.GRPOConfig."]
        lines += ["", "Differs in meaning:", *(f"- {one}" for one in self.differs)]
        lines += ["", "Has no match here:", *(f"- {one}" for one in self.unmatched or ["nothing"])]
        missing = [name for name in ("env", "model") if name not in self.settings]
        if missing:
            lines += ["", f"A GRPOConfig does not say: add a line for {' and for '.join(missing)}."]
        head = "".join(f"# {line}".rstrip() + "\n" for line in lines)
        return f"{head}\n{tomli_w.dumps(self.settings)}"


def translate_file(path: Path, overrides: Sequence[str] = ()) -> Translation:
    """Translate a file as `GRPOConfig(...).to_json_string()` writes it.

    Args:
        path: of the file.
        overrides: `key=value` settings of ours, as `env=calc-v0`.

    Raises:
        ConfigError: the file is no JSON object with settings of a GRPOConfig, or the translation
            would be refused by a run.
    """
    try:
        row = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"--from-trl {path} does not exist: give a JSON file") from None
    except ValueError as error:
        raise ConfigError(f"--from-trl {path} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"--from-trl {path} must hold one JSON object, as to_json_string writes")
    return translate(row, str(path), overrides)


def translate(row: Mapping[str, Any], where: str, overrides: Sequence[str] = ()) -> Translation:
    """Translate the settings of a GRPOConfig; those that are missing are at TRL's default.

    Raises:
        ConfigError: none of them is of a GRPOConfig, or a run would refuse the translation.
    """
    arguments = _Arguments(row)
    if not row.keys() & arguments.defaults.keys():
        raise ConfigError(f"{where} has no setting of a trl.GRPOConfig")
    found = Translation({"recipe": "grpo", "loss": {}})
    for part in (_rounds, _optimizer, _surrogate, _credit, _regularisers, _masks, _vllm, _run):
        part(arguments, found)
    found.unmatched += arguments.rest()
    for override in overrides:
        apply_override(found.settings, override)
    config = check_config({"env": "?", "model": "?"} | found.settings, where)
    recipe(config.recipe, **config.loss)
    return found


class _Arguments:
    """Settings of TRL, which know what was read of them.

    Attributes:
        defaults: name -> values that are TRL's own: before and after it fills in what is None.
    """

    def __init__(self, row: Mapping[str, Any]) -> None:
        from trl import GRPOConfig

        plain = GRPOConfig(output_dir="trl", use_cpu=True, bf16=False).to_dict()
        self.defaults = {
            one.name: (one.default, plain.get(one.name)) for one in dataclasses.fields(GRPOConfig)
        }
        unset = dict.fromkeys(("output_dir", "generation_batch_size", "steps_per_generation"))
        self._plain = plain | unset | {"use_cpu": False, "bf16": True}
        self._row, self._read = dict(row), set[str]()

    def __getitem__(self, name: str) -> Any:
        """The value, which counts as read."""
        self._read.add(name)
        return self._row.get(name, self._plain[name])

    def says(self, name: str) -> bool:
        """Whether a setting is not at its default."""
        return name in self._row and self._row[name] not in self.defaults.get(name, ())

    def shown(self, name: str) -> str:
        """Name and value; the value then counts as read."""
        return f"{name}={self[name]!r}"

    def rest(self) -> list[str]:
        """What was not read and is not at its default."""
        return [
            f"{name}={value!r}: {self._why(name)}"
            for name, value in self._row.items()
            if name not in self._read and self.says(name)
        ]

    def _why(self, name: str) -> str:
        if name not in self.defaults:
            return "no setting of this version of TRL"
        return f"the nearest here is {TRL[name]}" if name in TRL else "nothing here does that"


def _rounds(trl: _Arguments, found: Translation) -> None:
    """How much is sampled and stepped in a round, and how many rounds there are."""
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


def _optimizer(trl: _Arguments, found: Translation) -> None:
    """Learning rate, its schedule, and AdamW."""
    settings: dict[str, Any] = {
        "betas": [trl["adam_beta1"], trl["adam_beta2"]],
        "weight_decay": trl["weight_decay"],
        "max_grad_norm": float(trl["max_grad_norm"]) or math.inf,  # 0: TRL clips nothing
    }
    name = trl["optim"]
    if name in _OPTIMIZERS["adamw8bit"]:
        settings["name"] = "adamw8bit"
    elif not name.startswith("adamw"):
        found.unmatched.append(f"optim={name!r}: optimizer.name is adamw or adamw8bit")
    found.settings |= {"learning_rate": trl["learning_rate"], "optimizer": settings}
    shape, warmup = trl["lr_scheduler_type"], trl["warmup_steps"]
    schedule: dict[str, Any] = {}
    if shape == "linear":
        schedule["final"] = 0.0
        found.differs.append(
            "lr_scheduler_type='linear' falls with every optimizer step; here with every round, and"
            " the last round has a rate of 0: raise schedule.final if that matters"
        )
    elif not shape.startswith("constant"):
        found.unmatched.append(
            f"lr_scheduler_type={shape!r}: here the rate stays, or falls in a straight line to"
            " schedule.final"
        )
    if 0 < warmup < 1:
        found.unmatched.append(f"warmup_steps={warmup!r}, a share: give schedule.warmup in rounds")
    elif warmup:
        schedule["warmup"] = _in_rounds(warmup, found)
    if schedule:
        found.settings["schedule"] = schedule


def _surrogate(trl: _Arguments, found: Translation) -> None:
    """Ratio, clip and average."""
    kind, level = trl["loss_type"], trl["importance_sampling_level"]
    if kind not in _AGGREGATES:
        found.unmatched.append(
            f"loss_type={kind!r}: recipe and loss.aggregate are left as they are"
        )
        return
    loss, low = found.settings["loss"], trl["epsilon"]
    high = low if trl["epsilon_high"] is None else trl["epsilon_high"]
    found.settings["recipe"] = kind if kind in _OWN_OF else "grpo"
    loss["aggregate"] = _AGGREGATES[kind]
    if kind == "dr_grpo":
        loss["aggregate"] = {"name": "constant", "norm_tokens": trl["max_completion_length"]}
    if kind in _LOSSES:
        found.differs.append(f"loss_type={kind!r}: {_LOSSES[kind]}")
    if level == "sequence" and kind not in ("cispo", "sapo", "vespo"):
        found.settings["recipe"] = "luspo" if kind == "luspo" else "gspo"
        found.differs.append(
            "importance_sampling_level='sequence': the ratio is of the whole episode, all its turns"
        )
    elif level != "token":
        found.unmatched.append(
            f"importance_sampling_level={level!r} with loss_type={kind!r}: its ratio is fixed here"
        )
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "cispo": lambda: _cispo(high, found),
        "sapo": lambda: _renamed(trl, "tau_pos", "tau_neg"),
        "vespo": lambda: _renamed(trl, "k_pos", "lambda_pos", "k_neg", "lambda_neg"),
    }
    name = "gspo" if level == "sequence" else "ppo_clip"
    clipped = {"name": name, "clip_low": low, "clip_high": high}
    loss["surrogate"] = makers[kind]() if kind in makers else clipped
    _dual_clip(trl, loss["surrogate"], found)


def _dual_clip(trl: _Arguments, surrogate: dict[str, Any], found: Translation) -> None:
    delta = trl["delta"]
    if delta is None:
        return
    if surrogate["name"] == "ppo_clip" and delta > 1 + surrogate["clip_high"]:
        surrogate["dual_clip"] = delta
        return
    found.unmatched.append(
        f"delta={delta!r}: dual_clip bounds ppo_clip where A < 0 alone, which is the same only"
        " above 1 + epsilon_high"
    )


def _cispo(high: float, found: Translation) -> dict[str, Any]:
    """TRL's bound is the ratio's, with none below."""
    if high >= 1:
        return {"name": "cispo", "clip_low": 1.0, "clip_high": high - 1}
    found.unmatched.append(
        f"epsilon_high={high!r} with loss_type='cispo': TRL then scales every on-policy token by"
        f" {high!r}; here the bound cannot be below 1, and is left at 5"
    )
    return {"name": "cispo"}


def _renamed(trl: _Arguments, *ours: str) -> dict[str, Any]:
    """A surrogate whose options only have other names."""
    theirs = {setting: key for key, setting in TRL.items()}
    return {"name": theirs[f"loss.{ours[0]}"].partition("_")[0]} | {
        name: trl[theirs[f"loss.{name}"]] for name in ours
    }


def _credit(trl: _Arguments, found: Translation) -> None:
    """Rewards to advantages."""
    loss, scale = found.settings["loss"], trl["scale_rewards"]
    ways: dict[Any, Any] = {
        "group": {"name": "grpo", "eps": 1e-4},
        "batch": ["dr_grpo", "whiten"],
        "none": "dr_grpo",
    }
    word = {True: "group", False: "none"}.get(scale, scale)
    loss["credit"] = ways.get(word, "grpo")
    if word == "batch":
        found.differs.append(
            "scale_rewards='batch' divides by the deviation of the batch's rewards; here by that of"
            " the round's tokens, where long episodes count more"
        )
    if trl["multi_objective_aggregation"] == "normalize_then_sum":
        loss["credit"] = "gdpo"
        found.differs.append(
            "multi_objective_aggregation='normalize_then_sum': reward functions are the named parts"
            " of a score here, and scale_rewards has no say"
        )
    found.differs.append(
        f"max_completion_length={trl['max_completion_length']!r}: here a limit of the environment"
        " (and of each of its turns)"
    )


def _regularisers(trl: _Arguments, found: Translation) -> None:
    """KL, entropy, routers."""
    loss, corrected = found.settings["loss"], trl["use_bias_correction_kl"]
    if beta := trl["beta"]:
        loss |= {"kl_coef": beta, "kl_ratio": corrected}
    elif not corrected:
        found.differs.append("use_bias_correction_kl=False changes nothing while beta is 0")
    if trl.says("entropy_target") and not trl["use_adaptive_entropy"]:
        found.differs.append(
            f"{trl.shown('entropy_target')} changes nothing while use_adaptive_entropy is False"
        )
    if coef := trl["entropy_coef"]:
        loss["entropy_coef"] = coef
        found.differs.append(
            "entropy_coef: TRL averages the entropy over a micro-batch's tokens; here as the loss"
        )
    if trl["use_adaptive_entropy"]:
        loss["entropy_target"] = trl["entropy_target"]
        found.differs.append(
            "use_adaptive_entropy: TRL switches the bonus off above the target; here its"
            " coefficient falls from round to round"
        )
    if trl["router_aux_loss_coef"]:
        loss["load_balance_coef"] = trl["router_aux_loss_coef"]


def _masks(trl: _Arguments, found: Translation) -> None:
    """Tokens and episodes that do not train."""
    loss = found.settings["loss"]
    if trl["mask_truncated_completions"]:
        loss["drop_truncated"] = True
        found.differs.append(
            "mask_truncated_completions=True: TRL takes such tokens out of the denominators and the"
            " KL term as well; here they weigh 0"
        )
    if (share := trl["top_entropy_quantile"]) < 1:
        loss["entropy_share"] = share
        found.differs.append(
            f"top_entropy_quantile={share!r}: TRL's quantile is of a micro-batch and of the policy"
            " as it moves; here of the optimizer step and of the policy it starts from"
        )
    if (limit := trl["off_policy_mask_threshold"]) is not None:
        loss["off_policy_limit"] = limit
        found.differs.append(
            f"off_policy_mask_threshold={limit!r}: TRL compares with the policy as it moves; here"
            " with the one that the update starts from"
        )


def _vllm(trl: _Arguments, found: Translation) -> None:
    """The correction between sampler and trainer."""
    prefix = "vllm_importance_sampling_"
    names = [f"{prefix}{name}" for name in ("correction", "mode", "clip_max", "clip_min")]
    wanted, mode, most, least = (trl[name] for name in names)
    if not trl["use_vllm"]:
        found.differs += [
            f"{trl.shown(name)} changes nothing while use_vllm is False"
            for name in names
            if trl.says(name)
        ]
        return
    found.unmatched.append("use_vllm=True: see engine.name for what can sample here")
    if not wanted:
        return
    level, _, way = mode.partition("_")
    short = "tis" if way == "truncate" else "mis"
    high = math.inf if most is None else most
    found.settings["loss"] |= {
        f"{short}_level": level,
        f"{short}_low": least or 0.0,
        f"{short}_high": high,
    }


def _run(trl: _Arguments, found: Translation) -> None:
    """What is saved, evaluated and spent."""
    settings = found.settings
    settings["seed"] = trl["seed"]
    compute = {
        "dtype": "bfloat16" if trl["bf16"] else "float32",
        "gradient_checkpointing": trl["gradient_checkpointing"],
    }
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


def _evaluation(trl: _Arguments, found: Translation) -> None:
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
