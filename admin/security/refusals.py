"""Writes the refused calls that would have changed something to the table `refusals`."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import time
from dataclasses import dataclass, replace
from typing import Any, Self

import pyarrow as pa

from conf.errors import one_line
from warehouse.delta.tables import Tables
from warehouse.schemas import REFUSALS

TABLE = "refusals"

# The least times from a refusal to its writing, and from one writing to the next: a flood of calls is not one of files.
FLUSH_SECONDS = 2.0
REST_SECONDS = 30.0

# The maximum number of rows that wait to be written. Further kinds of calls are counted in one row for each code.
MAX_WAITING = 50

# The maximum length of texts in a row, in characters: callers may send paths of any length.
MAX_TEXT = 300

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_OTHERS = "further calls, which are not told apart: too many different ones came at once"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Refusal:
    """A refused call. The path is without the query, which may have a token.

    Of a call without a role, path and topic are left out: anybody can send any.
    """

    role: str | None
    address: str | None
    method: str | None
    path: str | None
    topic: str | None
    operation: str | None  # None: the call was refused before this was known
    code: int
    reason: str


class Refusals:
    """Writes refusals in the background. An async context manager: the last ones are written at its end.

    Equal refusals that wait together are one row with their number. Callers never wait for that, and get no error if
    the table can't be written: then the rows wait, and go on counting.
    """

    def __init__(
        self, tables: Tables, flush_seconds: float = FLUSH_SECONDS, rest_seconds: float = REST_SECONDS
    ) -> None:
        self._tables = tables
        self._flush_seconds = flush_seconds
        self._rest_seconds = rest_seconds
        # By refusal when the first was refused, ms since the epoch, and how many there were.
        self._waiting: dict[Refusal, tuple[int, int]] = {}
        self._is_created = False
        self._added = asyncio.Event()
        self._closing = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing.set()
        self._added.set()
        await self._task

    def add(self, refusal: Refusal) -> None:
        """Takes a refusal to be written, or counts it with others."""
        self._count(_storable(refusal), time.time_ns() // 1_000_000, 1)

    def _count(self, refusal: Refusal, at: int, n: int) -> None:
        if refusal not in self._waiting and len(self._waiting) >= MAX_WAITING:
            refusal = Refusal(None, None, None, None, None, None, refusal.code, _OTHERS)
        first, before = self._waiting.get(refusal, (at, 0))
        self._waiting[refusal] = min(first, at), before + n
        self._added.set()

    async def _run(self) -> None:
        while not self._closing.is_set():
            await self._added.wait()
            await self._pause(self._flush_seconds)
            self._added.clear()
            await self._flush()
            await self._pause(self._rest_seconds)
        await self._flush()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)

    async def _flush(self) -> None:
        waiting, self._waiting = self._waiting, {}
        if not waiting:
            return
        rows = [{"refused_at": at, **vars(refusal), "calls": n} for refusal, (at, n) in waiting.items()]
        try:
            await asyncio.to_thread(self._append, pa.Table.from_pylist(rows, schema=REFUSALS))
        except Exception as error:  # any error: the task has to go on with the next rows
            log.warning("%d refused calls wait for the table %s: %s", len(rows), TABLE, one_line(error))
            for refusal, (at, n) in waiting.items():
                self._count(refusal, at, n)

    def _append(self, rows: pa.Table) -> None:
        if not self._is_created:
            self._tables.create({TABLE: REFUSALS})
            self._is_created = True
        self._tables.append(TABLE, rows, {})


def network_of(address: str) -> str:
    """Returns the address under which a caller is counted: of IPv6 the network, as a caller has all its addresses."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    return address if parsed.version == 4 else str(ipaddress.ip_network((parsed, 64), strict=False))


def _storable(refusal: Refusal) -> Refusal:
    texts: dict[str, Any] = {
        name: value[:MAX_TEXT].encode(errors="replace").decode()
        for name, value in vars(refusal).items()
        if isinstance(value, str)
    }
    made = replace(refusal, **texts)
    made = replace(made, method=made.method if made.method in _METHODS else None)
    if made.role is not None:
        return made
    return replace(made, path=None, topic=None, address=network_of(made.address) if made.address else None)
