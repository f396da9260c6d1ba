"""Checks for every backend: the docstring of each is the promise."""

from __future__ import annotations

import asyncio
import hashlib
import os

from agentrl.errors import SandboxLost
from agentrl.sandboxes.contract.room import (
    LATE,
    PYTHON,
    BrokenPromise,
    Room,
    appears,
    common,
    expect,
    goes_on,
    python,
    sh,
)


@common
async def commands_end_as_values(room: Room) -> None:
    """Exit code, signal and streams come back as they were; a missing program is a 127."""
    async with room.sandbox() as box:
        done = await sh(box, "echo out; echo err >&2; exit 3")
        expect(
            (done.exit_code, done.signal, done.stdout, done.stderr)
            == (3, None, b"out\n", b"err\n"),
            done,
        )
        killed = await sh(box, "kill -9 $$")
        expect((killed.exit_code, killed.signal, killed.timed_out) == (None, 9, False), killed)
        absent = await box.exec(["/no/such/program"])
        expect(absent.exit_code == 127, absent)


@common
async def stdin_is_exact(room: Room) -> None:
    """Standard input arrives byte for byte, even if longer than a pipe; it may go unread."""
    async with room.sandbox() as box:
        data = bytes(range(256)) * 4000
        code = "import sys, hashlib; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())"
        done = await box.exec([*PYTHON, code], stdin=data)
        expect(done.stdout.strip() == hashlib.sha256(data).hexdigest().encode(), done)
        ignored = await box.exec(["true"], stdin=data)
        expect(ignored.exit_code == 0, ignored)


@common
async def commands_get_a_clean_start(room: Room) -> None:
    """A command starts in the empty work area with its own variables and three open files."""
    canary = "AGENTRL_CONTRACT_CANARY"
    os.environ[canary] = "1"
    try:
        async with room.sandbox() as box:
            code = (
                "import os; print(len(os.listdir('.')), os.environ.get('MINE'),"
                " sorted(os.listdir('/proc/self/fd')))"
            )
            done = await box.exec([*PYTHON, code], env={"MINE": "yes"})
            # Descriptor 3 is that of the listing itself.
            expect(done.stdout.decode().startswith("0 yes ['0', '1', '2', '3']"), done)
            variables = await sh(box, "env")
            expect(canary.encode() not in variables.stdout, variables)
    finally:
        del os.environ[canary]


@common
async def output_is_capped(room: Room) -> None:
    """Output beyond the cap keeps its head and its tail, and what was cut is counted."""
    async with room.sandbox() as box:
        cap = room.limits.output_bytes
        done = await python(box, "import sys; sys.stdout.write('a' * 500000 + 'z' * 500000)")
        text = done.stdout
        whole = len(text) + done.dropped == 1_000_000 and len(text) <= cap
        expect(whole and text[:1] == b"a" and text[-1:] == b"z", done)


@common
async def a_timeout_ends_the_whole_tree(room: Room) -> None:
    """When the time is over, the command ends with all that it started, in other sessions too."""
    async with room.sandbox() as box:
        done = await sh(box, f"setsid sh -c '{LATE}' & ({LATE}) & sleep 30", timeout_s=0.3)
        expect(done.timed_out and done.wall_s < 8, done)
        expect(not await goes_on(box), "a grandchild went on after the timeout")


@common
async def background_holds_nobody_up(room: Room) -> None:
    """A command is over when its leader is, even if a child goes on and holds its pipes open."""
    async with room.sandbox() as box:
        done = await sh(box, f"({LATE}; sleep 30) & echo started")
        expect(done.exit_code == 0 and done.stdout == b"started\n", done)
        await box.put({"go": b""})
        expect(await appears(box, "late"), "the background child did not go on")


@common
async def a_cancelled_call_leaves_order(room: Room) -> None:
    """A cancelled command ends, and the next answer belongs to the next call."""
    async with room.sandbox() as box:
        task = asyncio.ensure_future(sh(box, f"{LATE}; sleep 30", timeout_s=40))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        done = await sh(box, "echo next")
        expect(done.stdout == b"next\n", done)
        expect(not await goes_on(box), "the cancelled command went on")


@common
async def put_follows_no_link(room: Room) -> None:
    """put makes directories and replaces what is in the way; it writes through no link."""
    async with room.sandbox() as box:
        await sh(
            box,
            "mkdir real; echo safe > real/kept; ln -s real link; ln -s real/kept soft; ln real/kept"
            " hard; mkdir d",
        )
        await box.put({"link/new": b"1", "soft": b"2", "hard": b"3", "d": b"4", "a/b/c": b"5"})
        done = await sh(box, "cat real/kept link/new soft hard d a/b/c; ls real")
        expect(done.stdout == b"safe\n12345kept\n", done)


@common
async def get_takes_plain_files_only(room: Room) -> None:
    """get returns regular files with one name, behind no link, and within the size limit."""
    async with room.sandbox() as box:
        await sh(
            box,
            "mkdir d; echo x > d/ok; ln -s d way; ln -s /etc/passwd soft; echo y > one; ln one"
            f" two; mkfifo pipe; head -c {room.limits.file_bytes + 1} /dev/zero > big; ln -s"
            " /proc/self hop",
        )
        names = [
            "d/ok",
            "way/ok",
            "soft",
            "one",
            "two",
            "pipe",
            "big",
            "d",
            "hop/environ",
            "missing",
            "d/ok/x",
        ]
        found = await box.get(names)
        expect(found == {"d/ok": b"x\n"}, found)


@common
async def paths_stay_inside(room: Room) -> None:
    """A path that leaves the work area is refused with ValueError before anything runs."""
    async with room.sandbox() as box:
        for path in ("../x", "/etc/passwd", "a/../../x", "", ".", "a//b"):
            for call in (box.put({path: b""}), box.get([path])):
                try:
                    await call
                except ValueError:
                    continue
                raise BrokenPromise(f"path {path!r} was taken")


@common
async def manifest_tells_all(room: Room) -> None:
    """manifest lists kind, mode, size and hash of every entry, sorted by path.

    It follows no link.
    """
    async with room.sandbox() as box:
        await sh(
            box,
            "umask 022; mkdir d; printf abc > d/f; chmod 640 d/f; ln -s /usr l; mkfifo p; mkdir -m"
            " 000 locked",
        )
        seen = [
            (info.path, info.kind, info.mode)
            for info in await box.manifest()
            if info.kind != "link"
        ]
        expect(
            seen
            == [
                ("d", "dir", 0o755),
                ("d/f", "file", 0o640),
                ("locked", "dir", 0),
                ("p", "other", 0o644),
            ],
            seen,
        )
        rows = {info.path: info for info in await box.manifest()}
        expect(rows["l"].kind == "link" and rows["d/f"].size == 3, rows)
        expect(rows["d/f"].sha256 == hashlib.sha256(b"abc").hexdigest(), rows["d/f"])


@common
async def kill_all_spares_files(room: Room) -> None:
    """kill_all ends daemons and stopped processes, and leaves the files."""
    async with room.sandbox() as box:
        await sh(box, f"touch kept; setsid sh -c '{LATE}' & sh -c 'kill -STOP $$' & true")
        await box.kill_all()
        expect(
            [info.path for info in await box.manifest()] == ["kept"], "kill_all changed the files"
        )
        expect(not await goes_on(box), "a daemon survived kill_all")


@common
async def reset_is_clean(room: Room) -> None:
    """reset leaves no process and no file, whatever their depth, mode, name or open descriptors."""
    async with room.sandbox() as box:
        await sh(
            box,
            "setsid sh -c 'exec 3>open; rm open; sleep 1.2; touch late' & mkdir -p locked/in; touch"
            " locked/in/f",
        )
        deep = "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')\nopen('f', 'w')"
        done = await python(box, deep + "\nos.mkdir(b'\\xff\\n'); os.mkdir('e', 0)")
        expect(done.exit_code == 0, done)
        await sh(box, "chmod 000 locked/in locked; chmod 555 .")
        await box.reset()
        expect(await box.manifest() == [], "files survived the reset")
        await asyncio.sleep(2)
        done = await sh(box, 'ls -a . "$TMPDIR" | grep -v "^[.]*$"; touch works')
        expect(
            [info.path for info in await box.manifest()] == ["works"],
            f"a process survived the reset: {done}",
        )


@common
async def reset_takes_files_along(room: Room) -> None:
    """reset(files) leaves these files and nothing else; a path outside is refused first."""
    async with room.sandbox() as box:
        await box.put({"old": b"1", "dir/kept": b"2"})
        for odd in ("../out", "/out", "a/../../out"):
            try:
                await box.reset({"fine": b"", odd: b"3"})
            except ValueError:
                continue
            raise BrokenPromise(f"reset took the path {odd!r}")
        expect(
            [info.path for info in await box.manifest()] == ["dir", "dir/kept", "old"],
            "a refused reset began",
        )
        await box.reset({"dir/new": b"4", "empty": b""})
        found = {info.path: info.size for info in await box.manifest() if info.kind == "file"}
        expect(found == {"dir/new": 1, "empty": 0}, f"reset with files left {found}")


@common
async def a_closed_sandbox_is_lost(room: Room) -> None:
    """close may come twice; afterwards every call raises SandboxLost."""
    async with room.sandbox() as box:
        await box.close()
        await box.close()
        try:
            await box.exec(["true"])
        except SandboxLost:
            return
        raise BrokenPromise("a closed sandbox ran a command")


@common
async def sandboxes_are_apart(room: Room) -> None:
    """Two sandboxes share no work area and no process."""
    async with room.sandbox() as one, room.sandbox() as two:
        await one.put({"f": b"1"})
        await sh(one, "setsid sh -c 'sleep 0.5; touch late' & true")
        expect(await two.manifest() == [], "a file of one sandbox is in the other")
        await two.kill_all()
        expect(await appears(one, "late"), "kill_all reached another sandbox")
