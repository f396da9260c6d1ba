"""The transformers engine on a real tiny model: every draw, its log-probability, and what may not
change either.
"""

import asyncio
import math
import random
import shutil

import pytest
import torch
from engine_cases import full_logprobs, sample
from helpers import tiny_model_folder
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentrl.engines.base import Sampling
from agentrl.engines.loading import load_critic, load_model, load_tokenizer, transformers_engine
from agentrl.engines.transformers import TransformersEngine, draw
from agentrl.errors import ConfigError
from agentrl.trainers.models.weights import PolicyWeights


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


def test_loaded_weights_have_memory_of_their_own():
    """At addresses that are no multiple of 64 kernels round differently on some processors."""
    model = load_model(tiny_model_folder())
    assert {tensor.data_ptr() % 64 for tensor in (*model.parameters(), *model.buffers())} == {0}
    critic = load_critic(tiny_model_folder())
    assert {tensor.data_ptr() % 64 for tensor in critic.parameters()} == {0}
