"""Docker: the contract, rights, lost containers, and missing parts."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from helpers import wait_for

from agentrl.errors import SandboxLost
from agentrl.sandboxes import DockerBackend, Pool, SandboxLimits
from agentrl.sandboxes.contract import check_backend
from agentrl.sandboxes.contract.room import python, sh
from agentrl.sandboxes.docker.backend import first_daemon
from agentrl.sandboxes.docker.owner import LABEL, UIDS, Owner
from agentrl.sandboxes.uids import Uid

LIMITS = SandboxLimits(
    memory_mb=256, disk_mb=16, processes=24, open_files=64, output_bytes=4000, file_bytes=10_000
)
SOCKET = "/var/run/docker.sock"


def inside(body, limits=LIMITS, **options):
    async def main():
        box = await DockerBackend(**options).open("agent", limits)
        try:
            await body(box)
        finally:
            await box.close()

    asyncio.run(main())


def container_of(box):
    return box._wire.peer.id


def containers(*labels):
    """Ids of all containers with these labels, running or not."""
    return {
        row["Id"]
        for row in first_daemon().api().containers(all=True, filters={"label": [LABEL, *labels]})
    }


def test_docker_keeps_the_contract(docker):
    mine = f"agentrl.pid={Owner.me().pid}"
    assert asyncio.run(check_backend(DockerBackend())) == []
    assert not containers(mine)


# ---- whose rights, whose uid ----


def test_every_sandbox_has_a_uid_of_its_own_and_all_work_is_done_under_it(docker):
    async def main():
        backend = DockerBackend()
        one, two = await asyncio.gather(*(backend.open("agent", LIMITS) for _ in range(2)))
        try:
            seen = []
            for box in (one, two):
                await box.put({"d/put": b"1"})
                done = await sh(
                    box,
                    "id -u; id -g; id -G; stat -c '%u %g' d d/put . $TMPDIR | sort -u; touch made",
                )
                uid, *rest = done.stdout.decode().split("\n")[:-1]
                assert rest == [uid, uid, f"{uid} {uid}"], done
                assert 20_000 <= int(uid) < 60_000
                seen.append(uid)
            assert seen[0] != seen[1]
        finally:
            await asyncio.gather(one.close(), two.close())

    asyncio.run(main())


def test_the_supervisor_cannot_be_used_to_reach_what_the_agent_cannot(docker):
    async def body(box):
        # No right over files is left to the supervisor: neither its own verbs nor a name that
        # changes under it help.
        await sh(
            box,
            "mkdir shut; echo secret > shut/f; ln -s /etc out; ln -s /root home; chmod 000 shut",
        )
        assert await box.get(["shut/f", "out/shadow", "home/.profile"]) == {}
        with pytest.raises(OSError, match=r"ermission|not permitted"):
            await sh(box, "chmod 500 .")
            await box.put({"new": b"x"})
        held = await sh(box, "grep CapBnd /proc/1/status")
        assert held.stdout == b"CapBnd:\t00000000000000e1\n"  # chown, kill, setgid, setuid
        await box.reset()
        await box.put({"new": b"x"})

    inside(body)


def test_uids_are_shared_out_over_all_processes_of_a_machine():
    first, second = Uid(UIDS), Uid(UIDS)
    code = f"""
import socket
taken = []
for number in ({first.number}, {second.number}):
    try: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).bind(f"\\0agentrl-uid-{{number}}")
    except OSError: taken.append(number)
print(taken)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([first.number, second.number])
    first.release()
    third = Uid(UIDS)
    assert third.number == first.number
    second.release()
    third.release()


def test_limits_hold_where_python_has_no_resource_module(docker):
    api = first_daemon().api()
    text = (
        "FROM agentrl-agent\nRUN find /usr/lib/python3* -name 'resource.*' -o -name '_ctypes.*' |"
        " xargs rm && mv"
    )
    text += (
        " /usr/lib/python3.11/json /usr/lib/python3.11/tarfile.py /usr/lib/python3.11/shutil.py"
        " /mnt/\n"
    )
    build(api, "agentrl-test-minimal", text)

    async def body(box):
        assert (await python(box, "import resource")).exit_code == 1
        done = await sh(
            box, "ulimit -n; ulimit -c; ulimit -d; ulimit -f; cat /proc/1/oom_score_adj; touch f"
        )
        assert done.stdout.split()[:4] == [
            b"64",
            b"0",
            str(256 << 10).encode(),
            str(16 << 11).encode(),
        ]
        await box.reset()
        assert await box.manifest() == []

    try:
        inside(body, image="agentrl-test-minimal")
        with pytest.raises(SandboxLost, match=r"limited.*memory_mb=256"):
            inside(body, SandboxLimits(memory_mb=64), image="agentrl-test-minimal")
    finally:
        remove_images(api, "agentrl-test-minimal")


def build(api, tag, dockerfile):
    from io import BytesIO

    lines = list(
        api.build(
            fileobj=BytesIO(dockerfile.encode()), tag=tag, rm=True, network_mode="none", decode=True
        )
    )
    assert not any("error" in line for line in lines), lines


def remove_images(api, *tags):
    """With the layers that were put on them, and what a failed build left."""
    for tag in tags:
        base = api.inspect_image(tag)["Id"]
        for row in api.images(filters={"label": "agentrl.layer"}):
            if base in {step["Id"] for step in api.history(row["Id"])}:
                api.remove_image(row["Id"], force=True)
        api.remove_image(tag, force=True)
    api.prune_images({"dangling": True, "label": "agentrl.layer"})


# ---- a container or a daemon that goes away ----


def lose(box, act, match):
    async def main():
        call = asyncio.ensure_future(box.exec(["sleep", "1000"], timeout_s=2000))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(act)
        with pytest.raises(SandboxLost, match=match):  # at once, or never in the time of a test
            await call

    return main()


def test_a_killed_container_is_a_lost_sandbox_and_the_pool_goes_on(docker):
    async def main():
        api = first_daemon().api()
        pool = Pool(DockerBackend(), size=1, limits=LIMITS)
        try:
            async with pool.lease("agent") as box:
                killed = container_of(box.sandbox)
                await lose(box, lambda: api.kill(killed), "killed from outside")
            async with pool.lease("agent") as box:
                assert (await sh(box, "echo new")).stdout == b"new\n"
            assert pool.counts.replaced == 1
        finally:
            await pool.close()
        assert killed not in containers()

    asyncio.run(main())


def test_a_supervisor_without_memory_is_told_as_such(docker):
    async def body(box):
        api = first_daemon().api()
        api.update_container(container_of(box), mem_limit="20m", memswap_limit="20m")
        with pytest.raises(SandboxLost, match=r"memory of its container ran out: raise memory_mb"):
            for number in range(20):
                await box.put({str(number): bytes(3 << 20)})

    inside(body, SandboxLimits(memory_mb=256, disk_mb=64))


def test_commands_go_before_the_supervisor_when_memory_runs_out(docker):
    async def body(box):
        code = (
            "import os, time\nfor n in range(40):\n if not os.fork():\n  x = b'x' * (6 << 20);"
            " time.sleep(60)\n"
        )
        for _ in range(3):
            # Waits for the first child that the kernel ends; none ends by itself.
            done = await python(box, code + "os.wait()")
            assert done.oom
            await box.reset()

    inside(body, SandboxLimits(memory_mb=64, disk_mb=16, processes=60))


@contextmanager
def proxy(path):
    """A daemon that can go away: passes everything on to the real one, until `gone` is called."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(64)
    open_ones, lock = [listener], threading.Lock()

    def gone():
        with lock:
            path.unlink(missing_ok=True)
            for sock in open_ones:
                try:  # noqa: SIM105
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def pump(source, target):
        try:
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def accept():
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            daemon = socket.socket(socket.AF_UNIX)
            daemon.connect(SOCKET)
            with lock:
                open_ones.extend((client, daemon))
            for pair in ((client, daemon), (daemon, client)):
                threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield gone
    finally:
        gone()
        for sock in open_ones:
            sock.close()


def test_a_daemon_that_goes_away_loses_its_sandboxes_and_others_go_on(docker, tmp_path):
    async def main():
        with proxy(tmp_path / "a") as gone, proxy(tmp_path / "b"):
            backend = DockerBackend(url=f"unix://{tmp_path}/a, unix://{tmp_path}/b")
            boxes = [await backend.open("agent", LIMITS) for _ in range(4)]
            assert [daemon.live for daemon in backend._daemons] == [2, 2]  # shared out
            await lose(boxes[0], gone, "does not answer")
            for box in boxes[:1] + boxes[2:3]:
                await box.close()
            fresh = await backend.open("agent", LIMITS)
            assert (await sh(fresh, "echo on")).stdout == b"on\n"
            for box in (boxes[1], boxes[3], fresh):
                await box.close()
        with pytest.raises(SandboxLost, match="no Docker daemon answers at"):
            await backend.open("agent", LIMITS)

    asyncio.run(main())
    # A container whose daemon went away ends by itself, in its own time.
    wait_for(lambda: not containers(f"agentrl.pid={Owner.me().pid}"))


# ---- what is missing or wrong ----


def test_images_that_cannot_be_used_are_told_with_their_fix(docker):
    api = first_daemon().api()
    build(api, "agentrl-test-volume", "FROM agentrl-agent\nVOLUME /data\n")
    build(api, "agentrl-test-nopython", "FROM agentrl-agent\nRUN rm -f /usr/bin/python3*\n")
    cases = {
        "agentrl-test-none": "docker pull agentrl-test-none",
        "agentrl-test-volume": "without VOLUME",
        "agentrl-test-nopython": "no working python3",
    }
    try:
        for image, match in cases.items():
            with pytest.raises(SandboxLost, match=match):
                inside(None, image=image)
        with pytest.raises(SandboxLost, match="no such runtime"):
            inside(None, runtime="agentrl-none")
    finally:
        remove_images(api, *list(cases)[1:])
    assert not containers(f"agentrl.pid={Owner.me().pid}")


def test_no_signal_from_inside_reaches_the_deadline_of_a_container(docker):
    async def body(box):
        await sh(box, "(while :; do kill -ALRM 1; done) 2>/dev/null & true")
        for _ in range(50):
            assert (await box.exec(["true"])).exit_code == 0

    inside(body, lifetime_s=600)


def test_a_container_ends_at_its_deadline(docker):
    async def body(box):
        # Itself, or on a slow machine whoever clears up after dead runs comes first.
        with pytest.raises(SandboxLost, match=r"exit code 1|killed from outside"):
            await box.exec(["sleep", "60"], timeout_s=100)

    inside(body, lifetime_s=12)  # which begins before the container does
