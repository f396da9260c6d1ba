"""Which values of a call come from text that anybody may have written.

A value is tainted by a source if a distinctive piece of it stands in what the source said and
nowhere in trusted text: the opening of the episode and the results of endorsing tools. Pieces are
compared raw and decoded, so that base64 of a known word is that word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from agentrl.safety.decoding import decoded_forms
from agentrl.types import leaves

# Words of four characters, or of two with a digit and a letter: the name of a row, as S-1.
_PIECE = re.compile(r"[\w@.+\-/:]{4,}|\d{3,}|(?=[\w.+\-/:]*\d)(?=[\w.+\-/:]*[^\W\d])\w[\w.+\-/:]+")
_SHORTEST = 4
_MOST_SAID = 200_000


class Taint:
    """What was said so far in one episode, by trust."""

    def __init__(self) -> None:
        self._trusted = ""
        self._untrusted: dict[str, str] = {}

    def trust(self, text: str) -> None:
        """Take in trusted text."""
        self._trusted += "\n" + text.casefold()

    def hear(self, source: str, text: str) -> None:
        """Take in what an untrusted source said: the last 200,000 characters count."""
        said = self._untrusted.get(source, "") + "\n" + "\n".join(decoded_forms(text)).casefold()
        self._untrusted[source] = said[-_MOST_SAID:]

    def sources_of(self, arguments: Any) -> tuple[str, ...]:
        """The sources of the values, sorted; () where all of it is trusted or the agent's own."""
        if not self._untrusted:
            return ()
        pieces = {
            piece
            for text in _texts(arguments)
            for form in decoded_forms(text)
            for piece in _pieces(form.casefold())
        }
        foreign = [piece for piece in pieces if piece not in self._trusted]
        return tuple(
            sorted(
                source
                for source, said in self._untrusted.items()
                if any(_stands_in(piece, said) for piece in foreign)
            )
        )


def _pieces(text: str) -> Iterator[str]:
    """Words of a text that say something, also without the signs around them."""
    for piece in _PIECE.findall(text):
        yield piece
        if _PIECE.fullmatch(bare := piece.strip("@.+-/:")):
            yield bare


def _stands_in(piece: str, said: str) -> bool:
    """Whether it was said; a short one as a word of its own, as it is part of many others."""
    if len(piece) >= _SHORTEST or piece not in said:
        return piece in said
    return re.search(rf"(?<!\w){re.escape(piece)}(?!\w)", said) is not None


def _texts(value: Any) -> Iterator[str]:
    for one in leaves(value):
        if isinstance(one, str):
            yield one
        elif one is not None and not isinstance(one, bool):
            yield json.dumps(one, default=str)
