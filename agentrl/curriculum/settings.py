"""The settings of a curriculum: one table per sampler, each with the options that it reads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from agentrl.settings import STRICT
from agentrl.types import LimitSettings


class EnvTable(BaseModel):
    """One of several environments of a run, a table `[[env]]`."""

    model_config = STRICT

    id: str
    """Environment id of `agentrl list`, or `path/to/file.py:Class`."""
    name: str = ""
    """Name in metrics and task ids (empty = its id)."""
    settings: dict[str, Any] = {}
    """Arguments of the environment's constructor."""
    limits: LimitSettings = LimitSettings()
    """Limits of this environment alone: `{turn_tokens = 4096}`."""
    floor: float = Field(default=0.0, ge=0, le=1)
    """Minimum share of the tasks of a run."""


def refuse_tables(tables: Sequence[EnvTable], shared: Mapping[str, Any]) -> None:
    """Raise ValueError where these are not the environments of one run.

    Args:
        shared: `env_settings`, which belong to a single environment.
    """
    if not tables:
        raise ValueError("env = [] names no environment: give at least one table [[env]]")
    if shared:
        raise ValueError(
            "env_settings belong to a single env: with tables [[env]] give each its settings = {…}"
        )
    names = [name_in_run(table) for table in tables]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise ValueError(f"two tables [[env]] are called {twice!r}: give one of them another name")
    if odd := next((name for name in names if set(name) & set("/#") or not name), None):
        raise ValueError(f"env.name={odd!r} must not be empty or have '/' or '#': choose another")
    if (total := math.fsum(table.floor for table in tables)) > 1 + 1e-9:
        raise ValueError(f"the floors of [[env]] sum to {total:g}, more than 1: lower one of them")


def name_in_run(table: EnvTable) -> str:
    """What metrics and task ids call an environment."""
    return table.name or table.id.rpartition(":")[2]


class InOrder(BaseModel):
    """Every task once per epoch, in the environment's order; what was played changes nothing."""

    model_config = STRICT

    sampler: Literal["in_order"] = "in_order"
    """How tasks are chosen."""


class PoolSettings(BaseModel):
    """Settings of all samplers that draw from a pool."""

    model_config = STRICT

    pool: int = Field(default=1024, ge=1)
    """Number of tasks to choose among: the first of the environment, shared evenly by levels."""
    explore: float = Field(default=0.1, gt=0, le=1)
    """Share of every draw that is uniform over all tasks, including those never played."""
    drift: float = Field(default=0.02, ge=0, le=0.5)
    """Standard deviation by which a pass rate of ½ moves in a round (0 = nothing is forgotten)."""
    prior: tuple[float, float] = Field(default=(0.5, 0.5), strict=False)
    """Beta distribution of the pass rate of an unknown task."""
    rest: int = Field(default=0, ge=0)
    """Number of rounds in which a task is not played again."""
    retire: float = Field(default=1.0, gt=0, le=1)
    """Expected pass rate at which a task of an endless environment is replaced by a new one (1 =
    never).
    """
    levels: tuple[dict[str, Any], ...] = Field(default=(), strict=False)
    """Levels of difficulty: extra settings of the environment, one table each, easiest first."""
    group_most: int = Field(default=0, ge=0)
    """Largest group, if group sizes follow the expected signal with the same number of episodes in
    all (0 = all groups have `group_size`).
    """
    start: str = ""
    """File of `agentrl profile --save` with counts to start from."""

    def refuse_round(self, tasks: int, group_size: int) -> None:
        """Raise ValueError where rounds of so many tasks cannot be drawn as these settings say."""
        if self.pool < tasks:
            raise ValueError(
                f"curriculum.pool={self.pool} holds fewer than the {tasks} tasks of one round:"
                " raise it, or lower tasks_per_step"
            )
        if 0 < self.group_most < max(2, group_size):
            raise ValueError(
                f"curriculum.group_most={self.group_most} is below group_size={group_size}, which"
                " is the mean size: raise it, or set 0"
            )

    @model_validator(mode="after")
    def _has_a_prior(self) -> PoolSettings:
        if not all(one > 0 for one in self.prior):
            raise ValueError("prior must be two positive numbers, as in [0.5, 0.5]")
        if self.pool < len(self.levels):
            raise ValueError(f"pool={self.pool} must hold a task of each of the levels: raise it")
        return self


class UniformPool(PoolSettings):
    """All tasks of the pool with equal weight."""

    sampler: Literal["uniform"] = "uniform"


class Learnability(PoolSettings):
    """Weights of E[p(1 − p)] to the power `sharpness`."""

    sampler: Literal["learnability"] = "learnability"
    sharpness: float = Field(default=4.0, gt=0)
    """Exponent (1 = proportional to E[p(1 − p)])."""


class Band(PoolSettings):
    """Tasks whose expected pass rate lies in a band."""

    sampler: Literal["band"] = "band"
    low: float = Field(default=0.2, ge=0, le=1)
    """Lower end of the band."""
    high: float = Field(default=0.8, ge=0, le=1)
    """Upper end of the band."""

    @model_validator(mode="after")
    def _is_not_empty(self) -> Band:
        if self.low >= self.high:
            raise ValueError(
                f"the band from low={self.low:g} to high={self.high:g} is empty: low must be below"
                " high"
            )
        return self


class Thompson(PoolSettings):
    """Weights of p(1 − p), with every p drawn from its posterior."""

    sampler: Literal["thompson"] = "thompson"


class Mgpo(PoolSettings):
    """Weights of exp(−sharpness · KL(p ‖ ½))."""

    sampler: Literal["mgpo"] = "mgpo"
    sharpness: float = Field(default=4.0, gt=0)
    """λ of the exponent."""


class Staged(PoolSettings):
    """The tasks of the level whose pass rate is nearest to a target."""

    sampler: Literal["staged"] = "staged"
    target: float = Field(default=0.5, gt=0, lt=1)
    """Pass rate to aim for."""
    review: float = Field(default=0.1, ge=0, lt=1)
    """Share of the tasks taken from easier levels."""

    @model_validator(mode="after")
    def _has_levels(self) -> Staged:
        if len(self.levels) < 2:
            raise ValueError(
                "sampler 'staged' moves between levels: give at least two, as in levels ="
                " [{operations = 1}, {operations = 2}]"
            )
        return self


Pooled = UniformPool | Learnability | Band | Thompson | Mgpo | Staged
CurriculumSettings = Annotated[InOrder | Pooled, Field(discriminator="sampler")]

SAMPLERS: dict[str, type[InOrder | PoolSettings]] = {
    "in_order": InOrder,
    "uniform": UniformPool,
    "learnability": Learnability,
    "band": Band,
    "thompson": Thompson,
    "mgpo": Mgpo,
    "staged": Staged,
}
"""Name of a sampler -> its table."""


def weigh_of(settings: PoolSettings) -> Any:
    """The sampler of `samplers`, with its options set."""
    from agentrl.curriculum import samplers

    own = settings.model_fields_set | set(type(settings).model_fields)
    own -= {*PoolSettings.model_fields, "sampler"}
    name: str = getattr(settings, "sampler")  # noqa: B009 - each subclass has it
    function = samplers.near_half if name == "mgpo" else getattr(samplers, name)
    return partial(function, **{one: getattr(settings, one) for one in sorted(own)})
