"""The tasks of a run: of which environments they are, which train next, and which are held out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from agentrl.curriculum.mixture import env_of, open_source
from agentrl.curriculum.source import EnvPart, TaskSource, Uniform, parts_of
from agentrl.env import ToolEnv
from agentrl.errors import ConfigError
from agentrl.evaluation.overlap import find_overlap, overlap_words
from agentrl.evaluation.summary import summarize
from agentrl.rollout.play import derive_seed
from agentrl.specs import PoolSpec, VerifierSpec
from agentrl.trainers.batch import Rewards
from agentrl.trainers.config import TrainConfig
from agentrl.trainers.observe.metrics import held_out_metrics
from agentrl.trainers.rounds import MAX_DRAWS
from agentrl.trajectory import Episode, Group
from agentrl.types import Ending, Task


class RunTasks:
    """The environments and tasks of a run.

    Args:
        config: the settings.

    Attributes:
        specs: the environments, one for each level of each.
        held_out: tasks of an evaluation; none if the run has no evaluations.
        is_mixture: whether the run has several environments.

    Raises:
        ConfigError: an environment cannot be built, has too few tasks, or nothing to hold out.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        levels = getattr(config.curriculum, "levels", ())
        verifier = VerifierSpec(process_rewards=dict(config.process_rewards))
        self._envs = parts_of(config.envs, levels, verifier)
        self._parts = [part for parts in self._envs for part in parts]
        self.specs = tuple(part.make for part in self._parts)
        self.is_mixture = len(self._envs) > 1
        self._check()
        self.held_out = self._held_out() if config.eval_every else []

    @property
    def environments(self) -> Mapping[str, ToolEnv]:
        """Name, as episodes record it -> one environment of that name; levels share theirs."""
        return {env.id: env for env in (part.make() for part in self._parts)}

    @property
    def turn_tokens(self) -> int:
        """The longest turn that any environment allows."""
        return max(part.make().limits.turn_tokens for part in self._parts)

    def overlaps(self) -> list[str]:
        """A warning for each environment whose training tasks overlap with held-out ones."""
        found = []
        for part in self._parts:
            begins = f"{part.prefix}/" if part.prefix else ""
            own = [one for one in self.held_out if one.id.startswith(begins)]
            seed = derive_seed(self._config.seed, "train", 0)
            if said := overlap_words(find_overlap(part.make(), own, "test", seed) if own else None):
                found.append(said)
        return found

    def pool(self, size: int) -> PoolSpec:
        """The sandboxes that all environments share.

        Raises:
            ConfigError: they ask for different ones.
        """
        made = {part.id: part.make() for part in self._parts}
        asked = {name: (env.sandbox_limits, env.network) for name, env in made.items()}
        first = next(iter(asked))
        if other := next((name for name in asked if asked[name] != asked[first]), None):
            raise ConfigError(
                f"{first} and {other} ask for sandboxes with different limits or networks, and the"
                " environments of a run share theirs: give them the same, or train them apart"
            )
        strictest = next((env for env in made.values() if env.untrusted), made[first])
        return PoolSpec.of(strictest, self._config.sandbox, size)

    def source(self, state: Mapping[str, Any] | None, refills: bool) -> TaskSource:
        """What hands out training tasks.

        Args:
            state: of the source of an earlier part of the run.
            refills: whether a round may draw more than once.

        Raises:
            ConfigError: the pool of a curriculum is too small for its rounds, or the state is not
                one of these settings.
        """
        config = self._config
        source = open_source(self._envs, config.curriculum, config.seed, state, refills)
        if not isinstance(source, Uniform):  # `_check` has looked at its tasks
            source.refuse_rounds(config.tasks_per_step, MAX_DRAWS if refills else 1)
        return source

    def metrics(self, groups: Sequence[Group], rewards: Rewards) -> dict[str, float]:
        """`env/NAME/…` of each of several environments: share of the groups, reward, pass rate,
        and groups without signal.
        """
        found: dict[str, float] = {}
        for name in self._names():
            own = [group for group in groups if env_of(group.task.id) == name]
            scored = [
                one
                for group in own
                for one in group.episodes
                if one.end.ending is not Ending.FAILED
            ]
            found[f"env/{name}/share"] = len(own) / max(1, len(groups))
            if scored:
                quiet = sum(not rewards.has_signal(group) for group in own)
                found |= {
                    f"env/{name}/reward": sum(one.reward or 0.0 for one in scored) / len(scored),
                    f"env/{name}/pass": sum(bool(one.passed) for one in scored) / len(scored),
                    f"env/{name}/no_signal": quiet / len(own),
                }
        return found

    def held_out_by_env(self, episodes: list[Episode], ks: tuple[int, ...]) -> dict[str, float]:
        """`eval/NAME/…` of each of several environments."""
        found: dict[str, float] = {}
        for name in self._names():
            own = [one for one in episodes if env_of(one.task.id) == name]
            metrics = held_out_metrics(summarize(own, ks)) if own else {}
            found |= {f"eval/{name}/{key.removeprefix('eval/')}": v for key, v in metrics.items()}
        return found

    def _names(self) -> list[str]:
        return [parts[0].env for parts in self._envs] if self.is_mixture else []

    def _check(self) -> None:
        config = self._config
        if config.keep_best and not config.eval_every:
            raise ConfigError(
                "keep_best=true chooses by held-out pass@1, and eval_every=0 measures none: set"
                " eval_every as well"
            )
        for part in self._parts:
            if config.eval_every and part.make().one_split:
                raise ConfigError(
                    f"eval_every={config.eval_every}: {part.id} has one split, so nothing is held"
                    " out: set eval_every=0, or give the environment held-out tasks (code-v0:"
                    " env_settings.held_out = 0.2)"
                )
        if len(self._parts) == 1:  # too small a split is refused before anything is played
            part = self._parts[0]
            Uniform(part.epoch(config.seed), part.id).next(config.tasks_per_step)

    def _held_out(self) -> list[Task]:
        """The first held-out tasks, as many of each part."""
        share, more = divmod(self._config.held_out.tasks, len(self._parts))
        found: list[Task] = []
        for number, part in enumerate(self._parts):
            found += self._first(part, max(1, share + (number < more)))
        return found

    def _first(self, part: EnvPart, count: int) -> list[Task]:
        tasks = list(islice(part.tasks("test", derive_seed(self._config.seed, "test")), count))
        if not tasks:
            raise ConfigError(
                f"eval_every={self._config.eval_every}: {part.id} has no task in split 'test': set"
                " eval_every=0"
            )
        return tasks
