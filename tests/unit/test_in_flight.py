"""Releases that are handed out and not confirmed."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tests.messages import messages
from tracker.in_flight import SENDING, InFlight, Release
from tracker.store import MemoryStore


def release(tick: int, is_planned: bool = True, n: int = 2) -> Release:
    rows = messages([(1, i, tick) for i in range(n)], payload=b"x").append_column("wants", pa.array(np.arange(n)))
    return Release(tick, is_planned, rows.replace_schema_metadata({SENDING: f'{{"lanes": {tick}}}'}))


def ticks(in_flight: InFlight) -> list[tuple[int, bool]]:
    return [(r.tick, r.is_planned) for r in in_flight.all()]


def test_releases_come_back_as_they_were_oldest_first() -> None:
    in_flight = InFlight(MemoryStore())
    sent = [release(1), release(2, False, 3), release(2, True)]
    for one in sent:
        in_flight.add(one)
    assert len(in_flight) == 7
    for one, other in zip(in_flight.all(), sent, strict=True):
        assert (one.tick, one.is_planned) == (other.tick, other.is_planned)
        assert one.rows.equals(other.rows, check_metadata=True)
    assert len(in_flight.all()) == 3


def test_what_is_confirmed_is_forgotten_in_the_store_too() -> None:
    store = MemoryStore()
    in_flight = InFlight(store)
    for tick in (3, 5, 7):
        in_flight.add(release(tick, False))
        in_flight.add(release(tick, True))
    in_flight.confirm(2)
    assert len(in_flight) == 12
    in_flight.confirm(5)
    assert ticks(in_flight) == [(7, False), (7, True)]
    assert sorted(key for table, key in store.values if table == "in_flight") == [(7, 0), (7, 1)]
    in_flight.confirm(9)
    in_flight.confirm(9)
    assert len(in_flight) == 0
    assert in_flight.all() == []


def test_another_run_finds_what_was_saved() -> None:
    store = MemoryStore()
    in_flight = InFlight(store)
    in_flight.add(release(4))
    in_flight.add(release(6))
    in_flight.save()
    again = InFlight(store)
    assert (len(again), ticks(again)) == (4, [(4, True), (6, True)])
    again.confirm(4)
    again.save()
    assert ticks(InFlight(store)) == [(6, True)]


def test_what_has_not_changed_is_not_written() -> None:
    store = MemoryStore()
    InFlight(store).add(release(4))
    in_flight = InFlight(store)
    in_flight.add(release(4))
    in_flight.save()
    store.put = None  # type: ignore[method-assign, assignment]
    in_flight.save()
    InFlight(store).save()
