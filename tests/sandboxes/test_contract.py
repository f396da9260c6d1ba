"""Both backends keep the contract, and the contract notices one that does not."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from agentrl.sandboxes import BubblewrapBackend, ProcessBackend
from agentrl.sandboxes.contract import (
    BOUNDARY,
    COMMON,
    BrokenPromise,
    Room,
    check_backend,
    prove_apart,
)

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def memory_tmp(monkeypatch):
    # Removing 3,000 nested directories can take a disk ten seconds, memory a few milliseconds.
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")


def test_bubblewrap_keeps_the_contract(bubblewrap):
    assert asyncio.run(check_backend(BubblewrapBackend())) == []


def test_process_keeps_the_contract_but_for_the_boundary(memory_tmp):
    assert asyncio.run(check_backend(ProcessBackend())) == []


class Forgetful:
    """A backend whose reset and kill_all do nothing."""

    name = "forgetful"
    is_boundary = False

    def __init__(self):
        self._inner = ProcessBackend()

    async def open(self, role, limits):
        sandbox = await self._inner.open(role, limits)

        async def nothing(*_):
            return None

        sandbox.reset = nothing
        sandbox.kill_all = nothing
        return sandbox


def test_the_contract_notices_what_is_broken(memory_tmp):
    broken = {violation.check for violation in asyncio.run(check_backend(Forgetful()))}
    assert broken == {
        "reset_is_clean",
        "reset_takes_files_along",
        "kill_all_spares_files",
        "sessions_end_with_the_episode",
        "verify_tells_what_differs",
    }


class Stateless:
    """A session without state: each command is a shell of its own."""

    alive = True

    def __init__(self, sandbox):
        self._sandbox = sandbox

    async def run(self, command, *, timeout_s=30.0):
        return await self._sandbox.exec(["sh", "-c", command], timeout_s=timeout_s)

    async def close(self):
        return None


class Sloppy:
    """A backend that keeps no state, ignores cwd, follows links and verifies nothing."""

    name = "sloppy"
    is_boundary = False

    def __init__(self):
        self._inner = ProcessBackend()

    async def open(self, role, limits):
        sandbox = await self._inner.open(role, limits)
        run = sandbox.exec

        async def session(env=None):
            return Stateless(sandbox)

        async def restore(snapshot):
            await sandbox.put(
                {entry.path: entry.data for entry in snapshot.entries if entry.kind == "file"}
            )

        async def verify():
            return []

        async def list_all(path="."):
            return [
                info
                for info in await sandbox.manifest()
                if path == "." or info.path.startswith(path)
            ]

        sandbox.open_session, sandbox.restore, sandbox.verify, sandbox.list = (
            session,
            restore,
            verify,
            list_all,
        )
        sandbox.exec = lambda argv, cwd=".", **options: run(argv, **options)
        return sandbox


def test_the_contract_notices_what_is_sloppy(memory_tmp):
    broken = {violation.check for violation in asyncio.run(check_backend(Sloppy()))}
    assert broken == {
        "commands_start_where_asked",
        "list_shows_one_directory",
        "a_session_keeps_its_state",
        "a_session_tells_how_it_ends",
        "snapshots_come_back_equal",
        "restore_starts_from_nothing",
        "restore_follows_no_link",
        "verify_tells_what_differs",
    }


AS_USER = """
import asyncio, os
from agentrl.sandboxes import BubblewrapBackend, cgroup
from agentrl.sandboxes.contract import check_backend
from agentrl.sandboxes.launch import program
program()
os.environ["HOME"] = "/tmp"
os.setgroups([]); os.setresgid(23456, 23456, 23456); os.setresuid(23456, 23456, 23456)
print(asyncio.run(check_backend(BubblewrapBackend())), cgroup.home())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as an ordinary user already")
def test_bubblewrap_keeps_the_contract_for_an_ordinary_user(bubblewrap):
    done = subprocess.run(
        [sys.executable, "-c", AS_USER], cwd=REPO, capture_output=True, text=True, timeout=280
    )
    assert done.stdout == "[] None\n", done.stderr


def test_no_attack_is_tried_where_it_would_reach_this_machine(memory_tmp):
    async def main():
        async with Room(ProcessBackend()).sandbox() as box:
            with pytest.raises(BrokenPromise, match=r"not tried.*pid:"):
                await prove_apart(box)

        class Watched(ProcessBackend):
            commands = 0

            async def open(self, role, limits):
                sandbox = await super().open(role, limits)
                run = sandbox.exec

                async def counted(argv, **options):
                    Watched.commands += 1
                    assert "readlink" in argv[-1], "more than a look was tried"
                    return await run(argv, **options)

                sandbox.exec = counted
                return sandbox

        for check in BOUNDARY:
            with pytest.raises(BrokenPromise, match="not tried"):
                await check(Room(Watched()))
        assert Watched.commands == len(BOUNDARY)

    asyncio.run(main())


def test_every_check_says_its_promise():
    assert all(check.__doc__ for check in COMMON + BOUNDARY)
