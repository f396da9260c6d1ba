"""The form of a mathematical answer, which a library that compares values does not look at.

math-verify evaluates what it reads, so the question itself, written as a formula, equals its
answer; it strips every letter behind a number as a unit; and it takes a set for a pair.
"""

from __future__ import annotations

import re

_SPACE = re.compile(r"\\[,;:! ]|\\q?quad|~|\\left|\\right|\\displaystyle|\\limits|\$|\\\$|[€£¥]")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname\*?)\s*\{([^{}]*)\}")
_CALLED = re.compile(r"\\(?:operatorname\*?|mathrm)\s*\{(sum|prod|lim|det|gcd|lcm|max|min|mod)\}")
_FRACTION = re.compile(r"\\[dt]frac")
_OPERATOR = re.compile(
    r"\\(?:sum|prod|coprod|i*int|oint|lim(?:sup|inf)?|det|gcd|lcm|[dt]?binom|choose|[bp]?mod"
    r"|max|min|sup|inf|[lr]floor|[lr]ceil|partial|nabla|[cld]?dots|big(?:cup|cap)"
    r"|begin\s*\{(?:[vV]matrix|array)\})(?![A-Za-z])"
    r"|\\frac\s*\{?\s*d\s*\}?\s*\{\s*d\s*[a-z]|!|∑|∏|∫|…|\.\.\."
    r"|\b(?:sum|prod|product|int|integral|integrate|limit|lim|det|gcd|lcm|max|min|mod|factorial"
    r"|binomial|Sum|Product|Integral|Limit|Derivative|Determinant)\s*[({_]"
)
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_POWER = r"10\s*\^\s*(?:\{\s*[-+]?\d+\s*\}|[-+]?\d+)"
_SCALED = rf"(?:{_DECIMAL}(?:[eE][-+]?\d+|\s*(?:\\times|\\cdot|\*|×)\s*{_POWER})?|{_POWER})"
_SIGN = r"[-+−]?\s*"
_WHOLE = re.compile(rf"{_SIGN}{_DIGITS}")
_RATIO = (
    rf"(?:{_SIGN}(?:\d+\s+|\d+(?=\\frac))?(?:\\frac\s*\{{\s*{_SIGN}{_DECIMAL}\s*\}}"
    rf"\s*\{{\s*{_SIGN}{_DECIMAL}\s*\}}|\\frac\s*\d\s*\d|{_DECIMAL}\s*/\s*{_DECIMAL}))"
)
_NUMBER = re.compile(rf"({_RATIO}|{_SIGN}{_SCALED})")
_UNIT = re.compile(
    r"\\?%|°|(?:\^\s*\{?\s*)?\\(?:circ|degree)\s*\}?|\^\s*\{?\s*[23]\s*\}?|[·/.*²³-]"
)
_NAME = re.compile(r"^\s*(?:\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\(\w+\))?)\s*(?:=|\\approx)")
_WORD = re.compile(r"[A-Za-z]+")
_SHORT_UNITS = frozenset(
    (
        *("m", "s", "g", "h", "l", "L", "N", "J", "W", "V", "A", "K", "C", "F", "Hz", "kg", "mg"),
        *("cm", "mm", "km", "nm", "dm", "ft", "in", "yd", "mi", "oz", "lb", "ms", "us", "ml"),
        *("mL", "cl", "dl", "kW", "kJ", "Pa", "eV", "Wh", "am", "pm", "cc", "sq", "cu", "GB"),
        *("MB", "KB", "pt", "qt", "AU", "ly", "of", "to"),
    )
)
_OPEN, _CLOSE = "([{", ")]}"


def has_the_form(gold: str, target: str) -> bool:
    """Whether an answer that equals the expected one is also written as an answer.

    It may hold no operation that the expected answer lacks (a sum, an integral, a determinant: see
    `_OPERATOR`), so that a question restated is none. Where the expected answer is a number, it is
    a number too: digits, a fraction unless a whole number is expected, a power of ten, and a unit.
    Where the expected answer is a pair, an interval or a set, its brackets are the same.
    """
    gold, target = _plain(gold), _plain(target)
    value = _number_of(gold)
    if value is not None:
        return _is_number(target, whole=_WHOLE.fullmatch(value) is not None)
    allowed = {match[0] for match in _OPERATOR.finditer(gold)}
    if any(match[0] not in allowed for match in _OPERATOR.finditer(target)):
        return False
    wanted, found = _brackets(gold), _brackets(target)
    return wanted == found or (wanted == ["{}"] and not found) or not wanted


def answered(gold: str, target: str) -> str:
    """The part of an answer that is compared: behind the last `=`, where a number is expected."""
    if _number_of(_plain(gold)) is None or "=" not in target:
        return target
    return target.rpartition("=")[2]


def _plain(text: str) -> str:
    text = _CALLED.sub(r"\\\1 ", text)
    text = _FRACTION.sub(r"\\frac", _TEXT.sub(r" \1 ", text))
    text = _SPACE.sub(lambda found: "" if found[0] in ("\\!", "\\left", "\\right") else " ", text)
    text = text.replace("{,}", ",").strip().rstrip(".").strip()
    while text[:1] == "{" and text[-1:] == "}" and _closes(text):
        text = text[1:-1].strip()
    return text


def _closes(text: str) -> bool:
    """Whether the first brace is closed by the last."""
    depth = 0
    for place, letter in enumerate(text):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return place == len(text) - 1
    return False


def _number_of(text: str) -> str | None:
    """The number that a text is, without its unit; None if it is something else."""
    text = _NAME.sub("", text).strip()
    found = _NUMBER.match(text)
    return found[0].strip() if found and _is_unit(text[found.end() :]) else None


def _is_number(text: str, whole: bool) -> bool:
    value = _number_of(text.strip("() "))
    return value is not None and not (whole and re.fullmatch(_RATIO, value))


def _is_unit(text: str) -> bool:
    """Whether what follows a number is a unit or words, and no product of letters."""
    words = _WORD.findall(_UNIT.sub(" ", text))
    rest = _WORD.sub(" ", _UNIT.sub(" ", text))
    long = [word for word in words if len(word) > 2]
    known = [word for word in words if word in _SHORT_UNITS]
    attached = bool(_WORD.match(text)) and not (words and words[0] in _SHORT_UNITS)
    return not rest.strip(" \\,()'") and (
        not words or (not attached and bool(long)) or len(known) == len(words)
    )


def _brackets(text: str) -> list[str]:
    """Kinds of brackets around lists with commas, in order."""
    text = text.replace("\\{", "{ ").replace("\\}", " }")
    found, open_at = [], []
    for place, letter in enumerate(text):
        if letter in _OPEN:
            open_at.append([place, 0])
        elif letter == "," and open_at:
            open_at[-1][1] += 1
        elif letter in _CLOSE and open_at:
            start, commas = open_at.pop()
            if commas:
                found.append((start, text[start] + letter))
    return [kind for _, kind in sorted(found)]
