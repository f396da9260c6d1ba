"""How the hidden tests of a task are judged: apart from the candidate, and with which wrong copies.

The reference is judged first. Where its tests run in the judge and use it from afar, so will those
of every candidate. What cannot be seen so (a test in which the candidate's own objects decide, one
that looks into them, a reference that does not pass from afar) is shown in copies: each is true or
wrong, and a test counts if it passes where it is true and fails wherever it is wrong.

A test has k places that can be changed, and m values for each, the true one among them. Copy c
has at each place the value that stands c further round than the true one. For k > 1 there are
copies besides in which some places are further round than the others, the same for every c. So
what is shown looks the same from each c: at no place is the true value more frequent, and no copy
is nearer to the others.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol
from weakref import WeakValueDictionary

from agentrl.errors import TaskError
from agentrl.types import Task
from agentrl.verifiers.code.hidden import Tests
from agentrl.verifiers.code.mutants import Spot, Test, asks_identity, changed, composed, mutants

SURE, MOST_COPIES, MOST_GROUPS = 4096, 13, 5
"""Values of a spot are as many as leave a guess of all tests right once in SURE, but at most 13."""


class Seen(Protocol):
    """What a judge saw of the reference."""

    @property
    def outcomes(self) -> str:
        """One letter a test, as in `Evidence.outcomes`."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What the tests asked of the reference."""
        ...


Judge = Callable[[Tests], Awaitable[Seen]]
"""Tests in; out come the outcomes of the reference, one letter a test, and what was noted."""


@dataclass(frozen=True, slots=True)
class Copies:
    """The tests of one task, in the order of `Tests.ids`, and the copies of each.

    Attributes:
        tests: the test files as they were written.
        plain: each test as it is.
        rows: of each test, the copies that are shown: what stands at its spots, and whether it is
            true ("p") or wrong ("f"); the first is the test as it is. Only a true one for a test
            that the judge decides.
    """

    tests: Mapping[str, str]
    ids: tuple[str, ...]
    plain: tuple[Test, ...]
    rows: tuple[tuple[tuple[Test, str], ...], ...]

    def files(self, chosen: Sequence[Test]) -> dict[str, str]:
        """Test files that hold, for each test, the chosen copy."""
        by_file: dict[str, dict[str, Test]] = {name: {} for name in self.tests}
        for test_id, test in zip(self.ids, chosen, strict=True):
            name, _, inner = test_id.partition("::")
            by_file[name][inner] = test
        return {name: composed(text, by_file[name]) for name, text in self.tests.items()}

    def rounds(self, rng: random.Random) -> list[tuple[dict[str, str], str]]:
        """What one grading runs: test files, and the outcomes that only right code gives.

        Of each test every copy is shown, in an order of its own. A test with fewer copies than
        others shows some again, the true one as likely as any.
        """
        columns = [list(rows) for rows in self.rows]
        length = max(map(len, columns))
        for column in columns:
            column += rng.choices(column, k=length - len(column))
            rng.shuffle(column)
        return [
            (self.files([test for test, _ in row]), "".join(want for _, want in row))
            for row in zip(*columns, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Plan:
    """How one task's tests are judged.

    Attributes:
        tests: the tests, with what the reference was asked for on each line; not `apart` where
            they have to share the candidate's process.
        copies: None if the judge alone decides every test.
        why: what keeps the candidate from being isolated; empty if nothing does.
    """

    tests: Tests
    copies: Copies | None = None
    why: str = ""


def layout(count: int, spots: Sequence[Spot]) -> tuple[int, int]:
    """Values of each spot, and groups that are changed apart, for one of `count` tests."""
    wanted = max(2, min(MOST_COPIES, math.ceil(math.pow(SURE, 1 / count))))
    groups = min(len(spots), MOST_GROUPS if count <= 3 else 2) if len(spots) > 1 else 0
    values = min([wanted, *(len(spot.options) for spot in spots)])
    return max(2, min(values, MOST_COPIES // (1 + groups))), groups


def drawn(spots: Sequence[Spot], values: int, rng: random.Random) -> list[Spot]:
    """The spots with as many options as there are values: the written one, and others by lot."""
    return [
        replace(spot, options=(spot.options[0], *rng.sample(spot.options[1:], values - 1)))
        for spot in spots
    ]


def rows_of(
    test: Test, spots: Sequence[Spot], values: int, groups: int, rng: random.Random
) -> list[tuple[Test, str]]:
    """All copies of a test, the true one first; see above."""
    shifts = [dict.fromkeys(spots, 0)]
    order = rng.sample(list(spots), len(spots))
    for group in range(groups):
        step = rng.randrange(1, values)
        moved = order[group::groups]
        shifts.append({spot: step if spot in moved else 0 for spot in spots})
    rows = []
    for turn in range(values):
        for shift in shifts:
            chosen = {spot: (turn + shift[spot]) % values for spot in spots}
            rows.append((changed(test, chosen), "f" if any(chosen.values()) else "p"))
    return rows


async def make_plan(task: Task, hidden: Tests, judge: Judge) -> Plan:
    """See `Plan`.

    Raises:
        TaskError: there is no reference, or it fails a test; or a test that the judge cannot decide
            alone cannot be made wrong, or depends on others; or the task demands isolation and
            there is none.
    """
    given = task.oracle.get("files", {})
    if lacking := [path for path in task.artifacts if path not in given]:
        raise TaskError(
            f"task {task.id!r}: field oracle.files lacks {lacking[0]}, and hidden.tests are judged"
            " by what the reference makes of them; add the reference, or use hidden.cases"
        )
    noted = await judge(replace(hidden, uses=None))
    if set(noted.outcomes) == {"p"}:
        apart = replace(hidden, uses=noted.notes)
        open_ids = _open(hidden, noted.notes)
        if (await judge(apart)).outcomes != noted.outcomes:
            why = "the reference uses other parts of its objects each time"
        elif not open_ids:
            widened = ", ".join(sorted(hidden.widened))
            return _demanded(task, Plan(apart, why=widened and f"the task allows {widened}"))
        else:
            why = f"{open_ids[0]} asks the candidate's own objects whether they are right"
            return _demanded(task, await _with_copies(task, apart, judge, open_ids, why))
    else:
        why = _why_shared(hidden, noted)
    shared = replace(hidden, apart=False, uses=())
    return _demanded(task, await _with_copies(task, shared, judge, hidden.ids, why))


def _demanded(task: Task, plan: Plan) -> Plan:
    if plan.why and plan.tests.isolation == "required":
        raise TaskError(
            f"task {task.id!r}: field hidden.isolation is 'required', but {plan.why}; compare plain"
            " values, or take the demand out"
        )
    return plan


def _open(hidden: Tests, notes: Sequence[str]) -> list[str]:
    """Tests that the judge does not decide alone."""
    found = {note.removeprefix("decided:") for note in notes if note.startswith("decided:")}
    for name, text in hidden.tests.items():
        for test, (plain, _) in mutants(text, "").items():
            if asks_identity(plain):
                found.add(f"{name}::{test}")
    return [test_id for test_id in hidden.ids if test_id in found]


def _why_shared(hidden: Tests, noted: Seen) -> str:
    reasons = [note.removeprefix("unserved:") for note in noted.notes if "unserved:" in note]
    failed = next(
        test for test, seen in zip(hidden.ids, noted.outcomes, strict=True) if seen != "p"
    )
    return reasons[0] if reasons else f"{failed} needs the reference in its own process"


async def _with_copies(
    task: Task, hidden: Tests, judge: Judge, open_ids: Sequence[str], why: str
) -> Plan:
    """The plan with wrong copies of the open tests, each shown by the reference to be wrong."""
    found = {
        f"{name}::{test}": made
        for name, text in hidden.tests.items()
        for test, made in mutants(text, task.fingerprint()).items()
    }
    plain = tuple(found[test_id][0] for test_id in hidden.ids)
    bare = Copies(hidden.tests, hidden.ids, plain, ())

    async def judged(tests: Sequence[Test]) -> Seen:
        return await judge(replace(hidden, tests=bare.files(tests)))

    true = await judge(
        replace(hidden, tests=bare.files(plain), uses=None if hidden.apart else hidden.uses)
    )
    hidden = replace(hidden, uses=true.notes)
    for test_id, outcome in zip(hidden.ids, true.outcomes, strict=True):
        if outcome != "p":
            raise TaskError(
                f"task {task.id!r}: field oracle fails the hidden test {test_id}; mend one of them"
            )
    drawn_spots = []
    for test_id in hidden.ids:
        spots = found[test_id][1] if test_id in open_ids else []
        rng = random.Random(f"{task.fingerprint()} {test_id} values")
        values, _ = layout(len(open_ids), spots)
        drawn_spots.append(drawn(spots, values, rng))
    wrong = await _wrong_spots(judged, plain, drawn_spots)
    rows: list[tuple[tuple[Test, str], ...]] = []
    for index, test_id in enumerate(hidden.ids):
        if test_id not in open_ids:
            rows.append(((plain[index], "p"),))
            continue
        if not wrong[index]:
            raise TaskError(
                f"task {task.id!r}: field hidden.tests: nothing that {test_id} compares could be"
                " made wrong, so code that reports for its tests could not be told from right"
                " code; write what it expects as literals"
            )
        rng = random.Random(f"{task.fingerprint()} {test_id} rows")
        values, groups = layout(len(open_ids), wrong[index])
        rows.append(tuple(rows_of(plain[index], wrong[index], values, groups, rng)))
    copies = replace(bare, rows=tuple(rows))
    await _check_apart(task, hidden, copies, judge)
    return Plan(hidden, copies, why)


async def _check_apart(task: Task, hidden: Tests, copies: Copies, judge: Judge) -> None:
    """Raise TaskError unless the reference is told right from wrong in one mixed grading."""
    for files, wanted in copies.rounds(random.Random(task.fingerprint())):
        outcomes = (await judge(replace(hidden, tests=files))).outcomes
        for test_id, seen, want in zip(hidden.ids, outcomes, wanted, strict=True):
            if seen != want:
                raise TaskError(
                    f"task {task.id!r}: field hidden.tests: the outcome of {test_id} depends on"
                    " whether other tests pass; let each test set up and clean up for itself"
                )


async def _wrong_spots(
    judged: Callable[[Sequence[Test]], Awaitable[Seen]],
    plain: Sequence[Test],
    found: Sequence[Sequence[Spot]],
) -> list[list[Spot]]:
    """The spots whose other options the reference fails, each put there by itself."""
    tries = [
        [(spot, at) for spot in spots for at in range(1, len(spot.options))] for spots in found
    ]
    useless: list[set[Spot]] = [set() for _ in plain]
    for turn in range(max(map(len, tries))):
        asked = [rows[turn] if turn < len(rows) else None for rows in tries]
        row = [
            test if ask is None else changed(test, {ask[0]: ask[1]})
            for test, ask in zip(plain, asked, strict=True)
        ]
        outcomes = (await judged(row)).outcomes
        for index, ask in enumerate(asked):
            if ask is not None and outcomes[index] != "f":
                useless[index].add(ask[0])
    return [
        [spot for spot in spots if spot not in bad]
        for spots, bad in zip(found, useless, strict=True)
    ]


class Kept:
    """The plans of the tasks that were asked for last, made once for each fingerprint."""

    def __init__(self, size: int = 1024) -> None:
        self._size = size
        self._known: OrderedDict[str, Plan] = OrderedDict()
        self._locks: WeakValueDictionary[tuple[int, str], asyncio.Lock] = WeakValueDictionary()

    async def plan(self, task: Task, hidden: Tests, judge: Judge) -> Plan:
        """See `make_plan`; who asks for what is being made waits for it."""
        key = task.fingerprint()
        lock = self._locks.setdefault((id(asyncio.get_running_loop()), key), asyncio.Lock())
        async with lock:
            if key not in self._known:
                self._known[key] = await make_plan(task, hidden, judge)
            self._known.move_to_end(key)
            while len(self._known) > self._size:
                self._known.popitem(last=False)
            return self._known[key]
