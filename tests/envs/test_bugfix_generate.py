"""The bug-repair generator: true docstrings, one defect, strict hidden cases, clean splits."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys

import pytest
from helpers import growth

from agentrl.envs.bugfix.generate import BugTask, Knobs, generate, split_of
from agentrl.envs.bugfix.programs import KINDS, Node, mutated_nodes
from agentrl.errors import ConfigError

HARD = Knobs(functions=3, statements=2, operators=2)
BOTH = pytest.mark.parametrize("knobs", [Knobs(), HARD], ids=["easy", "hard"])


def take(
    n: int, *, seed: int = 0, split: str = "train", knobs: Knobs | None = None
) -> list[BugTask]:
    return list(itertools.islice(generate(seed, split, knobs), n))


def load(text: str) -> dict:
    """Names of a file that the generator wrote itself."""
    names: dict = {}
    exec(compile(text, "solution.py", "exec"), names)
    return names


def passes(text: str, task: BugTask) -> bool:
    function = load(text)[task.entry_point]
    return all(function(*args) == expected for args, expected in task.cases)


@BOTH
def test_fixed_passes_hidden_cases_and_buggy_fails(knobs):
    for task in take(150, knobs=knobs):
        assert passes(task.fixed, task)
        assert not passes(task.buggy, task)


@BOTH
def test_files_differ_in_the_one_line_that_the_oracle_names(knobs):
    for task in take(150, knobs=knobs):
        buggy, fixed = task.buggy.splitlines(), task.fixed.splitlines()
        assert len(buggy) == len(fixed)
        assert [
            i + 1 for i, pair in enumerate(zip(buggy, fixed, strict=True)) if pair[0] != pair[1]
        ] == [task.line]
        assert fixed[task.line - 1] == task.text


def _edits(line: str, knobs: Knobs, names: list[str]) -> set[str]:
    """Other lines that one token makes: an operator, a constant or a variable exchanged."""
    parts = re.split(r"(\w+|//|[-+*%])", line)
    found = set()
    for i, part in enumerate(parts):
        if part in names:
            others = names
        elif part.isdigit():
            others = [str(n) for n in range(1, knobs.max_constant + 2)]
        elif part in ("+", "-", "*"):
            others = ["+", "-", "*"]
        else:
            continue
        found |= {
            "".join([*parts[:i], other, *parts[i + 1 :]]) for other in others if other != part
        }
    return found


@BOTH
def test_hidden_cases_kill_every_single_token_edit_that_changes_the_function(knobs):
    alive = 0
    grid = [(a, b) for a in range(-9, 21, 3) for b in range(-9, 21, 4)]
    for task in take(60, knobs=knobs):
        names = task.buggy.split("(", 1)[1].split(")")[0].split(", ")
        lines = task.fixed.splitlines()
        right = load(task.fixed)[task.entry_point]
        for edit in _edits(task.text, knobs, names):
            text = "\n".join([*lines[: task.line - 1], edit, *lines[task.line :]]) + "\n"
            if passes(text, task):
                wrong = load(text)[task.entry_point]
                alive += sum(wrong(*args) != right(*args) for args in grid) > len(grid) // 10
    assert alive == 0


def _python_of(words: str) -> str:
    """The docstring's words as an expression, for one operator per statement."""
    words = words.removeprefix("Return ").removesuffix(".")
    words = re.sub(
        r"the (smaller|larger) of (.+) and (.+)", lambda m: f"{m[1]}({m[2]}, {m[3]})", words
    )
    words = (
        words.replace("smaller(", "min(").replace("larger(", "max(").replace(", otherwise", " else")
    )
    for phrase, symbol in {
        "floor-divided by": "//", "plus": "+", "minus": "-", "times": "*", "modulo": "%",
        "is less than": "<", "is at most": "<=", "is greater than": ">", "is at least": ">=",
        "equals": "==", "differs from": "!=",
    }.items():  # fmt: skip
        words = words.replace(f" {phrase} ", f" {symbol} ")
    return words


def test_docstrings_say_what_the_fixed_functions_compute():
    for task in take(300):
        for function in ast.parse(task.fixed).body:
            said = _python_of(ast.get_docstring(function))
            assert ast.dump(ast.parse(said, mode="eval").body) == ast.dump(
                function.body[1].value
            ), said


@BOTH
def test_visible_tests_print_what_the_instruction_quotes(tmp_path, knobs):
    for task in take(3, knobs=knobs):
        (tmp_path / "test_solution.py").write_text(task.tests)
        for text, output in ((task.buggy, task.failure), (task.fixed, "all visible tests pass")):
            (tmp_path / "solution.py").write_text(text)
            done = subprocess.run(
                [sys.executable, "-B", "test_solution.py"],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=280,
            )
            assert (done.stdout + done.stderr).strip() == output
        assert task.failure in task.instruction


def test_splits_share_no_program_even_renamed():
    def skeleton(task: BugTask) -> str:
        names: dict[str, str] = {}
        return re.sub(r"\b[a-z]+\b", lambda m: names.setdefault(m[0], f"n{len(names)}"), task.fixed)

    knobs = Knobs(symbols=("+", "-"), max_constant=4)  # few programs, so that a leak would show
    train = {skeleton(task) for task in take(800, knobs=knobs)}
    test = {
        skeleton(task)
        for seed in range(3)
        for task in take(150, seed=seed, split="test", knobs=knobs)
    }
    assert train and test and not train & test


def test_split_ignores_operand_order_of_commutative_operators():
    a, b = Node("var", (), 0), Node("var", (), 1)
    for op in ("+", "*", "min", "max"):
        assert split_of([(Node(op, (a, b)),)]) == split_of([(Node(op, (b, a)),)])


def test_same_arguments_same_stream_and_no_repeats():
    first, again, other = take(200), take(200), take(200, seed=1)
    assert first == again
    assert len({task.id for task in first}) == 200
    assert len({task.id for task in first} & {task.id for task in other}) < 5


def test_every_kind_occurs_and_can_be_chosen_alone():
    assert {task.kind for task in take(600)} == set(KINDS)
    for kind in KINDS:
        assert {task.kind for task in take(5, knobs=Knobs(kinds=(kind,)))} == {kind}


def test_mutants_differ_from_the_original_and_never_divide_by_a_variable():
    node = Node("//", (Node("+", (Node("var", (), 0), Node("const", (), 3))), Node("const", (), 4)))
    found = [mutant for _, mutant in mutated_nodes(node, 2, Knobs())]
    assert found and node not in found
    assert all(mutant.args[1].op == "const" for mutant in found if mutant.op in ("//", "%"))


def test_row_keeps_the_answer_out_of_the_view():
    for made in take(50):
        task = made.to_task()
        assert task.artifacts == ("solution.py",)
        view = task.view()
        assert made.text not in view.model_dump_json()
        assert not any(repr(args) in view.instruction for args, _ in made.cases)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"functions": 0}, "functions=0"),
        ({"kinds": ("typo",)}, "kinds="),
        ({"symbols": ()}, "symbols="),
    ],
)
def test_bad_knobs_are_refused_by_name(setting, named):
    with pytest.raises(ConfigError, match=re.escape(named)):
        Knobs(**setting)


def test_unknown_split_and_exhausted_programs_are_refused():
    with pytest.raises(ConfigError, match="split='dev'"):
        take(1, split="dev")
    tiny = Knobs(functions=1, symbols=("+",), kinds=("operator",))
    with pytest.raises(ConfigError, match="widen a knob"):
        take(1, knobs=tiny)


def test_the_time_for_tasks_grows_with_their_number_alone():
    assert growth(take, 250) < 9
