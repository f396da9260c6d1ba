"""Where threads and event loops meet: one background loop for synchronous callers, and threads for
plain functions.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")
_Job = Callable[[], None]
_IDLE_S = 0.5
_LOOK_S = 1.0
_CLEANUP_S = 60.0


class LoopThread:
    """An event loop on a daemon thread of its own."""

    def __init__(self, name: str = "agentrl-loop") -> None:
        self._loop = asyncio.new_event_loop()
        self._closing = threading.RLock()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Start a coroutine on the loop and return at once."""
        if not self._thread.is_alive():
            work.close()
            raise RuntimeError("the loop thread is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the loop and wait for it; an interrupt cancels it and waits for its
        clean-up.
        """
        if not self._thread.is_alive():
            work.close()
            raise RuntimeError("the loop thread is closed")
        ended = threading.Event()
        started: list[asyncio.Task[Result]] = []

        def start() -> None:
            started.append(self._loop.create_task(work))
            started[0].add_done_callback(lambda task: ended.set())

        self._loop.call_soon_threadsafe(start)
        try:
            while not ended.wait(_LOOK_S):
                if not self._thread.is_alive():
                    raise RuntimeError("the loop thread ended by itself")
        except BaseException:
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(lambda: started[0].cancel())
                ended.wait(_CLEANUP_S)
            raise
        return started[0].result()

    @property
    def is_closed(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def close(self) -> None:
        """Cancel what still runs, wait for its clean-up, end the thread.

        Safe to call twice, also from two threads at once: the second waits for the first.
        """
        with self._closing:
            if not self.is_closed:
                self.submit(_cancel_all()).result(timeout=_CLEANUP_S)
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(timeout=10)
            if not self._thread.is_alive():
                self._loop.close()


def run_alone(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine on a loop of its own and wait for it, also where a loop is running already,
    as in a notebook.
    """
    loop = LoopThread("agentrl-alone")
    try:
        return loop.run(work)
    finally:
        loop.close()


async def _cancel_all() -> None:
    """Cancel every other task of this loop and wait until all of them have cleaned up."""
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def is_cancelled() -> bool:
    """Whether somebody asked the current task to stop: tells its own cancellation from a
    CancelledError of its work.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class _Workers:
    """Daemon threads, as many as there is work at the same time; one that is idle for a while ends.

    A bounded pool will not do: a function that hangs would hold its place for good, others would
        wait for their turn
    while their own time runs out, and the interpreter would wait for it at exit.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[_Job]] = []

    def give(self, job: _Job) -> None:
        """Have a thread do it now."""
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            threading.Thread(
                target=self._work, args=(inbox,), name="agentrl-worker", daemon=True
            ).start()
        inbox.put(job)

    def _work(self, inbox: queue.SimpleQueue[_Job]) -> None:
        while True:
            try:
                job = inbox.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if inbox not in self._idle:  # a job is on its way
                        continue
                    self._idle.remove(inbox)
                return
            job()
            del job
            with self._lock:
                self._idle.append(inbox)


_workers = _Workers()


def _forget_workers() -> None:
    global _workers
    _workers = _Workers()


os.register_at_fork(after_in_child=_forget_workers)


async def run_in_thread(function: Callable[[], Result]) -> Result:
    """Run a plain function beside the loop, on a thread that it shares with nothing while it runs.

    A caller that is cancelled stops waiting; the function itself cannot be stopped.
    """
    loop = asyncio.get_running_loop()
    reply: asyncio.Future[tuple[Result | None, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def job() -> None:
        outcome: tuple[Result | None, BaseException | None]
        try:
            outcome = context.run(function), None
        except BaseException as error:  # noqa: BLE001 - raised again where the result is awaited
            outcome = None, error
        try:
            loop.call_soon_threadsafe(_settle, reply, outcome)
        except RuntimeError:  # the loop is closed, so nobody waits for it
            return

    _workers.give(job)
    result, error = await reply
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _settle(reply: asyncio.Future[Result], outcome: Result) -> None:
    if not reply.done():
        reply.set_result(outcome)
