"""Which values of a call come from text that anybody may have written.

A value is tainted by a source if a distinctive piece of it occurs in what the source said and
nowhere in trusted text: the opening of the episode and the results of endorsing tools. Both sides
are compared with their disguises undone (`agentrl.safety.disguises`), so base64 of a known word is
that word, and a grouped account number is the number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from agentrl.safety.disguises import all_texts, decoded_forms

# Words of four characters, three digits, or two characters with both a digit and a letter (S-1).
_PIECE = re.compile(r"[\w@.+\-/:]{4,}|\d{3,}|(?=[\w.+\-/:]*\d)(?=[\w.+\-/:]*[^\W\d])\w[\w.+\-/:]+")
# A shorter piece counts only as a word of its own: it is part of too many other words.
_MIN_SUBSTRING = 4
# Shorter pieces are too often some other word spelled backwards.
_MIN_REVERSED = 6


class Taint:
    """What was said so far in one episode, by trust.

    Every text is kept for the whole episode: a source that could be made to forget its beginning
    would launder what it said there.
    """

    def __init__(self) -> None:
        self._trusted = ""
        self._untrusted: dict[str, str] = {}

    def trust(self, text: str) -> None:
        """Add trusted text."""
        self._trusted += _all_forms(text)

    def hear(self, source: str, text: str) -> None:
        """Add what an untrusted source said."""
        self._untrusted[source] = self._untrusted.get(source, "") + _all_forms(text)

    def sources_of(self, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the sources of a call's arguments, sorted; () if none of it is foreign."""
        if not self._untrusted:
            return ()
        # The names of arguments are the tool's own; names inside a value are the agent's.
        values = list(arguments.values())
        pieces = {piece for text in all_texts(values) for piece in _pieces(text)}
        foreign = [piece for piece in pieces if not _occurs(piece, self._trusted)]
        return tuple(
            sorted(
                source
                for source, said in self._untrusted.items()
                if any(_occurs(piece, said) for piece in foreign)
            )
        )


def _all_forms(text: str) -> str:
    return "\n" + "\n".join(decoded_forms(text)).casefold()


def _pieces(text: str) -> Iterator[str]:
    """Distinctive words of every reading of a text, with and without surrounding punctuation."""
    for form in decoded_forms(text):
        for piece in _PIECE.findall(form.casefold()):
            yield piece
            if _PIECE.fullmatch(bare := piece.strip("@.+-/:")):
                yield bare


def _occurs(piece: str, text: str) -> bool:
    if len(piece) < _MIN_SUBSTRING:
        return piece in text and bool(re.search(rf"(?<!\w){re.escape(piece)}(?!\w)", text))
    return piece in text or (len(piece) >= _MIN_REVERSED and piece[::-1] in text)
