"""GRPO from tasks to `optimizer.step()` in one file: read this first.

    python -m agentrl.trainers.grpo --env calc-v0 --model FOLDER --steps 10 --out TRAINED

`agentrl train` computes the same numbers, bit for bit, and adds other algorithms, checkpoints,
evaluation, metrics, adapters and low precision.

Letters: B rows (branches of history), T token positions, G scored episodes of one task.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence as pad

from agentrl.curriculum.source import Uniform
from agentrl.engines.base import Sampling
from agentrl.engines.factory import open_chat, open_engine
from agentrl.engines.loading import best_device, load_model, load_tokenizer
from agentrl.errors import UserError
from agentrl.policies.base import TokenPolicy
from agentrl.registry import factory
from agentrl.rollout.play import Setting, derive_seed
from agentrl.rollout.rollouts import Rollouts
from agentrl.runner import pool_for
from agentrl.trainers.models.scoring import token_logprobs
from agentrl.trainers.models.weights import PolicyWeights
from agentrl.trajectory import Episode, Group


class Settings(NamedTuple):
    """Settings of `agentrl train`, with its names and defaults; `clip` is its `loss.clip_low`."""

    env: str
    model: str
    env_settings: Mapping[str, Any] = {}
    seed: int = 0
    steps: int = 100
    tasks_per_step: int = 32
    group_size: int = 8
    minibatches: int = 1
    micro_tokens: int = 16384
    learning_rate: float = 1e-6
    temperature: float = 1.0
    clip: float = 0.2
    max_grad_norm: float = 0.5


class Rows(NamedTuple):
    """Rows of tokens, padded on the right; one row alone is not padded and lacks the axis B."""

    ids_BT: Tensor
    mask_BT: Tensor
    old_logprobs_BT: Tensor
    advantage_B1: Tensor
    episode_tokens_B1: Tensor


Episodes = list[tuple[int, list[Rows]]]  # of each: the number of its group, and its rows


def train(settings: Settings, report: Callable[[dict[str, float]], object] = print) -> Any:
    """Train a model by GRPO and return it; `report` hears of every optimizer step."""
    model = load_model(settings.model, best_device(), dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), settings.learning_rate, (0.9, 0.95), weight_decay=0.0, fused=True
    )
    with sampler(model, settings) as (source, rollouts):
        for step in range(settings.steps):
            tasks = source.next(settings.tasks_per_step)
            groups = rollouts.gather(tasks, step)  # plays and scores G episodes per task
            rewards = [reward for g in groups for reward in g.rewards_G if reward is not None]
            episodes = [(g, rows) for g, one in enumerate(groups) for rows in with_advantages(one)]
            for mini in minibatches(episodes, step, settings):
                losses = []
                for micro in micro_batches(mini, settings.micro_tokens):
                    loss = clipped_loss(model, micro, len(mini), settings)
                    loss.backward()  # the gradients of the micro-batches add up
                    losses.append(loss.item())
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
                row = {"step": step + 1, "reward": sum(rewards) / len(rewards)}
                report(row | {"loss": sum(losses), "grad_norm": norm.item()})
            rollouts.sync(PolicyWeights(model), step + 1)
    return model


@contextmanager
def sampler(model: Any, settings: Settings) -> Iterator[tuple[Uniform, Rollouts]]:
    """Where tasks come from, and what plays them with the model's own weights."""
    make = factory(settings.env, **settings.env_settings)
    env, chat = make(), open_chat(settings.model)
    engine = open_engine(model, chat, synchronous=True)
    sampling = Sampling(settings.temperature, max_tokens=env.limits.turn_tokens)
    policy = TokenPolicy(engine, chat, sampling)
    n = min(settings.tasks_per_step * settings.group_size, 256)  # episodes at a time
    setting = Setting(make, policy, pool_for(env, size=n), seed=settings.seed, deterministic=True)
    rollouts = Rollouts(setting, group_size=settings.group_size, concurrency=n)
    seed = settings.seed
    source = Uniform(lambda epoch: make().tasks("train", derive_seed(seed, "train", epoch)))
    try:
        yield source, rollouts
    finally:
        rollouts.run(engine.close())
        rollouts.close()


def with_advantages(group: Group) -> list[list[Rows]]:
    """The rows of each scored episode, with (reward - mean) / (standard deviation + 1e-6)."""
    scored = [episode for episode in group.episodes if episode.reward is not None]
    rewards_G = torch.tensor([episode.reward for episode in scored], dtype=torch.float64)
    advantages_G = torch.zeros_like(rewards_G)
    if len(rewards_G.unique()) > 1:  # equal rewards do not say which episode was better
        advantages_G = (rewards_G - rewards_G.mean()) / (rewards_G.std(correction=1) + 1e-6)
    return [rows_of(*pair) for pair in zip(scored, advantages_G.float(), strict=True)]


def rows_of(episode: Episode, advantage: Tensor) -> list[Rows]:
    """One row per branch of history that trains, longest first; mask 1 on sampled tokens only."""
    trained = [branch for branch in episode.trajectories if branch.trained]
    return [
        Rows(
            torch.tensor(branch.ids),
            torch.tensor(branch.mask, dtype=torch.bool),
            torch.tensor(branch.logprobs),
            advantage[None],
            torch.tensor([sum(each.trained for each in trained)]),
        )
        for branch in sorted(trained, key=lambda branch: len(branch.ids), reverse=True)
    ]


def minibatches(episodes: Episodes, step: int, settings: Settings) -> Iterator[Episodes]:
    """Those of each step: groups in random order, cut where it ends, dealt out evenly by kind."""
    spoke = [(g, rows) for g, rows in episodes if rows]  # a limit may come before the first token
    count = math.ceil(settings.minibatches * len(spoke) / max(1, len(episodes)))
    chance = torch.Generator().manual_seed(derive_seed(settings.seed, "minibatches", step))
    names = sorted({g for g, _ in spoke})
    rank = torch.randperm(len(names), generator=chance).tolist()
    order = sorted(range(len(spoke)), key=lambda index: rank[names.index(spoke[index][0])])
    pushed = {g for g, rows in spoke if rows[0].advantage_B1}
    kinds = ([i for i in order if (spoke[i][0] in pushed) is kind] for kind in (True, False))
    push, rest = (torch.tensor_split(torch.tensor(kind).long(), max(1, count)) for kind in kinds)
    for chosen in filter(len, map(torch.cat, zip(push, rest[::-1], strict=True))):
        yield [spoke[index] for index in sorted(chosen.tolist())]


def micro_batches(episodes: Episodes, micro_tokens: int) -> list[list[Rows]]:
    """Rows of similar length together, as many as fit `micro_tokens` with their padding."""
    informative = [rows for _, rows in episodes if rows[0].advantage_B1]  # others have no gradient
    batches: list[list[Rows]] = []
    for rows in sorted(informative, key=lambda rows: len(rows[0].ids_BT), reverse=True):
        if batches and (len(batches[-1]) + len(rows)) * len(batches[-1][0].ids_BT) <= micro_tokens:
            batches[-1] += rows
        else:
            batches.append([*rows])
    return batches


def clipped_loss(model: Any, rows: list[Rows], n_episodes: int, settings: Settings) -> Tensor:
    """-min(ρA, clip(ρ)A): the mean over an episode's tokens, then over the episodes of the step."""
    batch = Rows(*(pad([*t], batch_first=True).to(model.device) for t in zip(*rows, strict=True)))
    logprobs_BT = token_logprobs(model, batch, settings.temperature).logprobs_BT
    ratio_BT = (logprobs_BT - batch.old_logprobs_BT).clamp(-20, 20).exp()
    clipped_BT = ratio_BT.clamp(1 - settings.clip, 1 + settings.clip)
    gain_BT = torch.minimum(ratio_BT * batch.advantage_B1, clipped_BT * batch.advantage_B1)
    loss_B1 = -(gain_BT * batch.mask_BT).sum(1, keepdim=True) / batch.episode_tokens_B1
    return loss_B1.sum() / n_episodes


def main() -> None:
    """The command line: one option per setting, and a folder for the trained model."""
    parser = argparse.ArgumentParser("python -m agentrl.trainers.grpo")
    for name in ("env", "model", "out"):
        parser.add_argument(f"--{name}", required=True)
    for name, default in Settings._field_defaults.items():
        parser.add_argument(f"--{name}", type=json.loads, default=default)
    values = vars(parser.parse_args())
    out = values.pop("out")
    try:
        model = train(Settings(**values))
    except UserError as error:
        parser.error(str(error))
    model.save_pretrained(out)
    load_tokenizer(values["model"]).save_pretrained(out)


if __name__ == "__main__":
    main()
