"""Restores a backup with another broker, to which the source topics were replicated.

It finds out which entries of the other broker are in the backup. A replicated entry names its position at the broker
that it came from (Pulsar 4.2 adds that); position and publish time identify it in the backup. Entries without that
position, and those that were published at the other broker and replicated from there, are identified by producer name
and publish time. (The sequence id would identify them, too, but the client does not show it.)
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from broker.client import PulsarError
from broker.clusters.replicas import read_replicas
from broker.position import START, Position
from broker.protocol.brokers import Brokers
from broker.pulsar_admin.admin_rest import AdminClient
from checkpoint_from_tables.rebuild.delivered import CLOCKS_MILLIS
from checkpoint_from_tables.restore.rewind import CHUNKS_MILLIS
from conf.partitions import partition_name
from conf.settings import Settings
from tracker.messages import FIRST_IMPORTED_LEDGER, BoolArray, Int64Array, int64
from warehouse.delta.tables import OnProgress, Tables
from warehouse.maintenance.retention import LAST_ENTRIES_MILLIS
from warehouse.named_queries import NamedQueries
from warehouse.renumber_message_ids import PAIRS, Renumbering, next_place, renumber

_LAST_ENTRIES = 1_000  # the last entries of which the least publish time counts, because clocks differ

_ID = ["old_ledger", "old_entry", "publish_time"]  # by which an entry is known whose position the other broker tells

_SQL = NamedQueries(__file__, first_imported_ledger=FIRST_IMPORTED_LEDGER, last_entries=_LAST_ENTRIES)


@dataclass(frozen=True)
class ComparedPartition:
    """The result of comparing a topic partition of the other broker with a backup.

    Attributes:
        pairs: the ids at both brokers of the entries that come again, and before them of `read_after`, as PAIRS.
        read_after: the last entry that does not come again; START: there is none.
        known: the number of entries that the backup has.
        new: the number of entries that the backup lacks.
        unclear: the number of new entries that may be in the backup all the same.
        missing: the number of entries of the backup that the topic partition lacks.
    """

    pairs: pa.Table = field(default_factory=PAIRS.empty_table)
    read_after: Position = START
    known: int = 0
    new: int = 0
    unclear: int = 0
    missing: int = 0


def compare(replicas: pa.Table, known: pa.Table, since: int = 0, later: pa.Table | None = None) -> ComparedPartition:
    """Finds the entry after which a topic partition is to be read, so that no entry is left out that the backup lacks.

    The backup has all entries up to that one, and perhaps some after it, which come again and are recognized by their
    pairs of ids. The entry is well before the first new one, because an incomplete chunked message may begin before it.

    Args:
        replicas: the entries of the topic partition, in its order, as REPLICAS.
        known: the durable entries of the backup, in their order: old_ledger, old_entry, publish_time, producer_name and
            batch_size.
        since: `missing` counts entries that were published then or later, ms since the epoch.
        later: entries after those, of which the backup has rows and which come again, with the same columns. The other
            broker can't tell them apart from others where they were published there. None: there are none.
    """
    n = replicas.num_rows
    if not n:
        return ComparedPartition(missing=known.num_rows)
    is_told = pc.is_valid(replicas["old_ledger"]).to_numpy(zero_copy_only=False)
    by_id = _pairs(replicas, known, _ID)
    rest = np.setdiff1d(np.flatnonzero(~is_told), by_id[0]), np.setdiff1d(np.arange(known.num_rows), by_id[1])
    by_name, unclear = _pairs_by_name(replicas, known, *rest)
    rows, others = (np.concatenate(both) for both in zip(by_id, by_name, strict=True))
    later = known.slice(0, 0) if later is None else later
    rest = (
        np.setdiff1d(np.flatnonzero(~is_told), rows),
        np.setdiff1d(np.arange(later.num_rows), _pairs(replicas, later, _ID)[1]),
    )
    (later_rows, later_others), later_unclear = _pairs_by_name(replicas, later, *rest)

    is_known: BoolArray = np.zeros(n, np.bool_)
    is_known[rows] = True
    old: Int64Array = np.array([pc.fill_null(replicas[name], -1).to_numpy() for name in ("old_ledger", "old_entry")])
    old[:, rows] = [int64(known, name)[others] for name in ("old_ledger", "old_entry")]
    old[:, later_rows] = [int64(later, name)[later_others] for name in ("old_ledger", "old_entry")]
    at, begins = _positions(replicas, "ledger_id", "entry_id"), _positions(replicas, "first_ledger", "first_entry")
    new = np.flatnonzero(~is_known)
    leading = int(new[0]) if len(new) else n
    begin = min((begins[i] for i in new), default=None)
    published = int64(replicas, "publish_time")
    safe = int(published[:leading].max(initial=0)) - CHUNKS_MILLIS
    last = -1
    for i in range(leading):
        if published[i] >= safe or (begin is not None and at[i] >= begin):
            break
        last = i
    # Unknown entries that come again are later than those of the backup; earlier ones are of a third cluster.
    end = Position(*(known[name][-1].as_py() for name in ("old_ledger", "old_entry"))) if known.num_rows else START
    is_later = (old[0] > end.ledger_id) | ((old[0] == end.ledger_id) & (old[1] > end.entry_id))
    comes = (old[0] >= 0) & (is_known | is_later) & (np.arange(n) >= last)
    ids = [*old, int64(replicas, "ledger_id"), int64(replicas, "entry_id")]
    pairs = pa.table([pa.array(column[comes]) for column in ids], schema=PAIRS)
    missing = np.setdiff1d(np.flatnonzero(int64(known, "publish_time") >= since), others)
    return ComparedPartition(
        pairs, at[last] if last >= 0 else START, len(rows), len(new), unclear + later_unclear, len(missing)
    )


def _pairs(rows: pa.Table, others: pa.Table, keys: list[str]) -> tuple[Int64Array, Int64Array]:
    """Pairs rows with those of `others` that have the same keys; each is in one pair at most.

    Returns:
        (indexes of the rows, indexes of the others), int64, shape (pairs,) each.
    """
    sides = [
        side.select(keys).append_column(name, pa.array(np.arange(side.num_rows)))
        for side, name in ((rows, "row"), (others, "other"))
    ]
    found = sides[0].join(sides[1], keys, join_type="inner", use_threads=False).sort_by([("row", "ascending")])
    pairs = int64(found, "row"), int64(found, "other")
    _, first = np.unique(pairs[1], return_index=True)  # an entry that was replicated twice is in one pair
    return pairs[0][first], pairs[1][first]


def _pairs_by_name(
    replicas: pa.Table, known: pa.Table, rows: Int64Array, others: Int64Array
) -> tuple[tuple[Int64Array, Int64Array], int]:
    """Pairs entries of the same producer name, publish time and batch size, in their order.

    If the two brokers have different numbers of such entries, it is unclear which are the same: all count as new.

    Args:
        replicas: the entries of the topic partition.
        known: the entries of the backup.
        rows: the indexes of the replicas to pair, int64, shape (n,).
        others: the indexes of the known entries to pair, int64, shape (m,).

    Returns:
        (pairs, as `_pairs` returns them; number of replicas that are unclear).
    """
    sides = []
    for side, numbers in ((replicas, rows), (known, others)):
        groups: dict[tuple[str, int, int], list[int]] = defaultdict(list)
        columns = (side[name].to_pylist() for name in ("producer_name", "publish_time", "batch_size"))
        keys = list(zip(*columns, strict=True))
        for number in numbers.tolist():
            if keys[number][0] is not None:
                groups[keys[number]].append(number)
        sides.append(groups)
    found: tuple[list[int], list[int]] = ([], [])
    unclear = 0
    for key in sides[0].keys() & sides[1].keys():
        here, there = sides[0][key], sides[1][key]
        if len(here) == len(there):
            found[0].extend(here)
            found[1].extend(there)
        else:
            unclear += len(here)
    return (np.array(found[0], np.int64), np.array(found[1], np.int64)), unclear


def _positions(rows: pa.Table, ledger: str, entry: str) -> list[Position]:
    return [Position(*pair) for pair in zip(rows[ledger].to_pylist(), rows[entry].to_pylist(), strict=True)]


@dataclass(frozen=True)
class BrokerChange:
    """The result of moving a warehouse to another broker. Counts are of the entries that were compared.

    Attributes:
        renumbering: of the warehouse's ids, which has been done.
        known: the number of the other broker's entries that are in the backup.
        new: the number of the other broker's entries that are ingested.
        unclear: the number of new entries that may be in the backup all the same.
        missing: the number of the backup's entries that the other broker lacks.
    """

    renumbering: Renumbering
    known: int
    new: int
    unclear: int
    missing: int

    @property
    def counts(self) -> dict[str, int]:
        """The counts, and the number that was added to ledger ids, by name."""
        return {
            "entries_known": self.known,
            "entries_new": self.new,
            "entries_unclear": self.unclear,
            "entries_not_replicated": self.missing,
            "added_to_ledger_ids": self.renumbering.offset,
        }


def change_broker(
    settings: Settings,
    tables: Tables,
    made_at: int,
    on_progress: OnProgress = lambda table, step, rows: None,
    on_warning: Callable[[str], None] = lambda text: None,
) -> BrokerChange:
    """Renumbers a restored warehouse for the settings' broker, and sets the job's subscriptions to the backup's end.

    Commands that were sent after the backup are not read, because they name messages by ids of the earlier broker.

    Args:
        tables: of the warehouse, taken over, at the versions of the backup.
        made_at: when the backup was made, ms since the epoch.
        on_progress: called with (table, step, number of rows).
        on_warning: called with one line for each missing topic partition, and where messages may come twice.

    Raises:
        PulsarError: the broker does not answer.
        FencedError: somebody else has taken the warehouse over.
    """
    found: dict[str, ComparedPartition] = {}
    brokers, admin = Brokers(settings.pulsar), AdminClient(settings.pulsar)
    try:
        for route in settings.routes:
            number = admin.partitions(route.source)
            for partition in range(number) if number else [-1]:
                name = partition_name(route.source, partition)
                if number is None or admin.internal_stats(name) is None:
                    on_warning(f"{name} is not there: what came after the backup is not read")
                since = compared_since(settings, tables, route.source, partition, made_at)
                _subscribe(brokers, settings, name)
                replicas = read_replicas(brokers, admin, name, since)
                on_progress(name, "entries compared", replicas.num_rows)
                known = _known(tables, route.source, partition, pc.min(replicas["publish_time"]).as_py() or since)
                later = _later(tables, route.source, partition, known)
                found[name] = one = compare(replicas, known, since, later)
                _begin(admin, settings, name, one.read_after, since)
        for name in brokers.partition_names(settings.control.topic):
            _subscribe(brokers, settings, name)
            admin.skip_all(name, settings.pulsar.subscription)
    finally:
        admin.close()
        brokers.close()
    pairs = pa.concat_tables([PAIRS.empty_table(), *(one.pairs for one in found.values())])
    read_after = {name: one.read_after for name, one in found.items() if one.read_after != START}
    renumbering = Renumbering(next_place(tables), pairs, read_after)
    rows = settings.tracker.max_indexes_per_bucket_snapshot_segment
    renumber(tables, renumbering, time.time_ns() // 1_000_000, rows, on_progress)
    totals = {
        name: sum(getattr(one, name) for one in found.values()) for name in ("known", "new", "unclear", "missing")
    }
    return BrokerChange(renumbering, **totals)


def compared_since(settings: Settings, tables: Tables, topic: str, partition: int, made_at: int) -> int:
    """Returns the time since which a topic partition is compared with a backup, ms since the epoch; 0: from the start.

    Since then it may have entries that the backup lacks, though it does not lack any that retention has deleted.
    """
    rows = tables.query("entries", _SQL("last_published", topic=topic, partition=partition))
    published = int64(rows, "publish_time")
    if not len(published):
        return 0
    last = min(int(published[0]), made_at)
    kept_since = min(last - LAST_ENTRIES_MILLIS, made_at - settings.retention.entries_millis)
    return max(0, kept_since, min(int(published.min()), last) - CLOCKS_MILLIS)


def _known(tables: Tables, topic: str, partition: int, since: int) -> pa.Table:
    """Returns the backup's entries of a topic partition published since a time, as `known` of `compare`."""
    return tables.query("entries", _SQL("known_entries", topic=topic, partition=partition, since=since))


def _later(tables: Tables, topic: str, partition: int, known: pa.Table) -> pa.Table:
    """Returns the entries after the last known one of which the delayed index has rows, as `later` of `compare`."""
    last = Position(*(known[name][-1].as_py() for name in ("old_ledger", "old_entry"))) if known.num_rows else START
    sql = _SQL("later_entries", topic=topic, partition=partition, ledger=last.ledger_id, entry=last.entry_id)
    return tables.query("delayed_index", sql)


def _subscribe(brokers: Brokers, settings: Settings, name: str) -> None:
    """Creates the job's subscription to a topic partition where it is missing."""
    consumer = brokers.subscribe(name, settings.pulsar.subscription, max_bytes=1, max_messages=1)
    with suppress(PulsarError):
        consumer.close()


def _begin(admin: AdminClient, settings: Settings, name: str, read_after: Position, since: int) -> None:
    if read_after == START:
        admin.reset_to_time(name, settings.pulsar.subscription, since)
    else:
        admin.reset_to_entry(name, settings.pulsar.subscription, *read_after)
