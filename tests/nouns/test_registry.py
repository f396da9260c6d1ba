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
    shipped = ("bugfix-v0", "calc-v0", "code-v0", "desk-v0", "inject-v0")
    assert set(shipped) <= set(registry.environment_ids())
    for env_id in shipped:
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
    (tmp_path / "other_package.py").write_text(
        "from helpers import Echo\n\nclass Far(Echo):\n    id = 'far-v0'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    offer(
        monkeypatch,
        **{
            "far-v0": "other_package:Far",
            "gone-v0": "no_such_module:X",
            "odd-v0": "other_package:Y",
        },
    )
    assert {"far-v0", "gone-v0"} <= set(
        registry.environment_ids()
    ) and "other_package" not in sys.modules
    assert registry.describe_environment("far-v0") == {
        "id": "far-v0",
        "version": 0,
        "tasks": 80,
        "splits": {"train": 40, "test": 40},
        "sandbox": "none",
        "summary": "",
    }
    assert (
        "cannot be loaded from 'no_such_module:X'"
        in registry.describe_environment("gone-v0")["summary"]
    )
    for env_id in ("gone-v0", "odd-v0"):
        with pytest.raises(ConfigError, match=f"{env_id}' cannot be loaded from"):
            registry.environment(env_id)


def test_unknown_ids_get_a_hint():
    with pytest.raises(ConfigError, match="did you mean 'bugfix-v0'"):
        registry.environment("bug-fix-v0")
    with pytest.raises(ConfigError, match="choose bugfix-v0, calc-v0, chat-v0, code-v0"):
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
        "from agentrl import ToolEnv, tool\nclass Env(ToolEnv):\n    @tool\n    def f(self, a):\n  "
        "      'Do.'\n"
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
    with pytest.raises(
        ConfigError, match="does not take setting 'knob': its settings are functions, "
    ):
        registry.factory("bugfix-v0", knob=3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"foo": 1, "size": 2},
            "environment 'mine-v0' does not take setting 'foo': its settings are size, colour=",
        ),
        (
            {},
            (
                r"environment 'mine-v0' cannot be built \(missing a required argument: 'size'\):"
                r" its settings are size, "
            ),
        ),
        (
            {"size": "x"},
            (
                "environment 'mine-v0' cannot be built with size='x': its settings are size,"
                " colour='red'"
            ),
        ),
        (
            {"size": 0},
            r"environment 'mine-v0' cannot be built \(size 0 is too small\): its settings are size",
        ),
    ],
)
def test_wrong_settings_are_answered_with_those_that_there_are(settings, message):
    class Mine(Echo):
        id = "mine-v0"

        def __init__(self, size: int, colour: str = "red") -> None:
            if size < 1:
                raise ValueError(f"size {size} is too small")

    registry.register(Mine)
    with pytest.raises(ConfigError, match=f"^{message}") as caught:
        registry.factory("mine-v0", **settings)
    assert "__init__" not in str(caught.value) and "unexpected keyword" not in str(caught.value)
    registry.register(type("Plain", (Echo,), {"id": "plain-v0"}))
    with pytest.raises(ConfigError, match="setting 'foo': it has no settings"):
        registry.factory("plain-v0", foo=1)


@pytest.mark.parametrize("ending", ["", ":", ":Nobody"])
def test_a_file_without_a_class_is_answered_with_its_classes(tmp_path, ending):
    file = tmp_path / "mine.py"
    head = (
        "import agentrl\nfrom agentrl import ToolEnv\n\nclass Base(ToolEnv): pass\nclass"
        " Child(Base): pass\n"
    )
    file.write_text(head + "class Other: pass\nclass Dotted(agentrl.ToolEnv): pass\n")
    with pytest.raises(ConfigError, match=f"give {file}:Base or {file}:Child or {file}:Dotted$"):
        registry.environment(f"{file}{ending}")


def test_naming_the_classes_of_a_file_runs_nothing(tmp_path):
    file = tmp_path / "mine.py"
    for text in ("raise SystemExit\n", "x = (", "\0", "class Other: pass"):
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"names no class: give {file}:ClassName$"):
            registry.environment(str(file))
    with pytest.raises(ConfigError, match="does not exist"):
        registry.environment(str(tmp_path / "none.py"))
