"""Answers that are remembered for a second: whoever asks, and however often, they are made once a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

_SECONDS = 1.0

_T = TypeVar("_T")


class Memory(Generic[_T]):
    """Remembers what a function returned or raised, for a second.

    Args:
        make: called in a thread, by one caller at a time.
    """

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make = make
        self._lock = asyncio.Lock()
        self._made_at = -_SECONDS
        self._made: _T | Exception | None = None

    async def get(self) -> _T:
        """Returns what the function returned within the last second, or now; raises what it raised."""
        if not self._is_fresh:
            async with self._lock:
                if not self._is_fresh:
                    try:
                        self._made = await asyncio.to_thread(self._make)
                    except Exception as error:
                        self._made = error
                    self._made_at = time.monotonic()
        if isinstance(self._made, Exception):
            raise self._made
        return self._made  # type: ignore[return-value]

    @property
    def _is_fresh(self) -> bool:
        return time.monotonic() - self._made_at < _SECONDS
