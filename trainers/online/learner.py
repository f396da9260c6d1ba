"""The learner: the models of a run and what changes them. It knows tokens and no environment."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from agentrl.engines.base import Weights
from agentrl.engines.loading import load_model, refuse_other_tokenizer
from agentrl.errors import ConfigError, TrainingError
from agentrl.rollout.play import derive_seed
from agentrl.trainers.algorithms.recipe import TAUGHT, alone, given
from agentrl.trainers.algorithms.recipes import recipe
from agentrl.trainers.batch import TokenBatch
from agentrl.trainers.config import TrainConfig
from agentrl.trainers.models.critic import Critic
from agentrl.trainers.models.loading import (
    load_policy,
    reference_dtype,
    reference_of,
    save_policy,
)
from agentrl.trainers.models.moe import own_router_loss
from agentrl.trainers.models.optim import make_optimizer
from agentrl.trainers.models.value_model import load_value_model
from agentrl.trainers.models.weights import PolicyWeights
from agentrl.trainers.observe.updates import Observer, Unwatched, UpdateLog
from agentrl.trainers.online.adapt import adapt
from agentrl.trainers.online.checkpoint import Checkpoint
from agentrl.trainers.online.prepare import credit, prepare, vocabulary
from agentrl.trainers.online.update import update


class Learner:
    """Policy, optimizer, reference and critic, as a recipe needs them.

    Args:
        config: model, recipe, learning rate and compute of the run.
        found: a checkpoint to go on from.
        warn: is told sentences about settings that are odd and allowed.
        keep: puts a batch that broke training aside, and says where.

    Attributes:
        model: the policy that trains.
        recipe: the algorithm; its coefficients may move from round to round.
        reference: a frozen policy, where the recipe reads one.
        critic: where the recipe reads values.
        teacher: frozen, where the recipe learns from one.
        observer: judges what happens before the first step of a round.

    Raises:
        ConfigError: a model cannot be had, or settings contradict each other.
    """

    def __init__(
        self,
        config: TrainConfig,
        found: Checkpoint | None = None,
        warn: Callable[[str], None] = lambda sentence: None,
        keep: Callable[[TokenBatch, int], object] = lambda batch, step: "nowhere",
    ) -> None:
        self.config = config
        self.keep = keep
        self.observer: Observer = Unwatched()
        self.recipe = recipe(config.recipe, **config.loss)
        self.recipe = self.recipe.moved(found.state["coefficients"] if found else {})
        self.recipe.refuse_group_size(config.group_size)
        self.recipe.refuse_no_teacher()
        if self.recipe.critic.warmup >= config.steps and "critic" in self.recipe.needs:
            warn(
                f"loss.critic.warmup={self.recipe.critic.warmup} leaves none of"
                f" steps={config.steps} to the policy: only the critic learns"
            )
        source = found.model if found else config.model
        with torch.random.fork_rng():  # new adapters are drawn at random
            torch.manual_seed(self.seed_of("adapter") % 2**63)
            adapter = found.adapter if found and config.compute.lora_rank else None
            start = config.model if adapter else source
            self.model = load_policy(start, config.compute, adapter)
        self.optimizer = make_optimizer(
            self.model.parameters(),
            config.learning_rate,
            config.optimizer,
        )
        if "router" in self.recipe.needs:
            own_router_loss(self.model)  # refuses a model without routers
        self.reference = self._open_reference(found)
        self.critic = self._open_critic(found, source)
        self.teacher = self._open_teacher()
        self._reference_moved = bool(found and found.reference)
        if found:
            found.load_optimizer(self.optimizer)

    def step(self, packed: TokenBatch, step: int) -> dict[str, float]:
        """Learn from one round, and return its metrics.

        Args:
            packed: groups of finished episodes, as `pack` makes them.
            step: the round, from 0.

        Raises:
            TrainingError: the loss or the gradient is not a number.
            ParityError: sampler and trainer disagree; nothing was trained on this batch.
        """
        return self.learn(packed, credit(self, prepare(self, packed), step), step)

    def learn(self, packed: TokenBatch, batch: TokenBatch, step: int) -> dict[str, float]:
        """All updates of one round, critic first; the rest as in `step`.

        Args:
            packed: the round as it was packed.
            batch: the same with its advantages.
            step: the round, from 0.
        """
        log = UpdateLog(packed, batch, step, self.observer)
        if self.critic is not None and len(batch):
            log.row |= self._fit_critic(self.critic, batch, step)
            if self.critic.is_pretraining(step):
                return log.row
        update(self, batch, step, log)
        metrics = log.metrics(partial(adapt, self, batch, log.steps))
        self._move_reference(step + 1)
        return metrics

    def weights(self) -> Weights:
        """What an engine should sample with."""
        return PolicyWeights(self.model)

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the models and the optimizer into a folder.

        Returns:
            what else is needed to go on, as JSON values.
        """
        save_policy(self.model, folder / "model")
        if self.reference is not None and self._reference_moved:
            moved: Any = self.reference
            moved.save_pretrained(folder / "reference")
        if self.critic is not None:
            self.critic.save(folder / "critic")
        state = {"optimizer": self.optimizer.state_dict(), "rng": torch.get_rng_state()}
        torch.save(state, folder / "state.pt")
        return {"coefficients": {name: rule.coef for name, rule in self.recipe.rules().items()}}

    def seed_of(self, *parts: object) -> int:
        """A seed for one purpose."""
        return derive_seed(self.config.seed, *parts)

    def _fit_critic(self, critic: Critic, batch: TokenBatch, step: int) -> dict[str, float]:
        try:
            gamma = self.recipe.options.get("gamma", 1.0)
            batch = alone(batch, ~given(batch), lambda own: own)
            return critic.fit(batch, self.seed_of("critic", step), gamma)
        except TrainingError as error:
            kept = self.keep(batch, step + 1)
            raise TrainingError(f"round {step + 1}: {error}; the batch is in {kept}") from error

    def _move_reference(self, rounds: int) -> None:
        """A moving average of the policy; or ProRL's reset: the present policy becomes the
        reference, and the optimizer forgets.
        """
        every, share = self.recipe.reset_every, 1 - self.recipe.reference_decay
        if share and self.reference is not None:
            with torch.no_grad():
                pairs = zip(self.reference.parameters(), self.model.parameters(), strict=True)
                for kept, now in pairs:
                    kept.lerp_(now, share)
            self._reference_moved = True
        if every and rounds % every == 0:
            self.optimizer.state.clear()
            if self.reference is not None:
                self.reference = copy.deepcopy(self.model).requires_grad_(False).eval()
                self._reference_moved = True

    def _open_reference(self, found: Checkpoint | None) -> torch.nn.Module | None:
        """The policy that the run started from, or what moved since."""
        row = self.recipe
        if "reference" not in row.needs:
            return None
        moves = {"reset_every": row.reset_every, "reference_decay": row.reference_decay < 1}
        if any(moves.values()) and self.config.compute.lora_rank:
            name = max(moves, key=lambda one: bool(moves[one]))
            raise ConfigError(
                f"{name} needs a reference of its own, and with lora_rank > 0 it is the policy"
                f" itself: set loss.{name}={0 if name == 'reset_every' else 1} for recipe"
                f" {row.name}, or compute.lora_rank=0"
            )
        moved = found.reference if found else None
        if moved or row.reference_decay < 1:  # as the policy computes: bfloat16 is too coarse
            policy = load_policy(moved or self.config.model, self.config.compute)
            own: torch.nn.Module = policy.to(self.model.device).requires_grad_(False).eval()
            return own
        return reference_of(self.model, self.config.compute, self.config.model)

    def _open_teacher(self) -> torch.nn.Module | None:
        """The teacher of a recipe that reads one; it says the same ids, so its tokenizer must be
        the policy's.
        """
        if not self.recipe.needs & TAUGHT:
            return None
        name, compute = self.recipe.teacher.model, self.config.compute
        refuse_other_tokenizer(self.config.model, name, "loss.teacher.model")
        loaded: torch.nn.Module = load_model(name, dtype=reference_dtype(compute))
        most = min(vocabulary(loaded), vocabulary(self.model))
        if (top := self.recipe.teacher.top) > most:
            raise ConfigError(
                f"loss.teacher.top={top}: the models tell {most} tokens apart: set at most {most},"
                " or 0 for all"
            )
        return loaded.to(self.model.device).requires_grad_(False).eval()

    def _open_critic(self, found: Checkpoint | None, policy: str | Path) -> Critic | None:
        """The critic of a recipe that needs one: as it was saved, or new."""
        if "critic" not in self.recipe.needs:
            return None
        settings, config = self.recipe.critic, self.config
        options: dict[str, Any] = {
            "minibatches": config.minibatches,
            "micro_tokens": config.compute.micro_tokens,
            "max_grad_norm": config.optimizer.max_grad_norm,
        }
        saved = found.critic if found else None
        start = settings.model or (config.model if saved else policy)
        if saved:
            return Critic.load(saved, settings, start=start, compute=config.compute, **options)
        if settings.model:
            refuse_other_tokenizer(config.model, settings.model, "loss.critic.model")
        with torch.random.fork_rng():  # new adapters are drawn at random
            torch.manual_seed(self.seed_of("critic adapter") % 2**63)
            model = load_value_model(start, config.compute)
        return Critic(model, settings, **options)
