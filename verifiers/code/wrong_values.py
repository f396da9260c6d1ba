"""Other values in the place of what is written: of the same type and look, and not the same."""

from __future__ import annotations

import ast
import copy
import random
from types import EllipsisType

Value = str | bytes | bool | int | float | complex | None
_MADE_OF = {
    "approx",
    "Decimal",
    "Fraction",
    "Counter",
    "OrderedDict",
    "deque",
    "array",
    "date",
    "datetime",
    "timedelta",
}
_MADE_OF |= {
    "set",
    "frozenset",
    "tuple",
    "list",
    "dict",
    "bytes",
    "bytearray",
    "complex",
    "float",
    "int",
    "Path",
}
TOLERANCES = {"abs", "rel", "delta", "atol", "rtol", "abs_tol", "rel_tol"}
_UP, _AROUND = range(1, 13), (*range(-6, 0), *range(1, 7))
_LOOSE = 0.3
"""A float that is changed moves by 0.7 of its size or more, and by 0.7 at least: over twice this
tolerance.
"""


def called_name(node: ast.Call) -> str:
    """The last part of the name that is called; empty where there is none."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def is_literal(node: ast.AST) -> bool:
    """Whether an expression is a literal, whose value can be read without running anything."""
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError, SyntaxError):
        return False
    return True


def is_loose(call: ast.Call) -> bool:
    """Whether a call compares with so wide a tolerance that a wrong value could be within twice of
    it.
    """
    for word in call.keywords:
        if word.arg == "places" or word.arg in TOLERANCES:
            value = word.value.value if isinstance(word.value, ast.Constant) else None
            if not isinstance(value, int | float) or (
                value < 1 if word.arg == "places" else value > _LOOSE
            ):
                return True
    return False


def changed(node: ast.AST, rng: random.Random) -> ast.expr | None:
    """An expression for another value of the same kind; None if what is written here is no value."""
    if isinstance(node, ast.Constant):
        return (
            None if isinstance(node.value, EllipsisType) else ast.Constant(_other(node.value, rng))
        )
    if isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not):
        inner = changed(node.operand, rng)
        return None if inner is None else ast.UnaryOp(node.op, inner)
    if isinstance(node, ast.BinOp):
        left, right = changed(node.left, rng), changed(node.right, rng)
        if left is None or right is None:
            return None
        return ast.BinOp(left, node.op, copy.deepcopy(node.right))
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return _changed_item(node, "elts", rng) or (
            None if node.elts else holding(node, [ast.Constant(0)])
        )
    if isinstance(node, ast.Dict):
        return _changed_item(node, "values", rng) or (None if node.values else _filled("dict"))
    if isinstance(node, ast.Call) and called_name(node) in _MADE_OF:
        if is_loose(node):
            return None
        return _changed_item(node, "args", rng) if node.args else _filled(called_name(node))
    return None


def _changed_item(node: ast.expr, field: str, rng: random.Random) -> ast.expr | None:
    """The expression with one of its items changed, whichever can be, drawn at random."""
    items = getattr(node, field)
    places = list(range(len(items)))
    if field == "args":
        places = places[:1]
    rng.shuffle(places)
    for place in places:
        new = changed(items[place], rng)
        if new is not None:
            twin = copy.deepcopy(node)
            getattr(twin, field)[place] = new
            return twin
    return None


def holding(node: ast.List | ast.Tuple | ast.Set, items: list[ast.expr]) -> ast.expr:
    """The same collection with other items."""
    twin = copy.deepcopy(node)
    twin.elts = items
    return twin


def _filled(name: str) -> ast.expr | None:
    """What an empty collection becomes."""
    made = {
        "set": "{0}",
        "frozenset": "frozenset({0})",
        "list": "[0]",
        "tuple": "(0,)",
        "dict": "{'a': 0}",
    }
    return ast.parse(made[name], mode="eval").body if name in made else None


def _other(value: Value, rng: random.Random) -> Value:
    """Another value of the same type and look."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + int(rng.choice(_UP if value < 4 else _AROUND))
    if isinstance(value, float):
        return _other_float(value, rng)
    if isinstance(value, complex):
        return value + rng.choice((1, 2, 3)) * (1j if value.imag else 1)
    if isinstance(value, bytes):
        return _other_text(value.decode("latin-1"), rng).encode("latin-1")
    if isinstance(value, str):
        return _other_text(value, rng)
    return 0


def _other_float(value: float, rng: random.Random) -> float:
    digits = len(repr(value).partition(".")[2])
    near = round(value + rng.uniform(0.7, 2.2) * max(1.0, abs(value)), digits)
    return near if near != value else value + 1.0


def _other_text(text: str, rng: random.Random) -> str:
    letters = [place for place, sign in enumerate(text) if sign.isascii() and sign.isalnum()]
    if not letters:
        return text + rng.choice("abcdefgh") if not text else text + text[-1]
    place = rng.choice(letters)
    kind = "0123456789" if text[place].isdigit() else "abcdefghijklmnopqrstuvwxyz"
    sign = rng.choice([sign for sign in kind if sign != text[place].lower()])
    return text[:place] + (sign.upper() if text[place].isupper() else sign) + text[place + 1 :]
