"""The `transformers` engine: batched sampling on a loaded model, with weights updated in place.

Why not `model.generate`: every row needs its own seed, whatever else is in the batch, and the
log-probability of each draw under the very distribution it was drawn from. Draws invert the
cumulative distribution with one uniform number per row and position, so a row's samples depend on
its seed alone (up to floating-point differences between batch shapes; `synchronous=True` fixes the
shapes too).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from agentrl.engines.base import HISTORY_MB, Generation, Sampling, Weights, refuse_request
from agentrl.engines.growing import Histories, History
from agentrl.engines.routing import RoutingNotes, narrowest, noted_routing, refuse_unroutable
from agentrl.errors import EngineAborted, EngineError
from agentrl.waits import Waiter, owned_by, waiting

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_PAUSE_S = 0.01
"""Seconds between two looks at whether a pause is over."""


class Float32Output(torch.nn.Linear):
    """An output layer whose products are summed in float32, whatever the model computes in.

    Rounding to bfloat16 moves a logit of 8 by up to 1/64, which is more than a sequence ratio may
    move. A trainer sums in float32, so a sampler must.
    """

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Logits in float32 (float64 where weights or states are)."""
        weight, wide = self.weight, torch.float32
        wide = torch.promote_types(torch.promote_types(weight.dtype, states.dtype), wide)
        with torch.autocast(states.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(wide)
            is_low = weight.dtype != wide == torch.float32
            if is_low and weight.is_cuda and not states.requires_grad:
                # Tensor cores sum in float32 without a copy of the weights in it.
                rows = states.flatten(0, -2).to(weight.dtype)
                logits = torch.mm(rows, weight.T, out_dtype=wide)
                logits = logits if bias is None else logits + bias
                return logits.view(*states.shape[:-1], -1)
            return torch.nn.functional.linear(states.to(wide), weight.to(wide), bias)


def with_float32_output(model: PreTrainedModel) -> PreTrainedModel:
    """The model, from now on with logits in float32 where its output layer is a plain linear one.

    The class of the layer changes, not the object: copies and checkpoints are what they were.
    """
    head: Any = model.get_output_embeddings()
    if type(head) is torch.nn.Linear:
        head.__class__ = Float32Output
    return model


class _Request(NamedTuple):
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    reply: asyncio.Future[Generation]


class TransformersEngine:
    """Samples with a transformers causal language model.

    Args:
        model: used as it is, so a trainer that updates it in place updates the engine; its logits
            are float32 from then on.
        stop_ids: tokens that end a turn; the one that was sampled is part of the result.
        pad_id: any valid id; padded positions are masked.
        synchronous: wait until every seated episode has sent its request, and sample them in an
            order that does not depend on arrival: batches then do not depend on timing. Otherwise
            whatever is waiting is sampled as soon as the model is free.
        max_batch: rows that are sampled at once.
        history_mb: memory for keys and values of earlier turns, which are kept while episodes are
            seated and the weights stay; 0 computes each history anew.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stop_ids: frozenset[int],
        *,
        pad_id: int = 0,
        synchronous: bool = False,
        max_batch: int = 256,
        history_mb: int = HISTORY_MB,
    ) -> None:
        self.model = with_float32_output(model)
        self.version = 0
        self.histories = Histories(model, history_mb)
        config = model.config.get_text_config()
        self.context_length = int(config.max_position_embeddings)
        self._vocab_size = int(config.vocab_size)
        self.lock = threading.Lock()
        self._stop = torch.tensor(sorted(stop_ids), device=model.device)
        self._pad_id = pad_id
        self._experts: type | None = None
        self._synchronous = synchronous
        self._max_batch = max_batch
        self._seats = 0
        self._waiting: list[_Request] = []
        self._begun: list[_Request] = []
        self._paused = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._busy: asyncio.Task[None] | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="agentrl-sampler")
        self._sampled_s = 0.0

    @property
    def tells_routing(self) -> bool:
        """Whether each generation says which experts its tokens went to."""
        return self._experts is not None

    def tell_routing(self) -> None:
        """Say from now on which experts each token went to, in `Generation.per_token`.

        Raises:
            ConfigError: the model has no experts, or routers whose choice cannot be told.
        """
        with self.lock:
            refuse_unroutable(self.model)
            self.histories.clear()
            self._experts = narrowest(self.model)

    @contextmanager
    def seat(self) -> Iterator[None]:
        """Announce an episode; a synchronous engine waits for requests of all that are seated."""
        self._seats += 1
        try:
            yield
        finally:
            self._seats -= 1
            self._start()
            if self.lock.acquire(blocking=False):  # else `_sample` does it when it ends
                self._forget_if_empty()
                self.lock.release()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Generation:
        """Sample one continuation.

        Raises:
            EngineError: the prompt is none for this model, or the model failed; the cause is in the
                message.
        """
        refuse_request(prompt_ids, sampling, self._vocab_size, self.context_length)
        self._loop = asyncio.get_running_loop()
        reply: asyncio.Future[Generation] = self._loop.create_future()
        self._waiting.append(_Request(tuple(prompt_ids), sampling, seed, reply))
        self._start()
        return await reply

    def load(self, weights: Weights, version: int) -> None:
        """Sample with these weights from the next batch on; the batch that runs is waited for."""
        with self.lock:
            if weights.module is not self.model:
                self.model.load_state_dict(weights.tensors())
            self.histories.clear()
            self.version = version

    def pause(self) -> None:
        """Begin no further batch until `resume`."""
        self._paused = True

    def resume(self) -> None:
        """Sample what has been waiting."""
        self._paused = False
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._start)

    def abort(self) -> None:
        """End every request that waits or runs with an `EngineError`."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._abort)

    def _abort(self) -> None:
        for request in (*self._waiting, *self._begun):
            if not request.reply.done():
                request.reply.set_exception(EngineAborted("the request was aborted"))

    def metrics(self) -> dict[str, float]:
        """`time/engine_s`: seconds of sampling since the last call."""
        seconds, self._sampled_s = self._sampled_s, 0.0
        return {"time/engine_s": seconds}

    async def close(self) -> None:
        """End the sampling thread; safe to call twice."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _due(self) -> bool:
        """Whether a batch should be sampled now."""
        self._waiting = [request for request in self._waiting if not request.reply.done()]
        complete = not self._synchronous or len(self._waiting) >= self._seats
        return bool(self._waiting) and complete and not self._paused

    def _start(self) -> None:
        if self._due() and (self._busy is None or self._busy.done()):
            self._busy = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        """Sample what is waiting, until nothing is due."""
        await asyncio.sleep(0)  # requests made in this turn of the loop join the batch
        while self._due():
            self._begun, self._waiting = sorted(self._waiting, key=_batch_order), []
            for _, alike in groupby(self._begun, key=lambda request: _batch_order(request)[0]):
                rows = list(alike)
                for start in range(0, len(rows), self._max_batch):
                    if self._paused:
                        with owned_by(Waiter("engine")), waiting("the end of its pause"):
                            while self._paused:
                                await asyncio.sleep(_PAUSE_S)
                    await self._answer(rows[start : start + self._max_batch])

    async def _answer(self, rows: list[_Request]) -> None:
        """Sample a batch; where that fails, each row alone: one row is no other's fault."""
        rows = [request for request in rows if not request.reply.done()]
        if not rows:
            return
        try:
            started = time.perf_counter()
            with owned_by(Waiter("engine")), waiting(f"a batch of {len(rows)} requests"):
                results = await asyncio.get_running_loop().run_in_executor(
                    self._worker, self._sample, rows
                )
            self._sampled_s += time.perf_counter() - started
        except Exception as cause:  # noqa: BLE001 - handed to the request that waits for it
            for request in rows if len(rows) > 1 else ():
                await self._answer([request])
            if len(rows) == 1 and not rows[0].reply.done():
                error = EngineError(f"sampling failed: {type(cause).__name__}: {cause}")
                error.__cause__ = cause
                rows[0].reply.set_exception(error)
            return
        for request, generation in zip(rows, results, strict=True):
            if not request.reply.done():
                request.reply.set_result(generation)

    @torch.inference_mode()
    def _sample(self, rows: Sequence[_Request]) -> list[Generation]:
        """Prefill, then decode until each row has stopped."""
        with self.lock:
            was_training = self.model.training
            self.model.eval()
            try:
                with noted_routing(self.model, self._experts) as notes:
                    return _decode(self, rows, notes)
            finally:
                self.model.train(was_training)
                self._forget_if_empty()

    def _forget_if_empty(self) -> None:
        """With no episode seated nothing goes on, and later batches depend on no earlier play."""
        if not self._seats:
            self.histories.clear()


@dataclass
class _Batch:
    """The rows of a batch that still run."""

    rows: list[int]
    attention_BT: torch.Tensor
    cache: Any

    def keep(self, alive: list[int]) -> None:
        """Go on with the rows at these places of the batch; one that stands twice is copied."""
        index = torch.tensor(alive, device=self.attention_BT.device)
        self.rows = [self.rows[i] for i in alive]
        self.attention_BT = self.attention_BT[index]
        self.cache.batch_select_indices(index)

    def next_logits(
        self, model: Any, ids_BT: torch.Tensor, position_BT: torch.Tensor
    ) -> torch.Tensor:
        """Read tokens; the logits (B, V) of what follows them."""
        output = model(
            input_ids=ids_BT,
            attention_mask=self.attention_BT,
            position_ids=position_BT,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits_BV: torch.Tensor = output.logits[:, -1]
        return logits_BV


def _decode(
    engine: TransformersEngine, requests: Sequence[_Request], notes: RoutingNotes
) -> list[Generation]:
    device = engine.model.device
    limits = [request.sampling.max_tokens for request in requests]
    uniform = [
        _uniform(request.seed, limit) for request, limit in zip(requests, limits, strict=True)
    ]
    prompts = list(dict.fromkeys(request.prompt_ids for request in requests))
    ids_BT, batch, known = _read(engine, prompts)
    place = {prompt: index for index, prompt in enumerate(prompts)}
    prompt_of = [place[request.prompt_ids] for request in requests]
    ids: list[list[int]] = [[] for _ in requests]
    logprobs: list[list[float]] = [[] for _ in requests]
    finish = ["length"] * len(requests)
    position_BT = (batch.attention_BT.cumsum(-1) - 1).clamp(min=0)[:, -ids_BT.shape[1] :]
    for step in range(max(limits)):
        logits_BV = batch.next_logits(engine.model, ids_BT, position_BT)
        if step:
            notes.add(batch.rows)
        else:  # a prompt that several rows share (those of a group) was computed once
            notes.begin(prompts, known, prompt_of)
            if prompt_of != batch.rows:
                batch.keep(prompt_of)
            batch.rows = list(range(len(requests)))
            row_of_B = torch.tensor(prompt_of, device=device)
            logits_BV, position_BT = logits_BV[row_of_B], position_BT[row_of_B]
        u_B = torch.stack([uniform[row][step] for row in batch.rows]).to(device)
        token_B, logprob_B = draw(logits_BV, u_B, requests[0].sampling)
        stopped = torch.isin(token_B, engine._stop).tolist()
        alive = []
        rows = zip(batch.rows, token_B.tolist(), logprob_B.tolist(), stopped, strict=True)
        for index, (row, token, logprob, stop) in enumerate(rows):
            ids[row].append(token)
            logprobs[row].append(logprob)
            if stop:
                finish[row] = "stop"
            elif len(ids[row]) < limits[row] and not requests[row].reply.done():
                alive.append(index)
                continue
            read = (*requests[row].prompt_ids, *ids[row][:-1])
            past = known[prompt_of[row]]
            place_T, experts = batch.attention_BT[index], notes.of(row)
            engine.histories.keep(read, batch.cache, index, place_T, past, experts)
        if not alive:
            break
        if len(alive) < len(batch.rows):
            batch.keep(alive)
            token_B = token_B[torch.tensor(alive, device=device)]
            position_BT = position_BT[torch.tensor(alive, device=device)]
        ids_BT, position_BT = token_B[:, None], position_BT[:, -1:] + 1
        batch.attention_BT = torch.nn.functional.pad(batch.attention_BT, (0, 1), value=1)
    said = zip(ids, logprobs, finish, map(notes.told, range(len(requests))), strict=True)
    return [
        Generation(tuple(new), tuple(words), end, engine.version, told)  # type: ignore[arg-type]
        for new, words, end, told in said
    ]


def _read(
    engine: TransformersEngine, prompts: Sequence[tuple[int, ...]]
) -> tuple[torch.Tensor, _Batch, list[History | None]]:
    """The ids_BT of prompts that are yet to be computed, behind what is kept of their histories."""
    engine.histories.begin()
    known = [engine.histories.before(prompt) for prompt in prompts]
    kept = [len(past.ids) if past else 0 for past in known]
    width = max(len(prompt) - length for prompt, length in zip(prompts, kept, strict=True))
    # Instead of padding between old and new, the end of a history is computed once more: columns
    # are then as far apart as their tokens, which some models count on.
    kept = [
        min(length, max(0, len(prompt) - width))
        for prompt, length in zip(prompts, kept, strict=True)
    ]
    cache, known_BT = engine.histories.as_cache(known, kept)
    new = [prompt[length:] for prompt, length in zip(prompts, kept, strict=True)]
    ids_BT, new_BT = _left_pad(new, engine._pad_id, engine.model.device)
    attention_BT = torch.cat([known_BT, new_BT], 1)
    return ids_BT, _Batch(list(range(len(prompts))), attention_BT, cache), known


def draw(
    logits_BV: torch.Tensor, u_B: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row by inverting the cumulative distribution.

    Args:
        logits_BV: B rows, V tokens of the vocabulary.
        u_B: float64, uniform on [0, 1).

    Returns:
        tokens_B (int64) and logprobs_B (float32): of the distribution after temperature, top-k and
        top-p. Temperature 0 takes the most likely token, with log-probability 0.
    """
    logits_BV = logits_BV.float()
    if sampling.temperature == 0:
        return logits_BV.argmax(-1), torch.zeros(len(logits_BV), device=logits_BV.device)
    logits_BV = logits_BV / sampling.temperature
    if sampling.top_k > 0:
        kth_B1 = logits_BV.topk(min(sampling.top_k, logits_BV.shape[-1])).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth_B1, -torch.inf)
    if sampling.top_p < 1:
        sorted_BV, order_BV = logits_BV.sort(descending=True)
        before_BV = sorted_BV.softmax(-1).cumsum(-1) - sorted_BV.softmax(-1)
        drop_BV = torch.zeros_like(before_BV, dtype=torch.bool).scatter(
            -1, order_BV, before_BV >= sampling.top_p
        )
        logits_BV = logits_BV.masked_fill(drop_BV, -torch.inf)
    logprobs_BV = logits_BV.log_softmax(-1)
    cumulative_BV = logprobs_BV.double().exp().cumsum(-1)
    total_B1 = cumulative_BV[:, -1:]
    target_B1 = torch.minimum(
        u_B[:, None] * total_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1))
    )
    tokens_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True)
    return tokens_B1[:, 0], logprobs_BV.gather(-1, tokens_B1)[:, 0]


def _uniform(seed: int, count: int) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _left_pad(
    rows: Sequence[Sequence[int]], pad_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-aligned ids_BT and attention_BT."""
    width = max(len(row) for row in rows)
    ids_BT = torch.full((len(rows), width), pad_id, dtype=torch.long)
    attention_BT = torch.zeros((len(rows), width), dtype=torch.long)
    for index, row in enumerate(rows):
        ids_BT[index, width - len(row) :] = torch.tensor(row)
        attention_BT[index, width - len(row) :] = 1
    return ids_BT.to(device), attention_BT.to(device)


def _batch_order(request: _Request) -> tuple[tuple[float, float, int], int, int, tuple[int, ...]]:
    """Rows of one distribution together, like lengths side by side, whenever they arrived."""
    sampling = request.sampling
    distribution = (sampling.temperature, sampling.top_p, sampling.top_k)
    return distribution, len(request.prompt_ids), request.seed, request.prompt_ids
