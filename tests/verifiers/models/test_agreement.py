"""Agreement with people: majority and Cohen's kappa against figures worked out by hand, and on real
votes.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.verifiers.models.agreement import agreement, cohen_kappa, majority

LABELS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=30)


@pytest.mark.parametrize(
    ("votes", "label"),
    [
        ((1, 1, 2), 1),
        ((2, 1, 2), 2),
        ((0, 1, 2), None),
        ((1, 2), None),
        ((), None),
        ((0, 0, 0), 0),
        ((1, 1, 2, 2), None),
    ],
)
def test_majority_is_more_than_half(votes, label):
    assert majority(votes) == label


def test_kappa_by_hand():
    # 20 yes-yes, 5 yes-no, 10 no-yes, 15 no-no: p_o = 35/50, p_e = (25·30 + 25·20)/2500 = 1/2, κ =
    # 0.2/0.5.
    pairs = [(1, 1)] * 20 + [(1, 0)] * 5 + [(0, 1)] * 10 + [(0, 0)] * 15
    judge, human = zip(*pairs, strict=True)
    assert agreement(judge, human) == 0.7 and cohen_kappa(judge, human) == 0.4


@pytest.mark.parametrize(
    ("judge", "human", "kappa"),
    [
        ("aabb", "aabb", 1.0),
        ("aabb", "bbaa", -1.0),
        ("abab", "aabb", 0.0),
        ("aaaa", "aabb", 0.0),
        ("aaaa", "aaaa", None),
        ("aaaa", "bbbb", 0.0),
    ],
)
def test_kappa_at_its_ends(judge, human, kappa):
    assert cohen_kappa(judge, human) == kappa


@given(LABELS)
def test_kappa_is_symmetric_below_one_and_blind_to_names(pairs):
    judge, human = zip(*pairs, strict=True)
    kappa = cohen_kappa(judge, human)
    assert kappa == cohen_kappa(human, judge)
    assert kappa == cohen_kappa([f"l{x}" for x in judge], [f"l{x}" for x in human])
    assert kappa is None or -1 <= kappa <= 1
    assert (kappa == 1 or kappa is None) == (judge == human)


def test_unequal_or_no_labels_are_refused():
    for judge, human in (((), ()), ((1,), (1, 2))):
        for measure in (agreement, cohen_kappa):
            with pytest.raises(ConfigError, match="one each"):
                measure(judge, human)


def test_pandalm_votes(data_dir):
    rows = [
        json.loads(line)
        for line in (data_dir / "preferences/pandalm_shared.jsonl").read_text().splitlines()
    ]
    votes = {row["idx"]: tuple(row[f"annotator{i}"] for i in (1, 2, 3)) for row in rows}
    assert len(votes) == 498
    # By hand, three rows: the first annotator says 1 2 2, the second 1 1 0, the third 0 2 0; so
    # most say 1 2 0.
    first, second, third = zip(*(votes[idx] for idx in (157, 287, 208)), strict=True)
    most = tuple(majority(votes[idx]) for idx in (157, 287, 208))
    assert (first, second, third, most) == ((1, 2, 2), (1, 1, 0), (0, 2, 0), (1, 2, 0))
    # The first and the majority: same on 2 of 3, by chance (1·1 + 2·1)/9: κ = (2/3 − 3/9)/(1 − 3/9)
    # = 1/2.
    assert agreement(first, most) == 2 / 3 and cohen_kappa(first, most) == pytest.approx(1 / 2)
    # The first and the second: same on 1 of 3, by chance (1·2 + 2·0)/9: κ = (1/3 − 2/9)/(1 − 2/9) =
    # 1/7.
    assert agreement(first, second) == 1 / 3 and cohen_kappa(first, second) == pytest.approx(1 / 7)
    # The second and the third: same on 1 of 3, by chance (2·0 + 1·2)/9: κ = 1/7 again.
    assert agreement(second, third) == 1 / 3 and cohen_kappa(second, third) == pytest.approx(1 / 7)
    everyone = [majority(each) for each in votes.values()]
    assert None not in everyone and [everyone.count(label) for label in (0, 1, 2)] == [40, 202, 256]
    raters = list(zip(*votes.values(), strict=True))
    assert [cohen_kappa(rater, everyone) for rater in raters] == pytest.approx(
        [0.943, 0.922, 0.958], abs=1e-3
    )
