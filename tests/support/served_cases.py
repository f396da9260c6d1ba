"""One turn of a served policy."""

from __future__ import annotations

import asyncio

from helpers import make_task

from agentrl.policies.options import ServedOptions
from agentrl.policies.served import ServedPolicy
from agentrl.types import Limits, Message

HI = (Message.user("hi"),)


def act(server, *, tools=(), limits=None, seed=0, temperature=None, prices=None, **options):
    """One turn: what was said, the ending, and the usage."""

    async def ask():
        policy = ServedPolicy("m", server.url, "", temperature, prices, ServedOptions(**options))
        try:
            with policy.player(make_task(), limits or Limits(), seed) as player:
                return *(await player.act(HI, tools)), player.usage
        finally:
            await policy.close()

    return asyncio.run(ask())
