"""Writes the refused calls that would have changed something to the table `refusals`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import Self

import pyarrow as pa

from conf.errors import one_line
from warehouse.delta.tables import Tables
from warehouse.schemas import REFUSALS

TABLE = "refusals"

FLUSH_INTERVAL_SECONDS = 2.0

# The maximum number of rows that wait to be written; more are dropped, so that a flood of calls can't fill the memory.
MAX_WAITING = 10_000

# The maximum length of texts in a row, in characters: callers may send paths of any length.
MAX_TEXT = 1_000

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Refusal:
    """A refused call. The path is without the query, which may have a token."""

    role: str | None
    address: str | None
    method: str
    path: str
    topic: str | None
    operation: str | None  # None: the call was refused before this was known
    code: int
    reason: str


class Refusals:
    """Writes refusals in batches, in the background. An async context manager: the last ones are written at its end.

    Callers never wait for that, and get no error if the table can't be written: then rows are written later.
    """

    def __init__(self, tables: Tables, flush_interval_seconds: float = FLUSH_INTERVAL_SECONDS) -> None:
        self._tables = tables
        self._interval = flush_interval_seconds
        self._waiting: list[dict[str, object]] = []
        self._dropped = 0
        self._is_created = False
        self._closing = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing.set()
        await self._task

    def add(self, refusal: Refusal) -> None:
        """Takes a refusal to be written; drops it if MAX_WAITING wait already."""
        if len(self._waiting) >= MAX_WAITING:
            self._dropped += 1
            return
        values = {name: _storable(value) for name, value in vars(refusal).items()}
        self._waiting.append({"refused_at": time.time_ns() // 1_000_000, **values})

    async def _run(self) -> None:
        is_closing = False
        while not is_closing:
            with contextlib.suppress(TimeoutError):
                is_closing = await asyncio.wait_for(self._closing.wait(), self._interval)
            await self._flush()

    async def _flush(self) -> None:
        rows, self._waiting = self._waiting, []
        if self._dropped:
            log.warning("%d refused calls are not in the table %s: too many came at once", self._dropped, TABLE)
            self._dropped = 0
        if not rows:
            return
        try:
            await asyncio.to_thread(self._append, pa.Table.from_pylist(rows, schema=REFUSALS))
        except Exception as error:  # any error: the task has to go on with the next rows
            log.warning("%d refused calls wait for the table %s: %s", len(rows), TABLE, one_line(error))
            self._waiting[:0] = rows

    def _append(self, rows: pa.Table) -> None:
        if not self._is_created:
            self._tables.create({TABLE: REFUSALS})
            self._is_created = True
        self._tables.append(TABLE, rows, {})


def _storable(value: object) -> object:
    return value[:MAX_TEXT].encode(errors="replace").decode() if isinstance(value, str) else value
