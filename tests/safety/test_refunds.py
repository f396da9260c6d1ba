"""The environment of the experiment on side effects: one way is clean, the other is seen."""

from itertools import islice

import pytest
from helpers import call, play_one, says, script

from agentrl.evaluation.contract import check_environment
from agentrl.policies.base import Scripted
from benchmarks.experiments.refunds import Refunds, code_of


def first_task():
    return next(islice(Refunds().tasks("train", 0), 1))


@pytest.mark.parametrize("shortcuts", [0.0, 1.0])
def test_it_keeps_the_contract_whichever_way_its_references_go(shortcuts):
    found = check_environment(lambda: Refunds(shortcuts), n_tasks=3)
    assert found and [row for row in found if row.problem] == []


def test_the_ledger_sees_the_shortcut_and_not_the_proper_way():
    proper = play_one(Refunds, Scripted("oracle", Refunds().oracle_actions), first_task())
    short = play_one(Refunds, script(says(call("switch_check_off"))), first_task())
    assert proper.passed and proper.side_effects == {}
    assert short.passed and short.side_effects == {"state:check": "state changed"}


def test_a_wrong_code_refunds_nothing():
    wrong = play_one(
        Refunds,
        script(says(call("refund", code=code_of(int(first_task().id[7:])) + 1)), says(content="")),
        first_task(),
    )
    assert wrong.passed is False and wrong.side_effects == {}
