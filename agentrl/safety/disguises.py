"""One normaliser for canaries and taint: undo the ways in which a value can be rewritten.

`tests/safety/test_disguises.py` encodes values in every listed way, checks which of them are
recognised, and writes the result to docs/disguises.md. A disguise that is not listed there
(compression, encryption, translation, another alphabet's cipher) is not recognised.
"""

from __future__ import annotations

import base64
import binascii
import html
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any
from urllib.parse import unquote

_BASE64 = re.compile(r"[A-Za-z0-9+/_\-]{12,}={0,2}")
_BASE32 = re.compile(r"[A-Z2-7]{16,}=*")
_HEX = re.compile(r"(?:(?:0x|\\x)?[0-9a-fA-F]{2}[\s:,]*){6,}")
_UNICODE_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})|\\x([0-9a-fA-F]{2})")
_SEPARATORS = re.compile(r"[^A-Za-z0-9]+")
_INVISIBLE = re.compile("[\u200b-\u200f\u2060-\u2064\ufeff\xad\u202a-\u202e\u2066-\u2069]")
_SPACES = re.compile(r"\s+")
# Bounded repetition: an unbounded one would take quadratic time on a long run of blanks.
_AT = re.compile(r"\s{0,3}[(\[{]\s{0,3}at\s{0,3}[)\]}]\s{0,3}", re.IGNORECASE)
_DOT = re.compile(r"\s{0,3}[(\[{]\s{0,3}dot\s{0,3}[)\]}]\s{0,3}", re.IGNORECASE)
_THOUSANDS = re.compile(r"(?<=\d)[,.' _](?=\d{3}(?!\d))")
# Groups of a long identifier (an IBAN, a card, a phone number) as people print them.
_GROUPS = re.compile(r"\b[A-Za-z]{0,4}\d[A-Za-z0-9]{1,5}(?:[ \-][A-Za-z0-9]{1,6}){2,}\b")
# Cyrillic and Greek letters that look like Latin ones and are not compatibility forms of them.
_LOOKALIKES = str.maketrans(
    "АВЕЅІЈКМНОРСТУХаеѕіјорсухԁһԛԝΑΒΕΖΗΙΚΜΝΟΡΤΥΧονικρυχɡıԌ",
    "ABESIJKMHOPCTYXaesijopcyxdhqwABEZHIKMNOPTYXovikpuxgiG",
)
# Base64 inside hex is decoded; a third layer is not, since the readings multiply.
_MAX_LAYERS = 2
_MAX_FORMS = 200
_MAX_DEPTH = 64


def decoded_forms(text: str) -> Iterator[str]:
    """The text, then every reading of it with one or more disguises undone, each once."""
    seen = {text}
    layer = [text]
    yield text
    for _ in range(_MAX_LAYERS):
        readings = (form for source in layer for form in _undo_once(source))
        unique = dict.fromkeys(islice(readings, _MAX_FORMS))
        layer = [form for form in unique if form not in seen]
        seen.update(layer)
        yield from layer


def discloses(text: str, secret: str) -> bool:
    """Whether a text contains a secret of at least 8 characters, plainly or disguised."""
    wanted = squeeze(secret)
    for form in decoded_forms(text):
        squeezed = squeeze(form)
        if secret in form or wanted in squeezed or wanted in squeezed[::-1]:
            return True
    return False


def squeeze(text: str) -> str:
    """Letters and digits only, look-alikes as Latin letters, case folded."""
    return _SEPARATORS.sub("", _plain_letters(text)).casefold()


def all_texts(value: Any, depth: int = 0) -> Iterator[str]:
    """Every text in nested JSON, keys included; numbers as they are written."""
    if depth > _MAX_DEPTH:
        yield repr(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from all_texts(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from all_texts(item, depth + 1)
    elif value is not None and not isinstance(value, bool):
        yield str(value)


def _undo_once(text: str) -> Iterator[str]:
    for undo in _UNDO:
        if (form := undo(text)) != text:
            yield form
    yield from _undo_encodings(text)


def _plain_letters(text: str) -> str:
    """Without invisible characters, look-alikes and compatibility forms."""
    if text.isascii():
        return text
    visible = _INVISIBLE.sub("", unicodedata.normalize("NFKC", text))
    return _SPACES.sub(" ", visible.translate(_LOOKALIKES))


def _join_groups(text: str) -> str:
    """Remove the spaces and hyphens that people put into long identifiers."""
    return _GROUPS.sub(lambda match: re.sub(r"[ \-]", "", match[0]), text)


def _join_address(text: str) -> str:
    return _DOT.sub(".", _AT.sub("@", text))


def _unescape(text: str) -> str:
    return _UNICODE_ESCAPE.sub(lambda match: chr(int(match[1] or match[2], 16)), text)


_UNDO: tuple[Callable[[str], str], ...] = (
    _plain_letters,
    unquote,
    html.unescape,
    _unescape,
    _join_groups,
    lambda text: _THOUSANDS.sub("", text),
    _join_address,
)


def _undo_encodings(text: str) -> Iterator[str]:
    """Readable text inside base64, base32 or hex, also where it is broken over lines."""
    for match in _HEX.finditer(text):
        digits = re.sub(r"0x|\\x|[\s:,]", "", match[0])
        yield from _readable(bytes.fromhex(digits[: len(digits) // 2 * 2]))
    for source in dict.fromkeys((text, _SPACES.sub("", text))):
        for match in _BASE64.finditer(source):
            yield from _decode_base64(match[0])
        for match in _BASE32.finditer(source):
            chunk = match[0].rstrip("=")
            try:
                data = base64.b32decode(chunk + "=" * (-len(chunk) % 8))
            except (binascii.Error, ValueError):
                continue
            yield from _readable(data)


def _decode_base64(chunk: str) -> Iterator[str]:
    plain = chunk.rstrip("=").replace("-", "+").replace("_", "/")
    for start in range(4):  # other letters may precede it
        piece = plain[start:]
        piece = piece[: len(piece) - (len(piece) % 4 == 1)]
        try:
            data = base64.b64decode(piece + "=" * (-len(piece) % 4))
        except (binascii.Error, ValueError):
            continue
        yield from _readable(data)


def _readable(data: bytes) -> Iterator[str]:
    """Runs of at least 6 printable ASCII characters, if they make up half of the data."""
    runs = re.findall(rb"[\x20-\x7e\n\t]{6,}", data)
    if runs and sum(map(len, runs)) * 2 >= len(data):
        yield " ".join(run.decode() for run in runs)
