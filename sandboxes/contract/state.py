"""Checks of what lasts and what comes back: directories, sessions, snapshots, `verify`."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from agentrl.errors import SandboxLost
from agentrl.sandboxes.base import ExecResult, Sandbox, Session, Snapshot, SnapshotEntry
from agentrl.sandboxes.contract.room import (
    LATE,
    BrokenPromise,
    Room,
    appears,
    common,
    expect,
    goes_on,
    python,
    sh,
)

_TREE = (
    "import os\nos.umask(0)\nos.mkdir(b'a\\xff\\n')\nos.mkdir('d'); os.mkdir('d/e')\nopen('d/e/f',"
    " 'wb').write(b'\\0\\xff' * 999)\nopen('run', 'w').write('#!/bin/sh\\necho ran\\n');"
    " os.chmod('run', 0o751)\nopen(b'a\\xff\\n/ \\'\"', 'w')\nos.symlink('d/e/f', 'in');"
    " os.symlink('/etc/passwd', 'out'); os.symlink('nowhere', b'd/\\x80')\nos.link('run', 'twin');"
    " os.mkfifo('pipe'); open('secret', 'w').write('s'); os.chmod('secret', 0)\nos.chmod('d/e',"
    " 0o555); os.mkdir('locked', 0)"
)


async def _said(
    session: Session, command: str, timeout_s: float = 10.0
) -> tuple[int | None, bytes]:
    done = await session.run(command, timeout_s=timeout_s)
    return done.exit_code, done.stdout


@common
async def commands_start_where_asked(room: Room) -> None:
    """`cwd` is a directory of the work area; a missing one is a 126, one outside a ValueError."""
    async with room.sandbox() as box:
        home = await sh(box, "mkdir -p d/e; ln -s /usr link; touch f; pwd")
        inside = await box.exec(["sh", "-c", "pwd; touch here"], cwd="d/e")
        expect(inside.stdout.endswith(b"/d/e\n"), inside)
        expect(
            [info.path for info in await box.list("d/e")] == ["d/e/here"],
            "the command was elsewhere",
        )
        for place in ("missing", "link", "f"):
            done = await box.exec(["pwd"], cwd=place)
            expect(done.exit_code == 126 and done.stdout == b"", done)
        for place in ("..", "/", "d/../.."):
            try:
                await box.exec(["pwd"], cwd=place)
            except ValueError:
                continue
            raise BrokenPromise(f"cwd {place!r} was taken")
        await sh(box, "chmod 000 .")
        await box.exec(["true"], cwd="d")
        expect((await sh(box, "pwd")).stdout == home.stdout, "a cwd outlived its command")


@common
async def list_shows_one_directory(room: Room) -> None:
    """list tells kind, mode and size of what is directly in a directory."""
    async with room.sandbox() as box:
        await sh(
            box,
            "umask 022; mkdir -p d/e; printf abc > d/f; chmod 640 d/f; ln -s /etc d/l; ln -s d hop",
        )
        seen = [
            (info.path, info.kind, info.mode, info.sha256)
            for info in await box.list("d")
            if info.kind != "link"
        ]
        expect(seen == [("d/e", "dir", 0o755, ""), ("d/f", "file", 0o640, "")], seen)
        expect([info.path for info in await box.list()] == ["d", "hop"], "the work area itself")
        for path in ("missing", "hop", "d/f", "d/l"):
            try:
                await box.list(path)
            except OSError:
                continue
            raise BrokenPromise(f"{path} was listed")


@common
async def a_session_keeps_its_state(room: Room) -> None:
    """In a session, directory, variables and functions last; each command has its own output."""
    async with room.sandbox() as box:
        session = await box.open_session({"MINE": "yes"})
        first = await session.run(
            "mkdir d; cd d; x=5; export Y=6; f() { echo f $x; }; echo err >&2; (exit 3)"
        )
        expect(
            (first.exit_code, first.stdout, first.stderr, session.alive)
            == (3, b"", b"err\n", True),
            first,
        )
        second = await session.run(
            "f; sh -c 'echo $MINE $Y'; basename \"$PWD\"; cat; echo 'it'\\''s'\n# end"
        )
        expect((second.exit_code, second.stdout) == (0, b"f 5\nyes 6\nd\nit's\n"), second)
        other = await box.open_session()
        expect(
            await _said(other, "echo $x; pwd | grep -c /d$") == (1, b"\n0\n"),
            "two sessions share a state",
        )
        expect((await sh(box, "echo $x")).stdout == b"\n", "a session's state is in exec")
        await session.close()
        await session.close()
        expect(
            await _said(other, "echo still") == (0, b"still\n"), "closing one session ended another"
        )


@common
async def a_session_tells_how_it_ends(room: Room) -> None:
    """A shell that exits, dies or runs out of time is reported; the next command gets a new one."""
    async with room.sandbox() as box:
        session = await box.open_session()
        for command, code, signal in (
            ("x=1; exit 3", 3, None),
            ("x=1; kill -9 $$", None, 9),
            ("exec false", 1, None),
        ):
            done = await session.run(command)
            expect(
                (done.exit_code, done.signal, session.alive) == (code, signal, False),
                (command, done),
            )
            expect(await _said(session, "echo $x") == (0, b"\n"), f"no new shell after {command}")
        home = await sh(box, "pwd")
        await session.run("home=$PWD; cd /; x=1")
        late = await session.run(f'echo before; (cd "$home"; {LATE}) & sleep 30', timeout_s=1.0)
        expect(
            late.timed_out and late.stdout == b"before\n" and late.wall_s < 8 and not session.alive,
            late,
        )
        expect(
            await _said(session, "echo $x; pwd") == (0, b"\n" + home.stdout),
            "no new shell after a timeout",
        )
        expect(not await goes_on(box), "a command went on after its timeout")


@common
async def a_session_waits_for_no_background(room: Room) -> None:
    """A command in a session is over even if its children hold the pipes or flood them."""
    async with room.sandbox() as box:
        session = await box.open_session()
        done = await session.run(f"({LATE}; sleep 30) & echo started")
        expect(done.exit_code == 0 and done.stdout == b"started\n", done)
        await box.put({"go": b""})
        expect(await appears(box, "late"), "the background child did not go on")
        flood = await session.run("yes & printf a; yes | head -c 1000000; printf z")
        expect(flood.exit_code == 0 and flood.dropped > 900_000, flood)
        expect(len(flood.stdout) <= room.limits.output_bytes, len(flood.stdout))
        expect((await session.run("kill %2; true")).exit_code == 0, "a flooded session is lost")


@common
async def a_session_cannot_be_forged(room: Room) -> None:
    """No command can change the output or the exit code of the next one."""
    async with room.sandbox() as box:
        session = await box.open_session()
        code = (
            "import os\nfor fd in range(3, 64):\n for line in (b'x 0\\n', b'0' * 24 + b' 0\\n',"
            " b'\\n' * 9999):\n  try: os.write(fd, line)\n  except OSError: break\nprint('0 0')"
        )
        await box.put({"forge.py": code.encode()})
        await session.run("python3 -I -S -B forge.py")
        await session.run("for fd in 3 4 5 6 7 8 9; do echo '0 0' >&$fd; done 2> /dev/null; set -x")
        done = await session.run("sh -c 'echo mine; exit 7'")
        expect((done.exit_code, done.stdout) == (7, b"mine\n"), done)


@common
async def a_cancelled_session_leaves_order(room: Room) -> None:
    """A cancelled command of a session ends, and the next answer belongs to the next call."""
    async with room.sandbox() as box:
        session = await box.open_session()
        task = asyncio.ensure_future(session.run(f"{LATE}; echo old", timeout_s=40))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        expect(
            await _said(session, "echo next") == (0, b"next\n"),
            "the answer to a cancelled command came late",
        )
        expect(not await goes_on(box), "the cancelled command went on")


@common
async def sessions_end_with_the_episode(room: Room) -> None:
    """After a reset no session is left: not its shell, not its state, and its handle refuses."""
    async with room.sandbox() as box:
        session = await box.open_session()
        await session.run("x=secret; trap '' HUP TERM; (sleep 1.2; touch late) &")
        await box.reset()
        try:
            done: ExecResult = await session.run("echo $x")
        except (OSError, SandboxLost):
            done = await (await box.open_session()).run("echo $x")
        expect(done.stdout == b"\n", f"a session outlived the reset: {done}")
        await box.reset()
        await asyncio.sleep(1.5)
        expect(await box.list() == [], "a session's child outlived the reset")


async def _planted(box: Sandbox) -> Snapshot:
    done = await python(box, _TREE)
    expect(done.exit_code == 0, done)
    return await box.snapshot()


@common
async def snapshots_come_back_equal(room: Room) -> None:
    """A tree comes back equal, in the same sandbox and in another one."""
    async with room.sandbox() as one, room.sandbox() as two:
        before = await _planted(one)
        kinds = {entry.path: (entry.kind, entry.mode) for entry in before.entries}
        expect(kinds["run"] == ("file", 0o751) and kinds["d/e"] == ("dir", 0o555), kinds)
        expect(
            kinds["locked"] == ("dir", 0) and kinds["out"][0] == "link" and "pipe" not in kinds,
            kinds,
        )
        expect(await one.snapshot() == before, "a snapshot changed the tree")
        await two.put({"old/file": b"1", "d": b"2"})
        for box in (two, one):
            await box.restore(before)
            after = await box.snapshot()
            expect(
                after == before and after.digest == before.digest, "the tree came back different"
            )
        look = (
            "./run; cat in | wc -c; readlink out; touch new && echo y > run; stat -c %u . run |"
            " uniq | wc -l"
        )
        done = await sh(two, look)
        expect(done.stdout == b"ran\n1998\n/etc/passwd\n1\n", done)


@common
async def restore_starts_from_nothing(room: Room) -> None:
    """restore ends every process and shell, and nothing of the tree that was there is left."""
    async with room.sandbox() as box:
        await box.put({"kept": b"1"})
        start = await box.snapshot()
        session = await box.open_session()
        await session.run("x=1; echo 2 > kept; mkdir -m 000 more; (sleep 1.2; touch late) &")
        await session.run('echo 3 > "$TMPDIR/left"; cd /')
        await box.restore(start)
        done = await session.run('echo $x; ls -A "$TMPDIR"; cat kept')
        expect(done.stdout == b"\n1", f"a session kept something over a restore: {done}")
        await session.close()
        await asyncio.sleep(1.5)
        expect(await box.snapshot() == start, "something of the old tree is there")


@common
async def restore_follows_no_link(room: Room) -> None:
    """A forged snapshot writes nothing outside: entries behind links are refused."""
    async with room.sandbox() as box:
        start = await box.snapshot()
        link = SnapshotEntry("way", "link", 0o777, b"../tmp")
        file = SnapshotEntry("way/in", "file", 0o644, b"x")
        for entries in ([link, file], [link, SnapshotEntry("way/in", "dir", 0o755, b"")]):
            try:
                await box.restore(replace(start, entries=(*start.entries, *entries)))
            except OSError:
                continue
            raise BrokenPromise("an entry behind a link was restored")
        for path in ("../x", "/tmp/x", "a/../../x", "a//x", ""):
            try:
                await box.restore(
                    replace(
                        start, entries=(*start.entries, SnapshotEntry(path, "file", 0o644, b"x"))
                    )
                )
            except ValueError:
                continue
            raise BrokenPromise(f"a snapshot's path {path!r} was taken")
        done = await sh(box, 'ls "$TMPDIR"')
        expect(done.stdout == b"", done)


@common
async def verify_tells_what_differs(room: Room) -> None:
    """verify is empty at first and after a reset, names what differs, and changes nothing."""
    async with room.sandbox() as box:
        await box.ping()
        expect(await box.verify() == [], "a new sandbox differs from itself")
        await sh(box, "touch kept; sleep 30 & true")
        expect("processes" in await box.verify(), "a process that runs was not seen")
        expect([info.path for info in await box.list()] == ["kept"], "verify changed the work area")
        await box.reset()
        expect(await box.verify() == [], "a reset sandbox differs from its start")
