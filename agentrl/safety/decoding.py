"""Text as it may have been disguised: base64, hex, percent signs, reversed, split, look-alikes."""

from __future__ import annotations

import base64
import binascii
import re
import unicodedata
from collections.abc import Iterator
from urllib.parse import unquote

_BASE64 = re.compile(r"[A-Za-z0-9+/_\-]{12,}={0,2}")
_HEX = re.compile(r"(?:[0-9a-fA-F]{2}[\s:]?){6,}")
_BLANKS = re.compile(r"[\s\u200b-\u200d\u2060\ufeff\xad]+")
_SEPARATORS = re.compile(r"[^A-Za-z0-9]+")
# Letters of Cyrillic and Greek that look like Latin ones, and are no compatibility forms of them.
_ALIKE = str.maketrans(
    "АВЕЅІЈКМНОРСТУХаеѕіјорсухԁһԛԝΑΒΕΖΗΙΚΜΝΟΡΤΥΧονικρυχɡıԌ",
    "ABESIJKMHOPCTYXaesijopcyxdhqwABEZHIKMNOPTYXovikpuxgiG",
)


def decoded_forms(text: str) -> Iterator[str]:
    """The text, and what it says if it is decoded once; twice for base64 and hex in each other."""
    yield text
    seen = {text}
    for form in (_plain_letters(text), unquote(text) if "%" in text else text):
        if form not in seen:
            seen.add(form)
            yield form
    for inner in _inner(text):
        if inner not in seen:
            seen.add(inner)
            yield inner
            for deeper in _inner(inner):
                if deeper not in seen:
                    seen.add(deeper)
                    yield deeper


def discloses(text: str, secret: str) -> bool:
    """Whether a text holds a secret, plainly or disguised; the secret has at least 8 characters."""
    wanted = squeezed(secret)
    return any(
        secret in form or wanted in (bare := squeezed(form)) or wanted in bare[::-1]
        for form in decoded_forms(text)
    )


def squeezed(text: str) -> str:
    """Letters and digits alone, look-alikes as Latin letters, without case."""
    return _SEPARATORS.sub("", _plain_letters(text)).casefold()


def _plain_letters(text: str) -> str:
    if text.isascii():
        return text
    return _BLANKS.sub(" ", unicodedata.normalize("NFKC", text).translate(_ALIKE))


def _inner(text: str) -> Iterator[str]:
    """Printable text that stands in base64 or hex in a text, lines joined."""
    joined = _BLANKS.sub("", text)
    for found in _HEX.finditer(text):
        digits = re.sub(r"[\s:]", "", found[0])
        yield from _readable(bytes.fromhex(digits[: len(digits) // 2 * 2]))
    for source in {text, joined}:
        for found in _BASE64.finditer(source):
            yield from _unbase64(found[0])


def _unbase64(chunk: str) -> Iterator[str]:
    plain = chunk.rstrip("=").replace("-", "+").replace("_", "/")
    for start in range(4):  # it may follow other letters
        piece = plain[start:]
        piece = piece[: len(piece) - (len(piece) % 4 == 1)]
        try:
            data = base64.b64decode(piece + "=" * (-len(piece) % 4))
        except (binascii.Error, ValueError):
            continue
        yield from _readable(data)


def _readable(data: bytes) -> Iterator[str]:
    """Runs of printable ASCII of at least 6 characters."""
    runs = re.findall(rb"[\x20-\x7e\n\t]{6,}", data)
    if runs and sum(map(len, runs)) * 2 >= len(data):
        yield " ".join(run.decode() for run in runs)
