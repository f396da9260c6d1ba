"""An environment with a sandbox, and a backend that fails where an attacker was at work."""

from __future__ import annotations

from helpers import call, says

from agentrl.env import ToolEnv
from agentrl.sandboxes import open_pool
from agentrl.tools import tool
from agentrl.types import Limits, Score
from agentrl.verifiers.base import Submission

YES = says(content="yes")


class Files(ToolEnv):
    """Runs Python in a sandbox; the answer is a file."""

    id = "files-v0"
    limits = Limits(turns=4, tool_calls=4, wall_s=120, tool_s=60)
    needs_sandbox = True
    artifacts = ("out.txt",)

    async def verifier(submission: Submission) -> Score:
        return Score(float(submission.artifacts.get("out.txt") == b"right"))

    @tool
    async def run(self, code: str) -> str:
        """Run Python."""
        result = await self.sandbox.exec(["/usr/bin/python3", "-c", code])
        return (result.stdout + result.stderr).decode(errors="replace")

    def oracle_actions(self, task):
        yield says(call("run", code="open('out.txt', 'w').write('right')"))
        yield YES


LEASE = """
import fcntl, os, socket, struct
open("out.txt", "w").write("wrong")
held = os.open("out.txt", os.O_RDONLY)
fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
one, other = socket.socketpair()
socket.send_fds(one, [b"x"], [held, one.fileno(), other.fileno()])
os.close(held)
print("leased")
"""


class Broken:
    """A sandbox whose named call raises, whoever uses it, from the time that code has run in it."""

    def __init__(self, sandbox, method, error):
        self._sandbox, self._method, self._error = sandbox, method, error
        self._ran = False

    def __getattr__(self, name):
        inner = getattr(self._sandbox, name)
        if name == "exec":
            return self._exec
        return self._fail if name == self._method and self._ran else inner

    async def _exec(self, argv, **options):
        self._ran = "attack" in argv[-1]
        if self._ran and self._method == "exec":
            raise self._error
        return await self._sandbox.exec(argv, **options)

    async def _fail(self, *args, **options):
        raise self._error


class Injecting:
    """A real backend in whose sandboxes what an attacker did makes one call fail."""

    name, is_boundary = "injecting", True

    def __init__(self, method, error):
        self._inner = open_pool("bubblewrap", size=1).backend
        self._fault = (method, error)

    async def open(self, role, limits):
        return Broken(await self._inner.open(role, limits), *self._fault)
