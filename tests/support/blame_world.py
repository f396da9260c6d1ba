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
    """A sandbox in which one call raises, whoever uses it, from the time that something of an
    attacker has come into it: code that is run, or a file.

    `fault_of` says which call and error a text brings about; None for a harmless text.
    """

    def __init__(self, sandbox, fault_of):
        self._sandbox, self._fault_of = sandbox, fault_of
        self._fault = None

    def __getattr__(self, name):
        inner = getattr(self._sandbox, name)
        return self._fail if self._fault and name == self._fault[0] else inner

    async def exec(self, argv, **options):
        self._meet(argv[-1])
        if self._fault and self._fault[0] == "exec":
            raise self._fault[1]
        return await self._sandbox.exec(argv, **options)

    async def put(self, files):
        for data in files.values():
            self._meet(data.decode(errors="replace"))
        if self._fault and self._fault[0] == "put":
            raise self._fault[1]
        return await self._sandbox.put(files)

    async def reset(self, *args, **options):
        """A sandbox that is reset has nothing of the attacker any more."""
        await self._sandbox.reset(*args, **options)
        self._fault = None

    def _meet(self, text):
        self._fault = self._fault or self._fault_of(text)

    async def _fail(self, *args, **options):
        raise self._fault[1]


class Injecting:
    """A real backend in whose sandboxes what an attacker did makes one call fail."""

    name, is_boundary = "injecting", True

    def __init__(self, fault_of, backend="bubblewrap"):
        self._inner = open_pool(backend, size=1).backend
        self._fault_of = fault_of

    async def open(self, role, limits):
        return Broken(await self._inner.open(role, limits), self._fault_of)


def always(method, error):
    """The same fault for every text that has the word attack in it."""
    return lambda text: (method, error) if "attack" in text else None
