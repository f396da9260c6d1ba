"""An engine in a process of its own: what crosses, what is lost when it dies, what comes after.

The engine here has no model; real ones are carried in `tests/trainers/online/test_process_run.py`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from carried import (
    CANCEL,
    COUNT,
    DIE,
    FAIL,
    FORK_S,
    GONE,
    LOCKED,
    SAY,
    STOP,
    TANGLED,
    TWO,
    WAIT,
)
from carried_cases import SHORT, ask, pid_of, said, weights
from helpers import REPO, make_task, parents, process, wait_for

from agentrl.engines.base import Measured, Restarted
from agentrl.engines.own_process import carrier
from agentrl.engines.own_process import process as engines
from agentrl.errors import (
    AnswerFailed,
    ConfigError,
    EngineAborted,
    EngineAway,
    EngineError,
    EngineLost,
)
from agentrl.policies.base import TokenPolicy, thinking_s
from agentrl.types import Limits


def test_answers_errors_and_counts_cross(opened):
    engine = opened()
    good, bad = said(engine, SAY, FAIL)
    assert (good.ids, good.logprobs, good.finish, good.version) == ((3, 0), (-1.0, -2.0), "stop", 0)
    assert isinstance(bad, EngineError) and str(bad) == "ValueError: no such token"
    assert engine.context_length == 64 and not engine.is_away
    assert isinstance(engine, Measured) and isinstance(engine, Restarted)
    assert engine.metrics() == {"engine/waiting_max": 0, "engine/restarts": 0}


def test_what_is_asked_in_one_turn_of_the_loop_begins_together(opened):
    """A synchronous engine counts seats when the first request of a turn comes."""
    engine = opened()

    async def play():
        with engine.seat():
            first = ask(engine, COUNT)
            with engine.seat():
                both = await asyncio.gather(*first, *ask(engine, COUNT))
            await asyncio.sleep(0)
            return both, await engine.generate([COUNT], SHORT, seed=0)

    both, later = asyncio.run(play())
    assert [one.ids[0] for one in (*both, later)] == [2, 2, 1]


def test_pause_abort_and_cancel_reach_it(opened):
    engine = opened()

    async def play():
        engine.pause()
        held = ask(engine, SAY)
        await asyncio.sleep(0.1)
        assert not held[0].done()
        engine.resume()
        gone, *waiting = ask(engine, WAIT, WAIT, WAIT)
        await asyncio.gather(*held)
        gone.cancel()
        await asyncio.sleep(0)
        count = await engine.generate([COUNT], SHORT, seed=0)
        engine.abort()
        return count, await asyncio.gather(*waiting, return_exceptions=True)

    count, ended = asyncio.run(play())
    assert count.ids[1] == 2
    assert [type(error) for error in ended] == [EngineAborted] * 2


@pytest.mark.parametrize("what", ["abort", "drop"])
def test_what_ends_a_request_may_come_in_one_packet_with_it(opened, what):
    engine = opened()
    with engine._lock:
        number, call = engine._call("generate", (WAIT,), SHORT, 0)
        call.sent = True
        word = (None, "abort") if what == "abort" else (None, "drop", number)
        engine._serving.send([(number, *call.words), word])
    if what == "abort":  # first, since a count that arrives in the same turn still sees the request
        with pytest.raises(EngineAborted):
            call.reply.result(60)
    (count,) = said(engine, COUNT)
    assert count.ids[1] == 0  # nothing waits
    assert "never awaited" not in engine._log.path.read_text()


def test_a_killed_process_is_noticed_at_once_and_followed_by_another(opened, capfd):
    """What was under way is lost; what comes later waits, with all that held before."""
    engine = opened()

    async def play():
        with engine.seat(), engine.seat():
            running = ask(engine, WAIT, WAIT)
            await engine.generate([SAY], SHORT, seed=0)
            os.kill(pid_of(engine), signal.SIGKILL)
            begun_s = time.monotonic()
            lost = await asyncio.gather(*running, return_exceptions=True)
            noticed_s = time.monotonic() - begun_s
            assert engine.is_away and not engine.gone
            return lost, noticed_s, await asyncio.gather(*ask(engine, SAY, COUNT))

    lost, noticed_s, (again, count) = asyncio.run(play())
    assert [type(error) for error in lost] == [EngineLost] * 2 and noticed_s < 5
    assert "'carried' was killed by SIGKILL before it had answered" in str(lost[0])
    assert (again.ids, count.ids[0]) == ((3, 0), 2)
    assert engine.metrics()["engine/restarts"] == engine.restarts == 1
    assert engine.metrics()["engine/restarts"] == 0
    told = "was killed by SIGKILL: 2 requests are lost, and it is started again (1 of 5)"
    assert told in capfd.readouterr().err


def test_a_process_that_hangs_is_killed(opened, monkeypatch):
    monkeypatch.setattr(engines, "SILENT_S", 2.0)
    engine = opened()
    lost, _ = said(engine, STOP, WAIT)
    assert isinstance(lost, EngineLost) and "gave no sign of life for 3 s and was k" in str(lost)
    assert said(engine, SAY)[0].ids == (3, 0)


def test_an_engine_that_stopped_for_good_gets_a_new_process(opened):
    engine = opened()
    (lost,) = said(engine, GONE)
    assert isinstance(lost, EngineLost) and "ended with exit code 3" in str(lost)
    assert said(engine, SAY)[0].ids == (3, 0)
    assert "stopped for good: illegal access" in engine._log.path.read_text()


def test_one_that_dies_again_and_again_is_given_up(opened, monkeypatch):
    monkeypatch.setattr(engines, "BACK_OFF_S", (0.0, 0.1))
    engine = opened()
    for kind in (EngineLost, EngineLost, EngineLost):
        (error,) = said(engine, GONE)
        assert isinstance(error, kind)
    wait_for(lambda: engine.gone)
    (error,) = said(engine, SAY)
    assert isinstance(error, EngineAway) and error is engine.gone
    sentence = str(error)
    assert "process failed 3 times in a row, and the last one ended with exit code 3" in sentence
    assert f"{engine._log.path} ends with" in sentence and "illegal access" in sentence
    assert "--resume" in sentence and "\n" not in sentence
    with pytest.raises(EngineAway):
        engine.load(weights(1), 1)


def test_one_that_served_for_long_begins_to_count_anew(opened, monkeypatch):
    monkeypatch.setattr(engines, "BACK_OFF_S", (0.0,))
    monkeypatch.setattr(engines, "STEADY_S", 0.0)
    engine = opened()
    for _ in range(3):
        assert isinstance(said(engine, DIE)[0], EngineLost)
        assert said(engine, SAY)[0].ids == (3, 0)
    assert engine.restarts == 3


@pytest.mark.parametrize(
    ("start", "error", "match"),
    [
        ("refuses", ConfigError, "^no such model: name another$"),
        ("dies", EngineAway, "killed by SIGKILL while it started; .* ends with 'no room | not at"),
    ],
)
def test_an_engine_that_cannot_be_made_says_why_and_leaves_nothing(
    opened, tmp_path, start, error, match
):
    with pytest.raises(error, match=match):
        opened(start=start)
    assert not list((tmp_path / "run").iterdir())


def test_what_waits_for_a_new_process_can_be_cancelled_aborted_and_closed(opened, monkeypatch):
    monkeypatch.setattr(engines, "BACK_OFF_S", (60.0,))
    engine = opened()

    async def play():
        await asyncio.gather(*ask(engine, DIE), return_exceptions=True)
        gone, aborted = ask(engine, SAY, SAY)
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        engine.abort()
        (waits,) = ask(engine, SAY)
        await asyncio.sleep(0.05)
        await engine.close()
        return await asyncio.gather(gone, aborted, waits, return_exceptions=True)

    gone, aborted, waits = asyncio.run(play())
    assert isinstance(gone, asyncio.CancelledError)
    assert [str(error) for error in (aborted, waits)] == [
        "the request was aborted",
        "the engine was closed",
    ]


def test_the_process_ends_with_its_parent_and_no_interrupt_of_the_terminal_reaches_it(tmp_path):
    """Even where it is stopped, so that it cannot see the pipe's end."""
    code = (
        f"import sys; sys.path[:0] = [{str(REPO / 'tests/support')!r}]\n"
        "from agentrl.engines.own_process.process import ProcessEngine\n"
        "from carried import Carried\n"
        "import os, time; engine = ProcessEngine(Carried)\n"
        "print(engine._carrier.process.pid, flush=True); time.sleep(600)"
    )
    with process(sys.executable, "-c", code) as parent:
        child = int(parent.stdout.readline())
        assert os.getsid(child) == child != os.getsid(parent.pid)
        os.kill(child, signal.SIGSTOP)
        parent.kill()
        wait_for(lambda: child not in parents())


def test_requests_that_are_lost_are_not_compared_with_each_other(opened, monkeypatch):
    """Those of a group have equal prompts: each comparison would read both to the end."""
    compared = []
    monkeypatch.setattr(engines._Call, "__eq__", lambda one, other: compared.append(one))
    engine = opened()
    assert {type(one) for one in said(engine, *[WAIT] * 20, DIE)} == {EngineLost}
    assert said(engine, SAY)[0].ids == (3, 0) and not compared


def test_a_keeper_that_can_tell_nobody_goes_on(opened, monkeypatch):
    def write(text):
        raise BrokenPipeError

    engine = opened()
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=write, flush=lambda: None))
    assert isinstance(said(engine, DIE)[0], EngineLost)
    assert said(engine, SAY)[0].ids == (3, 0)


def test_a_keeper_that_fails_ends_the_engine_by_name(opened, monkeypatch):
    engine = opened()
    monkeypatch.setattr(engines, "BACK_OFF_S", ("soon",) * 3)
    assert isinstance(said(engine, DIE)[0], EngineLost)
    (error,) = said(engine, SAY)
    assert isinstance(error, EngineAway) and "its keeper failed: TypeError: " in str(error)


def test_a_keeper_that_fails_while_the_process_starts_says_so_to_who_makes_the_engine(
    opened, monkeypatch
):
    def tail(log):
        raise OSError("stale file handle")

    monkeypatch.setattr(carrier.Log, "tail", tail)
    met = []

    def make():
        with pytest.raises(EngineAway) as caught:
            opened(start="dies")
        met.append(str(caught.value))

    maker = threading.Thread(target=make, daemon=True)
    maker.start()
    maker.join(60)
    assert [one.partition("its keeper ")[2] for one in met] == [
        "failed: OSError: stale file handle; run the same again (a training run with --resume)"
    ]


def test_every_request_is_answered_whatever_the_engine_raises_or_says(opened):
    engine = opened()
    cancelled, locked, two, tangled, good = said(engine, CANCEL, LOCKED, TWO, TANGLED, SAY)
    assert type(cancelled) is EngineError and "cancelled its own request" in str(cancelled)
    assert type(locked) is EngineError and str(locked) == "no such lock"
    assert type(two) is AnswerFailed and str(two) == "one: two"
    assert type(tangled) is EngineError and "cannot be sent: TypeError: " in str(tangled)
    assert good.ids == (3, 0) and engine.restarts == 0


def test_an_engine_that_cannot_pause_gets_a_new_process(opened):
    engine = opened(start="restless")
    engine.pause()
    assert isinstance(said(engine, SAY)[0], EngineLost)
    assert "ValueError: no rest" in engine._log.path.read_text()


@pytest.mark.parametrize("how", [DIE, STOP])
def test_a_descendant_that_holds_the_pipe_hides_no_end(opened, monkeypatch, how):
    monkeypatch.setattr(engines, "SILENT_S", 2.0)
    engine = opened(start="forks")
    begun_s = time.monotonic()
    assert isinstance(said(engine, how)[0], EngineLost)
    assert time.monotonic() - begun_s < FORK_S / 2


def test_counts_of_a_process_that_does_not_answer_are_left_out(opened, monkeypatch):
    monkeypatch.setattr(engines, "METRICS_S", 0.2)
    engine = opened()
    os.kill(pid_of(engine), signal.SIGSTOP)
    assert engine.metrics() == {"engine/restarts": 0}
    os.kill(pid_of(engine), signal.SIGCONT)
    assert said(engine, SAY)[0].ids == (3, 0) and not engine._calls
    assert engine.metrics()["engine/waiting_max"] == 0


def test_a_seat_outside_a_loop_is_taken_and_left(opened):
    engine = opened()
    with engine.seat():
        assert said(engine, COUNT)[0].ids[0] == 1
    assert said(engine, COUNT)[0].ids[0] == 0 == engine._seats


def test_a_log_is_quoted_in_one_line_that_is_safe_to_read(tmp_path):
    path = tmp_path / "engine.log"
    path.write_text("of an earlier run\n")
    log = carrier.Log(path)
    log.note("process 7")
    assert log.tail() == f"{path} says nothing"
    log.file.write(b"one\n\n two\x1b[31m\nthree\nfour\n")
    log.file.flush()
    assert log.tail().endswith("ends with 'two\\\\x1b[31m | three | four'") or "x1b" in log.tail()
    log.forget()
    assert path.exists()
    log.close()


@pytest.mark.parametrize("is_away", [True, False])
def test_the_wall_clock_of_an_episode_stands_still_while_its_engine_starts(is_away):
    engine = SimpleNamespace(restarts=0, gone=None, is_away=is_away, seat=nullcontext)
    with TokenPolicy(engine, None).player(make_task(), Limits(), 0) as player:
        assert thinking_s(player) == (0.0 if is_away else None)
