"""Rollouts: groups stream, updates hold up no episode, and an ended run leaves nothing behind."""

import asyncio
import threading
import time
from dataclasses import replace

import pytest
from helpers import Echo, call, make_task, play_one, rollouts, says, script, tasks_of
from rollout_cases import SAY, YES

from agentrl.errors import ConfigError, ContractError
from agentrl.policies.base import noop
from agentrl.records.files import EpisodeWriter, read_episodes
from agentrl.rollout import Dispatch
from agentrl.rollout.play import derive_seed
from agentrl.tools import tool
from agentrl.types import EndReason, Limits

pytestmark = pytest.mark.usefixtures("nothing_is_left")


# Streams


def test_groups_come_as_they_are_finished():
    go_on = threading.Event()

    class Uneven(Echo):
        async def setup(self):
            while self.task.id == "t0" and not go_on.is_set():
                await asyncio.sleep(0.01)

    with rollouts(Uneven, script(YES), group_size=3) as playing:
        handle = playing.dispatch(tasks_of(4), 7)
        early = [handle.next() for _ in range(3)]
        go_on.set()
        late = handle.next()
    assert {group.task.id for group in early} == {"t1", "t2", "t3"} and late.task.id == "t0"
    assert [episode.key for episode in late.episodes] == [
        ("run", 7, "t0", sample, 0, "train", 0) for sample in range(3)
    ]


def test_gather_keeps_the_order_of_the_tasks_and_all_settings():
    with rollouts(Echo, script(YES), group_size=2) as playing:
        tasks = tasks_of(30)
        groups = playing.gather(tasks, 0)
        assert [group.task.id for group in groups] == [task.id for task in tasks]
        (held_out,) = playing.gather(tasks[:1], Dispatch(3, "eval", 2, group_size=1))
        assert held_out.episodes[0].key == ("run", 3, "t0", 0, 0, "eval", 2)
        assert playing.gather([], 4) == []
        assert playing.run(_three()) == 3


async def _three() -> int:
    return 3


def test_more_groups_than_the_queue_holds():
    with rollouts(Echo, script(YES), concurrency=2) as playing:
        handle = playing.dispatch(tasks_of(50), 0)
        time.sleep(0.2)
        assert len({handle.next().task.id for _ in range(50)}) == 50


def test_next_does_not_wait_for_what_cannot_come():
    with rollouts(Echo, script(YES)) as playing:
        handle = playing.dispatch(tasks_of(2), 0)
        assert len(handle.gather()) == 2 and handle.gather() == []
        with pytest.raises(RuntimeError, match="every group of this dispatch has been taken"):
            handle.next()


def test_two_dispatches_in_flight_get_each_their_own_groups():
    go_on = threading.Event()

    class Uneven(Echo):
        async def setup(self):
            while self.task.id == "t0" and not go_on.is_set():
                await asyncio.sleep(0.01)

    with rollouts(Uneven, script(YES), group_size=2) as playing:
        slow = playing.dispatch(tasks_of(3), 0)
        quick = playing.dispatch(tasks_of(5)[1:], Dispatch(1, "eval", group_size=1))
        held_out = quick.gather()  # ends while the first dispatch still plays
        go_on.set()
        trained = slow.gather()
    assert [group.task.id for group in held_out] == ["t1", "t2", "t3", "t4"]
    assert {e.key.phase for group in held_out for e in group.episodes} == {"eval"}
    assert [group.task.id for group in trained] == ["t0", "t1", "t2"]
    assert {(e.key.phase, e.key.step) for g in trained for e in g.episodes} == {("train", 0)}


def test_a_dispatch_that_breaks_leaves_the_other_one_alone():
    class Wrong(Echo):
        async def setup(self):
            if self.task.id == "t3":
                raise ContractError("field x is wrong")

    with rollouts(Wrong, script(YES)) as playing:
        right, wrong = playing.dispatch(tasks_of(3), 0), playing.dispatch(tasks_of(4)[3:], 1)
        with pytest.raises(ContractError, match="field x is wrong"):
            wrong.gather()
        assert len(right.gather()) == 3


def test_a_policy_without_an_engine_takes_no_weights():
    with rollouts(Echo, noop()) as playing, pytest.raises(ConfigError, match="noop"):
        playing.sync(None, 1)


def test_no_more_episodes_play_at_once_than_allowed():
    now, most = 0, 0

    class Counted(Echo):
        async def setup(self):
            nonlocal now, most
            now += 1
            most = max(most, now)
            await asyncio.sleep(0.01)
            now -= 1

    for deterministic in (False, True):
        most = 0
        with rollouts(
            Counted, noop(), concurrency=3, group_size=2, deterministic=deterministic
        ) as playing:
            playing.gather(tasks_of(6), 0)
        assert most == 3


def test_two_tasks_with_one_id_are_refused():
    with rollouts(Echo, noop()) as playing, pytest.raises(ContractError, match="'t0' stands twice"):
        playing.dispatch([*tasks_of(2), *tasks_of(1)], 0)


def test_seeds_depend_on_every_part_and_not_on_the_process():
    assert derive_seed(0, "t", 1, 2) == 5786600676773304274
    seeds = {derive_seed(a, b, c) for a in range(5) for b in ("x", "y", 1, "1") for c in range(5)}
    assert len(seeds) == 100 and all(0 <= seed < 2**63 for seed in seeds)


def test_samples_of_a_group_start_alike_and_act_differently():
    class Random(Echo):
        def prompt(self):
            from agentrl.types import Message

            return [Message.user(str(self.rng.random()))]

    with rollouts(Random, noop(), group_size=3) as playing:
        first, second = playing.gather(tasks_of(2), 0)
        (again,) = playing.gather(tasks_of(1), 1)
    assert len({episode.messages[0].content for episode in first.episodes}) == 1
    assert len({group.episodes[0].start for group in (first, second, again)}) == 3


def test_an_environment_whose_start_is_not_fixed_stops_the_run():
    import random

    class Loose(Echo):
        def prompt(self):
            from agentrl.types import Message

            return [Message.user(str(random.random()))]

    with (
        rollouts(Loose, noop(), group_size=2) as playing,
        pytest.raises(ContractError, match="start states differ"),
    ):
        playing.gather(tasks_of(1), 0)


# Time


class Patient(Echo):
    limits = Limits(wall_s=60.0, tool_s=30.0)
    pause_s = 0.2

    @tool
    def work(self) -> str:
        """Take a while, in a plain function."""
        time.sleep(self.pause_s)
        return "done"


def no_episode_minds_an_update(env, episodes: int) -> None:
    """All are played while the main thread computes and asks for none of them."""
    seen, policy = [], script(*[says(call("work"))] * 3, YES)
    with rollouts(env, policy, concurrency=episodes, on_episode=seen.append) as playing:
        handle = playing.dispatch(tasks_of(episodes), 0)
        deadline = time.monotonic() + 120
        while len(seen) < episodes and time.monotonic() < deadline:
            sum(range(10_000))
        assert len(seen) == episodes
        groups = handle.gather()
    assert {group.episodes[0].end for group in groups} == {EndReason.ANSWERED}
    assert {group.episodes[0].counts.tool_errors for group in groups} == {0}


def test_an_update_in_the_main_thread_times_out_no_episode():
    no_episode_minds_an_update(Patient, 40)


@pytest.mark.long
def test_an_update_of_three_seconds_under_a_hundred_episodes():
    class Full(Patient):
        pause_s = 1.0

    no_episode_minds_an_update(Full, 100)


def test_a_thousand_episodes_with_records(tmp_path):
    """All at once; the benchmark `scheduler_overhead` says what a step of them costs."""

    class Many(Echo):
        limits = replace(Echo.limits, wall_s=1000)

    path, steps = tmp_path / "episodes.jsonl", 5
    policy = script(*[SAY] * (steps - 1), YES)
    with (
        EpisodeWriter(path) as out,
        rollouts(Many, policy, concurrency=1000, on_episode=out.write) as playing,
    ):
        groups = playing.gather(tasks_of(1000), 0)
    assert all(group.rewards_G == (1.0,) for group in groups) and len(read_episodes(path)) == 1000


def test_play_works_alone():
    episode = play_one(Echo, script(SAY, YES), make_task(hidden={"answer": "yes"}))
    assert episode.score.value == 1.0 and episode.env == "echo-v0" and episode.counts.wall_s > 0


def test_single_samples_are_played_until_somebody_says_stop():
    told = []
    tasks = tasks_of(3)
    with rollouts(Echo, noop(), concurrency=1, on_episode=told.append) as playing:
        playing.each([(tasks[0], 4), (tasks[2], 0)], Dispatch(phase="eval"))
        assert [(e.task.id, e.key.sample, e.key.phase) for e in told] == [
            ("t0", 4, "eval"),
            ("t2", 0, "eval"),
        ]
        told.clear()
        playing.each([(task, 0) for task in tasks], Dispatch(1), stop=lambda: len(told) >= 2)
        assert len(told) == 2
        playing.setting = replace(playing.setting, deterministic=True)
        with pytest.raises(ConfigError, match="plays whole groups"):
            playing.each([(tasks[0], 0)], Dispatch())
