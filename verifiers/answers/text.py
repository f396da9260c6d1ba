"""Judge the last thing that the assistant said against `hidden["answer"]`; no sandbox is needed."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from fractions import Fraction

from agentrl.errors import TaskError
from agentrl.types import Json, Score, Task
from agentrl.verifiers.base import Submission

TextVerifier = Callable[[Submission], Awaitable[Score]]
Match = Callable[[str, Json], bool | Awaitable[bool]]

_SIGN = r"[-+\u2212]"
_CURRENCY = r"[$€£¥]"
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w.)\]]){_SIGN}{_CURRENCY}?|{_CURRENCY}{_SIGN})?"
    r"(?P<digits>(?:\d{1,3}(?:,\d{3})+(?!,?\d)|\d+)(?:\.\d+)?|\.\d+)"
    r"(?P<exponent>[eE][-+]?\d{1,3}(?!\d))?",
    re.ASCII,
)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_LONGEST = 400
_TAIL = 4000


def on_answer(match: Match) -> TextVerifier:
    """A verifier by `match(answer, expected)`: 1.0 if any expected answer matches, else 0.0.

    A predicate that takes long is an async one, so that it does not hold up the loop.

    `hidden["answer"]` is one expected answer or a list of alternatives. An answer that is missing
    there, or that the predicate cannot read (it raises ValueError), is the task's fault: TaskError,
    never a number.
    """

    async def verify(submission: Submission) -> Score:
        expected = expected_answers(submission.task)
        try:
            passed = any([await _settled(match(submission.answer, item)) for item in expected])
        except ValueError as error:
            raise TaskError(f"task {submission.task.id!r}: field hidden.answer {error}") from None
        return Score(float(passed), {}, "the answer is right" if passed else "the answer is wrong")

    return verify


async def _settled(matched: bool | Awaitable[bool]) -> bool:
    return matched if isinstance(matched, bool) else await matched


def expected_answers(task: Task) -> list[Json]:
    """The alternatives in `hidden["answer"]`.

    Raises:
        TaskError: there is none.
    """
    answer = task.hidden.get("answer")
    answers = answer if isinstance(answer, list) else [answer]
    if not answers or any(item is None for item in answers):
        raise TaskError(
            f"task {task.id!r}: field hidden.answer is {answer!r}; give the expected answer"
        )
    return answers


def exact_match(*, ignore_case: bool = False) -> TextVerifier:
    """The whole answer equals the expected text; space around it and between words is made equal.

    Args:
        ignore_case: also make upper and lower case equal.
    """

    def normal(text: str) -> str:
        words = " ".join(text.split())
        return words.casefold() if ignore_case else words

    def match(answer: str, expected: Json) -> bool:
        want = normal(str(expected))
        if not want:
            raise ValueError("is empty; an empty answer would be right")
        return normal(answer) == want

    return on_answer(match)


def numeric(*, rtol: float = 1e-6, atol: float = 0.0) -> TextVerifier:
    """The last number of the answer, as `last_number` reads it, equals the expected number.

    Two whole numbers must be equal exactly, however long. Otherwise they may differ by `max(atol,
    rtol * |expected|)`. What is no finite number equals nothing.
    """
    if not 0 <= rtol < 1 or not 0 <= atol < float("inf"):
        raise ValueError(f"rtol={rtol} must be in [0, 1) and atol={atol} at least 0")

    def match(answer: str, expected: Json) -> bool:
        want = last_number(str(expected)) if not isinstance(expected, bool) else None
        if want is None:
            raise ValueError(f"is {expected!r}; give a finite number")
        got = last_number(answer)
        if got is None:
            return False
        if got.denominator == want.denominator == 1:
            return got == want
        return abs(got - want) <= max(Fraction(atol), Fraction(rtol) * abs(want))

    return on_answer(match)


def last_number(text: str) -> Fraction | None:
    """The number that a text ends on; None if there is none.

    What follows the last `####` or stands in the last `\\boxed{}` is all that is read, where there
    is such a thing. Commas between groups of three digits are thousands separators; a currency sign
    and a percent sign are left out (50 % is 50); a minus is a sign only right before the number and
    not right behind a word, a digit or a bracket; `1e3` and `.5` are numbers, `a/b` without spaces
    is a fraction. NaN and infinity are no numbers, and neither is anything beyond 400 digits.
    """
    final = _final_part(text)
    end = max(map(final.rfind, "0123456789")) + 1
    final = final[
        max(0, end - _TAIL) : end
    ]  # enough for two of the longest; a long row of groups costs its square
    found = list(_NUMBER.finditer(final))
    if not found:
        return None
    last = _value(found[-1])
    if len(found) == 1 or final[found[-2].end() : found[-1].start()] != "/":
        return last
    top = _value(found[-2])
    return top / last if top is not None and last else None


def last_boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{}`, closed or not; None where there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return text[start : brace.start()]
    return text[start:]


def _final_part(text: str) -> str:
    if "####" in text:
        return text.rpartition("####")[2]
    boxed = last_boxed(text)
    return text if boxed is None else boxed


def _value(number: re.Match[str]) -> Fraction | None:
    digits, exponent = number["digits"].replace(",", ""), number["exponent"] or ""
    if len(digits) > _LONGEST or abs(int(exponent[1:] or 0)) > _LONGEST:
        return None
    value = Fraction(digits + exponent)
    return -value if set(number["sign"] or "") & {"-", "\u2212"} else value
