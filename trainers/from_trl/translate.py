"""A `trl.GRPOConfig` as settings of ours, with what differs in meaning and what has no match.

Every setting of TRL that is not at its default is in the result, in a sentence on what differs, or
in the list of what has no match: nothing is left out in silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.trainers.algorithms.recipes import recipe
from agentrl.trainers.config import TrainConfig, validated
from agentrl.trainers.from_trl.arguments import Arguments, Translation
from agentrl.trainers.from_trl.loss import (
    translate_credit,
    translate_masks,
    translate_regularisers,
    translate_surrogate,
    translate_vllm,
)
from agentrl.trainers.from_trl.schedule import translate_optimizer, translate_rounds, translate_run
from agentrl.trainers.overrides import apply_override

_PARTS = (
    translate_rounds,
    translate_optimizer,
    translate_surrogate,
    translate_credit,
    translate_regularisers,
    translate_masks,
    translate_vllm,
    translate_run,
)


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
    arguments = Arguments(row)
    if not row.keys() & arguments.defaults.keys():
        raise ConfigError(f"{where} has no setting of a trl.GRPOConfig")
    found = Translation({"recipe": "grpo", "loss": {}})
    for part in _PARTS:
        part(arguments, found)
    found.unmatched += arguments.rest()
    for override in overrides:
        apply_override(found.settings, override)
    row = {"env": "?", "model": "?"} | found.settings
    found.settings = {name: row[name] for name in row if row[name] != "?"}
    config = validated(TrainConfig, row, where, overrides)
    chosen = recipe(config.recipe, **config.loss)
    chosen.refuse_group_size(config.group_size)
    chosen.refuse_minibatches(config.minibatches)
    return found
