"""The proxy and the network of a sandbox: their rights, their end, and what is left behind."""

from __future__ import annotations

import asyncio
import sys

import pytest
from helpers import process, wait_for
from network_world import LIMITS, left_behind, opened, run, seen

from agentrl.errors import SandboxLost
from agentrl.sandboxes import Allow, DockerBackend, Pool, requests_of
from agentrl.sandboxes.contract.room import sh
from agentrl.sandboxes.docker.backend import first_daemon
from agentrl.sandboxes.docker.owner import LABEL, Owner

pytestmark = pytest.mark.usefixtures("docker")


def test_without_its_proxy_there_is_no_network_and_the_sandbox_is_lost(world):
    async def main():
        api = first_daemon().api()
        async with opened(world) as box:
            # Else the sandbox is closed at once, and nothing is left to look at.
            box._line._on_lost = lambda why: None
            api.kill(box._line._link.proxy.id)
            code = "import time\ntime.sleep(0.5)\n"
            code += f"print(direct(*PROXY), direct('{world.address}', 80))"
            (line,) = await run(box, code)
            assert line == "failed failed"
            with pytest.raises(SandboxLost, match="proxy of this sandbox is gone"):
                await requests_of(box)
        async with opened(world) as box:
            api.kill(box._line._link.proxy.id)
            with pytest.raises(SandboxLost, match="proxy of this sandbox is gone"):
                await box.exec(["sleep", "1000"], timeout_s=2000)

    asyncio.run(main())


def test_the_proxy_has_no_rights_and_the_network_no_way_out(world):
    async def main():
        api = first_daemon().api()
        async with opened(world) as box:
            link = box._line._link
            proxy, net = (
                api.inspect_container(link.proxy.id),
                api.inspect_network(link.network.name),
            )
            host = proxy["HostConfig"]
            assert proxy["Config"]["User"] == "65534:65534"
            assert (
                host["ReadonlyRootfs"]
                and not host["CapAdd"]
                and host["CapDrop"] == ["ALL"]
                and not host.get("Tmpfs")
            )
            assert host["Memory"] < 100 << 20 and host["PidsLimit"] < 100
            assert net["Internal"] and set(net["Labels"]) >= {
                LABEL,
                "agentrl.pid",
                "agentrl.deadline",
            }
            assert len(net["Containers"]) == 2
            agent = api.inspect_container(box._wire.peer.id)
            assert list(agent["NetworkSettings"]["Networks"]) == [link.network.name]
            assert (await sh(box, "cat /proc/net/route | wc -l")).exit_code == 0

    asyncio.run(main())


def test_in_a_pool_graders_have_no_network_and_a_loan_sees_its_own_requests_only(world):
    async def main():
        before = set(left_behind(f"agentrl.pid={Owner.me().pid}"))
        allow = Allow(private=("allowed.test",), outside=world.network)
        pool = Pool(DockerBackend(network=allow), size=1, limits=LIMITS)
        try:
            for _ in range(2):
                async with pool.lease("agent") as box:
                    await run(box, "print(fetch('http://allowed.test/'))")
                    assert seen(await requests_of(box)) == [("GET", "allowed.test", 80, True)]
            with pytest.raises(SandboxLost, match="has ended"):
                await requests_of(box)
            assert pool.counts.reused == 1 and pool.counts.replaced == 0
            async with pool.lease("grader") as box:
                assert await requests_of(box) == ()
                assert (
                    await sh(
                        box, "env | grep -ci proxy; ls /sys/class/net | wc -l; cat /proc/net/dev"
                    )
                ).stdout
                assert b"eth0" not in (await sh(box, "cat /proc/net/dev")).stdout
        finally:
            await pool.close()
        assert set(left_behind(f"agentrl.pid={Owner.me().pid}")) == before

    asyncio.run(main())


HOST = """
import asyncio, sys
from agentrl.sandboxes import Allow, DockerBackend, SandboxLimits
async def main():
    backend = DockerBackend(network=Allow("example.org", outside=sys.argv[1]))
    box = await backend.open("agent", SandboxLimits())
    print(backend._owner.run, flush=True)
    await box.exec(["sleep", "1000.75"], timeout_s=1000)
asyncio.run(main())
"""


def test_a_killed_host_leaves_no_container_and_no_network(world):
    with process(sys.executable, "-c", HOST, world.network, text=True) as host:
        run = host.stdout.readline().strip()
        assert len(left_behind(f"agentrl.run={run}")) == 3
    wait_for(lambda: left_behind(f"agentrl.run={run}") == [])


def test_the_next_start_removes_networks_that_nobody_has_any_more():
    api, mine = first_daemon().api(), Owner.me().labels(3600)
    over = mine | {"agentrl.deadline": "1"}
    dead = mine | {"agentrl.pid": "1/1"}
    kinds = {"over": over, "dead": dead, "mine": mine, "strange": {"agentrl.deadline": "1"}}
    ids = {
        kind: api.create_network(f"agentrl-{kind}-{mine['agentrl.run']}", labels=kinds[kind])["Id"]
        for kind in kinds
    }
    try:
        first_daemon().api()
        left = {row["Id"] for row in api.networks()}
        assert [kind for kind in kinds if ids[kind] in left] == ["mine", "strange"]
    finally:
        for row in api.networks(ids=list(ids.values())):
            api.remove_network(row["Id"])


def test_what_could_not_be_started_leaves_nothing(world):
    async def main():
        before = set(left_behind(f"agentrl.pid={Owner.me().pid}"))
        backend = DockerBackend(network=Allow("example.org", outside="no-such-network"))
        with pytest.raises(SandboxLost, match="no-such-network"):
            await backend.open("agent", LIMITS)
        backend = DockerBackend(network=Allow("example.org", outside=world.network))
        starting = asyncio.create_task(backend.open("agent", LIMITS))
        # The network comes first.
        while not starting.done() and set(left_behind(f"agentrl.pid={Owner.me().pid}")) == before:
            await asyncio.sleep(0.01)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await asyncio.to_thread(wait_for, lambda: not backend._daemons[0].live)
        await asyncio.to_thread(
            wait_for, lambda: set(left_behind(f"agentrl.pid={Owner.me().pid}")) == before
        )

    asyncio.run(main())
