"""Whether a task may be played: its reference must pass, and doing nothing must not.

A task that is refused here would train noise: no effort solves it, or none is needed.
"""

from __future__ import annotations

import ast
import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from agentrl.errors import TaskError, VerifierError
from agentrl.sandboxes.base import SandboxPool
from agentrl.types import EndReason, Message, Score, Task
from agentrl.verifiers.base import Submission, Verifier
from agentrl.verifiers.code.hidden import (
    FORMS,
    Tests,
    python_tree,
    read_hidden,
    tests_without_assertion,
)
from agentrl.verifiers.code.stubs import possible, screened, stub_of

Kind = Literal["hidden", "oracle", "artifacts", "vacuous"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a task is not played.

    Attributes:
        kind: what is at fault: the hidden part, the reference, the artifacts, or tests that judge
            nothing.
        why: one sentence with the field and the fix.
    """

    task_id: str
    kind: Kind
    why: str


async def admit(
    tasks: Sequence[Task], verifier: Verifier, pool: SandboxPool | None, *, untrusted: bool = False
) -> dict[str, str]:
    """Check tasks, as many at a time as there are cores and one more; returns id and reason of each
    refused one.

    Time limits are wall time, so more at a time would refuse slow references on a busy machine.

    Raises:
        ConfigError: the tasks' code is `untrusted`, and the pool's sandboxes are no boundary.
        SandboxLost: a grader sandbox died: that says nothing about a task.
    """
    gate = asyncio.Semaphore(len(os.sched_getaffinity(0)) + 1)

    async def one(task: Task) -> Refusal | None:
        async with gate:
            return await admit_task(task, verifier, pool, untrusted=untrusted)

    refusals = await asyncio.gather(*map(one, tasks))
    return {refusal.task_id: refusal.why for refusal in refusals if refusal is not None}


async def admit_task(
    task: Task, verifier: Verifier, pool: SandboxPool | None, *, untrusted: bool = False
) -> Refusal | None:
    """Check one task: statically, then by grading its reference, stubs of it, and its start state.

    Raises:
        SandboxLost: the grader sandbox died.
    """
    refusal = check_task(task)
    if refusal is not None:
        return refusal
    reference = _reference(task)
    if reference is None:
        return None
    try:
        score = await verifier(
            _submission(task, reference, str(task.oracle.get("answer", "")), pool, untrusted)
        )
    except (TaskError, VerifierError) as error:
        return Refusal(task.id, "oracle" if "field oracle" in str(error) else "hidden", str(error))
    if not _passes(score, task):
        below = f", below threshold {task.threshold}" if task.threshold != 1 else ""
        why = (
            f"the reference scores {score.value} ({score.why}){below}; mend field oracle or field"
            " hidden"
        )
        return Refusal(task.id, "oracle", why)
    for name, artifacts in _idle(task).items():
        score = await verifier(_submission(task, artifacts, "", pool, untrusted))
        if _passes(score, task):
            return Refusal(
                task.id,
                "vacuous",
                f"{name} passes too; let field hidden assert what the task asks for",
            )
    returned = await _constant(task, reference, verifier, pool, untrusted)
    if returned is not None:
        why = (
            f"a function that returns {returned} whatever it is given passes too; let field hidden"
            " compare type, length and value of what the task asks for"
        )
        return Refusal(task.id, "vacuous", why)
    return None


async def _constant(
    task: Task,
    reference: Mapping[str, str],
    verifier: Verifier,
    pool: SandboxPool | None,
    untrusted: bool,
) -> str | None:
    """What a stub returns that passes a code task; None if none does."""
    if not FORMS & set(task.hidden):
        return None
    screen = screened(task)
    if screen is not None:
        score = await verifier(_submission(screen, reference, "", pool, untrusted))
        if score.value is not None and not _passes(score, task):
            return None
    for returned in possible(read_hidden(task)):
        stub = stub_of(task, returned)
        if _passes(await verifier(_submission(task, stub, "", pool, untrusted)), task):
            return returned
    return None


def check_task(task: Task) -> Refusal | None:
    """What can be seen without running anything."""
    if not task.hidden:
        return Refusal(
            task.id, "hidden", "field hidden is empty, so nothing can be judged; fill it in"
        )
    if not task.oracle:
        return Refusal(
            task.id,
            "oracle",
            "field oracle is empty, so the task may be impossible; give a reference",
        )
    return _check_code(task) if FORMS & set(task.hidden) else None


def _check_code(task: Task) -> Refusal | None:
    try:
        hidden = read_hidden(task)
    except TaskError as error:
        return Refusal(
            task.id, "artifacts" if "field artifacts" in str(error) else "hidden", str(error)
        )
    given = task.oracle.get("files")
    if not isinstance(given, dict) or not all(isinstance(text, str) for text in given.values()):
        return Refusal(
            task.id,
            "oracle",
            "field oracle.files must map paths to text; give the reference solution",
        )
    for path in task.artifacts:
        if any(other.startswith(f"{path}/") for other in (*task.files, *given, *task.artifacts)):
            why = (
                f"field artifacts names the directory {path!r}; name the files in it that are"
                " judged"
            )
            return Refusal(task.id, "artifacts", why)
    lacking = [path for path in task.artifacts if path not in given]
    if lacking:
        why = (
            f"field artifacts declares {lacking[0]!r}, which is no file of field oracle.files; add"
            " it or take it out"
        )
        return Refusal(task.id, "artifacts", why)
    if not isinstance(hidden, Tests) and hidden.entry_point not in _names(given[hidden.path]):
        why = (
            f"field hidden.entry_point is {hidden.entry_point!r}, which the oracle's {hidden.path}"
            " does not define"
        )
        return Refusal(task.id, "oracle", why)
    if isinstance(hidden, Tests) and (silent := tests_without_assertion(hidden.tests)):
        return Refusal(
            task.id,
            "vacuous",
            f"field hidden.tests: {silent[0]} asserts nothing; let it compare, or take it out",
        )
    return None


def _passes(score: Score, task: Task) -> bool:
    return score.verdict is not None and score.verdict >= task.threshold


def _submission(
    task: Task, artifacts: Mapping[str, str], answer: str, pool: SandboxPool | None, untrusted: bool
) -> Submission:
    files = {path: text.encode() for path, text in artifacts.items()}
    return Submission(
        task, (Message.assistant(answer),), EndReason.SUBMITTED, files, pool, untrusted=untrusted
    )


def _reference(task: Task) -> dict[str, str] | None:
    """The reference's artifacts; None if the oracle is written in actions, which only the
    environment can play.
    """
    files = task.oracle.get("files")
    if isinstance(files, dict):
        return {path: files[path] for path in task.artifacts if path in files}
    return {} if "answer" in task.oracle else None


def _idle(task: Task) -> dict[str, dict[str, str]]:
    """Submissions in which nothing was done, by name; those that lack an artifact cannot pass and
    are left out.
    """
    if not task.artifacts:
        return {"an empty answer": {}}
    idle: dict[str, dict[str, str]] = {}
    if FORMS & set(task.hidden):
        idle["a stub with an empty body"] = _stub(task)
    if set(task.artifacts) <= set(task.files):
        idle["the unchanged start state"] = {path: task.files[path] for path in task.artifacts}
    return idle


def _stub(task: Task) -> dict[str, str]:
    """Artifacts that define what the reference defines, and do nothing."""
    hidden, files = read_hidden(task), task.oracle["files"]
    stub = {path: _emptied(files[path]) if path.endswith(".py") else "" for path in task.artifacts}
    if not isinstance(hidden, Tests):
        stub[hidden.path] = f"def {hidden.entry_point}(*args, **kwargs):\n    pass\n"
    return stub


def _emptied(text: str) -> str:
    """Python text with the body of every function left out; nothing where it is not Python."""
    try:
        module = python_tree(text)
    except ValueError:
        return ""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [ast.Pass()]
    return ast.unparse(module)


def _names(text: str) -> set[str]:
    """Names that a module may define; none for a text that is not Python."""
    try:
        nodes = list(ast.walk(python_tree(text)))
    except ValueError:
        return set()
    imported = [
        alias
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    defined = [
        node
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    stored = [
        node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    return {
        *(alias.asname or alias.name for alias in imported),
        *(node.name for node in defined),
        *(node.id for node in stored),
    }
