"""Weights of an engine in a process of its own: what every process gets, and what none gets."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from unittest import mock

import pytest
import torch
from carried import DIE, SAY
from carried_cases import pid_of, said, weights
from helpers import wait_for

from agentrl.engines.own_process import handover
from agentrl.engines.own_process import process as engines
from agentrl.errors import EngineAway, EngineError, EngineLost


def test_a_process_that_dies_of_its_weights_gets_them_again(opened, tmp_path):
    engine = opened(once=str(tmp_path / "died"))
    engine.load(weights(9), 2)
    assert (engine.version, engine.restarts) == (2, 1)
    answer = said(engine, SAY)[0]
    assert (answer.ids, answer.version) == ((3, 9), 2)


def test_a_process_that_starts_while_weights_are_written_is_not_taken_for_one_that_hangs(
    opened, monkeypatch
):
    monkeypatch.setattr(engines, "SILENT_S", 2.0)
    engine = opened()
    engine.load(weights(9), 2)
    written, waits = engine._writing, threading.Event()

    class Writing:
        def __enter__(self):
            waits.set()
            written.acquire()

        def __exit__(self, *_):
            written.release()

    engine._writing = Writing()
    with written:
        os.kill(pid_of(engine), signal.SIGKILL)
        assert waits.wait(120)
        time.sleep(5)  # it lives, and its signs of life are not read
    assert said(engine, SAY)[0].ids == (3, 9) and engine.restarts == 1


def test_weights_that_were_refused_are_not_given_to_the_next_process(opened):
    """One that has none is not started; weights that come later are taken as ever."""
    engine = opened(start="picky")

    def loses(version):
        with pytest.raises(EngineError, match=r"^no such weights$"):
            engine.load(weights(5), 2)
        answer = said(engine, SAY)[0]
        assert (answer.version, engine.version) == (version, version)

    loses(0)
    engine.load(weights(9), 1)
    assert isinstance(said(engine, DIE)[0], EngineLost)
    assert said(engine, SAY)[0].ids == (3, 9)
    loses(1)
    assert isinstance(said(engine, DIE)[0], EngineLost)
    (error,) = said(engine, SAY)
    assert isinstance(error, EngineAway) and engine.restarts == 1
    why = "the weights after version 1 were not taken (no such weights), and its own are lost"
    assert why in str(error)


def test_weights_that_were_written_in_part_are_given_to_nobody(opened, monkeypatch):
    engine = opened()
    engine.load(weights(9), 1)
    monkeypatch.setattr(engine._weights, "write", mock.Mock(side_effect=OSError("no memory left")))
    with pytest.raises(OSError, match="no memory left"):
        engine.load(weights(5), 2)
    assert said(engine, SAY)[0].version == 1
    assert isinstance(said(engine, DIE)[0], EngineLost)
    (error,) = said(engine, SAY)
    assert isinstance(error, EngineAway) and "not taken (no memory left)" in str(error)


def test_weights_that_were_written_in_part_are_not_given_to_a_process_that_starts_meanwhile(
    opened, monkeypatch
):
    engine = opened()
    engine.load(weights(9), 1)
    before = pid_of(engine)
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: pid_of(engine) != before)
    monkeypatch.setattr(engine._weights, "write", mock.Mock(side_effect=OSError("no memory left")))
    with pytest.raises(OSError, match="no memory left"):
        engine.load(weights(5), 2)
    (error,) = said(engine, SAY)
    assert isinstance(error, EngineAway)
    assert re.search("not taken.*had no weights to begin with", str(error))


def test_weights_that_a_process_died_of_and_the_next_refused_end_the_engine(opened, tmp_path):
    engine = opened(start="picky", once=str(tmp_path / "died"))
    with pytest.raises(EngineAway, match=r"were not taken \(no such weights\)"):
        engine.load(weights(5), 2)
    assert engine.restarts == 0 and engine.gone


def test_a_process_that_cannot_read_weights_says_so_and_answers_with_those_it_has(opened):
    engine = opened(start="blind")
    with pytest.raises(EngineError, match=r"OSError: .*Bad file descriptor"):
        asyncio.run(asyncio.wait_for(asyncio.to_thread(engine.load, weights(1), 1), 60))
    assert said(engine, SAY)[0].ids == (3, 0)
    assert isinstance(said(engine, DIE)[0], EngineLost)
    assert said(engine, SAY)[0].version == 0


def test_weights_lie_in_shared_memory_once_and_whole():
    shared = handover.SharedWeights()
    base = torch.arange(6.0).view(2, 3)
    given = {
        "head": base,
        "tied": base,
        "turned": base.T,
        "half": torch.tensor([1.5, 2.0], dtype=torch.bfloat16),
        "one": torch.tensor(3),
        "none": torch.empty(0, 4),
        "last": torch.ones(5),
    }
    for _ in range(2):
        base *= 2
        places = shared.write(given)
        found = handover.read(shared.fd, places)
        assert found.keys() == given.keys()
        for name, tensor in given.items():
            assert found[name].dtype == tensor.dtype
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
    assert places["tied"] == places["head"] != places["turned"]
    assert {place.offset % 64 for place in places.values()} == {0}
    shared.write({"small": torch.ones(1)})
    assert os.fstat(shared.fd).st_size == 64
    shared.close()
    shared.close()
