"""One training run: its parts, put together from the settings, and what each round asks of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from agentrl.curriculum.source import Observed, TaskSource
from agentrl.engines.base import Engine, Measured, Sampling
from agentrl.engines.factory import engine_opener, open_chat, open_engine
from agentrl.engines.vllm import refuse_missing
from agentrl.errors import ConfigError
from agentrl.evaluation.summary import summarize
from agentrl.policies.base import TokenPolicy
from agentrl.rollout.child import ChildEngine, ChildPlan, ChildRollouts
from agentrl.rollout.play import Setting
from agentrl.rollout.rollouts import Dispatch, GroupStream, Rollouts
from agentrl.safety.loading import idle_patterns, read_policy, refuse_unfit
from agentrl.specs import GuardSpec, RunSpec
from agentrl.trainers.batch import TokenBatch
from agentrl.trainers.config import TrainConfig
from agentrl.trainers.folder import RunFolder, offer_model
from agentrl.trainers.learner import Learner, recipe_of
from agentrl.trainers.models.loading import save_policy
from agentrl.trainers.models.weights import sampling_copy
from agentrl.trainers.observe.metrics import (
    held_out_metrics,
    prompt_of,
    repeat_metrics,
    rollout_metrics,
    to_read,
)
from agentrl.trainers.observe.parity import ParityCheck
from agentrl.trainers.price import SideEffectPrice
from agentrl.trainers.recorded import RecordedEpisodes
from agentrl.trainers.rounds import Round, Rounds, pack_round, with_greedy
from agentrl.trainers.tasks import RunTasks
from agentrl.trajectory import Episode
from agentrl.types import Message
from agentrl.waits import FOLDER as WAITS
from agentrl.waits import Waiter, owned_by, report_waits, waiting

EngineFactory = Callable[..., Engine]
PROBE = "How many letters has the word agent?"


class RunEvents(Protocol):
    """Is told what happens in a run.

    `on_episode` is called on the rollouts' thread, everything else on the training thread.
    """

    def on_phase(self, label: str, episodes: int) -> None:
        """A draw of tasks or an evaluation begins, with this many episodes."""
        ...

    def on_episode(self, episode: Episode) -> None:
        """An episode has ended, retried ones included."""
        ...

    def on_round(self, row: Mapping[str, Any]) -> None:
        """A round has ended; `row` is its line in `metrics.jsonl`."""
        ...

    def on_evaluation(self, summary: Mapping[str, Any]) -> None:
        """An evaluation has ended; `summary` is what `evaluation.summary.summarize` returned."""
        ...

    def on_warning(self, sentence: str) -> None:
        """Something is allowed but odd."""
        ...


class Unheard:
    """`RunEvents` that nobody listens to."""

    def on_phase(self, label: str, episodes: int) -> None:
        """Ignored."""

    def on_episode(self, episode: Episode) -> None:
        """Ignored."""

    def on_round(self, row: Mapping[str, Any]) -> None:
        """Ignored."""

    def on_evaluation(self, summary: Mapping[str, Any]) -> None:
        """Ignored."""

    def on_warning(self, sentence: str) -> None:
        """Ignored."""


class Run:
    """A training run. Use it as a context manager: leaving it ends sandboxes and threads.

    Args:
        config: the settings.
        path: the run folder.
        resume: continue from the folder's last checkpoint (from the start if there is none).
        events: called with what happens.
        source: hands out tasks; default: that of the settings.
        engine: (model, chat, synchronous=) -> what samples; default: the engine of the settings.
            With one, episodes play in this process also where mode="async".

    Attributes:
        folder: what is recorded, and where the run continues.
        tasks: the environments, and which tasks are held out.
        source: hands out tasks.
        engine: what the policy samples from.
        rollouts: play tasks with the learner's weights, in this process or in a child.
        spec: environments, sandboxes and guard, as `specs.json` records them.
        learner: learns from what was played.
        parity: checks that engine and learner agree.
        quiet: rounds in a row, up to now, without signal and without success.
        last: rounds after which the run ends; fewer than all once its budget is spent.

    Raises:
        ConfigError: the folder holds another run, or a part cannot be opened; nothing already
            written is touched.
    """

    engine: Engine | ChildEngine
    rollouts: GroupStream

    def __init__(
        self,
        config: TrainConfig,
        path: Path,
        *,
        resume: bool = False,
        events: RunEvents | None = None,
        source: TaskSource | None = None,
        engine: EngineFactory | None = None,
    ) -> None:
        self.events: RunEvents = events or Unheard()
        self.folder = RunFolder(path, config, resume=resume)
        checkpoint = self.folder.checkpoint
        state = checkpoint.state if checkpoint else {}
        if resume and not checkpoint:
            self._warn(f"{path} has no checkpoint to resume from: beginning with round 1")
        # What needs no weights comes first, so that a wrong setting costs no loading.
        recipe = recipe_of(config)
        self._recorded = (
            RecordedEpisodes(recipe.teacher, config.seed) if recipe.teacher.share else None
        )
        refuse_missing(config.engine)
        self._price = self._open_price(config, state)
        self.tasks = RunTasks(config)
        self._guard = self._open_guard(config)
        for sentence in self.tasks.overlaps():
            self._warn(sentence)
        self._chat_of = str(checkpoint.model if checkpoint else config.model), config.chat
        self.chat = open_chat(*self._chat_of)
        self.tokenizer = self.chat.tokenizer
        self._check_recorded()
        self.config = config.model_copy(update={"chat": config.chat.found(self.chat)})
        self.learner = Learner.load(self.config, recipe, checkpoint, self._warn)
        self.learner.keep = self.folder.keep
        pad_id = self.tokenizer.pad_token_id
        self.pad_id = 0 if pad_id is None else int(pad_id)
        self.quiet: int = state.get("quiet", 0)
        self.last = config.steps
        self._ref_kl: float = state.get("ref_kl", 0.0)
        self._end_beyond_budget(self.folder.start)
        self.source = source or self.tasks.source(state.get("source"), recipe.refill)
        self._seen_prompts: set[str] = set()
        self._sampling = Sampling(config.temperature, max_tokens=self.tasks.turn_tokens)
        self._concurrency = min(config.tasks_per_step * config.group_size, config.concurrency)
        self.spec = self._open_spec(self._concurrency)
        self._parts = ExitStack()
        try:
            log = path / "engine.log"
            if config.mode == "async" and engine is None:
                self._open_child(path / "rollouts.log")
            else:
                open_with = engine or partial(open_engine, settings=config.engine, log=log)
                self._open_sampler(open_with)
            self._open_parity()
            self._rounds = self._open_rounds()
            self.folder.open(self.config)  # last: a part that is missing leaves it untouched
            self.spec.write(path)
            self._parts.enter_context(report_waits(path, "trainer"))
            self._parts.callback(self.folder.close)
            self._seen_prompts |= self.folder.played_prompts()
            self.parity.confirm(self.learner.version)
        except BaseException:
            self._parts.close()
            raise

    # --- one round

    def rounds_left(self) -> Iterator[int]:
        """Yield the numbers of the rounds to play, until the last one or the end of the budget."""
        number = self.folder.start
        while number < self.last:
            yield number
            number += 1

    def play(self, number: int) -> Round:
        """Play one round."""
        with self._waiting("episodes of its round", number):
            return self._rounds.play(number)

    def pack(self, played: Round) -> TokenBatch:
        """Pack a round as one batch, with recorded and greedy episodes if the recipe wants them."""
        recipe, recorded = self.learner.recipe, list[Episode]()
        if self._recorded is not None:
            own = sum(len(group.episodes) for group in played.trained)
            recorded = self._recorded.draw(own, played.number)
        batch = pack_round(played, recipe, self.pad_id, self.learner.version, recorded)
        if played.number == self.folder.start and batch.n_tokens:
            self._warn_of_absent_rewards(played)
        if "greedy" not in recipe.needs:
            return batch
        price = self._price_of_side_effects()
        return with_greedy(batch, played, self.rollouts, self._sampling, recipe, price)

    def learn(self, batch: TokenBatch, number: int) -> dict[str, float]:
        """Make all updates of a round, while the engine pauses or plays later rounds."""
        self.parity.confirm_if_restarted(self.learner.version)
        if not self.config.staleness:
            self.engine.pause()  # nothing is in flight: an engine that can sleep frees its memory
        with self._waiting("its update", number):
            return self.learner.step(batch, number)

    def sync(self) -> dict[str, float]:
        """Hand the learner's weights to the engine and confirm that it has them."""
        version = self.learner.version
        with self._waiting("the engine to take its weights", version):
            self.rollouts.sync(self.learner.weights(), version)
            self.engine.resume()
            return self.parity.confirm(version)

    def describe(self, played: Round) -> dict[str, float]:
        """Return the metrics of what was played; record choices and samples for readers."""
        recipe, groups = self.learner.recipe, played.groups
        metrics = rollout_metrics(groups, recipe.rewards)
        if self.tasks.is_mixture:
            metrics |= self.tasks.metrics(groups, recipe.rewards)
        metrics |= repeat_metrics(groups, self._seen_prompts)
        self._seen_prompts |= {prompt_of(group) for group in groups}
        if recipe.filters:
            metrics |= played.draws.metrics(recipe.rewards)
        if isinstance(self.source, Observed):
            metrics |= self.source.metrics()
            self.folder.note_choice({"step": played.number + 1, **self.source.news()})
        if isinstance(self.engine, Measured):
            metrics |= self.engine.metrics()
        if self._price is not None:
            metrics |= self._price.metrics()
            self._price.observe(groups)
        self.folder.put_aside(to_read(groups, played.number))
        return metrics

    def evaluate(self, rounds: int) -> dict[str, float]:
        """Play the held-out tasks after this many rounds; the best model is kept if asked for."""
        settings, tasks = self.config.held_out, self.tasks.held_out
        size = settings.samples
        self.events.on_phase(f"evaluation after round {rounds}", len(tasks) * size)
        price = self._price_of_side_effects()
        work = Dispatch(rounds, "eval", group_size=size, side_effect_price=price)
        with self._waiting("episodes of an evaluation", rounds):
            groups = self.rollouts.dispatch(tasks, work).gather()
        episodes = [episode for group in groups for episode in group.episodes]
        summary = summarize(episodes, settings.ks)
        self.events.on_evaluation({"step": rounds, **summary})
        metrics = held_out_metrics(summary) | self.tasks.held_out_by_env(episodes, settings.ks)
        if self.config.keep_best:
            offer_model(self.folder.path, rounds, metrics, self._write_model)
        return metrics

    def record(self, rounds: int, metrics: dict[str, float]) -> None:
        """Log the metrics after this number of rounds."""
        self.events.on_round(self.folder.log(rounds, metrics))
        self._ref_kl = metrics.get("policy/ref_kl", self._ref_kl)
        self._end_beyond_budget(rounds)

    def save(self, number: int) -> None:
        """Write the checkpoint from which round `number` begins."""
        with self._waiting("its checkpoint", number):
            self.folder.save(number, self._write_state)

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

    # --- opening the parts

    def _open_price(self, config: TrainConfig, state: Mapping[str, Any]) -> SideEffectPrice | None:
        price = SideEffectPrice(config.safety, state.get("multiplier"))
        if not price.is_set:
            return None
        if sentence := price.warning(config.tasks_per_step):
            self._warn(sentence)
        if state and price.is_bound and "multiplier" not in state:
            self._warn(
                "the checkpoint has no multiplier of safety.at_most, as another version wrote it:"
                f" the penalty begins again at {price.value:g}"
            )
        return price

    def _price_of_side_effects(self) -> float | None:
        return None if self._price is None else self._price.value

    def _open_guard(self, config: TrainConfig) -> GuardSpec | None:
        if not config.safety.policy:
            return None
        policy = read_policy(config.safety.policy)
        for env in self.tasks.environments.values():
            refuse_unfit(policy, env.id, env.tools, sandbox=env.needs_sandbox)
            for sentence in idle_patterns(policy, env.id, env.tools):
                self._warn(sentence)
        return GuardSpec.of(policy, deterministic=True)

    def _check_recorded(self) -> None:
        if self._recorded is None:
            return
        held_out = [task.id for task in self.tasks.held_out]
        self._recorded.check(set(self.tasks.environments), held_out, self.tokenizer)
        if sentence := self._recorded.warning():
            self._warn(sentence)

    def _open_spec(self, concurrency: int) -> RunSpec:
        config = self.config
        return RunSpec(
            envs=self.tasks.specs,
            pool=self.tasks.pool(concurrency),
            guard=self._guard,
            run=self.folder.path.name,
            seed=config.seed,
            deterministic=config.deterministic,
        )

    def _open_child(self, log: Path) -> None:
        """Open rollouts in a separate process."""
        config, model = self.config, self.learner.model
        plan = ChildPlan(
            spec=self.spec,
            open_engine=engine_opener(
                model, self.chat, config.engine, synchronous=config.deterministic
            ),
            model=self._chat_of[0],
            chat=self._chat_of[1],
            sampling=self._sampling,
            group_size=config.group_size,
            concurrency=self._concurrency,
            folder=self.folder.path,
        )
        if self.spec.pool is not None and any(make().needs_sandbox for make in self.spec.envs):
            self.spec.pool.build().tell()  # the child's own warnings go to its log
        report = self.folder.path / WAITS / "rollouts.json"
        self._parts.callback(report.unlink, missing_ok=True)  # a killed child leaves it
        rollouts = ChildRollouts(plan, on_episode=self._on_episode, log=log)
        self._parts.callback(rollouts.close)
        self.rollouts, self.engine = rollouts, rollouts.engine

    def _open_sampler(self, open_with: EngineFactory) -> None:
        """Open rollouts in this process."""
        config, model = self.config, self.learner.model
        has_copy = config.engine.own_weights or config.staleness > 0
        sampled = sampling_copy(model) if has_copy else model
        self.engine = engine = open_with(sampled, self.chat, synchronous=config.deterministic)
        setting = Setting.open(self.spec, policy=TokenPolicy(engine, self.chat, self._sampling))
        self.rollouts = Rollouts(
            setting,
            group_size=config.group_size,
            concurrency=self._concurrency,
            owns_policy=True,
            on_episode=self._on_episode,
        )
        self._parts.callback(self.rollouts.close)
        if config.engine.routing != "off" and not getattr(engine, "tells_routing", False):
            raise ConfigError(
                f"engine.routing={config.engine.routing!r}: this engine does not tell which experts"
                " it chose: leave it out",
                setting="engine.routing",
            )

    def _open_parity(self) -> None:
        self.rollouts.sync(self.learner.weights(), self.learner.version)
        prompt_ids = self.chat.prompt_ids([Message.user(PROBE)], ())
        self.parity = ParityCheck(
            self.learner.model,
            self.engine,
            self.rollouts,
            prompt_ids,
            self._sampling,
            self._warn,
        )
        self.learner.parity = self.parity

    def _open_rounds(self) -> Rounds:
        config, source, sizes = self.config, self.source, None
        if isinstance(source, Observed) and getattr(config.curriculum, "group_most", False):
            sizes = partial(source.sizes, group_size=config.group_size)
        rounds = Rounds(
            source,
            self.rollouts,
            config.tasks_per_step,
            self.learner.recipe,
            self._on_draw,
            sizes,
            ahead=config.staleness,
            steps=config.steps,
            price=self._price_of_side_effects,
        )
        if self.folder.checkpoint:
            rounds.load(self.folder.checkpoint.folder)
        return rounds

    # --- what happens

    @contextmanager
    def _waiting(self, what: str, number: int) -> Iterator[None]:
        with owned_by(Waiter("trainer", number)), waiting(what):
            yield

    def _warn(self, sentence: str) -> None:
        self.events.on_warning(sentence)

    def _on_draw(self, number: int, draw: int, tasks: int) -> None:
        label = f"round {number + 1}/{self.config.steps}" + (f", draw {draw + 1}" if draw else "")
        self.events.on_phase(label, tasks * self.config.group_size)

    def _on_episode(self, episode: Episode) -> None:
        self.folder.record(episode)
        self.events.on_episode(episode)
        self.learner.recipe.rewards.refuse(episode)

    def _end_beyond_budget(self, rounds: int) -> None:
        """End the run with this round if the policy is too far from its reference."""
        budget = self.learner.recipe.ref_kl_budget
        if self._ref_kl > budget and rounds < self.last:
            self.last = rounds
            self._warn(
                f"policy/ref_kl is above loss.ref_kl_budget={budget}: the run ends with round"
                f" {rounds}, and its checkpoint is the last; raise the budget and --resume to"
                " continue"
            )

    def _warn_of_absent_rewards(self, played: Round) -> None:
        episodes = [episode for group in played.trained for episode in group.episodes]
        present = sorted({name for episode in episodes for name in episode.score.turns})
        absent = sorted(self.learner.recipe.turn_weights.keys() - present)
        if absent:
            self._warn(
                f"no episode of round {played.number + 1} has the process rewards {absent} that"
                f" turn_weights names; there are {present or 'none'}"
            )

    def _write_model(self, folder: Path) -> None:
        save_policy(self.learner.model, folder / "model")
        self.tokenizer.save_pretrained(folder / "model")

    def _write_state(self, folder: Path) -> dict[str, Any]:
        state = self.learner.save(folder)
        self.tokenizer.save_pretrained(folder / "model")
        self._rounds.save(folder)
        if self._price is not None:
            state["multiplier"] = (self._price.value, self._price.integral)
        own = {"quiet": self.quiet, "ref_kl": self._ref_kl, "source": self.source.state()}
        return {**state, **own}
