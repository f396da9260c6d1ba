"""The mutated-expectation control of tests that import the candidate, whose process therefore
reports on itself.

Every test is shown to fresh processes as it is and in copies that are wrong on purpose, each once,
and nothing says which is which. It counts if it is reported as passed when it was true and as
failed whenever it was wrong. Whoever passes without being right passes the wrong copies too, and
has to guess: C copies of n tests leave
    a chance of C^-n,
also to code that carries what it saw from one process to the next.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from weakref import WeakValueDictionary

from agentrl.errors import TaskError
from agentrl.types import Task
from agentrl.verifiers.code.hidden import Tests
from agentrl.verifiers.code.mutants import Test, composed, mutants

SURE, MOST_COPIES = 4096, 13
"""A guess of all tests is right once in SURE gradings or less often, unless that takes more copies
than these.
"""

Judge = Callable[[Mapping[str, str]], Awaitable[str]]
"""Test files in; out come the outcomes of the reference solution, one letter a test, as in
`Evidence.outcomes`.
"""


@dataclass(frozen=True, slots=True)
class Copies:
    """The tests of one task, in the order of `Tests.ids`.

    Attributes:
        tests: the test files as they were written.
        plain: each test as it is.
        wrong: copies of each test that the reference solution was seen to fail, at least one.
    """

    tests: Mapping[str, str]
    ids: tuple[str, ...]
    plain: tuple[Test, ...]
    wrong: tuple[tuple[Test, ...], ...]

    def files(self, chosen: list[Test]) -> dict[str, str]:
        """Test files that hold, for each test, the chosen copy."""
        by_file: dict[str, dict[str, Test]] = {name: {} for name in self.tests}
        for test_id, test in zip(self.ids, chosen, strict=True):
            name, _, inner = test_id.partition("::")
            by_file[name][inner] = test
        return {name: composed(text, by_file[name]) for name, text in self.tests.items()}

    @property
    def guess(self) -> float:
        """The chance to be right about all copies without telling true from wrong, even for who
        knows all of them.
        """
        return math.prod(1 / min(self._shown, 1 + len(wrong)) for wrong in self.wrong)

    @property
    def _shown(self) -> int:
        """Different copies of each test in one grading, the true one among them."""
        return max(2, min(MOST_COPIES, math.ceil(math.pow(SURE, 1 / len(self.ids)))))

    def rounds(self, rng: random.Random) -> list[tuple[dict[str, str], str]]:
        """What one grading runs: test files, and the outcomes that only right code gives.

        Of each test, different copies are shown once each, one of them true, in an order of its
        own. A test with fewer
        copies than others shows some again, the true one as likely as any: so what is seen twice
            tells nothing.
        """
        columns = []
        for plain, wrong in zip(self.plain, self.wrong, strict=True):
            chosen = [
                (plain, "p"),
                *((test, "f") for test in rng.sample(wrong, min(self._shown - 1, len(wrong)))),
            ]
            columns.append(chosen)
        length = max(map(len, columns))
        for column in columns:
            column += rng.choices(column, k=length - len(column))
            rng.shuffle(column)
        return [
            (self.files([test for test, _ in row]), "".join(want for _, want in row))
            for row in zip(*columns, strict=True)
        ]


async def make_copies(task: Task, hidden: Tests, judge: Judge) -> Copies:
    """Copies of all tests, each shown by the reference: it passes every test, and fails what is
    kept as wrong.

    Raises:
        TaskError: the reference fails a test, or no wrong copy of a test is failed by it, or tests
            depend on each other, so that a wrong one makes a true one fail.
    """
    found = {
        f"{name}::{test}": copies
        for name, text in hidden.tests.items()
        for test, copies in mutants(text, task.fingerprint()).items()
    }
    plain = tuple(found[test_id][0] for test_id in hidden.ids)
    tried = [found[test_id][1] for test_id in hidden.ids]
    copies = Copies(hidden.tests, hidden.ids, plain, ())
    outcomes = await judge(copies.files(list(plain)))
    if failed := [
        test_id for test_id, outcome in zip(hidden.ids, outcomes, strict=True) if outcome != "p"
    ]:
        raise TaskError(
            f"task {task.id!r}: field oracle fails the hidden test {failed[0]}; mend one of them"
        )
    wrong: list[list[Test]] = [[] for _ in plain]
    for at in range(max(map(len, tried))):
        row = [
            tests[at] if at < len(tests) else test for test, tests in zip(plain, tried, strict=True)
        ]
        outcomes = await judge(copies.files(row))
        for index, outcome in enumerate(outcomes):
            if at < len(tried[index]) and outcome == "f":
                wrong[index].append(row[index])
    if bare := [test_id for test_id, tests in zip(hidden.ids, wrong, strict=True) if not tests]:
        raise TaskError(
            f"task {task.id!r}: field hidden.tests: nothing that {bare[0]} compares could be made"
            " wrong, so code that reports for its tests could not be told from right code; write"
            " what it expects as literals"
        )
    made = Copies(hidden.tests, hidden.ids, plain, tuple(map(tuple, wrong)))
    for files, wanted in made.rounds(random.Random(task.fingerprint())):
        outcomes = await judge(files)
        if torn := [
            test_id for test_id, a, b in zip(hidden.ids, outcomes, wanted, strict=True) if a != b
        ]:
            raise TaskError(
                f"task {task.id!r}: field hidden.tests: the outcome of {torn[0]} depends on whether"
                " other tests pass; let each test set up and clean up for itself"
            )
    return made


class Kept:
    """The copies of the tasks that were asked for last, made once for each fingerprint."""

    def __init__(self, size: int = 1024) -> None:
        self._size = size
        self._known: OrderedDict[str, Copies] = OrderedDict()
        self._locks: WeakValueDictionary[tuple[int, str], asyncio.Lock] = WeakValueDictionary()

    async def copies(self, task: Task, hidden: Tests, judge: Judge) -> Copies:
        """See `make_copies`; who asks for what is being made waits for it."""
        key = task.fingerprint()
        lock = self._locks.setdefault((id(asyncio.get_running_loop()), key), asyncio.Lock())
        async with lock:
            if key not in self._known:
                self._known[key] = await make_copies(task, hidden, judge)
            self._known.move_to_end(key)
            while len(self._known) > self._size:
                self._known.popitem(last=False)
            return self._known[key]
