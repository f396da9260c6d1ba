"""The HTTP client of a served policy: no answer, of success or failure, is read without end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.errors import AnswerFailed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx2

MOST_BYTES = 64 << 20
"""Of one answer, as sent. The ids and log-probabilities of 100,000 tokens take about 10 MB."""


def bounded_client(name: str) -> httpx2.AsyncClient:
    """A client as openai's own, whose answers may have `MOST_BYTES`.

    A longer one raises AnswerFailed where it is read; the message begins with `name`.
    """
    import httpx2
    from openai import DefaultAsyncHttpxClient

    class Bounded(httpx2.AsyncByteStream):
        def __init__(self, stream: httpx2.AsyncByteStream) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            taken = 0
            async for chunk in self._stream:
                taken += len(chunk)
                if taken > MOST_BYTES:
                    raise AnswerFailed(f"{name}: the answer is longer than {MOST_BYTES} bytes")
                yield chunk

        async def aclose(self) -> None:
            await self._stream.aclose()

    async def bound(response: httpx2.Response) -> None:
        if isinstance(response.stream, httpx2.AsyncByteStream):
            response.stream = Bounded(response.stream)

    # Not compressed, since what is counted is what is sent.
    plain = {"accept-encoding": "identity"}
    return DefaultAsyncHttpxClient(headers=plain, event_hooks={"response": [bound]})
