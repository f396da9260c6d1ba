"""A training run and its folder: opens every part, resumes from the last checkpoint, records what
happens.

Run folder: `config.toml`, `metrics.jsonl`, `episodes.jsonl`, `checkpoints/step_N/`, `report.html`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from agentrl.chat.settings import in_words
from agentrl.engines.base import Sampling
from agentrl.engines.factory import open_chat, open_engine
from agentrl.engines.loading import load_critic
from agentrl.errors import ConfigError
from agentrl.evaluation.passk import summarize
from agentrl.policies.base import TokenPolicy
from agentrl.records.files import EpisodeWriter, MetricsWriter, read_metrics, set_aside
from agentrl.registry import factory
from agentrl.rollout.play import Setting, derive_seed
from agentrl.rollout.rollouts import Rollouts
from agentrl.trainers.algorithms.advantages import with_greedy_rewards
from agentrl.trainers.algorithms.recipes import recipe
from agentrl.trainers.batch import TokenBatch, pack
from agentrl.trainers.config import TrainConfig, check_resumed, write_config
from agentrl.trainers.models.critic import Critic
from agentrl.trainers.models.loading import load_policy, reference_of
from agentrl.trainers.models.moe import own_router_loss
from agentrl.trainers.observe.metrics import held_out_metrics
from agentrl.trainers.observe.trackers import Tracker, open_trackers
from agentrl.trainers.observe.watch import Watch
from agentrl.trainers.online import checkpoint
from agentrl.trajectory import Episode, Group
from agentrl.types import Message, Task

MAX_DRAWS = 4
"""How many rounds of tasks dynamic sampling may play to fill one."""

Listener = Callable[[str, Any], None]
"""Told of ("episode", Episode) on the loop thread; of ("phase", (label, episodes)), ("metrics",
row), ("warning", sentence) and ("eval", summary) on the training thread."""


def frozen(model: torch.nn.Module) -> torch.nn.Module:
    """A copy that is never trained."""
    return copy.deepcopy(model).requires_grad_(False).eval()


class Run:
    """All parts of one training run. Use it as a context manager: leaving it ends sandboxes and
    threads.

    Args:
        config: the settings.
        folder: the run folder.
        resume: continue from the folder's last checkpoint (from the start if there is none).
        listen: progress display.

    Raises:
        ConfigError: the folder holds another run, or a part cannot be had; nothing already written
            is touched.
    """

    max_grad_norm = 0.5

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        *,
        resume: bool = False,
        listen: Listener | None = None,
    ) -> None:
        self.config = config
        self.folder = folder
        self.listen = listen or (lambda kind, what: None)
        found = self._claim(resume)
        self.start = found.step if found else 0
        self.recipe = recipe(config.recipe, **config.loss).moved(
            found.coefficients if found else {}
        )
        self.recipe.refuse_group_size(config.group_size)
        source = found.model if found else Path(config.model)
        self.chat = open_chat(source, config.chat)
        self.tokenizer = self.chat.tokenizer
        self.config = config = config.model_copy(update={"chat": config.chat.found(self.chat)})
        self.listen("chat", in_words(self.chat))
        start, adapter = (
            (Path(config.model), found.adapter)
            if found and config.compute.lora_rank
            else (source, None)
        )
        with torch.random.fork_rng():  # new adapters are drawn at random
            torch.manual_seed(self.seed_of("adapter") % 2**63)
            self.model, self.optimizer = load_policy(
                start, config.compute, config.learning_rate, adapter
            )
        if "router" in self.recipe.needs:
            own_router_loss(self.model)  # refuses a model without
        self.reference = self._frozen_reference(found)
        self.critic = self._open_critic(found, source)
        self._was_reset = bool(found and found.reference)
        self._draws = found.draws if found else 0
        if found:
            found.load_optimizer(self.optimizer)
        self.engine = open_engine(self.model, self.chat, synchronous=config.deterministic)
        self.engine.load(self.model, self.start)
        pad = self.tokenizer.pad_token_id
        self.pad_id = 0 if pad is None else int(pad)
        self._parts = ExitStack()
        self._trackers: list[Tracker] = []
        try:
            self._open()
        except BaseException:
            self._parts.close()
            raise

    def _claim(self, resume: bool) -> checkpoint.Checkpoint | None:
        """Make the folder this run's own; never write over another run."""
        begun = [path for path in self.folder.glob("*.jsonl") if path.stat().st_size]
        if (begun or checkpoint.latest(self.folder)) and not resume:
            raise ConfigError(
                f"run folder {self.folder} is in use: continue it with --resume or choose another"
                " --out"
            )
        self.changed = check_resumed(self.config, self.folder / "config.toml") if resume else {}
        return checkpoint.latest(self.folder) if resume else None

    def _frozen_reference(self, found: checkpoint.Checkpoint | None) -> torch.nn.Module | None:
        """The initial policy, or the one it was last reset to; only where a part reads it."""
        if "reference" not in self.recipe.needs:
            return None
        kept = found.reference if found else None
        if self.recipe.reset_every and self.config.compute.lora_rank:
            raise ConfigError(
                "reset_every needs a reference of its own, and with lora_rank > 0 it is the policy"
                f" itself: set loss.reset_every=0 for recipe {self.recipe.name}, or"
                " compute.lora_rank=0"
            )
        if kept:  # it was a copy of the policy, and computes as that did
            policy, _ = load_policy(kept, self.config.compute, self.config.learning_rate)
            reset: torch.nn.Module = policy.to(self.model.device).requires_grad_(False).eval()
            return reset
        return reference_of(self.model, self.config.compute, self.config.model)

    def _open_critic(self, found: checkpoint.Checkpoint | None, policy: Path) -> Critic | None:
        """The critic of a recipe that needs one: as it was saved, or new."""
        if "critic" not in self.recipe.needs:
            return None
        settings = self.recipe.critic
        if settings.warmup >= self.config.steps:
            said = (
                f"loss.critic.warmup={settings.warmup} leaves none of steps={self.config.steps} to"
                " the policy"
            )
            self.listen("warning", f"{said}: only the critic learns")
        options: dict[str, Any] = {
            "minibatches": self.config.minibatches,
            "micro_tokens": self.config.compute.micro_tokens,
            "max_grad_norm": self.max_grad_norm,
        }
        if found and found.critic:
            return Critic.load(found.critic, settings, device=self.model.device, **options)
        return Critic(load_critic(settings.model or policy, self.model.device), settings, **options)

    def hand_over(self, step: int) -> dict[str, float]:
        """Give the engine the new weights and see that it has them.

        Where the recipe resets after this round, the present policy becomes the reference, and
        AdamW forgets.

        Raises:
            ParityError: the engine still samples with other weights.
        """
        self.engine.load(self.model, step)
        every = self.recipe.reset_every
        if every and step % every == 0:
            self.optimizer.state.clear()
            if self.reference is not None:
                self.reference, self._was_reset = frozen(self.model), True
        return self.watch.confirm(step)

    def _open(self) -> None:
        config = self.config
        make = factory(config.env, **config.env_settings)
        env = make()
        if config.eval_every and env.one_split:
            raise ConfigError(
                f"eval_every={config.eval_every}: {config.env} has one split, so nothing is held"
                " out: set eval_every=0, or give the environment held-out tasks (code-v0:"
                " env_settings.held_out = 0.2)"
            )
        limits = env.limits
        sampling = Sampling(temperature=config.temperature, max_tokens=limits.turn_tokens)
        concurrency = config.tasks_per_step * config.group_size
        self._make, self._tasks = make, dict[str, Task]()
        self._greedy = TokenPolicy(self.engine, self.chat, replace(sampling, temperature=0.0))
        setting = Setting(
            make=make,
            policy=TokenPolicy(self.engine, self.chat, sampling),
            pool=env.open_pool(config.sandbox, min(concurrency, 256)),
            run=self.folder.name,
            seed=config.seed,
            deterministic=config.deterministic,
        )
        self.rollouts = Rollouts(
            setting,
            group_size=config.group_size,
            concurrency=min(concurrency, 256),
            on_episode=self._record,
        )
        self._parts.callback(self.rollouts.close)
        self._parts.callback(lambda: self.rollouts.run(self.engine.close()))
        prompt_ids = self.chat.prompt_ids(
            [Message.user("How many letters has the word agent?")], ()
        )
        self.watch = Watch(
            self.model, self.engine, self.rollouts, prompt_ids, sampling, self.listen
        )
        next(self._every_round())  # a split that is too small is refused before anything is played
        if (
            config.eval_every
            and next(iter(make().tasks("test", self.seed_of("test"))), None) is None
        ):
            raise ConfigError(
                f"eval_every={config.eval_every}: {config.env} has no task in split 'test': set"
                " eval_every=0"
            )
        # Last, so that a part that cannot be had leaves the folder as it was.
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("metrics", "episodes", "samples/top", "samples/random"):
            set_aside(self.folder / f"{name}.jsonl", self._is_redone)
        self._episodes = self._parts.enter_context(EpisodeWriter(self.folder / "episodes.jsonl"))
        self._metrics = self._parts.enter_context(MetricsWriter(self.folder / "metrics.jsonl"))
        self.watch.open(self.folder, self.folder / "episodes.jsonl", self.start, self._parts)
        write_config(config, self.folder / "config.toml")

    def play(self, step: int) -> tuple[list[Group], list[Group], list[Group]]:
        """The groups of a round; where the recipe refills, those that take the places of others;
        those played in vain.

        At most `MAX_DRAWS` times as many tasks are played; places that then are empty stay so.

        Raises:
            ConfigError: the split has fewer tasks than a round.
        """
        groups, refilled, spare = self._draw(step, ""), list[Group](), list[Group]()
        for draw in range(1, MAX_DRAWS if self.recipe.refill else 1):
            missing = len(groups) - sum(group.has_signal for group in (*groups, *refilled))
            if missing > 0:
                more = self._draw(step, f"/refill-{draw}")
                chosen = [group for group in more if group.has_signal][:missing]
                refilled += chosen
                spare += [group for group in more if group not in chosen]
        return groups, refilled, spare

    def pack(self, own: Sequence[Group], refilled: Sequence[Group], step: int) -> TokenBatch:
        """The groups of a round as one batch, with the rewards of greedy episodes where a part
        reads them.
        """
        groups, weights = (*own, *refilled), self.recipe.turn_weights
        batch = pack(groups, self.pad_id, turn_weights=weights, version=step)
        batch = replace(batch, n_refilled=int((batch.group_E >= len(own)).sum()))
        given = {
            name for group in groups for episode in group.episodes for name in episode.score.turns
        }
        if step == self.start and batch.n_tokens and (absent := sorted(weights.keys() - given)):
            said = (
                f"no episode of round {step + 1} has the process rewards {absent} that turn_weights"
                " names"
            )
            self.listen("warning", f"{said}; there are {sorted(given) or 'none'}")
        if "greedy" not in self.recipe.needs:
            return batch
        tasks, run = (
            list({group.task.id: self._tasks[group.task.id] for group in groups}.values()),
            self.folder.name,
        )
        alone = self.rollouts.gather(
            tasks, step, group_size=1, run=f"{run}/greedy", policy=self._greedy
        )
        rewards = {group.task.id: group.rewards_G[0] for group in alone}
        return with_greedy_rewards(batch, [rewards[group.task.id] for group in groups])

    def _draw(self, step: int, suffix: str) -> list[Group]:
        """Play the next tasks; a split that ends is begun again in another order."""
        if not hasattr(self, "_rounds"):
            self._rounds = itertools.islice(self._every_round(), self._draws, None)
        episodes = self.config.tasks_per_step * self.config.group_size
        self.listen("phase", (f"round {step + 1}/{self.config.steps}{suffix}", episodes))
        self._draws += 1
        tasks = next(self._rounds)
        self._tasks = ({} if not suffix else self._tasks) | {task.id: task for task in tasks}
        return self.rollouts.gather(tasks, step, run=f"{self.folder.name}{suffix}")

    def keep(self, batch: TokenBatch, step: int) -> Path:
        """Put a batch aside for people to look at."""
        path = self.folder / f"broken_batch_{step}.pt"
        torch.save({one.name: getattr(batch, one.name) for one in fields(batch)}, path)
        return path

    def evaluate(self, step: int) -> dict[str, float]:
        """pass@k on the first held-out tasks with its interval, and how many episodes
        infrastructure failed.
        """
        settings = self.config.held_out
        tasks = list(
            itertools.islice(self._make().tasks("test", self.seed_of("test")), settings.tasks)
        )
        self.listen("phase", (f"evaluation after round {step}", len(tasks) * settings.samples))
        groups = self.rollouts.gather(
            tasks, step, group_size=settings.samples, run=f"{self.folder.name}/eval"
        )
        result = summarize((episode for group in groups for episode in group.episodes), settings.ks)
        self.listen("eval", {"step": step, **result})
        return held_out_metrics(result)

    def track(self, names: Sequence[str]) -> None:
        """Log to these as well, until the run is closed.

        Raises:
            ConfigError: there is no such tracker, or its library is not installed.
        """
        self._trackers = open_trackers(names, self.folder, self.config.model_dump(mode="json"))
        for tracker in self._trackers:
            self._parts.callback(tracker.close)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line to `metrics.jsonl`."""
        row = {"step": step, **metrics}
        self._metrics.write(row)
        for tracker in self._trackers:
            tracker.log(step, row)
        self.listen("metrics", row)

    def save(self, step: int) -> None:
        """Write a checkpoint from which round `step` begins, and drop old ones."""
        reference = self.reference if self._was_reset else None
        moved = {option: rule.coef for option, rule in self.recipe.rules().items()}
        saved = checkpoint.Saved(
            self.model, self.tokenizer, self.optimizer, self._draws, reference, self.critic, moved
        )
        checkpoint.save(self.folder, step, saved)
        checkpoint.prune(self.folder, self.config.keep_last)

    def history(self) -> list[dict[str, Any]]:
        """All metrics recorded so far, one row per round."""
        return read_metrics(self.folder / "metrics.jsonl")

    def seed_of(self, *parts: object) -> int:
        """A seed for one purpose."""
        return derive_seed(self.config.seed, *parts)

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

    def _is_redone(self, row: Mapping[str, Any]) -> bool:
        """Whether a recorded row belongs to a round after the checkpoint, which is played again."""
        run, step = row["key"][:2] if "key" in row else ("/eval", row["step"])
        rounds_done = step if run.endswith("/eval") else step + 1
        return self.start == 0 or rounds_done > self.start

    def _record(self, episode: Episode) -> None:
        self._episodes.write(episode)
        self.listen("episode", episode)

    def _every_round(self) -> Iterator[list[Task]]:
        """Rounds without end. No task is twice in one: what is left of a finished split is not
        played.
        """
        count = self.config.tasks_per_step
        for epoch in itertools.count():
            stream = iter(self._make().tasks("train", self.seed_of("train", epoch)))
            chosen = list(itertools.islice(stream, count))
            if len(chosen) < count:
                raise ConfigError(
                    f"{self.config.env} has {len(chosen)} tasks in split 'train', fewer than"
                    f" tasks_per_step={count}"
                )
            while len(chosen) == count:
                yield chosen
                chosen = list(itertools.islice(stream, count))
