"""What a training run will hold, before it begins: its models and the bytes of its worst moment; no
weights are loaded.

The real code runs on tensors without data (`FakeTensorMode`): scoring, backward pass, clipping,
optimizer and one step of sampling, while every storage is counted as it comes and goes. So the plan
knows of no formula that could go out of date, and every architecture that transformers can build is
planned. Integers and masks are real:
    they decide shapes.

Not planned: the Python process and its libraries, the environment and its sandboxes, and a
    micro-batch whose one
episode is longer than `row_tokens`.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from agentrl.engines.base import Sampling
from agentrl.engines.loading import load_config
from agentrl.engines.transformers import draw
from agentrl.trainers.algorithms.recipes import recipe
from agentrl.trainers.batch import TokenBatch
from agentrl.trainers.config import TrainConfig
from agentrl.trainers.models.loading import equipped, policy_dtype, reference_dtype
from agentrl.trainers.models.optim import make_optimizer
from agentrl.trainers.models.scoring import EntropyMode, token_logprobs
from agentrl.types import Limits

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Optimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


LARGE_BLOCK = 2**25
"""Bytes from which glibc always maps a block by itself and gives it back once freed: mallopt(3),
M_MMAP_THRESHOLD.
"""


@dataclass(frozen=True)
class Work:
    """The largest piece of work of a run.

    Attributes:
        micro_tokens: padded tokens of the largest micro-batch.
        row_tokens: tokens of its rows, each an episode's branch; at most `micro_tokens` of them are
            held at once.
        trained_tokens: sampled tokens in the micro-batch; None: all, the most there can be.
        samples: rows that are sampled at once.
        sample_tokens: prompt and answer of the longest of them; 0: nothing is sampled in this
            process.
        entropy: as in `token_logprobs`.
        checkpointing: activations are computed again in the backward pass instead of kept.
    """

    micro_tokens: int
    row_tokens: int
    trained_tokens: int | None = None
    samples: int = 1
    sample_tokens: int = 0
    entropy: EntropyMode = "value"
    checkpointing: bool = False


@dataclass(frozen=True)
class Plan:
    """Bytes by purpose.

    Attributes:
        models: name -> bytes of its weights: policy, and whatever frozen or further models a run
            holds.
        resident: name -> bytes of what else stays from round to round: the optimizer's state.
        update: name -> bytes of the worst moment of an update, on top of these.
        sampling: name -> bytes of the worst moment of sampling, on top of these; gradients are
            freed by then.
        kept_free: bytes that glibc keeps of what was freed, at the moment when a process on the CPU
            is largest. CUDA's `max_memory_allocated` has none of it.
    """

    models: Mapping[str, int]
    resident: Mapping[str, int]
    update: Mapping[str, int]
    sampling: Mapping[str, int] = field(default_factory=dict)
    kept_free: int = 0

    @property
    def peak(self) -> int:
        """Bytes in use at the worst moment of the run: what CUDA calls `max_memory_allocated`."""
        always = sum(self.models.values()) + sum(self.resident.values())
        return always + max(sum(self.update.values()), sum(self.sampling.values()))

    @property
    def peak_cpu(self) -> int:
        """Bytes by which a process on the CPU is larger than before the run, at its largest."""
        return self.peak + self.kept_free

    def row(self) -> dict[str, Any]:
        """The plan as JSON values."""
        parts = {
            name: dict(getattr(self, name)) for name in ("models", "resident", "update", "sampling")
        }
        return {
            "peak_bytes": self.peak,
            "peak_cpu_bytes": self.peak_cpu,
            **parts,
            "kept_free": self.kept_free,
        }


def plan(
    config: PretrainedConfig,
    work: Work,
    *,
    frozen: Mapping[str, PretrainedConfig] | None = None,
    critic: PretrainedConfig | None = None,
    optimizer: Optimizer = torch.optim.AdamW,
    equip: Callable[[Any], Any] | None = None,
) -> Plan:
    """Plan a run without loading weights.

    Args:
        config: of the policy; its `dtype` is that of the weights.
        work: the largest micro-batch and the most that is sampled at once.
        frozen: further models that are held without gradients, as `{"reference": config, "reward
            model": config}`.
        critic: of a second model that is trained, after the policy in every micro-batch.
        optimizer: parameters that train -> optimizer.
        equip: policy -> policy with adapters and the like; None: as it is.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), _Meter() as meter:
        models, built = dict[str, int](), list[Any]()
        for name, one in {
            "policy": config,
            **({"critic": critic} if critic else {}),
            **(frozen or {}),
        }.items():
            before = meter.live
            model = _build(one) if built or equip is None else _equipped(one, equip)
            built.append(model.requires_grad_(False) if name in (frozen or {}) else model)
            models[name] = meter.live - before
        trained = built[: 1 + (critic is not None)]
        for model in trained:
            if work.checkpointing:
                model.gradient_checkpointing_enable()
        stepper = optimizer([weight for model in trained for weight in _trained(model)])
        _update(meter, trained, stepper, work)  # the first step makes the optimizer's state
        resident = {"optimizer": meter.live - sum(models.values())}
        sampling = _sample(meter, built[0], work) if work.sample_tokens else {}
        update = _update(meter, trained, stepper, work)
    found = Plan(models, resident, update, sampling)
    return replace(found, kept_free=max(0, meter.process - found.peak))


def plan_run(config: TrainConfig, limits: Limits, row_tokens: int | None = None) -> Plan:
    """Plan the run of a config, whose folder's weights are not loaded.

    Args:
        config: of the run.
        limits: of its environment.
        row_tokens: of the longest episode; None: as much read as the policy may write, or what the
            context holds.

    Raises:
        ConfigError: a model folder cannot be read, or the run would be refused.
    """
    compute, planned = config.compute, recipe(config.recipe, **config.loss)
    planned.refuse_group_size(config.group_size)
    needs = planned.needs
    policy, reference, critic = map(
        load_config, (config.model, config.model, planned.critic.model or config.model)
    )
    policy.dtype, reference.dtype, critic.dtype = (
        policy_dtype(compute),
        reference_dtype(compute),
        torch.float32,
    )
    longest = row_tokens or min(2 * limits.episode_tokens, int(policy.max_position_embeddings))
    count = max(1, compute.micro_tokens // longest)
    work = Work(
        micro_tokens=compute.micro_tokens,
        row_tokens=longest,
        trained_tokens=min(count * limits.episode_tokens, compute.micro_tokens),
        samples=min(config.tasks_per_step * config.group_size, 256),
        sample_tokens=longest,
        entropy="gradient" if "entropy_gradient" in needs else "value",
    )
    return plan(
        policy,
        work,
        frozen={"reference": reference} if "reference" in needs and not compute.lora_rank else {},
        critic=critic if "critic" in needs else None,
        optimizer=lambda weights: make_optimizer(weights, config.learning_rate, compute.optimizer),
        equip=lambda model: equipped(model, compute),
    )


def plan_table(found: Plan) -> Any:
    """The plan as a rich table."""
    from rich.table import Table

    table = Table(title=f"peak {_size(found.peak)}, on the CPU {_size(found.peak_cpu)}")
    for name, side in (("what", "left"), ("held", "left"), ("size", "right")):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    when = {
        "models": "always",
        "resident": "always",
        "update": "in an update",
        "sampling": "while sampling",
    }
    for part, said in when.items():
        for name, size in getattr(found, part).items():
            table.add_row(name, said, _size(size))
    table.add_row("freed and kept by the C library", "on the CPU", _size(found.kept_free))
    return table


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _build(config: PretrainedConfig) -> Any:
    """A model of that shape, without weights: a sequence classifier where the config says so."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    scores = any(name.endswith("ForSequenceClassification") for name in config.architectures or ())
    loader: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    return loader.from_config(config, dtype=getattr(config, "dtype", None) or torch.float32)


def _equipped(config: PretrainedConfig, equip: Callable[[Any], Any]) -> Any:
    """The same with what it is equipped with; built on no device first, as modules cannot move fake
    weights.
    """
    with _disable_current_modes(), torch.device("meta"):
        model = equip(_build(config))
    made = dict[int, Tensor]()  # tied weights stay tied
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, meta in held.items():
                if meta is not None and id(meta) not in made:
                    fake = torch.empty(meta.shape, dtype=meta.dtype)
                    train = meta.requires_grad
                    made[id(meta)] = (
                        torch.nn.Parameter(fake, train)
                        if isinstance(meta, torch.nn.Parameter)
                        else fake
                    )
                held[name] = meta if meta is None else made[id(meta)]
    return model


def _trained(model: Any) -> list[torch.nn.Parameter]:
    return [weight for weight in model.parameters() if weight.requires_grad]


def _update(
    meter: _Meter, models: Sequence[Any], stepper: torch.optim.Optimizer, work: Work
) -> dict[str, int]:
    """One optimizer step on one micro-batch, as `loop.update` takes it; bytes of its worst moment
    by purpose.
    """
    start, batch, activations = meter.restart(), example(work), 0
    weights = [weight for model in models for weight in _trained(model)]
    for index, model in enumerate(models):
        model.train()
        before = meter.live
        if index == 0:
            scores = token_logprobs(model, batch, entropy=work.entropy).logprobs_BT
        else:  # a critic reads its values off the last hidden states
            scores = model.get_decoder()(input_ids=batch.ids_BT, use_cache=False).last_hidden_state
        activations = max(activations, meter.live - before)
        scores.sum().backward()
        del scores
    torch.nn.utils.clip_grad_norm_(weights, 1.0)
    stepper.step()
    stepper.zero_grad(set_to_none=True)
    gradients = sum(weight.numel() * weight.element_size() for weight in weights)
    rest = max(0, meter.peak - start - gradients - activations)
    return {
        "gradients": gradients,
        "activations": activations,
        "output layer and temporaries": rest,
    }


@torch.no_grad()
def _sample(meter: _Meter, model: Any, work: Work) -> dict[str, int]:
    """The last turn of the longest rows: their prompts, which no two share, and one token more."""
    start, meter.thread = meter.restart(), "sampler"
    model.eval()
    shape = (work.samples, work.sample_tokens - 1)
    cache = model(
        input_ids=_real(torch.zeros, shape), use_cache=True, logits_to_keep=1
    ).past_key_values
    held = meter.live - start
    attention_BT = _real(torch.ones, (work.samples, work.sample_tokens))
    last_B1 = _real(torch.zeros, (work.samples, 1))
    output = model(
        input_ids=last_B1,
        attention_mask=attention_BT,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    draw(output.logits[:, -1], torch.zeros(work.samples, dtype=torch.float64), Sampling())
    meter.thread = "trainer"
    return {"key-value cache": held, "prompts and one token": meter.peak - start - held}


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
    """Counts the bytes of fake storages as they come and go. Operations on real tensors alone are
    done really.

    A process on the CPU shrinks only by large blocks: glibc maps those one by one, and serves the
        others from a heap
    for each thread, whose pages it keeps for the next request. So its size is that of the live
    large blocks and of the heaps at their largest so far.

    Attributes:
        live, peak: bytes in use, and the most since `restart`.
        process: the largest size of a process so far.
        thread: whose heap serves what comes next.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = self.process = 0
        self.thread = "trainer"
        self._large = 0
        self._heaps: Counter[str] = Counter()
        self._largest_heaps: Counter[str] = Counter()
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def restart(self) -> int:
        """Forget the peak so far; bytes that are held now."""
        self.peak = self.live
        return self.live

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        fake = [one for one in tensors if isinstance(one, FakeTensor)]
        if tensors and not fake:
            with _disable_current_modes():
                return func(*args, **(kwargs or {}))
        if func in _ANSWERS:
            return _ANSWERS[func]
        result = _without_values(func, args, kwargs or {})
        if (
            func is _aten.logsumexp.default
        ):  # its kernel holds exp(x - max x), which no operation shows
            self._count(args[0].new_empty(args[0].shape).untyped_storage())
        for one in tree_leaves(result):
            if isinstance(one, FakeTensor):
                self._count(one.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        if storage not in self._known:
            self._known.add(storage)
            heap = self.thread if storage.nbytes() < LARGE_BLOCK else ""
            self._add(heap, storage.nbytes())
            weakref.finalize(storage, self._add, heap, -storage.nbytes())

    def _add(self, heap: str, size: int) -> None:
        self.live += size
        if heap:
            self._heaps[heap] += size
            self._largest_heaps[heap] = max(self._largest_heaps[heap], self._heaps[heap])
        else:
            self._large += size
        self.peak = max(self.peak, self.live)
        self.process = max(self.process, self._large + self._largest_heaps.total())


_aten = torch.ops.aten
_ANSWERS = {_aten.equal.default: True, _aten._local_scalar_dense.default: 1.0}
"""What is said of values that do not exist: two ways of computing agree, and numbers are 1."""


def _without_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do an operation on fake tensors; where a real mask decides the shape, with the places that it
    marks.
    """
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
    return (
        index.nonzero(as_tuple=True)
        if index is not None and index.dtype is torch.bool
        else (index,)
    )
