"""From settings to a source of tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.curriculum.mixture import Mixture
from agentrl.curriculum.parts import Part
from agentrl.curriculum.pool import PoolSource
from agentrl.curriculum.settings import InOrder, PoolSettings
from agentrl.curriculum.source import Uniform
from agentrl.errors import ConfigError


def open_source(
    envs: Sequence[Sequence[Part]],
    settings: InOrder | PoolSettings,
    seed: int,
    state: Mapping[str, Any] | None = None,
    apart: bool = False,
) -> PoolSource | Mixture | Uniform:
    """The source of a run's tasks.

    Args:
        envs: for each environment its levels.
        settings: of the curriculum.
        seed: of the run.
        state: of the source of an earlier part of the run.
        apart: see `PoolSource`.

    Raises:
        ConfigError: the state is of another sampler or of other environments, or a pool cannot be
            filled.
    """
    if len(envs) == 1:
        return _one(envs[0], settings, seed, state, apart)
    names = [parts[0].env for parts in envs]
    saved = state["sources"] if state and "sources" in state else None
    if state and (saved is None or list(saved) != names):
        raise ConfigError(f"the checkpoint is not one of the environments {names}: choose --out")
    sources = {
        parts[0].env: _one(parts, settings, seed, saved and saved[parts[0].env], apart)
        for parts in envs
    }
    return Mixture(sources, {parts[0].env: parts[0].floor for parts in envs}, state)


def _one(
    parts: Sequence[Part],
    settings: InOrder | PoolSettings,
    seed: int,
    state: Mapping[str, Any] | None,
    apart: bool,
) -> PoolSource | Uniform:
    before = state.get("sampler", "in_order") if state else settings.sampler  # type: ignore[union-attr]
    if isinstance(settings, InOrder):
        if before != "in_order":
            raise ConfigError(_changed(before, "in_order"))
        return Uniform(parts[0].epoch(seed), parts[0].id, state)
    if before == "in_order":
        raise ConfigError(_changed("in_order", settings.sampler))  # type: ignore[attr-defined]
    return PoolSource(parts, settings, seed, state, apart)


def _changed(old: str, new: str) -> str:
    return (
        f"curriculum.sampler={new!r}, and the run was started with {old!r}, whose state it cannot"
        " go on from: resume with that, or choose another --out"
    )
