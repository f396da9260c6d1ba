"""Values for people: text of an agent, made safe to read on a terminal, in a text file, on a page;
settings as their files write them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date, time
from typing import Any

# Control characters (also of Latin-1), soft hyphens, marks that turn the direction of writing,
# invisible ones, separators of lines and paragraphs, tags, and halves of surrogate pairs.
_UNSAFE = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufeff\ufff0-\ufffb\U000e0000-\U000e0fff"
)
_IN_TEXT = re.compile(f"[{_UNSAFE}]")
_IN_LINE = re.compile(f"[{_UNSAFE}\t\n]")
_BARE_KEY = re.compile("[A-Za-z0-9_-]+")


def plain(text: Any, *, lines: bool = False) -> str:
    r"""The text with every character that acts on a reader's screen written as `\u001b`.

    The escapes are those of JSON, so that JSON stays the same value.

    Args:
        text: anything; what is no text is shown as `str` does.
        lines: keep ends of lines and tabs. Without, the text stays on one line, so that it cannot
            look like another line of a table.
    """
    return (_IN_TEXT if lines else _IN_LINE).sub(_escaped, str(text))


def _escaped(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def as_toml(value: Any) -> str:
    """A setting in a message as TOML and `--set` write it, on one line that is safe to read. TOML
    has no None: in a table or a list it is left out.
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Mapping):
        rows = (f"{_key(key)} = {as_toml(one)}" for key, one in value.items() if one is not None)
        return f"{{{', '.join(rows)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(as_toml(one) for one in value if one is not None)}]"
    return plain(repr(value))


def _key(key: Any) -> str:
    return str(key) if _BARE_KEY.fullmatch(str(key)) else _quoted(str(key))


def _quoted(text: str) -> str:
    shown = str.__repr__(text)  # without escapes, TOML and Python read quotes alike
    return shown if "\\" not in shown else f'"{"".join(map(_in_quotes, text))}"'


def _in_quotes(char: str) -> str:
    if char in '"\\':
        return f"\\{char}"
    if char.isprintable():
        return char
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"
