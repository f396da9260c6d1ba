"""What a training run will hold in memory, by formula: no weights are loaded.

Exact are weights, gradients, optimizer state and key-value cache. Activations are those that
autograd keeps of layers with attention and a gated MLP. Not planned: the Python process, the
environment, what the C library keeps of freed memory, and a single episode longer than a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from agentrl.engines.growing import MB
from agentrl.engines.loading import load_config
from agentrl.engines.routing import routers_of
from agentrl.trainers.algorithms.recipe import TAUGHT
from agentrl.trainers.algorithms.recipes import recipe
from agentrl.trainers.config import Compute, OptimizerName, TrainConfig
from agentrl.trainers.models.loading import equipped, policy_dtype, reference_dtype
from agentrl.trainers.models.scoring import default_chunk
from agentrl.types import Limits

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Work:
    """The largest piece of work of a run.

    Attributes:
        micro_tokens: padded tokens of the largest micro-batch.
        trained_tokens: sampled tokens in it; None: all.
        samples: rows that are sampled at once; 0: nothing is sampled in this process.
        sample_tokens: prompt and answer of the longest of them.
        history_mb: what the engine may keep of earlier turns.
        routed_tokens: padded tokens of a round whose experts are held for replay.
    """

    micro_tokens: int
    trained_tokens: int | None = None
    samples: int = 0
    sample_tokens: int = 0
    history_mb: int = 0
    routed_tokens: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose; `peak` is what CUDA calls `max_memory_allocated`.

    Attributes:
        models: of weights, and `resident` of the optimizers' states and of experts that are
            replayed: always there.
        update: when the backward pass begins.
        gradients: when it ends.
        sampling: while the last turn of the longest rows is sampled.
    """

    models: Sizes
    resident: Sizes
    update: Sizes
    gradients: Sizes
    sampling: Sizes = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """Bytes in use at the worst moment of the run."""
        moments = (self.update, self.gradients, self.sampling)
        always = sum(self.models.values()) + sum(self.resident.values())
        return always + max(sum(moment.values()) for moment in moments)

    def row(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return {"peak_bytes": self.peak} | {name: dict(part) for name, part in vars(self).items()}


def plan(
    policy: PretrainedConfig,
    work: Work,
    *,
    compute: Compute | None = None,
    optimizer: OptimizerName = "adamw",
    frozen: Mapping[str, PretrainedConfig] | None = None,
    critic: PretrainedConfig | None = None,
) -> MemoryPlan:
    """Plan a run with a policy of this shape.

    Args:
        policy: its shape; the precision is that of `compute`.
        work: the largest micro-batch and the most that is sampled at once.
        compute: precision, adapters and checkpointing.
        optimizer: of the policy.
        frozen: models that are held and never trained, by name: a reference, a teacher.
        critic: shape of a second model, which trains before the policy does.
    """
    compute = compute or Compute()
    empty = equipped(_empty(policy, policy_dtype(compute)), compute)
    models, state = {"policy": _bytes(empty)}, (2 if optimizer == "adamw8bit" else 8)
    resident = {"optimizer": state * sum(weight.numel() for weight in _trained(empty))}
    resident |= _experts(empty, policy, work)
    updates, gradients = [_update(empty, policy, compute, work)], [_gradients(empty)]
    for name, shape in (frozen or {}).items():
        models[name] = _bytes(_empty(shape, reference_dtype(compute)))
    if critic is not None:
        second = equipped(_empty(critic, policy_dtype(compute)), compute).get_decoder()
        models["critic"] = _bytes(second)
        resident["critic's optimizer"] = 8 * sum(weight.numel() for weight in _trained(second))
        updates.append(_update(second, critic, compute, work))
        gradients.append(_gradients(second))
    sampling = [_sampling(empty, policy, compute, work)] if work.samples else [{}]
    worst = (
        max(ways, key=lambda way: sum(way.values())) for ways in (updates, gradients, sampling)
    )
    return MemoryPlan(models, resident, *worst)


def _empty(config: PretrainedConfig, dtype: torch.dtype) -> Any:
    """A model of that shape whose weights have no numbers."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _bytes(model: Any) -> int:
    return sum(weight.nbytes for weight in (*model.parameters(), *model.buffers()))


def _trained(model: Any) -> list[torch.nn.Parameter]:
    return [weight for weight in model.parameters() if weight.requires_grad]


def _experts(model: Any, config: Any, work: Work) -> dict[str, int]:
    """The choices of experts that a round's update replays, as int16."""
    chosen = getattr(config.get_text_config(), "num_experts_per_tok", None) or 0
    size = 2 * work.routed_tokens * len(routers_of(model)) * int(chosen)
    return {"experts of a round": size} if size else {}


def _widths(config: Any) -> tuple[int, ...]:
    """Values per token of the residual stream, all queries, all keys, and the gated MLPs."""
    heads, inner = config.num_attention_heads, getattr(config, "intermediate_size", None)
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys = size * (getattr(config, "num_key_value_heads", None) or heads)
    if experts := getattr(config, "num_experts_per_tok", None):
        inner = experts * (getattr(config, "moe_intermediate_size", None) or inner)
    found = (config.hidden_size, heads * size, keys, inner or 4 * config.hidden_size)
    return tuple(map(int, found))


def _layer(model: Any, config: Any, low: bool) -> int:
    """Bytes per token that autograd keeps of a decoder layer; `low`: under autocast to bfloat16."""
    width, queries, keys, inner = _widths(config)
    weights = [name.split(".") for name, _ in model.named_parameters() if ".0." in name]
    norms = {name[-2] for name in weights if "norm" in name[-2]}
    small = norms & {"q_norm", "k_norm"}
    size, experts = (2 if low else 4), getattr(config, "num_experts_per_tok", None) or 0
    stream = 8 * len(norms - small) + size * (5 if low else 2) + 8 * experts
    heads = 2 * size + ((6 if low else 8) if small else 0)
    attention = heads * (queries + keys) + 4 * int(config.num_attention_heads)
    gated = 4 * (4 if experts else size) * inner  # experts stay in float32 under autocast
    return stream * width + attention + gated


def _copies(model: Any, low: bool) -> int:
    """Bytes of the matrices that autocast copies to bfloat16."""
    matrices = (weight for weight in model.parameters() if weight.dim() == 2)
    return 2 * sum(int(w.numel()) for w in matrices if low and w.dtype == torch.float32)


def _update(model: Any, config: Any, compute: Compute, work: Work) -> dict[str, int]:
    """When the backward pass begins: activations, and the output layer with its gradient."""
    config, low = config.get_text_config(), compute.dtype == "bfloat16"
    width, vocabulary, tokens = config.hidden_size, config.vocab_size, work.micro_tokens
    layer = tokens * _layer(model, config, low)
    each = 4 * tokens * width if compute.gradient_checkpointing else layer
    ends = 4 * tokens * (3 * width + 4 * _widths(config)[1] // config.num_attention_heads)
    kept = config.num_hidden_layers * each + ends + _copies(model, low)
    last = layer if compute.gradient_checkpointing else 0  # computed again, one at a time
    if (head := model.get_output_embeddings()) is not None:
        rows = min(tokens, tokens if work.trained_tokens is None else work.trained_tokens)
        chunk = min(rows, default_chunk(vocabulary))
        logits = chunk * vocabulary * (3 if chunk == rows else 4)
        gradient = vocabulary * width if head.weight.requires_grad else 0
        last = max(last, 4 * (logits + gradient + rows * width))
    return {"activations": kept, "output layer": last}


def _gradients(model: Any) -> dict[str, int]:
    """When the backward pass ends: all gradients, and two parts of the largest, which are added."""
    sizes = [weight.nbytes for weight in _trained(model)]
    return {"gradients": sum(sizes), "parts of the largest": 2 * max(sizes)}


def _sampling(model: Any, config: Any, compute: Compute, work: Work) -> dict[str, int]:
    """The last turn: its prompts, which no two rows share, then one token more."""
    config, low = config.get_text_config(), compute.dtype == "bfloat16"
    width, queries, keys, inner = _widths(config)
    read = work.samples * (work.sample_tokens - 1) * (2 if low else 4)
    prompts = read * max(4 * width + 3 * inner, 2 * width + 4 * queries + 2 * keys)
    drawn = 28 * work.samples * config.vocab_size  # in float64, several times
    cache = 2 * config.num_hidden_layers * keys * read
    return {
        "key-value cache": cache,
        "histories between turns": min(cache, work.history_mb * MB),
        "prompts and one token": max(prompts, drawn) + _copies(model, low),
    }


def plan_run(config: TrainConfig, limits: Limits, row_tokens: int | None = None) -> MemoryPlan:
    """Plan the run of a config, whose folder's weights are not loaded.

    Args:
        config: of the run.
        limits: of its environment.
        row_tokens: of the longest episode; None: as much read as the policy may write, or what the
            context holds.

    Raises:
        ConfigError: a model folder cannot be read, or the run would be refused.
    """
    chosen = recipe(config.recipe, **config.loss)
    chosen.refuse_group_size(config.group_size)
    chosen.refuse_minibatches(config.minibatches)
    policy = load_config(config.model)
    context = int(policy.get_text_config().max_position_embeddings)
    longest = row_tokens or min(2 * limits.episode_tokens, context)
    tokens = max(longest, config.compute.micro_tokens // longest * longest)
    work = Work(
        micro_tokens=tokens,
        trained_tokens=min(tokens // longest * limits.episode_tokens, tokens),
        samples=min(config.tasks_per_step * config.group_size, config.concurrency),
        sample_tokens=longest,
        history_mb=config.engine.history_mb,
        routed_tokens=(
            config.tasks_per_step * config.group_size * longest
            if config.engine.routing != "off"
            else 0
        ),
    )
    chosen.refuse_no_teacher()
    critic = load_config(chosen.critic.model or config.model) if "critic" in chosen.needs else None
    frozen = {"reference": policy} if "reference" in chosen.needs else {}
    if config.compute.lora_rank:
        frozen.clear()  # it is the policy without its adapters
    if chosen.needs & TAUGHT:
        frozen["teacher"] = load_config(chosen.teacher.model)
    return plan(
        policy,
        work,
        compute=config.compute,
        optimizer=config.optimizer.name,
        frozen=frozen,
        critic=critic,
    )


def plan_table(found: MemoryPlan) -> Any:
    """The plan as a rich table."""
    from rich.table import Table

    table = Table(title=f"peak {_size(found.peak)}")
    for name, side in (("what", "left"), ("held", "left"), ("size", "right")):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    for part, said in _WHEN.items():
        for name, size in getattr(found, part).items():
            table.add_row(name, said, _size(size))
    return table


_WHEN = {
    "models": "always",
    "resident": "always",
    "update": "when a backward pass begins",
    "gradients": "when it ends",
    "sampling": "while sampling",
}


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
