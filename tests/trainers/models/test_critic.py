"""The critic: how it is opened, where values are read, and what its loss and metrics say."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from critic_cases import STEADY, learned, opinionated
from trainer_cases import PAD, batch_of, branch, episode, group, tiny_model

from agentrl.engines.loading import load_critic, scalar_head
from agentrl.errors import ConfigError
from agentrl.trainers.batch import pack
from agentrl.trainers.config import Compute, CriticSettings
from agentrl.trainers.models.critic import (
    Critic,
    Moments,
    explained_variance,
    value_loss,
    value_metrics,
)
from agentrl.trainers.models.value_model import load_value_model, values
from agentrl.trajectory import Group


@pytest.fixture(scope="module")
def rewarder(tmp_path_factory):
    """The folder of a reward model."""
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    folder = tmp_path_factory.mktemp("rewarder")
    config = Qwen2Config(**tiny_model().config.to_dict() | {"num_labels": 1, "pad_token_id": PAD})
    torch.manual_seed(3)
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    return folder


# --- opening


def test_a_critic_that_starts_from_a_policy_expects_nothing_and_has_its_backbone(policy):
    critic = load_critic(policy)
    batch = batch_of(group(1.0, 0.0))
    assert (values(critic, batch) == 0).all()
    theirs = dict(tiny_model().get_decoder().named_parameters())
    assert all(
        torch.equal(weight, theirs[name]) for name, weight in critic.base_model.named_parameters()
    )


def test_a_critic_that_starts_from_a_reward_model_says_its_reward_so_far(rewarder):
    from transformers import AutoModelForSequenceClassification

    judge = AutoModelForSequenceClassification.from_pretrained(rewarder)
    batch = batch_of(group(1.0, 0.0))
    found_BT = values(load_critic(rewarder), batch)
    for row, position in torch.nonzero(batch.mask_BT).tolist():
        told = judge(input_ids=batch.ids_BT[row : row + 1, :position]).logits.item()
        assert found_BT[row, position].item() == pytest.approx(told, abs=1e-5)


def test_opening_a_critic_draws_nothing_from_the_global_random_state(policy):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    load_critic(policy)
    assert torch.equal(before, torch.get_rng_state())


def test_a_critic_trains_in_float32_whatever_the_folder_is_in(tmp_path):
    """At the default rate AdamW moved one weight in thirty of a bfloat16 backbone: its steps were
    rounded away.
    """
    tiny_model(torch.bfloat16).save_pretrained(tmp_path / "policy")
    model = load_critic(tmp_path / "policy")
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    torch.nn.init.normal_(scalar_head(model).weight)
    before = [weight.detach().clone() for weight in model.base_model.parameters()]
    critic = Critic(model, CriticSettings())
    batch = critic.predict(batch_of(group(1.0, 0.0)))
    critic.fit(replace(batch, returns_BT=torch.ones_like(batch.values_BT)), seed=0)
    pairs = list(zip(model.base_model.parameters(), before, strict=True))
    moved, count = (
        sum(map(int, some))
        for some in zip(*(((a != b).sum(), b.numel()) for a, b in pairs), strict=True)
    )
    assert moved > count / 2
    critic.save(tmp_path / "critic")
    again = load_critic(tmp_path / "critic")
    assert all(
        torch.equal(a, b) and a.dtype == b.dtype
        for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )


def test_a_folder_that_cannot_be_a_critic_is_refused_in_one_sentence(policy, rewarder, tmp_path):
    from safetensors.torch import load_file, save_file
    from transformers import (
        GPT2Config,
        GPT2ForSequenceClassification,
        Qwen2ForSequenceClassification,
    )

    with pytest.raises(ConfigError, match="does not exist"):
        load_critic(tmp_path / "nowhere")
    other = GPT2Config(
        n_layer=1, n_embd=8, n_head=2, vocab_size=9, num_labels=1, bos_token_id=1, eos_token_id=1
    )
    GPT2ForSequenceClassification(other).save_pretrained(tmp_path / "other")
    with pytest.raises(
        ConfigError, match=r"cannot become a critic.*classifier.weight.*start from the policy"
    ):
        load_critic(tmp_path / "other")
    wide = Qwen2ForSequenceClassification.from_pretrained(rewarder).config
    wide.num_labels = 3
    Qwen2ForSequenceClassification(wide).save_pretrained(tmp_path / "wide")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_critic(tmp_path / "wide")
    shutil.copytree(policy, tmp_path / "holes")
    weights = load_file(policy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "holes" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"cannot become a critic.*up_proj"):
        load_critic(tmp_path / "holes")


# --- values


def test_values_are_the_models_own_at_the_position_before_each_trained_token_and_zero_elsewhere():
    critic, batch = opinionated(), batch_of(group(1.0, 0.0, 0.5))
    found_BT = values(critic, batch)
    own_BT = critic(input_ids=batch.ids_BT).logits[..., 0].roll(1, 1)
    assert found_BT.dtype == torch.float64
    assert torch.allclose(found_BT, torch.where(batch.mask_BT, own_BT, 0.0), atol=1e-12)


@pytest.mark.parametrize("micro_tokens", [1, 20, 1000])
def test_predictions_are_the_same_in_every_split(micro_tokens):
    batch = batch_of(group(1.0, 0.0, 0.5))
    found = Critic(opinionated(), STEADY, micro_tokens=micro_tokens).predict(batch)
    assert torch.allclose(found.values_BT, values(opinionated(), batch), atol=1e-12)
    assert not found.values_BT.requires_grad


# --- the loss


def as_verl_has_it(values_BT, returns_BT, old_BT, mask_BT, clip):
    """Its definition, number by number: half the masked mean of the larger squared error."""
    total = count = cut = 0.0
    for v, r, old, m in zip(
        *(x.flatten().tolist() for x in (values_BT, returns_BT, old_BT, mask_BT)), strict=True
    ):
        if m:
            plain, near = (v - r) ** 2, (min(max(v, old - clip), old + clip) - r) ** 2
            total, count, cut = total + max(plain, near), count + 1, cut + (near > plain)
    return 0.5 * total / count, cut / count


@pytest.mark.parametrize("clip", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("seed", range(5))
def test_the_loss_is_verls_on_random_masked_batches(seed, clip):
    batch = learned(batch_of(group(1.0, 0.0, 0.5, 1.0)), seed)
    now_BT = learned(batch, seed + 100).values_BT
    loss, metrics = value_loss(now_BT, batch, value_clip=clip)
    theirs, cut = as_verl_has_it(now_BT, batch.returns_BT, batch.values_BT, batch.mask_BT, clip)
    assert float(loss) == pytest.approx(theirs, abs=1e-6)
    assert metrics == {"loss": float(loss), "clip_fraction": pytest.approx(cut)}
    assert cut > 0 or clip > 1


def test_a_batch_without_values_or_returns_says_what_fills_them():
    batch = batch_of(group(1.0, 0.0))
    with pytest.raises(ValueError, match=r"values_BT is None: Critic.predict fills it"):
        value_loss(torch.zeros(batch.mask_BT.shape), batch)
    with pytest.raises(ValueError, match="returns_BT is None: a credit step"):
        Critic(opinionated(), STEADY).fit(
            replace(batch, values_BT=torch.zeros(batch.mask_BT.shape)), 0
        )


# --- explained variance


def explained(returns, predicted):
    returns_N, values_N = (torch.tensor(row, dtype=torch.float64) for row in (returns, predicted))
    return explained_variance(Moments.of(returns_N), Moments.of(returns_N - values_N))


def test_explained_variance_by_hand():
    assert explained([0, 1, 2, 3], [0, 1, 2, 3]) == 1
    assert explained([0, 1, 2, 3], [5, 6, 7, 8]) == 1  # a constant error is no variance
    assert explained([0, 1, 2, 3], [1, 1, 1, 1]) == 0
    assert explained([0, 1, 2, 3], [0, 1, 2, 2]) == pytest.approx(1 - 0.1875 / 1.25)
    assert explained([0, 1], [1, 0]) == -3


@pytest.mark.parametrize("returns", [[1.0], [0.0, 0.0], [0.1] * 7, [1.0, 1 + 6e-8, 1 - 6e-8]])
def test_where_all_returns_are_equal_it_is_one_for_equal_values_and_else_zero(returns):
    rounding = [0.3 + 3e-8 * (i % 2) for i in range(len(returns))]
    assert explained(returns, rounding) == 1
    if len(returns) > 1:
        assert explained(returns, list(range(len(returns)))) == 0


def test_of_no_tokens_there_is_none():
    with pytest.raises(ValueError, match="0 returns"):
        explained([], [])
    batch = learned(pack([group(None)], PAD))
    assert value_metrics(batch) == {}
    assert Critic(opinionated(), STEADY).fit(batch, 0) == {"value/updates": 0.0}


def test_outcomes_and_lambda_returns_are_explained_apart():
    """Two groups of two episodes of two tokens, discounted by a half: G is (1/2, 1) where one
    passed. V knows the outcome at the second token alone; R is V itself.
    """
    played = [
        Group(
            tuple(
                episode(branch(2, (2, 0)), reward=reward, task=task, sample=i)
                for i, reward in enumerate(rewards)
            )
        )
        for task, rewards in (("t", (1.0, 0.0)), ("u", (1.0, 1.0)))
    ]
    batch = pack(played, PAD)
    values_BT = torch.zeros(batch.mask_BT.shape)
    values_BT[batch.mask_BT] = torch.tensor([0.0, 1, 0, 0, 0, 1, 0, 1])
    found = value_metrics(replace(batch, values_BT=values_BT, returns_BT=values_BT), gamma=0.5)
    outcomes = [0.5, 1, 0, 0, 0.5, 1, 0.5, 1]
    assert found["value/explained_variance"] == pytest.approx(
        explained(outcomes, [0, 1, 0, 0, 0, 1, 0, 1])
    )
    assert found["value/explained_variance_first"] == 0
    assert found["value/explained_variance_siblings"] == pytest.approx(
        explained([0.5, 0, 0.5, 0.5], [0, 0.5, 0.5, 0.5])
    )
    assert found["value/lambda_explained_variance"] == 1


def test_a_critic_drops_nothing_out_whatever_the_folder_says(tmp_path):
    model = tiny_model()
    model.config.attention_dropout = 0.9
    model.save_pretrained(tmp_path / "policy")
    critic = load_value_model(tmp_path / "policy", Compute()).train()
    torch.nn.init.normal_(scalar_head(critic).weight)
    batch = batch_of(group(1.0, 0.0))
    assert torch.equal(values(critic, batch), values(critic, batch))


def test_values_are_float32_although_the_backbone_computes_in_bfloat16(tmp_path, rewarder):
    critic = load_value_model(rewarder, Compute(dtype="bfloat16", device="cpu"))
    batch = batch_of(group(1.0, 0.0))
    seen = []
    head = scalar_head(critic)
    hook = head.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    found_BT = values(critic, batch)
    hook.remove()
    ((states_Nd, values_N1),) = seen
    assert states_Nd.dtype == values_N1.dtype == found_BT.dtype == torch.float32
    assert torch.equal(values_N1, states_Nd @ head.weight.T)
