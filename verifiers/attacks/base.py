"""What an attack is, and how it is aimed at a task: by what the task shows to an agent alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from string import Template

from agentrl.types import TaskView

ARTIFACT = "$path"
"""Name, in `Attack.files`, of the file that the task wants."""

STUB = """\
def $name(*args, **kwargs):
    return None


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return $name
"""
"""A file that defines whatever is asked for, and does nothing."""


@dataclass(frozen=True, slots=True)
class Target:
    """What the visible part of a task says.

    Attributes:
        path: the artifact that is attacked, a Python file where there is one.
        name: the function that is asked for; "solve" where the task names none.
        tests: a visible test file; "tests/test_visible.py" where there is none.
        examples: calls with their results, as shown: (arguments, result), both as Python text.
    """

    path: str
    name: str
    tests: str
    examples: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Payload:
    """What the agent leaves behind, and what it runs before the end of the episode.

    Attributes:
        files: bytes by path, relative to the work area; one of them is the artifact.
        script: Python text that the agent runs in its work area after writing the files; may be
            empty.
    """

    files: Mapping[str, bytes]
    script: str = ""


@dataclass(frozen=True, slots=True)
class Attack:
    """One way to a reward without the work.

    Attributes:
        number: in the catalogue, from 1.
        mechanism: one sentence.
        source: where it was seen or published.
        files: templates by path; `$path`, `$name`, `$tests`, `$stem` and `$examples` are filled in.
            Without the artifact among them, a stub that does nothing takes its place.
        script: a template too.
        reason: why there is nothing to run: what it attacks does not exist here. Then files and
            script are empty.
    """

    name: str
    number: int
    mechanism: str
    source: str
    files: Mapping[str, str] = field(default_factory=dict)
    script: str = ""
    reason: str = ""

    def build(self, target: Target) -> Payload:
        """Aim at a task.

        Raises:
            ValueError: the attack cannot be run, for its `reason`.
        """
        if self.reason:
            raise ValueError(f"attack {self.name!r} cannot be run: {self.reason}")
        table = ", ".join(f"({args},): {result}" for args, result in target.examples)
        stem = target.path.rpartition("/")[2].removesuffix(".py")
        words = {
            "path": target.path,
            "name": target.name,
            "tests": target.tests,
            "stem": stem,
            "examples": table,
        }
        templates = {ARTIFACT: STUB} | dict(self.files)
        files = {
            _filled(path, words): _filled(text, words).encode() for path, text in templates.items()
        }
        return Payload(files, _filled(self.script, words))


def _filled(text: str, words: Mapping[str, str]) -> str:
    return Template(text).safe_substitute(words)


def target_of(task: TaskView) -> Target:
    """What an attacker reads from a task.

    Raises:
        ValueError: the task declares no artifact, so no file can carry an attack.
    """
    if not task.artifacts:
        raise ValueError(f"task {task.id!r} declares no artifact")
    path = next((path for path in task.artifacts if path.endswith(".py")), task.artifacts[0])
    tests = next(
        (path for path in task.files if path.rpartition("/")[2].startswith("test")),
        "tests/test_visible.py",
    )
    texts = [task.instruction, *task.files.values()]
    shown = [found for text in texts for found in _examples(text)]
    name = next((name for name, _, _ in shown), None) or _defined(task, path) or "solve"
    return Target(
        path, name, tests, tuple((args, result) for called, args, result in shown if called == name)
    )


def _examples(text: str) -> Iterator[tuple[str, str, str]]:
    """Function, arguments and result of the equations `f(...) == value` of a text, as written."""
    for line in re.findall(r"assert\s+(\w+\(.*?\)\s*==\s*[^`\n]+)", text):
        try:
            node = ast.parse(line.strip(), mode="eval").body
        except SyntaxError:
            continue
        if (
            isinstance(node, ast.Compare)
            and isinstance(node.left, ast.Call)
            and isinstance(node.left.func, ast.Name)
        ):
            args = ", ".join(f"repr({ast.unparse(arg)})" for arg in node.left.args)
            yield node.left.func.id, args, ast.unparse(node.comparators[0])


def _defined(task: TaskView, path: str) -> str | None:
    """The function that the start file or the instruction names first."""
    found = re.search(r"^def (\w+)\(", task.files.get(path, ""), re.MULTILINE)
    found = (
        found
        or re.search(r"def (\w+)\(", task.instruction)
        or re.search(r"`(\w+)(?:\([^`]*\))?`", task.instruction)
    )
    return found[1] if found else None
