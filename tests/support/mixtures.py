"""Tiny mixtures of experts of the real families, whose routers differ in order and arithmetic."""

from __future__ import annotations

from functools import partial

import torch

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}


def mixture(family: str, dtype: torch.dtype = torch.float64, **changes: object):
    """A model of a family with random weights, in evaluation mode."""
    import transformers

    kind = getattr(transformers, f"{family}ForCausalLM")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(SHAPE | changes))
    model = kind._from_config(config, experts_implementation="eager").to(dtype).eval()
    for name, buffer in model.named_buffers():
        if name.endswith(
            "e_score_correction_bias"
        ):  # as trained ones have, to be told from weights
            buffer.copy_(torch.linspace(-0.2, 0.2, buffer.numel()))
    return model


FAMILIES = {
    "qwen3": partial(mixture, "Qwen3Moe", num_experts=8, mlp_only_layers=[0], norm_topk_prob=True),
    "qwen3 without norm": partial(mixture, "Qwen3Moe", num_experts=8, norm_topk_prob=False),
    "mixtral": partial(mixture, "Mixtral", num_local_experts=8),
    "olmoe": partial(mixture, "Olmoe", num_experts=8),
    "granite": partial(mixture, "GraniteMoe", num_local_experts=8),
    "deepseek 2": partial(mixture, "DeepseekV2", **LATENT, topk_method="group_limited_greedy"),
    "deepseek 3": partial(mixture, "DeepseekV3", **LATENT),
    "gpt-oss": partial(mixture, "GptOss", num_local_experts=8, sliding_window=16),
}
