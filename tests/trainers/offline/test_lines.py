"""What the terminal says of a finished stage."""

from __future__ import annotations

import pytest
from helpers import make_episode

from agentrl.trainers.offline.card import readiness, summary
from agentrl.trainers.offline.preference import (
    DISPLACED_NATS,
    compare_labels,
    compare_pairs,
    outcome_warnings,
)
from agentrl.trainers.offline.rows import PairRow, TokenRow

ROW = TokenRow((1, 2, 3), (0, 1, 1))


def cells(text: str, name: str) -> list[str]:
    """The cells of one line of the table."""
    (line,) = [line for line in text.splitlines() if line.split()[:1] == [name]]
    return line.split()[1:]


def test_a_policy_that_is_its_reference_has_ties_and_no_accuracy() -> None:
    pairs, start = [PairRow(ROW, ROW)] * 2, [-1.0, -2.0, -2.0, -1.0]
    before = compare_pairs(pairs, start, start)
    after = compare_pairs(pairs, start, [-0.5, -2.0, -2.0, -1.0])
    assert (before["ties"], after["ties"], after["accuracy"]) == (1.0, 0.5, 0.5)
    stage = {"stage": "preference", "steps": 1, "card": {}, "model": "m"}
    text = summary(stage | {"before": before, "after": after})
    assert cells(text, "accuracy") == ["-", "0.500"]
    assert cells(text, "ties") == ["1.000", "0.500"]
    assert cells(text, "margin") == ["0.000", "0.250"]
    moved = summary(stage | {"before": after, "after": after})
    assert cells(moved, "accuracy") == ["0.500", "0.500"]


def test_every_line_of_a_summary_fits_a_terminal() -> None:
    card = {
        "pass_at_1": {"before": 0.25, "after": 0.5},
        "gain": {"pass_at_1": 0.25, "ci95": (0.1, 0.4)},
        "kl": 0.25, "answers": 4, "win_rate": 0.5, "judged": 3,
    }  # fmt: skip
    values = {name: 0.123 for name in ("margin", "accuracy", "ties", "preferred", "chosen")}
    stage = {"stage": "preference", "steps": 1, "model": "m", "card": card}
    text = summary(stage | {"before": values, "after": values})
    assert max(map(len, text.splitlines())) <= 100 and len(text.splitlines()) == 10
    assert cells(text, "pass_at_1") == [
        "0.250",
        "0.500",
        "+0.250",
        "(95",
        "%",
        "+0.100",
        "to",
        "+0.400)",
    ]
    assert cells(text, "kl") == ["-", "0.250", "n=4"]
    assert cells(text, "win_rate") == ["-", "0.500", "n=3"]


def test_labels_that_moved_alike_are_ties() -> None:
    rows = [TokenRow(ROW.ids, ROW.mask, (float(good),)) for good in (True, False, False)]
    found = compare_labels(rows, [-1.0, -1.0, -1.0], [-0.5, -0.5, -2.0])
    assert (found["ties"], found["accuracy"]) == (0.5, 0.5)


def test_the_warning_of_displacement_names_what_is_not_in_use() -> None:
    found = {"chosen": -0.1, "rejected": -0.5, "margin": 2.0}
    (plain,), (anchored,) = (list(outcome_warnings(found, name)) for name in ("dpo", "dpo_nll"))
    assert "compare objective='dpo_nll', or" in plain
    assert "compare a larger loss.nll_coef, or" in anchored
    for chosen in (0.1, 0.001, -0.001, -DISPLACED_NATS):
        assert list(outcome_warnings(found | {"chosen": chosen}, "dpo")) == []


@pytest.mark.parametrize(
    ("ci95", "fell"), [((-0.3, -0.1), True), ((-0.2, 0.01), False), ((0.1, 0.2), False)]
)
def test_pass_at_1_fell_only_where_the_paired_interval_says_so(
    ci95: tuple[float, float], fell: bool
) -> None:
    episodes = [make_episode(1.0, task=f"{task}") for task in range(4)]
    gain = {"pass_at_1": sum(ci95) / 2, "ci95": ci95}
    problems = readiness(episodes, gain)["problems"]
    assert any("pass@1 fell" in problem for problem in problems) == fell


def test_pass_at_1_of_readiness_is_a_mean_over_tasks() -> None:
    """As that of the evaluation before: a task with more scored episodes counts no more."""
    rewards = {"a": [1.0], "b": [0.0, 0.0, 0.0]}
    episodes = [
        make_episode(reward, task=task, sample=number)
        for task, each in rewards.items()
        for number, reward in enumerate(each)
    ]
    assert readiness(episodes)["pass_at_1"] == 0.5
