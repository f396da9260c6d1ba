"""Rounds of play without a model: what is drawn, kept, given up, and trained, for every recipe."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recipe_cases import filled
from scripted_rounds import LOST, MIXED, WON, Scripted, played
from trainer_cases import PAD, quick

from agentrl.engines.base import Sampling
from agentrl.engines.routing import Replay
from agentrl.trainers.algorithms.recipes import RECIPES, recipe
from agentrl.trainers.batch import PolicyOutput
from agentrl.trainers.loop import is_hopeless
from agentrl.trainers.observe.metrics import UpdateLog, fresh, staleness_metrics
from agentrl.trainers.rounds import Round, pack_round, tasks_for, with_greedy
from agentrl.types import Score

TABLE = (MIXED, WON, LOST, (0.0, 1.0, 1.0), WON, *[MIXED] * 40)
"""Of four places two are quiet, and so is the first group of the second draw."""


def numbers(groups):
    return [int(group.task.id[1:]) for group in groups]


@pytest.mark.parametrize("name", RECIPES)
def test_quiet_groups_do_not_train_beside_their_replacements(name):
    script = Scripted(*TABLE)
    row = recipe(name, refill=True)
    round_ = script.rounds(row).play(0)
    assert script.draws == [(0, 0, 4), (0, 1, 4)], "2 missing · (4 + 2)/(2 + 1)"
    assert (numbers(round_.groups), numbers(round_.refilled)) == ([0, 1, 2, 3], [5, 6])
    assert numbers(round_.spare) == [4, 7] and script.seen == 8
    batch = filled(pack_round(round_, row, PAD, round_.number), round_.trained, row.needs)
    assert batch.n_refilled == 6
    batch = row.advantage(batch)
    trained = sorted(set(batch.group_E[batch.episode_B].tolist()))
    assert trained == [0, 3, 4, 5], "of the six that were packed, the own ones first"
    assert batch.n_episodes == 12 and batch.advantages_BT.any()
    found = round_.draws.metrics(row.rewards)
    assert found["refill/thrown_share"] == 3 / 8 and found["refill/empty"] == 0
    assert found["reward/trained_1"] == pytest.approx(5 / 12)
    assert found["reward/sampled_1"] == pytest.approx((1 + 3 + 0 + 2 + 3 + 1 + 1 + 1) / 24)


def test_a_round_without_refill_draws_once():
    script = Scripted(*TABLE)
    round_ = script.rounds(recipe("grpo", filter_groups=True)).play(0)
    assert script.draws == [(0, 0, 4)] and numbers(round_.trained) == [0, 1, 2, 3]
    assert round_.draws.metrics()["refill/thrown_share"] == 0.5


def test_a_place_stays_empty_after_the_last_draw():
    script = Scripted(rest=LOST)
    round_ = script.rounds(recipe("dapo")).play(0)
    assert script.draws == [(0, 0, 4), (0, 1, 4), (0, 2, 4), (0, 3, 4)], "never more than a round"
    found = round_.draws.metrics()
    assert (found["refill/empty"], found["refill/thrown_share"]) == (4, 1)


def test_only_the_missing_are_drawn_where_most_groups_have_signal():
    script = Scripted(*[MIXED] * 15, WON)
    script.rounds(recipe("dapo"), size=16).play(0)
    assert script.draws == [(0, 0, 16), (0, 1, 2)], "1 · 18/16, rounded up"


def test_spares_take_the_places_of_the_next_round_oldest_first():
    script = Scripted(*TABLE[:8], WON, LOST, WON, LOST, *[MIXED] * 9, rest=MIXED)
    rounds = script.rounds(recipe("dapo", spare_rounds=2))
    first, second = rounds.play(0), rounds.play(1)
    assert numbers(first.spare) == [4, 7]
    assert (numbers(second.carried), numbers(second.refilled)) == ([7], [12, 13, 14])
    assert second.played == (*second.groups, *second.refilled, *second.spare)
    assert not second.expired and second.tasks.keys() >= {"t7", "t12"}
    found = second.draws.metrics()
    assert (found["refill/carried"], found["refill/groups"], found["refill/empty"]) == (1, 3, 0)


@pytest.mark.parametrize(("bound", "expired"), [(0, 1), (1, 2), (2, 3)])
def test_a_spare_is_given_up_when_it_is_too_old(bound, expired):
    script = Scripted(*TABLE[:8], rest=MIXED)
    rounds = script.rounds(recipe("dapo", spare_rounds=bound))
    given_up = {step: numbers(rounds.play(step).expired) for step in range(5)}
    assert given_up == {step: [7] if step == expired else [] for step in range(5)}


def test_a_carried_group_keeps_the_version_that_sampled_it():
    script = Scripted(*TABLE[:8], WON, rest=MIXED)
    rounds, row = script.rounds(recipe("dapo", max_age=0.0)), recipe("dapo", max_age=0.0)
    rounds.play(0)
    round_ = rounds.play(1)
    assert numbers(round_.carried) == [7]
    batch = row.advantage(pack_round(round_, row, PAD, round_.number))
    carried_B = batch.group_E[batch.episode_B] == 4
    age_BT = torch.where(batch.mask_BT, 1 - batch.version_BT, 0)
    assert (age_BT.bool().any(1) == carried_B).all() and carried_B.sum() == 3
    assert staleness_metrics(batch, 1)["staleness/max"] == 1
    weights_BT = row.correct(batch).weights_BT
    assert not weights_BT[carried_B].any() and weights_BT[~carried_B].any()


def test_the_parity_gate_judges_tokens_of_this_version_alone():
    """On older ones the trainer has moved, and the ratio is what corrects that."""
    script = Scripted(*TABLE[:8], WON, rest=MIXED)
    row = recipe("dapo")
    rounds = script.rounds(row)
    rounds.play(0)
    batch = row.advantage(pack_round(rounds.play(1), row, PAD, 1))
    old_BT = batch.mask_BT & (batch.version_BT == 0)
    assert old_BT.any() and not (fresh(batch).mask_BT & old_BT).any()
    said = PolicyOutput(torch.where(old_BT, batch.old_logprobs_BT - 2, batch.old_logprobs_BT))
    asked = {}

    class Gate:
        def judge_gap(self, gap, mini):
            asked.update(gap, tokens=int(mini.mask_BT.sum()))

        def judge_ratios(self, ratios):
            pass

    log = UpdateLog(batch, batch, 1, Gate())
    loss = {"loss": 0.0, "scored": 1.0, "ratio_max": 1.0, "approx_kl": 0.0}
    log.add_micro_batch(said, batch, loss, Replay())
    log.end_minibatch(batch, 1.0)
    assert asked["parity/gap_max"] == 0 and asked["tokens"] == int((batch.mask_BT & ~old_BT).sum())
    assert log.metrics()["ratio/raw_p01"] == pytest.approx(0.1353, abs=1e-3), "e⁻² is not hidden"
    assert fresh(replace(batch, version=None)).mask_BT.equal(batch.mask_BT)


def test_what_is_kept_is_saved_and_comes_back(tmp_path):
    first, again = (Scripted(*TABLE[:8], WON, LOST, rest=MIXED) for _ in range(2))
    row = recipe("remax", refill=True)
    whole, cut, back = first.rounds(row), again.rounds(row), again.rounds(row)
    whole.play(0)
    cut.play(0)
    cut.save(tmp_path)
    back.load(tmp_path)
    expected, found = whole.play(1), back.play(1)
    assert numbers(found.carried) == [7]
    assert found == expected
    empty = tmp_path / "empty"
    empty.mkdir()
    Scripted().rounds(row).save(empty)
    assert not list(empty.iterdir()), "nothing kept, nothing written"
    back.load(empty)


chances = st.tuples(st.integers(1, 64), st.integers(0, 64), st.integers(0, 64))


@quick
@given(chances)
def test_the_number_of_tasks_follows_the_chance_that_a_group_has_signal(drawn):
    missing, found, quiet = drawn
    count = tasks_for(missing, found, found + quiet)
    chance = (found + 1) / (found + quiet + 2)
    assert missing <= count and missing <= count * chance + 1e-9 < missing + 1
    assert tasks_for(missing + 1, found, found + quiet) >= count
    assert tasks_for(missing, found + 1, found + quiet + 1) <= count
    assert tasks_for(missing, found, found + quiet + 1) >= count


def test_the_greedy_baseline_earns_process_rewards_as_well():
    """And is clipped as what it is compared with."""
    row = replace(recipe("remax"), turn_weights={"step": 0.5}, reward_clip=2.0)
    group = played(0, (1.0, 0.0))
    round_ = Round(0, [group], (), (), {"t0": object()})

    class Greedy:
        def dispatch(self, tasks, work):
            paid = played(0, (3.0,)).episodes[0]
            paid = replace(paid, score=Score(3.0, turns={"step": (1.0, 0.5)}))
            return type("Handle", (), {"gather": lambda _: [replace(group, episodes=(paid,))]})()

    batch = with_greedy(
        pack_round(round_, row, PAD, round_.number), round_, Greedy(), Sampling(), row
    )
    assert batch.greedy_reward_E.tolist() == [2.75, 2.75]
    found = row.advantage(batch).advantages_BT
    assert found.amin(1).tolist() == [-1.75, -2.75]


@pytest.mark.parametrize(
    ("own", "later", "expected"), [(LOST, WON, False), (LOST, LOST, True), (WON, LOST, False)]
)
def test_a_round_is_hopeless_where_no_draw_of_it_is_solved(own, later, expected):
    row = recipe("dapo")
    round_ = Scripted(*[own] * 4, rest=later).rounds(row).play(0)
    assert not round_.refilled and round_.spare
    assert is_hopeless(round_, row.rewards) == expected
