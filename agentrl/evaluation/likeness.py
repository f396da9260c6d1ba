"""How alike two tasks are, by what they show, hide and refer to.

Two texts are compared by the Jaccard similarity of their shingles, |A ∩ B| / |A ∪ B| (Broder 1997).
Names that the task's own code defines are numbered in the order in which they appear, so a renamed
twin is a twin. Shingles that many tasks share (a common instruction, a common test file) are no
evidence and are left out. Nothing is sampled: pairs come from an index of rare shingles.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from agentrl.types import Task
from agentrl.verifiers.code.hidden import python_tree

NEAR = 0.9
"""Similarity from which two tasks are near-duplicates."""

_WIDTH = 5
_COMMON_SHARE = 0.2
_COMMON_LEAST = 10
_SERIAL_FIELDS = {"id", "index", "number", "no", "serial", "seed", "split", "row"}
_TELLING = 60
"""Letters of files, hidden part, reference and metadata that are no chance when they are equal."""

_NUMBER = re.compile(r"\b(?:train|test|dev|val|valid|validation|eval)\b|[0-9a-f]{8,}|\d+")
_SERIAL = re.compile(
    r"\b(?:(?:train|test|dev|val|task|problem|question|item|case|variant|order|ticket|exercise|number"
    r"|example|serial|id|no|nr)\b[-_ #:.]*)+\d+|#\s*\d+|^\W*(?:\w+[-_ #]){0,3}\d+\s*[:.)\]]",
    re.IGNORECASE,
)
_TOKEN = re.compile(r"\w+|[^\w\s]")


def shown_text(task: Task) -> str:
    """All that the agent is given, an attacker's text included, in small letters and with single
    spaces.
    """
    injected = (task.metadata.get("injection") or {}).get("payload", "")
    files = (f"{path}\n{task.files[path]}" for path in sorted(task.files))
    text = "\n".join([task.instruction, injected, *files])
    return " ".join(text.lower().split())


def numberless(task: Task) -> str:
    """All of a task without its serial number.

    Where little else tells tasks apart, a number is taken out only if it is one by its place: in a
    sum, each number counts.
    """
    metadata = {name: value for name, value in task.metadata.items() if name not in _SERIAL_FIELDS}
    rest = json.dumps([task.files, task.hidden, task.oracle, metadata], sort_keys=True, default=str)
    shown = task.instruction.replace(task.id, "")
    taken_out = _NUMBER if len(rest) >= _TELLING else _SERIAL
    return " ".join(re.findall(r"\w+", taken_out.sub(" ", shown.lower()))) + rest


def renamed(task: Task) -> list[str]:
    """Tokens of what the agent is given and of the reference, with the code's own names numbered by
    appearance.
    """
    solution = task.oracle.get("files")
    code = {**task.files, **{f"oracle/{path}": text for path, text in (solution or {}).items()}}
    names = {name for path, text in code.items() if path.endswith(".py") for name in _defined(text)}
    numbers: dict[str, str] = {}
    tokens = []
    for text in (*(task.files[path] for path in sorted(task.files)), task.instruction):
        for token in _TOKEN.findall(text):
            tokens.append(
                numbers.setdefault(token, f"<{len(numbers)}>") if token in names else token.lower()
            )
    return tokens


def _defined(text: str) -> Iterator[str]:
    try:
        module = python_tree(text)
    except ValueError:
        return
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def near_pairs(texts: Sequence[Sequence[str]]) -> Iterator[tuple[tuple[int, int], float]]:
    """Pairs of indices (first < second) whose similarity is at least `NEAR`, with it."""
    sets = [shingles(tokens) for tokens in texts]
    spread = Counter(itertools.chain.from_iterable(sets))
    common = max(_COMMON_LEAST, _COMMON_SHARE * len(sets))
    holders: dict[tuple[str, ...], list[int]] = defaultdict(list)
    sizes: list[int] = []
    for index, whole in enumerate(sets):
        rare = [shingle for shingle in whole if spread[shingle] <= common]
        shared = Counter(itertools.chain.from_iterable(holders[shingle] for shingle in rare))
        for other, count in shared.items():
            alike = count / (len(rare) + sizes[other] - count)
            if alike >= NEAR:
                yield (other, index), alike
        sizes.append(len(rare))
        for shingle in rare:
            holders[shingle].append(index)


def shingles(tokens: Sequence[str]) -> set[tuple[str, ...]]:
    """Runs of five tokens; a shorter text is one run."""
    if len(tokens) <= _WIDTH:
        return {tuple(tokens)}
    return {tuple(tokens[start : start + _WIDTH]) for start in range(len(tokens) - _WIDTH + 1)}
