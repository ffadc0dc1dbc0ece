"""What came in and is not durable."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from tests.support.tracker.messages import batches, messages, positions
from tracker.entry_log import EMPTY_ENTRIES, EntryLog
from tracker.messages import MESSAGES
from tracker.sharding import ShardId
from tracker.store import MemoryStore


def test_an_entry_is_durable_as_one_row_however_many_messages_it_has() -> None:
    log = EntryLog(MemoryStore(), ShardId().is_home)
    log.add_messages(batches([(1, 5, i, 3, 100 - i) for i in range(3)] + [(1, 6, -1, 1, 50)]), 1)
    entries = log.take_durable(1)
    assert positions(entries) == [(1, 5), (1, 6)]
    assert entries["batch_size"].to_pylist() == [3, 1]
    assert entries.schema == EMPTY_ENTRIES.schema


def test_an_entry_says_when_its_first_and_last_messages_are_due() -> None:
    log = EntryLog(MemoryStore(), ShardId().is_home)
    log.add_messages(messages([(2, 0, 70), (1, 9, 80)]), 1)
    log.add_messages(batches([(1, 5, i, 3, due) for i, due in enumerate((90, 100, 60))]), 1)
    log.add_messages(batches([(1, 6, i, 2, 40) for i in range(2)]), 1)
    entries = log.take_durable(1)
    assert positions(entries) == [(2, 0), (1, 9), (1, 5), (1, 6)]
    assert entries["first_due"].to_pylist() == [70, 80, 60, 40]
    assert entries["last_due"].to_pylist() == [None, None, 100, None]


def test_of_entries_of_other_shards_only_the_home_one_says_it() -> None:
    log = EntryLog(MemoryStore(), lambda rows: pc.equal(rows["ledger_id"], 1).to_numpy(zero_copy_only=False))
    log.add_messages(messages([(2, 0, 70), (1, 9, 80)]), 1)
    assert log.take_durable(1).select(["ledger_id", "first_due"]).to_pylist() == [{"ledger_id": 1, "first_due": 80}]


def test_a_seal_epoch_takes_its_entries_and_those_before_once() -> None:
    store = MemoryStore()
    log = EntryLog(store, ShardId().is_home)
    for entry, seal_epoch in enumerate((3, 1, 2, 3, 1)):
        log.add_messages(messages([(1, entry, 10)]), seal_epoch)
    assert log.take_durable(0).equals(EMPTY_ENTRIES)
    assert positions(log.take_durable(2)) == [(1, 1), (1, 4), (1, 2)]
    assert log.take_durable(2).equals(EMPTY_ENTRIES)
    assert positions(log.all_messages()) == [(1, 0), (1, 3)]
    assert positions(log.take_durable(9)) == [(1, 0), (1, 3)]
    assert log.all_messages().num_rows == 0
    assert not store.values


def test_all_has_what_a_command_asks_for() -> None:
    log = EntryLog(MemoryStore(), ShardId().is_home)
    assert log.all_messages().num_rows == 0
    log.add_messages(batches([(1, 5, 0, 2, 70), (1, 5, 1, 2, 60)]), 1)
    assert log.all_messages().select(["entry_id", "batch_index", "deliver_at"]).to_pylist() == [
        {"entry_id": 5, "batch_index": 0, "deliver_at": 70},
        {"entry_id": 5, "batch_index": 1, "deliver_at": 60},
    ]
    assert log.all_messages().schema == EntryLog(MemoryStore(), ShardId().is_home).all_messages().schema


def test_entries_are_kept_without_their_payload() -> None:
    store = MemoryStore()
    EntryLog(store, ShardId().is_home).add_messages(messages([(1, 1, 10)], payload=b"x" * 1_000_000), 1)
    assert sum(map(len, store.values.values())) < 10_000


def test_another_goes_on_with_the_store() -> None:
    store = MemoryStore()
    log = EntryLog(store, ShardId().is_home)
    log.add_messages(messages([(1, 1, 10)]), 4)
    log.add_messages(MESSAGES.empty_table(), 5)
    log.save()
    again = EntryLog(store, ShardId().is_home)
    again.add_messages(messages([(1, 2, 10)]), 4)
    again.save()
    last = EntryLog(store, ShardId().is_home)
    assert positions(last.take_durable(4)) == [(1, 1), (1, 2)]
    last.save()
    assert EntryLog(store, ShardId().is_home).all_messages().num_rows == 0


def test_first_indexes_may_be_unknown() -> None:
    log = EntryLog(MemoryStore(), ShardId().is_home)
    log.add_messages(pa.concat_tables([messages([(1, 1, 10)], first_index=2**40), messages([(1, 2, 10)])]), 1)
    assert log.take_durable(1)["first_index"].to_pylist() == [2**40, None]
