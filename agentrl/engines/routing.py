"""Which experts each token goes to: told by a model while it computes, or prescribed to it.

The routers of a family differ in what they compute before and after they choose. All of them choose
by one `torch.topk` over the scores of the experts, so that one call is seen, and replaced; the
weights of the chosen experts stay the family's own arithmetic, with its gradient.

Letters: B rows, T tokens, N tokens of all rows, L layers with a router, K experts of a token,
E experts of a layer.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from agentrl.errors import ConfigError

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields of a configuration that say how many experts a layer has."""
_FREE = threading.local()


def routers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The routers of a model that say how many experts they have and choose, first layer first."""
    return [
        module
        for module in model.modules()
        if type(module).__name__.endswith("Router")
        and hasattr(module, "num_experts")
        and hasattr(module, "top_k")
    ]


@torch.inference_mode()
def refuse_unroutable(model: Any) -> None:
    """See that the choice of every router of a model can be told and prescribed.

    Two tokens are read, in evaluation mode.

    Raises:
        ConfigError: the model has no experts, or routers that choose in another way.
    """
    config, kind = model.config.get_text_config(), type(model).__name__
    if not any((getattr(config, name, None) or 0) > 1 for name in _EXPERTS):
        raise ConfigError(
            f"engine.routing is for mixtures of experts, and {kind} has no experts: leave it out"
        )
    was_training = model.training
    model.eval()
    try:
        with recorded_routing(model) as chosen:
            ids_BT = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
            model(input_ids=ids_BT, use_cache=False)
    finally:
        model.train(was_training)
    routers = routers_of(model)
    if not routers or len(chosen) != len(routers) or len({one.shape for one in chosen}) > 1:
        names = sorted({type(one).__name__ for one in routers or model.modules()})
        where = [name for name in names if re.search("Router|Gat(e|ing)$|Mo[eE]$|MoeBlock", name)]
        raise ConfigError(
            f"engine.routing: {kind} chooses experts in {' and '.join(where) or 'an unknown way'},"
            " not by one torch.topk over their scores in each layer, so the choice cannot be"
            " replayed: leave it out"
        )


@contextmanager
def recorded_routing(model: torch.nn.Module) -> Iterator[list[Tensor]]:
    """Collect what is chosen in forward passes of this thread: one int64 tensor (N, K) for each
    layer with a router, in order; whoever reads them may clear the list.
    """
    found: list[Tensor] = []
    owner = threading.get_ident()

    def note(chooser: _Chooser) -> None:
        found.extend(chooser.own)

    def is_ours() -> bool:
        return threading.get_ident() == owner

    with _watched([_Chooser(router) for router in routers_of(model)], is_ours, note):
        yield found


class Replay:
    """What replaying has changed so far.

    Attributes:
        replayed: how many choices (a token in a layer) were prescribed.
        differ: how many of them the model itself would have made otherwise.
    """

    def __init__(self) -> None:
        self.replayed: Tensor | int = 0
        self.differ: Tensor | int = 0


@contextmanager
def replayed_routing(model: torch.nn.Module, experts_BTLK: Tensor | None) -> Iterator[Replay]:
    """Prescribe the choice of experts in every forward pass within, but in those that sample
    (inference mode): another thread may use the model for that.

    R3, https://arxiv.org/abs/2510.11370: the experts are the sampler's, their weights are the
    model's own and keep their gradient. Stay inside until after `backward()` where gradient
    checkpointing is on: it runs layers again.

    Args:
        model: with routers that `refuse_unroutable` accepts.
        experts_BTLK: integers, for the tokens of the very batch that is scored; a token whose first
            entry is -1 is routed freely. None: all are.

    Raises:
        ConfigError: the model has another number of routers, of experts, or of experts per token,
            or scores other tokens.
    """
    replay, routers = Replay(), routers_of(model)
    if experts_BTLK is None:
        yield replay
        return
    layers = experts_BTLK.shape[2]
    if layers != len(routers):
        raise ConfigError(
            f"recorded routing has {layers} layers and the model {len(routers)} with a router: use"
            " the routing that an engine recorded with this very model"
        )
    last, most = int(experts_BTLK.max()), min(int(cast("Any", one).num_experts) for one in routers)
    if last >= most:
        raise ConfigError(
            f"recorded routing names expert {last}, and the model numbers them from 0 to"
            f" {most - 1}: use the routing that an engine recorded with this very model"
        )
    choosers = [
        _Chooser(router, experts_BTLK[:, :, layer].flatten(0, 1).long())
        for layer, router in enumerate(routers)
    ]

    def count(chooser: _Chooser) -> None:
        given, differ = chooser.counts()
        replay.replayed += given
        replay.differ += differ

    def scores() -> bool:
        return not (torch.is_inference_mode_enabled() or getattr(_FREE, "on", False))

    with _watched(choosers, scores, count):
        yield replay


@contextmanager
def free_routing() -> Iterator[None]:
    """Forward passes of this thread within are routed freely, whatever is prescribed outside."""
    _FREE.on = True
    try:
        yield
    finally:
        _FREE.on = False


def narrowest(model: torch.nn.Module) -> type[np.unsignedinteger[Any]]:
    """The kind of integers that holds the numbers of all experts."""
    most = max(int(cast("Any", router).num_experts) for router in routers_of(model))
    return np.uint8 if most <= 256 else np.uint16


class RoutingNotes:
    """The experts of the tokens of a batch, row by row, while it is read and sampled.

    Args:
        chosen: of `recorded_routing`; None: nothing is noted.
        kind: of the integers that are kept.
    """

    def __init__(self, chosen: list[Tensor] | None, kind: Any = None) -> None:
        self._chosen, self._kind = chosen, kind
        self._parts: dict[int, list[Any]] = {}

    def begin(
        self, prompts: Sequence[Sequence[int]], known: Sequence[Any], prompt_of: Sequence[int]
    ) -> None:
        """After the first forward pass, of all prompts, padded on the left.

        Args:
            known: for each prompt, the history that it goes on from, or None.
            prompt_of: for each row of the passes to come, the number of its prompt.
        """
        if self._chosen is None:
            return
        self.add(range(len(prompts)))
        read = list[list[Any]]()
        for (part_TLK,), prompt, past in zip(self._parts.values(), prompts, known, strict=True):
            kept = max(0, len(prompt) - len(part_TLK))
            read.append([past.experts[:kept]] if kept else [])
            read[-1].append(part_TLK[kept - len(prompt) :])
        self._parts = {row: [*read[at]] for row, at in enumerate(prompt_of)}

    def add(self, rows: Sequence[int]) -> None:
        """After a forward pass: what it read of each of these rows."""
        if self._chosen is None:
            return
        whole_NLK = torch.stack(self._chosen, 1).cpu().numpy().astype(self._kind)
        self._chosen.clear()
        for row, part_TLK in zip(
            rows, whole_NLK.reshape(len(rows), -1, *whole_NLK.shape[1:]), strict=True
        ):
            self._parts.setdefault(row, []).append(part_TLK)

    def of(self, row: int) -> Any:
        """The experts (N, L, K) of a row's tokens that were read; None where none are noted."""
        if self._chosen is None:
            return None
        self._parts[row] = [np.concatenate(self._parts[row])]
        return self._parts[row][0]

    def told(self, row: int) -> dict[str, Any]:
        """`Generation.per_token` of a row."""
        return {} if self._chosen is None else {"routing": self.of(row)}


@contextmanager
def noted_routing(model: torch.nn.Module, kind: type | None) -> Iterator[RoutingNotes]:
    """Note what is chosen in forward passes of this thread, row by row.

    Args:
        kind: of the integers that are kept; None: nothing is noted.
    """
    if kind is None:
        yield RoutingNotes(None)
        return
    with recorded_routing(model) as chosen:
        yield RoutingNotes(chosen, kind)


class _Chooser(TorchFunctionMode):
    """Around one router's forward pass: notes its own choice, and may put another in its place."""

    def __init__(self, router: Any, experts_NK: Tensor | None = None) -> None:
        super().__init__()
        self.router = router
        self._size, self._given_NK = int(router.num_experts), experts_NK
        self._k = int(router.top_k)
        self.own: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Every function of torch that the router calls."""
        found = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "topk" or args[0].dim() != 2:
            return found
        scores, k = args[0], found.indices.shape[-1]
        if (scores.shape[-1], k) == (self._size, self._k):
            self.own = [found.indices.detach()]
            if self._given_NK is None:
                return found
            return self._taken(scores, self._experts(found.indices))
        groups = scores.shape[-1]
        if self._given_NK is None or groups >= self._size or self._size % groups:
            return found
        # Families that first choose groups of experts: those of the experts that are prescribed.
        home_NK = self._given_NK.to(scores.device).clamp(min=0) // (self._size // groups)
        wanted = scores.scatter(-1, home_NK, torch.inf)
        wanted = torch.where(self._given_NK[:, :1].to(scores.device) < 0, scores, wanted)
        return self._taken(scores, wanted.topk(k).indices)

    def refuse_silence(self) -> None:
        """See that the router has chosen in the way that can be replaced.

        Raises:
            ConfigError: its choice should have been, and was not.
        """
        if self._given_NK is not None and not self.own:
            kind = type(self.router).__name__
            raise ConfigError(f"{kind} did not choose experts by one torch.topk over their scores")

    def counts(self) -> tuple[Tensor, Tensor]:
        """Tokens whose experts were prescribed, and how many of them have others of their own."""
        assert self._given_NK is not None
        given_N = self._given_NK[:, 0] >= 0
        own_NK = self.own[0].sort(-1).values.to(given_N.device)
        differ_N = (own_NK != self._given_NK.sort(-1).values).any(-1) & given_N
        return given_N.sum(), differ_N.sum()

    def _experts(self, own_NK: Tensor) -> Tensor:
        assert self._given_NK is not None
        if self._given_NK.shape != own_NK.shape:
            raise ConfigError(
                f"recorded routing is of shape {tuple(self._given_NK.shape)} and the router's"
                f" {tuple(own_NK.shape)}: the batch that is scored and the model must be those that"
                " were recorded"
            )
        given_NK = self._given_NK.to(own_NK.device)
        return torch.where(given_NK[:, :1] < 0, own_NK, given_NK)

    @staticmethod
    def _taken(scores: Tensor, indices: Tensor) -> Any:
        """As if `torch.topk` had found these."""
        return torch.return_types.topk((scores.gather(-1, indices), indices))


@contextmanager
def _watched(
    choosers: Sequence[_Chooser],
    applies: Callable[[], bool],
    done: Callable[[_Chooser], None],
) -> Iterator[None]:
    """Each chooser stands around the forward passes of its router to which it applies."""

    handles: list[Any] = []

    def watch(chooser: _Chooser) -> None:
        def before(module: torch.nn.Module, inputs: Any) -> None:
            if applies():
                chooser.own = []
                chooser.__enter__()  # type: ignore[no-untyped-call]

        def after(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            if applies():
                chooser.__exit__(None, None, None)  # type: ignore[no-untyped-call]
                if output is not None:  # else an exception ended it
                    chooser.refuse_silence()
                    done(chooser)

        router: torch.nn.Module = chooser.router
        handles.append(router.register_forward_pre_hook(before))
        handles.append(router.register_forward_hook(after, always_call=True))

    try:
        for chooser in choosers:
            watch(chooser)
        yield
    finally:
        for handle in handles:
            handle.remove()
