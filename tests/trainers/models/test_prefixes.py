"""Common beginnings are computed once, and nothing else changes: values, gradients, and who is
refused.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_cases import tiny_model
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
)

from agentrl.trainers.models import prefixes, scoring
from agentrl.trainers.models.prefixes import plant, takes_trees
from agentrl.trainers.models.scoring import token_logprobs

SMALL = {"vocab_size": 70, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TREE = [[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 9], [5, 6, 7, 8, 1, 2], [30, 31], [5, 6, 9, 4]]


def asked(rows, wanted=None):
    """Right-padded rows; wanted are the tokens behind the first, or those at these places."""
    width = max(map(len, rows))
    ids = [row + [0] * (width - len(row)) for row in rows]
    mask = [
        [0 < t < len(row) and (wanted is None or t in wanted[number]) for t in range(width)]
        for number, row in enumerate(rows)
    ]
    return SimpleNamespace(ids_BT=torch.tensor(ids), mask_BT=torch.tensor(mask))


def by_rows(monkeypatch, model, batch):
    """What the same function says where no tree is planted."""
    with monkeypatch.context() as patch:
        patch.setattr(scoring, "takes_trees", lambda model: False)
        return token_logprobs(model, batch)


def test_a_tree_by_hand():
    trees = plant(torch.tensor([[1, 2, 3], [1, 2, 4], [1, 2, 0]]), torch.tensor([3, 3, 2]), 10**6)
    assert trees.ids_NS.tolist() == [[1, 2, 3, 4]]
    assert trees.positions_NS.tolist() == [[0, 1, 2, 2]]
    assert trees.place_BT.tolist() == [[0, 1, 2], [0, 1, 3], [0, 1, 0]]
    assert trees.mask_N1SS[0, 0].int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [1, 1, 0, 1],
    ]


def test_rows_stay_rows_where_a_tree_costs_more():
    apart = torch.arange(64).view(4, 16)
    assert plant(apart, torch.full((4,), 16), 10**6) is None
    short_beginning = torch.cat([torch.zeros(4, 1, dtype=torch.long), apart], 1)
    assert plant(short_beginning, torch.full((4,), 17), 1) is None, "attention costs more"


def test_a_row_that_is_longer_than_any_tree_leaves_all_as_rows(monkeypatch):
    """Its mask would be as large as the square of its length, for every tree beside it."""
    rows = torch.zeros(5, 16, dtype=torch.long)
    lengths = torch.tensor([16, 8, 8, 8, 8])
    assert plant(rows, lengths, 10**6) is not None
    rows[0] = 1
    monkeypatch.setattr(prefixes, "LARGEST", 15)
    assert plant(rows, lengths, 10**6) is None


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(1, 3), min_size=2, max_size=9), min_size=2, max_size=7),
    wanted=st.lists(st.sets(st.integers(1, 8), min_size=1), min_size=7, max_size=7),
)
def test_values_and_gradients_are_those_of_rows(rows, wanted):
    model, batch = tiny_model(), asked(rows, wanted)
    if not batch.mask_BT.any():
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "hidden_size", lambda model: 10**6)  # wherever that can be
        ours = token_logprobs(model, batch, entropy="gradient")
        patch.setattr(scoring, "takes_trees", lambda model: False)
        theirs = token_logprobs(model, batch, entropy="gradient")
    torch.testing.assert_close(ours.logprobs_BT, theirs.logprobs_BT, atol=2e-5, rtol=1e-5)
    gradients = []
    for said in (ours, theirs):
        model.zero_grad()
        (said.logprobs_BT.sum() + 0.3 * said.entropy_BT.sum()).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


@pytest.mark.bit_equal
def test_gradients_of_shared_states_add_up_in_one_order():
    """Enough tokens that torch divides the sum among its threads."""
    model = tiny_model()
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(1, 90, (20,), generator=generator).tolist()
    said = torch.randint(1, 90, (256, 8), generator=generator).tolist()
    answers = range(len(prompt), len(prompt) + 8)
    batch = asked([prompt + row for row in said], [answers] * len(said))
    pulls_BT = torch.randn(batch.mask_BT.shape, generator=generator)
    threads, found = torch.get_num_threads(), set[bytes]()
    torch.set_num_threads(2)
    try:
        for _ in range(20):
            model.zero_grad()
            token_logprobs(model, batch).logprobs_BT.mul(pulls_BT).sum().backward()
            found.add(model.model.norm.weight.grad.numpy().tobytes())
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1


def test_the_model_reads_fewer_tokens(monkeypatch):
    model, batch = tiny_model(), asked([[*range(1, 40), last, 9] for last in range(40, 48)])
    seen = []
    model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: seen.append(inputs[0].numel())
    )
    token_logprobs(model, batch)
    assert seen[-1] == 39 + 8, "the last token of a row is predicted, and not read"
    by_rows(monkeypatch, model, batch)
    assert seen[-1] == 8 * 41


@pytest.mark.parametrize(
    ("config", "takes"),
    [
        (Qwen2Config(**SMALL, intermediate_size=32, num_key_value_heads=1), True),
        (LlamaConfig(**SMALL, intermediate_size=32), True),
        (GPT2Config(vocab_size=70, n_embd=16, n_layer=2, n_head=2), True),
        (
            MistralConfig(**SMALL, intermediate_size=32, num_key_value_heads=1, sliding_window=8),
            False,
        ),
        (Gemma3TextConfig(**SMALL, intermediate_size=32, num_key_value_heads=1, head_dim=8), False),
        (BloomConfig(vocab_size=70, hidden_size=16, n_layer=2, n_head=2), False),
        (MambaConfig(vocab_size=70, hidden_size=16, num_hidden_layers=2, state_size=4), False),
    ],
    ids=lambda value: getattr(value, "model_type", str(value)),
)
def test_families(config, takes, monkeypatch):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    monkeypatch.setattr(scoring, "hidden_size", lambda model: 10**6)
    assert takes_trees(model) is takes
    batch = asked(TREE)
    ours, theirs = token_logprobs(model.eval(), batch), by_rows(monkeypatch, model, batch)
    torch.testing.assert_close(ours.logprobs_BT, theirs.logprobs_BT, atol=2e-5, rtol=1e-5)


def test_attention_without_a_mask_of_its_own_is_refused():
    config = Qwen2Config(**SMALL, intermediate_size=32, num_key_value_heads=1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    assert not takes_trees(model)
