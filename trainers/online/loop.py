"""One step of online training, read top to bottom: tasks -> groups -> batch -> advantages -> loss
-> optimizer.

What is not here, on purpose: no reference model (kl_coef is 0 unless asked for, and then `Run`
    holds a frozen copy), no
critic (`Run` holds one where the recipe's credit reads values), no asynchrony (every round trains
on what the current weights sampled), no second copy of the model (the engine samples with the very
module that is trained, so weights cannot go stale).

Letters: B rows, T positions, G episodes of a group.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial

import torch

from agentrl.errors import TrainingError
from agentrl.trainers.algorithms.losses import add_metrics
from agentrl.trainers.batch import PolicyOutput, TokenBatch
from agentrl.trainers.models.moe import with_router_loss
from agentrl.trainers.models.scoring import EntropyMode, token_logprobs
from agentrl.trainers.observe.batch_metrics import (
    gradient_metrics,
    lost_reward_metrics,
    staleness_metrics,
    token_metrics,
)
from agentrl.trainers.observe.metrics import refill_metrics, rollout_metrics, system_metrics
from agentrl.trainers.observe.parity import Tokens, gap_metrics, ratio_metrics, trained_tokens
from agentrl.trainers.online.adapt import adapt
from agentrl.trainers.online.prepare import LIKELIEST, credit, prepare
from agentrl.trainers.online.run import Run
from agentrl.trajectory import Group

MAX_QUIET_ROUNDS = 5
"""Rounds without signal and without success after which training is stopped."""


def train(run: Run) -> None:
    """Train from the run's current round to its last.

    Raises:
        TrainingError: the loss is not a number, sampler and trainer disagree, or nothing is left to
            learn from.
        UserError: the environment or a task is wrong for every episode alike.
    """
    config, quiet = run.config, 0
    if run.start == 0 and config.eval_every:
        run.log(0, run.evaluate(0))
    for step in range(run.start, config.steps):
        started = time.perf_counter()
        groups, refilled, spare = run.play(step)
        packed = run.pack(groups, refilled, step)
        sampled = time.perf_counter()
        batch = credit(run, prepare(run, packed), step)
        metrics = (
            rollout_metrics(groups)
            | run.watch.noticed(groups, step)
            | refill_metrics(groups, refilled, spare)
        )
        metrics |= learn(run, packed, batch, step)
        updated = time.perf_counter()
        metrics |= run.hand_over(step + 1)
        due = config.eval_every and (
            (step + 1) % config.eval_every == 0 or step + 1 == config.steps
        )
        metrics |= run.evaluate(step + 1) if due else {}
        played = (*groups, *refilled, *spare)
        metrics |= system_metrics(
            played, waited_s=sampled - started, round_s=updated - started, queue=0
        )
        metrics |= {
            "time/rollout_s": sampled - started,
            "time/update_s": updated - sampled,
            "time/eval_s": time.perf_counter() - updated,
            "time/tokens_per_s": batch.n_tokens / (updated - started),
        }
        run.log(step + 1, metrics)
        quiet = quiet + 1 if is_hopeless(groups, batch) else 0
        if quiet >= MAX_QUIET_ROUNDS:
            raise TrainingError(f"{quiet} rounds in a row gave no signal: {why_quiet(groups)}")
        if (step + 1) % config.save_every == 0 or step + 1 == config.steps:
            run.save(step + 1)


def learn(run: Run, packed: TokenBatch, batch: TokenBatch, step: int) -> dict[str, float]:
    """The updates of one round: the critic's, if there is one, and the policy's, unless it waits
    for the critic.

    Raises:
        TrainingError: see `update`; the same goes for the critic.
    """
    metrics = token_metrics(batch) | staleness_metrics(batch, step)
    if run.critic is not None and len(batch):
        try:
            metrics |= run.critic.fit(batch, run.seed_of("critic", step))
        except TrainingError as error:
            raise TrainingError(
                f"round {step + 1}: {error}; the batch is in {run.keep(batch, step + 1)}"
            ) from error
        if run.critic.is_pretraining(step):
            return metrics
    updated, trained = update(run, batch, step)
    return metrics | updated | gradient_metrics(trained) | lost_reward_metrics(packed, trained)


def update(run: Run, batch: TokenBatch, step: int) -> tuple[dict[str, float], list[TokenBatch]]:
    """All optimizer steps of one round; their metrics, and what they trained on in the first epoch.

    Rows whose advantages are all zero add nothing to the policy gradient; unless a KL or entropy
    term needs them, they are left out of the forward pass while every denominator stays what it
    was.

    Raises:
        TrainingError: the loss or the gradient is not a number, or what a coefficient should
            follow.
        ParityError: sampler and trainer disagree; nothing was trained on these samples.
    """
    config, recipe = run.config, run.recipe
    for group in run.optimizer.param_groups:
        group["lr"] = config.learning_rate * config.schedule.share(step, config.steps)
    history, tokens, trained = list[dict[str, float]](), list[Tokens](), list[TokenBatch]()
    run.model.train()
    for mini in batch.minibatches(
        config.minibatches, run.seed_of("minibatches", step), recipe.epochs
    ):
        mini, parts = recipe.correct(mini).to(run.model.device), []
        for micro in (mini if recipe.regularisers else mini.informative()).split(
            config.compute.micro_tokens
        ):
            output = score(run, micro)
            scalar, metrics = recipe.loss(output, micro)
            scalar.backward()
            parts.append(metrics)
            tokens.append(trained_tokens(output, micro))
        if parts:
            norm = float(torch.nn.utils.clip_grad_norm_(run.model.parameters(), run.max_grad_norm))
            gap = {} if history else run.watch.agree(gap_metrics(tokens), mini)
            history.append(add_metrics(parts) | {"grad_norm": norm, "updates": 0.0} | gap)
            _stop_if_broken(run, history[-1], mini, step)
            if history[-1]["approx_kl"] <= recipe.kl_budget:
                run.optimizer.step()
                history[-1]["updates"] = 1.0
            run.optimizer.zero_grad(set_to_none=True)
            if history[-1]["approx_kl"] > recipe.kl_budget:
                break
        trained += [mini] if sum(one.n_episodes for one in trained) < batch.n_episodes else []
    metrics = _summarize(history) | run.watch.effective(ratio_metrics(tokens))
    return metrics | adapt(run, batch, history), trained


def score(run: Run, micro: TokenBatch) -> PolicyOutput:
    """What the policy says about the sampled tokens."""
    mode: EntropyMode = "gradient" if "entropy_gradient" in run.recipe.needs else "value"
    top = LIKELIEST if run.recipe.needs & {"top", "anchor_top"} else 0
    said = partial(token_logprobs, run.model, micro, run.config.temperature, entropy=mode, top=top)
    return with_router_loss(run.model, micro, said) if "router" in run.recipe.needs else said()


def _stop_if_broken(run: Run, last: dict[str, float], mini: TokenBatch, step: int) -> None:
    if not (math.isfinite(last["loss"]) and math.isfinite(last["grad_norm"])):
        raise TrainingError(
            f"round {step + 1}: loss={last['loss']}, grad_norm={last['grad_norm']}: no step was"
            f" taken; the batch is in {run.keep(mini, step + 1)}; resume with a lower"
            " learning_rate, and where that breaks at once, from the checkpoint before: delete the"
            " newest folder of checkpoints/"
        )


def _summarize(history: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over the optimizer steps of a round; the parity gap is that of the first, before any
    update.
    """
    if not history:
        return {"policy/updates": 0.0}
    names = {
        "loss": "policy/loss",
        "entropy": "policy/entropy",
        "approx_kl": "policy/kl",
        "ref_kl": "policy/ref_kl",
        "clip_low": "policy/clip_low",
        "clip_high": "policy/clip_high",
        "rejected": "policy/rejected",
        "grad_norm": "policy/grad_norm",
    }
    metrics = {
        name: sum(part[key] for part in history) / len(history)
        for key, name in names.items()
        if key in history[0]
    }
    metrics |= {name: value for name, value in history[0].items() if name.startswith("parity/")}
    metrics["policy/ratio_max"] = max(part["ratio_max"] for part in history)
    return metrics | {"policy/updates": sum(part["updates"] for part in history)}


def is_hopeless(groups: Sequence[Group], batch: TokenBatch) -> bool:
    """Whether a round teaches nothing and solves nothing. (Where everything is solved, going on
    does no harm.)
    """
    solved = any(episode.passed for group in groups for episode in group.episodes)
    return not solved and not bool((batch.advantages_BT * batch.mask_BT).any())


def why_quiet(groups: Sequence[Group]) -> str:
    """In words, why the groups of a hopeless round teach nothing."""
    if all(reward is None for group in groups for reward in group.rewards_G):
        return "infrastructure failed every episode: see `failure` in episodes.jsonl"
    return "no task is ever solved: choose easier ones, or warm-start the model"
