"""When a server may be asked, and what was spent on it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass

from agentrl.policies.base import Usage
from agentrl.policies.options import ServedOptions

MINUTE_S = 60.0


@dataclass
class Use:
    """Something that counts against a window, at a moment."""

    at: float
    amount: int


class Window:
    """At most `most` in any minute; 0: no limit. One entry above it has a minute of its own."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: deque[Use] = deque()

    def wait_s(self, amount: int, now: float) -> float:
        """How long until this much fits; 0.0: now."""
        while self._entries and self._entries[0].at <= now - MINUTE_S:
            self._entries.popleft()
        over = sum(entry.amount for entry in self._entries) + amount - self._most
        if not self._most or over <= 0:
            return 0.0
        for entry in self._entries:
            over -= entry.amount
            if over <= 0 or entry is self._entries[-1]:
                return entry.at + MINUTE_S - now
        return 0.0

    def add(self, amount: int, now: float) -> Use:
        """Count it; the entry's amount may be corrected later."""
        self._entries.append(Use(now, amount))
        return self._entries[-1]


class Pace:
    """Holds requests to what their server takes; of one event loop. Who came first goes first.

    Args:
        clock: seconds, as `time.monotonic` counts them.
    """

    def __init__(self, options: ServedOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._places = asyncio.Semaphore(options.concurrency) if options.concurrency else None
        self._requests = Window(options.requests_per_minute)
        self._tokens = Window(options.tokens_per_minute)
        self._turn = asyncio.Lock()
        self._closed_until = 0.0
        self._clock = clock

    def hold(self, seconds: float) -> None:
        """Begin no try before so many seconds are over: the server asked for it."""
        self._closed_until = max(self._closed_until, self._clock() + seconds)

    @asynccontextmanager
    async def place(self, tokens: int) -> AsyncIterator[Use]:
        """Wait until one try of about so many tokens may begin, and be it for the block.

        The entry's amount is for the caller to correct, once it is known.
        """
        async with self._places or nullcontext():
            async with self._turn:
                while (wait_s := self._wait_s(tokens)) > 0:
                    await asyncio.sleep(wait_s)
                self._requests.add(1, self._clock())
                entry = self._tokens.add(tokens, self._clock())
            yield entry

    def _wait_s(self, tokens: int) -> float:
        now = self._clock()
        return max(
            self._closed_until - now,
            self._requests.wait_s(1, now),
            self._tokens.wait_s(tokens, now),
        )


@dataclass
class Spending:
    """What the replies of a server took so far, each counted once, and whether that is enough.

    Attributes:
        budget_tokens, budget_usd: bounds on all together; 0 for none.
        tokens: prompts and answers.
        usd: US dollars; 0.0 where no price is known.
    """

    budget_tokens: int = 0
    budget_usd: float = 0.0
    tokens: int = 0
    usd: float = 0.0

    def add(self, usage: Usage) -> None:
        """One more reply."""
        self.tokens += usage.sampled_tokens + usage.prompt_tokens
        self.usd += usage.usd or 0.0

    @property
    def met(self) -> str:
        """The bound that is met, in words; empty if none is. A dispatcher stops then."""
        if self.budget_tokens and self.tokens >= self.budget_tokens:
            return f"budget_tokens={self.budget_tokens} is spent ({self.tokens} tokens)"
        if self.budget_usd and self.usd >= self.budget_usd:
            return f"budget_usd={self.budget_usd:g} is spent (US$ {self.usd:.4f})"
        return ""
