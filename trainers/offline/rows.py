"""Examples as rows of tokens, and rows as padded tensors.

What the policy wrote trains; everything else is context. Letters: B rows, T token positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from agentrl.chat.tokens import Chat
from agentrl.errors import UserError
from agentrl.trainers.offline.examples import Conversation, Messages, Response


@dataclass(frozen=True, slots=True)
class TokenRow:
    """Token ids of one conversation, and 1 where the loss reads, else 0.

    Attributes:
        targets: what a loss other than likelihood compares with: a chance for each masked
            position of a process reward row; (1.0,) or (0.0,) for a desirable or undesirable
            response.
    """

    ids: tuple[int, ...]
    mask: tuple[int, ...]
    targets: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.mask) or not any(self.mask) or self.mask[0]:
            raise ValueError(
                f"{len(self.ids)} ids and mask {self.mask}: a row has a prompt and a trained token"
            )

    @property
    def prompt(self) -> int:
        """Number of tokens before the first trained one."""
        return self.mask.index(1)

    @property
    def trained(self) -> int:
        """Number of trained tokens."""
        return sum(self.mask)

    @property
    def longest(self) -> int:
        """Number of tokens."""
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class PairRow:
    """Two rows of one prompt; the first was preferred."""

    chosen: TokenRow
    rejected: TokenRow
    margin: float | None = None
    subset: str = ""

    @property
    def longest(self) -> int:
        """Tokens of the longer row."""
        return max(len(self.chosen.ids), len(self.rejected.ids))


Row = TokenRow | PairRow


class MaskedRows(NamedTuple):
    """Right-padded rows, as `token_logprobs` scores them."""

    ids_BT: Tensor
    mask_BT: Tensor

    @classmethod
    def of(cls, rows: Sequence[TokenRow], device: torch.device | str = "cpu") -> MaskedRows:
        """Pad rows to the longest."""
        ids_BT = pad([row.ids for row in rows], 0).to(device)
        return cls(ids_BT, pad([row.mask for row in rows], 0).bool().to(device))


def pad(sequences: Sequence[Sequence[Any]], fill: int) -> Tensor:
    """Right-pad sequences to the longest, (B, T)."""
    width = max(map(len, sequences))
    return torch.tensor([[*each, *[fill] * (width - len(each))] for each in sequences])


def pad_with_attention(ids: Sequence[Sequence[int]], pad_id: int) -> dict[str, Tensor]:
    """Right-padded ids and their attention mask, as models take them."""
    attention_BT = pad([[1] * len(each) for each in ids], 0)
    return {"input_ids": pad(ids, pad_id), "attention_mask": attention_BT}


def encode_messages(chat: Chat, messages: Sequence[Any]) -> tuple[int, ...]:
    """A whole conversation as reward models read it, in training and when they judge."""
    return tuple(chat.template.encode(chat.template.render(messages, generation=False)))


def encode_response(chat: Chat, prompt: Messages, response: Response) -> TokenRow:
    """The row of one response: its recorded tokens, else those that the policy would sample.

    Only the response trains: assistant messages of the prompt are context.
    """
    if response.branch is not None:
        return TokenRow(response.branch.ids, response.branch.mask)
    if len(response.messages) > 1:
        rendered = chat.render_demonstration((*prompt, *response.messages), response.tools)
        return TokenRow(tuple(rendered.input_ids), tuple(rendered.mask))
    prompt_ids = chat.prompt_ids(prompt, response.tools)
    turn_ids = chat.turn_ids(response.messages[0], (), prompt_ids)
    mask = (0,) * len(prompt_ids) + (1,) * len(turn_ids)
    return TokenRow((*prompt_ids, *turn_ids), mask)


def encode_conversation(chat: Chat, conversation: Conversation) -> list[TokenRow]:
    """The rows of a whole conversation: every assistant message trains, once."""
    if (branch := conversation.branch) is not None:
        return [TokenRow(branch.ids, branch.mask)]
    rendered = chat.render_demonstrations(conversation.messages, conversation.tools)
    return [TokenRow(tuple(row.input_ids), tuple(row.mask)) for row in rendered if any(row.mask)]


def encode_examples(
    examples: Iterable[Any],
    encode: Callable[[Any], Iterable[Row]],
    limit: int,
    too_long: Literal["drop", "refuse"],
) -> tuple[list[Any], dict[str, int]]:
    """Rows of examples, none longer than `limit`, and a summary of their lengths.

    A row is never cut: a response without its end teaches the model not to stop, and a prompt
    without its beginning is another question.

    Args:
        encode: the rows of one example.
        too_long: "drop" leaves longer rows out and counts them; "refuse" raises.

    Raises:
        UserError: rows are too long and must not be left out, or none is left.
    """
    rows = [row for example in examples for row in encode(example)]
    sizes = [row.longest for row in rows]
    kept = [row for row in rows if row.longest <= limit]
    dropped = len(rows) - len(kept)
    if dropped and (too_long == "refuse" or not kept):
        fix = ", or set data.too_long='drop'" if kept else ""
        raise UserError(
            f"{dropped} of {len(rows)} rows have more than {limit} tokens (the longest"
            f" {max(sizes)}): raise data.max_tokens, at most to the model's context{fix}",
            setting="data.max_tokens",
        )
    lengths = {
        "rows": len(rows),
        "median": int(median(sizes or [0])),
        "longest": max(sizes, default=0),
        "limit": limit,
        "too_long": dropped,
    }
    return kept, lengths
