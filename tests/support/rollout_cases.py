"""An environment with a sandbox, and scripts that answer."""

import asyncio
import os
import signal

from helpers import Echo, call, says

from agentrl.tools import tool
from agentrl.types import Limits

YES = says(content="yes")


SAY = says(call("say", text="a"))


class Work(Echo):
    """Runs commands in a sandbox."""

    id = "work-v0"
    limits = Limits(turns=6, tool_calls=6, bad_calls=3, wall_s=1000, tool_s=1000)
    needs_sandbox = True
    artifacts = ("out.txt",)

    @tool
    async def run(self, code: str) -> str:
        """Run Python."""
        result = await self.sandbox.exec(["/usr/bin/python3", "-c", code], timeout_s=2000)
        return result.stdout.decode() + result.stderr.decode()

    @tool
    async def die(self) -> str:
        """Kill the sandbox under the environment."""
        os.kill(self.sandbox.sandbox._wire.peer.pid, signal.SIGKILL)
        await asyncio.sleep(0.2)
        return "killed"
