"""A sandbox, a backend and a peer without any process behind them."""

from __future__ import annotations

import asyncio
import socket

from agentrl.errors import SandboxLost
from agentrl.sandboxes.base import NO_FILES


class FakeSandbox:
    """Counts its resets; `lost` and `reset_s` are for tests to set."""

    def __init__(self, role):
        self.role = role
        self.resets = 0
        self.closed = False
        self.lost = False
        self.reset_s = 0.0

    async def ping(self):
        if self.lost or self.closed:
            raise SandboxLost("gone")

    async def reset(self, files=NO_FILES):
        await asyncio.sleep(self.reset_s)
        await self.ping()
        self.resets += 1

    async def exec(self, argv, **options):
        await asyncio.sleep(options["timeout_s"])

    async def close(self):
        self.closed = True


class FakeBackend:
    """Opens fake sandboxes after `open_s`, and counts those that start at the same time."""

    name = "fake"
    is_boundary = False

    def __init__(self, open_s=0.0):
        self.opened = []
        self.starting = self.most_starting = 0
        self.open_s = open_s
        self.failing = False

    async def open(self, role, limits):
        self.starting += 1
        self.most_starting = max(self.most_starting, self.starting)
        await asyncio.sleep(self.open_s)
        self.starting -= 1
        if self.failing:
            raise SandboxLost("bubblewrap is not installed")
        self.opened.append(FakeSandbox(role))
        self.opened[-1].needs = limits.needs
        return self.opened[-1]


class FakePeer:
    """A peer whose other end the test holds."""

    def __init__(self):
        self.sock, self.other = socket.socketpair()
        self.sock.setblocking(False)
        self.hung_up = 0

    def words(self):
        return "last words"

    async def cause(self):
        return ""

    def unwrap(self, data):
        return data

    def hang_up(self):
        self.hung_up += 1
        self.sock.close()

    async def gone(self):
        self.other.close()
