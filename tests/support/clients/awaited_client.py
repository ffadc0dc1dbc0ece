"""The asynchronous client as the other one: what is tested of the one is tested of both."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from typing import Any, cast

from delaylake import AsyncClient, Client


def awaited(client: AsyncClient) -> Client:
    """Returns a client whose calls are awaited to their end, in one event loop, and whose listings are lists."""
    return cast("Client", _Awaited(client))


class _Awaited:
    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._runner = asyncio.Runner()

    def __enter__(self) -> _Awaited:
        return self

    def __exit__(self, *_: object) -> None:
        with self._runner:
            self._runner.run(self._client.close())

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*arguments: Any, **more: Any) -> Any:
            found = method(*arguments, **more)
            return self._runner.run(found if inspect.iscoroutine(found) else _listed(found))

        return call


async def _listed(found: AsyncIterator[Any]) -> list[Any]:
    return [one async for one in found]
