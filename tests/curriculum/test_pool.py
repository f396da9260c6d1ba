"""Pools and mixtures without a model: what is chosen, remembered, retired and gone on from."""

from __future__ import annotations

import json
from itertools import count

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trainer_cases import branch, episode

from agentrl import Task, ToolEnv
from agentrl.curriculum.mixture import allocate, open_source
from agentrl.curriculum.pool import PoolSource
from agentrl.curriculum.settings import (
    Band,
    EnvTable,
    InOrder,
    Learnability,
    PoolSettings,
    Staged,
    Thompson,
    UniformPool,
    refuse_tables,
)
from agentrl.curriculum.source import EnvPart
from agentrl.errors import ConfigError
from agentrl.trajectory import Group


class Numbers(ToolEnv):
    """Endless numbered tasks."""

    id = "numbers-v0"
    endless = True

    def tasks(self, split, seed):
        return (Task(id=str(number), instruction=f"say {number}") for number in count())


class Few(Numbers):
    """Five of them."""

    id = "few-v0"

    def tasks(self, split, seed):
        return (Task(id=str(number), instruction=f"say {number}") for number in range(5))


class Cycle(Numbers):
    """Twelve of them, over and over."""

    id = "cycle-v0"

    def tasks(self, split, seed):
        return (Task(id=str(number % 12), instruction="say it") for number in count())


def part(env="", level=0, prefix="", floor=0.0, make=Numbers):
    return EnvPart(env, make.id, level, prefix, floor, make)


def played(tasks, step, passes, draw=0, size=8):
    """Groups of these tasks; `passes`: task -> how many of the episodes pass, None: all failed."""

    def one(task, sample, reward):
        made = episode(branch(2, (2, 0)), reward=reward, task=task.id, sample=sample)
        key = made.key._replace(round=step, draw=draw)
        return type(made)(**{**vars(made), "key": key})

    counts = [passes(task) for task in tasks]
    return [
        Group(tuple(one(task, i, None if c is None else float(i < c)) for i in range(size)))
        for task, c in zip(tasks, counts, strict=True)
    ]


def go(source, rounds, start=0, n=4):
    """Rounds in which even numbers are solved half of the time, others never; the chosen ids."""
    chosen = []
    for step in range(start, start + rounds):
        tasks = source.next(n)
        chosen.append([task.id for task in tasks])
        even = lambda task: 4 * (int(task.id.rpartition("/")[2]) % 2 == 0)  # noqa: E731
        source.observe(played(tasks, step, even))
    return chosen


@pytest.mark.parametrize(
    "chosen",
    [
        UniformPool(pool=40),
        Learnability(pool=40, rest=2),
        Thompson(pool=40),
        Learnability(pool=40, retire=0.45),
    ],
)
def test_a_source_goes_on_from_its_state_with_the_same_choices(chosen):
    whole = go(PoolSource([part()], chosen, 7), 12)
    first = PoolSource([part()], chosen, 7)
    assert go(first, 5) == whole[:5]
    state = json.loads(json.dumps(first.state()))
    assert go(PoolSource([part()], chosen, 7, state), 7, start=5) == whole[5:]
    assert go(PoolSource([part()], chosen, 8), 5) != whole[:5]


@pytest.mark.parametrize("chosen", [Learnability(pool=64), Thompson(pool=64), Band(pool=64)])
def test_new_tasks_come_first_where_everything_fails(chosen):
    """Of 48 draws among 64 tasks, uniform sampling sees 36 different ones."""
    distinct = []
    for seed in range(5):
        source, seen = PoolSource([part()], chosen, seed), set()
        for step in range(6):
            tasks = source.next(8)
            seen |= {task.id for task in tasks}
            source.observe(played(tasks, step, lambda task: 0, size=4))
        distinct.append(len(seen))
    assert np.mean(distinct) >= 36


@pytest.mark.parametrize("rest", [3, 6])
@pytest.mark.parametrize("prior", [(0.3, 0.9), (0.05, 3.0)])
def test_the_mean_over_all_tasks_has_no_bias_where_tasks_rest(rest, prior):
    errors = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        p_N = rng.beta(*prior, 128)
        source = PoolSource([part()], Learnability(pool=128, rest=rest), seed)
        found = []
        for step in range(10):
            tasks = source.next(16)
            passes = lambda task: int(rng.binomial(4, p_N[int(task.id)]))  # noqa: B023, E731
            source.observe(played(tasks, step, passes, size=4))
            found.append(source.metrics()["curriculum/pass_all"])
        errors.append(np.mean(found[3:]) - p_N.mean())
    assert abs(np.mean(errors)) < 3 * np.std(errors) / np.sqrt(40)


def test_what_can_be_learnt_is_played_more_often():
    chosen = go(PoolSource([part()], Learnability(pool=40), 0), 60)
    numbers = [int(one) for row in chosen[30:] for one in row]
    assert sum(number % 2 == 0 for number in numbers) > 0.75 * len(numbers)


def test_metrics_say_what_the_pass_rate_of_all_tasks_is_and_what_was_played():
    source = PoolSource([part()], Learnability(pool=40), 0)
    go(source, 40)
    found = source.metrics()
    low, high = found["curriculum/pass_all_low"], found["curriculum/pass_all_high"]
    assert low <= found["curriculum/pass_all"] <= high
    assert found["curriculum/pass_played"] >= 0.25 and found["curriculum/tasks"] == 4
    assert source.news()["chosen"] and found["curriculum/unseen"] < 0.5


@pytest.mark.parametrize("failed", [0.0, 0.5])
def test_groups_that_failed_say_nothing_of_the_pass_rate_of_all_tasks(failed):
    """The estimate is without bias, and its interval holds as often as without failures."""
    rng = np.random.default_rng(0)
    errors, holds = [], []
    for _ in range(120):
        p_N = rng.beta(0.3, 0.9, 100)
        source = PoolSource([part()], UniformPool(pool=100), int(rng.integers(1 << 30)))

        def passes(task, p_N=p_N):
            return None if rng.random() < failed else rng.binomial(4, p_N[int(task.id)])

        for step in range(2):
            source.observe(played(source.next(24), step, passes, size=4))
            found = {k.rpartition("/")[2]: v for k, v in source.metrics().items()}
            errors.append(found["pass_all"] - p_N.mean())
            holds.append(found["pass_all_low"] <= p_N.mean() <= found["pass_all_high"])
    assert abs(np.mean(errors)) < 3 * np.std(errors) / np.sqrt(len(errors))
    assert np.mean(holds) > 0.9


def test_a_round_in_which_all_failed_has_no_estimate():
    source = PoolSource([part()], UniformPool(pool=6), 0)
    source.observe(played(source.next(4), 0, lambda task: None))
    assert not [name for name in source.metrics() if "pass_" in name]


def test_a_task_rests_and_a_refilled_round_draws_no_task_again():
    chosen = go(PoolSource([part()], Learnability(pool=24, rest=3), 0), 20)
    for place, row in enumerate(chosen[3:]):
        assert not set(row) & {one for before in chosen[place : place + 3] for one in before}
    source = PoolSource([part()], Learnability(pool=24), 0, apart=True)
    for step in range(6):
        ids = []
        for draw in range(3):
            tasks = source.next(4)
            ids += [task.id for task in tasks]
            source.observe(played(tasks, step, lambda task: 4, draw))
        assert len(ids) == len(set(ids))


@pytest.mark.parametrize("passes", [4, None], ids=["played", "failed"])
@pytest.mark.parametrize("rest", [0, 1, 2])
def test_no_draw_of_a_refilled_round_has_a_task_that_rests(rest, passes):
    chosen = UniformPool(pool=3 * 3 * (rest + 1) + 3, rest=rest)
    source, rounds = PoolSource([part()], chosen, 0, apart=True), []
    for step in range(20):
        ids = []
        for draw in range(3):
            tasks = source.next(3)
            ids += [task.id for task in tasks]
            source.observe(played(tasks, step, lambda task: passes, draw))
            source = PoolSource([part()], chosen, 0, json.loads(json.dumps(source.state())), True)
        assert len(ids) == len(set(ids))
        assert not set(ids) & {one for before in rounds[len(rounds) - rest :] for one in before}
        rounds.append(ids)


def test_a_stream_that_says_an_id_again_is_gone_on_from_with_the_same_choices():
    chosen = UniformPool(pool=5, retire=0.6)
    source, states, rounds = PoolSource([part(make=Cycle)], chosen, 0), [], []
    for step in range(25):
        states.append(json.loads(json.dumps(source.state())))
        tasks = source.next(4)
        rounds.append([task.id for task in tasks])
        source.observe(played(tasks, step, lambda task: 8))
    for begun, state in enumerate(states):
        source = PoolSource([part(make=Cycle)], chosen, 0, state)
        for step in range(begun, 25):
            tasks = source.next(4)
            assert [task.id for task in tasks] == rounds[step]
            source.observe(played(tasks, step, lambda task: 8))


def test_what_is_solved_gives_its_place_to_a_new_task():
    source = PoolSource([part()], UniformPool(pool=6, retire=0.9), 0)
    tasks = source.next(6)
    source.observe(played(tasks, 0, lambda task: 8 * (task.id == "3")))
    assert source.news()["retired"] == ["3"] and source.metrics()["curriculum/retired"] == 1
    assert source.metrics()["curriculum/tasks"] == 6
    again = PoolSource([part()], UniformPool(pool=6, retire=0.9), 0, source.state())
    assert {task.id for task in again.next(6)} == {"0", "1", "2", "6", "4", "5"}
    few = PoolSource([part(make=Few)], UniformPool(pool=6, retire=0.9), 0)
    few.observe(played(few.next(5), 0, lambda task: 8))
    assert len(few) == 5 and "retired" not in few.news()


def test_levels_move_towards_half_solved_and_say_so():
    levels = [part(level=level, prefix=f"#{level}") for level in range(3)]
    chosen = Staged(pool=30, levels=[{"a": 0}, {"a": 1}, {"a": 2}])
    source, stages = PoolSource(levels, chosen, 0), []
    for step in range(12):
        tasks = source.next(6)
        # Level 0 is solved, level 1 half, level 2 never.
        source.observe(played(tasks, step, lambda task: (8, 4, 0)[int(task.id[1])]))
        stages.append(source.metrics()["curriculum/stage"])
        assert step or source.news()["promoted"] == {"from": 0, "to": 1}
    assert stages[0] == 1 and stages[-1] == 1
    assert source.metrics()["curriculum/level_0/pass"] > 0.9


def test_groups_grow_where_signal_is_rare():
    source = PoolSource([part()], Learnability(pool=8, group_most=16), 0)
    source.observe(played(source.next(8), 0, lambda task: 4 if int(task.id) % 2 else 1))
    tasks = source.next(8)
    sizes = dict(zip((int(task.id) for task in tasks), source.sizes(tasks, 8), strict=True))
    assert sum(sizes.values()) == 64 and max(sizes.values()) <= 16 and min(sizes.values()) >= 2
    assert sizes[0] > sizes[1]


def test_a_profile_is_begun_with(tmp_path):
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({"pass_rates": {"3": [6, 8], "99": [1, 8]}, "prior": [0.3, 0.9]}))
    source = PoolSource([part()], UniformPool(pool=6, start=str(file)), 0)
    assert source.beliefs.alpha_N[3] == 6.3 and source.beliefs.beta_N[3] == pytest.approx(2.9)
    assert source.beliefs.prior == (0.3, 0.9) and list(source.beliefs.seen_N).count(True) == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "does not exist: write it with agentrl profile --save"),
        ("{}", r"is no file of agentrl profile --save \('pass_rates'\)"),
        ('{"pass_rates": {"0": [9, 8]}, "prior": [1, 1]}', "has counts that cannot be"),
        (
            '{"pass_rates": {"x": [1, 8]}, "prior": [1, 1]}',
            "counts none of .* --set",
        ),
    ],
)
def test_a_file_that_is_no_profile_of_the_pool_is_refused(tmp_path, text, sentence):
    file = tmp_path / "profile.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        PoolSource([part()], UniformPool(pool=6, start=str(file)), 0)


def test_too_few_tasks_and_another_sampler_are_refused_in_one_sentence():
    with pytest.raises(ConfigError, match="a draw of 6 tasks finds 5 that may be played, of 5"):
        PoolSource([part(make=Few)], UniformPool(pool=9), 0).next(6)
    begun = open_source([[part()]], InOrder(), 0)
    begun.next(2)
    with pytest.raises(ConfigError, match="was started with 'in_order', whose state"):
        open_source([[part()]], Thompson(), 0, begun.state())
    pooled = PoolSource([part()], UniformPool(pool=9), 0)
    with pytest.raises(ConfigError, match="was started with 'uniform'"):
        open_source([[part()]], InOrder(), 0, pooled.state())
    with pytest.raises(ConfigError, match="a pool of 9 tasks and finds 8 now"):
        PoolSource([part()], UniformPool(pool=8), 0, pooled.state())


# --- several environments


@given(
    st.lists(st.floats(0, 1), min_size=2, max_size=6),
    st.integers(1, 40),
    st.integers(0, 10),
)
@example([0.019, 0.534, 0.169, 0.01, 0.041, 0.226], 4, 0)
@settings(max_examples=80, deadline=None)
def test_floors_hold_in_every_window_of_rounds_but_for_two_tasks(shares, n, seed):
    floors = [share / max(1.0, sum(shares)) for share in shares]
    owed, rounds, most = [0.0] * len(floors), [], [n] * len(floors)
    for step in range(40):
        weights = [1.0 + (step + seed + i) % 5 for i in range(len(floors))]
        counts, owed = allocate(n, floors, weights, owed, most)
        assert sum(counts) == n and min(counts) >= 0
        rounds.append(counts)
    for start in range(30):
        for env, floor in enumerate(floors):
            for stop in (start + 1, start + 10, 40):
                got = sum(row[env] for row in rounds[start:stop])
                assert got > (min(stop, 40) - start) * n * floor - 2


@given(st.data(), st.integers(2, 4), st.integers(1, 20))
@settings(max_examples=80, deadline=None)
def test_no_environment_is_asked_for_more_than_it_has(data, k, n):
    floors = data.draw(st.lists(st.floats(0, 1 / k), min_size=k, max_size=k))
    weights = data.draw(st.lists(st.floats(0, 9), min_size=k, max_size=k))
    most, owed = data.draw(st.lists(st.integers(0, n), min_size=k, max_size=k)), [0.0] * k
    n = min(n, sum(most))
    for _ in range(5):
        counts, owed = allocate(n, floors, weights, owed, most)
        assert sum(counts) == n and all(0 <= c <= m for c, m in zip(counts, most, strict=True))
        assert all(-1e-6 < one < 2 for one in owed)


@pytest.mark.parametrize("refills", [False, True])
@pytest.mark.parametrize("chosen", [InOrder(), Learnability(), Learnability(pool=40, rest=1)])
def test_a_small_environment_gives_what_it_has_and_the_others_the_rest(chosen, refills):
    """Its tasks are the ones with signal, and its floor asks for more of them than there are."""
    envs = [[part("few", prefix="few", floor=0.9, make=Few)], [part("a", prefix="a")]]
    source = open_source(envs, chosen, 0, apart=refills)
    own = []
    for step in range(12):
        tasks = source.next(7)
        own.append(sum(task.id.startswith("few/") for task in tasks))
        source.observe(played(tasks, step, lambda task: 4 * task.id.startswith("few/")))
    assert max(own) == 5 and sum(own[-4:]) >= 5  # it is not left out for good
    if not getattr(chosen, "rest", 0) + refills:
        assert own == [5] * 12


def test_an_environment_that_is_not_played_in_a_round_chose_nothing_in_it():
    envs = [[part("a", prefix="a", floor=1.0)], [part("b", prefix="b")]]
    source = open_source(envs, Learnability(pool=30), 0)
    source.observe(played(source.next(3), 0, lambda task: 4))
    assert source.news()["b"]["chosen"] == [] and len(source.news()["a"]["chosen"]) == 3


@pytest.mark.parametrize(
    ("chosen", "sentence"),
    [
        (InOrder(), "the environments have 10 tasks"),
        (Learnability(), "holds 10 tasks, and rounds of 11 tasks"),
    ],
)
def test_environments_that_together_have_too_few_tasks_are_refused_before_play(chosen, sentence):
    envs = [[part("a", prefix="a", make=Few)], [part("b", prefix="b", make=Few)]]
    with pytest.raises(ConfigError, match=sentence):
        open_source(envs, chosen, 0).refuse_rounds(11, 1)
    open_source(envs, chosen, 0).refuse_rounds(10, 1)


def test_a_mixture_keeps_its_floors_and_goes_on_from_its_state():
    envs = [[part("a", prefix="a", floor=0.5)], [part("b", prefix="b", floor=0.25)]]
    chosen = Learnability(pool=30)
    whole = go(open_source(envs, chosen, 3), 20, n=6)
    first = open_source(envs, chosen, 3)
    assert go(first, 9, n=6) == whole[:9]
    state = json.loads(json.dumps(first.state()))
    assert go(open_source(envs, chosen, 3, state), 11, start=9, n=6) == whole[9:]
    for start in range(11):
        window = [one for row in whole[start : start + 10] for one in row]
        assert sum(one.startswith("a/") for one in window) >= 30 - 1
        assert sum(one.startswith("b/") for one in window) >= 15 - 1


def test_environments_in_order_share_evenly():
    envs = [[part("a", prefix="a")], [part("b", prefix="b")]]
    source = open_source(envs, InOrder(), 0)
    assert [task.id for task in source.next(4)] == ["a/0", "a/1", "b/0", "b/1"]
    with pytest.raises(ConfigError, match="is not one of the environments"):
        open_source(envs, InOrder(), 0, open_source(envs[:1], InOrder(), 0).state())
    few = [[part("a", prefix="a", make=Few)], [part("b", prefix="b", make=Few)]]
    with pytest.raises(ConfigError, match="a draw of 14 tasks finds 10 that may be played"):
        open_source(few, InOrder(), 0).next(14)


@pytest.mark.parametrize(
    ("tables", "shared", "sentence"),
    [
        ([], {}, "names no environment"),
        ([EnvTable(id="a"), EnvTable(id="a")], {}, "two tables .* are called 'a'"),
        ([EnvTable(id="a", floor=0.6), EnvTable(id="b", floor=0.6)], {}, "sum to 1.2, more than 1"),
        ([EnvTable(id="a", name="x/y")], {}, "env.name='x/y' must not"),
        ([EnvTable(id="a")], {"k": 1}, "env_settings belong to a single env"),
    ],
)
def test_tables_that_are_no_environments_of_one_run(tables, shared, sentence):
    with pytest.raises(ValueError, match=sentence):
        refuse_tables(tables, shared)


@pytest.mark.parametrize("kind", PoolSettings.__subclasses__())
def test_every_sampler_draws(kind):
    levels = [part(level=0, prefix="#0"), part(level=1, prefix="#1")]
    chosen = kind(pool=20, levels=[{}, {}])
    assert len({task.id for task in PoolSource(levels, chosen, 0).next(5)}) == 5
