"""Every recipe against its paper: advantages, loss and gradient of random rounds, by formulas that
were written from the papers without a look at the code.

Where a recipe is not its paper, `DIFFERS` takes every stated deviation back by its name, and none
is idle or missing. Deviations that one step's numbers cannot show are in `test_deviations`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from deviations import DEVIATIONS
from hypothesis import given, settings
from paper_advantages import Advantages, Episode, Episodes, Token, Turn
from paper_changes import ALPHA, COVARIANCES, DELTA, EPS, HIGH, SHARE, WHITEN_EPS, with_signal
from paper_differs import DIFFERS
from paper_formulas import Result
from paper_steps import PAPERS, next_beta, value_targets
from recipe_cases import (
    SIGNAL,
    VOCABULARY,
    credited,
    cut_episodes,
    filled,
    groups_of,
    learnt,
    policy,
    rounds,
)
from torch import Tensor
from trainer_cases import PAD, quick

from agentrl.trainers.algorithms.adaptive import AdaptiveKL
from agentrl.trainers.algorithms.recipe import Recipe
from agentrl.trainers.algorithms.recipes import AGGREGATES, RECIPES, recipe
from agentrl.trainers.batch import TokenBatch, pack
from agentrl.trajectory import Episode as Played
from agentrl.trajectory import Group, SegmentKind

OPEN = {
    "gdpo": {"weights": {"a": 1.0, "b": 1.0}},
    "cispo": {"high": HIGH},
    "dapo": {"longest": 4, "cache": 2},
    "reinforce": {"beta": 0.01},
    "rloo": {"beta": 0.01},
    "turn_grpo": {"beta": 0.01},
    "dppo": {"delta": DELTA},
    "prorl": {"beta": 1e-3},
    "clip_cov": {"bounds": COVARIANCES},
    "kl_cov": {"share": SHARE},
    "vapo": {"alpha": ALPHA},
    "distill": {"gamma": 0.5},
}
"""What papers leave open, and numbers that fit episodes of a few tokens."""
TRIED = {
    "cispo": {"clip_high": HIGH},
    "dppo": {"divergence_max": DELTA},
    "clip_cov": {"cov_share": 1.0, "cov_low": COVARIANCES[0], "cov_high": COVARIANCES[1]},
    "kl_cov": {"kl_cov_share": SHARE},
    "vapo": {"length_alpha": ALPHA},
    "distill": {"teacher_gamma": 0.5},
}
"""The latter as settings."""
SMALL = {"overlong_tokens": 4, "overlong_cache": 2}
"""Of what recipes leave out."""
IDLE = {"ratio_max", "cov_seed", "value_lam", "dual_clip"}
"""No ratio is so large here; all candidates are drawn; the critic has a test below; 0.2 of
infinity is infinity.
"""
SHARES = {"mgpo"}
"""Their rewards are shares of right answers, so there are no process rewards."""
ROUNDS = (
    [SIGNAL, (([(2, 1)], 1.0, False), ([(1, 1), (2, 0)], None, False), ([(1, 0)], 0.0, True))],
    [SIGNAL, (([(3, 1), (2, 0)], 0.0, False), ([(3, 1)], 1.0, False), ([(2, 0)], 0.25, False))],
)
EVERY = pytest.mark.parametrize("name", RECIPES)
NEAR, FAR = 1e-9, 1e-5
few = settings(quick, max_examples=5)
Numbers = dict[str, Tensor]


def paper_of(name: str) -> Callable[[Episodes], Result]:
    """The paper's formula, with the epsilon of our standard deviations."""
    formula = PAPERS[name]
    guard = {"guard": WHITEN_EPS if name.startswith("reinforce++") else EPS}
    known = inspect.signature(formula).parameters
    return partial(formula, **OPEN.get(name, {}), **(guard if "guard" in known else {}))


def ours(name: str, **more) -> Recipe:
    weights = {} if name in SHARES else {"step": 0.5}
    return replace(recipe(name, **TRIED.get(name, {}), **more), turn_weights=weights)


def round_of(row: Recipe, drawn, cuts=frozenset()) -> tuple[list[Group], Episodes, Tensor]:
    """A round as we have it and as papers see it, and what the policy says in it."""
    groups, table_V4 = groups_of(drawn, cuts), policy()
    known = filled(
        pack(groups, PAD), groups, {"reference", "teacher", "critic", "entropy", "greedy"}
    )
    episodes = episodes_of(groups, known, table_V4, row.turn_weights.get("step", 0.0))
    return groups, with_signal(episodes) if row.refill else episodes, table_V4


def found_by(row: Recipe, groups: list[Group]) -> Numbers:
    """What our recipe learns from a round."""
    found = learnt(row, credited(row, groups))
    loss = torch.tensor(found.loss, dtype=torch.float64)
    return {"A": found.advantages_V, "loss": loss, "gradient": found.gradient_V4}


def expected_by(formula: Callable[[Episodes], Result], episodes: Episodes, table_V4) -> Numbers:
    """What the formula does."""
    advantages, loss = formula(episodes)
    gradient_V4 = torch.autograd.grad(loss, table_V4)[0]
    return {"A": by_name(episodes, advantages), "loss": loss.detach(), "gradient": gradient_V4}


def gap(ours: Numbers, theirs: Numbers) -> float:
    """The largest difference of any number."""
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


# --- a round as papers see it


def episodes_of(
    groups: list[Group], batch: TokenBatch, table_V4: Tensor, weight: float
) -> Episodes:
    """The scored episodes: what was sampled, turn by turn, in whatever branches it came, with what
    the batch says of each token.
    """
    found: list[Episode] = []
    for g, group in enumerate(groups):
        for played in group.episodes:
            if played.reward is None:
                continue
            earned = [weight * step for step in played.score.turns["step"]]
            turns = [
                Turn([token_of(one, batch, table_V4) for one in ids], reward, told)
                for (ids, told), reward in zip(said(played), earned, strict=True)
            ]
            greedy = float(batch.greedy_reward_E[len(found)])
            found.append(Episode(g, played.reward, turns, greedy, dict(played.score.parts)))
    return found


def said(played: Played) -> list[tuple[tuple[int, ...], str]]:
    """The turns of an episode: the tokens of each, and what the policy was told before it."""
    turns: dict[tuple[int, ...], str] = {}
    for branch in played.trajectories:
        told = ""
        for segment in branch.segments:
            if segment.kind is SegmentKind.SAMPLED:
                turns.setdefault(segment.ids, told)
            else:
                told = str(segment.ids)
    return list(turns.items())


def token_of(name: int, batch: TokenBatch, table_V4: Tensor) -> Token:
    place = (batch.mask_BT & (batch.ids_BT == name)).nonzero()[0].tolist()
    fields = {
        "old": batch.old_logprobs_BT,
        "ref": batch.ref_logprobs_BT,
        "teacher": batch.teacher_logprobs_BT,
        "value": batch.values_BT,
        "entropy": batch.entropy_BT,
    }
    given = {key: float(full[*place]) for key, full in fields.items()}
    new, top = table_V4[name, 0], list(table_V4[name, 2:])
    p, spread = math.exp(given["old"]), 0.5 + 0.4 * math.sin(name)
    return Token(
        new,
        **given,
        probs_squared=p**2 + spread * (1 - p) ** 2,
        top_new=top,
        top_old=[-0.7, -2.1],
        is_top=bool(new >= max(top) - 1e-6),
        name=name,
    )


def by_name(episodes: Episodes, values: Advantages) -> Tensor:
    full_V = torch.zeros(VOCABULARY, dtype=torch.float64)
    for one, row in zip(episodes, values, strict=True):
        for token, value in zip(one.tokens, row, strict=True):
            full_V[token.name] = value
    return full_V


# --- the claims


def test_every_recipe_has_a_formula_of_its_paper():
    """A recipe that is added without one fails here."""
    assert PAPERS.keys() == RECIPES.keys()
    assert DIFFERS.keys() <= RECIPES.keys()


@EVERY
def test_a_recipe_is_its_paper_or_differs_as_stated(name):
    formula, row = DIFFERS[name].ours if name in DIFFERS else paper_of(name), ours(name)

    @few
    @given(rounds, cut_episodes)
    def same(drawn, cuts):
        groups, *papers = round_of(row, drawn, cuts)
        assert gap(found_by(row, groups), expected_by(formula, *papers)) < NEAR

    same()


@pytest.mark.parametrize("name", DIFFERS)
def test_what_differs_is_what_is_stated_and_nothing_else(name):
    """Each alone can be seen in some round; all undone, the formula is the paper's in every one."""
    papers = [round_of(ours(name), drawn)[1:] for drawn in ROUNDS]
    differs = DIFFERS[name]
    here = [expected_by(differs.ours, *paper) for paper in papers]
    for deviation, undone in differs.undone.items():
        there = [expected_by(partial(differs.ours, **undone), *paper) for paper in papers]
        assert max(map(gap, here, there)) > FAR, deviation
    undone = {key: value for options in differs.undone.values() for key, value in options.items()}
    for paper in papers:
        there = expected_by(partial(differs.ours, **undone), *paper)
        assert gap(there, expected_by(paper_of(name), *paper)) < NEAR


@pytest.mark.parametrize("name", DIFFERS)
@pytest.mark.parametrize("drawn", ROUNDS)
def test_settings_that_give_the_papers_form(name, drawn):
    """Each takes its own deviation back, and together they take back all that have settings."""
    differs, settings = DIFFERS[name], settings_of(name)
    for told in [[one] for one in settings] + [list(settings)]:
        row = ours(name, **{k: v for one in told for k, v in settings[one].items()})
        undone = {k: v for one in told for k, v in differs.undone[one].items()}
        groups, *paper = round_of(row, drawn)
        expected = expected_by(partial(differs.ours, **undone), *paper)
        assert gap(found_by(row, groups), expected) < NEAR, told


def settings_of(name: str) -> dict[str, dict[str, object]]:
    """Deviation -> the settings that take it back, with numbers that fit a few tokens."""
    return {
        one.name: {key: SMALL.get(key, value) for key, value in one.settings.items()}
        for one in DEVIATIONS[name]
        if one.settings and one.name in DIFFERS[name].undone
    }


@EVERY
def test_one_wrong_number_or_mean_is_seen(name):
    """So no option of a recipe, and no aggregate, escapes the comparison with its paper."""
    row = ours(name)
    shifted = {
        option: value + 1 if isinstance(value, int) else 0.2 * value
        for option, value in row.options.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and option not in IDLE
    }
    wrong = [row.changed({option: value}) for option, value in shifted.items()]
    wrong += [replace(row, aggregate=one) for one in AGGREGATES.values() if one != row.aggregate]
    groups = [groups_of(drawn) for drawn in ROUNDS]
    right = [found_by(row, one) for one in groups]
    for other in wrong:
        assert max(map(gap, [found_by(other, one) for one in groups], right)) > NEAR


@pytest.mark.parametrize("name", ["ppo", "ppo_penalty", "turn_ppo", "vapo"])
def test_the_critic_learns_what_the_paper_says(name):
    """At the paper's γ and λ: A + V, and in VAPO the return."""
    paper = {"turn_ppo": {"gamma": 0.99, "lam": 0.9}, "vapo": {}}.get(name, {"gamma": 0.99})
    row = ours(name, **paper)
    groups, episodes, _ = round_of(row, ROUNDS[0], {(0, 0)})
    batch = credited(row, groups)
    expected_V = by_name(episodes, value_targets(name, episodes))
    found_N, names_N = batch.returns_BT[batch.mask_BT], batch.ids_BT[batch.mask_BT]
    assert len(names_N) > 10
    if name == "turn_ppo":
        firsts = {turn.tokens[0].name for one in episodes for turn in one.turns}
        chosen_N = torch.tensor([int(one) in firsts for one in names_N])
        found_N, names_N = found_N[chosen_N], names_N[chosen_N]
    assert torch.allclose(found_N, expected_V[names_N], atol=1e-12)


def test_the_penalty_of_ppo_follows_its_target_as_the_paper_says():
    for measured in (0.001, 0.0066, 0.0067, 0.01, 0.0149, 0.0151, 0.5):
        expected = next_beta(1.0, measured, 0.01)
        assert AdaptiveKL(1.0, 0.01).update(measured).coef == expected
