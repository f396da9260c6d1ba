"""Small things to train on: episodes with tokens, golden numbers, a policy whose every trajectory
can be enumerated.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, settings
from torch import Tensor

from agentrl.trainers.batch import PolicyOutput, TokenBatch, pack
from agentrl.trajectory import Episode, EpisodeKey, Group, Segment, Trajectory
from agentrl.types import EndReason, Message, Score, TaskView

PAD = 0

# Generated alike every time; no shrinking, because a mutant only has to be found.
quick = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)


def branch(
    prompt: int, *turns: tuple[int, int], first_id: int = 10, version: int = 3
) -> Trajectory:
    """A branch with `prompt` opening tokens and turns of (sampled, observed) tokens; ids count up
    from `first_id`.
    """
    segments, token = [Segment.prompt(range(first_id, first_id + prompt))], first_id + prompt
    for sampled, observed in turns:
        logprobs = [-0.1 - 0.05 * (i % 7) for i in range(sampled)]
        segments.append(Segment.sampled(range(token, token + sampled), logprobs, version, "stop"))
        token += sampled
        if observed:
            segments.append(Segment.observation(range(token, token + observed)))
            token += observed
    return Trajectory(tuple(segments))


def episode(
    *branches: Trajectory,
    reward: float | None = 1.0,
    task: str = "t",
    sample: int = 0,
    end: EndReason = EndReason.SUBMITTED,
    messages: tuple[Message, ...] = (),
) -> Episode:
    """A finished episode; a reward of None makes it one that infrastructure failed."""
    score = Score.failed("the sandbox died") if reward is None else Score(reward)
    end = EndReason.SANDBOX_LOST if reward is None else end
    return Episode(
        EpisodeKey("run", 0, task, sample),
        "toy-v0",
        TaskView(id=task, instruction="do it"),
        "start",
        messages,
        end,
        score,
        branches,
    )


def group(
    *rewards: float | None, task: str = "t", shape: tuple[tuple[int, int], ...] = ((2, 2), (3, 0))
) -> Group:
    """Episodes of one shape (one longer than the next) with these rewards."""
    return Group(
        tuple(
            episode(branch(2, *shape, (1 + index, 0)), reward=reward, task=task, sample=index)
            for index, reward in enumerate(rewards)
        )
    )


def batch_of(*groups: Group) -> TokenBatch:
    """Packed, in float64, with advantages that differ from token to token, so that nothing can
    cancel out.
    """
    batch = pack(groups, PAD)
    values = torch.linspace(-1.0, 1.5, batch.mask_BT.numel(), dtype=torch.float64).reshape(
        batch.mask_BT.shape
    )
    return replace(
        batch,
        old_logprobs_BT=batch.old_logprobs_BT.double(),
        advantages_BT=torch.where(batch.mask_BT, values, 0.0),
    )


def logprobs_for(batch: TokenBatch, seed: int = 0, scale: float = 0.4) -> Tensor:
    """Log-probabilities near the old ones, as a leaf that records gradient; noise wherever nothing
    was sampled.
    """
    noise = torch.randn(
        batch.mask_BT.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return (batch.old_logprobs_BT + scale * noise).requires_grad_()


class Golden:
    """Two rows of four tokens; position 2 of row 0 is what a tool said."""

    logprobs = torch.tensor(
        [[-1.0, -0.5, -2.0, -0.1], [-0.7, -1.2, -0.3, -2.5]], dtype=torch.float64
    )
    old = torch.tensor([[-1.2, -0.5, -1.5, -0.3], [-0.4, -1.6, -0.3, -2.0]], dtype=torch.float64)
    ref = torch.tensor([[-1.1, -0.9, -1.8, -0.2], [-0.6, -1.0, -0.5, -2.2]], dtype=torch.float64)
    advantages = torch.tensor([[1.0], [-0.5]], dtype=torch.float64).expand(2, 4)
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0]]).bool()
    rewards = (1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0)

    @classmethod
    def batch(cls, **changes) -> TokenBatch:
        tokens_E = cls.mask.sum(1)
        batch = TokenBatch(
            ids_BT=torch.ones(2, 4, dtype=torch.int64),
            mask_BT=cls.mask,
            attention_BT=torch.ones(2, 4, dtype=torch.bool),
            old_logprobs_BT=cls.old,
            advantages_BT=cls.advantages,
            turn_BT=torch.zeros(2, 4, dtype=torch.int32),
            version_BT=torch.zeros(2, 4, dtype=torch.int32),
            episode_B=torch.arange(2),
            group_E=torch.zeros(2, dtype=torch.int64),
            reward_E=torch.zeros(2, dtype=torch.float64),
            truncated_E=torch.zeros(2, dtype=torch.bool),
            tokens_E=tokens_E,
            n_tokens=int(tokens_E.sum()),
            n_episodes=2,
            ref_logprobs_BT=cls.ref,
        )
        return replace(batch, **changes)


def one_episode(logprobs, anchor, advantages) -> tuple[Tensor, PolicyOutput, TokenBatch]:
    """One episode of N trained tokens, with a leaf to differentiate by."""
    logprobs_N, anchor_N, advantages_N = (
        torch.tensor(np.asarray(x)).double() for x in (logprobs, anchor, advantages)
    )
    leaf_BT = logprobs_N[None].requires_grad_()
    size, mask_BT = len(logprobs), torch.ones(1, len(logprobs), dtype=torch.bool)
    batch = replace(
        Golden.batch().rows(torch.tensor([0])),
        ids_BT=torch.ones(1, size, dtype=torch.int64),
        mask_BT=mask_BT,
        attention_BT=mask_BT,
        old_logprobs_BT=anchor_N[None],
        advantages_BT=advantages_N[None],
        tokens_E=torch.tensor([size]),
        ref_logprobs_BT=None,
        n_tokens=size,
        n_episodes=1,
    )
    return leaf_BT, PolicyOutput(leaf_BT), batch


class TwoSteps:
    """A softmax policy that draws two of five tokens, the second given the first: 25 trajectories,
    30 parameters.
    """

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.theta = torch.randn(30, generator=generator, dtype=torch.float64).requires_grad_()
        self.rewards_K = torch.randint(0, 3, (25,), generator=generator).double() / 2
        self.actions_K2 = torch.cartesian_prod(torch.arange(5), torch.arange(5))

    def logprobs_K2(self) -> Tensor:
        """Log-probability of each of the two tokens of each trajectory."""
        first_K, second_K = self.actions_K2.T
        first = self.theta[:5].log_softmax(0)[first_K]
        return torch.stack([first, self.theta[5:].view(5, 5).log_softmax(1)[first_K, second_K]], 1)

    def exact_gradient(self) -> Tensor:
        """d E[R] / dθ."""
        expected = (self.logprobs_K2().sum(1).exp() * self.rewards_K).sum()
        return torch.autograd.grad(expected, self.theta)[0]

    def groups(self, size: int) -> tuple[TokenBatch, Tensor, Tensor]:
        """Every group of `size` trajectories as one batch (a tool speaks between the two tokens).

        Returns the batch, its log-probabilities with gradient to θ, and the probability of each
        row's group.
        """
        drawn_NG = torch.cartesian_prod(*[torch.arange(25)] * size)
        rows_B = drawn_NG.flatten()
        mask_BT = torch.tensor([False, True, False, True]).expand(len(rows_B), 4)
        logprobs_B2 = self.logprobs_K2()[rows_B]
        blank_B = torch.full((len(rows_B),), -9.0, dtype=torch.float64)
        logprobs_BT = torch.stack([blank_B, logprobs_B2[:, 0], blank_B, logprobs_B2[:, 1]], 1)
        probability_N = logprobs_B2.detach().sum(1).view(-1, size).sum(1).exp()
        zeros_BT, episodes = (
            torch.zeros(len(rows_B), 4, dtype=torch.int32),
            torch.arange(len(rows_B)),
        )
        batch = TokenBatch(
            ids_BT=torch.ones(len(rows_B), 4, dtype=torch.int64),
            mask_BT=mask_BT,
            attention_BT=torch.ones_like(mask_BT),
            old_logprobs_BT=logprobs_BT.detach(),
            advantages_BT=torch.full(mask_BT.shape, torch.nan, dtype=torch.float64),
            turn_BT=zeros_BT,
            version_BT=zeros_BT,
            episode_B=episodes,
            group_E=episodes // size,
            reward_E=self.rewards_K[rows_B],
            truncated_E=torch.zeros(len(rows_B), dtype=torch.bool),
            tokens_E=torch.full((len(rows_B),), 2),
            n_tokens=2 * len(rows_B),
            n_episodes=len(rows_B),
        )
        return batch, logprobs_BT, probability_N.repeat_interleave(size)


def random_batch(seed: int = 0, shape: tuple[int, int] = (6, 9)) -> TokenBatch:
    """Rows of one episode each with random masks, log-probabilities, entropies and advantages of
    either sign.
    """
    generator = torch.Generator().manual_seed(seed)
    mask_BT = torch.rand(shape, generator=generator) < 0.6
    mask_BT[:, 1] = True
    draws = torch.randn((4, *shape), generator=generator, dtype=torch.float64)
    rows = torch.arange(shape[0])
    drift = 0.4 * draws[1] - 0.2
    return replace(
        Golden.batch(),
        ids_BT=torch.randint(0, 99, shape, generator=generator),
        mask_BT=mask_BT,
        attention_BT=torch.ones(shape, dtype=torch.bool),
        old_logprobs_BT=-draws[0].abs(),
        proximal_logprobs_BT=-(draws[0].abs() - drift).abs(),
        advantages_BT=draws[2][:, :1].expand(shape).clone(),
        entropy_BT=draws[3].abs(),
        ref_logprobs_BT=None,
        turn_BT=torch.zeros(shape, dtype=torch.int32),
        version_BT=torch.zeros(shape, dtype=torch.int32),
        episode_B=rows,
        group_E=rows // 2,
        reward_E=torch.zeros(shape[0], dtype=torch.float64),
        truncated_E=rows % 3 == 0,
        tokens_E=mask_BT.sum(1),
        n_tokens=int(mask_BT.sum()),
        n_episodes=shape[0],
    )


def tiny_model(
    dtype: torch.dtype = torch.float32, seed: int = 0, vocabulary: int = 97
) -> torch.nn.Module:
    """A Qwen2 with random weights large enough that its predictions are far from uniform."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).to(dtype).eval()
