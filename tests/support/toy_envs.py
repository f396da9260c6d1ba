"""Environments for tests: small, fast, and with a signal that an untrained model already meets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from agentrl import EndReason, Limits, Message, Score, Step, Task, ToolEnv, tool
from agentrl.envs.calc import Calculator


async def even_length(submission):
    """1 where the last answer has an even number of characters."""
    return Score(
        float(len(submission.answer) % 2 == 0), {"length": len(submission.answer)}, "even or odd"
    )


class Parity(ToolEnv):
    """Say something, hear "more", say something again."""

    id = "parity-v0"
    verifier = even_length
    limits = Limits(turns=3, turn_tokens=6, episode_tokens=40, wall_s=60)

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        for index in range(40):
            yield Task(
                id=f"{split}-{seed % 97}-{index}", instruction=f"say {index}", hidden={"n": 1}
            )

    async def setup(self) -> None:
        self.heard = 0

    async def on_text(self, message: Message) -> Step:
        self.heard += 1
        if self.heard < 2:
            return Step((Message.user("more"),))
        return Step(end=EndReason.ANSWERED)

    @tool
    def nothing(self) -> str:
        """Do nothing."""
        return "nothing"


async def never(submission):
    """0 whatever was said."""
    return Score(0.0, {}, "never")


class Hopeless(Parity):
    """A task that nobody solves."""

    id = "hopeless-v0"
    verifier = never


async def below_nothing(submission):
    """-0.5 whatever was said."""
    return Score(-0.5, {}, "less than nothing")


class Below(Parity):
    """A task that always costs something."""

    id = "below-v0"
    verifier = below_nothing


async def breaks_on_sevenths(submission):
    """`even_length`, but it breaks where the last answer's length is a multiple of 7."""
    if len(submission.answer) % 7 == 0:
        raise ValueError("no verdict")
    return await even_length(submission)


class Breaking(Parity):
    """Episodes of one to three turns, with a verifier that breaks on some of them every time."""

    id = "breaking-v0"
    verifier = breaks_on_sevenths

    async def on_text(self, message: Message) -> Step:
        if len(message.content) % 3 == 0:
            return Step(end=EndReason.ANSWERED)
        return await super().on_text(message)


async def even_file(submission):
    """1 where the file that left the sandbox has an even number of bytes."""
    return Score(float(len(submission.artifacts.get("said.txt", b"x")) % 2 == 0), {}, "even or odd")


class SandboxParity(Parity):
    """The same, with what was said kept in a sandbox."""

    id = "sandbox-parity-v0"
    verifier = even_file
    needs_sandbox = True
    artifacts = ("said.txt",)

    async def on_text(self, message: Message) -> Step:
        await self.sandbox.put({"said.txt": message.content.encode(errors="replace")})
        listed = await self.sandbox.exec(["ls"])
        assert listed.stdout == b"said.txt\n"
        return await super().on_text(message)


async def told_and_even(submission):
    """0.7 where the task says yes, and 0.3 for a last answer with an even number of characters."""
    even = await even_length(submission)
    return Score(0.7 * submission.task.instruction.startswith("yes") + 0.3 * even.value)


class Told(Parity):
    """Most of the reward can be foretold from the prompt, and the rest can be learnt."""

    id = "told-v0"
    verifier = told_and_even

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        for index in range(40):
            word = "yes" if index % 2 else "no"
            yield Task(
                id=f"{split}-{seed % 97}-{index}", instruction=f"{word} {index}", hidden={"n": 1}
            )


async def even_turns(submission):
    """`even_length`, and 1 for every turn of even length as its process reward."""
    even = await even_length(submission)
    said = [
        len(message.content) % 2 for message in submission.messages if message.role == "assistant"
    ]
    return Score(even.value, turns={"turn": tuple(1.0 - odd for odd in said)})


class Paid(Parity):
    """The same, with a reward for every turn."""

    id = "paid-v0"
    verifier = even_turns


class Terse(Calculator):
    """calc-v0 whose turns are cut short: what knows nothing fails quickly."""

    limits = Limits(turns=8, tool_calls=8, turn_tokens=8, wall_s=30)


async def always(submission):
    return Score(1.0, {}, "always")


class Bank(ToolEnv):
    """Sends by making the file that it is told."""

    id = "bank"
    verifier = always
    limits = Limits(turns=2, tool_calls=4, turn_tokens=300, wall_s=30)

    def tasks(self, split, seed):
        yield Task(id="send", instruction="Send it.", hidden={"answer": "yes"})

    @tool(effect="irreversible")
    def send(self, to: str) -> str:
        """Send.

        Args:
            to: path.
        """
        Path(to).write_text("sent")
        return "sent"
