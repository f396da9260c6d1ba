"""What a recipe is made of: named pure functions, each with its options as one typed model.

    class Width(Options):
        width: Positive = 0.2
        \"\"\"How far a ratio may move before its gradient fades.\"\"\"

    @term(Width, reads=("reference",))
    def soft_clip(output: PolicyOutput, batch: TokenBatch, options: Width) -> Tensor:
        \"\"\"-A·width·tanh((ρ - 1)/width): PPO's clip without its edge.\"\"\"
        ...

`soft_clip` is then a `LossTerm`. Calling it uses its options; a call can override them
(`soft_clip(output, batch, width=0.1)`), and `soft_clip.changed(width=0.1)` is the same part with
another option. `reads` names what a run must compute for it. A plain function is a part as well; it
has no options and reads tokens and outcomes only.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, Field, ValidationError
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.settings import STRICT, describe_mistake, find_mistakes
from agentrl.trainers.batch import PolicyOutput, TokenBatch

Need = Literal[
    "group",  # episodes of one task are compared with each other
    "turns",  # when a process reward came, and not only their sum
    "parts",  # the named terms of the score instead of its value
    "nonnegative",  # rewards of at least 0
    "reference",  # log-probabilities under a frozen reference
    "proximal",  # log-probabilities and entropy of the policy the update starts from
    "anchor",  # ratios that are exactly 1 before the update: the trainer scores its own anchor
    "critic",  # a critic's values
    "greedy",  # one greedy episode per task
    "entropy",  # the policy's entropy before the update
    "entropy_gradient",  # the policy's entropy, with gradient
    "top",  # log-probabilities of the policy's likeliest tokens
    "anchor_top",  # the anchor's likeliest tokens under both (`TokenBatch.top_ids_BTK`)
    "router",  # how evenly the routers of a mixture of experts spread the tokens
    "teacher",  # a teacher's log-probabilities of the sampled tokens
    "teacher_top",  # a teacher's log-probabilities of the vocabulary
]
"""What a part reads besides tokens and outcomes, so that a run computes that and nothing else."""

Written = Literal["advantages", "selection"]
"""What one part of a recipe writes and another one expects to find."""


def _below_2_63(value: float) -> float:
    if 2**63 <= value < math.inf:  # would overflow in float32 or int64 arithmetic
        raise ValueError("must be below 2**63")
    return value


Count = Annotated[int, Field(ge=1), AfterValidator(_below_2_63)]
NonNegative = Annotated[float, Field(ge=0), AfterValidator(_below_2_63)]
Positive = Annotated[float, Field(gt=0), AfterValidator(_below_2_63)]
AtLeastOne = Annotated[float, Field(ge=1), AfterValidator(_below_2_63)]
Share = Annotated[float, Field(ge=0, le=1)]
Bound = Annotated[float, Field(ge=0, allow_inf_nan=True), AfterValidator(_below_2_63)]
PositiveBound = Annotated[float, Field(gt=0, allow_inf_nan=True), AfterValidator(_below_2_63)]
"""Numbers for which inf means unbounded."""


class Options(BaseModel):
    """Options of a part: names, types and ranges as annotations, defaults, one sentence each."""

    model_config = STRICT

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """The same options with some values changed.

        Raises:
            ConfigError: an option does not exist or its value is out of range.
        """
        return check_loss(type(self), dict(self) | dict(changes))


Model = TypeVar("Model", bound=BaseModel)


def check_loss(model_cls: type[Model], values: Mapping[str, Any], table: str = "loss") -> Model:
    """Build the settings of the table `loss`, or of a table inside it.

    Raises:
        ConfigError: the first mistake, with its setting, value and fix.
    """
    try:
        return model_cls.model_validate(values)
    except ValidationError as invalid:
        raise refuse_setting(invalid, model_cls, values, table) from None


def refuse_setting(
    invalid: ValidationError, model_cls: type[Any], values: Any, table: str = "loss"
) -> ConfigError:
    """The first mistake in a table, with its setting, value and fix."""
    mistake = find_mistakes(invalid, model_cls, values)[0]
    setting = f"{table}.{mistake.setting}".rstrip(".")
    return ConfigError(describe_mistake(mistake._replace(setting=setting)), setting=setting)


@dataclass(frozen=True)
class Part:
    """A named pure function of a recipe, with its options.

    Attributes:
        function: takes what the kind of part takes, and the options if there are any.
        reads: what a run must compute for it.
        expects: what an earlier part of the recipe must have written.
        writes: what a later part may expect.
        text: its docstring.
    """

    function: Callable[..., Any]
    name: str
    options: Options = Options()  # noqa: RUF009 - it is frozen
    reads: frozenset[Need] = frozenset()
    expects: frozenset[Written] = frozenset()
    writes: frozenset[Written] = frozenset()
    text: str = ""

    @classmethod
    def of(cls, function: Any) -> Self:
        """Any callable as a part: a part stays what it is, and `partial` sets its options."""
        named: Any = function
        if isinstance(named, cls):
            return named
        if isinstance(function, partial):
            named = function.func
            if isinstance(named, cls):
                return named.changed(**function.keywords)
        name = getattr(named, "__name__", type(named).__name__)
        return cls(function, name, text=inspect.cleandoc(function.__doc__ or ""))

    def changed(self, **options: Any) -> Self:
        """The same part with other options.

        Raises:
            ConfigError: the part has no such option, or a value is out of range.
        """
        return replace(self, options=self.options.changed(options)) if options else self

    @property
    def label(self) -> str:
        """Its name in settings: aggregates are called `token` there, not `by_token`."""
        return self.name.removeprefix("by_")

    @property
    def formula(self) -> str:
        """The first paragraph of its docstring, on one line."""
        return " ".join(self.text.partition("\n\n")[0].split())

    def _apply(self, changes: dict[str, Any], *values: Any) -> Any:
        options = self.options.changed(changes) if changes else self.options
        if type(options) is Options:
            return self.function(*values)
        return self.function(*values, options)


class BatchStep(Part):
    """batch -> batch: credit writes advantages, corrections write weights and selections."""

    def __call__(self, batch: TokenBatch, **options: Any) -> TokenBatch:
        """Apply it; options are for this call only."""
        changed: TokenBatch = self._apply(options, batch)
        return changed


class LossTerm(Part):
    """Output and batch -> loss per token (B, T): a surrogate or a regulariser."""

    def __call__(self, output: PolicyOutput, batch: TokenBatch, **options: Any) -> Tensor:
        """Apply it; options are for this call only."""
        loss_BT: Tensor = self._apply(options, output, batch)
        return loss_BT


class Aggregate(Part):
    """Loss per token (B, T) and batch -> scalar, with denominators of the whole optimizer step."""

    def __call__(self, per_token_BT: Tensor, batch: TokenBatch, **options: Any) -> Tensor:
        """Apply it; options are for this call only."""
        scalar: Tensor = self._apply(options, per_token_BT, batch)
        return scalar


class Loss(Part):
    """Output and batch -> scalar and metrics: a loss that is no sum of terms per token."""

    def __call__(
        self, output: PolicyOutput, batch: TokenBatch, **options: Any
    ) -> tuple[Tensor, dict[str, float]]:
        """Apply it; options are for this call only."""
        scalar, metrics = self._apply(options, output, batch)
        return scalar, metrics


class GroupForm(Part):
    """Rewards of the G episodes of a group -> one advantage for each, None where there is none."""

    def __call__(
        self, rewards_G: Sequence[float | None], **options: Any
    ) -> tuple[float | None, ...]:
        """Apply it; options are for this call only."""
        advantages_G: tuple[float | None, ...] = self._apply(options, rewards_G)
        return advantages_G


AnyPart = TypeVar("AnyPart", bound=Part)


def define(
    kind: type[AnyPart],
    options: type[Options] = Options,
    *,
    reads: Iterable[Need] = (),
    expects: Iterable[Written] = (),
    writes: Iterable[Written] = (),
) -> Callable[[Callable[..., Any]], AnyPart]:
    """Decorate a function as a part; see the example at the head of this module."""

    def decorate(function: Callable[..., Any]) -> AnyPart:
        part = kind.of(function)
        return replace(
            part,
            options=options(),
            reads=frozenset(reads),
            expects=frozenset(expects),
            writes=frozenset(writes),
        )

    return decorate


step = partial(define, BatchStep)
term = partial(define, LossTerm)
aggregate = partial(define, Aggregate)
loss = partial(define, Loss)
group_form = partial(define, GroupForm)
