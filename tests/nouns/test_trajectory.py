"""Episode ⊃ Trajectory ⊃ Segment: invalid ones cannot be built; the mask follows from authors."""

import math

import pytest
from helpers import make_branch, make_episode, make_group, make_task
from hypothesis import given
from hypothesis import strategies as st

from agentrl.trajectory import EpisodeKey, Group, Segment, SegmentKind, Trajectory
from agentrl.types import Ending, EndReason, Score

ids = st.lists(st.integers(0, 99), max_size=5)
sampled = ids.filter(bool).map(
    lambda chosen: Segment.sampled(chosen, [-0.5] * len(chosen), 3, "stop")
)
tails = st.lists(ids.map(Segment.observation) | sampled, max_size=6)
branches = st.builds(
    lambda head, tail: Trajectory((head, *tail)), ids.filter(bool).map(Segment.prompt), tails
)


@given(
    st.sampled_from(SegmentKind),
    st.lists(st.integers(-3, 9), max_size=3),
    st.lists(st.floats(), max_size=3),
    st.integers(-2, 2),
    st.sampled_from([None, "stop", "length"]),
)
def test_a_segment_is_valid_or_cannot_be_built(kind, ids, logprobs, version, finish):
    if kind is SegmentKind.SAMPLED:
        valid = len(ids) == len(logprobs) > 0 and version >= 0 and finish is not None
        valid = valid and all(math.isfinite(logprob) and logprob <= 1e-4 for logprob in logprobs)
    else:
        valid = not logprobs and version == -1 and finish is None
    if valid and all(token >= 0 for token in ids):
        Segment(kind, tuple(ids), tuple(logprobs), version, finish)
    else:
        with pytest.raises(ValueError):
            Segment(kind, tuple(ids), tuple(logprobs), version, finish)


def test_a_branch_has_one_prompt_and_it_comes_first():
    prompt, said = Segment.prompt([1]), Segment.sampled([2], [-1.0], 0, "stop")
    for segments in ((), (said,), (said, prompt), (prompt, prompt)):
        with pytest.raises(ValueError, match="prompt segment"):
            Trajectory(segments)
    for shared in (-1, 3):
        with pytest.raises(ValueError, match="shared"):
            Trajectory((prompt, said), shared)


@given(branches, st.data())
def test_the_mask_is_one_exactly_on_sampled_tokens_that_the_branch_owns(branch, data):
    shared = data.draw(st.integers(0, len(branch.segments)))
    fork = Trajectory(branch.segments, shared)
    owned = [
        segment.kind is SegmentKind.SAMPLED and at >= shared
        for at, segment in enumerate(branch.segments)
    ]
    expected = [
        int(own) for own, segment in zip(owned, branch.segments, strict=True) for _ in segment.ids
    ]
    assert list(fork.mask) == expected
    assert fork.trained == sum(expected)
    assert len(fork.ids) == len(fork.mask) == len(fork.logprobs) == len(fork.turn_of)
    for mask, logprob, turn in zip(fork.mask, fork.logprobs, fork.turn_of, strict=True):
        assert not mask or (logprob == -0.5 and turn >= 0)
    assert [turn >= 0 for turn in fork.turn_of] == [logprob != 0 for logprob in fork.logprobs]


@given(branches, st.data())
def test_a_fork_trains_only_what_it_adds(branch, data):
    fork = branch.fork(data.draw(st.integers(1, len(branch.segments))))
    assert fork.trained == 0
    grown = fork.extend(Segment.sampled([7, 7], [-1.0, -1.0], 0, "length"))
    assert grown.trained == 2 and grown.ids[-2:] == (7, 7)


@pytest.mark.parametrize("reason", EndReason)
def test_an_episode_has_a_score_unless_machinery_failed(reason):
    failed = reason.ending is Ending.FAILED
    with pytest.raises(ValueError, match="does not go with"):
        make_episode(end=reason, score=Score(1.0) if failed else Score.failed("no verdict"))
    episode = make_episode(end=reason, score=Score.failed("no verdict") if failed else Score(0.5))
    assert episode.passed is (None if failed else False)
    assert episode.truncated is (reason.ending is Ending.TRUNCATED)


def test_a_branch_shares_what_an_earlier_one_has():
    whole = make_branch(2, (2, 1), (2, 0))
    fork = whole.fork(2).extend(Segment.observation([9]))
    make_episode(trajectories=(whole, fork))
    for wrong in ((fork, whole), (fork,), (make_branch(3, (2, 1)), fork)):
        with pytest.raises(ValueError, match="no earlier branch"):
            make_episode(trajectories=wrong)


def test_passed_compares_with_the_threshold_of_the_task():
    assert make_episode(0.5, task="t").passed is False
    episode = make_episode(0.5)
    lenient = make_task(threshold=0.5).view()
    assert make_episode(0.5, task="t").task != lenient
    assert (
        type(episode)(episode.key, "e", lenient, "s", (), EndReason.ANSWERED, Score(0.5)).passed
        is True
    )


def test_a_group_is_one_task_from_one_start_with_keys_of_their_own():
    assert make_group(1.0, None, 0.0).rewards_G == (1.0, None, 0.0)
    with pytest.raises(ValueError, match="at least one"):
        Group(())
    with pytest.raises(ValueError, match="one task"):
        Group((make_episode(task="a"), make_episode(task="b", sample=1)))
    with pytest.raises(ValueError, match="start states differ"):
        Group((make_episode(start="a"), make_episode(start="b", sample=1)))
    with pytest.raises(ValueError, match="one key"):
        Group((make_episode(), make_episode()))
    Group((make_episode(start="a"), make_episode(None, start="", sample=1)))


def test_keys_tell_attempts_apart():
    assert EpisodeKey("r", 0, "t", 0) != EpisodeKey("r", 0, "t", 0, 1)
