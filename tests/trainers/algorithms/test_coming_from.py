"""The tables of docs/coming_from.md: all names on either side exist, and hints agree with them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from pydantic import BaseModel
from trl import GRPOConfig

from agentrl.errors import ConfigError
from agentrl.settings import check
from agentrl.trainers.algorithms.recipe import SETTINGS
from agentrl.trainers.algorithms.recipes import PARTS
from agentrl.trainers.config import CriticSettings, TrainConfig, check_config
from agentrl.trainers.offline.settings import StageSettings
from agentrl.trainers.peers import TRL, VERL

PAGE = (Path(__file__).parents[3] / "docs" / "coming_from.md").read_text()


def rows(head):
    """Name -> cell of ours, of all tables with this head."""
    found = {}
    for table in PAGE.split(f"| {head} | here | what differs |\n")[1:]:
        for line in table.split("\n\n")[0].splitlines()[1:]:
            name, ours = line.split("|")[1:3]
            found[name.strip(" `")] = ours.strip()
    return found


def settings():
    """Every setting of a run, with the options of recipes as `loss.NAME`."""
    tables = {
        f"{name}.{inner}"
        for name, field in TrainConfig.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        for inner in field.annotation.model_fields
    }
    parts = {
        option for row in PARTS.values() for part in row.values() for option in dict(part.options)
    }
    critic = {f"loss.critic.{name}" for name in CriticSettings.model_fields}
    return {
        *TrainConfig.model_fields,
        *tables,
        *critic,
        *(f"loss.{name}" for name in (*parts, *SETTINGS, *PARTS)),
    }


def test_every_setting_of_ours_exists():
    cells = [*rows("TRL").values(), *rows("verl").values()]
    named = {name for cell in cells for name in re.findall(r"`(.+?)`", cell)}
    assert len(named) > 50 and named <= settings()


def test_every_name_of_trls_exists():
    known = {field.name for field in dataclasses.fields(GRPOConfig)}
    assert rows("TRL").keys() - known == {"model_name_or_path"}


@pytest.mark.parametrize(("hints", "head"), [(TRL, "TRL"), (VERL, "verl")])
def test_a_hint_names_what_the_page_names(hints, head):
    page, known = rows(head), settings()
    assert hints.keys() <= page.keys()
    for name, hint in hints.items():
        first = re.match(r"[a-z_.]+", hint)[0]
        assert first in page[name] or first not in known


def test_a_stage_of_preferences_is_not_told_the_names_of_online_training():
    with pytest.raises(ConfigError, match=r"TRL's beta is loss\.kl_coef"):
        check_config({"env": "calc-v0", "model": "m", "beta": 0.1}, "a.toml")
    with pytest.raises(ConfigError) as caught:
        check(StageSettings, {"stage": "preferences", "beta": 0.1}, "a.toml")
    assert "TRL" not in str(caught.value)
