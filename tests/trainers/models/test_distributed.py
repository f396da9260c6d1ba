"""Several processes give the gradient of one, whatever each of them was dealt."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trainer_cases import branch, episode, group, tiny_model

from agentrl.errors import ConfigError
from agentrl.trainers.algorithms.losses import add_metrics
from agentrl.trainers.algorithms.recipes import recipe
from agentrl.trainers.batch import pack
from agentrl.trainers.models import scoring
from agentrl.trainers.models.distributed import (
    clip_gradient,
    everyones,
    idle,
    micro_batches,
    rank_and_world,
    shard,
    shard_parameters,
)
from agentrl.trainers.models.scoring import token_logprobs
from agentrl.trajectory import Group

GRPO = recipe("grpo", kl_coef=0.1)

REPO = Path(__file__).resolve().parents[3]


def round_of(episodes):
    """A round whose first episode has two rows; advantages and reference differ from token to
    token.
    """
    trunk = branch(4, (3, 5), (2, 4), first_id=5)
    fork = trunk.fork(3).extend(*branch(1, (4, 0), first_id=60).segments[1:])
    others = [branch(2 + i, (1 + i, 4), (2, 0), first_id=20 + i) for i in range(episodes - 1)]
    played = [
        episode(trunk, fork, reward=1.0),
        *(episode(b, reward=0.0, sample=i + 1) for i, b in enumerate(others)),
    ]
    batch = GRPO.advantage(pack([Group(tuple(played))], 0))
    noise_BT = torch.linspace(-1.0, 0.0, batch.mask_BT.numel()).view(batch.mask_BT.shape)
    return replace(batch, ref_logprobs_BT=noise_BT - 4, old_logprobs_BT=noise_BT - 4.2)


def one_step(model, batch):
    """The gradient, its norm and the metrics of an optimizer step, as a training run makes it."""
    parts = []
    for micro in micro_batches(shard(batch, *rank_and_world()), 24):
        loss, metrics = GRPO.loss(token_logprobs(model, micro), micro)
        loss.backward()
        parts.append(metrics)
    metrics = add_metrics(everyones(parts))
    norm = clip_gradient(model, 1e9)
    return metrics | {"norm": norm}


def whole(parameter):
    return (
        parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
    )


def compare(episodes):
    """In each of several processes: the step of all of them against the step of one."""
    torch.distributed.init_process_group("gloo")
    batch = round_of(episodes)
    if episodes > 1:  # others share rows of a tree then, and its norms round in float32
        scoring.takes_trees = lambda model: False
    sharded, alone = tiny_model(torch.float64), tiny_model(torch.float64)
    shard_parameters(sharded)
    found = one_step(sharded, batch)
    assert all(type(p).__name__ == "DTensor" for p in sharded.parameters()), "nothing was sharded"
    gaps = []
    parts = []
    for micro in batch.split(10**6):
        loss, metrics = GRPO.loss(token_logprobs(alone, micro), micro)
        loss.backward()
        parts.append(metrics)
    expected = add_metrics(parts) | {"norm": clip_gradient(alone, 1e9)}
    for ours, theirs in zip(sharded.parameters(), alone.parameters(), strict=True):
        gaps.append(float((whole(ours) - theirs.grad).abs().max()))
    off = {name: abs(found[name] - expected[name]) for name in expected}
    if torch.distributed.get_rank() == 0:
        print(json.dumps({"gap": max(gaps), "off": off, "norm": expected["norm"]}), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # gloo's threads now and then abort an interpreter that is shutting down


@pytest.mark.parametrize(("world", "episodes"), [(2, 7), (2, 1)])
def test_processes_give_the_gradient_and_metrics_of_one(world, episodes):
    """With one episode the second process has no row at all, and must neither hang nor count."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((str(REPO), str(REPO / "tests/support"))),
    }
    command = [sys.executable, "-W", "error::UserWarning:torch", __file__, str(episodes)]
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ | base | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2] / "support",
        )
        for rank in range(world)
    ]
    try:
        told = [rank.communicate(timeout=200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world, told
    found = json.loads(told[0][0].splitlines()[-1])
    assert found["norm"] > 0.01
    assert found["gap"] < 1e-9
    assert max(found["off"].values()) < 1e-6, "metrics are made in float32"


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_shards_are_whole_episodes_of_the_step_and_leave_nothing_out(world):
    batch = round_of(4)
    shards = [shard(batch, rank, world) for rank in range(world)]
    assert sum(len(part) for part in shards) == len(batch)
    owners = [set(part.episode_B.tolist()) for part in shards]
    assert sum(map(len, owners)) == len(set.union(*owners)) == 4
    assert all(
        (shard.n_tokens, shard.n_episodes) == (batch.n_tokens, batch.n_episodes) for shard in shards
    )
    if world == 2:
        loads = [int(shard.lengths_B.sum()) for shard in shards]
        assert max(loads) - min(loads) < int(batch.lengths_B.max())


def test_there_is_no_rank_beyond_the_world():
    with pytest.raises(ConfigError, match="rank=2"):
        shard(round_of(2), 2, 2)


def test_an_idle_row_adds_nothing():
    batch = round_of(3)
    blank, model = idle(batch), tiny_model(torch.float64)
    loss, metrics = GRPO.loss(token_logprobs(model, blank), blank)
    loss.backward()
    assert float(loss.detach()) == 0
    assert all(float(parameter.grad.abs().max()) == 0 for parameter in model.parameters())
    real = [GRPO.loss(token_logprobs(model, micro), micro)[1] for micro in batch.split(24)]
    assert add_metrics([*real, metrics]) == add_metrics(real)


def test_one_process_has_its_own_micro_batches_and_no_idle_ones():
    batch = pack([group(1.0, 0.0)], 0)
    assert rank_and_world() == (0, 1)
    assert sum(len(part) for part in micro_batches(batch, 10)) == len(batch)
    assert all(bool(part.mask_BT.any()) for part in micro_batches(batch, 10))


if __name__ == "__main__":
    compare(int(sys.argv[1]))
