"""Values that may stand in a test instead of what is written, none of them special.

Who sees all that may stand somewhere must not see which of it is true. So what is shown for a
value is a block that each of its members would have given: whole numbers in a row that begins
anywhere, letters of one part of the alphabet. The true one is as often the lowest as the middle,
and it is shown once, like all others. None and empty collections have no such block.
"""

from __future__ import annotations

import ast
import builtins
import copy
import math
import random
import string
from collections.abc import Iterable
from typing import Any

MOST_OPTIONS = 13
TOLERANCES = {"abs", "rel", "delta", "atol", "rtol", "abs_tol", "rel_tol"}
_LOOSE = 0.3
"""Wider tolerances could hold two values of a block; those of floats are 0.7 apart or more."""

_COUNTED = {
    "approx",
    "Decimal",
    "Fraction",
    "array",
    "date",
    "datetime",
    "timedelta",
    "float",
    "int",
}
_HOLDING = {"Counter", "OrderedDict", "deque", "set", "frozenset", "tuple", "list", "dict", "bytes"}
_MADE_OF = _COUNTED | _HOLDING | {"bytearray", "complex", "Path"}
_FILLED = {"list": "[0]", "tuple": "(0,)", "set": "{0}", "frozenset": "frozenset({0})"}
_FILLED |= {"dict": "{'a': 0}"}
_ERRORS: tuple[str, ...] = (
    "ValueError",
    "TypeError",
    "KeyError",
    "IndexError",
    "ZeroDivisionError",
)
_ERRORS += ("AttributeError", "RuntimeError")
_UNUSUAL = ("BufferError", "EOFError", "ReferenceError", "StopAsyncIteration")
"""For errors that the solution defines: they may well be heirs of the usual ones."""

_ALPHABETS = (string.digits, string.ascii_lowercase, string.ascii_uppercase, string.punctuation)


def called_name(node: ast.Call) -> str:
    """The last part of the name that is called; empty where there is none."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def is_literal(node: ast.AST) -> bool:
    """Whether the value of an expression can be read without running anything."""
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError, SyntaxError):
        return False
    return True


def is_loose(call: ast.Call) -> bool:
    """Whether a call compares with a tolerance that could hold two values of a block."""
    for word in call.keywords:
        if word.arg == "places" or word.arg in TOLERANCES:
            value = word.value.value if isinstance(word.value, ast.Constant) else None
            if not isinstance(value, int | float) or (
                value < 1 if word.arg == "places" else value > _LOOSE
            ):
                return True
    return False


def stand_ins(node: ast.AST, rng: random.Random) -> list[ast.expr]:
    """Expressions that may stand here, the written one first; fewer than two if there are none.

    The order of the others goes round: each of the list, put first, would be followed by the rest.
    """
    values = _constants(node, rng)
    if values is not None:
        return [ast.parse(repr(value), mode="eval").body for value in values]
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return _inside(node, "elts", rng) or _emptied(node, type(node).__name__.lower())
    if isinstance(node, ast.Dict):
        return _inside(node, "values", rng) or _emptied(node, "dict")
    if isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not):
        return _inside(node, "operand", rng)
    if isinstance(node, ast.BinOp):
        return _inside(node, "right", rng) if stand_ins(node.left, random.Random(0)) else []
    if isinstance(node, ast.keyword):
        return _inside(node, "value", rng)
    return _made(node, rng)


def _made(node: ast.AST, rng: random.Random) -> list[ast.expr]:
    """Options of what is made by a call, or is a member of a class."""
    if isinstance(node, ast.Call) and not is_loose(node):
        name = called_name(node)
        if name in _MADE_OF:
            return _inside(node, "args", rng, 1) if node.args else _emptied(node, name)
        if name[:1].isupper():
            return _inside(node, "args", rng) or _inside(node, "keywords", rng)
    if isinstance(node, ast.Attribute) and node.attr in getattr(node, "members", ()):
        members = _round_from(node.attr, getattr(node, "members", []))
        return [_with(node, "attr", member) for member in members]
    return []


def errors(node: ast.expr, rng: random.Random) -> list[ast.expr]:
    """Exception types that may stand here, the written one first."""
    many = node.elts if isinstance(node, ast.Tuple) else [node]
    names = {getattr(item, "attr", getattr(item, "id", "")) for item in many}
    others = [name for name in _ERRORS if not _is_kin(name, names)]
    if not all(isinstance(getattr(builtins, name, None), type) for name in names):
        others = [name for name in _UNUSUAL if name not in names]
    elif names & {"Exception", "BaseException"}:
        others = ["ConnectionError"]
    rng.shuffle(others)
    return [copy.deepcopy(node), *(ast.Name(name, ast.Load()) for name in others)]


def _is_kin(name: str, names: Iterable[str]) -> bool:
    kind = getattr(builtins, name)
    others = [getattr(builtins, other, None) for other in names]
    kinds = [other for other in others if isinstance(other, type)]
    return any(issubclass(kind, other) or issubclass(other, kind) for other in kinds)


def _constants(node: ast.AST, rng: random.Random) -> list[Any] | None:
    """The block of a value; None if what is written is no single value."""
    if not isinstance(node, ast.Constant | ast.UnaryOp) or not is_literal(node):
        return None
    value = ast.literal_eval(node)
    if value is None or isinstance(value, bool):
        return [None, True, False] if value is None else [value, not value]
    if isinstance(value, int):
        first = value - rng.randrange(MOST_OPTIONS)
        return _round_from(value, list(range(first, first + MOST_OPTIONS)))
    if isinstance(value, float):
        return _floats(value, rng)
    if isinstance(value, complex):
        return [value + shift * (1j if value.imag else 1) for shift in range(MOST_OPTIONS)]
    if isinstance(value, str):
        return list(_texts(value, rng))
    if isinstance(value, bytes):
        return [text.encode("latin-1") for text in _texts(value.decode("latin-1"), rng)]
    return None


def _round_from(value: Any, block: list[Any]) -> list[Any]:
    at = next(index for index, other in enumerate(block) if other is value or other == value)
    return block[at:] + block[:at]


def _floats(value: float, rng: random.Random) -> list[Any] | None:
    if not math.isfinite(value):
        return None
    scale = 10.0 ** math.floor(math.log10(max(1.0, abs(value))))
    digits = len(repr(value).partition(".")[2]) if "e" not in repr(value) else 12
    step = rng.uniform(0.7, 2.2) * scale
    step = max(1.0, round(step)) if value == round(value) else round(step, digits) or 1.0
    first = rng.randrange(MOST_OPTIONS)
    places = [*range(-first, MOST_OPTIONS - first)]
    block = [value if not at else round(value + at * step, digits) for at in places]
    return list(_round_from(value, block)) if len(set(block)) == len(block) else None


def _texts(text: str, rng: random.Random) -> list[str]:
    """The text with one sign changed, each time to another of one part of its alphabet."""
    if not text:
        return ["", *rng.sample(string.ascii_lowercase, 4)]
    places = [at for at, sign in enumerate(text) if any(sign in signs for signs in _ALPHABETS)]
    alike = [at for at in places if text[at].isalnum()] or places
    if not alike:
        return []
    at = rng.choice(alike)
    signs = list(next(signs for signs in _ALPHABETS if text[at] in signs))
    rng.shuffle(signs)
    size = min(len(signs), MOST_OPTIONS)
    start = signs.index(text[at]) // size * size
    part = _round_from(text[at], signs[start : start + size])
    return [text[:at] + sign + text[at + 1 :] for sign in part]


def _inside(
    node: ast.AST, field: str, rng: random.Random, count: int | None = None
) -> list[ast.expr]:
    """The expression with one of its parts changed, whichever can be, drawn at random."""
    parts = getattr(node, field)
    if not isinstance(parts, list):
        return [_with(node, field, other) for other in stand_ins(parts, rng)]
    places = list(range(len(parts)))[:count]
    rng.shuffle(places)
    for place in places:
        found = stand_ins(parts[place], rng)
        if len(found) > 1:
            return [
                _with(node, field, [*parts[:place], other, *parts[place + 1 :]]) for other in found
            ]
    return []


def _with(node: ast.AST, field: str, value: object) -> ast.expr:
    twin = copy.copy(node)
    setattr(twin, field, value)
    return copy.deepcopy(twin)  # type: ignore[return-value]


def _emptied(node: ast.expr, name: str) -> list[ast.expr]:
    """An empty collection, and one that holds something; nothing for one that is not empty."""
    held = getattr(node, "elts", None) or getattr(node, "values", None)
    if held or getattr(node, "args", None) or name not in _FILLED:
        return []
    return [copy.deepcopy(node), ast.parse(_FILLED[name], mode="eval").body]
