"""What the terminal says of a finished stage."""

from __future__ import annotations

from agentrl.trainers.offline.card import card_lines
from agentrl.trainers.offline.data.tokens import PairRow, TokenRow
from agentrl.trainers.offline.measure import compared, outcome_signs, separated
from agentrl.trainers.pipeline import _headline

ROW = TokenRow((1, 2, 3), (0, 1, 1))


def test_a_policy_that_is_its_reference_has_ties_and_no_accuracy() -> None:
    pairs = [PairRow(ROW, ROW)] * 2
    before = compared(pairs, ([-1.0, -2.0], [-2.0, -1.0]), ([-1.0, -2.0], [-2.0, -1.0]))
    after = compared(pairs, ([-1.0, -2.0], [-2.0, -1.0]), ([-0.5, -2.0], [-2.0, -1.0]))
    assert (before["ties"], after["ties"], after["accuracy"]) == (1.0, 0.5, 0.5)
    stage = {"stage": "preference", "steps": 1, "card": {}, "model": "m"}
    said = _headline(stage | {"before": before, "after": after})
    assert "accuracy 0.500" in said and "0.000 -> 0.500" not in said
    assert "ties 1.000 -> 0.500" in said and "margin 0.000 -> 0.250" in said
    moved = _headline(stage | {"before": after, "after": after})
    assert "accuracy 0.500 -> 0.500" in moved


def test_labels_that_moved_alike_are_ties() -> None:
    found = separated([True, False, False], [ROW] * 3, [-1.0, -1.0, -1.0], [-0.5, -0.5, -2.0])
    assert (found["ties"], found["accuracy"]) == (0.5, 0.5)


def test_an_estimate_says_on_how_many_answers_it_stands() -> None:
    assert card_lines({"kl": 0.25, "win_rate": 0.5, "answers": 4, "judged": 3}) == [
        "kl 0.250 (n=4)",
        "win_rate 0.500 (n=3)",
    ]


def test_the_sign_of_displacement_names_what_is_not_in_use() -> None:
    found = {"chosen": -0.1, "rejected": -0.5, "margin": 2.0}
    (plain,), (anchored,) = (list(outcome_signs(found, name)) for name in ("dpo", "dpo_nll"))
    assert "compare objective='dpo_nll', or" in plain
    assert "compare a larger loss.nll_coef, or" in anchored
    assert list(outcome_signs(found | {"chosen": 0.1}, "dpo")) == []
