"""Limits that a user sets replace those of an environment, wherever it is built."""

from __future__ import annotations

import pickle

import pytest

from agentrl.errors import ConfigError
from agentrl.registry import factory
from agentrl.settings import check
from agentrl.trainers.config import check_config
from agentrl.types import Limits, LimitSettings

BASE = {"model": "m"}


def test_limits_that_are_set_replace_the_environments_own():
    limits = LimitSettings(turn_tokens=1024, wall_s=5.0)
    env, plain = factory("calc-v0", limits, largest=99)(), factory("calc-v0", largest=99)()
    assert (env.limits.turn_tokens, env.limits.wall_s) == (1024, 5.0)
    assert env.limits.turns == plain.limits.turns and plain.limits.turn_tokens == 512
    assert factory("calc-v0")().limits == plain.limits, "another instance keeps its own"


def test_an_environment_with_limits_can_be_built_in_another_process():
    make = pickle.loads(pickle.dumps(factory("calc-v0", LimitSettings(turns=3))))
    assert make().limits.turns == 3


def test_a_longer_turn_raises_the_episode_unless_that_is_set():
    own = Limits(turn_tokens=100, episode_tokens=200)
    assert LimitSettings(turn_tokens=150).apply(own).episode_tokens == 200
    assert LimitSettings(turn_tokens=300).apply(own).episode_tokens == 300
    with pytest.raises(ConfigError) as caught:
        check(LimitSettings, {"turn_tokens": 300, "episode_tokens": 250}, "limits")
    assert caught.value.setting == "turn_tokens"


@pytest.mark.parametrize(
    ("row", "setting"),
    [
        ({"turn_tokens": 0}, "limits.turn_tokens"),
        ({"turn_tokens": "many"}, "limits.turn_tokens"),
        ({"wall_s": float("inf")}, "limits.wall_s"),
        ({"turn_token": 3}, "limits.turn_token"),
    ],
)
def test_a_limit_that_is_none_is_refused(row, setting):
    with pytest.raises(ConfigError) as caught:
        check_config(BASE | {"env": "calc-v0", "limits": row}, "run.toml")
    assert caught.value.setting == setting


def test_every_limit_can_be_set():
    assert set(LimitSettings.model_fields) == set(Limits.__slots__)


def test_an_environment_of_several_has_the_limits_of_the_run_and_its_own():
    tables = [{"id": "calc-v0"}, {"id": "math-v0", "limits": {"turns": 2}}]
    config = check_config(BASE | {"env": tables, "limits": {"turns": 5, "wall_s": 9}}, "run.toml")
    assert [table.limits.given for table in config.envs] == [
        {"turns": 5, "wall_s": 9.0},
        {"turns": 2, "wall_s": 9.0},
    ]
    single = check_config(BASE | {"env": "calc-v0", "limits": {"turns": 5}}, "run.toml")
    assert single.envs[0].limits.turns == 5


def test_a_limit_given_as_a_setting_of_the_environment_is_told_where_it_belongs():
    with pytest.raises(ConfigError, match="--limits turn_tokens") as caught:
        factory("calc-v0", turn_tokens=64)
    assert caught.value.setting == "env_settings.turn_tokens"
