"""A whole update of a run against the same loss written down token by token, for episodes of every
awkward kind.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trainer_cases import branch, episode

from agentrl.trainers.batch import pack
from agentrl.trainers.config import check_config
from agentrl.trainers.run import Run
from agentrl.trajectory import Group, Segment, SegmentKind, Trajectory
from agentrl.types import EndReason

CLIP_LOW, CLIP_HIGH, KL = 0.03, 0.05, 0.2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from agentrl.trainers.models.tiny import build_model, build_tokenizer

    tokenizer = build_tokenizer(
        ["<|im_start|>user\nsay 3<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"] * 8, 280
    )
    return build_model(tmp_path_factory.mktemp("tiny"), tokenizer, width=32, layers=2, context=256)


def played():
    """Groups with forks, a failed and a truncated episode, one that said nothing, one of equal
    rewards, one of one.
    """
    trunk = branch(4, (3, 5), (2, 4), first_id=20)
    fork = trunk.fork(3).extend(*branch(1, (4, 2), (1, 0), first_id=60).segments[1:])
    compacted = branch(6, (2, 0), first_id=90)
    mute = episode(reward=0.0, sample=5, end=EndReason.CONTEXT_LENGTH)
    first = (
        episode(trunk, fork, compacted, reward=1.0),
        episode(branch(2, (7, 3), (2, 0), first_id=120), reward=0.0, sample=1),
        episode(branch(3, (1, 0), first_id=150), reward=None, sample=2),
        episode(branch(3, (9, 0), first_id=30), reward=0.25, sample=3, end=EndReason.MAX_TURNS),
        episode(branch(2, (1, 1), (1, 1), (1, 0), first_id=70), reward=0.75, sample=4),
        mute,
    )
    equal = tuple(episode(branch(2, (4, 0), first_id=40 + i), task="u", sample=i) for i in range(3))
    one = (
        episode(branch(2, (5, 0), first_id=50), task="v"),
        episode(reward=None, task="v", sample=1),
    )
    return [Group(first), Group(equal), Group(one)]


def plain_logprobs(model, row):
    """log π of every token of a row given those before it; the model's own logits, one row at a
    time.
    """
    logits = model(input_ids=torch.tensor([row.ids])).logits[0].float()
    return torch.cat(
        (
            torch.zeros(1),
            logits[:-1].log_softmax(-1).gather(1, torch.tensor(row.ids)[1:, None])[:, 0],
        )
    )


def sampled_by(model, groups):
    """The same episodes as a policy near the model would have sampled them."""
    draws = iter(torch.randn(2000, generator=torch.Generator().manual_seed(3)).tolist())
    known = {}

    def told(row):
        logprobs, begin, segments = plain_logprobs(model, row).detach().tolist(), 0, []
        for segment in row.segments:
            end = begin + len(segment.ids)
            if segment.kind is SegmentKind.SAMPLED:
                key = row.ids[:end]
                if key not in known:  # a shared turn was sampled once
                    known[key] = Segment.sampled(
                        segment.ids,
                        [min(0.0, one + 0.06 * next(draws)) for one in logprobs[begin:end]],
                        0,
                        "stop",
                    )
                segment = known[key]
            segments.append(segment)
            begin = end
        return Trajectory(tuple(segments), row.shared)

    return [
        Group(
            tuple(replace(e, trajectories=tuple(map(told, e.trajectories))) for e in group.episodes)
        )
        for group in groups
    ]


def by_hand(model, reference, groups):
    """GRPO with a KL term, as its papers have it: loops over groups, episodes and tokens."""
    total, episodes = (
        torch.zeros(()),
        [e for g in groups for e in g.episodes if e.reward is not None],
    )
    spoke = [e for e in episodes if any(row.trained for row in e.trajectories)]
    for group in groups:
        rewards = [e.reward for e in group.episodes if e.reward is not None]
        mean = sum(rewards) / len(rewards)
        deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / max(1, len(rewards) - 1))
        for e in group.episodes:
            if e not in spoke:
                continue
            advantage = 0.0 if len(set(rewards)) == 1 else (e.reward - mean) / (deviation + 1e-6)
            losses = []
            for row in e.trajectories:
                now, then = plain_logprobs(model, row), torch.tensor(row.logprobs)
                with torch.no_grad():
                    there = plain_logprobs(reference, row)
                for t, owned in enumerate(row.mask):
                    if owned:
                        ratio = (now[t] - then[t]).exp()
                        bounded = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
                        gap = there[t] - now[t]
                        losses.append(-torch.minimum(ratio * advantage, bounded * advantage))
                        losses[-1] = losses[-1] + KL * ratio * (gap.exp() - gap - 1)
            total = total + torch.stack(losses).mean() / len(spoke)
    return total


@pytest.mark.parametrize(
    "compute",
    [
        {},
        {"micro_tokens": 16},
        {"gradient_checkpointing": True},
        {"lora_rank": 3, "micro_tokens": 64},
    ],
    ids=lambda row: "-".join(row) or "plain",
)
@pytest.mark.parametrize("filtered", [False, True])
def test_an_update_has_the_gradient_of_the_loss_written_by_hand(model, tmp_path, compute, filtered):
    row = {
        "env": f"{Path(__file__).parents[2] / 'support/toy_envs.py'}:Parity",
        "model": str(model),
        "compute": compute,
        "optimizer": {"max_grad_norm": math.inf},
    }
    row |= {
        "loss": {
            "clip_low": CLIP_LOW,
            "clip_high": CLIP_HIGH,
            "kl_coef": KL,
            "filter_groups": filtered,
        }
    }
    with Run(check_config(row, "test"), tmp_path / "x") as opened:
        run = opened.learner
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():  # the policy has moved away from the reference
            for weight in run.model.parameters():
                if weight.requires_grad:
                    weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
        caught = {}
        trained = {
            name: weight for name, weight in run.model.named_parameters() if weight.requires_grad
        }
        run.optimizer.step = lambda: caught.update(
            {name: w.grad.clone() for name, w in trained.items()}
        )
        run.model.eval()
        groups = sampled_by(run.model, played())
        packed = pack(groups, opened.pad_id, version=0)
        metrics = run.learn(packed, run.credit(run.prepare(packed), 0), 0)
        expected = by_hand(run.model, run.reference, groups[:1] if filtered else groups)
        found = torch.autograd.grad(expected, list(trained.values()))
    assert metrics["policy/loss"] == pytest.approx(float(expected.detach()), abs=1e-5)
    assert metrics["policy/clip_low"] > 0 < metrics["policy/clip_high"]
    for gradient, (name, got) in zip(found, caught.items(), strict=True):
        assert torch.allclose(got, gradient, atol=2e-5, rtol=1e-3), name
