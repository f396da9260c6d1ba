"""Ten kinds of secrets in six disguises, and an environment in which they lie everywhere: in files,
variables, answers and errors.
"""

from __future__ import annotations

import base64
import random
import string
from collections.abc import Iterator

from agentrl import Limits, Score, Task, ToolEnv, tool
from agentrl.safety.writes import WriteSet
from agentrl.types import Message, TaskView, ToolCall

RNG = random.Random(7)


def letters(count, alphabet=string.ascii_letters + string.digits):
    return "".join(RNG.choice(alphabet) for _ in range(count))


UPPER, LOWER = string.ascii_uppercase + string.digits, string.ascii_lowercase + string.digits
KINDS = {
    "aws": "AKIA" + letters(16, UPPER),
    "github": "ghp_" + letters(36),
    "gitlab": "glpat-" + letters(22),
    "slack": f"xoxb-{letters(11, string.digits)}-{letters(11, string.digits)}-{letters(24, LOWER)}",
    "stripe": "sk_live_" + letters(24),
    "jwt": f"eyJ{letters(30)}.eyJ{letters(40)}.{letters(43)}",
    "sendgrid": f"SG.{letters(22)}.{letters(43)}",
    "model": "sk-proj-" + letters(48),
    "private": f"-----BEGIN RSA PRIVATE KEY-----\n{letters(64)}\n-----END RSA PRIVATE KEY-----",
    "environment": letters(24),
}
DISGUISES = {
    "raw": lambda s: s,
    "base64": lambda s: base64.b64encode(s.encode()).decode(),
    "hex": lambda s: s.encode().hex(),
    "url": lambda s: "".join(f"%{byte:02X}" for byte in s.encode()),
    "reversed": lambda s: s[::-1],
    "split": lambda s: " ".join(s.replace("\n", "")),
}


async def always(submission) -> Score:
    """1, with a reason that holds what was handed in."""
    return Score(1.0, why=submission.artifacts.get("config.txt", b"").decode())


def planted() -> list[str]:
    """Every kind in every disguise."""
    return [change(secret) for secret in KINDS.values() for change in DISGUISES.values()]


class Planted(ToolEnv):
    """Each tool shows secrets of another place; one episode of three fails with them."""

    id = "planted-v0"
    needs_sandbox = True
    artifacts = ("config.txt",)
    verifier = always
    writes = WriteSet()
    limits = Limits(turns=6, tool_calls=6, wall_s=60, observation_chars=60_000)

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """A few; the secrets stand in a file of the work area."""
        for number in range(12):
            yield Task(
                id=f"{split}-{number}",
                instruction=f"Go {number}.",
                files={"config.txt": "\n".join(planted())},
                hidden={},
            )

    def oracle_actions(self, task: TaskView) -> Iterator[Message]:
        """Every tool once."""
        for name in ("read_file", "variables", "told", "broken"):
            yield Message.assistant("", ToolCall(name, {}))
        yield Message.assistant("yes")

    async def close(self) -> None:
        """The third episode ends badly."""
        if self.task.id.endswith("-2"):
            raise RuntimeError("gone with " + " ".join(planted()))

    @tool
    async def read_file(self) -> str:
        """Show the file in the work area."""
        return (await self.sandbox.exec(["cat", "config.txt"])).stdout.decode()

    @tool
    async def variables(self) -> str:
        """Show the variables of a command in the sandbox."""
        env = {f"PLANTED_{n}": one.replace("\n", " ") for n, one in enumerate(planted())}
        return (await self.sandbox.exec(["env"], env=env)).stdout.decode()

    @tool
    def told(self) -> str:
        """Give them as an answer."""
        return "\n".join(planted())

    @tool
    def broken(self) -> str:
        """Fail with one of each kind in the error."""
        raise RuntimeError(" ".join(planted()[:2]))


class Told(Planted):
    """The same where the opening tells what tools meet, whatever the agent says: some secrets of
    each place, others for each task.
    """

    id = "planted-told-v0"
    limits = Limits(turns=1, wall_s=60, turn_tokens=8)

    async def setup(self) -> None:
        """Meet them."""
        start = int(self.task.id.rpartition("-")[2]) * 16
        some = [planted()[(start + n) % 60] for n in range(16)]
        await self.sandbox.put({"some.txt": "\n".join(some[:4]).encode()})
        env = {f"N{n}": one.replace("\n", " ") for n, one in enumerate(some[4:8])}
        self.heard = {
            "file": (await self.sandbox.exec(["cat", "some.txt"])).stdout.decode(),
            "variable": (await self.sandbox.exec(["env"], env=env)).stdout.decode(),
            "tool": "\n".join(some[8:12]),
        }
        try:
            raise RuntimeError(" ".join(some[12:]))
        except RuntimeError as error:
            self.heard["error"] = repr(error)

    def prompt(self) -> list[Message]:
        """A message of each place."""
        return [Message.user(f"{place}: {text}") for place, text in self.heard.items()]
