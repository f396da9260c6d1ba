"""One sound environment, and one for each promise of an audit that breaks this promise and no
other.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import ClassVar

from agentrl import Limits, Message, Score, Task, ToolEnv, tool
from agentrl.types import ToolCall
from agentrl.verifiers.code.hidden_tests import PYTHON, hidden_tests
from agentrl.verifiers.combine import remembered

TEXTS = {
    "train": (
        "squares the number that it is given",
        "x * x",
        "takes three away from twice its argument",
        "2 * x - 3",
    ),
    "test": (
        "adds seven to whatever comes in",
        "x + 7",
        "says how far from forty-one its argument is",
        "abs(x - 41)",
    ),
}
JUDGE = hidden_tests(call_s=10)


class Sound(ToolEnv):
    """Write a function of one number; hidden cases decide."""

    id = "sound-v0"
    verifier = JUDGE
    needs_sandbox = True
    limits = Limits(turns=4, tool_calls=8, wall_s=60)

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        row = TEXTS[split]
        yield from (
            make(split, words, body) for words, body in zip(row[::2], row[1::2], strict=True)
        )

    def oracle_actions(self, task: Task) -> Iterable[Message]:
        arguments = {"path": "solution.py", "text": task.oracle["files"]["solution.py"]}
        yield Message.assistant("", ToolCall("read_file", {"path": "notes.txt"}))
        yield Message.assistant("", ToolCall("write_file", arguments), ToolCall("submit", {}))

    @tool
    async def read_file(self, path: str) -> str:
        """Show a file."""
        return (await self.sandbox.get([path]))[path].decode(errors="replace")

    @tool(effect="write")
    async def write_file(self, path: str, text: str) -> str:
        """Write a file."""
        await self.sandbox.put({path: text.encode()})
        return "ok"

    @tool
    def submit(self) -> str:
        """Hand in."""
        self.finish()
        return "submitted"


def make(
    split: str, words: str, body: str, inputs: Iterable[int] = (0, 5, 60, -3), name: str = "f"
) -> Task:
    function = eval(f"lambda x: {body}")
    text = f"def {name}(x):\n    # the shortest way to put it\n    return {body}\n"
    return Task(
        id=f"{split}/{words[:8]}",
        instruction=(
            f"Write solution.py with a function {name}(x) that {words}. So {name}(2) =="
            f" {function(2)}."
        ),
        files={"notes.txt": f"x is a whole number, and the function {words}\n"},
        hidden={
            "entry_point": name,
            "cases": [{"args": [x], "expected": function(x)} for x in inputs],
        },
        oracle={"files": {"solution.py": text}},
    )


class WrongOracle(Sound):
    """The reference of its last task is another's."""

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        first, last = super().tasks(split, seed)
        yield first
        yield last.model_copy(update={"oracle": first.oracle})


async def _lenient(submission) -> Score:
    return await JUDGE(submission) if submission.artifacts else Score(1.0, {}, "nothing was wrong")


class PassesNothing(Sound):
    """Its verifier finds no fault in work that is not there."""

    verifier = _lenient


async def _by_exit_code(submission) -> Score:
    hidden = submission.task.hidden
    lines = [f"assert f(*{case['args']!r}) == {case['expected']!r}" for case in hidden["cases"]]
    async with submission.pool.lease("grader") as sandbox:
        await sandbox.put(
            {
                **submission.artifacts,
                "judge.py": "\n".join(["from solution import f", *lines]).encode(),
            }
        )
        result = await sandbox.exec([PYTHON, "-B", "judge.py"])
    return Score(float(result.exit_code == 0), {}, "by exit code")


class BelievesExitCodes(Sound):
    """It runs the candidate together with its tests, and believes the exit code."""

    verifier = _by_exit_code


class HidesNothing(Sound):
    """Its hidden cases are those that the instruction shows."""

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        row = TEXTS[split]
        yield from (
            make(split, words, body, [2, 2])
            for words, body in zip(row[::2], row[1::2], strict=True)
        )


async def _by_text(submission) -> Score:
    same = (
        submission.artifacts.get("solution.py", b"").decode()
        == submission.task.oracle["files"]["solution.py"]
    )
    return Score(float(same), {}, "by text")


class ComparesTexts(Sound):
    """It compares with the text of the reference and runs nothing."""

    verifier = _by_text


class LeavesTheSolution(Sound):
    """It leaves the reference where the agent works."""

    async def setup(self) -> None:
        every = [task for split in TEXTS for task in Sound().tasks(split, 0)]
        text = next(
            task.oracle["files"]["solution.py"] for task in every if task.id == self.task.id
        )
        await self.sandbox.put({".cache/solution.orig": text.encode()})


async def _talkative(submission) -> Score:
    score = await JUDGE(submission)
    wanted = submission.task.hidden["cases"][0]["expected"]
    return replace(score, why=f"the first case should give {wanted}")


class TellsExpectedValues(Sound):
    """Its verdict quotes what was expected."""

    verifier = _talkative


class KeepsState(Sound):
    """What one episode writes beside its solution is there for the next one."""

    written: ClassVar[dict[str, str]] = {}

    async def setup(self) -> None:
        if self.written:
            await self.sandbox.put({"seen.json": json.dumps(self.written).encode()})

    @tool(effect="write")
    async def write_file(self, path: str, text: str) -> str:
        """Write a file."""
        if path != "solution.py":
            self.written[path] = text
        await self.sandbox.put({path: text.encode()})
        return "ok"


_CLOCK = itertools.count()


class ShowsTheTime(Sound):
    """A tool answers otherwise every time."""

    @tool
    async def read_file(self, path: str) -> str:
        """Show a file."""
        return f"{next(_CLOCK)}: {(await self.sandbox.get([path]))[path].decode()}"


class HoldsOutTwins(Sound):
    """A held-out task is a training task with another function name."""

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        yield from super().tasks(split, seed)
        yield make(
            split,
            "counts how many halves there are in it",
            "2 * x",
            name="f" if split == "train" else "counted",
        )


async def _moody(submission) -> Score:
    score = await JUDGE(submission)
    return score if score.value else Score(-0.5 * (next(_CLOCK) % 2), {}, "some blame")


class IsMoody(Sound):
    """Wrong work gets now this score, now that; and what it said of some work it says again."""

    verifier = remembered(_moody)


class IsTooShort(Sound):
    """The reference needs more turns than there are."""

    limits = Limits(turns=2, tool_calls=8, wall_s=60)

    def oracle_actions(self, task: Task) -> Iterable[Message]:
        for message in super().oracle_actions(task):
            yield from (Message.assistant("", call) for call in message.tool_calls)


class ReadsByWriting(Sound):
    """A tool that says that it reads leaves a log."""

    @tool
    async def read_file(self, path: str) -> str:
        """Show a file."""
        await self.sandbox.put({"log.txt": path.encode()})
        return (await self.sandbox.get([path]))[path].decode(errors="replace")


BROKEN: dict[str, type[Sound]] = {
    "oracle": WrongOracle,
    "noop": PassesNothing,
    "attacks": BelievesExitCodes,
    "visible_only": HidesNothing,
    "impossible": ComparesTexts,
    "hidden_absent": LeavesTheSolution,
    "hidden_untold": TellsExpectedValues,
    "reset": KeepsState,
    "replay": ShowsTheTime,
    "duplicates": HoldsOutTwins,
    "flakiness": IsMoody,
    "cost": IsTooShort,
    "effects": ReadsByWriting,
}
"""Promise -> the environment that breaks it. What a policy learns is no promise of an environment
alone.
"""

__all__ = ["BROKEN", "Sound", "make"]
