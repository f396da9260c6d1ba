"""docs/benchmarks.md: the table of all rows, and below it one section per experiment that has
written one.
"""

from __future__ import annotations

from pathlib import Path

PATH = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
_MARK = "\n## "


def sections() -> str:
    """Everything from the first section on, as it stands."""
    text = PATH.read_text() if PATH.exists() else ""
    _, mark, rest = text.partition(_MARK)
    return mark + rest


def write_section(title: str, body: str) -> None:
    """Put a section in the place of the one with the same title, or at the end."""
    head, *old = PATH.read_text().split(_MARK)
    kept = [part.strip("\n") for part in old]
    new = f"{title}\n\n{body}".strip("\n")
    at = next(
        (index for index, part in enumerate(kept) if part.splitlines()[0] == title), len(kept)
    )
    kept[at : at + 1] = [new]
    PATH.write_text(_MARK.join([head.rstrip("\n") + "\n", *(part + "\n" for part in kept)]))
