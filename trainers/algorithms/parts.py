"""What an algorithm is made of: small pure functions of three kinds, each with its options as
keywords.

- Step, batch -> batch: credit (advantages) and corrections (weights), before anything is scored.
- Term, output and batch -> (B, T): a per-token loss, of a surrogate or a regulariser.
- Aggregate, (B, T) and batch -> scalar: with denominators of the whole optimizer step.

Options are the keyword-only parameters with a default. `functools.partial` sets them;
`with_options` does so by name. A part says what it reads beside tokens and outcomes by
`@needs(...)`, so a run computes that and nothing else.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.records.plain import as_toml
from agentrl.trainers.batch import PolicyOutput, TokenBatch

Step = Callable[[TokenBatch], TokenBatch]
Term = Callable[[PolicyOutput, TokenBatch], Tensor]
Aggregate = Callable[[Tensor, TokenBatch], Tensor]
Part = TypeVar("Part", bound=Callable[..., Any])

Need = Literal[
    "group",
    "turns",
    "parts",
    "nonnegative",
    "reference",
    "proximal",
    "anchor",
    "critic",
    "greedy",
    "entropy",
    "entropy_gradient",
    "top",
    "anchor_top",
    "router",
    "teacher",
    "teacher_top",
]
"""What a part reads: episodes of one task beside each other; when process rewards came, and not
only their sum; the named terms of the score in place of its value; rewards of at least 0;
log-probabilities of a frozen reference; log-probabilities and entropy of the policy that the update
starts from; ratios that are 1 to the last bit before it (the trainer's own anchor, as in
`anchor.anchors_itself`); a critic's values; a greedy episode per task; the policy's entropy as a
value or with gradient; log-probabilities of its likeliest tokens; the anchor's likeliest tokens
under both
(`TokenBatch.top_ids_BTK`); how evenly the routers of a mixture of experts spread the tokens; a
teacher's log-probabilities of what was sampled, or of the vocabulary."""

LARGEST = 2**63
BOUNDS = ("low", "high", "max", "limit", "clip", "age")
"""Last words of options that bound something: there infinity is no bound, and elsewhere no number
to compute with.
"""


@dataclass(frozen=True)
class Lifted:
    """A step made of a simpler function, whose options, name and needs it has: `Lifted(lift, f)(x)`
    is `lift(x, f)`.
    """

    lift: Callable[..., Any]
    inner: Callable[..., Any]

    def __call__(self, batch: TokenBatch) -> TokenBatch:
        """Apply it."""
        done: TokenBatch = self.lift(batch, self.inner)
        return done


def needs(*names: Need) -> Callable[[Part], Part]:
    """Mark what a part reads beside tokens and outcomes; marks add up."""

    def mark(part: Part) -> Part:
        part.needs = needs_of(part) | frozenset(names)  # type: ignore[attr-defined]
        return part

    return mark


def needs_of(part: Callable[..., Any]) -> frozenset[Need]:
    """What a part was marked with."""
    found: frozenset[Need] = getattr(function_of(part), "needs", frozenset())
    return found


def options(part: Callable[..., Any]) -> dict[str, Any]:
    """Name -> value of a part's options, as they are set now; those of a lifted part are the inner
    one's.
    """
    if isinstance(part, Lifted):
        return options(part.inner)
    parameters = inspect.signature(part).parameters.values()
    return {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}


def with_options(part: Part, settings: Mapping[str, Any]) -> Part:
    """The part with those of the settings that are options of it; others are left alone.

    Raises:
        ConfigError: a value has another type than the option's default, is no number from 0 up
            (counts: from 1), or is infinite where nothing is bounded.
    """
    if isinstance(part, Lifted):
        return replace(part, inner=with_options(part.inner, settings))
    known = options(part)
    own = {
        name: _checked(name, value, known[name])
        for name, value in settings.items()
        if name in known
    }
    return partial(part, **own) if own else part  # type: ignore[return-value]


def name_of(part: Callable[..., Any]) -> str:
    """The name of the function behind a part."""
    return str(getattr(function_of(part), "__name__", type(part).__name__))


def function_of(part: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind a part."""
    while isinstance(part, partial | Lifted):
        part = part.inner if isinstance(part, Lifted) else part.func
    return part


def _checked(name: str, value: Any, default: Any) -> Any:
    """The value, if it is of the option's kind."""
    if isinstance(default, bool | str):
        if type(value) is not type(default):
            wanted = "true or false" if isinstance(default, bool) else "text"
            raise ConfigError(
                f"{name}={as_toml(value)} must be {wanted}, as in {name} = {as_toml(default)}"
            )
        return value
    if isinstance(default, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name}={as_toml(value)} must be a table of numbers by name")
        return {key: _checked(f"{name}.{key}", number, 0.0) for key, number in value.items()}
    least, kind = (1, int) if isinstance(default, int) else (0, int | float)
    if isinstance(value, bool) or not isinstance(value, kind) or not value >= least:
        noun = "count" if least else "number"
        raise ConfigError(f"{name}={as_toml(value)} must be a {noun} >= {least}")
    if value >= LARGEST and not (value == math.inf and name.rsplit("_", 1)[-1] in BOUNDS):
        raise ConfigError(
            f"{name}={str(value)[:20]} must be below 2**63: only what bounds something may be inf"
        )
    return value if least else float(value)  # 1 for 1.0 would make it a count from then on
