"""Fixtures shared by all tests: real parts are required where AGENTRL_REQUIRE names them, else their absence skips."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentrl.sandboxes.bubblewrap import missing as bubblewrap_missing
from agentrl.sandboxes.docker import missing as docker_missing

REPO = Path(__file__).resolve().parent.parent
REQUIRED = {part.strip() for part in os.environ.get("AGENTRL_REQUIRE", "").split(",") if part.strip()}
_CHECKS = {"bubblewrap": bubblewrap_missing, "docker": docker_missing}


def require(part: str) -> None:
    """Skip the calling test if a real part is missing; fail it instead where AGENTRL_REQUIRE names the part."""
    if problem := _CHECKS[part]():
        if part in REQUIRED:
            pytest.fail(problem)
        pytest.skip(problem)


@pytest.fixture
def bubblewrap() -> None:
    """The test needs bubblewrap."""
    require("bubblewrap")


@pytest.fixture
def docker() -> None:
    """The test needs a Docker daemon with our images."""
    require("docker")


@pytest.fixture(scope="module")
def world() -> Iterator[SimpleNamespace]:
    """A network outside of docker sandboxes, with a server of its own."""
    require("docker")
    from network_world import outside_world

    with outside_world() as world:
        yield world


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """The test leaves no process and no loop behind."""
    from helpers import children, loop_threads

    before = children()
    yield
    deadline = time.monotonic() + 5
    while (children() - before) or loop_threads():
        assert time.monotonic() < deadline, (children() - before, loop_threads())
        time.sleep(0.02)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder with real task data, named by AGENTRL_DATA."""
    folder = Path(os.environ.get("AGENTRL_DATA", REPO.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no task data at {folder}; set AGENTRL_DATA")
    return folder
