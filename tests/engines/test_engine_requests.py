"""The transformers engine as a server of requests: what is cancelled, paused, aborted or fails,
and episodes in order.
"""

import asyncio
import random
import threading
import time

import pytest
import torch
from engine_cases import sample
from helpers import Echo, make_task, rollouts, tiny_model_folder, wait_for

from agentrl.chat.tokens import Chat
from agentrl.engines.base import Sampling
from agentrl.engines.loading import load_tokenizer, transformers_engine
from agentrl.engines.transformers import TransformersEngine
from agentrl.errors import EngineAborted, EngineError
from agentrl.policies.base import TokenPolicy
from agentrl.types import EndReason, Limits


@pytest.mark.parametrize("prompt", [[], [-1], [10**6]])
def test_a_bad_prompt_fails_alone(engine, prompt):
    async def run():
        good = engine.generate([5, 6], Sampling(max_tokens=3), seed=0)
        return await asyncio.gather(
            good, engine.generate(prompt, Sampling(max_tokens=3), seed=0), return_exceptions=True
        )

    good, bad = asyncio.run(run())
    assert good.ids and isinstance(bad, EngineError)
    with pytest.raises(EngineError, match="context length 512"):
        sample(engine, [[5] * 510], Sampling(max_tokens=3))


def test_a_model_that_fails_is_an_engine_error(engine, model, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", broken)
        with pytest.raises(EngineError, match="out of memory"):
            sample(engine, [[5, 6]], Sampling(max_tokens=3))
    assert sample(engine, [[5, 6]], Sampling(max_tokens=3))[0].ids


def test_cancelled_requests_disturb_no_other(engine):
    async def run():
        sampling = Sampling(max_tokens=30)
        kept = [
            asyncio.create_task(engine.generate([5, 6, seed + 7], sampling, seed=seed))
            for seed in range(4)
        ]
        gone = [
            asyncio.create_task(engine.generate([9, 9], sampling, seed=seed)) for seed in range(4)
        ]
        await asyncio.sleep(0.01)
        late = asyncio.create_task(engine.generate([8], sampling, seed=9))
        await asyncio.sleep(0)
        for task in (*gone, late):
            task.cancel()
        answers = await asyncio.gather(*kept)
        assert all(task.cancelled() for task in await _settled(*gone, late))
        return answers, await engine.generate([5, 6, 7], sampling, seed=0)

    answers, again = asyncio.run(run())
    assert again.ids == answers[0].ids


def test_nobody_waits_for_rows_that_are_cancelled(engine, monkeypatch):
    """An episode whose time is up takes no more of the model's time."""
    steps, forward = [], engine.model.forward
    sampling, cancelled = threading.Event(), threading.Event()

    def counted(*args, **kwargs):
        steps.append(1)
        if len(steps) == 5:
            sampling.set()
            assert cancelled.wait(60)
        return forward(*args, **kwargs)

    async def run():
        asked = asyncio.create_task(engine.generate([5, 6], Sampling(max_tokens=500), seed=0))
        assert await asyncio.to_thread(sampling.wait, 60)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        cancelled.set()
        return await engine.generate([5, 6], Sampling(max_tokens=2), seed=0)

    monkeypatch.setattr(engine.model, "forward", counted)
    engine._stop = torch.tensor([], dtype=torch.long)
    assert len(asyncio.run(run()).ids) == 2 and len(steps) < 20


async def _settled(*tasks):
    await asyncio.gather(*tasks, return_exceptions=True)
    return tasks


def test_the_engine_serves_a_second_loop(engine):
    first = sample(engine, [[5, 6]], Sampling(max_tokens=5))
    assert sample(engine, [[5, 6]], Sampling(max_tokens=5)) == first


def test_closing_ends_the_sampling_thread(model, chat):
    engine = transformers_engine(model, chat)
    sample(engine, [[5]], Sampling(max_tokens=2))
    asyncio.run(engine.close())
    asyncio.run(engine.close())
    wait_for(lambda: not engine._worker._threads & set(threading.enumerate()))


# In episodes


class Paced(Echo):
    """Answers after a delay that differs from run to run."""

    limits = Limits(turns=3, turn_tokens=12, bad_calls=99)
    delays = random.Random(0)

    async def setup(self) -> None:
        await asyncio.sleep(self.delays.random() * 0.02)

    async def on_text(self, message):
        from agentrl.env import Step
        from agentrl.types import Message

        await asyncio.sleep(self.delays.random() * 0.02)
        return Step((Message.user("more"),))


def test_synchronous_episodes_do_not_depend_on_arrival(model, chat):
    def run(delay_seed: int):
        Paced.delays = random.Random(delay_seed)
        engine = transformers_engine(model, chat, synchronous=True)
        stops = TransformersEngine(
            model, chat.stop_ids | frozenset(range(0, 320, 9)), synchronous=True
        )
        asyncio.run(engine.close())
        policy = TokenPolicy(
            stops, Chat(load_tokenizer(tiny_model_folder()), stop_ids=range(0, 320, 9))
        )
        with rollouts(
            Paced, policy, seed=5, deterministic=True, group_size=2, concurrency=6
        ) as playing:
            groups = playing.gather(
                [make_task(f"t{i}", instruction=f"do {i}") for i in range(5)], 0
            )
            playing.run(stops.close())
        return [(e.key, e.end, e.trajectories) for group in groups for e in group.episodes]

    first = run(1)
    assert first == run(2) == run(3)  # bit for bit, log-probabilities included
    assert max(len(branches[0].segments) for _, _, branches in first) > 3


def test_synchronous_batches_hold_the_same_rows_in_the_same_order(model, chat):
    def run(order):
        engine = transformers_engine(model, chat, synchronous=True)
        engine._max_batch, batches, answer = 4, [], engine._sample

        def watched(rows):
            batches.append([(row.seed, row.sampling.temperature) for row in rows])
            return answer(rows)

        async def one(index):
            with engine.seat():
                await asyncio.sleep(0.001 * order.index(index))
                sampling = Sampling(temperature=1.0 + index % 2, max_tokens=2)
                return await engine.generate([5] * (1 + index % 3), sampling, seed=index)

        async def everyone():
            return await asyncio.gather(*map(one, range(10)))

        engine._sample = watched
        outs = asyncio.run(everyone())
        asyncio.run(engine.close())
        return outs, batches

    first = run(list(range(10)))
    assert first == run([3, 1, 4, 0, 5, 9, 2, 6, 8, 7]) and sorted(map(len, first[1])) == [
        1,
        1,
        4,
        4,
    ]


def test_engine_failures_end_episodes_and_the_run_goes_on(model, chat):
    engine = transformers_engine(model, chat)
    answer, calls = engine._sample, []

    def flaky(rows):
        calls.append(len(rows))
        if len(calls) <= 6:  # two batches of two, and each of their rows alone
            raise RuntimeError("the device fell off")
        return answer(rows)

    engine._sample = flaky
    with rollouts(
        Echo, TokenPolicy(engine, chat, Sampling(max_tokens=4)), retries=1, concurrency=2
    ) as playing:
        groups = playing.gather([make_task(f"t{i}") for i in range(6)], 0)
        playing.run(engine.close())
    ends = [group.episodes[0].end for group in groups]
    assert ends.count(EndReason.ENGINE_ERROR) == 2 and groups[0].episodes[0].key.attempt == 1
    assert "the device fell off" in groups[0].episodes[0].failure
    assert all(group.episodes[0].score.value is not None for group in groups[2:])


def test_a_paused_engine_lets_requests_wait(engine):
    async def play():
        engine.pause()
        waiting = asyncio.ensure_future(engine.generate([5, 6], Sampling(max_tokens=4), seed=1))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        threading.Thread(target=engine.resume).start()
        return await waiting

    assert asyncio.run(play()) == sample(engine, [[5, 6]], Sampling(max_tokens=4), seeds=[1])[0]


def test_aborted_requests_end_with_an_error_and_later_ones_are_served(engine):
    async def play():
        engine.pause()
        works = [engine.generate([5, 6], Sampling(max_tokens=4), seed=n) for n in range(3)]
        waiting = [asyncio.ensure_future(work) for work in works]
        await asyncio.sleep(0.05)
        threading.Thread(target=engine.abort).start()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        engine.resume()
        return ended, await engine.generate([5, 6], Sampling(max_tokens=4), seed=1)

    ended, after = asyncio.run(play())
    assert [str(error) for error in ended] == ["the request was aborted"] * 3
    assert {type(error) for error in ended} == {EngineAborted}
    assert len(after.ids) > 0


def test_a_batch_that_runs_can_be_aborted(model, chat):
    engine = transformers_engine(model, chat)
    begun = threading.Event()

    def slowly(module, args, output):
        begun.set()
        time.sleep(0.02)

    hook = model.register_forward_hook(slowly)

    async def play():
        long = Sampling(max_tokens=120, temperature=50.0)
        work = asyncio.ensure_future(engine.generate([5, 6], long, seed=3))
        await asyncio.to_thread(begun.wait)
        engine.abort()
        with pytest.raises(EngineError, match="aborted"):
            await work

    asyncio.run(play())
    hook.remove()
    asyncio.run(engine.close())


def test_pause_and_abort_reach_what_was_taken_but_not_begun(model, chat):
    """Requests of other temperatures and over-long queues are batches of their own."""
    engine = transformers_engine(model, chat)
    begun = threading.Event()
    hook = model.register_forward_hook(lambda *_: begun.set())

    async def play():
        works = [
            asyncio.ensure_future(
                engine.generate([5, 6], Sampling(temperature=t, max_tokens=60), seed=1)
            )
            for t in (40.0, 50.0, 60.0)
        ]
        await asyncio.to_thread(begun.wait)
        engine.pause()
        await works[0]
        await asyncio.sleep(0.1)
        assert [work.done() for work in works] == [True, False, False]
        engine.abort()
        ended = await asyncio.gather(*works[1:], return_exceptions=True)
        assert [type(error) for error in ended] == [EngineAborted, EngineAborted]
        engine.resume()
        return await engine.generate([5, 6], Sampling(max_tokens=4), seed=1)

    assert asyncio.run(play()).ids
    hook.remove()
    asyncio.run(engine.close())


def test_a_batch_that_fails_is_sampled_row_by_row(engine, monkeypatch):
    """A prompt that does not fit beside others fails none of them."""
    whole = engine._sample

    def crowded(rows):
        if len(rows) > 1 or rows[0].prompt_ids == (9, 9):
            raise RuntimeError("out of memory")
        return whole(rows)

    monkeypatch.setattr(engine, "_sample", crowded)

    async def play():
        prompts = ([5, 6], [9, 9], [7, 8])
        works = [engine.generate(ids, Sampling(max_tokens=4), seed=1) for ids in prompts]
        return await asyncio.gather(*works, return_exceptions=True)

    first, failed, last = asyncio.run(play())
    assert first.ids and last.ids and isinstance(failed, EngineError)
