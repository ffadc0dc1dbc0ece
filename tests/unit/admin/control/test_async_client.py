"""The API's connection to the broker, where there is none."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from admin.control.async_client import AsyncControlClient
from conf.settings import Settings

RUN = AsyncControlClient._run  # what it is where no fixture has replaced it


def test_it_ends_at_once_while_it_waits_for_a_broker_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncControlClient, "_run", RUN)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = Settings(pulsar={"service_url": f"pulsar://127.0.0.1:{silent.getsockname()[1]}"})  # type: ignore[arg-type]

        async def start_and_end() -> float:
            async with AsyncControlClient(settings) as client:
                connection, _ = await asyncio.to_thread(silent.accept)
                began = time.monotonic()
            took = time.monotonic() - began
            connection.close()
            assert not client._thread.is_alive()
            return took

        assert asyncio.run(start_and_end()) < 3
