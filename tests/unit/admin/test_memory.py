"""An answer is made once a second, whoever asks."""

from __future__ import annotations

import asyncio
import time

import pytest

from admin.monitoring import health_api
from admin.monitoring.health_api import Memory


def test_many_who_ask_at_once_have_it_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[float] = []

    def make() -> int:
        time.sleep(0.02)
        made.append(time.monotonic())
        return len(made)

    async def ask() -> None:
        one = Memory(make)
        assert await asyncio.gather(*(one.get() for _ in range(50))) == [1] * 50
        assert await one.get() == 1
        monkeypatch.setattr(health_api, "_SECONDS", 0.0)
        assert await one.get() == 2

    asyncio.run(ask())


def test_an_error_is_remembered_too() -> None:
    calls = []

    def fail() -> int:
        calls.append(1)
        raise ValueError("not ready")

    async def ask() -> None:
        one = Memory(fail)
        for _ in range(3):
            with pytest.raises(ValueError, match="not ready"):
                await one.get()

    asyncio.run(ask())
    assert len(calls) == 1
