"""Fixtures shared by all tests: real parts are required where AGENTRL_REQUIRE names them, else
their absence skips.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import EARLIER, children, loop_threads, wait_for
from hypothesis import HealthCheck, settings

from agentrl.engines.processor import avoid_broken_amx
from agentrl.engines.vllm import missing as vllm_missing
from agentrl.sandboxes.bubblewrap import missing as bubblewrap_missing
from agentrl.sandboxes.docker import missing as docker_missing

if "PYTEST_XDIST_WORKER" in os.environ:  # a core each; more threads would wait for one another
    os.environ.setdefault("OMP_NUM_THREADS", "1")

avoid_broken_amx()  # before the workers start, which inherit the answer
REPO = Path(__file__).resolve().parent.parent
REQUIRED = {
    part.strip() for part in os.environ.get("AGENTRL_REQUIRE", "").split(",") if part.strip()
}
# No test is about how long one example takes, and a busy machine takes its time. Else as hypothesis
# has it, CI's too.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # so a shell starts what runs in its background, and all below it
    signal.signal(signal.SIGINT, signal.default_int_handler)
_CHECKS = {"bubblewrap": bubblewrap_missing, "docker": docker_missing, "vllm": vllm_missing}


def require(part: str) -> None:
    """Skip the calling test if a real part is missing; fail it instead where AGENTRL_REQUIRE names
    the part.
    """
    if problem := _CHECKS[part]():
        if part in REQUIRED:
            pytest.fail(problem)
        pytest.skip(problem)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, object, object]:
    """What a failed test left open is closed now, without a word: later it would warn, and fail
    another test.
    """
    report = yield
    if call.excinfo is not None and not item.config.option.usepdb:
        error: BaseException | None = call.excinfo.value
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            while error is not None:  # the frames of the traceback hold all that the test had
                traceback.clear_frames(error.__traceback__)
                error.__traceback__ = None
                error = error.__cause__ or error.__context__
            call.excinfo = sys.last_traceback = None
            gc.collect()
    return report


@pytest.fixture(autouse=True)
def earlier_threads() -> None:
    """Remember what runs before a test."""
    EARLIER.clear()
    EARLIER.update(threading.enumerate())


@pytest.fixture
def bubblewrap() -> None:
    """The test needs bubblewrap."""
    require("bubblewrap")


@pytest.fixture
def docker() -> None:
    """The test needs a Docker daemon with our images."""
    require("docker")


@pytest.fixture(scope="session")
def vllm() -> Iterator[Any]:
    """A real vLLM with a tiny model; one for all tests."""
    require("vllm")
    from vllm_cases import Vllm

    made = Vllm()
    yield made
    made.close()


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
    before = children()
    yield
    wait_for(lambda: not (children() - before or loop_threads()))


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder with real task data, named by AGENTRL_DATA."""
    folder = Path(os.environ.get("AGENTRL_DATA", REPO.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no task data at {folder}; set AGENTRL_DATA")
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny policy of random weights, with its tokenizer."""
    from agentrl.trainers.models.tiny import build_model, build_tokenizer

    tokenizer = build_tokenizer(
        ["<|im_start|>user\nsay 3<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"] * 8, 280
    )
    return build_model(tmp_path_factory.mktemp("tiny"), tokenizer, width=32, layers=1, context=256)


@pytest.fixture
def told_by_transformers() -> Iterator[list[str]]:
    """What transformers logs meanwhile; people would see it beside our sentence."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)
    yield told
    logging.getLogger("transformers").removeHandler(handler)
