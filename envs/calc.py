"""calc-v0: work out an arithmetic expression with a calculator, one operation at a time."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator
from typing import ClassVar, Literal

from agentrl.env import ToolEnv
from agentrl.errors import ConfigError
from agentrl.safety.writes import WriteSet
from agentrl.tools import tool
from agentrl.types import Limits, Task
from agentrl.verifiers import Verifier, numeric

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Calculator(ToolEnv):
    """Evaluate an expression in plain words or signs; the last number of the final answer counts.

    Args:
        operations: how many operations an expression has (1 to 4).
        largest: largest number in an expression.
    """

    id: ClassVar[str] = "calc-v0"
    system = "Use the calculator, then answer with the number alone."
    verifier: Verifier = numeric()
    limits = Limits(turns=8, tool_calls=8, wall_s=30)
    endless = True
    writes = WriteSet()

    def __init__(self, operations: int = 2, largest: int = 99) -> None:
        if not isinstance(operations, int) or not 1 <= operations <= 4:
            raise ConfigError(
                f"calc-v0: operations={operations} must be a whole number from 1 to 4"
            )
        if not isinstance(largest, int) or not 10 <= largest <= 10**9:
            raise ConfigError(f"calc-v0: largest={largest} must be a whole number from 10 to 10**9")
        self.operations = operations
        self.largest = largest

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Random expressions, each once; the expression's text decides its split.

        With one operation on small numbers they end, after a thousand draws without a new one.
        """
        if split not in ("train", "test"):
            raise ConfigError(f"calc-v0: split={split!r} must be 'train' or 'test'")
        rng = random.Random(f"{split}-{seed}")
        seen: set[str] = set()
        stale = 0
        while stale < 1000:
            text, steps, value = self._expression(rng)
            stale += 1
            if text in seen or (sum(text.encode()) % 5 == 0) != (split == "test"):
                continue
            seen.add(text)
            stale = 0
            yield Task(
                id="calc-" + text.replace(" ", ""),
                instruction=f"What is {text}?",
                hidden={"answer": value},
                oracle={"calls": steps, "answer": str(value)},
            )

    @tool
    def calculate(self, left: int, operation: Literal["+", "-", "*"], right: int) -> str:
        """Apply one operation to two whole numbers.

        Args:
            left: the number before the sign.
            operation: the sign.
            right: the number after the sign.
        """
        if max(abs(left), abs(right)) > 10**30:
            raise ValueError("numbers may have at most 30 digits")
        return str(_OPERATIONS[operation](left, right))

    def _expression(self, rng: random.Random) -> tuple[str, list[dict[str, object]], int]:
        """Text, calculator calls and value of a random expression, bracketed from the left."""
        value = rng.randint(1, self.largest)
        text = str(value)
        calls: list[dict[str, object]] = []
        for index in range(self.operations):
            sign, right = rng.choice(sorted(_OPERATIONS)), rng.randint(1, self.largest)
            arguments = {"left": value, "operation": sign, "right": right}
            calls.append({"name": "calculate", "arguments": arguments})
            text = f"{text} {sign} {right}" if index == 0 else f"({text}) {sign} {right}"
            value = _OPERATIONS[sign](value, right)
        return text, calls, value
