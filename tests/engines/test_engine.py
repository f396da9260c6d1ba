"""The transformers engine on a real tiny model: every draw, its log-probability, and what may not
change either.
"""

import asyncio
import math
import random
import shutil
import threading
import time

import pytest
import torch
from helpers import Echo, make_task, rollouts, tiny_model_folder, wait_for
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentrl.chat.tokens import Chat
from agentrl.engines.base import Sampling
from agentrl.engines.loading import load_critic, load_model, load_tokenizer, transformers_engine
from agentrl.engines.transformers import TransformersEngine, draw
from agentrl.errors import ConfigError, EngineAborted, EngineError
from agentrl.policies.base import TokenPolicy
from agentrl.trainers.models.weights import PolicyWeights
from agentrl.types import EndReason, Limits


@pytest.fixture(scope="module")
def model():
    return load_model(tiny_model_folder())


@pytest.fixture(scope="module")
def chat():
    return Chat(load_tokenizer(tiny_model_folder()))


@pytest.fixture
def engine(model, chat):
    made = transformers_engine(model, chat)
    yield made
    asyncio.run(made.close())


def sample(engine, prompts, sampling, seeds=None):
    async def run():
        seeds_ = seeds or range(len(prompts))
        jobs = (engine.generate(p, sampling, seed=s) for p, s in zip(prompts, seeds_, strict=True))
        return await asyncio.gather(*jobs)

    return asyncio.run(run())


def test_a_model_whose_text_config_is_nested_samples():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {"vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    text |= {"num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 16}
    text |= {"max_position_embeddings": 40}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 1, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1)
    engine = TransformersEngine(Gemma3ForConditionalGeneration(config).eval(), frozenset({96}))
    assert engine.context_length == 40
    (found,) = sample(engine, [[3, 4, 5]], Sampling(max_tokens=2))
    assert len(found.ids) == 2
    asyncio.run(engine.close())


def test_the_output_layer_of_a_half_precise_model_sums_in_float32():
    model = load_model(tiny_model_folder(), dtype=torch.bfloat16)
    states = torch.randn(1, 3, model.config.hidden_size, dtype=torch.bfloat16)
    expected = states.float() @ model.lm_head.weight.float().T
    assert torch.equal(model.lm_head(states), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model.lm_head(states), expected)
    plain = load_model(tiny_model_folder())
    states = states.float()
    assert torch.equal(plain.lm_head(states), states @ plain.lm_head.weight.T)


def prompts_of(count: int, seed: int = 0, low: int = 1, high: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 300) for _ in range(rng.randint(low, high))] for _ in range(count)]


def full_logprobs(model, prompt, ids, temperature):
    """Log-softmax of one forward pass over the whole row, without cache, batch or padding."""
    with torch.inference_mode():
        logits_TV = model(torch.tensor([[*prompt, *ids]])).logits[0].double() / temperature
    return logits_TV.log_softmax(-1)[len(prompt) - 1 : -1].gather(-1, torch.tensor(ids)[:, None])[
        :, 0
    ]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_logprobs_are_those_of_a_full_forward_pass(engine, model, temperature):
    """Rows of many lengths that stop at different times: padding, cache and dropped rows change no
    probability.
    """
    prompts = prompts_of(12)
    for prompt, out in zip(
        prompts, sample(engine, prompts, Sampling(temperature, max_tokens=40)), strict=True
    ):
        expected = full_logprobs(model, prompt, out.ids, temperature)
        assert (expected - torch.tensor(out.logprobs)).abs().max() < 1e-5
        assert out.version == 0


def test_rows_stop_on_their_own(model):
    """With a third of the vocabulary as stop tokens rows end early, at different steps; each as if
    it were alone.
    """
    stops = frozenset(range(0, 300, 3))
    many = TransformersEngine(model, stops)
    prompts = prompts_of(16, seed=1)
    together = sample(many, prompts, Sampling(max_tokens=12))
    alone = [
        sample(many, [p], Sampling(max_tokens=12), [seed])[0] for seed, p in enumerate(prompts)
    ]
    asyncio.run(many.close())
    assert [out.ids for out in together] == [out.ids for out in alone]
    assert len({len(out.ids) for out in together}) > 3
    for out in together:
        assert not stops & set(out.ids[:-1])
        assert out.finish == ("stop" if out.ids[-1] in stops else "length")
        assert out.finish == "stop" or len(out.ids) == 12
    for left, right in zip(together, alone, strict=True):
        assert max(abs(a - b) for a, b in zip(left.logprobs, right.logprobs, strict=True)) < 1e-5


def test_a_row_depends_on_its_seed_alone(engine):
    prompts = prompts_of(16, seed=2)
    sampling = Sampling(max_tokens=24)
    seeds = list(range(100, 116))
    together = sample(engine, prompts, sampling, seeds)
    order = random.Random(0).sample(range(16), 16)
    shuffled = sample(engine, [prompts[i] for i in order], sampling, [seeds[i] for i in order])
    for place, index in enumerate(order):
        alone = sample(engine, [prompts[index]], sampling, [seeds[index]])[0]
        assert together[index].ids == alone.ids == shuffled[place].ids
    assert together[0].ids != sample(engine, prompts[:1], sampling, [7])[0].ids


def test_limits_of_rows_differ_within_a_batch(engine):
    async def run():
        prompts = prompts_of(6, seed=3)
        return await asyncio.gather(
            *(engine.generate(p, Sampling(max_tokens=n), seed=n) for n, p in enumerate(prompts, 1))
        )

    outs = asyncio.run(run())
    assert [len(out.ids) for out in outs if out.finish == "length"] == [
        n for n, out in enumerate(outs, 1) if out.finish == "length"
    ]


def test_greedy_takes_the_most_likely(engine, model):
    prompt = prompts_of(1)[0]
    out = sample(engine, [prompt], Sampling(temperature=0, max_tokens=8))[0]
    with torch.inference_mode():
        logits_TV = model(torch.tensor([[*prompt, *out.ids]])).logits[0]
    assert logits_TV[len(prompt) - 1 : -1].argmax(-1).tolist() == list(out.ids)
    assert out.logprobs == (0.0,) * len(out.ids)


# draw


def test_draws_follow_the_distribution():
    """Chi-square against the softmax: 7 degrees of freedom, so 24.3 is passed by chance once in a
    thousand.
    """
    logits_V = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -30.0, 1.5, -0.5, 0.2])
    for temperature in (0.6, 1.0, 1.3):
        u_B = torch.rand(40_000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        tokens_B, logprobs_B = draw(logits_V.expand(len(u_B), -1), u_B, Sampling(temperature))
        expected_V = (logits_V.double() / temperature).softmax(-1)
        counts_V = torch.bincount(tokens_B, minlength=len(logits_V)).double()
        likely = expected_V > 1e-4
        assert counts_V[~likely].sum() == 0
        chi2 = ((counts_V - len(u_B) * expected_V) ** 2 / (len(u_B) * expected_V))[likely].sum()
        assert chi2 < 24.3
        assert torch.allclose(logprobs_B.double(), expected_V.log()[tokens_B], atol=1e-6)


@example([0.0, 4.9e-155], 0.1, 0, 1.0)
@given(
    st.lists(st.floats(-30, 30), min_size=1, max_size=12),
    st.sampled_from([1.0, 0.95, 0.5, 0.1, 1e-9]),
    st.integers(0, 14),
    st.floats(0.1, 3.0),
)
@settings(max_examples=60, deadline=None)
def test_excluded_tokens_are_never_drawn(logits, top_p, top_k, temperature):
    logits_V = torch.tensor(logits)
    u_B = torch.cat(
        [
            torch.linspace(0, 1, 60, dtype=torch.float64)[:-1],
            torch.tensor([1 - 2**-53, 0.0]).double(),
        ]
    )
    sampling = Sampling(temperature, top_p, top_k)
    tokens_B, logprobs_B = draw(logits_V.expand(len(u_B), -1), u_B, sampling)
    p_V = (logits_V / temperature).softmax(-1)
    ranked = sorted(
        range(len(logits)), key=lambda token: -float(logits_V[token])
    )  # as float32, where ties are ties
    floor = logits_V[ranked[top_k - 1]] if 0 < top_k <= len(logits) else -math.inf
    allowed = {token for token in ranked if logits_V[token] >= floor}
    mass = float(sum(p_V[token] for token in allowed))
    before, nucleus = 0.0, set()
    for token in (token for token in ranked if token in allowed):
        if before < top_p * mass + 1e-4:  # ties and rounding at the edge are nobody's fault
            nucleus.add(token)
        before += float(p_V[token])
    assert set(tokens_B.tolist()) <= nucleus
    assert torch.isfinite(logprobs_B).all() and (logprobs_B <= 1e-6).all()


def test_the_edges_of_the_unit_interval_are_safe():
    logits_BV = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).expand(3, -1)
    tokens_B, _ = draw(
        logits_BV, torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64), Sampling()
    )
    assert tokens_B.tolist() == [1, 1, 1]


# Requests


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


def test_training_mode_and_version_are_respected(engine, model):
    model.train()
    engine.load(PolicyWeights(model), 7)
    out = sample(engine, [[5, 6]], Sampling(max_tokens=5))[0]
    assert out.version == 7 and model.training
    model.eval()


def test_weights_of_another_module_are_taken_over(chat):
    ours, theirs = load_model(tiny_model_folder()), load_model(tiny_model_folder())
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.mul_(1.5)
    engine = transformers_engine(ours, chat)
    before = sample(engine, [[5, 6, 7]], Sampling(max_tokens=20))[0]
    engine.load(PolicyWeights(theirs), 1)
    after = sample(engine, [[5, 6, 7]], Sampling(max_tokens=20))[0]
    assert after.logprobs != before.logprobs
    assert (
        full_logprobs(theirs, [5, 6, 7], after.ids, 1.0) - torch.tensor(after.logprobs)
    ).abs().max() < 1e-5
    asyncio.run(engine.close())


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


# Folders


def test_every_wrong_folder_has_its_sentence(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_model(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_model(tmp_path)
    with pytest.raises(ConfigError, match="no tokenizer"):
        load_tokenizer(tmp_path)
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model_folder(), broken)
    (broken / "model.safetensors").write_bytes(b"x" * 100)
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"the model of folder .* cannot be loaded"):
        load_model(broken)
    with pytest.raises(ConfigError, match=r"the tokenizer of folder .* cannot be loaded"):
        load_tokenizer(broken)
    (broken / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(broken)


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


def test_loaded_weights_have_memory_of_their_own():
    """At addresses that are no multiple of 64 kernels round differently on some processors."""
    model = load_model(tiny_model_folder())
    assert {tensor.data_ptr() % 64 for tensor in (*model.parameters(), *model.buffers())} == {0}
    critic = load_critic(tiny_model_folder())
    assert {tensor.data_ptr() % 64 for tensor in critic.parameters()} == {0}


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
