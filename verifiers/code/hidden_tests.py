"""Judge code by hidden tests, in a clean grader sandbox, apart from the candidate's process.

The verdict is reached on the host, from one bounded evidence message that carries a random nonce of
this grading. Exit codes, markers in output and files are never looked at, so there is nothing of
that kind to forge. See `runner` for the other end, and docs/verifiers.md for what is defended
against, and what is left.
"""

from __future__ import annotations

import asyncio
import importlib.util
import marshal
import random
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal
from weakref import WeakValueDictionary

from agentrl.errors import TaskError, VerifierError
from agentrl.sandboxes.base import Isolation
from agentrl.types import Score, Task
from agentrl.verifiers.base import Submission
from agentrl.verifiers.code.hidden import (
    Cases,
    Check,
    Draws,
    Hidden,
    Tests,
    identity_sites,
    read_hidden,
)
from agentrl.verifiers.code.runner.codec import CodecError, decode, encode

PYTHON = "/usr/bin/python3"
NONCE_BYTES = 16
GRACE_S = 10.0
_CALLS = ("codec", "handles", "peer", "child", "candidate", "judge")
_TESTS = ("minitest", "crossing", "child", "candidate", "proxy", "pytest_run", "judge")
_PARTS = {
    "cases": _CALLS,
    "generate": ("lazy", *_CALLS),
    "check": ("lazy", *_CALLS),
    "tests": ("lazy", "codec", "handles", "peer", *_TESTS),
}
_FACTS = {
    "time_limit": "a time limit was met",
    "ended": "the candidate's process ended",
    "unreadable": "an answer of the candidate could not be read",
    "memory": "an answer of the candidate was too large",
    "silenced": "the candidate ended the judge, which judges the reference without trouble",
}


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the judge saw.

    Attributes:
        outcomes: one letter for each expected case or test: p passed, f failed, - not reached.
        fact: what ended judging early; empty if nothing did.
        broken: what is wrong with the hidden material; empty if nothing is.
        calls: how often the candidate was asked.
        survived: whether processes of the candidate could not be ended.
        notes: of tests that a reference was judged by: what they asked its objects for.
        open_to: what kept the candidate from being isolated; empty if nothing did, None for a form
            that isolates always.
        wall_s: how long the judge ran.
    """

    outcomes: str
    fact: str = ""
    broken: str = ""
    calls: int = 0
    survived: bool = False
    notes: tuple[str, ...] = ()
    open_to: str | None = None
    wall_s: float = 0.0


def met_a_limit(score: Score) -> bool:
    """Whether a clock or the memory decided, which might go otherwise another time."""
    return any(_FACTS[fact] in score.why for fact in ("time_limit", "memory", "silenced"))


@dataclass(frozen=True, slots=True)
class Budget:
    """Seconds for one call of the candidate and for everything, and the interpreter that judges."""

    call_s: float
    wall_s: float
    python: str
    isolation: Isolation = "reset"

    def without(self, spent_s: float) -> Budget | None:
        """What is left; None for nothing."""
        left_s = self.wall_s - spent_s
        return replace(self, wall_s=left_s, call_s=min(self.call_s, left_s)) if left_s > 0 else None

    def __post_init__(self) -> None:
        if not 0 < self.call_s <= self.wall_s < float("inf"):
            raise ValueError(
                f"call_s={self.call_s} and wall_s={self.wall_s} must be positive and in this order"
            )


@dataclass(frozen=True, slots=True)
class HiddenTests:
    """A verifier of code: 1.0 if every hidden case or test passes, else 0.0.

    Attributes:
        call_s: seconds that one call of the candidate (or loading its file) may take; beyond them
            the score is 0. Waiting for a busy processor does not count, sleeping does.
        wall_s: seconds for a whole grading; beyond them the score is 0. Waiting for a sandbox does
            not count.
        partial: give the share of passed cases instead of 0.0. `parts["passed"]` always holds that
            share.
        fresh: what gets a sandbox and a process of its own: each grading, or each of its `cases`,
            so that a candidate can carry nothing from one call to the next. The latter costs a
            grading for every case.
        python: interpreter inside the grader sandbox.

    Calling it raises VerifierError if the judge itself is broken, TaskError if the hidden part of
    the task cannot be judged, and SandboxLost if the grader sandbox died: never a score for these.
    """

    call_s: float = 10.0
    wall_s: float = 120.0
    partial: bool = False
    fresh: Literal["grading", "case"] = "grading"
    python: str = PYTHON

    def __post_init__(self) -> None:
        Budget(self.call_s, self.wall_s, self.python)

    async def __call__(self, submission: Submission, /) -> Score:
        """Judge the artifacts of an episode."""
        budget = Budget(self.call_s, self.wall_s, self.python)
        hidden = read_hidden(submission.task)
        missing = [path for path in submission.task.artifacts if path not in submission.artifacts]
        if missing:
            return Score(0.0, {"passed": 0.0}, f"the artifact {missing[0]} is missing")
        if isinstance(hidden, Tests):
            calibrated = await _CALIBRATIONS.calibrate(submission, hidden, budget)
            evidence = await _find_evidence(submission, calibrated, budget)
            widened = ", ".join(sorted(hidden.widened))
            evidence = replace(evidence, open_to=widened and f"the task allows {widened}")
        elif isinstance(hidden, Cases) and self.fresh == "case":
            evidence = await _one_by_one(submission, hidden, budget)
        else:
            evidence = await _find_evidence(submission, hidden, budget)
        return score(evidence, self.partial)


def hidden_tests(
    *,
    call_s: float = 10.0,
    wall_s: float = 120.0,
    partial: bool = False,
    fresh: Literal["grading", "case"] = "grading",
    python: str = PYTHON,
) -> HiddenTests:
    """A verifier of code by hidden cases, checks or test files; see `HiddenTests`."""
    return HiddenTests(call_s, wall_s, partial, fresh, python)


class _Calibrations:
    """Tests with what their references were asked for, of the tasks that were judged last."""

    def __init__(self, size: int = 1024) -> None:
        self._size = size
        self._known: OrderedDict[tuple[str, Budget], Tests] = OrderedDict()
        self._locks: WeakValueDictionary[Any, asyncio.Lock] = WeakValueDictionary()

    async def calibrate(self, submission: Submission, hidden: Tests, budget: Budget) -> Tests:
        """See `_calibrate`; whoever asks for a calibration that is under way waits for it."""
        key = submission.task.fingerprint(), budget
        # A lock belongs to one event loop.
        lock = self._locks.setdefault((id(asyncio.get_running_loop()), key), asyncio.Lock())
        async with lock:
            if key not in self._known:
                self._known[key] = await _calibrate(submission, hidden, budget)
            self._known.move_to_end(key)
            while len(self._known) > self._size:
                self._known.popitem(last=False)
            return self._known[key]


_CALIBRATIONS = _Calibrations()


async def _calibrate(submission: Submission, hidden: Tests, budget: Budget) -> Tests:
    """The tests with what the reference was asked for on each line.

    Raises:
        TaskError: there is no reference, it fails a test, or two processes cannot decide a test.
    """
    task = submission.task
    given = task.oracle.get("files", {})
    if lacking := [path for path in task.artifacts if path not in given]:
        raise TaskError(
            f"task {task.id!r}: field oracle.files lacks {lacking[0]}, and hidden.tests are judged"
            " by what the reference makes of them; add the reference, or use hidden.cases"
        )
    reference = replace(submission, artifacts=_reference(task))
    noted = await _find_evidence(reference, replace(hidden, uses=None), budget)
    if problem := _undecidable(hidden, noted):
        raise TaskError(f"task {task.id!r}: {problem}")
    calibrated = replace(hidden, uses=noted.notes)
    again = await _find_evidence(reference, calibrated, budget)
    if again.outcomes != noted.outcomes:
        raise TaskError(
            f"task {task.id!r}: field hidden.tests: they use other parts of the reference's objects"
            " each time; make them deterministic"
        )
    if hidden.widened and hidden.isolation == "required":
        raise TaskError(
            f"task {task.id!r}: field hidden.isolation is 'required', but the task allows"
            f" {', '.join(sorted(hidden.widened))}; remove one of the two"
        )
    return calibrated


def _undecidable(hidden: Tests, noted: Evidence) -> str:
    """Why the tests cannot be judged in two processes; empty if they can."""
    failed = [test for test, seen in zip(hidden.ids, noted.outcomes, strict=True) if seen != "p"]
    if failed or noted.fact:
        for note in noted.notes:
            kind, _, rest = note.partition(":")
            if kind == "refused":
                site, _, name = rest.rpartition(":")
                return (
                    f"field hidden.tests: {site} hands over an object of type {name}, which must"
                    " not cross to the candidate; hand over plain values, or functions and objects"
                    " that the test file defines"
                )
            if kind == "unserved":
                return f"field hidden.tests: {rest}; call the candidate instead"
        return (
            f"field oracle fails the hidden test {failed[0] if failed else hidden.ids[0]}; mend one"
            " of them (tests run in another process than the reference)"
        )
    sites = [note.split(":", 2)[1:] for note in noted.notes if note.startswith("decided:")]
    sites += [["comparison", site] for site in identity_sites(hidden.tests)]
    for family, site in sites:
        if family not in hidden.widened:
            return (
                f"field hidden.tests: {site} lets objects of the candidate decide ({family});"
                f' compare plain values, or add "allow": ["{family}"] beside "tests"'
            )
    return ""


async def _one_by_one(submission: Submission, hidden: Cases, budget: Budget) -> Evidence:
    """The evidence of cases that were judged one by one, each in a sandbox that nobody had."""
    outcomes, calls, left = "", 0, replace(budget, isolation="fresh")
    for case in random.Random(submission.seed).sample(hidden.cases, hidden.count):
        evidence = await _find_evidence(submission, replace(hidden, cases=(case,)), left)
        outcomes, calls, rest = (
            outcomes + evidence.outcomes,
            calls + evidence.calls,
            left.without(evidence.wall_s),
        )
        if evidence.fact or evidence.survived or rest is None:
            fact = evidence.fact or ("" if rest else "time_limit")
            return replace(
                evidence, outcomes=outcomes.ljust(hidden.count, "-"), calls=calls, fact=fact
            )
        left = rest
    return Evidence(outcomes, calls=calls)


def score(evidence: Evidence, partial: bool = False) -> Score:
    """The verdict: passed is what is positively known to have passed, and nothing else."""
    count, passed = len(evidence.outcomes), evidence.outcomes.count("p")
    share = passed / count
    whole = passed == count and not evidence.fact and not evidence.survived and evidence.calls > 0
    why = f"{passed} of {count} hidden tests passed"
    if evidence.fact.startswith("import:"):
        why += f": loading the artifact raised {evidence.fact.removeprefix('import:')}"
    elif evidence.fact.startswith("check:"):
        why += f": the check ended in {evidence.fact.removeprefix('check:')}"
    elif evidence.fact:
        why += f": {_FACTS.get(evidence.fact, 'judging ended early')}"
    elif passed == count and evidence.calls == 0:
        why = (
            "no test called the artifact's code: hidden_tests judges Python modules; use a verifier"
            " of your own or sqlite_state/file_state"
        )
    elif evidence.survived:
        why += ": processes of the candidate could not be ended"
    value = 1.0 if whole else share if partial and passed < count and not evidence.survived else 0.0
    parts = {"passed": share}
    if evidence.open_to is not None:
        parts["isolated"] = 0.0 if evidence.open_to else 1.0
        why += f"; isolated: false, as {evidence.open_to}" if evidence.open_to else ""
    return Score(value, parts, why)


async def _find_evidence(submission: Submission, hidden: Hidden, budget: Budget) -> Evidence:
    """Run the judge; if it falls silent or says that it is broken, find out who is to blame.

    A candidate can kill the judge or take its limits away (they share a user), and so can a broken
    machine. A silent judge is asked twice; if it then judges the reference solution but not the
    candidate, it was the candidate.

    Raises:
        VerifierError: the judge is silent about the reference too, or the hidden material is
            broken.
    """
    task = submission.task
    if submission.pool is None:
        raise VerifierError(
            f"task {task.id!r}: hidden tests need a sandbox pool, and the submission has none"
        )
    artifacts = {path: submission.artifacts[path] for path in task.artifacts}
    for _ in range(2):
        evidence, _ = await _run(
            submission, artifacts, _request(hidden, budget, submission.seed), budget
        )
        if evidence is not None and not evidence.broken:
            return evidence
        if evidence is not None:
            break
    reference = _reference(task)
    evidence, note = await _run(
        submission, reference, _request(hidden, budget, submission.seed), budget
    )
    if evidence is None:
        raise VerifierError(
            f"task {task.id!r}: the judge gave no evidence, not even about the reference ({note})"
        )
    if evidence.broken:
        raise VerifierError(f"task {task.id!r}: {evidence.broken}")
    return Evidence("-" * hidden.count, fact="silenced")


def _reference(task: Task) -> dict[str, bytes]:
    """The oracle's artifacts; a file that is not given is empty."""
    given = task.oracle.get("files", {})
    return {path: str(given.get(path, "")).encode() for path in task.artifacts}


async def _run(
    submission: Submission, artifacts: Mapping[str, bytes], request: dict[str, Any], budget: Budget
) -> tuple[Evidence | None, str]:
    """Judge once in a fresh sandbox; returns the evidence, or None and how the judge ended."""
    body = encode(request)
    stdin = _runner_packet(request["form"]) + len(body).to_bytes(4, "little") + body
    assert submission.pool is not None
    async with submission.pool.lease(
        "grader", isolation=budget.isolation, untrusted=submission.untrusted
    ) as sandbox:
        await sandbox.put(artifacts)
        result = await sandbox.exec(
            [budget.python, "-I", "-S", "-B", "-c", _boot()],
            stdin=stdin,
            timeout_s=budget.wall_s + GRACE_S,
        )
    evidence = (
        None if result.dropped else read_evidence(result.stdout, request["nonce"], request["count"])
    )
    evidence = evidence and replace(evidence, wall_s=result.wall_s)
    end = (
        "timed out" if result.timed_out else f"exit code {result.exit_code}, signal {result.signal}"
    )
    lines = result.stderr.decode(errors="replace").strip().splitlines()
    return evidence, f"{end}; {lines[-1][:200]}" if lines else end


def _request(hidden: Hidden, budget: Budget, seed: int) -> dict[str, Any]:
    request: dict[str, Any] = {
        "nonce": secrets.token_bytes(NONCE_BYTES),
        "count": hidden.count,
        "call_s": float(budget.call_s),
        "wall_s": float(budget.wall_s),
    }
    match hidden:
        case Cases():
            cases = [(case.args, dict(case.kwargs), case.want) for case in hidden.cases]
            random.Random(seed).shuffle(cases)
            request |= {"form": "cases", "path": hidden.path, "entry_point": hidden.entry_point}
            request |= {"cases": cases, "atol": hidden.atol}
        case Draws():
            request |= {"form": "generate", "path": hidden.path, "entry_point": hidden.entry_point}
            request |= {
                "generate": hidden.generate,
                "reference": hidden.reference,
                "atol": hidden.atol,
                "seed": seed,
            }
        case Check():
            request |= {
                "form": "check",
                "path": hidden.path,
                "entry_point": hidden.entry_point,
                "check": hidden.check,
            }
        case Tests():
            request |= {"form": "tests", "ids": list(hidden.ids)}
            request |= {"tests": dict(hidden.tests), "by_pytest": hidden.by_pytest}
            request |= {"modules": list(hidden.modules), "widened": sorted(hidden.widened)}
            request |= {"uses": None if hidden.uses is None else list(hidden.uses)}
    return request


def read_evidence(message: bytes, nonce: bytes, count: int) -> Evidence | None:
    """The evidence in a message; None unless it is one well-formed message with this nonce."""
    if message[:NONCE_BYTES] != nonce:
        return None
    try:
        found = decode(message[NONCE_BYTES:])
    except CodecError:
        return None
    shape = {"outcomes": str, "fact": str, "broken": str, "calls": int, "survived": bool}
    shape["notes"] = list
    if type(found) is not dict or {key: type(value) for key, value in found.items()} != shape:
        return None
    if len(found["outcomes"]) != count or set(found["outcomes"]) - set("pf-"):
        return None
    return Evidence(**found | {"notes": tuple(map(str, found["notes"]))})


@cache
def _boot() -> str:
    return (files("agentrl.verifiers.code.runner") / "boot.py").read_text()


@cache
def _runner_packet(form: str) -> bytes:
    """The runner as one frame: modules as source, and as code for the host's Python version."""
    folder = files("agentrl.verifiers.code.runner")
    package = "agentrl.verifiers.code.runner"
    texts = dict.fromkeys(("agentrl", "agentrl.verifiers", package), "")
    texts |= {f"{package}.{part}": (folder / f"{part}.py").read_text() for part in _PARTS[form]}
    modules = [
        (name, text, marshal.dumps(compile(text, name, "exec"))) for name, text in texts.items()
    ]
    packet = marshal.dumps((importlib.util.MAGIC_NUMBER, modules))
    return len(packet).to_bytes(4, "little") + packet
