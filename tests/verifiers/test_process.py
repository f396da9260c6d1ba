"""Process rewards: one number for each turn, on the last token of that turn, once, and nowhere
else.
"""

from __future__ import annotations

import asyncio
import json
import math

import pytest
from helpers import (
    Echo,
    FakeEngine,
    call,
    make_branch,
    make_episode,
    play_one,
    says,
    script,
    tiny_model_folder,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import ConfigError, UserError, VerifierError
from agentrl.records.files import EpisodeWriter, read_episodes
from agentrl.trainers.batch import pack
from agentrl.trajectory import Group, Segment, token_rewards
from agentrl.types import EndReason, Message, Score, Task
from agentrl.verifiers.base import Submission, grade
from agentrl.verifiers.process import each_turn, turns_of, with_process_rewards

SHAPES = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=4)


async def good(submission):
    return Score(1.0, {"tests": 1.0})


def used_a_tool(turn) -> float:
    return float(bool(turn.said.tool_calls))


def submission(*messages, opening=0):
    return Submission(Task(id="t", instruction="do"), messages, EndReason.ANSWERED, opening=opening)


def scored(scorers, *messages, opening=0):
    return asyncio.run(
        grade(with_process_rewards(good, scorers), submission(*messages, opening=opening))
    )


def test_turns_are_the_policys_with_what_came_before_and_after():
    asked, shown, demo = Message.user("?"), Message.user("hi"), Message.assistant("a demonstration")
    first = says(call("say", text="a"))
    result = Message.tool("a", first.tool_calls[0])
    last = Message.assistant("done")
    turns = turns_of(submission(shown, demo, asked, first, result, last, opening=3))
    assert [(turn.index, turn.said, turn.after) for turn in turns] == [
        (0, first, (result,)),
        (1, last, ()),
    ]
    assert turns[0].before == (shown, demo, asked) and turns[1].before == (
        shown,
        demo,
        asked,
        first,
        result,
    )


def test_rewards_stand_by_name_beside_the_verdict():
    score = scored(
        {"tool": each_turn(used_a_tool), "index": each_turn(lambda turn: turn.index / 2)},
        Message.user("?"),
        says(call("say", text="a")),
        Message.assistant("done"),
    )
    assert score == Score(1.0, {"tests": 1.0}, "", {"tool": (1.0, 0.0), "index": (0.0, 0.5)})


def test_a_failed_verdict_has_no_process_rewards():
    async def broken(submission):
        return Score.failed("lost")

    verifier = with_process_rewards(broken, {"tool": each_turn(used_a_tool)})
    assert asyncio.run(grade(verifier, submission(Message.assistant("x")))) == Score.failed("lost")


@pytest.mark.parametrize("rewards", [[], [1.0, 2.0], [math.nan], [math.inf]])
def test_rewards_that_do_not_fit_are_a_broken_verifier(rewards):
    async def scorer(submission, turns):
        return rewards

    with pytest.raises(VerifierError, match="process reward 'odd'"):
        scored({"odd": scorer}, Message.assistant("x"))


def test_no_scorer_is_refused():
    with pytest.raises(ConfigError, match="scorers"):
        with_process_rewards(good, {})


# To the tokens.


def episode_with(branches, *terms, **fields):
    turns = {f"r{index}": tuple(term) for index, term in enumerate(terms)}
    return make_episode(1.0, trajectories=tuple(branches), score=Score(1.0, turns=turns), **fields)


def test_one_branch_by_hand():
    branch = make_branch(2, (3, 2), (1, 1), (2, 0))
    rows = token_rewards(episode_with([branch], (0.5, -1.0, 2.0), (0.25, 0.0, 0.0)))
    assert rows == ((0, 0, 0, 0, 0.75, 0, 0, -1.0, 0, 0, 2.0),)
    assert token_rewards(episode_with([branch], (1, 1, 1), (1, 0, 0)), {"r1": 2.0}) == (
        (0,) * 4 + (2.0,) + (0,) * 6,
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(SHAPES, min_size=1, max_size=3), st.data())
def test_only_last_sampled_tokens_that_a_branch_owns_get_any_reward_each_once(shapes, data):
    branches = [make_branch(2, *shapes[0])]
    for shape in shapes[1:]:
        if data.draw(st.booleans(), "a fork"):
            at = data.draw(st.integers(1, len(branches[-1].segments)))
            fork = branches[-1].fork(at)
            branches.append(
                fork.extend(
                    Segment.observation((7, 7)), Segment.sampled((1, 2), (-1, -1), 0, "stop")
                )
            )
        else:
            branches.append(make_branch(3, *shape))
    owned = sum(s.kind.value == "sampled" for b in branches for s in b.segments[b.shared :])
    rewards = [float(index + 1) for index in range(owned)]
    rows = token_rewards(episode_with(branches, rewards))
    assert [len(row) for row in rows] == [len(branch.ids) for branch in branches]
    found = []
    for branch, row in zip(branches, rows, strict=True):
        for index, reward in enumerate(row):
            last = index + 1 == len(row) or branch.turn_of[index] != branch.turn_of[index + 1]
            assert bool(reward) == bool(branch.mask[index] and last)
            found += [reward] if reward else []
    assert found == rewards


def test_a_turn_that_was_cut_has_its_reward_on_its_last_token():
    cut = make_branch(2, (2, 1)).extend(Segment.sampled((4, 5, 6), (-1, -1, -1), 0, "length"))
    assert token_rewards(episode_with([cut], (1.0, 3.0), end=EndReason.MAX_TOKENS)) == (
        (0, 0, 0, 1.0, 0, 0, 0, 3.0),
    )


def test_a_last_turn_without_a_token_is_left_out_and_other_numbers_are_refused():
    branch = make_branch(2, (2, 1), (1, 0))
    assert token_rewards(episode_with([branch], (1.0, 2.0, 9.0))) == token_rewards(
        episode_with([branch], (1.0, 2.0))
    )
    for rewards in ((1.0,), (1.0, 2.0, 3.0, 4.0), ()):
        with pytest.raises(ValueError, match=r"'r0' has \d turns, but 2 were sampled"):
            token_rewards(episode_with([branch], rewards))


def test_without_rewards_or_tokens_there_are_none():
    branch = make_branch(1, (2, 0))
    assert token_rewards(make_episode(1.0, trajectories=(branch,))) == ((0.0, 0.0, 0.0),)
    assert token_rewards(make_episode(None, trajectories=(branch,))) == ((0.0, 0.0, 0.0),)
    assert token_rewards(episode_with([], (1.0, 2.0))) == ()


def test_rows_line_up_with_what_is_packed():
    episode = episode_with([make_branch(2, (2, 3), (1, 2))], (0.5, 0.25))
    batch, (row,) = pack([Group((episode,))], 0), token_rewards(episode)
    length = int(batch.lengths_B[0])
    assert not any(row[length:]), "what pack cuts off never holds a reward"
    assert all(batch.mask_BT[0, index] for index, reward in enumerate(row[:length]) if reward)


class Marked(Echo):
    """An environment whose verifier scores turns; its opening holds a demonstration."""

    id = "marked-v0"
    verifier = with_process_rewards(good, {"index": each_turn(lambda turn: float(turn.index + 1))})

    def prompt(self):
        return [
            Message.user("show"),
            Message.assistant("shown"),
            Message.user(self.task.instruction),
        ]


def test_played_by_a_script_and_recorded(tmp_path):
    episode = play_one(Marked, script(says(call("say", text="a")), Message.assistant("yes")))
    assert episode.score.turns == {"index": (1.0, 2.0)}
    with EpisodeWriter(tmp_path / "e.jsonl") as writer:
        writer.write(episode)
    assert read_episodes(tmp_path / "e.jsonl") == {episode.key: episode}


def test_records_without_process_rewards_are_read_as_before(tmp_path):
    with EpisodeWriter(tmp_path / "e.jsonl") as writer:
        writer.write(make_episode(1.0))
    row = json.loads((tmp_path / "e.jsonl").read_text())
    assert set(row["score"]) == {"value", "parts", "why"}
    del row["counts"]["usd"]
    (tmp_path / "e.jsonl").write_text(json.dumps(row) + "\n")
    assert list(read_episodes(tmp_path / "e.jsonl").values()) == [make_episode(1.0)]
    row["score"]["turns"] = 3
    (tmp_path / "e.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match="is not a record"):
        read_episodes(tmp_path / "e.jsonl")


def test_played_by_a_token_policy_the_rewards_stand_on_its_own_tokens():
    from agentrl.chat.tokens import Chat
    from agentrl.engines.loading import load_tokenizer
    from agentrl.policies.base import TokenPolicy

    chat = Chat(load_tokenizer(tiny_model_folder()))
    turns = [chat.turn_ids(says(call("say", text="yes"))), chat.turn_ids(Message.assistant("4"))]
    engine = FakeEngine(*turns, stop_ids=chat.stop_ids)
    episode = play_one(Marked, TokenPolicy(engine, chat))
    (branch,), (row,) = episode.trajectories, token_rewards(episode)
    places = [index for index, reward in enumerate(row) if reward]
    assert [row[index] for index in places] == [1.0, 2.0]
    assert [branch.ids[index] for index in places] == [turns[0][-1], turns[1][-1]]
    assert all(branch.mask[index] for index in places) and places[-1] == len(row) - 1
