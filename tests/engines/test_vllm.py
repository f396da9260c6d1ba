"""The vLLM engine on a real vLLM: every draw, its log-probability, and whose weights it is of."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from conftest import require
from helpers import REPO
from vllm_cases import Vllm, gap, prompts_of

from agentrl.engines.base import Sampling
from agentrl.errors import EngineAborted, EngineError
from agentrl.trainers.models.weights import PolicyWeights


@pytest.fixture
def at_first(vllm: Vllm):
    """The engine with the weights of its folder, whatever an earlier test loaded."""
    vllm.load(vllm.model, 0)
    vllm.engine.metrics()
    return vllm


@pytest.fixture
def slow(at_first, monkeypatch):
    """The same with steps so slow that requests are met while they run."""
    step = at_first.engine._core.step

    def slowly():
        time.sleep(0.02)
        return step()

    monkeypatch.setattr(at_first.engine._core, "step", slowly)
    return at_first


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_logprobs_are_those_of_a_full_forward_pass(at_first, temperature):
    """Rows of many lengths in one continuous batch."""
    prompts = prompts_of(12)
    answers = at_first.sample(prompts, Sampling(temperature, max_tokens=40))
    assert gap(at_first.model, prompts, answers, temperature) < 1e-5
    assert {answer.version for answer in answers} == {0}


def test_truncated_sampling_has_the_logprobs_of_what_is_left(at_first):
    """Evaluations may cut the distribution: what is left sums to one."""
    prompts = [[7, 8, 9]] * 64
    answers = at_first.sample(prompts, Sampling(top_k=3, max_tokens=1))
    seen = {answer.ids[0]: answer.logprobs[0] for answer in answers}
    assert len(seen) == 3
    assert abs(sum(torch.tensor(list(seen.values())).exp()) - 1) < 1e-5


def test_greedy_takes_the_most_likely(at_first):
    (prompt,) = prompts_of(1)
    (answer,) = at_first.sample([prompt], Sampling(temperature=0, max_tokens=8))
    with torch.inference_mode():
        logits_TV = at_first.model(torch.tensor([[*prompt, *answer.ids]])).logits[0]
    assert logits_TV[len(prompt) - 1 : -1].argmax(-1).tolist() == list(answer.ids)
    assert answer.logprobs == (0.0,) * len(answer.ids)


def test_a_row_depends_on_its_seed_alone(at_first):
    prompts = prompts_of(8, seed=2)
    sampling, seeds = Sampling(max_tokens=24), list(range(100, 108))
    together = at_first.sample(prompts, sampling, seeds)
    for place in (3, 0, 7):
        (alone,) = at_first.sample([prompts[place]], sampling, [seeds[place]])
        assert alone.ids == together[place].ids
    assert together[0].ids != at_first.sample(prompts[:1], sampling, [7])[0].ids


def test_a_stop_token_ends_the_turn_and_belongs_to_it(at_first):
    stops = at_first.chat.stop_ids
    answers = at_first.sample(prompts_of(60, seed=5), Sampling(2.0, max_tokens=40))
    ended = [answer for answer in answers if answer.finish == "stop"]
    assert ended
    for answer in answers:
        assert not stops & set(answer.ids[:-1])
        assert (answer.finish == "stop") == (answer.ids[-1] in stops)
        assert answer.finish == "stop" or len(answer.ids) == 40


def test_ten_updates_are_each_seen_and_no_old_key_is_read(at_first):
    """The prompt is as long as several blocks, so the cache would serve it. Without a restart."""
    (prompt,) = prompts_of(1, seed=6, low=300, high=300)
    thread, before = at_first.engine._thread, ()
    for version in range(1, 11):
        moved = at_first.moved(version)
        at_first.load(moved, version)
        answers = at_first.sample([prompt] * 3, Sampling(max_tokens=12))
        assert gap(moved, [prompt] * 3, answers) < 1e-4
        assert {answer.version for answer in answers} == {version}
        assert answers[0].logprobs != before
        before = answers[0].logprobs
    assert at_first.engine._thread is thread


def test_the_cache_serves_one_version_and_is_measured(at_first):
    (prompt,) = prompts_of(1, seed=7, low=300, high=300)
    at_first.sample([prompt], Sampling(max_tokens=2))
    at_first.engine.metrics()
    at_first.sample([prompt], Sampling(max_tokens=2))
    again = at_first.engine.metrics()
    assert again["engine/prefix_hit_rate"] > 0.8
    assert 0 < again["engine/kv_use_max"] < 1
    assert again["engine/running_max"] == 1
    assert again["engine/preemptions"] == again["engine/waiting_max"] == 0
    at_first.load(at_first.model, 1)
    at_first.sample([prompt], Sampling(max_tokens=2))
    assert at_first.engine.metrics()["engine/prefix_hit_rate"] == 0


def test_a_load_waits_for_what_runs(slow):
    """The answer under way keeps its weights and its version; the next one has the new ones."""
    moved = slow.moved(1)

    async def play():
        long = Sampling(2.0, max_tokens=200)
        running = asyncio.ensure_future(slow.engine.generate([5, 6], long, seed=3))
        await asyncio.sleep(0.05)
        load = asyncio.ensure_future(asyncio.to_thread(slow.engine.load, PolicyWeights(moved), 5))
        old = await running
        await load
        return old, await slow.engine.generate([5, 6], Sampling(max_tokens=4), seed=3)

    old, new = asyncio.run(play())
    assert (old.version, new.version) == (0, 5)
    assert gap(slow.model, [[5, 6]], [old], 2.0) < 1e-5
    assert gap(moved, [[5, 6]], [new]) < 1e-4


def test_a_paused_engine_lets_requests_wait(at_first):
    async def play():
        at_first.engine.pause()
        asked = at_first.engine.generate([5, 6], Sampling(max_tokens=4), seed=1)
        waiting = asyncio.ensure_future(asked)
        await asyncio.sleep(0.2)
        assert not waiting.done()
        threading.Thread(target=at_first.engine.resume).start()
        return await waiting

    assert asyncio.run(play()) == at_first.sample([[5, 6]], Sampling(max_tokens=4), [1])[0]


def test_what_waits_and_what_runs_can_be_aborted(slow):
    async def play():
        long = Sampling(2.0, max_tokens=400)
        running = [
            asyncio.ensure_future(slow.engine.generate([5, n + 6], long, seed=n)) for n in range(3)
        ]
        await asyncio.sleep(0.1)
        slow.engine.pause()
        waiting = asyncio.ensure_future(slow.engine.generate([5], Sampling(max_tokens=4), seed=0))
        await asyncio.sleep(0.05)
        slow.engine.abort()
        ended = await asyncio.gather(*running, waiting, return_exceptions=True)
        slow.engine.resume()
        return ended, await slow.engine.generate([5, 6], Sampling(max_tokens=4), seed=1)

    ended, after = asyncio.run(play())
    assert {type(error) for error in ended} == {EngineAborted}
    assert after.ids


def test_a_cancelled_request_leaves_the_batch(slow):
    async def play():
        long = Sampling(2.0, max_tokens=500)
        gone = asyncio.ensure_future(slow.engine.generate([5, 6], long, seed=3))
        await asyncio.sleep(0.1)
        gone.cancel()
        kept = await slow.engine.generate([8], Sampling(max_tokens=3), seed=9)
        return kept, dict(slow.engine._running)

    kept, running = asyncio.run(play())
    assert kept.ids and not running


@pytest.mark.parametrize("prompt", [[], [-1], [10**6]])
def test_a_bad_prompt_fails_alone(at_first, prompt):
    async def run():
        good = at_first.engine.generate([5, 6], Sampling(max_tokens=3), seed=0)
        bad = at_first.engine.generate(prompt, Sampling(max_tokens=3), seed=0)
        return await asyncio.gather(good, bad, return_exceptions=True)

    good, bad = asyncio.run(run())
    assert good.ids and isinstance(bad, EngineError)


def test_what_vllm_cannot_do_is_said_in_one_sentence(at_first):
    with pytest.raises(EngineError, match="exceed the context length 512"):
        at_first.sample([[5] * 510], Sampling(max_tokens=3))
    for temperature in (0.001, 3.0):
        with pytest.raises(EngineError, match=f"temperature={temperature}"):
            at_first.sample([[5]], Sampling(temperature, max_tokens=3))


def test_a_failed_step_fails_only_the_request_that_fails_alone_too(at_first, monkeypatch):
    core = at_first.engine._core
    model_step = core.step

    def step():
        named = at_first.engine._running.values()
        if any(request.prompt_ids == (9, 9) for request in named):
            raise RuntimeError("out of memory")
        return model_step()

    monkeypatch.setattr(core, "step", step)

    async def play():
        prompts = ([5, 6], [9, 9], [7, 8])
        asked = [at_first.engine.generate(ids, Sampling(max_tokens=4), seed=1) for ids in prompts]
        return await asyncio.gather(*asked, return_exceptions=True)

    first, failed, last = asyncio.run(play())
    assert first.ids and last.ids
    assert isinstance(failed, EngineError) and "out of memory" in str(failed)


def test_it_is_a_guest_in_this_process(at_first):
    """vLLM would replace this function, and tell our sandboxes what to load first."""
    assert torch.set_num_threads.__module__ != "vllm.v1.worker.cpu_worker"
    assert "LD_PRELOAD" not in os.environ


@pytest.mark.long
def test_200_episodes_of_three_templates_have_the_trainers_logprobs():
    """Of several turns each, one template of a model that thinks, in a process of their own."""
    require("vllm")
    words = [sys.executable, "-m", "benchmarks.experiments.engine_parity", "vllm", "200"]
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["episodes"] for row in rows] == [200] * 3
    assert min(row["turns"] for row in rows) > 1.5
    assert max(row["gap_max"] for row in rows) < 1e-3
    assert max(row["batch_gap_max"] for row in rows) < 1e-3
