"""What replaying the sampler's experts does to the gap between sampler and trainer.

    python -m benchmarks.experiments.router_replay 60

Multi-turn episodes of random tiny mixtures of experts, sampled by the embedded engine and scored by
a trainer that differs from it in one thing: nothing but the order of sums, its precision, or a
little noise on the routers' weights.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agentrl.chat.tokens import Chat
from agentrl.engines.base import Sampling
from agentrl.engines.factory import open_chat
from agentrl.engines.loading import load_model, transformers_engine
from agentrl.engines.routing import recorded_routing, replayed_routing, routers_of
from agentrl.policies.base import TokenPolicy
from agentrl.rollout.play import Setting
from agentrl.rollout.rollouts import Rollouts
from agentrl.trainers.batch import TokenBatch, pack
from agentrl.trainers.models.loading import in_bfloat16
from agentrl.trainers.models.scoring import frozen_logprobs
from agentrl.trainers.observe.parity import quantile
from benchmarks.experiments.engine_parity import Talk, brief

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/support"))
from trl_templates import trl_tokenizer

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 32,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
FAMILIES = {
    "Qwen3Moe": {"num_experts": 32, "head_dim": 32, "norm_topk_prob": True},
    "DeepseekV3": LATENT,
}
CLIP = 0.2
SEQUENCE_CLIP = 3e-4, 4e-4
"""Below and above 1, of GSPO's ratio: the mean over a sequence in the exponent."""
NOISE = 0.01


class Found(NamedTuple):
    """Of one trainer: choices (a token in a layer) and tokens (in any layer) that went to other
    experts than the sampler's, the distance from the sampler in nats, and what a clip would cut:
    of tokens' ratios the one of PPO, of sequences' ratios the one of GSPO.
    """

    family: str
    trainer: str
    replay: bool
    turns: float
    tokens: int
    experts_differ: float
    tokens_differ: float
    gap_mean: float
    gap_p99: float
    gap_max: float
    clipped: float
    sequence_gap_mean: float
    sequences_clipped: float


@torch.no_grad()
def _noisy(model: Any) -> None:
    chance = torch.Generator().manual_seed(1)
    for router in routers_of(model):
        weight: Any = router.weight
        weight += NOISE * weight.std() * torch.randn(weight.shape, generator=chance)


TRAINERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "both float32": (lambda model: None, lambda model: None),
    "both bfloat16": (in_bfloat16, in_bfloat16),
    "sampler bfloat16, trainer float32": (in_bfloat16, lambda model: None),
    "routers of the trainer 1 % off": (lambda model: None, _noisy),
}
"""What is done to the sampler and to the trainer, which begin as one model."""


def measure(family: str, episodes: int) -> Iterator[Found]:
    """Play and score with every pair of sampler and trainer."""
    with tempfile.TemporaryDirectory() as folder:
        _build(Path(folder), family)
        model, chat = load_model(folder), open_chat(folder)
        brief(model, chat)
        for name, (to_sampler, to_trainer) in TRAINERS.items():
            sampler, trainer = copy.deepcopy(model), copy.deepcopy(model)
            to_sampler(sampler)
            to_trainer(trainer)
            played = _play(sampler, chat, episodes)
            batch = pack(played, pad_id=0)
            turns = sum(e.counts.turns for group in played for e in group.episodes) / episodes
            for replay in (False, True):
                yield Found(
                    family, name, replay, turns, batch.n_tokens, *_compare(trainer, batch, replay)
                )


def _build(folder: Path, family: str) -> None:
    import transformers

    tokenizer = trl_tokenizer("qwen2_5")
    config = getattr(transformers, f"{family}Config")(
        **SHAPE | FAMILIES[family],
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _play(sampler: Any, chat: Chat, episodes: int) -> Any:
    engine = transformers_engine(sampler, chat, routing=True)
    policy = TokenPolicy(engine, chat, Sampling(max_tokens=24))
    rollouts = Rollouts(Setting(Talk, policy, None, "replay", 0), concurrency=64)
    try:
        tasks = [task for _, task in zip(range(episodes), Talk().tasks("test", 0), strict=False)]
        return rollouts.gather(tasks, 0)
    finally:
        rollouts.close()


def _compare(trainer: Any, batch: TokenBatch, replay: bool) -> tuple[float, ...]:
    """Shares of choices and of tokens that go to other experts than the sampler's, the gap of
    trained tokens in nats, and the share of their ratios outside 1 ± `CLIP`.
    """
    gaps, others, sequences = list[Tensor](), list[Tensor](), list[Tensor]()
    for micro in batch.split(4096):
        experts_BTLK = micro.experts_BTLK
        assert experts_BTLK is not None
        with (
            replayed_routing(trainer, experts_BTLK if replay else None),
            recorded_routing(trainer) as chosen,
        ):
            said_BT = frozen_logprobs(trainer, micro, 1.0)
        used_BTLK = torch.stack(chosen[-experts_BTLK.shape[2] :], 1).view(experts_BTLK.shape)
        other_BTL = (used_BTLK.sort(-1).values != experts_BTLK.long().sort(-1).values).any(-1)
        others.append(other_BTL[experts_BTLK[..., 0, 0] >= 0].double())
        gap_BT = ((said_BT - micro.old_logprobs_BT) * micro.mask_BT).double()
        gaps.append(gap_BT[micro.mask_BT])
        sequences.append(gap_BT.sum(1) / micro.mask_BT.sum(1).clamp(min=1))
    other_NL, log_ratio_N = torch.cat(others), torch.cat(gaps)
    gap_N, ratio_N = log_ratio_N.abs(), log_ratio_N.exp()
    clipped_N = (ratio_N < 1 - CLIP) | (ratio_N > 1 + CLIP)
    (low, high), mean_B = SEQUENCE_CLIP, torch.cat(sequences)
    cut_B = (mean_B.exp() < 1 - low) | (mean_B.exp() > 1 + high)
    return (
        float(other_NL.mean()),
        float(other_NL.amax(-1).mean()),
        float(gap_N.mean()),
        quantile(gap_N, 0.99),
        float(gap_N.max()),
        float(clipped_N.double().mean()),
        float(mean_B.abs().mean()),
        float(cut_B.double().mean()),
    )


def main() -> None:
    torch.set_num_threads(1)
    for family in FAMILIES:
        for found in measure(family, int(sys.argv[1])):
            print(json.dumps(found._asdict()), flush=True)


if __name__ == "__main__":
    main()
