"""docs/experiments.md: one section per experiment."""

from __future__ import annotations

from pathlib import Path

PATH = Path(__file__).resolve().parents[2] / "docs" / "experiments.md"
_MARK = "\n## "


def write_section(title: str, body: str) -> None:
    """Replace the section with this title, or add it at the end."""
    head, *old = PATH.read_text().split(_MARK)
    sections = [part.strip("\n") for part in old]
    new = f"{title}\n\n{body}".strip("\n")
    titles = [part.splitlines()[0] for part in sections]
    place = titles.index(title) if title in titles else len(titles)
    sections[place : place + 1] = [new]
    PATH.write_text(_MARK.join([head.rstrip("\n") + "\n", *(part + "\n" for part in sections)]))
