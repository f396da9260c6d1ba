"""Environments by id: the shipped ones, and those of other packages.

A package offers an environment by a line such as `my-env-v0 = "my_package.my_module:MyEnv"` under
`[project.entry-points."agentrl.environments"]`. Nothing is imported before its id is asked for.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from agentrl.env import ToolEnv
from agentrl.errors import AgentRLError, ConfigError
from agentrl.settings import as_toml, did_you_mean, list_names
from agentrl.types import LimitSettings
from agentrl.userfiles import load_file

GROUP = "agentrl.environments"

_SHIPPED = {
    "bugfix-v0": "agentrl.envs.bugfix:BugFix",
    "calc-v0": "agentrl.envs.calc:Calculator",
    "chat-v0": "agentrl.envs.chat:ChatEnv",
    "code-v0": "agentrl.envs.code:Code",
    "desk-v0": "agentrl.envs.desk:Desk",
    "inject-v0": "agentrl.envs.inject:Inject",
    "math-v0": "agentrl.envs.math:Math",
}
_SPLITS = ("train", "test")
_registered: dict[str, type[ToolEnv]] = {}


def register(cls: type[ToolEnv]) -> type[ToolEnv]:
    """Make an environment of the running program known by its `id`; usable as a decorator.

    Raises:
        ConfigError: the class has no id, or another class has it.
    """
    if not cls.id:
        raise ConfigError(f"{cls.__name__}.id is empty: name it, with a version, as in 'my-env-v0'")
    if cls.id in _SHIPPED or _registered.get(cls.id, cls) is not cls:
        raise ConfigError(
            f"environment id {cls.id!r} is taken: choose another id for {cls.__name__}"
        )
    _registered[cls.id] = cls
    if "gymnasium.envs" in sys.modules:
        register_gymnasium()
    return cls


def is_registered(env_id: str) -> bool:
    """Whether `register` was called for this id in the running program."""
    return env_id in _registered


def environment_ids() -> list[str]:
    """All known ids, sorted."""
    return sorted({*_SHIPPED, *_registered, *(point.name for point in entry_points(group=GROUP))})


def environment(env_id: str) -> type[ToolEnv]:
    """The class behind an id; `path/to/file.py:Class` names a class in a file.

    Raises:
        ConfigError: no such environment; the message offers the nearest id.
    """
    if env_id in _registered:
        return _registered[env_id]
    if ".py:" in env_id or env_id.endswith(".py"):
        return _from_file(env_id)
    targets = {point.name: point.value for point in entry_points(group=GROUP)} | _SHIPPED
    if env_id not in targets:
        hint = did_you_mean(env_id, environment_ids())
        raise ConfigError(f"environment {env_id!r} is unknown: {hint}", setting="env")
    module, _, name = targets[env_id].partition(":")
    try:
        cls: type[ToolEnv] = getattr(importlib.import_module(module), name)
    except AgentRLError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"environment {env_id!r} cannot be loaded from {targets[env_id]!r}: {why}"
        ) from error
    return cls


def factory(
    env_id: str, limits: LimitSettings | None = None, /, **settings: Any
) -> Callable[[], ToolEnv]:
    """A function that builds fresh instances of an environment with the given settings.

    Args:
        env_id: an id of `agentrl list`, or `path/to/file.py:Class`.
        limits: limits that replace the environment's own.
        settings: arguments of the environment's constructor.

    Raises:
        ConfigError: unknown environment, or a setting that it does not take.
    """
    cls = environment(env_id)
    taken = inspect.signature(cls)
    words = ", ".join(map(_setting, taken.parameters.values()))
    offer = f"its settings are {words}" if words else "it has no settings"
    try:
        taken.bind(**settings)
    except TypeError as error:
        unknown = [name for name in settings if name not in taken.parameters]
        problem = f"cannot be built ({error})"
        if unknown:
            problem = f"does not take setting {list_names([repr(name) for name in unknown])}"
        if unknown and unknown[0] in LimitSettings.model_fields:
            offer = f"it is a limit: set limits.{unknown[0]} or --limits {unknown[0]}=…"
        setting = f"env_settings.{unknown[0]}" if unknown else "env_settings"
        raise ConfigError(f"environment {env_id!r} {problem}: {offer}", setting=setting) from error
    make = functools.partial(cls, **settings)
    if limits is not None and limits.given:
        make = functools.partial(_build_limited, cls, limits, **settings)
    try:
        make()
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{name}={as_toml(value)}" for name, value in settings.items())
        # A TypeError about the given values would tell the user nothing, so it is left out.
        why = f"with {given}" if given and isinstance(error, TypeError) else f"({error})"
        raise ConfigError(f"environment {env_id!r} cannot be built {why}: {offer}") from error
    return make


def _build_limited(cls: type[ToolEnv], limits: LimitSettings, /, **settings: Any) -> ToolEnv:
    env = cls(**settings)
    env.limits = limits.apply(env.limits)
    return env


def _setting(one: inspect.Parameter) -> str:
    """A setting with its default, which TOML cannot write where it is None."""
    if one.default is None:
        return f"{one.name} (may be left out)"
    if one.default is one.empty:
        return str(one.replace(annotation=one.empty))
    return f"{one.name}={as_toml(one.default)}"


def describe_environment(env_id: str) -> dict[str, Any]:
    """One row of `agentrl list`; `tasks` is None for an environment whose splits never end.

    An environment of another package that cannot be loaded is a row too; `summary` says why.
    """
    row: dict[str, Any] = {
        "id": env_id,
        "version": None,
        "tasks": None,
        "splits": {},
        "sandbox": "unknown",
    }
    version = env_id.rpartition("-v")[2]
    row["version"] = int(version) if version.isdigit() else None
    try:
        cls = environment(env_id)
        env = cls()
        ids = {
            split: None if env.endless else {task.id for task in env.tasks(split, 0)}
            for split in _SPLITS
        }
    except Exception as error:  # noqa: BLE001 - another package's code may raise anything
        return row | {"summary": f"cannot be used: {type(error).__name__}: {error}"}
    return row | {
        "tasks": None
        if env.endless
        else len(set().union(*(found or () for found in ids.values()))),
        "splits": {split: None if found is None else len(found) for split, found in ids.items()},
        "sandbox": "required" if cls.needs_sandbox else "none",
        "summary": (cls.__doc__ or "").strip().partition("\n")[0],
    }


def register_gymnasium() -> None:
    """Register every known id with gymnasium, as `agentrl/<id>`."""
    from gymnasium.envs.registration import register as register_one
    from gymnasium.envs.registration import registry

    for env_id in environment_ids():
        if f"agentrl/{env_id}" not in registry:
            kwargs = {"env_id": env_id}
            register_one(
                f"agentrl/{env_id}", "agentrl.gym:make", kwargs=kwargs, order_enforce=False
            )


def _from_file(target: str) -> type[ToolEnv]:
    file, _, name = target.rpartition(":") if ".py:" in target else (target, "", "")
    path = Path(file)
    if path.is_file() and not name:
        choices = (
            " or ".join(f"{file}:{found}" for found in _classes_in(path)) or f"{file}:ClassName"
        )
        raise ConfigError(f"environment {target!r} names no class: give {choices}")
    cls = getattr(load_file(path, "environment"), name, None)
    if not (isinstance(cls, type) and issubclass(cls, ToolEnv)):
        choices = (
            " or ".join(f"{file}:{found}" for found in _classes_in(path))
            or "one that derives from ToolEnv"
        )
        raise ConfigError(f"{file} has no ToolEnv named {name!r}: give {choices}")
    return cls


def _classes_in(path: Path) -> list[str]:
    """Names of a file's classes that derive from ToolEnv, found without running the file."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return []
    known = {"ToolEnv"}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(
            ast.unparse(base).rpartition(".")[2] in known for base in node.bases
        ):
            known.add(node.name)
    return sorted(known - {"ToolEnv"})
