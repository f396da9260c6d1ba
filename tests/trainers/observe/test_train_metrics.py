"""What a run logs of its rollouts and batches, each number by hand; and every name stands in the
table of the docs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from trainer_cases import PAD, batch_of, branch, episode, group

from agentrl.evaluation.summary import summarize
from agentrl.trainers.algorithms.recipe import apply_to_episodes
from agentrl.trainers.batch import pack
from agentrl.trainers.observe import metrics
from agentrl.trainers.observe.metrics import (
    QUIET,
    RoundClock,
    RoundDraws,
    gradient_metrics,
    held_out_metrics,
    lost_reward_metrics,
    quiet_reason,
    repeat_metrics,
    rollout_metrics,
    staleness_metrics,
    to_read,
    token_metrics,
)
from agentrl.trajectory import Counts, Group
from agentrl.types import EndReason, Message, ToolCall

CUT = EndReason.MAX_TOKENS


def round_of(*ends_and_rewards, task="t"):
    """A group of one-turn episodes, each (reward, ending)."""
    return Group(
        tuple(
            episode(branch(2, (3, 0)), reward=reward, end=end, task=task, sample=index)
            for index, (reward, end) in enumerate(ends_and_rewards)
        )
    )


@pytest.mark.parametrize(
    ("rewards", "end", "reason"),
    [
        ((1.0, 0.0), EndReason.ANSWERED, None),
        ((None, None), EndReason.ANSWERED, "infrastructure"),
        ((1.0, None), EndReason.ANSWERED, "too_few"),
        ((0.0, None), CUT, "too_few"),
        ((1.0, 1.0, None), EndReason.ANSWERED, "all_pass"),
        ((0.0, 0.0), EndReason.ANSWERED, "all_fail"),
        ((-1.0, -1.0), EndReason.ANSWERED, "all_fail"),
        ((0.4, 0.4), EndReason.ANSWERED, "equal_partial"),
        ((0.0, 0.0), CUT, "truncated"),
        ((0.4, 0.4), CUT, "truncated"),
        ((1.0, 1.0), CUT, "all_pass"),
    ],
)
def test_why_a_group_gives_no_signal(rewards, end, reason):
    assert quiet_reason(round_of(*((reward, end) for reward in rewards))) == reason


def test_every_quiet_group_has_one_reason():
    groups = [
        round_of((1.0, CUT), (0.0, CUT)),
        round_of((0.0, CUT), (0.0, CUT)),
        round_of((None, CUT)),
    ]
    found = rollout_metrics(groups)
    assert sum(found[f"groups/quiet_{reason}"] for reason in QUIET) == pytest.approx(
        found["groups/no_signal"]
    )
    assert (
        found["groups/quiet_truncated"]
        == found["groups/quiet_infrastructure"]
        == pytest.approx(1 / 3)
    )


def test_rewards_with_and_without_the_groups_that_are_dropped():
    found = rollout_metrics(
        [group(1.0, 0.0), group(0.0, 0.0, task="u"), group(1.0, None, task="v")]
    )
    assert found["reward/mean"] == pytest.approx(2 / 5) and found["reward/kept_mean"] == 0.5
    assert found["reward/max"] == 1.0 and found["groups/reward_std_mean"] == pytest.approx(
        (0.5 + 0) / 2
    )
    assert found["episodes/failed_infra"] == 1 and found["episodes/total"] == 6
    assert "reward/kept_mean" not in rollout_metrics([group(0.0, 0.0)])


def test_a_round_that_infrastructure_failed_has_counts_and_no_means():
    found = rollout_metrics([round_of((None, CUT), (None, CUT))])
    assert found["episodes/failed_infra"] == 2 and found["end/sandbox_lost"] == 1
    assert not [name for name in found if name.startswith(("reward/", "length/", "pass/"))]
    assert rollout_metrics([])["episodes/total"] == 0


def test_time_outs_count_whether_graded_or_not():
    late, broken = (
        episode(branch(1, (1, 0)), end=EndReason.WALL_TIME),
        episode(branch(1, (1, 0)), reward=None, sample=1),
    )
    broken = replace(broken, end=EndReason.TIMEOUT)
    fine = [episode(branch(1, (1, 0)), sample=index) for index in (2, 3)]
    assert rollout_metrics([Group((late, broken, *fine))])["episodes/timeout"] == 0.5


def test_tools_by_name():
    def called(name, *answers):
        call = ToolCall(name, {}, "1")
        return [
            message
            for answer in answers
            for message in (Message.assistant("", call), Message.tool(answer, call))
        ]

    said = (
        *called("add", "3", "error: tool_error: no", "error: timeout: 3 s"),
        *called("sub", "1"),
    )
    one = replace(episode(messages=tuple(said)), counts=Counts(tool_calls=4, tool_errors=2))
    other = episode(sample=1)
    found = rollout_metrics([Group((one, other))])
    assert (
        found["tools/calls_mean"] == 2
        and found["tools/error_rate"] == 0.5
        and found["tools/timeout_rate"] == 0.25
    )
    assert found["tools/calls/add"] == 3 and found["tools/success/add"] == pytest.approx(1 / 3)
    assert found["tools/success/sub"] == 1


def test_prompts_that_come_again():
    groups = [group(1.0, task="a"), group(1.0, task="b")]  # of one instruction
    assert repeat_metrics(groups, ()) == {"groups/repeated": 0.5}
    assert repeat_metrics(groups, {metrics.prompt_of(groups[0])}) == {"groups/repeated": 1.0}
    other = Group(
        (replace(episode(), task=episode().task.model_copy(update={"instruction": "\ud800 else"})),)
    )
    assert (
        repeat_metrics([groups[0], other], ()) == {"groups/repeated": 0.0}
        and repeat_metrics([], ()) == {}
    )


def test_what_refilling_cost_counts_what_was_played_in_vain():
    signal, quiet, more = group(1.0, 0.0), group(0.0, 0.0, task="u"), group(1.0, 0.0, 0.5, task="v")

    def cost(*lists):
        found = RoundDraws(*lists).metrics()
        return {name: value for name, value in found.items() if name.startswith("refill/")}

    nothing = {"refill/groups": 0, "refill/carried": 0, "refill/episodes": 0, "refill/empty": 0}
    assert cost([signal], [], [], [], []) == nothing | {"refill/thrown_share": 0}
    assert cost([quiet], [], [more], [], []) == nothing | {
        "refill/groups": 1,
        "refill/episodes": 3,
        "refill/thrown_share": 2 / 5,
    }
    assert cost([signal, quiet], [], [], [quiet, quiet], []) == nothing | {
        "refill/episodes": 4,
        "refill/empty": 1,
        "refill/thrown_share": 6 / 8,
    }, "the worst round is not left out"
    assert cost([signal, quiet], [more], [], [more], [signal]) == nothing | {
        "refill/carried": 1,
        "refill/episodes": 3,
        "refill/thrown_share": 4 / 7,
    }, "a spare with signal is thrown away when it expires, not before"


def test_rewards_before_and_after_the_filter():
    own = [group(1.0, 0.0), group(-0.5, -0.5, task="u"), group(0.3, 1.2, None, task="v")]
    found = RoundDraws(own, [group(0.0, 1.0, task="w")], [], [], []).metrics()
    sampled, trained = (
        [found[f"reward/{what}_{name}"] for name in metrics.BINS] for what in ("sampled", "trained")
    )
    assert sampled == pytest.approx([2 / 6, 1 / 6, 1 / 6, 1 / 6, 1 / 6])
    assert trained == pytest.approx([0, 2 / 6, 1 / 6, 2 / 6, 1 / 6])
    assert "reward/trained_0" not in RoundDraws([own[1]], [], [], [], []).metrics()


def test_how_the_machine_is_used(monkeypatch):
    counted = Group((replace(episode(), counts=Counts(sampled_tokens=30)),))
    now = iter((100.0, 102.0, 108.0, 109.0))
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(now))
    clock = RoundClock()
    for part in ("rollout", "update", "eval"):
        clock.lap(part)
    assert clock.metrics([counted], 16, queue=3) == {
        "time/rollout_s": 2.0,
        "time/update_s": 6.0,
        "time/eval_s": 1.0,
        "time/rollout_tokens_per_s": 15.0,
        "time/trainer_idle": 0.25,
        "time/queue": 3.0,
        "time/tokens_per_s": 2.0,
    }


def test_held_out_pass_at_k():
    episodes = [
        episode(reward=reward, sample=index) for index, reward in enumerate((1.0, 0.0, 0.0, None))
    ]
    found = held_out_metrics(summarize(episodes, (1, 2)))
    assert found["eval/pass_at_1"] == pytest.approx(1 / 3) and found[
        "eval/pass_at_2"
    ] == pytest.approx(2 / 3)
    assert found["eval/n_scored"] == 3 and found["eval/failed_infra"] == 1
    assert {"eval/ci95_low", "eval/ci95_high", "eval/ci95_at_2_low"} <= found.keys()
    assert held_out_metrics(summarize([episode(reward=None)], (1,))) == {
        "eval/failed_infra": 1,
        "eval/n_scored": 0,
    }


def test_episodes_put_aside_for_reading():
    groups = [group(0.1, 0.9, None, 0.5), group(0.2, 1.0, 0.0, task="u")]
    chosen = to_read(groups, seed=1)
    assert [one.reward for one in chosen["top"]] == [1.0, 0.9]
    assert len(chosen["random"]) == 2 and not {one.key for one in chosen["top"]} & {
        one.key for one in chosen["random"]
    }
    assert to_read(groups, seed=1) == chosen
    assert any(to_read(groups, seed=seed)["random"] != chosen["random"] for seed in range(9))
    assert (
        to_read([group(None)], seed=0) == {"top": [], "random": []}
        and len(to_read([group(1.0)], seed=0)["top"]) == 1
    )


def test_tokens_and_gradient_by_role_and_turn_by_hand():
    batch = pack(
        [Group((episode(branch(3, (2, 4), (1, 0))),))], PAD
    )  # 3 read, 2 said, 4 heard, 1 said
    assert token_metrics(batch) == pytest.approx(
        {"tokens/prompt": 0.3, "tokens/sampled": 0.3, "tokens/observed": 0.4, "tokens/reread": 0}
    )
    batch = replace(batch, advantages_BT=torch.where(batch.mask_BT, 2.0, 0.0))
    found = gradient_metrics([batch])
    assert (
        found["gradient/sampled"] == 1
        and found["gradient/prompt"] == found["gradient/observed"] == 0
    )
    assert found["gradient/turn_0"] == pytest.approx(2 / 3) and found[
        "gradient/turn_1"
    ] == pytest.approx(1 / 3)
    assert "gradient/turn_2" not in found
    weighed = replace(batch, weights_BT=torch.where(batch.turn_BT == 0, 0.0, 1.0))
    assert gradient_metrics([weighed])["gradient/turn_1"] == 1
    assert gradient_metrics([batch, weighed])["gradient/turn_1"] == pytest.approx(
        1 / 2
    )  # two of four tokens
    assert gradient_metrics([]) == {}


def test_gradient_where_there_must_be_none_shows():
    batch = batch_of(group(1.0, 0.0))
    assert gradient_metrics([batch])["gradient/sampled"] == pytest.approx(1)
    leaking = replace(batch, advantages_BT=torch.ones_like(batch.advantages_BT))
    found = gradient_metrics([leaking])
    assert found["gradient/observed"] > 0 and found["gradient/prompt"] > 0


def test_a_shared_turn_is_read_again_and_trained_once():
    whole = branch(2, (2, 2), (1, 0))
    forked = whole.fork(3).extend(branch(0, (4, 0)).segments[1])
    found = token_metrics(pack([Group((episode(whole, forked),))], PAD))
    assert found["tokens/sampled"] == pytest.approx(7 / 17) and found[
        "tokens/reread"
    ] == pytest.approx(2 / 17)


def test_how_old_the_tokens_are():
    batch = batch_of(group(1.0, 0.0))  # of version 3
    assert (
        staleness_metrics(batch, 3)["staleness/max"] == 0
        and staleness_metrics(batch, 3)["staleness/share_0"] == 1
    )
    mixed = replace(batch, version_BT=torch.where(batch.turn_BT == 0, 1, batch.version_BT))
    found = staleness_metrics(mixed, 5)
    first = float((batch.mask_BT & (batch.turn_BT == 0)).sum() / batch.mask_BT.sum())
    assert found["staleness/share_4_on"] == pytest.approx(first) and found[
        "staleness/share_2"
    ] == pytest.approx(1 - first)
    assert (
        found["staleness/mean"] == pytest.approx(4 * first + 2 * (1 - first))
        and found["staleness/max"] == 4
    )


def test_reward_of_tokens_that_do_not_train():
    packed = batch_of(group(1.0, 0.0), group(1.0, 1.0, task="u"))
    assert lost_reward_metrics(packed, [packed]) == {
        "episodes/untrained": 0,
        "reward/lost_share": 0,
    }
    halves = list(packed.minibatches(2, seed=0))
    assert lost_reward_metrics(packed, halves)["reward/lost_share"] == 0
    assert lost_reward_metrics(packed, halves[:1])["episodes/untrained"] == 0.5
    dropped = lost_reward_metrics(
        packed, [apply_to_episodes(packed, packed.signal_E, lambda batch: batch)]
    )
    assert dropped == pytest.approx(
        {"episodes/untrained": 0.5, "reward/lost_share": 2 / 3, "reward/lost_mean": 1.0}
    )
    half_BT = torch.where(packed.turn_BT == 0, 0.0, 1.0).where(packed.episode_B[:, None] == 0, 1.0)
    share = float((packed.mask_BT[0] & (packed.turn_BT[0] == 0)).sum() / packed.tokens_E[0])
    found = lost_reward_metrics(packed, [replace(packed, weights_BT=half_BT)])
    assert found == pytest.approx({"episodes/untrained": 0, "reward/lost_share": share / 3})


def test_refilled_groups_colour_no_metric_of_what_is_lost():
    own, more = [group(1.0, 0.0), group(1.0, 1.0, task="u")], [group(1.0, 0.0, task="v")]
    packed, alone = replace(batch_of(*own, *more), n_refilled=2), batch_of(*own)
    trained, without = (one.rows(one.group_E[one.episode_B] != 1) for one in (packed, alone))
    assert lost_reward_metrics(packed, [trained]) == pytest.approx(
        lost_reward_metrics(alone, [without])
    )


def test_an_episode_that_said_nothing_loses_its_reward():
    silent = episode(reward=0.5, end=EndReason.CONTEXT_LENGTH, sample=9)
    packed = pack([Group((*group(1.0, 0.0).episodes, silent))], PAD)
    found = lost_reward_metrics(packed, [packed])
    assert found == pytest.approx(
        {"episodes/untrained": 1 / 3, "reward/lost_share": 1 / 3, "reward/lost_mean": 0.5}
    )


def test_rows_and_padding_change_no_batch_metric():
    """One episode in one row or in two, and rows in any order."""
    batch = batch_of(group(1.0, 0.0, 1.0))
    turned = batch.rows(torch.tensor([2, 0, 1]))
    for measure in (
        token_metrics,
        lambda one: gradient_metrics([one]),
        lambda one: staleness_metrics(one, 4),
        lambda one: lost_reward_metrics(batch, [one]),
    ):
        assert measure(turned) == pytest.approx(measure(batch))


# Defects that the checks above must see


MUTANTS = {
    "an episode that infrastructure failed counts as 0": (
        metrics,
        "_rewards_of",
        lambda one: [reward or 0.0 for reward in one.rewards_G],
        test_rewards_with_and_without_the_groups_that_are_dropped,
    ),
    "gradient is counted where the mask lets it through": (
        metrics,
        "_roles",
        lambda batch, real=metrics._roles: {
            name: at_BT & batch.mask_BT for name, at_BT in real(batch).items()
        },
        test_gradient_where_there_must_be_none_shows,
    ),
    "what an earlier branch trains counts twice": (
        metrics,
        "_roles",
        lambda batch, real=metrics._roles: real(batch) | {"sampled": batch.turn_BT >= 0},
        test_a_shared_turn_is_read_again_and_trained_once,
    ),
}


@pytest.mark.parametrize("defect", MUTANTS)
def test_each_defect_is_caught(defect, monkeypatch):
    module, name, mutant, check = MUTANTS[defect]
    check()
    monkeypatch.setattr(module, name, mutant)
    with pytest.raises(AssertionError):
        check()
