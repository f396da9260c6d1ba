"""All parts of one training run, put together from its settings."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agentrl.calls import Guard
from agentrl.chat.settings import in_words
from agentrl.curriculum.source import TaskSource, Uniform
from agentrl.engines.base import Engine, Sampling
from agentrl.engines.factory import open_chat, open_engine
from agentrl.engines.vllm_setup import refuse_missing
from agentrl.env import ToolEnv
from agentrl.errors import ConfigError
from agentrl.evaluation.overlap import find_overlap, overlap_words
from agentrl.evaluation.passk import summarize
from agentrl.policies.base import TokenPolicy
from agentrl.registry import factory
from agentrl.rollout.play import Setting, derive_seed
from agentrl.rollout.rollouts import Rollouts
from agentrl.runner import pool_for
from agentrl.safety.guard import guard_factory
from agentrl.safety.loading import read_policy
from agentrl.trainers.algorithms.recipes import recipe
from agentrl.trainers.batch import TokenBatch
from agentrl.trainers.config import TrainConfig
from agentrl.trainers.models.loading import save_policy
from agentrl.trainers.models.weights import sampling_copy
from agentrl.trainers.observe.metrics import held_out_metrics
from agentrl.trainers.observe.watch import Watch
from agentrl.trainers.online import best
from agentrl.trainers.online.folder import RunFolder
from agentrl.trainers.online.learner import Learner
from agentrl.trainers.online.price import SideEffectPrice
from agentrl.trainers.online.rounds import Round, Rounds, pack_round, with_greedy
from agentrl.trajectory import Episode
from agentrl.types import Message, Task

MAX_CONCURRENCY = 256
"""Episodes that play at the same time, however large a round is."""

Listener = Callable[[str, Any], None]
"""Told of ("episode", Episode) on the loop thread; of ("phase", (label, episodes)),
("metrics", row), ("warning", sentence) and ("eval", summary) on the training thread."""


EngineFactory = Callable[..., Engine]


class Run:
    """A training run. Use it as a context manager: leaving it ends sandboxes and threads.

    Args:
        config: the settings.
        path: the run folder.
        resume: continue from the folder's last checkpoint (from the start if there is none).
        listen: progress display.
        source: hands out tasks, where not every task once per epoch.
        engine: (model, chat, synchronous=) -> what samples, where not the engine of the settings.

    Attributes:
        folder: what is recorded, and where the run goes on.
        source: hands out tasks.
        rollouts: plays them with the learner's weights.
        learner: learns from what was played.
        engine: what the policy samples from.
        quiet: rounds in a row, up to now, without signal and without success.
        watch: sees that sampler and learner agree.

    Raises:
        ConfigError: the folder holds another run, or a part cannot be had; nothing already written
            is touched.
    """

    def __init__(
        self,
        config: TrainConfig,
        path: Path,
        *,
        resume: bool = False,
        listen: Listener | None = None,
        source: TaskSource | None = None,
        engine: EngineFactory | None = None,
    ) -> None:
        self._cost: dict[str, float] = {}
        self.listen = listen or (lambda kind, what: None)
        self.folder = RunFolder(path, config, resume=resume)
        found = self.folder.found
        if resume and not found:
            self._warn(f"{path} has no checkpoint to resume from: beginning with round 1")
        self.config = config
        # What needs no weights comes first, so that a wrong setting costs no loading.
        algorithm = recipe(config.recipe, **config.loss)
        algorithm.refuse_group_size(config.group_size)
        algorithm.refuse_minibatches(config.minibatches)
        refuse_missing(config.engine)
        self._price = SideEffectPrice(config.safety, found.state.get("price") if found else None)
        self._guard = self._guard_of(config)
        make = self._price.around(factory(config.env, **config.env_settings))
        self._check_splits(make())
        self._held_out = self._held_out_tasks(make())
        self.chat = open_chat(found.model if found else config.model, config.chat)
        self.tokenizer = self.chat.tokenizer
        self.config = config = config.model_copy(update={"chat": config.chat.found(self.chat)})
        self.learner = Learner(config, found, self._warn, self.folder.keep)
        pad_id = self.tokenizer.pad_token_id
        self.pad_id = 0 if pad_id is None else int(pad_id)
        state = found.state if found else {}
        self.quiet: int = state.get("quiet", 0)
        self.source = source or Uniform(self._epoch_of(make), config.env, state.get("source"))
        self._parts = ExitStack()
        try:
            self._open_sampler(make, engine or partial(open_engine, settings=config.engine))
            self._rounds = self._open_rounds()
            self.listen("chat", in_words(self.chat))
            self.folder.open(config)  # last: a part that cannot be had leaves the folder as it was
            self._parts.callback(self.folder.close)
            played = path / "episodes.jsonl"
            self.watch.open(path, played, self.folder.start, self._parts)
        except BaseException:
            self._parts.close()
            raise

    def play(self, step: int) -> Round:
        """Play one round.

        Raises:
            ConfigError: the environment has fewer tasks than a round.
        """
        played = self._rounds.play(step)
        self._cost = self._price.metrics()
        self._price.observe(played.groups)
        return played

    def pack(self, played: Round) -> TokenBatch:
        """A round as one batch, with the rewards of greedy episodes where the recipe reads them."""
        row = self.learner.recipe
        batch = pack_round(played, row, self.pad_id)
        if played.step == self.folder.start and batch.n_tokens:
            self._warn_of_absent_rewards(played)
        if "greedy" not in row.needs:
            return batch
        return with_greedy(batch, played, self.rollouts, self._greedy, row)

    def evaluate(self, step: int) -> dict[str, float]:
        """pass@k on the first held-out tasks, and how many episodes infrastructure failed; the best
        model is kept where the settings ask for it.
        """
        settings, tasks = self.config.held_out, self._held_out
        self.listen("phase", (f"evaluation after round {step}", len(tasks) * settings.samples))
        size = settings.samples
        groups = self.rollouts.gather(tasks, step, phase="eval", group_size=size)
        result = summarize((episode for group in groups for episode in group.episodes), settings.ks)
        self.listen("eval", {"step": step, **result})
        metrics = held_out_metrics(result)
        if self.config.keep_best:
            best.offer(self.folder.path, step, metrics, self._write_model)
        return metrics

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of a round and show them."""
        self.listen("metrics", self.folder.log(step, metrics | self._cost))

    def save(self, step: int) -> None:
        """Write the checkpoint from which round `step` begins."""

        def write(folder: Path) -> dict[str, Any]:
            state = self.learner.save(folder)
            self.tokenizer.save_pretrained(folder / "model")
            self._rounds.save(folder)
            kept = {"quiet": self.quiet, "price": self._price.value}
            return {**state, "source": self.source.state(), **kept}

        self.folder.save(step, write)

    def close(self) -> None:
        """End sandboxes, threads and files; safe to call twice."""
        self._parts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open_sampler(self, make: Callable[[], ToolEnv], open_with: EngineFactory) -> None:
        config, model = self.config, self.learner.model
        sampled = sampling_copy(model) if config.engine.own_weights else model
        engine = open_with(sampled, self.chat, synchronous=config.deterministic)
        env = make()
        sampling = Sampling(temperature=config.temperature, max_tokens=env.limits.turn_tokens)
        concurrency = min(config.tasks_per_step * config.group_size, MAX_CONCURRENCY)
        self._greedy = TokenPolicy(engine, self.chat, replace(sampling, temperature=0.0))
        setting = Setting(
            make=make,
            policy=TokenPolicy(engine, self.chat, sampling),
            pool=pool_for(env, config.sandbox, concurrency),
            run=self.folder.path.name,
            seed=config.seed,
            deterministic=config.deterministic,
            guard=self._guard,
        )
        self.rollouts = Rollouts(
            setting,
            group_size=config.group_size,
            concurrency=concurrency,
            on_episode=self._record,
        )
        self._parts.callback(self.rollouts.close)
        self._parts.callback(lambda: self.rollouts.run(engine.close()))
        self._parts.callback(self.rollouts.cancel)  # first: nothing may ask what is closed
        self.engine = engine
        self.rollouts.sync(self.learner.weights(), self.folder.start)
        prompt_ids = self.chat.prompt_ids(
            [Message.user("How many letters has the word agent?")], ()
        )
        self.watch = Watch(model, engine, self.rollouts, prompt_ids, sampling, self.listen)
        self.learner.observer = self.watch

    def _guard_of(self, config: TrainConfig) -> Callable[[], Guard] | None:
        if not config.safety.policy:
            return None
        return guard_factory(read_policy(config.safety.policy), deterministic=True)

    def _write_model(self, folder: Path) -> None:
        save_policy(self.learner.model, folder / "model")
        self.tokenizer.save_pretrained(folder / "model")

    def _open_rounds(self) -> Rounds:
        config, found = self.config, self.folder.found

        def tell(step: int, draw: int, tasks: int) -> None:
            label = f"round {step + 1}/{config.steps}" + (f", draw {draw + 1}" if draw else "")
            self.listen("phase", (label, tasks * config.group_size))

        rounds = Rounds(
            self.source, self.rollouts, config.tasks_per_step, self.learner.recipe, tell
        )
        if found:
            rounds.load(found.folder)
        return rounds

    def _check_splits(self, env: ToolEnv) -> None:
        config = self.config
        if config.keep_best and not config.eval_every:
            raise ConfigError(
                "keep_best=True chooses by held-out pass@1, and eval_every=0 measures none: set"
                " eval_every as well"
            )
        if config.eval_every and env.one_split:
            raise ConfigError(
                f"eval_every={config.eval_every}: {config.env} has one split, so nothing is held"
                " out: set eval_every=0, or give the environment held-out tasks (code-v0:"
                " env_settings.held_out = 0.2)"
            )
        # Too small a split is refused before anything is played.
        Uniform(self._epoch_of(lambda: env), config.env).next(config.tasks_per_step)

    def _held_out_tasks(self, env: ToolEnv) -> list[Task]:
        config = self.config
        if not config.eval_every:
            return []
        split = env.tasks("test", derive_seed(config.seed, "test"))
        tasks = list(itertools.islice(split, config.held_out.tasks))
        if not tasks:
            raise ConfigError(
                f"eval_every={config.eval_every}: {config.env} has no task in split 'test': set"
                " eval_every=0"
            )
        seed = derive_seed(config.seed, "train", 0)
        if said := overlap_words(find_overlap(env, tasks, "test", seed)):
            self._warn(said)
        return tasks

    def _epoch_of(self, make: Callable[[], ToolEnv]) -> Callable[[int], Any]:
        return lambda epoch: make().tasks("train", derive_seed(self.config.seed, "train", epoch))

    def _warn(self, sentence: str) -> None:
        self.listen("warning", sentence)

    def _record(self, episode: Episode) -> None:
        self.folder.record(episode)
        self.listen("episode", episode)
        self.learner.recipe.rewards.refuse(episode)

    def _warn_of_absent_rewards(self, played: Round) -> None:
        episodes = [one for group in played.trained for one in group.episodes]
        given = {name for one in episodes for name in one.score.turns}
        if absent := sorted(self.learner.recipe.turn_weights.keys() - given):
            said = f"no episode of round {played.step + 1} has the process rewards {absent}"
            there = sorted(given) or "none"
            self._warn(f"{said} that turn_weights names; there are {there}")
