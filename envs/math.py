"""math-v0: word problems in the format of GSM8K, answered once.

Cobbe et al. 2021, arXiv 2110.14168.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from agentrl.env import ToolEnv
from agentrl.envs.shared import check_keys
from agentrl.errors import ConfigError
from agentrl.records.taskfile import read_rows
from agentrl.safety.writes import WriteSet
from agentrl.types import Limits, Message, Task
from agentrl.verifiers import Term, format_reward, numeric, shaped
from agentrl.verifiers.base import Submission

_ANSWER = re.compile(r"\n#### [-+]?[\d,]*\.?\d+\s*$")
_NAMES = ("Ada", "Ben", "Cleo", "Dev", "Eva", "Finn", "Gita", "Hugo")
_THINGS = ("apples", "cards", "coins", "eggs", "pens", "shells", "stamps", "tickets")


class Math(ToolEnv):
    """Work a problem out and end on a line `#### NUMBER`; the number decides whether it is right.

    Args:
        data: JSON lines (plain or gzip) with `question` and `answer`, the answer ending on `####`
            and the number, as GSM8K's files; empty: problems that are made up, without end.
        largest: of made-up problems: their largest number (5 to 1000).
        format: what an answer earns beside being right for ending on that line.
        reasoning: what it earns for working in front of that line.
    """

    id: ClassVar[str] = "math-v0"
    system = "Work it out step by step, then end on a line with #### and the number alone."
    limits = Limits(turns=1, wall_s=60)
    writes = WriteSet()

    def __init__(
        self, data: str = "", largest: int = 20, format: float = 0.0, reasoning: float = 0.0
    ) -> None:
        if not 5 <= largest <= 1000:
            raise ConfigError(f"math-v0: largest={largest} must be a whole number from 5 to 1000")
        self._data, self._largest = data, largest
        self.endless = not data
        terms = []
        for name, cap in (("format", format), ("reasoning", reasoning)):
            if not 0 <= cap <= 1:
                raise ConfigError(f"math-v0: {name}={cap} must be from 0 to 1")
            if cap and name == "format":
                terms.append(format_reward(cap=cap, well_formed=is_well_formed))
            elif cap:
                terms.append(Term("reasoning", cap, lambda said, cap=cap: cap * reasons(said)))  # type: ignore[misc]
        self.verifier = shaped(numeric(), *terms) if terms else numeric()

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """A fifth of the problems is held out, by a hash of their text; those of a file come in its
        order, or with a seed in another.
        """
        if split not in ("train", "test"):
            raise ConfigError(f"math-v0: split={split!r} must be 'train' or 'test'")
        rng, seen = random.Random(f"{split}-{seed}"), set[str]()
        rows = read_problems(self._data) if self._data else ()
        rows = tuple(rng.sample(rows, len(rows))) if seed else rows
        for question, working in rows if self._data else _endless(rng, self._largest):
            mark = hashlib.sha256(question.encode()).hexdigest()[:12]
            if mark not in seen and (int(mark, 16) % 5 == 0) == (split == "test"):
                seen.add(mark)
                answer = working.rpartition("####")[2].strip()
                yield Task(
                    id=f"math-{mark}",
                    instruction=question,
                    hidden={"answer": answer},
                    oracle={"answer": working},
                )


def read_problems(path: str) -> tuple[tuple[str, str], ...]:
    """Questions and workings of a file in GSM8K's format, without its calculator annotations.

    Raises:
        ConfigError: a row lacks one of them, or its answer does not end on `####` and a number.
        TaskError: the file cannot be read.
    """
    found = []
    for number, row in read_rows(Path(path)):
        check_keys(row, ("question", "answer"), f"math-v0: {path}, line {number}")
        question, answer = row["question"], row["answer"]
        if not (isinstance(question, str) and isinstance(answer, str)) or not _ANSWER.search(
            f"\n{answer}"
        ):
            raise ConfigError(
                f"math-v0: {path}, line {number}: needs a text `question`, and an `answer` that"
                " ends on a line '#### NUMBER'"
            )
        found.append((question, re.sub(r"<<[^<>]*>>", "", answer)))
    if not found:
        raise ConfigError(f"math-v0: {path} has no problem: name a file with at least one row")
    return tuple(found)


def _endless(rng: random.Random, largest: int) -> Iterator[tuple[str, str]]:
    """Made-up problems, until a thousand in a row were there before."""
    seen, stale = set[str](), 0
    while stale < 1000:
        found = word_problem(rng, largest)
        stale = stale + 1 if found[0] in seen else 0
        seen.add(found[0])
        yield found


def word_problem(rng: random.Random, largest: int) -> tuple[str, str]:
    """A problem of two steps, and its working."""
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    has, bags, each = rng.randint(1, largest), rng.randint(2, 5), rng.randint(2, largest)
    more = bags * each
    left = rng.randint(1, more)
    if rng.random() < 0.5:
        question = f"{name} has {has} {thing} and buys {bags} bags of {each}."
        step, end = f"{has} + {more} = {has + more}", has + more
    else:
        question = f"{name} has {bags} bags of {each} {thing} and gives {left} away."
        step, end = f"{more} - {left} = {more - left}", more - left
    return (
        f"{question} How many {thing} does {name} have now?",
        f"{bags} * {each} = {more}\n{step}\n#### {end}",
    )


def is_well_formed(message: Message) -> bool:
    """Whether an answer ends on a line `#### NUMBER`."""
    return bool(_ANSWER.search(f"\n{message.content}"))


def reasons(submission: Submission) -> bool:
    """Whether something stands in front of the line with the answer, or in the reasoning."""
    said: Any = [one for one in submission.messages if one.role == "assistant"]
    return bool(said) and bool(
        said[-1].reasoning.strip() or said[-1].content.rpartition("####")[0].strip()
    )
