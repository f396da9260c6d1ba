"""Both backends keep the contract, and the contract notices one that does not."""

from __future__ import annotations

import asyncio
import tempfile

import pytest

from agentrl.sandboxes import BubblewrapBackend, ProcessBackend
from agentrl.sandboxes.contract import BOUNDARY, COMMON, Broken, Room, check_backend, prove_apart


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

        async def nothing():
            return None

        sandbox.reset = nothing
        sandbox.kill_all = nothing
        return sandbox


def test_the_contract_notices_what_is_broken(memory_tmp):
    broken = {violation.check for violation in asyncio.run(check_backend(Forgetful()))}
    assert broken == {"reset_is_clean", "kill_all_spares_files"}


def test_no_attack_is_tried_where_it_would_reach_this_machine(memory_tmp):
    async def main():
        async with Room(ProcessBackend()).sandbox() as box:
            with pytest.raises(Broken, match=r"not tried.*pid:"):
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
            with pytest.raises(Broken, match="not tried"):
                await check(Room(Watched()))
        assert Watched.commands == len(BOUNDARY)

    asyncio.run(main())


def test_every_check_says_its_promise():
    assert all(check.__doc__ for check in COMMON + BOUNDARY)
