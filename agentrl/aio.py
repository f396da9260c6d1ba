"""One background event loop, so that synchronous callers can use the async core anywhere, a notebook included."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class LoopThread:
    """An event loop on a daemon thread of its own."""

    def __init__(self, name: str = "agentrl-loop") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Start a coroutine on the loop and return at once."""
        if not self._thread.is_alive():
            work.close()
            raise RuntimeError("the loop thread is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the loop and wait for it; an interrupt cancels it and waits for its clean-up."""
        future = self.submit(work)
        try:
            return future.result()
        except (KeyboardInterrupt, SystemExit):
            self.cancel_all()
            raise

    @property
    def is_closed(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def cancel_all(self) -> None:
        """Cancel everything that runs on the loop and wait for its clean-up."""
        self.submit(_cancel_all()).result(timeout=60)

    def close(self) -> None:
        """Cancel what still runs, then end the thread; safe to call twice."""
        if self.is_closed:
            return
        self.cancel_all()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_all() -> None:
    """Cancel every other task of this loop and wait until all of them have cleaned up."""
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
