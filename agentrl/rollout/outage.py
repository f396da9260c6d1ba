"""What to do while no sandbox can be had: wait, say so, and play nothing meanwhile."""

from __future__ import annotations

import asyncio
import sys

from agentrl.errors import BackendAway
from agentrl.records.plain import plain
from agentrl.sandboxes.base import SandboxPool
from agentrl.trajectory import Episode
from agentrl.types import EndReason

BACK_OFF_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Pauses between two looks whether the backend is there again."""


class Outage:
    """Holds back episodes while the backend of their sandboxes is away.

    Only a backend that has lent before is waited for: one that never did is not there.
    """

    def __init__(self, pool: SandboxPool | None) -> None:
        self._pool = pool
        self._worked = False
        self._looking = asyncio.Lock()

    async def over(self) -> None:
        """Wait for the end of an outage, if there is one."""
        async with self._looking:
            return

    async def after(self, episode: Episode) -> None:
        """Wait, where this episode was lost, until a sandbox can be had again.

        Raises:
            BackendAway: there is still none after all of `BACK_OFF_S`.
        """
        if episode.end is not EndReason.SANDBOX_LOST:
            self._worked = self._worked or episode.score.value is not None
        elif self._pool is not None and self._worked:
            async with self._looking:
                await self._wait(self._pool)

    async def _wait(self, pool: SandboxPool) -> None:
        why = ""
        for pause_s in (0.0, *BACK_OFF_S):
            await asyncio.sleep(pause_s)
            try:
                async with pool.lease("agent"):
                    if why:
                        print(
                            "the sandbox backend is there again: playing goes on", file=sys.stderr
                        )
                    return
            except BackendAway as error:
                if not why:
                    print(
                        plain(f"warning: no sandbox can be had, playing waits: {error}"),
                        file=sys.stderr,
                    )
                why = str(error)
        raise BackendAway(f"no sandbox could be had for {sum(BACK_OFF_S):g} s: {why}")
