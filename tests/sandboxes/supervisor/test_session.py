"""Shells that stay: with a plain sh, with long commands, and only until their episode ends."""

from __future__ import annotations

import asyncio
import os
import shutil

import pytest

from agentrl.errors import SandboxLost
from agentrl.sandboxes import Pool, ProcessBackend, SandboxLimits
from agentrl.sandboxes.contract.room import LATE, appears, goes_on, sh


def inside(body):
    async def main():
        box = await ProcessBackend().open("agent", SandboxLimits())
        try:
            await body(box)
        finally:
            await box.close()

    asyncio.run(main())


@pytest.fixture
def only_sh(tmp_path):
    """A PATH where sh is the only shell."""
    for name in ("sh", "sleep", "cat", "touch", "true"):
        os.symlink(shutil.which(name), tmp_path / name)
    return {"PATH": str(tmp_path)}


def test_a_plain_sh_will_do(only_sh):
    async def body(box):
        session = await box.open_session(only_sh)
        first = await session.run(
            "x='a b'; f() { echo \"f $x\"; }; echo ${BASH_VERSION:-none}; (exit 4)"
        )
        assert (first.exit_code, first.stdout, session.alive) == (4, b"none\n", True)
        second = await session.run("f; exec 8> /dev/null; echo still")
        assert (second.exit_code, second.stdout) == (0, b"f a b\nstill\n")
        assert (await session.run("cat; echo end")).stdout == b"end\n"
        broken = await session.run("if then fi fi")  # ends a plain sh
        assert broken.exit_code == 2
        assert (await session.run("echo $x.")).stdout == (
            b"a b.\n" if broken and session.alive else b".\n"
        )
        late = await session.run("sleep 20", timeout_s=0.2)
        assert late.timed_out
        assert (await session.run("echo new")).stdout == b"new\n"

    inside(body)


@pytest.mark.parametrize(
    "command", ["if then", "(", "'", "echo \\", "cat <<E\nx", "}", "a=(", "#", "", "\n\n", ";"]
)
def test_a_broken_command_ends_with_itself(command):
    async def body(box):
        session = await box.open_session()
        await session.run("x=1")
        done = await session.run(command, timeout_s=10)
        assert not done.timed_out
        assert (await session.run("echo $x")).stdout == b"1\n"

    inside(body)


def test_commands_of_any_size_and_bytes():
    async def body(box):
        session = await box.open_session()
        text = "".join(chr(code) for code in range(1, 0x180) if chr(code) not in "'\r") * 600
        done = await session.run(f"x='{text}'; printf %s \"$x\" > copy", timeout_s=30)
        assert done.exit_code == 0, done
        assert (await box.get(["copy"]))["copy"].decode() == text
        assert (await session.run("echo \udcff | od -An -tx1")).stdout.split() == [b"ff", b"0a"]
        with pytest.raises(ValueError, match="NUL"):
            await session.run("a\0b")
        with pytest.raises(ValueError, match="timeout_s"):
            await session.run("true", timeout_s=0)

    inside(body)


def test_eight_sessions_and_no_more():
    async def body(box):
        sessions = [await box.open_session() for _ in range(8)]
        for number, session in enumerate(sessions):
            await session.run(f"x={number}")
        with pytest.raises(OSError, match="8 open sessions"):
            await box.open_session()
        assert [(await one.run("echo $x")).stdout for one in sessions] == [
            b"%d\n" % number for number in range(8)
        ]
        await sessions[0].close()
        assert (await (await box.open_session()).run("echo $x.")).stdout == b".\n"
        with pytest.raises(OSError, match="session is over"):
            await sessions[0].run("true")

    inside(body)


def test_sessions_leave_no_descriptor():
    async def body(box):
        for _ in range(40):
            session = await box.open_session()
            await session.run("true")
            await session.run("exit 1")
            await session.run("sleep 100 & true")
            await session.close()
        assert await box.verify() == []
        for _ in range(3):
            await (await box.open_session()).run("sleep 100 & true")
            await box.reset()
            assert await box.verify() == []

    inside(body)


def test_a_timeout_spares_what_was_not_started_by_the_session():
    async def body(box):
        await sh(box, "(until [ -e go ]; do sleep 0.05; done; touch spared) & true")
        session = await box.open_session()
        await session.run(f"({LATE}) & true")
        assert (await session.run("sleep 30", timeout_s=0.1)).timed_out
        assert not await goes_on(box)
        assert await appears(box, "spared")

    inside(body)


def test_a_session_ends_with_its_lease():
    async def main():
        pool = Pool(ProcessBackend(), size=1)
        try:
            async with pool.lease("agent") as box:
                session = await box.open_session()
                await session.run("x=secret")
                assert session.alive
            async with pool.lease("agent") as box:
                with pytest.raises(SandboxLost, match="has ended"):
                    await session.run("echo $x")
                with pytest.raises(SandboxLost, match="has ended"):
                    await session.close()
                assert (await (await box.open_session()).run("echo $x")).stdout == b"\n"
            assert pool.counts.replaced == 0
        finally:
            await pool.close()

    asyncio.run(main())


def test_a_lost_sandbox_has_no_session():
    async def body(box):
        session = await box.open_session()
        await session.run("true")
        await box.close()
        assert not session.alive
        with pytest.raises(SandboxLost):
            await session.run("true")

    inside(body)
