"""Examples as token rows: what the policy said trains, everything else is context."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal, TypeVar

from agentrl.chat.tokens import Chat
from agentrl.errors import UserError
from agentrl.trainers.offline.data.nouns import Conversation, Label, Messages, Pair, Response

TooLong = Literal["drop", "refuse"]
One = TypeVar("One")
Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class TokenRow:
    """Token ids of one conversation, and 1 at those that the policy said, else 0; equally long."""

    ids: tuple[int, ...]
    mask: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.mask):
            raise ValueError(f"{len(self.ids)} ids but {len(self.mask)} mask values")
        if not any(self.mask) or self.mask[0]:
            raise ValueError("a row has a prompt and at least one trained token")

    @property
    def prompt(self) -> int:
        """Number of tokens before the first trained one."""
        return self.mask.index(1)


@dataclass(frozen=True, slots=True)
class PairRow:
    """Two rows of one prompt; the first was preferred."""

    chosen: TokenRow
    rejected: TokenRow
    margin: float | None = None
    subset: str = ""


@dataclass(frozen=True, slots=True)
class LabelRow:
    """A row that was found desirable, or not."""

    row: TokenRow
    desirable: bool


@dataclass(frozen=True)
class Lengths:
    """Tokens of some rows, and what happened to those that were too long."""

    rows: int
    median: int
    longest: int
    limit: int
    too_long: int

    def row(self) -> dict[str, int]:
        """As plain values."""
        return asdict(self)


def response_row(chat: Chat, prompt: Messages, response: Response) -> TokenRow:
    """The row of one response: its recorded tokens, else those that the policy would have sampled.

    Only the response trains: assistant messages of the prompt are context.
    """
    if response.branch is not None:
        return TokenRow(response.branch.ids, response.branch.mask)
    if len(response.messages) > 1:
        said = chat.render_demonstration((*prompt, *response.messages), response.tools)
        return TokenRow(tuple(said.input_ids), tuple(said.mask))
    before = chat.prompt_ids(prompt, response.tools)
    turn = chat.turn_ids(response.messages[0], (), before)
    return TokenRow((*before, *turn), (0,) * len(before) + (1,) * len(turn))


def conversation_rows(chat: Chat, conversation: Conversation) -> list[TokenRow]:
    """The rows of a whole conversation: every assistant message trains, once."""
    if (branch := conversation.branch) is not None:
        return [TokenRow(branch.ids, branch.mask)]
    made = chat.render_demonstrations(conversation.messages, conversation.tools)
    return [TokenRow(tuple(row.input_ids), tuple(row.mask)) for row in made if any(row.mask)]


def pair_row(chat: Chat, pair: Pair) -> PairRow:
    """Both rows of a pair."""
    chosen, rejected = (
        response_row(chat, pair.prompt, one) for one in (pair.chosen, pair.rejected)
    )
    return PairRow(chosen, rejected, pair.margin, pair.subset)


def label_row(chat: Chat, label: Label) -> LabelRow:
    """The row of a label."""
    return LabelRow(response_row(chat, label.prompt, label.response), label.desirable)


def tokenised(
    examples: Iterable[One], encode: Callable[[One], Iterable[Row]], limit: int, too_long: TooLong
) -> tuple[list[Row], Lengths]:
    """Rows of examples, none longer than the limit.

    A row is never cut: a response without its end teaches to go on, and a prompt without its
    beginning is another question.

    Args:
        encode: the rows of one example.
        limit: tokens that the model takes, or fewer.
        too_long: leave longer ones out and count them, or refuse them.

    Raises:
        UserError: rows are too long and must not be left out, or none is left.
    """
    rows, sizes, dropped = list[Row](), list[int](), 0
    for example in examples:
        for row in encode(example):
            sizes.append(length_of(row))
            if sizes[-1] > limit:
                dropped += 1
            else:
                rows.append(row)
    if dropped and (too_long == "refuse" or not rows):
        raise UserError(
            f"{dropped} of {len(sizes)} rows have more than {limit} tokens (the longest"
            f" {max(sizes)}): raise data.max_tokens as far as the model's context goes"
            + (", or set data.too_long='drop'" if rows else "")
        )
    return rows, Lengths(
        len(sizes), int(median(sizes or [0])), max(sizes, default=0), limit, dropped
    )


def length_of(row: Any) -> int:
    """Tokens of the longest conversation of a row."""
    match row:
        case PairRow():
            return max(len(row.chosen.ids), len(row.rejected.ids))
        case LabelRow():
            return len(row.row.ids)
    return len(row.ids)
