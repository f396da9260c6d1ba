"""Losses of direct alignment: by hand, at their fixed points, and blind to what is masked."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.trainers.offline import objectives as p

OF_PAIRS = {name: one for name, one in p.OBJECTIVES.items() if one.loss is not None}


def scores(
    chosen: float, rejected: float, ref: tuple[float, float] = (0.0, 0.0), tokens: int = 1
) -> p.PairScores:
    """One pair."""
    one = [torch.tensor([value], dtype=torch.float64) for value in (chosen, rejected, tokens)]
    ref_one = [torch.tensor([value], dtype=torch.float64) for value in ref]
    return p.PairScores(one[0].requires_grad_(), one[1].requires_grad_(), one[2], one[2], *ref_one)


def options_of(name: str) -> dict[str, float]:
    more = {"baseline": 0.0} if name == "beta_dpo" else {}
    return {**p.OBJECTIVES[name].options, **more}


def loss_of(name: str, pair: p.PairScores, **options: float) -> Tensor:
    loss = p.OBJECTIVES[name].loss
    assert loss is not None
    return loss(pair, **options_of(name) | options)


@pytest.mark.parametrize("name", ["dpo", "cdpo", "robust_dpo", "dpo_norm", "beta_dpo"])
def test_at_the_reference_the_loss_is_ln_2(name: str) -> None:
    assert loss_of(name, scores(-7, -9, (-7, -9))).item() == pytest.approx(math.log(2))


def test_the_gradient_of_dpo_at_the_reference_is_half_of_beta() -> None:
    pair = scores(-3, -5, (-3, -5))
    loss_of("dpo", pair, beta=0.3).backward()  # type: ignore[no-untyped-call]
    assert pair.chosen_B.grad is not None and pair.rejected_B.grad is not None
    assert pair.chosen_B.grad.item() == pytest.approx(-0.3 / 2)
    assert pair.rejected_B.grad.item() == pytest.approx(0.3 / 2)


def test_by_hand_on_four_tokens() -> None:
    # Δ = (-4 + 6) - (-8 + 7) = 3; means over four tokens: 2/4 and -1/4, so δ = 0.75.
    pair = scores(-4, -8, (-6, -7), tokens=4)
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731 - a formula
    odds = lambda lp: math.log(math.exp(lp) / (1 - math.exp(lp)))  # noqa: E731
    by_hand = {
        "dpo": -math.log(sigmoid(0.3)),
        "cdpo": -0.9 * math.log(sigmoid(0.3)) - 0.1 * math.log(sigmoid(-0.3)),
        "robust_dpo": (-0.9 * math.log(sigmoid(0.3)) + 0.1 * math.log(sigmoid(-0.3))) / 0.8,
        "ipo": (0.75 - 5) ** 2,
        "ipo_sum": (3 - 5) ** 2,
        "hinge": 0.7,
        "dpo_norm": -math.log(sigmoid(5 * 0.75)),
        "dpo_nll": -math.log(sigmoid(0.3)) + 1.0,
        "beta_dpo": -math.log(sigmoid(0.1 * (1 + 0.6 * 0.3) * 3)),
        "simpo": -math.log(sigmoid(2 * (-1 + 2) - 1)),
        "orpo": 1.0 - 0.1 * math.log(sigmoid(odds(-1) - odds(-2))),
    }
    assert {name: loss_of(name, pair).item() for name in OF_PAIRS} == pytest.approx(by_hand)


@pytest.mark.parametrize("name", ["ipo", "ipo_sum"])
def test_the_optimum_of_ipo_is_one_over_two_beta(name: str) -> None:
    tokens = 4
    at = 1 / (2 * 0.1) * (tokens if name == "ipo" else 1)
    best = loss_of(name, scores(at, 0, tokens=tokens)).item()
    assert best == pytest.approx(0)
    assert all(loss_of(name, scores(at + d, 0, tokens=tokens)).item() > best for d in (-1, 1))


def test_sums_and_averages_ask_different_things_of_one_beta() -> None:
    """The trap: the same β is met by a long pair under sums and is far away under averages."""
    pair = scores(5, 0, tokens=50)
    assert loss_of("ipo_sum", pair).item() == pytest.approx(0)
    assert loss_of("ipo", pair).item() == pytest.approx((0.1 - 5) ** 2)


def test_kto_starts_at_one_half_and_reads_its_weights() -> None:
    labels = torch.tensor([True, False])
    start = p.kto(torch.zeros(2), labels, torch.tensor(0.0), 0.1, (1.0, 1.0))
    assert start.tolist() == pytest.approx([0.5, 0.5])
    weighted = p.kto(torch.zeros(2), labels, torch.tensor(0.0), 0.1, (2.0, 3.0))
    assert weighted.tolist() == pytest.approx([1.0, 1.5])
    moved = p.kto(torch.tensor([3.0, 3.0]), labels, torch.tensor(1.0), 0.5, (1.0, 1.0))
    right = 1 / (1 + math.exp(-1.0))
    assert moved.tolist() == pytest.approx([1 - right, right])


def test_kto_never_reads_a_negative_divergence_and_gives_it_no_gradient() -> None:
    kl = torch.tensor(-2.0, requires_grad=True)
    ratio = torch.tensor([1.0], requires_grad=True)
    lost = p.kto(ratio, torch.tensor([True]), kl, 1.0, (1.0, 1.0))
    lost.sum().backward()  # type: ignore[no-untyped-call]
    assert kl.grad is None
    assert lost.item() == pytest.approx(1 - 1 / (1 + math.exp(-1.0)))


def test_bradley_terry_by_hand() -> None:
    lost = p.bradley_terry(torch.tensor([2.0]), torch.tensor([1.0]), 0.5, 0.1)
    assert lost.item() == pytest.approx(math.log(1 + math.exp(-0.5)) + 0.1 * 9, rel=1e-6)


def test_the_anchor_is_a_mean_over_tokens_of_the_batch() -> None:
    pair = p.PairScores(
        torch.tensor([-1.0, -9.0]), torch.zeros(2), torch.tensor([1.0, 3.0]), torch.ones(2)
    )
    assert p.chosen_nll(pair).mean().item() == pytest.approx(10 / 4)


reals = st.floats(-20, -0.01)


@settings(max_examples=60, deadline=None)
@given(reals, reals, reals, reals, st.integers(1, 30), st.sampled_from(sorted(OF_PAIRS)))
def test_a_likelier_chosen_response_never_costs_more(
    a: float, b: float, ra: float, rb: float, tokens: int, name: str
) -> None:
    """The gradient pushes the chosen response up and the rejected one down, until the optimum."""
    pair = scores(a, b, (ra, rb), tokens)
    loss_of(name, pair).sum().backward()  # type: ignore[no-untyped-call]
    assert pair.chosen_B.grad is not None and pair.rejected_B.grad is not None
    delta = pair.delta_B.item()
    past = {"ipo": delta / tokens >= 5, "ipo_sum": delta >= 5, "cdpo": 0.1 * delta >= math.log(9)}
    if not past.get(name, False):
        assert pair.chosen_B.grad.item() <= 1e-9
    elif name != "cdpo":
        assert pair.chosen_B.grad.item() >= 0


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(sorted(OF_PAIRS)))
def test_what_is_masked_reaches_neither_loss_nor_gradient(seed: int, name: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask_BT = torch.rand(4, 9, generator=generator) < 0.5
    mask_BT[:, 1] = True
    clean = -torch.rand(4, 9, generator=generator, dtype=torch.float64)
    ref = -torch.rand(4, 9, generator=generator, dtype=torch.float64)

    def run(fill: float) -> tuple[float, Tensor]:
        values = torch.where(mask_BT, clean, fill).requires_grad_()
        pair = p.PairScores.from_tokens(values, mask_BT, torch.where(mask_BT, ref, fill))
        lost = loss_of(name, pair).mean()
        lost.backward()  # type: ignore[no-untyped-call]
        assert values.grad is not None
        return lost.item(), values.grad

    expected, grad = run(0.0)
    assert not grad[~mask_BT].any() and grad[mask_BT].any()
    for fill in (math.nan, 1e6, -math.inf):
        found, again = run(fill)
        assert found == expected and torch.equal(again, grad)


def test_orpo_is_finite_at_certainty() -> None:
    pair = scores(-1e-12, -50.0)
    lost = loss_of("orpo", pair)
    lost.backward()  # type: ignore[no-untyped-call]
    assert lost.isfinite() and pair.chosen_B.grad is not None and pair.chosen_B.grad.isfinite()


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("dop", {}, "objective='dop' is unknown: use one of dpo"),
        ("dpo", {"gamma": 1.0}, "loss.gamma is not a setting of objective 'dpo': it has beta"),
        ("dpo", {"beta": 0.0}, "loss.beta=0.0 must be above 0"),
        ("dpo", {"beta": math.inf}, "loss.beta=inf must be a finite number, 0 or more"),
        ("simpo", {"gamma": math.nan}, "loss.gamma=nan must be a finite number"),
        ("dpo_nll", {"nll_coef": -1.0}, "loss.nll_coef=-1.0 must be a finite number, 0 or more"),
        ("kto", {"desirable_weight": -1.0}, "loss.desirable_weight=-1.0 must be a finite"),
        ("cdpo", {"label_smoothing": 0.5}, "loss.label_smoothing=0.5 must be at least 0"),
    ],
)
def test_wrong_settings_are_named(name: str, options: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        p.find_objective(name, options)


def wrong_ipo(pair: p.PairScores) -> Tensor:
    return (pair.delta_B - 1 / 0.1) ** 2


@pytest.mark.parametrize(
    "wrong",
    [
        lambda pair: -torch.nn.functional.logsigmoid(-0.1 * pair.delta_B),
        lambda pair: -torch.nn.functional.logsigmoid(0.1 * (pair.chosen_B - pair.rejected_B)),
        wrong_ipo,
    ],
)
def test_the_literals_can_fail(wrong: Callable[[p.PairScores], Tensor]) -> None:
    pair = scores(-4, -8, (-6, -7), tokens=4)
    found = wrong(pair).item()
    assert abs(found - 0.5543552444685272) > 0.01 and abs(found - 4) > 0.01
