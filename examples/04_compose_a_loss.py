"""Compose an algorithm from functions: leave-one-out advantages with a surrogate of your own."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl import Episode, Group, Score, Segment, TaskView, Trajectory
from agentrl.trainers import PolicyOutput, TokenBatch, pack
from agentrl.trainers.algorithms.advantages import group_advantages, rloo
from agentrl.trainers.algorithms.losses import PolicyLoss, by_token, importance_ratio
from agentrl.trajectory import EpisodeKey
from agentrl.types import EndReason


def capped_reinforce(output: PolicyOutput, batch: TokenBatch, *, cap: float = 1.05) -> Tensor:
    """-min(ρ, cap)·A·log π with no gradient through ρ: far tokens still learn, with a capped
    weight.
    """
    weight_BT = importance_ratio(output, batch).clamp(max=cap).detach()
    return -weight_BT * batch.advantages_BT * output.logprobs_BT


def episode(sample: int, ids: list[int], reward: float) -> Episode:
    """Prompt, a turn, what a tool said, and a second turn: the tool's tokens never train."""
    branch = Trajectory(
        (
            Segment.prompt([1, 2, 3]),
            Segment.sampled(ids, [-0.7] * len(ids), version=0, finish="stop"),
            Segment.observation([4, 5]),
            Segment.sampled([6], [-0.2], version=0, finish="stop"),
        )
    )
    return Episode(
        key=EpisodeKey("example", 0, "task", sample),
        env="example-v0",
        task=TaskView(id="task", instruction="…"),
        start="same",
        messages=(),
        end=EndReason.ANSWERED,
        score=Score(reward),
        trajectories=(branch,),
    )


if __name__ == "__main__":
    group = Group((episode(0, [7, 8], 1.0), episode(1, [9], 0.0), episode(2, [7, 7], 0.0)))
    batch = group_advantages(pack([group], pad_id=0), rloo)
    logprobs_BT = torch.where(batch.mask_BT, batch.old_logprobs_BT + 0.1, 0.0).requires_grad_()
    loss, metrics = PolicyLoss(capped_reinforce, by_token)(PolicyOutput(logprobs_BT), batch)
    loss.backward()
    print("advantage of each row:", batch.advantages_BT.sum(1).div(batch.mask_BT.sum(1)).tolist())
    print(f"loss {loss.item():.4f}, ratio {metrics['ratio_mean']:.3f}")
    print("gradient at masked tokens:", float(logprobs_BT.grad[~batch.mask_BT].abs().sum()))
