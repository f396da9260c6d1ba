"""Long: a daemon that crashes and comes back, and one whose user namespace is remapped."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentrl.errors import SandboxLost
from agentrl.sandboxes import DockerBackend, Pool, SandboxLimits
from agentrl.sandboxes.contract import check_backend
from agentrl.sandboxes.contract.room import sh
from agentrl.sandboxes.docker.backend import first_daemon
from agentrl.sandboxes.docker.daemon import Daemon, unreachable
from agentrl.sandboxes.docker.owner import Owner

REPO = Path(__file__).resolve().parents[3]
LIMITS = SandboxLimits(memory_mb=256, disk_mb=16)
NAP = f"1000.{os.getpid()}"  # seconds that nobody else sleeps
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("docker")]


@pytest.fixture
def short_path():
    """A folder for sockets, whose paths may have 107 letters."""
    with tempfile.TemporaryDirectory(prefix="d-") as folder:
        yield Path(folder)


@contextmanager
def private_daemon(folder, *options):
    """A daemon of our own to kill; yields its URL and a function that starts it (again)."""
    url = f"unix://{folder}/docker.sock"
    # In a network namespace of its own: a daemon without a bridge removes docker0, which is the
    # real daemon's.
    argv = ["unshare", "--net", "dockerd"]
    argv += ["--host", url, "--data-root", f"{folder}/data", "--exec-root", f"{folder}/run"]
    argv += [
        "--pidfile",
        f"{folder}/pid",
        "--bridge",
        "none",
        "--iptables=false",
        "--ip6tables=false",
    ]
    argv += [
        "--containerd-namespace",
        "agentrl-test",
        "--containerd-plugins-namespace",
        "agentrl-test-plugins",
    ]
    argv += options
    daemons = []

    def start():
        # A killed daemon's containerd is taken for alive where nobody collects dead processes.
        (folder / "run/containerd/containerd.pid").unlink(missing_ok=True)
        with open(folder / "log", "ab") as log:
            daemons.append(subprocess.Popen(argv, stdout=log, stderr=log))
        deadline = time.monotonic() + 120
        while unreachable(url):
            assert time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
            time.sleep(0.1)
        return daemons[-1]

    try:
        yield url, start
    finally:
        for daemon in daemons:
            daemon.terminate()
            daemon.wait(120)
        subprocess.run(
            ["umount", f"{folder}/data"], capture_output=True
        )  # a daemon mounts its folder on itself


def furnished(url):
    """A private daemon with the image of agents."""
    daemon = Daemon(url, Owner.me())
    list(daemon.api().load_image(b"".join(first_daemon().api().get_image("agentrl-agent"))))
    return daemon


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may start a daemon")
def test_the_contract_holds_in_a_remapped_user_namespace(short_path):
    for folder in (short_path, *short_path.parents):  # the remapped root has to reach its data
        if folder != Path("/tmp") and folder.is_relative_to("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o011)
    with private_daemon(short_path, "--userns-remap", "default") as (url, start):
        start()
        private = furnished(url)
        assert any("userns" in option for option in private.api().info()["SecurityOptions"])
        assert asyncio.run(check_backend(DockerBackend(url=url))) == []
        assert private.api().containers(all=True) == []


# The SDK leaves its socket to the garbage collector where the daemon refuses the connection.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may start a daemon")
def test_a_daemon_that_crashes_and_comes_back_costs_episodes_and_nothing_else(short_path):
    async def main():
        with private_daemon(short_path) as (url, start):
            daemon = start()
            private = furnished(url)
            pool = Pool(DockerBackend(url=url), size=2, limits=LIMITS)
            try:
                async with pool.lease("agent") as box:
                    call = asyncio.ensure_future(box.exec(["sleep", NAP], timeout_s=2000))
                    await asyncio.sleep(0.5)
                    daemon.kill()
                    with pytest.raises(
                        SandboxLost, match="does not answer"
                    ):  # at once, or never in the time of a test
                        await call
                daemon.wait()
                with pytest.raises(SandboxLost, match="no Docker daemon answers"):
                    async with pool.lease("agent"):
                        pass
                await asyncio.to_thread(start)
                async with pool.lease("agent") as box:
                    assert (await sh(box, "echo again")).stdout == b"again\n"
                    rows = private.api().containers(all=True)
                    assert len(rows) == 1, rows  # what the crash left is gone
            finally:
                await pool.close()
            assert private.api().containers(all=True) == []
        assert NAP not in subprocess.check_output(["ps", "-eo", "args"], text=True)

    asyncio.run(main())
    gc.collect()  # here, and not in a later test
