"""Text of an agent, made safe to read on a terminal, in a text file and on a page."""

from __future__ import annotations

import re
from typing import Any

from agentrl.settings import as_toml as as_toml

# Control characters (also of Latin-1), soft hyphens, marks that turn the direction of writing,
# invisible ones, separators of lines and paragraphs, tags, and halves of surrogate pairs.
_UNSAFE = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufeff\ufff0-\ufffb\U000e0000-\U000e0fff"
)
_IN_TEXT = re.compile(f"[{_UNSAFE}]")
_IN_LINE = re.compile(f"[{_UNSAFE}\t\n]")


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
