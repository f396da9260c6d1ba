"""Small programs as expression trees: drawn, mutated by one edit, run, and put into words."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from agentrl.errors import ConfigError

KINDS = ("operator", "comparison", "constant", "off_by_one", "variable", "swapped")
SYMBOLS = ("+", "-", "*", "//", "%", "min", "max", "if")
_COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
_COMMUTATIVE = frozenset(("+", "*", "min", "max", "==", "!="))
_DIVISIONS = frozenset(("//", "%"))  # by a constant, so that no input divides by zero
_APPLY: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv,
    "%": operator.mod, "min": min, "max": max,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_WORDS = {
    "+": "{} plus {}", "-": "{} minus {}", "*": "{} times {}",
    "//": "{} floor-divided by {}", "%": "{} modulo {}",
    "min": "the smaller of {} and {}", "max": "the larger of {} and {}",
    "<": "{} is less than {}", "<=": "{} is at most {}",
    ">": "{} is greater than {}", ">=": "{} is at least {}",
    "==": "{} equals {}", "!=": "{} differs from {}", "if": "{1} if {0}, otherwise {2}",
}  # fmt: skip
_CODE = {"min": "min({}, {})", "max": "max({}, {})", "if": "{1} if {0} else {2}"}
_FUNCTIONS = (
    "blend scale merge shift score level price total weigh adapt bound charge derive expand fold"
    " gauge handle index judge limit match offset profit quota refine settle tally update value"
    " weave"
)
_VARIABLES = (
    "a b c d g h k m n p q r s t u v w x y z left right width depth count rate size step base goal"
)
FUNCTION_NAMES, VARIABLE_NAMES = _FUNCTIONS.split(), _VARIABLES.split()
PARAMETERS = 2


@dataclass(frozen=True)
class Knobs:
    """How hard the tasks are.

    Attributes:
        functions: functions per file, each calling the one before it.
        statements: lines per function body; all but the last bind a local that the next one uses.
        operators: operators per statement (a conditional counts as one).
        kinds: defects that may be seeded, out of `KINDS`.
        symbols: operators that programs are made of, out of `SYMBOLS`.
        names: how many variable names are in use.
        function_names: how many function names are in use.
        max_constant: constants run from 2 to this.
    """

    functions: int = 2
    statements: int = 1
    operators: int = 1
    kinds: tuple[str, ...] = KINDS
    symbols: tuple[str, ...] = SYMBOLS
    names: int = 30
    function_names: int = 30
    max_constant: int = 9

    def __post_init__(self) -> None:
        for name in (
            "functions",
            "statements",
            "operators",
            "names",
            "function_names",
            "max_constant",
        ):
            if not isinstance(getattr(self, name), int):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be a whole number")
        limits = {
            "functions": (1, 6),
            "statements": (1, 6),
            "operators": (1, 4),
            "max_constant": (4, 99),
        }
        limits["names"] = (PARAMETERS + self.statements - 1, len(VARIABLE_NAMES))
        limits["function_names"] = (self.functions, len(FUNCTION_NAMES))
        for name, (low, high) in limits.items():
            if not low <= getattr(self, name) <= high:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is out of range; choose {low} to {high}"
                )
        for name, known in (("kinds", KINDS), ("symbols", SYMBOLS)):
            chosen = getattr(self, name)
            if (
                not isinstance(chosen, tuple)
                or not chosen
                or not all(item in known for item in chosen)
            ):
                raise ConfigError(f"{name}={chosen} must be a non-empty selection of {known}")


class Node(NamedTuple):
    """An expression.

    Attributes:
        op: an operator's symbol, "if" (condition, then, else), "var", "const" or "call".
        args: the operands.
        value: the variable's number, the constant, or the number of the function called.
    """

    op: str
    args: tuple[Node, ...] = ()
    value: int = 0


# One expression per statement; statement s binds variable PARAMETERS + s.
Function = tuple[Node, ...]
Evaluate = Callable[[list[int]], int]


def random_program(rng: random.Random, knobs: Knobs) -> list[Function]:
    """Draw a chain of functions; each function and each statement uses the one before it."""
    program: list[Function] = []
    for index in range(knobs.functions):
        nodes: list[Node] = []
        for statement in range(knobs.statements):
            scope = PARAMETERS + statement
            required = Node("var", (), scope - 1) if statement else None
            if index and not statement:
                variables = rng.sample(range(PARAMETERS), PARAMETERS)
                required = Node("call", tuple(Node("var", (), v) for v in variables), index - 1)
            nodes.append(_expression(rng, knobs, knobs.operators, scope, required))
        program.append(tuple(nodes))
    return program


def _expression(
    rng: random.Random, knobs: Knobs, operators: int, scope: int, required: Node | None = None
) -> Node:
    """A random tree of so many operators over `scope` variables, `required` among its leaves."""
    if operators == 0:
        return required or _leaf(rng, knobs, scope)
    op = rng.choice(knobs.symbols)
    inner = _expression(rng, knobs, operators - 1, scope, required)
    if op in _DIVISIONS:
        inner = Node("var", (), rng.randrange(scope)) if inner.op == "const" else inner
        return Node(op, (inner, Node("const", (), rng.randint(2, knobs.max_constant))))
    pair = (inner, _leaf(rng, knobs, scope, unlike=inner))
    pair = pair if rng.random() < 0.5 else pair[::-1]
    if op != "if":
        return Node(op, pair)
    left = Node("var", (), rng.randrange(scope))
    return Node(
        "if", (Node(rng.choice(_COMPARISONS), (left, _leaf(rng, knobs, scope, unlike=left))), *pair)
    )


def _leaf(rng: random.Random, knobs: Knobs, scope: int, unlike: Node | None = None) -> Node:
    """A variable or a constant; not the same as `unlike`, and not a second constant beside one."""
    constant = rng.random() < 0.4 and not (unlike and unlike.op == "const")
    leaf = (
        Node("const", (), rng.randint(2, knobs.max_constant))
        if constant
        else Node("var", (), rng.randrange(scope))
    )
    return _leaf(rng, knobs, scope, unlike) if leaf == unlike else leaf


def mutated_nodes(node: Node, scope: int, knobs: Knobs) -> Iterator[tuple[str, Node]]:
    """Every (kind, expression) one edit away from `node`; some may compute the same values."""
    yield from (
        (kind, mutant) for kind, mutant in _edits_here(node, scope, knobs) if kind in knobs.kinds
    )
    for index, arg in enumerate(node.args):
        for kind, mutant in mutated_nodes(arg, scope, knobs):
            if node.op not in _DIVISIONS or index == 0 or mutant.op == "const":
                yield (
                    kind,
                    node._replace(args=(*node.args[:index], mutant, *node.args[index + 1 :])),
                )


def _edits_here(node: Node, scope: int, knobs: Knobs) -> Iterator[tuple[str, Node]]:
    op, args = node.op, node.args
    if op == "var":
        yield from (
            ("variable", Node("var", (), other)) for other in range(scope) if other != node.value
        )
    elif op == "const":
        for value in set(range(1, knobs.max_constant + 2)) - {node.value}:
            yield (
                ("off_by_one" if abs(value - node.value) == 1 else "constant"),
                Node("const", (), value),
            )
    elif op in _COMPARISONS:
        yield from (("comparison", Node(other, args)) for other in _COMPARISONS if other != op)
    elif op in _APPLY:
        others = (other for other in knobs.symbols if other not in (op, "if"))
        yield from (
            ("operator", Node(o, args))
            for o in others
            if o not in _DIVISIONS or args[1].op == "const"
        )
    if op == "if":
        yield "swapped", Node(op, (args[0], args[2], args[1]))
    elif len(args) == 2 and op not in _COMMUTATIVE | _DIVISIONS:
        yield "swapped", node._replace(args=args[::-1])


def canonical(node: Node) -> tuple[Any, ...]:
    """The tree with the operands of commutative operators in a fixed order."""
    args = [canonical(arg) for arg in node.args]
    return (node.op, node.value, *(sorted(args, key=repr) if node.op in _COMMUTATIVE else args))


def _compile(node: Node, table: list[Evaluate]) -> Evaluate:
    """The tree as a function of its variables; each call looks up called functions in `table`."""
    if node.op == "var":
        return operator.itemgetter(node.value)
    if node.op == "const":
        value = node.value
        return lambda env: value
    parts = [_compile(arg, table) for arg in node.args]
    if node.op == "call":
        callee = node.value
        return lambda env: table[callee]([part(env) for part in parts])
    if node.op == "if":
        test, then, otherwise = parts
        return lambda env: then(env) if test(env) else otherwise(env)
    apply, (left, right) = _APPLY[node.op], parts
    if node.args[1].op == "const":
        constant = node.args[1].value
        return lambda env: apply(left(env), constant)
    return lambda env: apply(left(env), right(env))


def compile_function(function: Function, table: list[Evaluate]) -> Evaluate:
    """The function, to be called with its argument list; it finds earlier ones in `table`."""
    bodies = [_compile(node, table) for node in function]

    def run(args: list[int]) -> int:
        env = list(args)
        for body in bodies:
            env.append(body(env))
        return env[-1]

    return bodies[0] if len(bodies) == 1 else run


class Names(NamedTuple):
    """Turns trees into code and into words, under one choice of names."""

    functions: list[str]
    variables: list[str]

    def line(self, function: Function, statement: int) -> str:
        """One line of the body, indented."""
        target = (
            "return"
            if statement == len(function) - 1
            else f"{self.variables[PARAMETERS + statement]} ="
        )
        return f"    {target} {self.show(function[statement], code=True)}"

    def doc(self, function: Function) -> str:
        """What the docstring says: one sentence for each statement."""
        lets = [
            f"Let {self.variables[PARAMETERS + index]} be {self.show(node, code=False)}. "
            for index, node in enumerate(function[:-1])
        ]
        return f"{''.join(lets)}Return {self.show(function[-1], code=False)}."

    def show(self, node: Node, *, code: bool, nested: bool = False) -> str:
        """The expression as Python or in words; nested infix parts stand in brackets."""
        if node.op == "var":
            return self.variables[node.value]
        if node.op == "const":
            return str(node.value)
        if node.op == "call":
            arguments = ", ".join(self.show(arg, code=code) for arg in node.args)
            return f"{self.functions[node.value]}({arguments})"
        call = code and node.op in ("min", "max")
        bare = call or node.op == "if"
        parts = [
            self.show(arg, code=code, nested=not (bare and (call or arg.op in _COMPARISONS)))
            for arg in node.args
        ]
        form = _CODE.get(node.op, f"{{}} {node.op} {{}}") if code else _WORDS[node.op]
        text = form.format(*parts)
        return f"({text})" if nested and not call else text
