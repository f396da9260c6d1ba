"""All parts of one training run, put together from its settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agentrl.calls import Guard
from agentrl.chat.settings import in_words
from agentrl.curriculum.source import Observed, TaskSource
from agentrl.engines.base import Engine, Sampling
from agentrl.engines.factory import open_chat, open_engine
from agentrl.engines.vllm_setup import refuse_missing
from agentrl.errors import ConfigError
from agentrl.evaluation.passk import summarize
from agentrl.policies.base import TokenPolicy
from agentrl.rollout.play import Setting
from agentrl.rollout.rollouts import Rollouts
from agentrl.safety.guard import guard_factory
from agentrl.safety.loading import idle_patterns, read_policy, refuse_unfit
from agentrl.trainers.algorithms.recipe import Recipe
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
from agentrl.trainers.online.rounds import Given, Round, Rounds, pack_round, with_greedy
from agentrl.trainers.online.tasks import RunTasks
from agentrl.trajectory import Episode
from agentrl.types import Message

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
        tasks: of which environments they are, and which are held out.
        rollouts: plays them with the learner's weights.
        learner: learns from what was played.
        engine: what the policy samples from.
        quiet: rounds in a row, up to now, without signal and without success.
        watch: sees that sampler and learner agree.
        last: rounds after which the run ends: all, or fewer where its budget is spent.

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
        _refuse_unweighed(config, algorithm)
        algorithm.refuse_no_teacher()
        self._given = Given(algorithm.teacher, config.seed)
        refuse_missing(config.engine)
        self._price = SideEffectPrice(
            config.safety, found.state.get("multiplier") if found else None
        )
        self._warn_of_price(config.tasks_per_step * config.group_size)
        self.tasks = RunTasks(config, self._price.around)
        self._guard = self._guard_of(config)
        for sentence in self.tasks.overlaps():
            self._warn(sentence)
        self.chat = open_chat(found.model if found else config.model, config.chat)
        self.tokenizer = self.chat.tokenizer
        self._check_given()
        self.config = config = config.model_copy(update={"chat": config.chat.found(self.chat)})
        self.learner = Learner(config, found, self._warn, self.folder.keep)
        pad_id = self.tokenizer.pad_token_id
        self.pad_id = 0 if pad_id is None else int(pad_id)
        state = found.state if found else {}
        self.quiet: int = state.get("quiet", 0)
        self.last = config.steps
        self._ref_kl: float = state.get("ref_kl", 0.0)
        self._end_beyond_budget(self.folder.start)
        refills = self.learner.recipe.refill
        self.source = source or self.tasks.source(state.get("source"), refills)
        self._parts = ExitStack()
        try:
            log = path / "engine.log"
            self._open_sampler(engine or partial(open_engine, settings=config.engine, log=log))
            self._rounds = self._open_rounds()
            self.listen("chat", in_words(self.chat))
            self.folder.open(config)  # last: a part that cannot be had leaves the folder as it was
            self._parts.callback(self.folder.close)
            played = path / "episodes.jsonl"
            self.watch.open(path, played, self.folder.start, self._parts)
        except BaseException:
            self._parts.close()
            raise

    def rounds_left(self) -> Iterator[int]:
        """Numbers of the rounds to play, until the last one or until the budget is spent."""
        step = self.folder.start
        while step < self.last:
            yield step
            step += 1

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
        batch = pack_round(played, row, self.pad_id, self._given.draw(played))
        if played.step == self.folder.start and batch.n_tokens:
            self._warn_of_absent_rewards(played)
        if "greedy" not in row.needs:
            return batch
        return with_greedy(batch, played, self.rollouts, self._greedy, row)

    def evaluate(self, step: int) -> dict[str, float]:
        """pass@k on the first held-out tasks, and how many episodes infrastructure failed; the best
        model is kept where the settings ask for it.
        """
        settings, tasks = self.config.held_out, self.tasks.held_out
        self.listen("phase", (f"evaluation after round {step}", len(tasks) * settings.samples))
        size = settings.samples
        groups = self.rollouts.gather(tasks, step, phase="eval", group_size=size)
        episodes = [episode for group in groups for episode in group.episodes]
        result = summarize(episodes, settings.ks)
        self.listen("eval", {"step": step, **result})
        metrics = held_out_metrics(result) | self.tasks.held_out_by_env(episodes, settings.ks)
        if self.config.keep_best:
            best.offer(self.folder.path, step, metrics, self._write_model)
        return metrics

    def chosen(self, played: Round) -> dict[str, float]:
        """What a source that chooses says of the round, and metrics by environment; the tasks that
        it chose are recorded.
        """
        groups, rewards = list(played.groups), self.learner.recipe.rewards
        metrics = self.tasks.metrics(groups, rewards)
        if isinstance(self.source, Observed):
            metrics |= self.source.metrics()
            self.folder.note({"step": played.step + 1, **self.source.news()})
        return metrics

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of a round and show them."""
        self.listen("metrics", self.folder.log(step, metrics | self._cost))
        self._ref_kl = metrics.get("policy/ref_kl", self._ref_kl)
        self._end_beyond_budget(step)

    def save(self, step: int) -> None:
        """Write the checkpoint from which round `step` begins."""

        def write(folder: Path) -> dict[str, Any]:
            state = self.learner.save(folder)
            self.tokenizer.save_pretrained(folder / "model")
            self._rounds.save(folder)
            kept = {"quiet": self.quiet, "multiplier": (self._price.value, self._price.integral)}
            return {**state, "source": self.source.state(), **kept, "ref_kl": self._ref_kl}

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

    def _open_sampler(self, open_with: EngineFactory) -> None:
        config, model = self.config, self.learner.model
        sampled = sampling_copy(model) if config.engine.own_weights else model
        engine = open_with(sampled, self.chat, synchronous=config.deterministic)
        tokens = self.tasks.turn_tokens
        sampling = Sampling(temperature=config.temperature, max_tokens=tokens)
        concurrency = min(config.tasks_per_step * config.group_size, config.concurrency)
        self._greedy = TokenPolicy(engine, self.chat, replace(sampling, temperature=0.0))
        setting = Setting(
            make=self.tasks.make,
            makes=self.tasks.makes,
            policy=TokenPolicy(engine, self.chat, sampling),
            pool=self.tasks.pool(concurrency),
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
        if config.engine.routing != "off" and not getattr(engine, "tells_routing", False):
            raise ConfigError(
                f"engine.routing={config.engine.routing!r}: this engine does not say which experts"
                " it chose: leave it out"
            )
        self.rollouts.sync(self.learner.weights(), self.folder.start)
        prompt_ids = self.chat.prompt_ids(
            [Message.user("How many letters has the word agent?")], ()
        )
        self.watch = Watch(model, engine, self.rollouts, prompt_ids, sampling, self.listen)
        self.learner.observer = self.watch

    def _guard_of(self, config: TrainConfig) -> Callable[[], Guard] | None:
        if not config.safety.policy:
            return None
        policy = read_policy(config.safety.policy)
        for env in self.tasks.environments.values():
            refuse_unfit(policy, env.id, env.tools, sandbox=env.needs_sandbox)
            for sentence in idle_patterns(policy, env.id, env.tools):
                self._warn(sentence)
        return guard_factory(policy, deterministic=True)

    def _end_beyond_budget(self, step: int) -> None:
        """End the run with this round where the policy is too far from its reference."""
        budget = self.learner.recipe.ref_kl_budget
        if self._ref_kl > budget and step < self.last:
            self.last = step
            self._warn(
                f"policy/ref_kl is above loss.ref_kl_budget={budget}: the run ends with round"
                f" {step}, and its checkpoint is the last; raise the budget and --resume to go on"
            )

    def _check_given(self) -> None:
        tested = [task.id for task in self.tasks.held_out]
        self._given.refuse_others(set(self.tasks.environments), tested, self.tokenizer)
        if sentence := self._given.of_test_split():
            self._warn(sentence)

    def _warn_of_price(self, episodes: int) -> None:
        if sentence := self._price.warning(episodes):
            self._warn(sentence)
        found = self.folder.found
        if found and self._price.is_bound and "multiplier" not in found.state:
            self._warn(
                "the checkpoint has no multiplier of safety.at_most, as another version wrote it:"
                f" the penalty begins again at {self._price.value:g}"
            )

    def _write_model(self, folder: Path) -> None:
        save_policy(self.learner.model, folder / "model")
        self.tokenizer.save_pretrained(folder / "model")

    def _open_rounds(self) -> Rounds:
        config, found = self.config, self.folder.found

        def tell(step: int, draw: int, tasks: int) -> None:
            label = f"round {step + 1}/{config.steps}" + (f", draw {draw + 1}" if draw else "")
            self.listen("phase", (label, tasks * config.group_size))

        source, sizes = self.source, None
        if isinstance(source, Observed) and getattr(config.curriculum, "group_most", False):
            sizes = partial(source.sizes, group_size=config.group_size)
        rounds = Rounds(
            self.source, self.rollouts, config.tasks_per_step, self.learner.recipe, tell, sizes
        )
        if found:
            rounds.load(found.folder)
        return rounds

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


def _refuse_unweighed(config: TrainConfig, algorithm: Recipe) -> None:
    """Refuse rewards of turns that are computed and then not read."""
    if unread := sorted(config.process_rewards.keys() - algorithm.turn_weights.keys()):
        name = unread[0]
        raise ConfigError(
            f"process_rewards.{name}={config.process_rewards[name]} has no weight, so it would not"
            f" train: add loss = {{turn_weights = {{{name} = 1.0}}}}, and a recipe that gives"
            " credit by turns, as turn_grpo"
        )
