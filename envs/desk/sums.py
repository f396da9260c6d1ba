"""A calculator that reads arithmetic and nothing else."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

_SIGNS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_LONGEST = 1000


def calculate(expression: str) -> str:
    """The value of an expression of numbers, + - * / and brackets, rounded to two digits.

    Raises:
        ValueError: it holds something else, or has no value.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"an expression may have {_LONGEST} characters")
    try:
        return str(round(float(_value(ast.parse(expression.strip(), mode="eval").body)), 2))
    except (SyntaxError, ZeroDivisionError, OverflowError, RecursionError) as error:
        raise ValueError(f"the expression has no value: {error}") from None


def _value(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        return _SIGNS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _SIGNS:
        return _SIGNS[type(node.op)](_value(node.operand))
    raise ValueError("use numbers, + - * / and brackets")
