"""Checks for backends that are a boundary.

They attack, so each sandbox first has to show that it is one.
"""

from __future__ import annotations

import asyncio
import os
import tempfile

from agentrl.errors import SandboxLost
from agentrl.sandboxes.contract.room import Room, at_boundary, expect, python, sh


@at_boundary
async def no_network(room: Room) -> None:
    """No address outside answers, the host's loopback included, and names do not resolve."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server, room.sandbox() as box:
        port = server.sockets[0].getsockname()[1]
        code = (
            "import socket\nfor at in (('127.0.0.1', %d), ('1.1.1.1', 53), ('10.0.0.1', 22)):\n s ="
            " socket.socket(); s.settimeout(2)\n print(s.connect_ex(at) != 0)\ntry:"
            " socket.socket(40, socket.SOCK_STREAM); print('vsock')\nexcept OSError: print(True)"
        )
        done = await python(box, code % port)
        expect(done.stdout == b"True\n" * 4, done)


@at_boundary
async def host_files_are_out_of_sight(room: Room) -> None:
    """Files of the host outside its system, such as a home, cannot be reached.

    A home, `/run` and the like may exist, if they are not the host's; what is secret in them cannot
    be read.
    """
    with tempfile.NamedTemporaryFile() as secret:
        places = ("/", "/run", "/etc/passwd", os.path.expanduser("~"), __file__)
        ours = {place: os.stat(place) for place in places if os.path.exists(place)}
        async with room.sandbox() as box:
            code = (
                "import os\nfor path, was in %r.items():\n try: now = os.stat(path)\n except"
                " OSError: continue\n if (now.st_dev, now.st_ino) == was: print(path)\nfor path in"
                " %r:\n if os.path.exists(path): print(path)\nfor path in ('/etc/shadow', '/root',"
                " '/sys/class', '/sys/block', '/sys/devices', '/sys/kernel'):\n if os.access(path,"
                " os.R_OK) and (os.path.isfile(path) or os.listdir(path)): print(path)\n"
            )
            identities = {place: (info.st_dev, info.st_ino) for place, info in ours.items()}
            done = await python(box, code % (identities, [secret.name, os.path.abspath(__file__)]))
            expect((done.exit_code, done.stdout) == (0, b""), done)


@at_boundary
async def the_system_is_read_only(room: Room) -> None:
    """Nothing can be written outside of the work area and the temporary directories."""
    async with room.sandbox() as box:
        places = ("/", "/usr", "/usr/bin", "/etc", "/dev", "/proc", "/proc/sys/kernel", "/lib")
        code = (
            "import os\nfor at in %r:\n path = at + '/agentrl.contract'\n"
            " try: os.mkdir(path); os.rmdir(path); print(at)\n except OSError: pass\n"
            "for root in ('/proc/sys', '/proc/1', '/proc/sysrq-trigger'):\n"
            " for at, _, names in os.walk(root) if os.path.isdir(root) else [(root, [], [''])]:\n"
            "  for name in names:\n   path = os.path.join(at, name).rstrip('/')\n"
            "   if os.access(path, os.W_OK) and not path.startswith('/proc/1/'): print(path)\n"
        )
        done = await python(box, code % (places,))
        expect(done.exit_code == 0 and done.stdout == b"", done)


@at_boundary
async def processes_have_a_namespace_of_their_own(room: Room) -> None:
    """Processes of the host can be neither seen nor signalled."""
    async with room.sandbox() as box:
        seen = await sh(box, "readlink /proc/self/ns/pid")
        mine = os.readlink("/proc/self/ns/pid")
        expect(seen.exit_code == 0 and seen.stdout.decode().strip() not in ("", mine), seen)


@at_boundary
async def no_privilege_can_be_had(room: Room) -> None:
    """Commands have no capability and cannot get one; mounts and tracing are refused."""
    async with room.sandbox() as box:
        status = await sh(
            box, "grep -E '^(CapEff|CapPrm|CapAmb|CapBnd|NoNewPrivs)' /proc/self/status | sort -u"
        )
        facts = dict(line.split(":\t") for line in status.stdout.decode().splitlines())
        kept = {int(facts.get(name, "1"), 16) for name in ("CapEff", "CapPrm", "CapAmb")} == {0}
        expect(kept and facts.get("NoNewPrivs") == "1", facts)
        for command in (
            "unshare -Ur true",
            "unshare -m true",
            "mount -t tmpfs none /tmp",
            "/usr/sbin/chroot / true",
        ):
            done = await sh(box, command)
            expect(done.exit_code not in (0, 127), f"{command}: {done}")


@at_boundary
async def the_supervisor_is_out_of_reach(room: Room) -> None:
    """A command can neither signal, stop, trace, read nor limit the program that supervises it."""
    async with room.sandbox() as box:
        host = os.readlink("/proc/self/ns/pid")
        kills = "for s in KILL STOP TERM INT HUP SEGV CHLD USR1; do kill -$s 1; done; kill -9 -1"
        await sh(box, f'[ "$(readlink /proc/self/ns/pid)" = "{host}" ] || {{ {kills}; }}')
        code = (
            "import os, resource\nfor name in ('mem', 'environ', 'maps', 'fd/3', 'fd/4', 'fd/5',"
            " 'fd/6', 'cwd/x'):\n for mode in (os.O_RDONLY, os.O_RDWR):\n  try:"
            " os.close(os.open('/proc/1/' + name, mode)); print(name)\n  except OSError: pass\nfor"
            " act in (lambda: resource.prlimit(1, resource.RLIMIT_CPU, (1, 1)), lambda:"
            " os.setpriority(0, 1, 19),\n lambda: os.sched_setaffinity(1, [0]), lambda:"
            " os.setpriority(2, 0, 19)):\n try: act(); print('limited')\n except OSError: pass\n"
        )
        done = await python(box, code)
        expect(done.exit_code == 0 and done.stdout == b"", done)
        await box.reset()


@at_boundary
async def resources_are_bounded(room: Room) -> None:
    """Memory, disk and processes end at their limits, and a reset gives all of it back."""
    async with room.sandbox() as box:
        hog = await python(box, f"x = bytearray({room.limits.memory_mb} << 20)")
        expect(hog.exit_code != 0, "a command had more memory than its limit")
        for name in ("full", "/tmp/full", "/dev/shm/full"):
            full = await sh(box, f"head -c {2 * room.limits.disk_mb}M /dev/zero > {name}")
            expect(full.exit_code != 0, f"a command wrote more than the disk limit to {name}")
        await box.reset()
        bomb = "import os, time\nfor n in range(1000):\n try:\n  if not os.fork(): time.sleep(60)\n"
        done = await python(box, bomb + " except OSError: break\nprint(n)")
        count = int(done.stdout or b"1000")
        expect(
            1 < count <= room.limits.processes,
            f"{count} processes at a limit of {room.limits.processes}",
        )
        await box.reset()
        expect(
            (await sh(box, "head -c 1M /dev/zero > f; true")).exit_code == 0,
            "unusable after a fork bomb and reset",
        )


@at_boundary
async def nothing_crosses_a_reset(room: Room) -> None:
    """No kernel object carries data to the next episode: memory, queues, sockets, attributes."""
    async with room.sandbox() as box:
        code = (
            "import os, socket\nopen('/dev/shm/note', 'w').write('x'); open('/tmp/note',"
            " 'w').write('x')\nfor path in ('/tmp', '/dev/shm', '..', '.', '/dev/mqueue'):\n try:"
            " os.setxattr(path, 'user.note', b'x'); os.chmod(path, 0o700)\n except OSError:"
            " pass\ntry: os.close(os.open('/dev/mqueue/note', os.O_CREAT | os.O_RDWR))\nexcept"
            " OSError: pass\na, b = socket.socketpair(); c, d = socket.socketpair()\nf ="
            " open('big', 'wb'); f.write(b'x' * 4000000)\nos.unlink('big'); socket.send_fds(a,"
            " [b'x'], [f.fileno(), b.fileno()])\nif os.fork() == 0:\n os.setsid()\n import time\n"
            " time.sleep(60)\n"
        )
        await python(box, code)
        for key in ("ipcmk -Q", "ipcmk -M 4096", "ipcmk -S 1"):
            expect((await sh(box, key)).exit_code != 0, f"{key} works: it would outlive the reset")
        try:
            await box.reset()
        except SandboxLost:
            return  # what cannot be cleaned is thrown away: that is a kept promise
        look = (
            "import os\nfor path in ('/tmp', '/dev/shm', '..', '.', '/dev/mqueue'):\n"
            " print(os.listxattr(path), sorted(set(os.listdir(path)) - {'work', 'tmp'}))"
        )
        done = await python(box, look)
        expect(set(done.stdout.splitlines()) == {b"[] []"}, done)
