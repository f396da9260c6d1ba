"""Scoring against the model's full logits: values, gradients, precision, and every way a model
makes its logits.
"""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from trainer_cases import branch, episode, tiny_model

from agentrl.trainers.batch import pack
from agentrl.trainers.models import scoring
from agentrl.trainers.models.loading import in_bfloat16
from agentrl.trainers.models.scoring import (
    Reading,
    _to_logits,
    frozen_logprobs,
    in_parts,
    project,
    read_logits,
    token_logprobs,
)
from agentrl.trajectory import Group


def multi_turn_batch():
    """Rows of unequal length with observations inside, one of them a fork."""
    trunk = branch(4, (3, 5), (2, 4), (6, 0), first_id=5)
    fork = trunk.fork(3).extend(*branch(1, (4, 0), first_id=60).segments[1:])
    others = [branch(2, (1, 0), first_id=30), branch(3, (2, 9), (1, 2), first_id=40)]
    return pack(
        [Group((episode(trunk, fork), *(episode(b, sample=i + 1) for i, b in enumerate(others))))],
        0,
    )


def full_logits_reference(model, batch, temperature, top=0):
    """Every row alone, without padding, with explicit position ids, through the model's own full
    logits in float64.
    """
    logprobs_BT = torch.zeros(batch.mask_BT.shape, dtype=torch.float64)
    entropy_BT, top_BTK = (
        torch.zeros_like(logprobs_BT),
        torch.zeros(*batch.mask_BT.shape, top, dtype=torch.float64),
    )
    for row, length in enumerate(batch.lengths_B.tolist()):
        ids = batch.ids_BT[row : row + 1, :length]
        logits = (
            model(input_ids=ids, position_ids=torch.arange(length)[None]).logits[0].double()
            / temperature
        )
        logp_TV = logits.log_softmax(-1)
        for t in range(1, length):
            if batch.mask_BT[row, t]:
                logprobs_BT[row, t] = logp_TV[t - 1, ids[0, t]]
                entropy_BT[row, t] = -(logp_TV[t - 1].exp() * logp_TV[t - 1]).sum()
                top_BTK[row, t] = logp_TV[t - 1].topk(top).values
    return logprobs_BT, entropy_BT, top_BTK


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("chunk", [3, 1000, None])
def test_scoring_equals_full_logits(temperature, dtype, tolerance, chunk):
    model, batch = tiny_model(dtype), multi_turn_batch()
    output = token_logprobs(model, batch, temperature, chunk=chunk, top=4)
    expected, entropy, top = full_logits_reference(model, batch, temperature, 4)
    assert output.logprobs_BT.dtype == dtype
    assert torch.allclose(output.logprobs_BT.double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.allclose(output.entropy_BT.double(), entropy, rtol=tolerance, atol=tolerance)
    assert torch.allclose(output.top_logprobs_BTK.double(), top, rtol=tolerance, atol=tolerance)
    assert not output.entropy_BT.requires_grad
    assert token_logprobs(model, batch, entropy="off").entropy_BT is None


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.float64, 1e-12)])
def test_the_gradient_is_that_of_full_logits(dtype, tolerance):
    """Of log-probabilities, entropies and top-K together, in one chunk and many; the bound is for
    the backbone too.
    """
    batch, generator = multi_turn_batch(), torch.Generator().manual_seed(0)
    shape = batch.mask_BT.shape
    weights = [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(2)]
    top_weights = torch.randn(*shape, 4, generator=generator, dtype=torch.float64)

    def loss(parts):
        logprobs, entropy, top = parts
        return (logprobs * weights[0] + 0.3 * entropy * weights[1]).sum() + (
            0.5 * top * top_weights
        ).sum()

    exact = tiny_model(torch.float64)
    loss(full_logits_reference(exact, batch, 0.8, 4)).backward()
    scale = max(float(parameter.grad.abs().max()) for parameter in exact.parameters())
    for chunk in (1000, 3):
        model = tiny_model(dtype)
        output = token_logprobs(model, batch, 0.8, chunk=chunk, entropy="gradient", top=4)
        loss((output.logprobs_BT, output.entropy_BT, output.top_logprobs_BTK)).backward()
        for ours, parameter in zip(model.parameters(), exact.parameters(), strict=True):
            assert float((ours.grad - parameter.grad).abs().max()) < tolerance * scale


def check_the_head(dtype, tolerance, chunk):
    """Values and gradients of hand-written and automatic differentiation, in float64 from the same
    states.
    """
    generator = torch.Generator().manual_seed(0)
    states, weight = (
        torch.randn(count, 24, generator=generator, dtype=torch.float64) for count in (40, 300)
    )
    leaves = [tensor.to(dtype).requires_grad_() for tensor in (states, weight)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    targets, reading = torch.randint(300, (40,), generator=generator), Reading(0.7, True, 5)
    weights = [
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((40,), (40,), (40, 5))
    ]
    found, expected = (
        project(*leaves, targets, reading, chunk),
        read_logits(exact[0] @ exact[1].T, targets, reading),
    )
    for output in (found, expected):
        sum((part * w).sum() for part, w in zip(output[:3], weights, strict=True)).backward()
    assert torch.equal(found.top_ids_NK, expected.top_ids_NK)
    pairs = [
        *zip(found[:3], expected[:3], strict=True),
        *((a.grad, b.grad) for a, b in zip(leaves, exact, strict=True)),
    ]
    for ours, theirs in pairs:
        assert float((ours - theirs).detach().abs().max()) < tolerance * float(
            theirs.detach().abs().max()
        )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
@pytest.mark.parametrize("chunk", [7, 64])
def test_the_head_alone_is_exact(dtype, tolerance, chunk):
    check_the_head(dtype, tolerance, chunk)


def forgets_the_targets(logp, targets, top_ids, entropy, given):
    return _to_logits(logp, targets, top_ids, entropy, [None, *given[1:]])


def forgets_the_top(logp, targets, top_ids, entropy, given):
    return _to_logits(logp, targets, top_ids, entropy, [*given[:2], None])


def forgets_the_entropy(logp, targets, top_ids, entropy, given):
    return _to_logits(logp, targets, top_ids, entropy, [given[0], None, given[2]])


def takes_the_entropy_for_zero(logp, targets, top_ids, entropy, given):
    return _to_logits(logp, targets, top_ids, torch.zeros_like(entropy), given)


def mixes_up_the_likeliest(logp, targets, top_ids, entropy, given):
    return _to_logits(logp, targets, top_ids.flip(-1), entropy, given)


@pytest.mark.parametrize(
    "mutant",
    [
        forgets_the_targets,
        forgets_the_top,
        forgets_the_entropy,
        takes_the_entropy_for_zero,
        mixes_up_the_likeliest,
    ],
)
def test_a_wrong_gradient_of_the_head_is_flagged(mutant, monkeypatch):
    monkeypatch.setattr(scoring, "_to_logits", mutant)
    with pytest.raises(AssertionError):
        check_the_head(torch.float32, 1e-6, 7)


def test_a_value_of_the_entropy_has_no_gradient_and_a_frozen_head_gets_none():
    model, batch = tiny_model(torch.float64), multi_turn_batch()
    model.get_output_embeddings().weight.requires_grad_(False)
    output = token_logprobs(model, batch)
    assert not output.entropy_BT.requires_grad
    output.logprobs_BT.sum().backward()
    assert model.get_output_embeddings().weight.grad is None
    assert model.model.layers[0].mlp.up_proj.weight.grad.abs().max() > 0


def test_the_same_scores_can_be_differentiated_twice_over():
    """A kept log-softmax is not used up by the first backward pass."""
    model, batch = tiny_model(torch.float64), multi_turn_batch()
    total = token_logprobs(model, batch).logprobs_BT.sum()
    weight = model.get_output_embeddings().weight
    first, second = (torch.autograd.grad(total, weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_a_bfloat16_model_is_scored_in_float32():
    """Its own logits are rounded to 8 bits; ours have the precision of its hidden states."""
    model, batch = tiny_model(torch.bfloat16), multi_turn_batch()
    states_BTd = model.model(input_ids=batch.ids_BT).last_hidden_state.double()
    logp_BTV = (states_BTd @ model.get_output_embeddings().weight.double().T).log_softmax(-1)
    exact_BT = torch.zeros(batch.mask_BT.shape, dtype=torch.float64)
    exact_BT[:, 1:] = logp_BTV[:, :-1].gather(-1, batch.ids_BT[:, 1:, None])[..., 0]
    found_BT = token_logprobs(model, batch, chunk=5).logprobs_BT
    assert found_BT.dtype == torch.float32
    assert (found_BT - exact_BT)[batch.mask_BT].abs().max() < 1e-5
    rounded_BTV = (model(input_ids=batch.ids_BT).logits.float()).log_softmax(-1)
    rounded_BT = rounded_BTV[:, :-1].gather(-1, batch.ids_BT[:, 1:, None])[..., 0]
    assert (rounded_BT - exact_BT[:, 1:])[batch.mask_BT[:, 1:]].abs().max() > 1e-3, (
        "this test can fail"
    )


def test_a_bfloat16_models_gradient_is_summed_in_float32():
    """Many chunks add up to one, to the last bit that bfloat16 keeps."""
    batch, gradients = multi_turn_batch(), []
    for chunk in (1, 1000):
        model = tiny_model(torch.bfloat16)
        token_logprobs(model, batch, chunk=chunk).logprobs_BT.sum().backward()
        gradients.append(model.model.layers[0].mlp.up_proj.weight.grad.float())
    assert torch.allclose(*gradients, rtol=2**-6, atol=2**-6 * float(gradients[0].abs().max()))


def test_what_follows_padding_or_stands_in_it_changes_nothing():
    model, batch = tiny_model(torch.float64), multi_turn_batch()
    noisy = replace(batch, ids_BT=torch.where(batch.attention_BT, batch.ids_BT, 77))
    assert torch.equal(frozen_logprobs(model, batch), frozen_logprobs(model, noisy))


def test_micro_batches_score_as_the_whole():
    model, batch = tiny_model(torch.float64), multi_turn_batch()
    whole = frozen_logprobs(model, batch)
    assert not whole.requires_grad
    (found,) = in_parts(batch, lambda part: (frozen_logprobs(model, part),), 30)
    assert (found - whole).abs().max() < 1e-12


def test_rows_without_a_trained_token_are_scored_and_have_a_gradient_of_zero():
    model, batch = tiny_model(torch.float64), multi_turn_batch()
    idle = replace(batch, mask_BT=torch.zeros_like(batch.mask_BT))
    output = token_logprobs(model, idle, top=3)
    output.logprobs_BT.sum().backward()
    assert all(float(parameter.grad.abs().max()) == 0 for parameter in model.parameters())


def gemma():
    """A family that caps its logits after the output layer."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        initializer_range=0.5,
        final_logit_softcapping=2.0,
        attn_implementation="eager",
    )
    return Gemma2ForCausalLM(config).double().eval()


def test_models_that_change_their_logits_after_the_head_are_scored_by_their_own_logits():
    model, batch = gemma(), multi_turn_batch()
    output = token_logprobs(model, batch, top=3)
    expected, entropy, top = full_logits_reference(model, batch, 1.0, 3)
    assert (output.logprobs_BT - expected).abs().max() < 1e-6, (
        "attention in float32 is all that differs"
    )
    assert (output.entropy_BT - entropy).abs().max() < 1e-6
    assert (output.top_logprobs_BTK - top).abs().max() < 1e-6


@pytest.mark.parametrize("make", [tiny_model, gemma])
def test_only_trained_positions_reach_the_head(make):
    """What no path may do: project what a prompt or a tool said."""
    model, batch = make(), multi_turn_batch()
    token_logprobs(model, batch)
    rows = []
    linear = torch.nn.functional.linear

    def spy(states, weight, bias=None):
        rows.append(states.numel() // states.shape[-1] if weight.shape[0] == 97 else 0)
        return linear(states, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", spy)
        token_logprobs(model, batch)
    assert max(rows) <= batch.n_tokens


def test_a_bare_module_with_logits_is_enough():
    class Bigram(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(97, 97)

        def forward(self, input_ids, position_ids=None, use_cache=False):
            return SimpleNamespace(logits=self.table(input_ids))

    model, batch = Bigram(), multi_turn_batch()
    expected, *_ = full_logits_reference(model, batch, 1.0)
    assert (token_logprobs(model, batch).logprobs_BT - expected).abs().max() < 1e-5


def test_another_thread_may_sample_while_one_scores():
    """The sampler calls the same module; it must get logits, not what the scorer makes of them."""
    model, batch = tiny_model(), multi_turn_batch()
    ids, seen = batch.ids_BT[:1, :6], []
    expected = model(input_ids=ids).logits
    thread = threading.Thread(target=lambda: seen.append(model(input_ids=ids).logits))

    def hook(module, inputs):
        if (
            not seen
            and not thread.is_alive()
            and threading.current_thread() is threading.main_thread()
        ):
            thread.start()
            thread.join()

    token_logprobs(model, batch)
    handle = model.get_output_embeddings().register_forward_pre_hook(hook)
    token_logprobs(model, batch)
    handle.remove()
    assert torch.equal(seen[0], expected)
    assert "forward" not in vars(model.get_output_embeddings()), "the layer is itself again"


@pytest.mark.parametrize(
    ("temperature", "settings"),
    [(0.0, {}), (-1.0, {}), (math.nan, {}), (1.0, {"chunk": 0}), (1.0, {"top": -1})],
)
def test_scoring_refuses_senseless_settings(temperature, settings):
    with pytest.raises(ValueError, match="must be positive"):
        token_logprobs(tiny_model(), multi_turn_batch(), temperature, **settings)


@pytest.mark.parametrize("chunk", [3, 1000])
def test_top_tokens_that_the_batch_names_are_the_ones_that_are_scored(chunk):
    """DPPO compares both policies on the anchor's likeliest tokens, not each on its own."""
    anchor, model, batch = (
        tiny_model(torch.float64, seed=1),
        tiny_model(torch.float64),
        multi_turn_batch(),
    )
    first = token_logprobs(anchor, batch, chunk=chunk, top=3)
    named = replace(batch, top_ids_BTK=first.top_ids_BTK)
    found = token_logprobs(model, named, chunk=chunk, top=3)
    assert torch.equal(found.top_ids_BTK, first.top_ids_BTK)
    logp_BTV = model(input_ids=batch.ids_BT).logits.log_softmax(-1).roll(1, 1)
    expected = logp_BTV.gather(-1, first.top_ids_BTK)[batch.mask_BT]
    assert torch.allclose(found.top_logprobs_BTK[batch.mask_BT], expected, atol=1e-10)
    weights = torch.randn(expected.shape, dtype=torch.float64)
    (found.top_logprobs_BTK[batch.mask_BT] * weights).sum().backward()
    ours = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    (expected * weights).sum().backward()
    assert all(
        torch.allclose(a, p.grad, atol=1e-10) for a, p in zip(ours, model.parameters(), strict=True)
    )


def read_by_projection(states_Nd, weight_Vd, targets_N, chunk):
    return project(states_Nd, weight_Vd, targets_N, Reading(0.8, top=3), chunk)


def read_off_logits(states_Nd, weight_Vd, targets_N, chunk):
    with torch.autocast("cpu", enabled=False):  # a model's own logits come in float32
        logits_NV = states_Nd @ weight_Vd.T
    return read_logits(logits_NV, targets_N, Reading(0.8, top=3))


@pytest.mark.parametrize("read", [read_by_projection, read_off_logits])
@pytest.mark.parametrize("chunk", [5, 1000])
@pytest.mark.parametrize("quantity", ["logprobs_N", "entropy_N", "top_NK"])
def test_what_is_float32_stays_so_under_autocast(read, chunk, quantity):
    """Log-probabilities, entropies, likeliest tokens, and the gradient of each."""
    generator = torch.Generator().manual_seed(0)
    targets_N = torch.arange(24)

    def measure(is_low):
        generator.manual_seed(0)
        states_Nd = torch.randn(24, 16, generator=generator).requires_grad_()
        weight_Vd = torch.randn(600, 16, generator=generator).mul_(0.2).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_low):
            value = getattr(read(states_Nd, weight_Vd, targets_N, chunk), quantity)
        value.sum().backward()
        return value.detach(), states_Nd.grad, weight_Vd.grad

    for low, full in zip(measure(True), measure(False), strict=True):
        assert low.dtype == torch.float32 and torch.equal(low, full)


def test_a_policy_in_bfloat16_has_float32_entropies():
    """As they are by the log-softmax of its own logits, to float32's rounding."""
    model, batch = tiny_model(), multi_turn_batch()
    in_bfloat16(model)
    output = token_logprobs(model, batch)
    head_inputs = []
    hook = model.lm_head.register_forward_pre_hook(lambda _, inputs: head_inputs.append(*inputs))
    model(input_ids=batch.ids_BT, use_cache=False)
    hook.remove()
    logp_BTV = (head_inputs[0].double() @ model.lm_head.weight.double().T).log_softmax(-1)
    expected_BT = -(logp_BTV.exp() * logp_BTV).sum(-1)[:, :-1]
    found_BT = output.entropy_BT[:, 1:][batch.mask_BT[:, 1:]].double()
    assert found_BT == pytest.approx(expected_BT[batch.mask_BT[:, 1:]].detach(), abs=1e-2)
    assert output.entropy_BT.dtype == output.logprobs_BT.dtype == torch.float32
