"""Many episodes at one server that misbehaves: its pace, what is spent, and nobody lost."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
from chat_server import Answer, chat_server, completion, failure
from helpers import Echo, play_one
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.evaluation.run import EvalPlan, evaluate
from agentrl.policies.base import Usage
from agentrl.policies.options import ServedOptions
from agentrl.policies.pace import MINUTE_S, Pace, Spending, Window
from agentrl.policies.served import Prices, ServedPolicy
from agentrl.policies.tries import asked_wait_s, backoff_s
from agentrl.records.files import read_episodes
from agentrl.types import EndReason, Limits


class Many(Echo):
    """Fifty tasks."""

    count = 50


class Misbehaving:
    """Answers each conversation's turn at last, and badly before: each way comes up."""

    WAYS = ("slow", "garbage", "too many", "cut", "silent", "broken", "fine")

    def __init__(self, seed):
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.ways = Counter()
        self.answered = 0
        self.open = self.most_open = 0

    def __call__(self, request):
        good = completion("yes", usage=(100, 10))
        with self._lock:
            way = self._random.choice(self.WAYS)
            self.ways[way] += 1
            self.answered += way in ("slow", "fine")
        return {
            "slow": replace(good, after_s=0.05),
            "garbage": Answer("<html>", kind="text/html"),
            "too many": replace(failure(429), wait=("retry-after", "0.05")),
            "cut": replace(good, cut=True),
            "silent": Answer("", hang=True),
            "broken": failure(500),
            "fine": good,
        }[way]


def test_fifty_episodes_at_a_server_that_does_all_that_servers_do(tmp_path, monkeypatch):
    monkeypatch.setattr("agentrl.policies.served.backoff_s", lambda tries: 0.02)
    server_side = Misbehaving(3)
    with chat_server(server_side) as server:
        plan = EvalPlan(
            Many,
            f"openai:m@{server.url}",
            out=tmp_path,
            concurrency=50,
            prices=(1.0, 2.0),
            served=ServedOptions(timeout_s=1.0, retries=40),
        )
        result = evaluate(plan)
    assert set(server_side.ways) == set(Misbehaving.WAYS)
    assert (result["n_episodes"], result["n_failed_infra"], result["pass_at"]["1"]) == (50, 0, 1.0)
    assert len(server.requests) > 100
    episodes = list(read_episodes(tmp_path / "episodes.jsonl").values())
    assert len({episode.key for episode in episodes}) == len(episodes) == 50
    assert {
        (e.counts.prompt_tokens, e.counts.sampled_tokens, e.counts.turns) for e in episodes
    } == {(100, 10, 1)}
    # Each episode has one reply; a slow one may have come too late and been asked for again.
    assert server_side.answered >= 50
    assert result["cost"]["usd"] == pytest.approx(50 * 120 / 1e6)


def test_a_full_server_stops_all_for_as_long_as_it_says():
    times = []

    def busy_at_first(request):
        times.append(time.monotonic())
        full = replace(failure(429), wait=("retry-after", "0.4"))
        return full if len(times) == 1 else completion("yes")

    with chat_server(busy_at_first) as server:
        policy = ServedPolicy("m", server.url, options=ServedOptions(retries=0, concurrency=1))

        async def ask():
            try:
                await asyncio.gather(*(one() for _ in range(5)))
            finally:
                await policy.close()

        async def one():
            with policy.player(None, Limits(), 0) as player:
                return await player.act((), ())

        asyncio.run(ask())
    assert len(times) == 6 and times[1] - times[0] >= 0.4


def test_a_wait_longer_than_the_patience_ends_the_turn_at_once():
    full = replace(failure(429), wait=("retry-after", "3600"))
    with chat_server(full) as server:
        episode = play_one(Echo, ServedPolicy("m", server.url))
    assert (episode.end, len(server.requests)) == (EndReason.ENGINE_ERROR, 1)


def test_a_quota_that_is_used_up_stops_the_run_by_one_sentence():
    empty = failure(429, "You exceeded your quota", code="insufficient_quota")
    with chat_server(empty) as server, pytest.raises(ConfigError, match="exceeded your quota"):
        play_one(Echo, ServedPolicy("m", server.url))
    assert len(server.requests) == 1


def test_no_more_requests_are_open_than_may_be():
    lock, now_open, seen = threading.Lock(), [0], []

    def counting(request):
        with lock:
            now_open[0] += 1
            seen.append(now_open[0])
        time.sleep(0.02)
        with lock:
            now_open[0] -= 1
        return completion("yes")

    with chat_server(counting) as server:
        plan = EvalPlan(
            Many, f"openai:m@{server.url}", served=ServedOptions(concurrency=3), limit=30
        )
        assert evaluate(plan)["n_episodes"] == 30
    assert max(seen) <= 3 and len(seen) == 30


def test_waiting_for_a_place_costs_no_episode_its_wall_time():
    class Hasty(Many):
        limits = Limits(wall_s=0.5)

    with chat_server(replace(completion("yes"), after_s=0.1)) as server:
        plan = EvalPlan(
            Hasty, f"openai:m@{server.url}", served=ServedOptions(concurrency=1), limit=12
        )
        assert evaluate(plan)["end_reasons"] == {"answered": 12}


def test_a_slow_answer_counts_as_wall_time():
    class Hasty(Echo):
        limits = Limits(wall_s=0.2)

    called = completion(None, calls=[("say", '{"text": "a"}')])
    with chat_server(replace(called, after_s=0.3)) as server:
        episode = play_one(Hasty, ServedPolicy("m", server.url))
    assert episode.end is EndReason.WALL_TIME and len(server.requests) <= 2


def test_no_episode_begins_once_the_budget_is_spent():
    with chat_server(completion("yes", usage=(100, 10))) as server:
        policy = ServedPolicy(
            "m", server.url, prices=Prices(1.0, 1.0), options=ServedOptions(budget_tokens=300)
        )
        ends = [play_one(Echo, policy).end for _ in range(5)]
    assert ends == [EndReason.ANSWERED] * 3 + [EndReason.ENGINE_ERROR] * 2
    assert len(server.requests) == 3 and policy.spending.tokens == 330
    assert policy.spending.usd == pytest.approx(330 / 1e6)


def test_a_budget_holds_for_episodes_that_wait_for_their_place(tmp_path):
    with chat_server(replace(completion("yes", usage=(100, 10)), after_s=0.01)) as server:
        options = ServedOptions(budget_tokens=1000, concurrency=4)
        plan = EvalPlan(Many, f"openai:m@{server.url}", out=tmp_path, served=options)
        result = evaluate(plan)
    # Ten reach the budget; three more may have been asked for by then.
    assert 10 <= len(server.requests) <= 13
    assert result["n_episodes"] == 50 and result["n_failed_infra"] == 50 - len(server.requests)
    assert "budget_tokens=1000 is spent" in result["failures"]["engine_error"]


def test_dollars_without_prices_are_refused():
    with pytest.raises(ConfigError, match=r"budget_usd=2 of a served policy needs prices"):
        ServedPolicy("m", "http://localhost:1/v1", options=ServedOptions(budget_usd=2.0))


@given(st.lists(st.tuples(st.integers(1, 30), st.floats(0, 20)), max_size=40), st.integers(1, 60))
def test_no_minute_has_more_than_the_limit(steps, most):
    window, now, added = Window(most), 0.0, []
    for amount, passed_s in steps:
        now += passed_s
        for _ in range(100):
            wait_s = window.wait_s(amount, now)
            if wait_s <= 0:
                break
            now += wait_s
        else:
            pytest.fail("it never fits")
        window.add(amount, now)
        added.append((now, amount))
    for end, last in added:
        within = [amount for at, amount in added if end - MINUTE_S + 1e-6 < at <= end]
        assert sum(within) <= most or (len(within) == 1 and last > most)


def test_a_window_forgets_what_was_corrected():
    window = Window(100)
    entry = window.add(100, 0.0)
    assert window.wait_s(50, 1.0) == pytest.approx(59.0)
    entry.amount = 40
    assert window.wait_s(50, 1.0) == 0.0


def test_a_pace_keeps_requests_and_tokens_of_each_minute():
    clock = [0.0]

    async def main():
        pace = Pace(ServedOptions(requests_per_minute=2), lambda: clock[0])
        begun = []

        async def one():
            async with pace.place(1):
                begun.append(clock[0])

        async def tick():
            while len(begun) < 5:
                clock[0] += 10
                await real(0)

        real = asyncio.sleep
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("agentrl.policies.pace.asyncio.sleep", lambda wait_s: real(0))
            await asyncio.gather(tick(), *(one() for _ in range(5)))
        return begun

    begun = asyncio.run(main())
    assert all(later - first >= MINUTE_S for first, later in zip(begun, begun[2:], strict=False))


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after-ms": "250", "retry-after": "7"}, 0.25),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "Mon, 01 Jan 2024 00:00:00 +99999999999999999"}, None),
        ({}, None),
    ],
)
def test_what_a_server_asks_for_is_read(headers, seconds):
    assert asked_wait_s(headers) == seconds


def test_waits_between_tries_grow_to_a_bound():
    for tries, most in ((1, 0.5), (2, 1.0), (3, 2.0), (9, 8.0), (99, 8.0)):
        assert most / 2 <= backoff_s(tries) <= most


def test_what_is_spent_is_said():
    spending = Spending(budget_usd=0.5)
    spending.add(Usage(10, 5, 0.4))
    assert not spending.met
    spending.add(Usage(1, 1, 0.1))
    assert spending.met == "budget_usd=0.5 is spent (US$ 0.5000)" and spending.tokens == 17
