"""Settings of TRL that say what is learnt: surrogate, credit, regularisers, masks, corrections."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from agentrl.trainers.from_trl.arguments import Arguments, Translation
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


def translate_surrogate(trl: Arguments, found: Translation) -> None:
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


def _dual_clip(trl: Arguments, surrogate: dict[str, Any], found: Translation) -> None:
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


def _renamed(trl: Arguments, *ours: str) -> dict[str, Any]:
    """A surrogate whose options only have other names."""
    theirs = {setting: key for key, setting in TRL.items()}
    return {"name": theirs[f"loss.{ours[0]}"].partition("_")[0]} | {
        name: trl[theirs[f"loss.{name}"]] for name in ours
    }


def translate_credit(trl: Arguments, found: Translation) -> None:
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


def translate_regularisers(trl: Arguments, found: Translation) -> None:
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


def translate_masks(trl: Arguments, found: Translation) -> None:
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


def translate_vllm(trl: Arguments, found: Translation) -> None:
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
