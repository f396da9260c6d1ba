"""Branches that an engine played with a mixture of experts, and says so token by token."""

from __future__ import annotations

import asyncio

from trainer_cases import episode

from agentrl.engines.base import Sampling
from agentrl.engines.transformers import TransformersEngine
from agentrl.trainers.batch import pack
from agentrl.trajectory import Group, Segment, Trajectory

TOKENS = 6


def engine_of(model, **options):
    engine = TransformersEngine(model, frozenset(), **options)
    engine.tell_routing()
    return engine


def two_turns(engine, prompts=((5, 6, 7), (8, 9, 10, 11, 12, 13, 14), (8, 9, 10, 11, 12, 13, 14))):
    """Branches of two turns with an observation between them; two of them share a prompt."""

    async def play():
        branches = [Trajectory((Segment.prompt(ids),)) for ids in prompts]
        with engine.seat():
            for turn in range(2):
                asked = (
                    engine.generate(one.ids, Sampling(max_tokens=TOKENS - place), seed=place)
                    for place, one in enumerate(branches)
                )
                told = await asyncio.gather(*asked)
                branches = [
                    one.extend(Segment.sampled(new.ids, new.logprobs, 0, "length")).routed(
                        new.per_token["routing"]
                    )
                    for one, new in zip(branches, told, strict=True)
                ]
                if not turn:
                    seen = Segment.observation([20, 21, 22])
                    branches = [one.extend(seen) for one in branches]
        return branches

    return asyncio.run(play())


def packed(*plays):
    """Episodes of one branch, or of a tuple of them."""
    branches = (play if isinstance(play, tuple) else (play,) for play in plays)
    episodes = tuple(episode(*some, sample=number) for number, some in enumerate(branches))
    return pack([Group(episodes)], 0)
