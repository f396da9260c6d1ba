"""The learner: the models of a run and everything that changes them. It knows tokens, but no
environment.

A round goes through `prepare` (scores of the tokens by frozen models), `credit` (advantages),
`update` (minibatches, loss, gradient, optimizer) and `adapt` (coefficients that follow a target).

Ratios compare the policy with an anchor, usually the sampler's log-probabilities. Where a recipe's
bounds are narrow, the arithmetic is coarse or dropout is on, rounding alone would be clipped, so
there the anchor is the trainer's own log-probabilities before the round's first step. Corrections
and the parity check read the sampler's log-probabilities in either case.

Letters: B rows, T positions, K likeliest tokens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from agentrl.engines.base import Weights
from agentrl.engines.loading import load_model, refuse_other_tokenizer
from agentrl.engines.routing import replayed_routing
from agentrl.errors import ConfigError, TrainingError
from agentrl.rollout.play import derive_seed
from agentrl.trainers.algorithms.losses import by_token, drop_recorded_tokens
from agentrl.trainers.algorithms.recipe import (
    TAUGHT,
    Recipe,
    apply_to_episodes,
    find_recorded_episodes,
)
from agentrl.trainers.algorithms.recipes import recipe as recipe_named
from agentrl.trainers.algorithms.regularisers import kl_k3
from agentrl.trainers.batch import PolicyOutput, TokenBatch
from agentrl.trainers.config import TrainConfig
from agentrl.trainers.folder import Checkpoint
from agentrl.trainers.models.critic import Critic, monte_carlo
from agentrl.trainers.models.loading import (
    load_policy,
    reference_dtype,
    reference_of,
    save_policy,
)
from agentrl.trainers.models.moe import own_router_loss, with_router_loss
from agentrl.trainers.models.optim import make_optimizer
from agentrl.trainers.models.scoring import (
    EntropyMode,
    frozen_logprobs,
    in_parts,
    token_logprobs,
)
from agentrl.trainers.models.value_model import load_value_model
from agentrl.trainers.models.weights import PolicyWeights
from agentrl.trainers.observe.metrics import UpdateLog, fresh
from agentrl.trainers.observe.parity import ParityCheck

LIKELIEST = 3
"""Number of likeliest tokens that are scored for a recipe that reads them (3 in SimKO's paper)."""

OptimizerStep = tuple[TokenBatch, list[TokenBatch]]
"""The minibatch of one optimizer step, and its micro-batches."""


def recipe_of(config: TrainConfig) -> Recipe:
    """Return the algorithm of a run, checked against its other settings.

    Raises:
        ConfigError: the settings name no recipe, or contradict it.
    """
    recipe = recipe_named(config.recipe, **config.loss)
    if config.staleness and "corrections" not in config.loss:
        recipe = with_correction(recipe, config)
    recipe.refuse_group_size(config.group_size)
    recipe.refuse_minibatches(config.minibatches)
    recipe.refuse_no_teacher()
    unread = sorted(config.process_rewards.keys() - recipe.turn_weights.keys())
    if unread:
        raise ConfigError(
            f"process_rewards.{unread[0]} has no weight, so it would not train: add loss ="
            f" {{turn_weights = {{{unread[0]} = 1.0}}}}, and a recipe that gives credit by turns,"
            " such as turn_grpo",
            setting=f"process_rewards.{unread[0]}",
        )
    return recipe


def with_correction(recipe: Recipe, config: TrainConfig) -> Recipe:
    """Return the recipe with truncated importance sampling, unless it corrects already.

    Tokens that earlier weights sampled are then weighted by π_proximal/π_sampler, at most 2, and
    the surrogate keeps its trust region around the proximal policy: the decoupled objective of
    https://arxiv.org/abs/2505.24298. `loss.corrections = []` trains without.

    Raises:
        ConfigError: the recipe takes no correction.
    """
    if any("proximal" in part.reads for part in recipe.corrections):
        return recipe
    names = [part.label for part in recipe.corrections]
    return recipe_named(config.recipe, **config.loss, corrections=[*names, "truncated_is"])


class Learner:
    """Policy, optimizer, reference, critic and teacher, as far as a recipe needs them.

    Args:
        config: learning rate, schedule, seeds and compute of the run.
        recipe: the algorithm.
        model: the policy that trains.
        version: number of the policy's weights, which rises by one with every round.

    Attributes:
        recipe: the algorithm; its coefficients may move from round to round.
        reference: a frozen policy, if the recipe reads one.
        critic: predicts values, if the recipe reads them.
        teacher: a frozen model, if the recipe learns from one.
        parity: judges the gap to the sampler before the first step of a round.
        keep: stores a batch that broke training and returns its place.
    """

    def __init__(self, config: TrainConfig, recipe: Recipe, model: Any, version: int = 0) -> None:
        self.config, self.recipe, self.model, self.version = config, recipe, model, version
        self.optimizer = make_optimizer(model.parameters(), config.learning_rate, config.optimizer)
        self.reference: torch.nn.Module | None = None
        self.critic: Critic | None = None
        self.teacher: torch.nn.Module | None = None
        self.parity: ParityCheck | None = None
        self.keep: Callable[[TokenBatch, int], object] = lambda batch, number: "nowhere"
        compute = config.compute
        is_coarse = compute.dtype != "float32" or compute.dropout > 0
        self._anchors_itself = is_coarse or "anchor" in recipe.needs
        self._has_targets = bool(recipe.rules())
        self._reference_has_moved = False
        self._weights = PolicyWeights(model)
        shares = (config.schedule.share(number, config.steps) for number in range(config.steps))
        self._rates = [config.learning_rate * share for share in shares]

    @classmethod
    def load(
        cls,
        config: TrainConfig,
        recipe: Recipe | None = None,
        checkpoint: Checkpoint | None = None,
        warn: Callable[[str], None] = lambda sentence: None,
    ) -> Self:
        """Load the models that a recipe needs.

        Args:
            config: the settings of the run.
            recipe: the algorithm; None: the one that the settings name.
            checkpoint: where to continue; None: at the model of the settings.
            warn: called with sentences about settings that are allowed but odd.

        Raises:
            ConfigError: a model cannot be loaded, or settings contradict each other.
        """
        recipe = recipe or recipe_of(config)
        if "critic" in recipe.needs and recipe.critic.warmup >= config.steps:
            warn(
                f"loss.critic.warmup={recipe.critic.warmup} leaves none of steps={config.steps} to"
                " the policy: only the critic learns"
            )
        state = checkpoint.state if checkpoint else {}
        recipe = recipe.moved(state.get("coefficients", {}))
        adapter = checkpoint.adapter if checkpoint and config.compute.lora_rank else None
        source = checkpoint.model if checkpoint and not adapter else config.model
        with torch.random.fork_rng():  # new adapters are drawn at random
            torch.manual_seed(derive_seed(config.seed, "adapter") % 2**63)
            model = load_policy(source, config.compute, adapter)
        version = state.get("version", checkpoint.step) if checkpoint else 0
        learner = cls(config, recipe, model, version)
        if "router" in recipe.needs:
            own_router_loss(model)  # refuses a model without routers
        learner.reference = learner._load_reference(checkpoint)
        learner._reference_has_moved = bool(checkpoint and checkpoint.reference)
        learner.critic = learner._load_critic(checkpoint)
        learner.teacher = learner._load_teacher()
        if checkpoint:
            checkpoint.load_optimizer(learner.optimizer)
        return learner

    def step(self, packed: TokenBatch, number: int) -> dict[str, float]:
        """Learn from one round and return its metrics.

        Args:
            packed: groups of finished episodes, as `pack` returns them.
            number: of the round, from 0; the schedule and the seeds follow it.

        Raises:
            TrainingError: the loss or the gradient is not a number.
            ParityError: sampler and trainer disagree; nothing was trained on this batch.
        """
        return self.learn(packed, self.credit(self.prepare(packed), number), number)

    def learn(self, packed: TokenBatch, batch: TokenBatch, number: int) -> dict[str, float]:
        """Make all updates of one round, the critic's first.

        Args:
            packed: the round as it was packed.
            batch: the same with its advantages.
            number: of the round, from 0.
        """
        version = self.version if packed.version is None else packed.version
        log = UpdateLog(packed, batch, version, self.parity)
        self.version += 1
        if self.critic is not None and len(batch):
            log.row |= self._fit_critic(self.critic, batch, number)
            if self.critic.is_pretraining(number):
                return log.row
        self.update(batch, number, log)
        metrics = log.metrics() | self.adapt(batch, log.steps)
        self._move_reference(number + 1)
        return metrics

    def weights(self) -> Weights:
        """Return what an engine should sample with."""
        return self._weights

    def save(self, folder: Path) -> dict[str, Any]:
        """Write models and optimizer into a folder; return the rest of the state as JSON values."""
        save_policy(self.model, folder / "model")
        if self.reference is not None and self._reference_has_moved:
            moved: Any = self.reference
            moved.save_pretrained(folder / "reference")
        if self.critic is not None:
            self.critic.save(folder / "critic")
        state = {"optimizer": self.optimizer.state_dict(), "rng": torch.get_rng_state()}
        torch.save(state, folder / "state.pt")
        coefficients = {name: rule.coef for name, rule in self.recipe.rules().items()}
        return {"coefficients": coefficients, "version": self.version}

    def seed_of(self, *parts: object) -> int:
        """Return a seed for one purpose."""
        return derive_seed(self.config.seed, *parts)

    # --- before the update: frozen models and advantages

    def prepare(self, batch: TokenBatch) -> TokenBatch:
        """Add what the recipe reads of models that this round does not move."""
        if not len(batch):
            return batch
        needs = self.recipe.needs
        batch = self._with_own_word_on_recorded_tokens(batch.to(self.model.device))
        if self.reference is not None and not self._scores_reference_later():
            ref_BT = self.score(self.reference, batch).logprobs_BT
            batch = replace(batch, ref_logprobs_BT=ref_BT)
        follows_anchor = self._anchors_itself and "anchor_kl_coef" in self.recipe.rules()
        if follows_anchor or needs & {"proximal", "entropy", "anchor_top"}:
            top = LIKELIEST if "anchor_top" in needs else 0
            output = self.score(self.model, batch, top)
            reads_proximal = follows_anchor or needs & {"proximal", "anchor_top"}
            batch = replace(
                batch,
                proximal_logprobs_BT=output.logprobs_BT if reads_proximal else None,
                entropy_BT=output.entropy_BT,
                top_logprobs_BTK=output.top_logprobs_BTK,
                top_ids_BTK=output.top_ids_BTK,
            )
        if self.teacher is not None and "teacher" in needs:
            teacher_BT = self.score(self.teacher, batch).logprobs_BT
            batch = replace(batch, teacher_logprobs_BT=teacher_BT)
        return self.critic.predict(batch) if self.critic else batch

    def credit(self, batch: TokenBatch, number: int) -> TokenBatch:
        """Add the advantages; while a critic is pre-trained, those of Monte-Carlo returns."""
        if not len(batch):
            return batch
        recipe = self.recipe
        if self.critic and self.critic.is_pretraining(number):
            recipe = replace(recipe, credit=monte_carlo(recipe.credit))
        return recipe.advantage(batch)

    @torch.no_grad()
    def score(self, model: torch.nn.Module, batch: TokenBatch, top: int = 0) -> PolicyOutput:
        """Score a whole batch in micro-batches, without gradient and without dropout.

        Only the policy replays the sampler's experts: a reference is a model of its own.
        """
        model.eval()

        def look(micro: TokenBatch) -> tuple[Tensor, ...]:
            with replayed_routing(model, micro.experts_BTLK if model is self.model else None):
                output = token_logprobs(model, micro, self.config.temperature, top=top)
            parts = (
                output.logprobs_BT,
                output.entropy_BT,
                output.top_logprobs_BTK,
                output.top_ids_BTK,
            )
            return tuple(part for part in parts if part is not None)

        return PolicyOutput(*in_parts(batch, look, self.config.compute.micro_tokens))

    def _with_own_word_on_recorded_tokens(self, batch: TokenBatch) -> TokenBatch:
        """Anchor recorded tokens at the policy's own log-probabilities before the round;
        those of another sampler cannot anchor its ratios.
        """
        recorded_BT = batch.mask_BT & (batch.version_BT < 0)
        if not recorded_BT.any():
            return batch
        own_BT = self.score(self.model, batch).logprobs_BT.to(batch.old_logprobs_BT)
        old_BT = torch.where(recorded_BT, own_BT, batch.old_logprobs_BT)
        return replace(batch, old_logprobs_BT=old_BT)

    def _scores_reference_later(self) -> bool:
        """Whether the reference is scored with the policy's dropout, micro-batch by micro-batch;
        advantages that read it need it earlier.
        """
        if not self.config.compute.dropout:
            return False
        credit = (*self.recipe.before, *self.recipe.credit)
        return not any("reference" in part.reads for part in credit)

    # --- the update

    def update(self, batch: TokenBatch, number: int, log: UpdateLog) -> None:
        """Make all optimizer steps of one round: batch -> loss -> gradient -> optimizer.

        Rows whose advantages are all zero add nothing to the policy gradient. Unless a KL or
        entropy term needs them, they skip the forward pass; every denominator stays what it was.
        """
        config, recipe, model = self.config, self.recipe, self.model
        rate = self._rates[min(number, config.steps - 1)]
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        log.row["policy/learning_rate"] = rate
        model.train()
        for step, (mini, micros) in enumerate(self._optimizer_steps(batch, number)):
            for index, micro in enumerate(micros):
                micro = self.with_teacher(micro)
                with replayed_routing(model, micro.experts_BTLK) as replay:
                    with self._same_dropout(number, step, index):
                        output = self.policy_output(micro)
                    if self._anchors_itself and step == 0:  # nothing has moved yet: bit for bit
                        micro = self.with_anchor(micro, output.logprobs_BT.detach())
                    loss, metrics = recipe.loss(output, micro)
                    loss.backward()
                log.add_micro_batch(output, micro, metrics | self._distance(output, micro), replay)
            if micros:
                norm = torch.nn.utils.clip_grad_norm_(
                    model.parameters(), config.optimizer.max_grad_norm
                )
                metrics = log.end_minibatch(mini, float(norm))
                self._refuse_broken(metrics, mini, number)
                is_too_far = metrics["own_kl"] > recipe.kl_budget * metrics["own_share"]
                if not is_too_far:
                    self.optimizer.step()
                    metrics["updates"] = 1.0
                self.optimizer.zero_grad(set_to_none=True)
                if is_too_far:
                    return
            log.add_trained(mini, batch.n_episodes)

    def policy_output(self, micro: TokenBatch) -> PolicyOutput:
        """Score the sampled tokens with gradient."""
        needs = self.recipe.needs
        mode: EntropyMode = "gradient" if "entropy_gradient" in needs else "value"
        top = LIKELIEST if needs & {"top", "anchor_top", "teacher_top"} else 0
        temperature = self.config.temperature
        score = partial(token_logprobs, self.model, micro, temperature, entropy=mode, top=top)
        return with_router_loss(self.model, micro, score) if "router" in needs else score()

    def with_anchor(self, micro: TokenBatch, logprobs_BT: Tensor) -> TokenBatch:
        """Anchor the ratios in the policy's own log-probabilities before the round's first step.

        Tokens of an earlier policy keep their sampler's word: what was learned since belongs in
        their ratio, unless a correction already weighs it.
        """
        own_BT, old_BT = self._own_tokens(micro).mask_BT, micro.old_logprobs_BT
        anchor_BT = torch.where(own_BT, logprobs_BT, old_BT.to(logprobs_BT.dtype))
        return replace(micro, proximal_logprobs_BT=anchor_BT)

    @torch.no_grad()
    def with_teacher(self, micro: TokenBatch) -> TokenBatch:
        """Add the teacher's log-probabilities of the vocabulary, or of its likeliest tokens."""
        if self.teacher is None or "teacher_top" not in self.recipe.needs:
            return micro
        teacher, count = self.teacher, self.recipe.teacher.top
        known = vocabulary(self.model)
        spare = max(0, vocabulary(teacher) - known)  # a teacher may pad its vocabulary further
        if not count:
            count, spare = min(vocabulary(teacher), known), 0
            ids_V = torch.arange(count, device=micro.ids_BT.device)
            micro = replace(micro, top_ids_BTK=ids_V.expand(*micro.ids_BT.shape, count))
        output = token_logprobs(
            teacher, micro, self.config.temperature, entropy="off", top=count + spare
        )
        ids_BTK, logprobs_BTK = output.top_ids_BTK, output.top_logprobs_BTK
        assert ids_BTK is not None and logprobs_BTK is not None
        if spare:
            known_first_BTK = torch.argsort((ids_BTK >= known).byte(), dim=-1, stable=True)
            kept_BTK = known_first_BTK[..., :count]
            ids_BTK, logprobs_BTK = ids_BTK.gather(-1, kept_BTK), logprobs_BTK.gather(-1, kept_BTK)
        return replace(micro, top_ids_BTK=ids_BTK, teacher_top_logprobs_BTK=logprobs_BTK)

    def _optimizer_steps(self, batch: TokenBatch, number: int) -> Iterable[OptimizerStep]:
        """Cut a round into minibatches and these into micro-batches, corrected and anchored."""
        steps = self._minibatches(batch, number)
        return self._anchored(steps, number) if self._anchors_itself else steps

    def _minibatches(self, batch: TokenBatch, number: int) -> Iterator[OptimizerStep]:
        config, recipe = self.config, self.recipe
        seed = self.seed_of("minibatches", number)
        for mini in batch.minibatches(config.minibatches, seed, recipe.epochs):
            mini = recipe.correct(mini).to(self.model.device)
            rows = mini if recipe.reads_every_row else mini.informative()
            yield mini, list(rows.split(config.compute.micro_tokens))

    def _anchored(self, steps: Iterable[OptimizerStep], number: int) -> list[OptimizerStep]:
        """Anchor all optimizer steps of a round in the policy that the first one starts from.

        Scores use the very micro-batches and the very dropout that train, since sums of others
        round differently. The first step needs no pass of its own: the policy is still the anchor,
        and `update` takes its output. With dropout the reference is scored here as well, so that
        it drops the same.
        """
        reference = self.reference if self.config.compute.dropout else None

        @torch.no_grad()
        def logprobs(model: torch.nn.Module, micro: TokenBatch, *place: int) -> Tensor:
            experts_BTLK = micro.experts_BTLK if model is self.model else None
            with self._same_dropout(number, *place), replayed_routing(model, experts_BTLK):
                return frozen_logprobs(model.train(), micro, self.config.temperature)

        anchored = list[OptimizerStep]()
        for step, (mini, micros) in enumerate(steps):
            scored = list[TokenBatch]()
            for index, micro in enumerate(micros):
                if step:
                    micro = self.with_anchor(micro, logprobs(self.model, micro, step, index))
                if reference is not None:
                    ref_BT = logprobs(reference, micro, step, index)
                    micro = replace(micro, ref_logprobs_BT=ref_BT)
                scored.append(micro)
            anchored.append((mini, scored))
        if reference is not None:
            reference.eval()
            self.model.train()  # with adapters, they are one model
        return anchored

    def _own_tokens(self, batch: TokenBatch) -> TokenBatch:
        """Mask tokens that are anchored in an earlier policy than the one the round starts from:
        they do not tell how far the round has moved it.
        """
        return drop_recorded_tokens(batch) if "proximal" in self.recipe.needs else fresh(batch)

    @contextmanager
    def _same_dropout(self, *place: int) -> Iterator[None]:
        """Drop the same units in every model that scores this micro-batch.

        Args:
            place: numbers of the round, the optimizer step and the micro-batch.
        """
        if not self.config.compute.dropout:
            yield
            return
        device = self.model.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(self.seed_of("dropout", *place) % 2**63)
            yield

    def _distance(self, output: PolicyOutput, micro: TokenBatch) -> dict[str, float]:
        """Measure how far the round has moved the policy: nats and tokens, which add up over
        micro-batches.
        """
        own = self._own_tokens(micro)
        kl_BT = kl_k3(micro.anchor_BT, output.logprobs_BT.detach())
        sums = torch.stack([by_token(kl_BT, own), by_token(torch.ones_like(kl_BT), own)])
        return dict(zip(("own_kl", "own_share"), sums.tolist(), strict=True))

    def _refuse_broken(self, metrics: Mapping[str, float], mini: TokenBatch, number: int) -> None:
        loss, norm = metrics["loss"], metrics["grad_norm"]
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainingError(
                f"round {number + 1}: loss={loss}, grad_norm={norm}: no step was taken; the batch"
                f" is in {self.keep(mini, number + 1)}; resume with a lower learning_rate, and if"
                " that breaks at once, delete the newest folder of checkpoints/ first"
            )

    def _fit_critic(self, critic: Critic, batch: TokenBatch, number: int) -> dict[str, float]:
        try:
            gamma = self.recipe.options.get("gamma", 1.0)
            batch = apply_to_episodes(batch, ~find_recorded_episodes(batch), lambda own: own)
            return critic.fit(batch, self.seed_of("critic", number), gamma)
        except TrainingError as error:
            kept = self.keep(batch, number + 1)
            raise TrainingError(f"round {number + 1}: {error}; the batch is in {kept}") from error

    # --- after the update: coefficients and reference

    def adapt(self, batch: TokenBatch, history: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Let the coefficients of the recipe follow their targets.

        A round is what PPO's section 4 calls a policy update. Without an optimizer step nothing
        was measured and nothing moves.

        - `anchor_kl_coef` reads KL(π_anchor‖π) of the policy as it is now, over the round's own
          trained tokens (k3 of the sampled tokens, where the paper sums over actions): one more
          forward pass. `policy/kl` would not do: it is measured before each step, so with one step
          per round it is 0.
        - `kl_reward_coef` and `kl_coef` read `policy/ref_kl`: the mean over the round's steps, each
          measured before its step.
        - `entropy_coef` reads the entropy before the first step.

        Args:
            batch: the whole round.
            history: metrics of its optimizer steps.

        Returns:
            The coefficients that this round trained with, and what they were judged by.
        """
        if not self._has_targets:
            return {}
        rules = self.recipe.rules()
        metrics = {f"policy/{option}": rule.coef for option, rule in rules.items()}
        if not any(step["updates"] for step in history):
            return metrics
        measured = dict[str, float]()
        own = self._own_tokens(batch)
        if "anchor_kl_coef" in rules and own.mask_BT.any():
            measured["anchor_kl_coef"] = metrics["policy/kl_after"] = self._kl_from_anchor(own)
        if "ref_kl" in history[0]:
            ref_kl = sum(step["ref_kl"] for step in history) / len(history)
            measured |= dict.fromkeys(("kl_reward_coef", "kl_coef"), ref_kl)
        if "entropy_coef" in rules:
            measured["entropy_coef"] = metrics["policy/entropy_before"] = history[0]["entropy"]
        moving = rules.keys() & measured.keys()
        self.recipe = self.recipe.moved(
            {option: rules[option].update(measured[option]).coef for option in moving}
        )
        return metrics

    def _kl_from_anchor(self, batch: TokenBatch) -> float:
        """KL(π_anchor‖π) in nats per trained token, with π as it is now."""
        now_BT = self.score(self.model, batch).logprobs_BT
        mean = replace(batch, n_tokens=int(batch.mask_BT.sum()))
        return float(by_token(kl_k3(batch.anchor_BT, now_BT), mean))

    def _move_reference(self, rounds: int) -> None:
        """Move the reference: a moving average of the policy; or ProRL's reset, in which the
        present policy becomes the reference and the optimizer forgets.
        """
        every, share = self.recipe.reset_every, 1 - self.recipe.reference_decay
        if share and self.reference is not None:
            with torch.no_grad():
                pairs = zip(self.reference.parameters(), self.model.parameters(), strict=True)
                for kept, now in pairs:
                    kept.lerp_(now, share)
            self._reference_has_moved = True
        if every and rounds % every == 0:
            self.optimizer.state.clear()
            if self.reference is not None:
                self.reference = copy.deepcopy(self.model).requires_grad_(False).eval()
                self._reference_has_moved = True

    # --- loading

    def _load_reference(self, checkpoint: Checkpoint | None) -> torch.nn.Module | None:
        """Load the policy that the run started from, or the reference that has moved since."""
        recipe, compute = self.recipe, self.config.compute
        if "reference" not in recipe.needs:
            return None
        moves = {"reset_every": recipe.reset_every, "reference_decay": recipe.reference_decay < 1}
        if any(moves.values()) and compute.lora_rank:
            name = max(moves, key=lambda option: bool(moves[option]))
            raise ConfigError(
                f"{name} needs a reference of its own, and with lora_rank > 0 it is the policy"
                f" itself: set loss.{name}={0 if name == 'reset_every' else 1} for recipe"
                f" {recipe.name}, or compute.lora_rank=0",
                setting=f"loss.{name}",
            )
        moved = checkpoint.reference if checkpoint else None
        if moved or recipe.reference_decay < 1:  # bfloat16 is too coarse for an average
            policy = load_policy(moved or self.config.model, compute)
            own: torch.nn.Module = policy.to(self.model.device).requires_grad_(False).eval()
            return own
        return reference_of(self.model, compute, self.config.model)

    def _load_teacher(self) -> torch.nn.Module | None:
        """Load the teacher; it scores the same ids, so its tokenizer must be the policy's."""
        if not self.recipe.needs & TAUGHT:
            return None
        name, top = self.recipe.teacher.model, self.recipe.teacher.top
        refuse_other_tokenizer(self.config.model, name, "loss.teacher.model")
        teacher: torch.nn.Module = load_model(name, dtype=reference_dtype(self.config.compute))
        most = min(vocabulary(teacher), vocabulary(self.model))
        if top > most:
            raise ConfigError(
                f"loss.teacher.top={top}: the models tell {most} tokens apart: set at most {most},"
                " or 0 for all",
                setting="loss.teacher.top",
            )
        return teacher.to(self.model.device).requires_grad_(False).eval()

    def _load_critic(self, checkpoint: Checkpoint | None) -> Critic | None:
        """Load the critic as it was saved, or start a new one."""
        if "critic" not in self.recipe.needs:
            return None
        settings, config = self.recipe.critic, self.config
        options: dict[str, Any] = {
            "minibatches": config.minibatches,
            "micro_tokens": config.compute.micro_tokens,
            "max_grad_norm": config.optimizer.max_grad_norm,
        }
        saved = checkpoint.critic if checkpoint else None
        if saved:
            start = settings.model or config.model
            return Critic.load(saved, settings, start=start, compute=config.compute, **options)
        if settings.model:
            refuse_other_tokenizer(config.model, settings.model, "loss.critic.model")
        policy = checkpoint.model if checkpoint else config.model
        with torch.random.fork_rng():  # new adapters are drawn at random
            torch.manual_seed(self.seed_of("critic adapter") % 2**63)
            model = load_value_model(settings.model or policy, config.compute)
        return Critic(model, settings, **options)


def vocabulary(model: Any) -> int:
    """Return how many tokens a model tells apart; some pad it beyond their tokenizer's."""
    return int(model.get_output_embeddings().weight.shape[0])
