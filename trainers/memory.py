"""What a training run will hold, before it begins: its models and the bytes of its worst moment; no weights are loaded.

The real code runs on tensors without data (`FakeTensorMode`): scoring, backward pass, clipping, optimizer and one step
of sampling, while every storage is counted as it comes and goes. So the plan knows of no formula that could go out of
date, and every architecture that transformers can build is planned. Integers and masks are real: they decide shapes.

Not planned: the Python process and its libraries, the environment and its sandboxes, and a micro-batch whose one
episode is longer than `row_tokens`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from agentrl.engines.base import Sampling
from agentrl.engines.transformers import draw
from agentrl.trainers.batch import TokenBatch
from agentrl.trainers.scoring import EntropyMode, token_logprobs

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Optimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Work:
    """The largest piece of work of a run.

    Attributes:
        micro_tokens: padded tokens of the largest micro-batch.
        row_tokens: tokens of its rows, each an episode's branch; at most `micro_tokens` of them are held at once.
        trained_tokens: sampled tokens in the micro-batch; None: all, the most there can be.
        samples: rows that are sampled at once.
        sample_tokens: prompt and answer of the longest of them.
    """

    micro_tokens: int
    row_tokens: int
    trained_tokens: int | None = None
    samples: int = 1
    sample_tokens: int = 0


@dataclass(frozen=True)
class Plan:
    """Bytes by purpose.

    Attributes:
        models: name -> bytes of its weights: policy, and whatever frozen or further models a run holds.
        resident: name -> bytes of what else stays from round to round: the optimizer's state.
        update: name -> bytes of the worst moment of an update, on top of these.
        sampling: name -> bytes of the worst moment of sampling, on top of these; gradients are freed by then.
    """

    models: Mapping[str, int]
    resident: Mapping[str, int]
    update: Mapping[str, int]
    sampling: Mapping[str, int] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """Bytes at the worst moment of the run."""
        always = sum(self.models.values()) + sum(self.resident.values())
        return always + max(sum(self.update.values()), sum(self.sampling.values()))

    def row(self) -> dict[str, Any]:
        """The plan as JSON values."""
        parts = {name: dict(getattr(self, name)) for name in ("models", "resident", "update", "sampling")}
        return {"peak_bytes": self.peak, **parts}


def plan(
    config: PretrainedConfig,
    work: Work,
    *,
    frozen: Mapping[str, PretrainedConfig] | None = None,
    optimizer: Optimizer = torch.optim.AdamW,
    entropy: EntropyMode = "value",
    checkpointing: bool = False,
) -> Plan:
    """Plan a run without loading weights.

    Args:
        config: of the policy; its `dtype` is that of the weights.
        work: the largest micro-batch and the most that is sampled at once.
        frozen: further causal language models that are held without gradients, as `{"reference": config}`.
        optimizer: parameters -> optimizer.
        entropy: as in `token_logprobs`.
        checkpointing: activations are computed again in the backward pass instead of kept.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), _Meter() as meter:
        model = _build(config)
        if checkpointing:
            model.gradient_checkpointing_enable()
        models = {"policy": meter.live}
        others = []
        for name, other in (frozen or {}).items():
            before = meter.live
            others.append(_build(other).requires_grad_(False))
            models[name] = meter.live - before
        parameters = [one for one in model.parameters() if one.requires_grad]
        stepper = optimizer(parameters)
        _update(meter, model, stepper, work, entropy)  # the first step makes the optimizer's state
        resident = {"optimizer": meter.live - sum(models.values())}
        update = _update(meter, model, stepper, work, entropy)
        sampling = _sample(meter, model, work) if work.sample_tokens else {}
    return Plan(models, resident, update, sampling)


def plan_table(found: Plan) -> Any:
    """The plan as a rich table."""
    from rich.table import Table

    table = Table(title=f"peak {_size(found.peak)}")
    for name, side in (("what", "left"), ("held", "left"), ("size", "right")):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    when = {"models": "always", "resident": "always", "update": "in an update", "sampling": "while sampling"}
    for part, said in when.items():
        for name, size in getattr(found, part).items():
            table.add_row(name, said, _size(size))
    return table


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _build(config: PretrainedConfig) -> Any:
    """A model of that shape, without weights."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, dtype=getattr(config, "dtype", None) or torch.float32)


def _update(
    meter: _Meter, model: Any, stepper: torch.optim.Optimizer, work: Work, entropy: EntropyMode
) -> dict[str, int]:
    """One optimizer step on one micro-batch, as `loop.update` takes it; bytes of its worst moment by purpose."""
    start = meter.restart()
    model.train()
    gradients = sum(one.numel() * one.element_size() for one in model.parameters() if one.requires_grad)
    activations = list[int]()
    watch = model.get_decoder().register_forward_hook(lambda *_: activations.append(meter.live - start))
    output = token_logprobs(model, example(work), entropy=entropy)
    watch.remove()
    output.logprobs_BT.sum().backward()
    del output
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    stepper.step()
    stepper.zero_grad(set_to_none=True)
    peak, kept = meter.peak - start, max(activations)
    return {
        "gradients": gradients,
        "activations": kept,
        "output layer and temporaries": max(0, peak - gradients - kept),
    }


@torch.no_grad()
def _sample(meter: _Meter, model: Any, work: Work) -> dict[str, int]:
    """The last step of sampling the longest rows; the cache, and what is on top of it."""
    start = meter.restart()
    model.eval()
    shape = (work.samples, work.sample_tokens - 1)
    cache = model(input_ids=_real(torch.zeros, shape), use_cache=True, logits_to_keep=1).past_key_values
    held = meter.live - start
    meter.restart()
    attention_BT = _real(torch.ones, (work.samples, work.sample_tokens))
    last_B1 = _real(torch.zeros, (work.samples, 1))
    output = model(
        input_ids=last_B1, attention_mask=attention_BT, past_key_values=cache, use_cache=True, logits_to_keep=1
    )
    draw(output.logits[:, -1], torch.zeros(work.samples, dtype=torch.float64), Sampling())
    return {"key-value cache": held, "one token": meter.peak - start - held}


def example(work: Work) -> TokenBatch:
    """A micro-batch of that shape: every position but the first of a row may be a sampled one."""
    count = max(1, work.micro_tokens // work.row_tokens)
    with _disable_current_modes():
        mask_BT = torch.ones((count, work.row_tokens), dtype=torch.bool)
        mask_BT[:, 0] = False
        if work.trained_tokens is not None:
            mask_BT &= (mask_BT.flatten().cumsum(0) <= work.trained_tokens).view_as(mask_BT)
        zeros_BT = torch.zeros(mask_BT.shape)
        return TokenBatch(
            ids_BT=zeros_BT.long(),
            mask_BT=mask_BT,
            attention_BT=torch.ones_like(mask_BT),
            old_logprobs_BT=zeros_BT,
            advantages_BT=zeros_BT,
            turn_BT=zeros_BT.int(),
            version_BT=zeros_BT.int(),
            episode_B=torch.arange(count),
            group_E=torch.zeros(count, dtype=torch.int64),
            reward_E=torch.zeros(count),
            truncated_E=torch.zeros(count, dtype=torch.bool),
            tokens_E=mask_BT.sum(1),
            n_tokens=int(mask_BT.sum()),
            n_episodes=count,
        )


def _real(make: Callable[..., Tensor], shape: tuple[int, ...]) -> Tensor:
    with _disable_current_modes():
        return make(shape, dtype=torch.int64)


class _Meter(TorchDispatchMode):
    """Counts the bytes of fake storages as they come and go. Operations on real tensors alone are done really."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def restart(self) -> int:
        """Forget the peak so far; bytes that are held now."""
        self.peak = self.live
        return self.live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        fake = [one for one in tensors if isinstance(one, FakeTensor)]
        if tensors and not fake:
            with _disable_current_modes():
                return func(*args, **(kwargs or {}))
        if func in _ANSWERS:
            return _ANSWERS[func]
        result = _without_values(func, args, kwargs or {})
        for one in tree_leaves(result):
            if isinstance(one, FakeTensor):
                self._count(one.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        if storage not in self._known:
            self._known.add(storage)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._drop, storage.nbytes())

    def _drop(self, size: int) -> None:
        self.live -= size


_aten = torch.ops.aten
_ANSWERS = {_aten.equal.default: True, _aten._local_scalar_dense.default: 1.0}
"""What is said of values that do not exist: two ways of computing agree, and numbers are 1."""


def _without_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do an operation on fake tensors; where a real mask decides the shape, with the places that it marks."""
    if func is _aten.index.Tensor:
        with _disable_current_modes():
            places = [_places(index) for index in args[1]]
        return func(args[0], list(chain.from_iterable(places)))
    if func is _aten.masked_select.default:
        with _disable_current_modes():
            count = int(args[1].sum())
        return args[0].new_empty(count)
    if func is _aten.masked_scatter_backward.default:
        return args[0].new_empty(args[2])
    return func(*args, **kwargs)


def _places(index: Tensor | None) -> tuple[Tensor | None, ...]:
    return index.nonzero(as_tuple=True) if index is not None and index.dtype is torch.bool else (index,)
