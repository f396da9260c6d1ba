"""Wrong scorers, and wrong estimates of the KL."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from trainer_cases import PAD, Golden, branch, episode, tiny_model

from agentrl.trainers.algorithms.losses import keep
from agentrl.trainers.algorithms.regularisers import kl_k1, kl_k2, kl_k3, kl_penalty
from agentrl.trainers.batch import PolicyOutput, pack
from agentrl.trainers.models.scoring import token_logprobs
from agentrl.trajectory import Group, Segment, Trajectory

# --- 7: the scorer scores the distribution that was sampled


def check_scorer_agrees_with_the_sampler(score):
    """Bug 7. Tokens drawn from softmax(logits / T) get the log-probability they were drawn with."""
    model = tiny_model(torch.float64)
    for temperature in (0.6, 1.0, 1.3):
        generator = torch.Generator().manual_seed(1)
        ids, logprobs = [3, 4, 5], []
        with torch.no_grad():
            for _ in range(6):
                logp_V = (
                    model(input_ids=torch.tensor([ids])).logits[0, -1] / temperature
                ).log_softmax(-1)
                ids.append(int(torch.multinomial(logp_V.exp(), 1, generator=generator)))
                logprobs.append(float(logp_V[ids[-1]]))
        drawn = Trajectory(
            (Segment.prompt(ids[:3]), Segment.sampled(ids[3:], logprobs, 0, "length"))
        )
        batch = pack([Group((episode(drawn), episode(branch(2, (8, 0)), sample=1)))], PAD)
        found = score(model, batch, temperature).logprobs_BT.detach()[0, 3:9]
        assert found.tolist() == pytest.approx(logprobs, abs=1e-6)


def score_without_temperature(model, batch, temperature):
    return token_logprobs(model, batch)


def score_from_own_position(model, batch, temperature):
    logp_BTV = (model(input_ids=batch.ids_BT).logits / temperature).log_softmax(-1)
    return PolicyOutput(keep(logp_BTV.gather(-1, batch.ids_BT[..., None])[..., 0], batch.mask_BT))


def score_left_padded_without_positions(model, batch, temperature):
    ids_BT = torch.stack(
        [row.roll(int(len(row) - n)) for row, n in zip(batch.ids_BT, batch.lengths_B, strict=True)]
    )
    logp_BTV = (model(input_ids=ids_BT).logits / temperature).log_softmax(-1)[:, :-1]
    found_BT = torch.zeros(ids_BT.shape, dtype=torch.float64)
    found_BT[:, 1:] = logp_BTV.gather(-1, ids_BT[:, 1:, None])[..., 0]
    back = [row.roll(-int(len(row) - n)) for row, n in zip(found_BT, batch.lengths_B, strict=True)]
    return PolicyOutput(torch.stack(back))


# --- 10: the KL that is pulled on is the KL that was meant


def check_kl_gradient(kl_loss):
    """Bug 10. Over five tokens of the old policy, the expected gradient is that of KL(π‖π_ref)."""
    generator = torch.Generator().manual_seed(0)
    theta, shift, ref = (torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(3))
    theta.requires_grad_()
    ref_V = ref.log_softmax(0)
    for old_V in (theta.detach().log_softmax(0), (theta.detach() + shift).log_softmax(0)):
        logprobs_V = theta.log_softmax(0)
        exact = torch.autograd.grad((logprobs_V.exp() * (logprobs_V - ref_V)).sum(), theta)[0]
        logprobs_V = theta.log_softmax(0)
        found = torch.autograd.grad((old_V.exp() * kl_loss(logprobs_V, old_V, ref_V)).sum(), theta)[
            0
        ]
        assert exact.norm() > 0.1
        assert (found - exact).abs().max() < 1e-8


def real_kl(logprobs_V, old_V, ref_V):
    """`kl_penalty` on one row."""
    batch = replace(Golden.batch(), old_logprobs_BT=old_V[None], ref_logprobs_BT=ref_V[None])
    return kl_penalty(PolicyOutput(logprobs_V[None]), batch, kl_coef=1.0)[0]


def naive_k1(logprobs, _, ref):
    return kl_k1(logprobs, ref)


def naive_k2(logprobs, _, ref):
    return kl_k2(logprobs, ref)


def naive_k3(logprobs, _, ref):
    return kl_k3(logprobs, ref)


def k3_with_detached_ratio(logprobs, old, ref):
    return (logprobs - old).exp().detach() * kl_k3(logprobs, ref)


CASES = [
    (
        check_scorer_agrees_with_the_sampler,
        [token_logprobs],
        [score_without_temperature, score_from_own_position, score_left_padded_without_positions],
    ),
    (check_kl_gradient, [real_kl], [naive_k1, naive_k2, naive_k3, k3_with_detached_ratio]),
]
