"""The vLLM engine's thread without vLLM: who waits for whom, and what is left when it breaks.

Sleep is tested here only, against what vLLM's documentation says: it needs a GPU.
"""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest
from helpers import wait_for

from agentrl.engines import vllm as engines
from agentrl.engines.base import EngineSettings, Sampling
from agentrl.engines.vllm import Core, Sampled, StepCounts
from agentrl.errors import EngineAborted, EngineAway, EngineBroken

SHORT = Sampling(max_tokens=2)
WEIGHTS = SimpleNamespace(tensors=lambda: {})


class Script:
    """A core that answers every request after two steps, and writes down what it is told."""

    context_length, vocab_size = 64, 100

    def __init__(self, *args, **options):
        self.told, self.steps, self.counts = [], {}, StepCounts()
        self.load_error = self.step_error = self.abort_error = None
        self.go = threading.Event()
        self.go.set()

    def add(self, name, prompt, sampling, seed, salt):
        self.told.append(("add", prompt, salt))
        self.steps[name] = 0

    def step(self):
        self.go.wait(30)
        if self.step_error:
            raise self.step_error
        for name in self.steps:
            self.steps[name] += 1
        ended = [name for name, count in self.steps.items() if count == 2]
        for name in ended:
            del self.steps[name]
        return [Sampled(name, (1, 2), (-1.0, -2.0), "length") for name in ended]

    def abort(self, names):
        if self.abort_error:
            raise self.abort_error
        for name in list(names):
            self.steps.pop(name, None)

    def load(self, tensors):
        self.told.append(("load", len(self.steps)))
        if self.load_error:
            raise self.load_error

    def rest(self):
        self.told.append(("rest", len(self.steps)))

    def wake(self):
        pass

    def close(self):
        self.told.append(("close",))


@pytest.fixture
def opened(monkeypatch, nothing_is_left):
    monkeypatch.setattr(engines, "Core", Script)
    made = []

    def open_(**options):
        folder, settings = None, EngineSettings(name="vllm")
        made.append(engines.VllmEngine(folder, frozenset({1}), settings, **options))
        return made[-1], made[-1]._core

    yield open_
    for engine in made:
        asyncio.run(engine.close())
        asyncio.run(engine.close())
        assert engine._core.told[-1] == ("close",)


def ask(engine, *prompts):
    return [asyncio.ensure_future(engine.generate(p, SHORT, seed=3)) for p in prompts]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_a_synchronous_engine_begins_all_at_once_in_an_order_of_its_own(opened, order):
    engine, core = opened(synchronous=True)

    async def play():
        with engine.seat(), engine.seat(), engine.seat():
            early = ask(engine, *([n + 5] for n in order[:2]))
            await asyncio.sleep(0.1)
            assert core.told == []
            return await asyncio.gather(*early, *ask(engine, [order[2] + 5]))

    assert len(asyncio.run(play())) == 3
    assert [prompt for _, prompt, _ in core.told] == [(5,), (6,), (7,)]


def test_an_episode_that_leaves_its_seat_holds_up_no_other(opened):
    engine, _ = opened(synchronous=True)

    async def play():
        with engine.seat():
            with engine.seat():
                (asked,) = ask(engine, [5])
                await asyncio.sleep(0.05)
                assert not asked.done()
            return await asked

    assert asyncio.run(play()).ids == (1, 2)


def test_a_load_stands_between_what_runs_and_what_comes_later(opened):
    engine, core = opened()

    async def play():
        core.go.clear()
        first = ask(engine, [5])
        await asyncio.to_thread(wait_for, lambda: core.told)
        load = asyncio.ensure_future(asyncio.to_thread(engine.load, WEIGHTS, 4))
        await asyncio.to_thread(wait_for, lambda: engine._inbox.loads)
        late = ask(engine, [6])
        await asyncio.sleep(0.05)
        core.go.set()
        await load
        return await asyncio.gather(*first, *late)

    first, late = asyncio.run(play())
    assert (first.version, late.version) == (0, 4)
    assert core.told == [("add", (5,), "0"), ("load", 0), ("add", (6,), "4")]


def test_weights_that_do_not_arrive_end_the_engine(opened):
    """Some are old and some new then: nothing may be sampled with them."""
    engine, core = opened()
    core.load_error = EngineBroken("3 of its weights")
    with pytest.raises(EngineBroken, match="3 of its weights"):
        engine.load(WEIGHTS, 1)
    assert engine.version == 0
    with pytest.raises(EngineAway, match="vLLM has stopped for good: EngineBroken: 3 of its"):
        asyncio.run(engine.generate([5], SHORT, seed=1))
    with pytest.raises(EngineAway, match="stopped for good"):
        engine.load(WEIGHTS, 2)


def test_an_engine_that_cannot_drop_requests_is_away_for_everybody(opened):
    engine, core = opened()
    core.step_error, core.abort_error = RuntimeError("illegal access"), RuntimeError("gone")

    async def play():
        return await asyncio.gather(*ask(engine, [5], [6]), return_exceptions=True)

    assert [type(error) for error in asyncio.run(play())] == [EngineAway, EngineAway]


def test_an_engine_that_cannot_be_made_says_why(monkeypatch, nothing_is_left):
    def fails(*args, **options):
        raise MemoryError("no room")

    monkeypatch.setattr(engines, "Core", fails)
    with pytest.raises(MemoryError, match="no room"):
        engines.VllmEngine(None, frozenset(), EngineSettings(name="vllm"))


def test_closing_ends_what_waits(opened):
    engine, _ = opened()

    async def play():
        engine.pause()
        waiting = ask(engine, [5])
        await asyncio.sleep(0.05)
        await engine.close()
        return await asyncio.gather(*waiting, return_exceptions=True)

    (error,) = asyncio.run(play())
    assert isinstance(error, EngineAborted) and "closed" in str(error)


def test_it_rests_in_a_pause_once_nothing_runs(opened):
    engine, core = opened()

    async def play():
        core.go.clear()
        running = ask(engine, [5])
        await asyncio.to_thread(wait_for, lambda: core.told)
        engine.pause()
        core.go.set()
        await asyncio.gather(*running)
        await asyncio.to_thread(wait_for, lambda: ("rest", 0) in core.told)
        await asyncio.to_thread(engine.load, WEIGHTS, 1)
        engine.resume()
        return await asyncio.gather(*ask(engine, [6]))

    asyncio.run(play())
    assert [what for what, *_ in core.told] == ["add", "rest", "load", "add"]


class Told:
    """What `Core` says to vLLM, and what vLLM answers."""

    def __init__(self, missed=(), is_reset=True):
        self.calls, self._missed, self._is_reset = [], set(missed), is_reset

    def collective_rpc(self, function, args):
        self.calls.append("load")
        return [self._missed]

    def reset_prefix_cache(self):
        return self._is_reset

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags):
        self.calls.append(f"wake {' '.join(tags)}")


def core_of(told):
    core = object.__new__(Core)
    core._engine, core._sleeps, core._asleep = told, True, set()
    return core


def test_a_core_that_sleeps_wakes_what_is_needed_once():
    core = core_of(told := Told())
    core.rest()
    core.rest()
    core.load(dict)
    core.wake()
    core.wake()
    assert told.calls == ["sleep 1", "wake weights", "load", "wake kv_cache"]


@pytest.mark.parametrize(
    ("told", "match"),
    [
        (Told(missed=["b.weight", "a.weight"]), "replace 2 of its weights, the first a.weight"),
        (Told(is_reset=False), "keeps keys and values of older weights"),
    ],
)
def test_a_load_that_is_not_whole_is_found_out(told, match):
    with pytest.raises(EngineBroken, match=match):
        core_of(told).load(dict)
