"""Seeded, endless bug-repair tasks: small documented Python files with one defect in one line.

A program is a chain of functions: each one but the first calls the one before it, so hidden tests
of the last function judge all of them. Every function is a few one-line statements, and its
docstring says in words what each computes. Programs are expression trees with numbered variables,
and names are chosen last. The hash of the tree decides the split, so no program of one split is in
the other, renamed or not.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from agentrl.envs.bugfix.programs import (
    FUNCTION_NAMES,
    PARAMETERS,
    VARIABLE_NAMES,
    Evaluate,
    Function,
    Knobs,
    Names,
    canonical,
    compile_function,
    mutated_nodes,
    random_program,
)
from agentrl.errors import ConfigError
from agentrl.types import Task

__all__ = ["BugTask", "Knobs", "Split", "generate", "split_of"]

Split = Literal["train", "test"]
_VALUES = range(-9, 21)
_RANDOM = 24  # random argument lists that hidden cases are chosen from, besides `_edges`
_SHOWN = 12  # argument lists that visible tests are chosen from
_MIN_CASES = 8
_TEST_SHARE = 5  # one program in five is held out
_TEST_FILE = '''"""Visible tests: `python test_solution.py` reports the first one that fails."""

import solution

for name, args, expected in {cases}:
    function = getattr(solution, name)
    got = function(*args)
    if got != expected:
        line = function.__code__.co_firstlineno
        raise SystemExit(f"FAIL line {{line}}: {{name}}{{args}} is {{got}}, not {{expected}}")
print("all visible tests pass")
'''


@dataclass(frozen=True)
class BugTask:
    """One task, before it is a row.

    Attributes:
        buggy: text of solution.py as the agent finds it; `fixed` differs from it in one line.
        line: number of that line, from 1; `text` is what it should be.
        kind: which defect was seeded.
        tests: text of the visible test script; `failure` is what it prints on the buggy file.
        entry_point: the function that hidden cases call.
        cases: (arguments, expected value) pairs; the buggy file fails at least one.
    """

    id: str
    buggy: str
    fixed: str
    line: int
    text: str
    kind: str
    tests: str
    failure: str
    entry_point: str
    cases: tuple[tuple[tuple[int, ...], int], ...]

    @property
    def instruction(self) -> str:
        """What the agent is asked."""
        return (
            "One line of solution.py is wrong. Repair it so that every docstring"
            f" holds.\n{self.failure}"
        )

    def to_task(self) -> Task:
        """The row that environments and verifiers take."""
        return Task(
            id=self.id,
            instruction=self.instruction,
            files={"solution.py": self.buggy, "test_solution.py": self.tests},
            artifacts=("solution.py",),
            hidden={
                "entry_point": self.entry_point,
                "cases": [
                    {"args": list(args), "expected": expected} for args, expected in self.cases
                ],
            },
            oracle={
                "files": {"solution.py": self.fixed},
                "line": self.line,
                "text": self.text,
                "kind": self.kind,
            },
        )


def generate(seed: int, split: Split, knobs: Knobs | None = None) -> Iterator[BugTask]:
    """Yield tasks without end and without repeats, the same ones for the same arguments.

    Raises:
        ConfigError: `split` is unknown, or the knobs leave too few programs to find a new one.
    """
    if split not in ("train", "test"):
        raise ConfigError(f"split={split!r} is unknown; choose 'train' or 'test'")
    knobs = knobs or Knobs()
    rng = random.Random(f"bugfix-v0/{split}/{seed}")
    seen: set[str] = set()
    misses = 0
    while True:
        program = random_program(rng, knobs)
        task = _task(rng, knobs, program, split) if split_of(program) == split else None
        if task is not None and task.id not in seen:
            seen.add(task.id)
            misses = 0
            yield task
            continue
        misses += 1
        if misses > 20_000:
            raise ConfigError(
                f"{knobs} leaves no new {split} program after {len(seen)}; widen a knob"
            )


def split_of(program: Sequence[Function]) -> Split:
    """The split of a correct program; commutative operators may swap their operands."""
    program_text = repr([[canonical(node) for node in function] for function in program])
    digest = hashlib.sha256(program_text.encode()).digest()
    return "test" if int.from_bytes(digest[:8], "big") % _TEST_SHARE == 0 else "train"


def _task(
    rng: random.Random, knobs: Knobs, program: list[Function], split: Split
) -> BugTask | None:
    """Seed one defect; None where visible tests cannot show it or hidden cases cannot catch it."""
    where, statement = rng.randrange(knobs.functions), rng.randrange(knobs.statements)
    function = program[where]
    table: list[Evaluate] = []
    table += [compile_function(each, table) for each in program]
    right = table[where]
    hidden, shown = _arguments(rng, _RANDOM) + _edges(rng, knobs), _arguments(rng, _SHOWN)
    expected = [table[-1](args) for args in hidden]
    local = [right(args) for args in hidden]
    if len(set(expected)) < 4:
        return None
    defects: dict[str, list[Function]] = {}
    kills = list(range(_MIN_CASES))
    for kind, node in mutated_nodes(function[statement], PARAMETERS + statement, knobs):
        mutant = (*function[:statement], node, *function[statement + 1 :])
        wrong = table[where] = compile_function(mutant, table)
        if all(wrong(args) == value for args, value in zip(hidden, local, strict=True)):
            continue  # no defect: it computes the same
        entry = table[-1]
        killed = next(
            (i for i in (*kills, *range(len(hidden))) if entry(hidden[i]) != expected[i]), None
        )
        if killed is None:  # another function hides this one's fault
            return None
        if killed not in kills:
            kills.append(killed)
        defects.setdefault(kind, []).append(mutant)
    table[where] = right
    if not defects:
        return None
    kind = rng.choice(sorted(defects))
    mutant = rng.choice(defects[kind])
    wrong = compile_function(mutant, table)
    failing = next((args for args in shown if wrong(args) != right(args)), None)
    if failing is None:
        return None
    visible = [(i, failing if i == where else shown[0]) for i in range(len(program))]
    cases = tuple((tuple(hidden[i]), expected[i]) for i in sorted(kills))
    draft = _Draft(program, where, statement, mutant, kind, visible, cases, table)
    return _render(rng, knobs, draft, split)


def _arguments(rng: random.Random, count: int) -> list[list[int]]:
    return [rng.choices(_VALUES, k=PARAMETERS) for _ in range(count)]


def _edges(rng: random.Random, knobs: Knobs) -> list[list[int]]:
    """Argument lists with every constant in every place, where off-by-one conditions differ."""
    edges = []
    for value in range(1, knobs.max_constant + 2):
        for place in range(PARAMETERS):
            args = rng.choices(_VALUES, k=PARAMETERS)
            args[place] = value
            edges.append(args)
    return edges


class _Draft(NamedTuple):
    program: list[Function]
    where: int
    statement: int
    mutant: Function
    kind: str
    visible: list[tuple[int, list[int]]]
    cases: tuple[tuple[tuple[int, ...], int], ...]
    table: list[Evaluate]


def _render(rng: random.Random, knobs: Knobs, draft: _Draft, split: Split) -> BugTask:
    functions = rng.sample(FUNCTION_NAMES[: knobs.function_names], knobs.functions)
    variables = rng.sample(VARIABLE_NAMES[: knobs.names], PARAMETERS + knobs.statements - 1)
    names = Names(functions, variables)
    lines: list[str] = []
    for index, function in enumerate(draft.program):
        lines += ["", ""] if lines else []
        lines += [
            f"def {functions[index]}({', '.join(variables[:PARAMETERS])}):",
            f'    """{names.doc(function)}"""',
        ]
        if index == draft.where:
            line = len(lines) + draft.statement
        lines += [names.line(function, statement) for statement in range(knobs.statements)]
    text = lines[line]
    broken = names.line(draft.mutant, draft.statement)
    buggy = "\n".join([*lines[:line], broken, *lines[line + 1 :]]) + "\n"
    visible = [(functions[i], tuple(args), draft.table[i](args)) for i, args in draft.visible]
    name, args, expected = visible[draft.where]
    got = compile_function(draft.mutant, draft.table)(list(args))
    return BugTask(
        id=f"bugfix-v0/{split}/{hashlib.sha256(buggy.encode()).hexdigest()[:12]}",
        buggy=buggy,
        fixed="\n".join(lines) + "\n",
        line=line + 1,
        text=text,
        kind=draft.kind,
        tests=_TEST_FILE.format(cases=visible),
        failure=f"FAIL line {line - draft.statement - 1}: {name}{args} is {got}, not {expected}",
        entry_point=functions[-1],
        cases=draft.cases,
    )
