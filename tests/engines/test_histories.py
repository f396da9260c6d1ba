"""Keys and values that are kept between turns: the same probabilities, fewer tokens computed, and
never those of other weights.
"""

import asyncio
import random

import pytest
import torch
from helpers import tiny_model_folder
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from agentrl.engines.base import Sampling
from agentrl.engines.growing import Histories
from agentrl.engines.loading import load_model
from agentrl.engines.transformers import TransformersEngine
from agentrl.trainers.models.weights import PolicyWeights

TURNS, TOKENS = 4, 8


@pytest.fixture
def model():
    return load_model(tiny_model_folder())


SHAPE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
NEO = ("vocab_size", "hidden_size", "max_position_embeddings", "bos_token_id", "eos_token_id")
SCALED = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


def mistral():
    return MistralForCausalLM(MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=16))


def gemma():
    return GemmaForCausalLM(GemmaConfig(**SHAPE, num_key_value_heads=1, head_dim=8))


def gpt_neo():
    """Every other layer looks back over eight columns of the batch, whatever stands in them."""
    shape = {name: SHAPE[name] for name in NEO}
    kinds = [[["global", "local"], 1]]
    config = GPTNeoConfig(**shape, num_layers=2, num_heads=4, attention_types=kinds, window_size=8)
    return GPTNeoForCausalLM(config)


def phi3():
    """Rows of more than 512 tokens have other keys from their first token on."""
    shape = SHAPE | {"max_position_embeddings": 2048, "original_max_position_embeddings": 512}
    return Phi3ForCausalLM(Phi3Config(**shape, num_key_value_heads=2, rope_scaling=SCALED))


def gap(model, prompt, out, temperature=1.0):
    """Of the sampled log-probabilities to those of one pass over the whole row."""
    with torch.inference_mode():
        logits_TV = model(torch.tensor([[*prompt, *out.ids]])).logits[0].double() / temperature
    logprobs_TV = logits_TV.log_softmax(-1)[len(prompt) - 1 : -1]
    expected = logprobs_TV.gather(-1, torch.tensor(out.ids)[:, None])[:, 0]
    return float((expected - torch.tensor(out.logprobs)).abs().max())


async def play(engine, episodes, turns=TURNS, between=lambda turn: None):
    """Prompts and generations of some episodes whose observations have many lengths."""
    rng = random.Random(0)
    prompts = [[rng.randrange(5, 300) for _ in range(rng.randint(3, 40))] for _ in range(episodes)]
    prompts[1] = list(prompts[0])
    played = []
    for turn in range(turns):
        jobs = [
            engine.generate(prompt, Sampling(max_tokens=TOKENS - index % 3), seed=turn * 99 + index)
            for index, prompt in enumerate(prompts)
        ]
        outs = await asyncio.gather(*jobs)
        played += zip(map(tuple, prompts), outs, strict=True)
        for prompt, out in zip(prompts, outs, strict=True):
            prompt += [*out.ids, *(rng.randrange(5, 300) for _ in range(rng.randint(1, 9)))]
        between(turn)
    return played


def played_with(engine, episodes=6, between=lambda turn: None):
    async def run():
        with engine.seat():
            played = await play(engine, episodes, between=between)
        assert not len(engine.histories)
        await engine.close()
        return played

    return asyncio.run(run())


def computed(model, counts):
    return model.register_forward_pre_hook(
        lambda module, args, kwargs: counts.append(kwargs["input_ids"].numel()), with_kwargs=True
    )


@pytest.mark.parametrize("make", [None, gemma, gpt_neo, mistral, phi3])
def test_a_turn_computes_its_new_tokens_and_says_what_a_full_pass_says(model, make):
    torch.manual_seed(0)
    model = make().eval() if make else model
    stop = frozenset(range(0, 300, 20))
    totals = []
    for history_mb in (0, 64):
        counts = []
        hook = computed(model, counts)
        played = played_with(TransformersEngine(model, stop, history_mb=history_mb))
        hook.remove()
        assert max(gap(model, prompt, out) for prompt, out in played) < 1e-5
        totals.append(sum(counts))
    if make in (mistral, phi3):  # the one forgets tokens, the other's keys change: nothing is kept
        assert totals[1] == totals[0]
    else:
        assert totals[1] < 0.6 * totals[0]


def test_a_history_takes_the_place_of_the_one_it_goes_on_from(model):
    kept = []
    engine = TransformersEngine(model, frozenset())
    played_with(engine, between=lambda turn: kept.append(len(engine.histories)))
    assert kept == [6] * TURNS


def test_weights_that_change_without_a_word_leave_no_old_history(model):
    """Sampling from the trained module itself: an optimizer step that nobody announced."""
    step = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)  # no version counter moves

    def train(turn):
        model(torch.tensor([[5, 6, 7, 8]])).logits.square().mean().backward()
        step.step()
        step.zero_grad()

    rows = []

    def between(turn):
        rows.append(len(engine.histories))
        train(turn)

    async def run():
        with engine.seat():
            prompt = [5, 6, 7]
            for turn in range(3):
                out = await engine.generate(prompt, Sampling(max_tokens=4), seed=turn)
                assert gap(model, prompt, out) < 1e-5
                prompt += [*out.ids, 9]
                between(turn)
        await engine.close()

    engine = TransformersEngine(model, frozenset())
    asyncio.run(run())
    assert rows == [1, 1, 1]


def test_load_forgets(model):
    async def run():
        with engine.seat():
            await engine.generate([5, 6, 7], Sampling(max_tokens=4), seed=0)
            assert len(engine.histories) == 1
            engine.load(PolicyWeights(model), 1)
            assert len(engine.histories) == 0
        await engine.close()

    engine = TransformersEngine(model, frozenset())
    asyncio.run(run())


def test_memory_stays_below_its_limit(model):
    """A history of 1,000 tokens takes 0.25 MB here; the one used longest ago goes first."""
    histories = Histories(model, limit_mb=1)
    layer = torch.zeros(1000, 2, 8)

    def keep(first):
        cache = histories.as_cache([None], [0])[0]
        for number in range(model.config.num_hidden_layers):
            cache.update(layer.transpose(0, 1)[None], layer.transpose(0, 1)[None], number)
        histories.keep([first, *range(999)], cache, 0, torch.ones(1000), None)

    size = 2 * model.config.num_hidden_layers * layer.nbytes
    room = 2**20 // size
    for first in range(room):
        keep(first)
    assert histories.before([0, *range(999), 1]).ids[0] == 0  # used, so it stays
    keep(room)
    assert len(histories) == room
    assert histories.before([0, *range(999), 1]) is not None
    assert histories.before([1, *range(999), 1]) is None
    assert histories.before([0, *range(999)]) is None  # one token must be left to compute
