"""All that is said to vLLM itself: one engine in this process, its requests, weights and counts.

In this process, because only there its weights can be replaced whatever the device: on a CPU vLLM
packs the weights of linear layers when it has loaded them, and its own reload then changes nothing,
silently. Here those layers keep plain weights (`_plain_linear`).
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from agentrl.engines.base import Sampling
from agentrl.engines.settings import EngineSettings
from agentrl.engines.vllm_setup import QUIET, engine_arguments, refuse_missing
from agentrl.errors import ConfigError, EngineBroken
from agentrl.trajectory import FinishReason


class Sampled(NamedTuple):
    """What one request got: ids with their log-probabilities, and why it ended."""

    name: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason


class StepCounts:
    """What vLLM says of its steps: the largest values and sums since they were last read."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._largest = {"kv_use_max": 0.0, "running_max": 0.0, "waiting_max": 0.0}
        self._preempted = self._asked = self._hit = 0

    def read(self) -> dict[str, float]:
        """`engine/…` metrics; a hit rate only where prompts were computed."""
        found = {**self._largest, "preemptions": float(self._preempted)}
        if self._asked:
            found["prefix_hit_rate"] = self._hit / self._asked
        self._clear()
        return {f"engine/{name}": value for name, value in found.items()}

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: Any) -> None:
        """vLLM calls this after every step."""
        if scheduler_stats is not None:
            now = scheduler_stats
            seen = (now.kv_cache_usage, now.num_running_reqs, now.num_waiting_reqs)
            for name, value in zip(self._largest, seen, strict=True):
                self._largest[name] = max(self._largest[name], float(value))
            self._asked += now.prefix_cache_stats.queries
            self._hit += now.prefix_cache_stats.hits
        if iteration_stats is not None:
            self._preempted += iteration_stats.num_preempted_reqs

    def log(self) -> None:
        """Nothing is printed."""

    def log_engine_initialized(self) -> None:
        """Nothing is printed."""


class Core:
    """One vLLM engine. Everything but `counts` is for the one thread that made it.

    Args:
        folder: with the model's configuration; its weights are read unless `empty`.
        stop_ids: tokens that end an answer.
        settings: memory and length.
        dtype: of weights and layers.
        empty: begin with random weights, which `load` replaces.

    Raises:
        ConfigError: vLLM is not installed or cannot serve this model here.
    """

    def __init__(
        self,
        folder: Path,
        stop_ids: frozenset[int],
        settings: EngineSettings,
        *,
        dtype: str,
        empty: bool = False,
    ) -> None:
        refuse_missing(settings)
        _refuse_a_second()
        self._stop_ids = sorted(stop_ids)
        self.counts = StepCounts()
        self._sleeps, self._asleep = settings.sleep, set[str]()
        with _guest():
            engine_type, arguments = _import()
            self._on_cpu = _on_cpu()
            row = engine_arguments(folder, settings, dtype=dtype, on_cpu=self._on_cpu)
            row |= {"model": str(folder), "skip_tokenizer_init": True}
            row["load_format"] = "dummy" if empty else "auto"
            try:
                with _plain_linear() if self._on_cpu else nullcontext():
                    self._engine = engine_type.from_engine_args(
                        arguments(**row), stat_loggers=[lambda config, index: self.counts]
                    )
            except Exception as error:
                _forget()
                raise ConfigError(f"vLLM cannot serve the model of {folder}: {_told(error)}") from (
                    error
                )
        config = self._engine.model_config
        self.context_length = int(config.max_model_len)
        self.vocab_size = int(config.get_vocab_size())

    def add(
        self, name: str, prompt: Sequence[int], sampling: Sampling, seed: int, salt: str
    ) -> None:
        """Queue a request; what it computes is shared with requests of the same salt alone."""
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            seed=seed,
            stop_token_ids=self._stop_ids,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._engine.add_request(name, tokens_input(list(prompt), cache_salt=salt), params)

    def step(self) -> list[Sampled]:
        """Compute one step of all requests; those that have ended with it."""
        with self._uncompiled():
            return [_sampled(output) for output in self._engine.step() if output.finished]

    def abort(self, names: Iterable[str]) -> None:
        """Drop requests; nothing more is heard of them."""
        self._engine.abort_request(list(names))

    def load(self, tensors: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """Put tensors in place of the weights; forget all keys and values. Nothing may be running.

        Args:
            tensors: gives them by their names in the model's folder.

        Raises:
            EngineBroken: some weights were not replaced; the engine is of no more use.
        """
        self._wake("weights")
        try:
            with torch.no_grad():
                (missed,) = self._engine.collective_rpc(_put, args=(tensors(),))
        except Exception as error:
            raise EngineBroken(f"vLLM did not take the weights: {_told(error)}") from error
        if missed:
            raise EngineBroken(
                f"vLLM did not replace {len(missed)} of its weights, the first {sorted(missed)[0]}"
            )
        if not self._engine.reset_prefix_cache():
            raise EngineBroken("vLLM keeps keys and values of older weights")

    def rest(self) -> None:
        """Give memory back, where the settings say so, until it is needed."""
        if self._sleeps and not self._asleep:
            self._engine.sleep(level=1)
            self._asleep = {"weights", "kv_cache"}

    def wake(self) -> None:
        """Take all memory again."""
        self._wake("weights", "kv_cache")

    def _wake(self, *parts: str) -> None:
        if due := sorted(self._asleep.intersection(parts)):
            self._engine.wake_up(tags=due)
            self._asleep.difference_update(due)

    def close(self) -> None:
        """Free everything."""
        self._engine.engine_core.shutdown()
        del self._engine
        _forget()

    def _uncompiled(self) -> AbstractContextManager[None]:
        """On a CPU vLLM would compile its ranks of tokens in C++, for half a minute, to no use."""
        return torch.compiler.set_stance("force_eager") if self._on_cpu else nullcontext()


def _import() -> tuple[Any, Callable[..., Any]]:
    """vLLM's engine and its arguments.

    Raises:
        ConfigError: it is not installed, or what is cannot be loaded.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine
    except ImportError as error:
        raise ConfigError(f"engine 'vllm' cannot be loaded: {error}") from error
    return LLMEngine, EngineArgs


@contextmanager
def _guest() -> Iterator[None]:
    """Undo what vLLM changes of the process for a process of its own: variables that its children
    would need (`LD_PRELOAD` would reach our sandboxes), the number of threads, random states.
    """
    before, set_threads = dict(os.environ), torch.set_num_threads
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_num_threads = set_threads
        for name in [name for name in os.environ if not name.startswith("VLLM_")]:
            if name not in before:
                del os.environ[name]
        os.environ.update({n: v for n, v in before.items() if not n.startswith("VLLM_")})


@contextmanager
def _plain_linear() -> Iterator[None]:
    """Linear layers that are made in here multiply with their own weights."""
    from vllm.model_executor.layers import utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    packed = utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = plain
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = packed


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _put(worker: Any, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Load tensors into a worker's model; the names of its parameters that none was for."""
    model = worker.get_model()
    loaded = model.load_weights(iter(tensors.items()))
    return {name for name, _ in model.named_parameters()} - set(loaded)


def _sampled(output: Any) -> Sampled:
    """What vLLM says of a request that has ended.

    Raises:
        EngineBroken: there is no log-probability for an id, or no known reason.
    """
    (answer,) = output.outputs
    ids, rows = tuple(answer.token_ids), answer.logprobs or ()
    if len(rows) != len(ids) or answer.finish_reason not in ("stop", "length"):
        raise EngineBroken(
            f"vLLM ended a request with {answer.finish_reason!r}, {len(ids)} ids and"
            f" {len(rows)} log-probabilities"
        )
    logprobs = tuple(float(row[token].logprob) for row, token in zip(rows, ids, strict=True))
    return Sampled(output.request_id, ids, logprobs, answer.finish_reason)


def _refuse_a_second() -> None:
    """vLLM keeps its process group in globals: one engine at a time, in a run of one process."""
    if not torch.distributed.is_initialized():
        return
    count = torch.distributed.get_world_size()
    raise ConfigError(
        "engine 'vllm': this process has a vLLM engine already: close it first"
        if count == 1
        else f"engine 'vllm' samples in a run of one process, not {count}: use 'transformers'"
    )


def _forget() -> None:
    """End the process group of one that vLLM made, so that a later engine can make its own."""
    from vllm.distributed.parallel_state import (
        destroy_distributed_environment,
        destroy_model_parallel,
    )

    destroy_model_parallel()
    destroy_distributed_environment()


def _told(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])}"
