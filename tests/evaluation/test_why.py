"""`agentrl why`: the part that holds a run up is named."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hanging_envs import Hanging
from helpers import last_json, play_one, run_cli, says, script, wait_for
from run_cases import settings

from agentrl.errors import ChildLost, ConfigError
from agentrl.evaluation.why import Chain, explain_waits
from agentrl.sandboxes import open_pool
from agentrl.trainers.loop import train
from agentrl.trainers.run import Run
from agentrl.types import Task, ToolCall
from agentrl.waits import FOLDER, Waiter, current_waits, owned_by, report_waits, waiting

ENVS = Path(__file__).parents[1] / "support" / "hanging_envs.py"


def test_a_wait_is_seen_as_long_as_it_lasts():
    with owned_by(Waiter("x", 3)), waiting("the bus", 60):
        (wait,) = [wait for wait in current_waits() if wait.what == "the bus"]
        assert (wait.owner.name, wait.owner.round, wait.deadline_s) == ("x", 3, 60)
    assert not [wait for wait in current_waits() if wait.what == "the bus"]


@contextmanager
def in_background(work: Callable[[], object], gate: Path) -> Iterator[None]:
    """Run something that hangs, and let it go on at the end."""
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        gate.touch()
        thread.join(60)


def named(owner: str, what: str) -> bool:
    return any(owner in wait.owner.name and what in wait.what for wait in current_waits())


@pytest.mark.parametrize(
    ("part", "what"),
    [
        ("reset", "the environment's reset"),
        ("tool", "tool 'press'"),
        ("verifier", "the verifier"),
    ],
)
def test_what_an_episode_waits_for_is_named(part, what, tmp_path):
    gate, task = tmp_path / "gate", Task(id="t", instruction="x")
    policy = script(says(ToolCall("press", {})), says(content="done"))
    env = Hanging(part, str(gate))
    with in_background(lambda: play_one(lambda: env, policy, task), gate):
        wait_for(lambda: named("task 't' sample 0", what))
    assert not named("task 't'", "")


def test_the_queue_for_a_sandbox_is_named(bubblewrap):
    async def play() -> None:
        pool = open_pool("bubblewrap", size=1)

        async def borrow() -> None:
            async with pool.lease("agent"):
                pass

        async with pool.lease("agent"):
            queued = asyncio.create_task(borrow())
            while not named("", "a free sandbox for the agent"):
                await asyncio.sleep(0.01)
        await queued
        await pool.close()

    asyncio.run(asyncio.wait_for(play(), 60))


def chain_of(folder: Path, until: Callable[[Chain], bool]) -> Chain:
    seen: list[Chain] = []

    def look() -> bool:
        with suppress(ConfigError):  # nothing reports yet
            seen.append(explain_waits(folder))
        return bool(seen) and until(seen[-1])

    wait_for(look)
    return seen[-1]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_chain_leads_from_the_trainer_to_the_culprit(model, tmp_path, mode):
    gate, folder = tmp_path / "gate", tmp_path / "x"
    config = settings(
        model,
        env=f"{ENVS}:Hanging",
        env_settings={"part": "reset", "gate": str(gate)},
        mode=mode,
        deterministic=False,
        steps=1,
        eval_every=0,
    )

    def work() -> None:
        with Run(config, folder) as run:
            train(run)

    with in_background(work, gate):
        chain = chain_of(folder, lambda chain: len(chain.links) == 2)
        assert chain.links[0].owner == "trainer"
        assert chain.links[0].what == "episodes of its round"
        assert chain.links[1].what == "the environment's reset"
        assert chain.links[1].owner.startswith("task ") and chain.links[1].left_s < 90
        assert sum((chain.others or {}).values()) == 15
        shown = run_cli("why", str(folder))
        assert "trainer waits" in shown.stdout and "the environment's reset" in shown.stdout
        row = last_json(run_cli("why", str(folder), "--json").stdout)
        assert len(row["chain"]) == 2
    with pytest.raises(ConfigError):
        explain_waits(folder)
    assert not list((folder / FOLDER).iterdir())


@pytest.mark.long
@pytest.mark.parametrize("sent", [signal.SIGSTOP, signal.SIGKILL])
def test_a_process_that_is_stopped_or_dead_is_named(model, tmp_path, sent):
    gate, folder = tmp_path / "gate", tmp_path / "x"
    config = settings(
        model,
        env=f"{ENVS}:Hanging",
        env_settings={"part": "answer", "gate": str(gate)},
        mode="async",
        deterministic=False,
        eval_every=0,
    )
    ended: list[BaseException] = []

    def work() -> None:
        try:
            with Run(config, folder) as run:
                train(run)
        except ChildLost as error:
            ended.append(error)

    with in_background(work, gate):
        path = folder / FOLDER / "rollouts.json"
        wait_for(path.exists)
        chain_of(folder, lambda chain: bool(chain.links))
        pid = json.loads(path.read_text())["pid"]
        os.kill(pid, sent)
        if sent == signal.SIGSTOP:
            chain = chain_of(folder, lambda chain: bool(chain.problem))
            assert str(pid) in chain.problem and "stopped" in chain.problem
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: bool(ended))
    assert "SIGKILL" in str(ended[0])


def test_a_report_of_a_dead_process_says_so(tmp_path):
    with report_waits(tmp_path, "trainer"):
        path = tmp_path / FOLDER / "trainer.json"
        wait_for(path.exists)
        row = json.loads(path.read_text())
    path.write_text(json.dumps(row | {"pid": 2**22 - 1, "time": time.time()}))
    assert "dead" in explain_waits(tmp_path).problem
    path.write_text(json.dumps(row | {"time": time.time() - 60}))
    assert "has not reported" in explain_waits(tmp_path).problem


def test_a_run_that_is_over_is_refused(tmp_path):
    with pytest.raises(ConfigError) as refused:
        explain_waits(tmp_path)
    assert refused.value.setting == "run"
