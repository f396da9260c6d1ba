"""Backends by name, missing ones, backends without a boundary, and killed hosts."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import below, parents, process, wait_for

from agentrl.errors import ConfigError, SandboxLost
from agentrl.sandboxes import (
    BubblewrapBackend,
    DockerBackend,
    Pool,
    ProcessBackend,
    available,
    backends,
    cgroup,
    open_pool,
)
from agentrl.sandboxes.base import SandboxLimits

REPO = Path(__file__).resolve().parents[2]


def test_pools_by_name(capsys, monkeypatch):
    assert open_pool("process", size=3).size == 3
    with pytest.raises(ConfigError, match="'vm' is unknown"):
        open_pool("vm")
    assert set(available()) == {"bubblewrap", "docker", "process"}
    monkeypatch.setattr(backends, "missing", lambda: "install the Debian package bubblewrap")
    monkeypatch.setattr(backends, "docker_missing", lambda: "start dockerd")
    for name in ("bubblewrap", "docker"):
        with pytest.raises(
            ConfigError,
            match=f"{name!r} cannot be used: (install the Debian package|start dockerd)",
        ):
            open_pool(name)
    pool = open_pool("auto")
    assert isinstance(pool.backend, ProcessBackend) and capsys.readouterr().err == ""
    pool.tell()
    pool.tell()
    assert capsys.readouterr().err.count("start dockerd; falling back to the process sandbox") == 1
    monkeypatch.setattr(backends, "docker_missing", lambda: None)
    assert isinstance(open_pool("docker").backend, DockerBackend)
    pool = open_pool("auto")
    pool.tell()
    assert isinstance(pool.backend, DockerBackend)
    assert "falling back to the docker sandbox" in capsys.readouterr().err
    monkeypatch.setattr(backends, "missing", lambda: None)
    assert isinstance(open_pool("auto").backend, BubblewrapBackend)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")

    async def main():
        with pytest.raises(SandboxLost, match="install the Debian package bubblewrap"):
            await BubblewrapBackend().open("agent", SandboxLimits())

    asyncio.run(main())


def test_the_process_backend_says_that_it_is_no_boundary():
    code = """
import asyncio
from agentrl.sandboxes import ProcessBackend, SandboxLimits
async def main():
    for _ in range(2):
        box = await ProcessBackend().open("agent", SandboxLimits())
        await box.close()
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True
    )
    assert done.stderr.count("no boundary") == 1
    assert not ProcessBackend.is_boundary


HOST = """
import asyncio, sys
from agentrl.sandboxes import open_pool
async def main():
    pool = open_pool(sys.argv[1], size=3)
    async def episode():
        async with pool.lease("agent") as box:
            await box.exec(["sh", "-c", "setsid sleep 1000.25 & sleep 1000.25 & true"])
            print((await box.exec(["sh", "-c", "echo $TMPDIR"])).stdout.decode(), flush=True)
            await box.exec(["sleep", "1000.25"], timeout_s=100)
    await asyncio.gather(*(episode() for _ in range(3)))
asyncio.run(main())
"""


@pytest.mark.parametrize("name", ["bubblewrap", "process"])
def test_nothing_outlives_a_killed_host(name, request):
    if name == "bubblewrap":
        request.getfixturevalue("bubblewrap")
    with process(sys.executable, "-c", HOST, name, text=True, stderr=subprocess.DEVNULL) as host:
        folders = [
            line.strip() for line in (host.stdout.readline() for _ in range(6)) if line.strip()
        ]
        wait_for(
            lambda: len(below({host.pid})) > 12
        )  # 3 supervisors with 3 sleepers each, at least
        ours = below({host.pid})
    wait_for(lambda: not ours & parents().keys())
    if (place := cgroup.home()) is not None:
        wait_for(
            lambda: cgroup.sweep(place.path) or not list(place.path.glob(f"agentrl-{host.pid}-*"))
        )
    if name == "process":
        assert len(folders) == 3
        wait_for(lambda: not any(os.path.exists(os.path.dirname(folder)) for folder in folders))


def test_a_role_that_there_is_not_is_refused():
    async def main():
        async with Pool(ProcessBackend(), 1).lease("agnt"):
            pass

    with pytest.raises(ConfigError, match="role='agnt' of a sandbox must be 'agent' or 'grader'"):
        asyncio.run(main())


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda box: box.exec("ls -la"), r"\['sh', '-c', 'ls -la'\]"),
        (lambda box: box.put({"a.txt": "text"}), "file 'a.txt' must be bytes, not str"),
        (lambda box: box.reset({"a.txt": 5}), "file 'a.txt' must be bytes, not int"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused_with_the_right_one(call, match):
    async def main():
        box = await ProcessBackend().open("agent", SandboxLimits())
        try:
            with pytest.raises(ValueError, match=match):
                await call(box)
            await box.ping()
        finally:
            await box.close()

    asyncio.run(main())
