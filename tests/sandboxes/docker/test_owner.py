"""Docker: a container belongs to a process, and is removed after its end."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
from helpers import below, parents, process, wait_for

from agentrl.sandboxes.docker.backend import first_daemon
from agentrl.sandboxes.docker.owner import LABEL, Owner


def owned_by(*pids):
    """Ids of all containers that processes with these numbers made."""
    rows = first_daemon().api().containers(all=True, filters={"label": LABEL})
    return {
        row["Id"] for row in rows if int(row["Labels"]["agentrl.pid"].partition("/")[0]) in pids
    }


HOST = """
import asyncio
from agentrl.sandboxes import open_pool, SandboxLimits
async def main():
    pool = open_pool("docker", size=3, limits=SandboxLimits(memory_mb=128, disk_mb=8))
    async def episode():
        async with pool.lease("agent") as box:
            await box.exec(["sh", "-c", "setsid sleep 1000.75 & sleep 1000.75 & true"])
            print("busy", flush=True)
            await box.exec(["sleep", "1000.75"], timeout_s=100)
    await asyncio.gather(*(episode() for _ in range(3)))
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_its_host(docker, number):
    api = first_daemon().api()
    with process(sys.executable, "-c", HOST, text=True, stderr=subprocess.DEVNULL) as host:
        assert [host.stdout.readline() for _ in range(3)] == ["busy\n"] * 3
        owned = owned_by(host.pid)
        assert len(owned) == 3
        inside_them = below(api.inspect_container(each)["State"]["Pid"] for each in owned)
        assert len(inside_them) >= 3 * 3
        host.send_signal(number)
        host.wait()
    wait_for(lambda: not owned_by(host.pid))
    wait_for(lambda: not inside_them & parents().keys())


STARTING = """
import asyncio
from agentrl.sandboxes import DockerBackend, SandboxLimits
async def main():
    backend, limits = DockerBackend(), SandboxLimits(memory_mb=128, disk_mb=8)
    print("go", flush=True)
    while True:
        boxes = await asyncio.gather(*(backend.open("agent", limits) for _ in range(8)))
        await asyncio.gather(*(box.close() for box in boxes))
asyncio.run(main())
"""


def test_what_a_killed_host_was_making_is_removed(docker):
    hosts = []
    for after_s in (0.1, 0.2, 0.3):
        with process(sys.executable, "-c", STARTING, text=True) as host:
            assert host.stdout.readline() == "go\n"
            time.sleep(after_s)
        hosts.append(host.pid)
    wait_for(lambda: not owned_by(*hosts))


def test_who_is_gone_is_known_from_labels():
    me = Owner.me()
    labels, now = me.labels(lifetime_s=60), time.time()
    assert not me.abandoned(labels, now)
    assert not me.abandoned({}, now + 1e9)  # not one of ours
    assert me.abandoned(labels, now + 61)
    number, _, start = me.pid.partition("/")
    assert me.abandoned(
        labels | {"agentrl.pid": f"{number}/{int(start) + 1}"}, now
    )  # the number was used again
    dead = labels | {"agentrl.pid": "4194999/1"}
    assert me.abandoned(dead, now)
    assert not me.abandoned(dead | {"agentrl.host": "another"}, now)  # nobody here can tell
    assert me.abandoned(dead | {"agentrl.host": "another"}, now + 61)


def test_what_a_dead_host_left_is_removed_at_the_next_start_and_nothing_else(docker):
    api, me = first_daemon().api(), Owner.me()
    dead = me.labels(600) | {"agentrl.pid": "4194999/1"}
    kinds = {"dead": dead, "ours": me.labels(600), "late": me.labels(-5), "foreign": {"other": "1"}}
    made = {
        kind: api.create_container_from_config(
            {"Image": "agentrl-agent", "Cmd": ["true"], "Labels": labels}
        )["Id"]
        for kind, labels in kinds.items()
    }
    try:
        first_daemon().api()
        left = {row["Id"] for row in api.containers(all=True)}
        assert {kind for kind, number in made.items() if number in left} == {"ours", "foreign"}
    finally:
        for number in set(made.values()) & {row["Id"] for row in api.containers(all=True)}:
            api.remove_container(number, force=True)
