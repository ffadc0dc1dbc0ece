"""The client for programs with an event loop: the same methods, to be awaited."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from typing import Any

from delaylake import paging
from delaylake.connections import AsyncConnections
from delaylake.listing import MessageState, PendingMessage, Schedule
from delaylake.message_ids import MessageId, Outcome, Redriven
from delaylake.methods import Methods

_Outcomes = Coroutine[Any, Any, list[Outcome]]


class AsyncClient(
    AsyncConnections,
    Methods[
        Coroutine[Any, Any, MessageId],
        _Outcomes,
        Coroutine[Any, Any, Redriven],
        AsyncIterator[PendingMessage],
        AsyncIterator[Schedule],
    ],
):
    """As `Client`, for asyncio. An asynchronous context manager; for one event loop.

    ```python
    async with AsyncClient("http://127.0.0.1:8081", broker="pulsar://localhost:6650") as lake:
        message = await lake.schedule("orders", b"ship it", after=timedelta(minutes=10))
        await lake.cancel("orders", message)
    ```
    """

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def get(self, topic: str, message: MessageId | str) -> MessageState:
        """See `Client.get`."""
        message_id = MessageId.of(message)
        waiting = [one async for one in self._pages(paging.entry_listing(topic, message_id, "waiting"))]
        cancelled = [one async for one in self._pages(paging.entry_listing(topic, message_id, "cancelled"))]
        return paging.state_of(message_id, waiting, cancelled)
