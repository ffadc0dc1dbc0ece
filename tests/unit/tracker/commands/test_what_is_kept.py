"""What is kept of cancelled and of delivered messages: how it is packed, and when it is forgotten."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tests.support.tracker.control_desk import ALONE, BATCH, TICK_MILLIS, Desk, apply_to_batch
from tests.support.tracker.messages import command, messages
from tracker.commands import repeats
from tracker.commands.repeats import KEPT_MILLIS, RequestLog
from tracker.message_state.changes import Compression
from tracker.rebuilt import NOT_TO_DELIVER, Rebuilt
from tracker.store import MemoryStore

MARGIN = 2 * TICK_MILLIS


@pytest.mark.parametrize("codec", ["NONE", "LZ4", "ZLIB", "ZSTD", "SNAPPY"])
def test_what_was_cancelled_outlasts_a_restart_whatever_the_codec(codec: str) -> None:
    desk = Desk(Compression(codec, threshold_bytes=0))
    many = messages([(1, i * i, 50_000) for i in range(500)])
    desk.apply(*(command(f"r{i}", 1, i * i, [i % 2]) for i in range(500)), known=many)
    apply_to_batch(desk, [command("s", 1, 8, batch_index=2)])
    masks = desk.subscription_mask(many)
    desk.restart()
    assert desk.subscription_mask(many) == masks == [0b10 if i % 2 == 0 else 0b01 for i in range(500)]
    assert desk.subscription_mask(BATCH) == [0b11, 0b11, 0b10]
    assert desk.state.cancelled.count == 501
    # Another codec reads what this one wrote.
    desk.compression = Compression("NONE")
    desk.restart()
    assert desk.subscription_mask(many) == masks


def test_small_bitmaps_are_not_compressed() -> None:
    sizes = []
    for codec in ("NONE", "ZSTD"):
        desk = Desk(Compression(codec, threshold_bytes=1_000_000))
        desk.apply(command("r", 1, 7), known=ALONE)
        desk.save()
        sizes.append(desk.state.cancelled.n_bytes)
    assert sizes[0] == sizes[1]


def test_what_was_cancelled_is_forgotten_two_ticks_after_its_time(desk: Desk) -> None:
    later = messages([(1, 9, 60_000)])
    desk.apply(command("r", 1, 7), known=ALONE)
    desk.apply(command("s", 1, 9), known=later)
    desk.save()
    desk.state.cancelled.drop_expired(60_000 + MARGIN - 1)
    assert desk.subscription_mask(ALONE) == [0b10]
    desk.state.cancelled.drop_expired(60_000 + MARGIN)
    assert desk.subscription_mask(ALONE) == [0b11]
    assert not desk.state.cancelled
    desk.restart()
    assert desk.state.cancelled.n_bytes == 0
    assert not [key for key in desk.store.values if key[0] == "taken_back"]


def test_what_was_delivered_before_a_rebuild_is_forgotten_for_good_when_it_is_past(desk: Desk) -> None:
    done = {"subscription": 0, "ledger_id": 1, "entry_id": 7, "batch_index": -1, "until": 5_000}
    desk.rebuild(Rebuilt(delivered=pa.Table.from_pylist([done], schema=NOT_TO_DELIVER)))
    desk.save()
    desk.open()
    assert desk.state.has_exceptions
    desk.state.drop_expired(5_000)
    desk.restart()
    assert not desk.state.has_exceptions
    assert not [key for key in desk.store.values if key[0] == "delivered"]


def test_of_ten_times_as_many_request_ids_as_are_kept_the_newest_are_for_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "KEPT_REQUESTS", 100)
    monkeypatch.setattr(repeats, "_CHUNK_REQUESTS", 10)
    store = MemoryStore()
    for n in range(100):
        RequestLog(store).add_ids({f"r{n * 10 + i}": n for i in range(10)}, n)
    found = RequestLog(store).find_ids([f"r{i}" for i in range(1_000)], 100)
    assert sorted(found) == sorted(f"r{i}" for i in range(900, 1_000))
    assert sum(map(len, store.values.values())) < 4_000  # bytes
    RequestLog(store).add_ids({"last": 1}, KEPT_MILLIS + 100)
    assert RequestLog(store).find_ids(["r999", "last"], KEPT_MILLIS + 100) == {"last": {1}}
