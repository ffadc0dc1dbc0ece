"""Producers with ever new names: what a receiver keeps does not grow with them."""

from __future__ import annotations

import logging
import tracemalloc

import pytest

from broker.position import Position
from broker.protocol.consumer import ReceivedEntry
from tests.support.servers.fake_pulsar import batch, chunk, one
from tests.support.service.receiver_harness import Harness

NAMES = 10_000
AT_ONCE = 500


def entries(first: int) -> list[ReceivedEntry]:
    """An entry of each of so many producers: mostly messages, some batches, and chunks of messages never whole."""
    found: list[ReceivedEntry] = []
    for entry in range(first, first + AT_ONCE):
        name = f"{entry:08}" * 31  # nearly as long as a name that is kept
        if entry % 10 == 0:
            found += chunk(entry, f"{name}-0", 0, 2, producer=name)
        elif entry % 10 == 1:
            found += batch(entry, 3, producer=name)
        else:
            found += one(entry, producer=name)
    return found


def taken_in(harness: Harness, first: int, last: int) -> int:
    """Bytes that are kept more after the entries of so many producers were taken in, committed and acknowledged."""
    before, _ = tracemalloc.get_traced_memory()
    for start in range(first, last, AT_ONCE):
        harness.receive(entries(start))
        harness.take()
        harness.receiver.acknowledge(Position(5, start + AT_ONCE - 1))
        harness.taken.clear()
    after, _ = tracemalloc.get_traced_memory()
    return after - before


@pytest.mark.slow
def test_what_is_kept_does_not_grow_with_the_names_of_producers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)  # pytest keeps each line
    harness = Harness()
    tracemalloc.start()
    try:
        taken_in(harness, 0, NAMES)
        assert taken_in(harness, NAMES, 2 * NAMES) < NAMES * 248 // 10, "less than a tenth of the names"
    finally:
        tracemalloc.stop()
