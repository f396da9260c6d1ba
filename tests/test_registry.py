"""Environments by id, by entry point and by file."""

import sys
from importlib.metadata import EntryPoint

import pytest
from helpers import Echo

from agentrl import registry
from agentrl.errors import ConfigError, ContractError


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})


def offer(monkeypatch, **targets):
    points = [EntryPoint(name, value, registry.GROUP) for name, value in targets.items()]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)


def test_shipped_environments_are_there():
    assert {"bugfix-v0", "calc-v0", "code-v0"} <= set(registry.environment_ids())
    for env_id in ("bugfix-v0", "calc-v0", "code-v0"):
        assert registry.environment(env_id).id == env_id


def test_registering_a_class():
    class Mine(Echo):
        id = "mine-v0"

    assert registry.register(Mine) is registry.register(Mine) is registry.environment("mine-v0")
    assert "mine-v0" in registry.environment_ids()
    for other_id, match in (("mine-v0", "is taken"), ("calc-v0", "is taken"), ("", "is empty")):
        with pytest.raises(ConfigError, match=match):
            registry.register(type("Other", (Echo,), {"id": other_id}))


def test_entry_points_are_found_and_loaded_on_use(monkeypatch, tmp_path):
    (tmp_path / "other_package.py").write_text("from helpers import Echo\n\nclass Far(Echo):\n    id = 'far-v0'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    offer(monkeypatch, **{"far-v0": "other_package:Far", "gone-v0": "no_such_module:X", "odd-v0": "other_package:Y"})
    assert {"far-v0", "gone-v0"} <= set(registry.environment_ids()) and "other_package" not in sys.modules
    assert registry.describe("far-v0") == {
        "id": "far-v0",
        "version": 0,
        "tasks": 80,
        "splits": {"train": 40, "test": 40},
        "sandbox": "none",
        "summary": "",
    }
    assert "cannot be loaded from 'no_such_module:X'" in registry.describe("gone-v0")["summary"]
    for env_id in ("gone-v0", "odd-v0"):
        with pytest.raises(ConfigError, match=f"{env_id}' cannot be loaded from"):
            registry.environment(env_id)


def test_unknown_ids_get_a_hint():
    with pytest.raises(ConfigError, match="did you mean 'bugfix-v0'"):
        registry.environment("bug-fix-v0")
    with pytest.raises(ConfigError, match="known are bugfix-v0, calc-v0, code-v0"):
        registry.environment("zzz")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("x = (", "cannot be loaded: SyntaxError"),
        ("import no_such_module", "cannot be loaded: ModuleNotFoundError"),
        ("class Env: pass", "has no ToolEnv named 'Env'"),
        ("", "has no ToolEnv named 'Env'"),
    ],
)
def test_files_that_hold_no_environment(tmp_path, text, match):
    file = tmp_path / "bad.py"
    file.write_text(text)
    with pytest.raises(ConfigError, match=match):
        registry.environment(f"{file}:Env")


def test_a_file_with_a_broken_tool_says_which(tmp_path):
    file = tmp_path / "tool.py"
    file.write_text(
        "from agentrl import ToolEnv, tool\nclass Env(ToolEnv):\n    @tool\n    def f(self, a):\n        'Do.'\n"
    )
    with pytest.raises(ContractError, match="'a' needs a type"):
        registry.environment(f"{file}:Env")
    with pytest.raises(ConfigError, match="does not exist"):
        registry.environment(f"{tmp_path}/none.py:Env")


def test_settings_are_tried_once():
    make = registry.factory("calc-v0", operations=3)
    assert make().operations == 3 and make() is not make()
    for settings, match in (
        ({"operatoins": 3}, "operatoins"),
        ({"operations": "x"}, "operations"),
        ({"largest": 2}, "10"),
    ):
        with pytest.raises(ConfigError, match=match):
            registry.factory("calc-v0", **settings)
    with pytest.raises(ConfigError, match="does not take"):
        registry.factory("bugfix-v0", knob=3)
