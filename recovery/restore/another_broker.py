"""A restore where another broker is, to which the source topics were replicated: which of its entries the backup has.

A broker that replicates an entry tells where it has it itself, as Pulsar 4.2 does. With the time at which it was
published, which is replicated, too, that says which entry of the backup it is. Where it does not tell, and for what was
published there and replicated to the earlier broker, the producer's name and that time do. (The sequence id would, too,
but a client is not told it.)
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pulsar
import pyarrow as pa
import pyarrow.compute as pc

from broker.client import close_quietly, connect, crypto_key_reader, subscribe
from broker.clusters.replicas import read_replicas
from broker.position import START, Position
from broker.pulsar_admin.admin_rest import AdminClient
from conf.settings import Settings
from recovery.rebuild.delivered import CLOCKS_MILLIS, partition_name
from tracker.messages import FIRST_IMPORTED_LEDGER, BoolArray, Int64Array, int64
from warehouse.delta.tables import OnProgress, Tables, literal
from warehouse.renumbering import PAIRS, Renumbering, next_place, renumber

# The chunks of a message come within a minute and a half, and with them other entries.
_CHUNKS_MILLIS = 2 * 60_000

_LAST_ENTRIES = 1_000  # whose least time of publishing counts: clocks differ


@dataclass(frozen=True)
class Partition:
    """What a topic partition of the other broker has of a backup.

    Attributes:
        pairs: PAIRS: the entries that come again, by their ids in both places, and before them `read_after`.
        read_after: the last entry that does not come again; START: there is none.
        known: how many entries the backup has.
        new: how many it does not have.
        unclear: how many of the new ones it may have all the same.
        missing: how many entries of the backup the topic partition does not have.
    """

    pairs: pa.Table = field(default_factory=PAIRS.empty_table)
    read_after: Position = START
    known: int = 0
    new: int = 0
    unclear: int = 0
    missing: int = 0


def compare(replicas: pa.Table, known: pa.Table, since: int = 0) -> Partition:
    """Finds out from where a topic partition is to be read, so that no entry is left out that the backup lacks.

    All entries that are read up to there are in the backup; so are some after it, which come again, and are known by
    their pairs of ids. It is well before the first new one: a chunked message that is not whole may have begun earlier.

    Args:
        replicas: REPLICAS, in the topic's order.
        known: the durable entries of the backup, in their order: old_ledger, old_entry, publish_time, producer_name and
            batch_size.
        since: `missing` counts entries that were published then or later, ms since the epoch.
    """
    n = replicas.num_rows
    if not n:
        return Partition(missing=known.num_rows)
    is_told = pc.is_valid(replicas["old_ledger"]).to_numpy(zero_copy_only=False)
    by_id = _pairs(replicas, known, ["old_ledger", "old_entry", "publish_time"])
    rest = np.setdiff1d(np.flatnonzero(~is_told), by_id[0]), np.setdiff1d(np.arange(known.num_rows), by_id[1])
    by_name, unclear = _pairs_by_name(replicas, known, *rest)
    rows, others = (np.concatenate(both) for both in zip(by_id, by_name, strict=True))

    is_known: BoolArray = np.zeros(n, np.bool_)
    is_known[rows] = True
    old: Int64Array = np.array([pc.fill_null(replicas[name], -1).to_numpy() for name in ("old_ledger", "old_entry")])
    old[:, rows] = [int64(known, name)[others] for name in ("old_ledger", "old_entry")]
    at, begins = _positions(replicas, "ledger_id", "entry_id"), _positions(replicas, "first_ledger", "first_entry")
    new = np.flatnonzero(~is_known)
    leading = int(new[0]) if len(new) else n
    begin = min((begins[i] for i in new), default=None)
    published = int64(replicas, "publish_time")
    safe = int(published[:leading].max(initial=0)) - _CHUNKS_MILLIS
    last = -1
    for i in range(leading):
        if published[i] >= safe or (begin is not None and at[i] >= begin):
            break
        last = i
    # Those that are not known are later than what the backup has: others are of a third cluster.
    end = Position(*(known[name][-1].as_py() for name in ("old_ledger", "old_entry"))) if known.num_rows else START
    is_later = (old[0] > end.ledger_id) | ((old[0] == end.ledger_id) & (old[1] > end.entry_id))
    comes = (old[0] >= 0) & (is_known | is_later) & (np.arange(n) >= last)
    ids = [*old, int64(replicas, "ledger_id"), int64(replicas, "entry_id")]
    pairs = pa.table([pa.array(column[comes]) for column in ids], schema=PAIRS)
    missing = np.setdiff1d(np.flatnonzero(int64(known, "publish_time") >= since), others)
    return Partition(pairs, at[last] if last >= 0 else START, len(rows), len(new), unclear, len(missing))


def _pairs(rows: pa.Table, others: pa.Table, keys: list[str]) -> tuple[Int64Array, Int64Array]:
    """Pairs rows with others that have the same keys: the numbers of both, each at most once."""
    sides = [
        side.select(keys).append_column(name, pa.array(np.arange(side.num_rows)))
        for side, name in ((rows, "row"), (others, "other"))
    ]
    found = sides[0].join(sides[1], keys, join_type="inner", use_threads=False).sort_by([("row", "ascending")])
    pairs = int64(found, "row"), int64(found, "other")
    _, first = np.unique(pairs[1], return_index=True)  # what was replicated twice is known once
    return pairs[0][first], pairs[1][first]


def _pairs_by_name(
    replicas: pa.Table, known: pa.Table, rows: Int64Array, others: Int64Array
) -> tuple[tuple[Int64Array, Int64Array], int]:
    """Pairs entries by their producers' names, times and sizes, in their order, where both places have as many of them.

    Where they have not, it is not clear which ones those of the backup are: all count as new.

    Args:
        rows: the numbers of the replicas that are paired, int64, (n,).
        others: those of the known entries, int64, (m,).

    Returns:
        the pairs, and how many replicas are not paired although the backup has such entries.
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
class Move:
    """How a warehouse goes on with another broker.

    Attributes:
        renumbering: of its ids, which has been done.
        known: how many entries the other broker has of those that the backup has, as far as they were compared.
        new: how many it has that are taken in.
        unclear: how many of these the backup may have all the same.
        missing: how many of the backup's, published in the time that was compared, it does not have.
    """

    renumbering: Renumbering
    known: int
    new: int
    unclear: int
    missing: int

    @property
    def counts(self) -> dict[str, int]:
        """The counts, by names that say what they are of, and what was added to ledger ids."""
        return {
            "entries_known": self.known,
            "entries_new": self.new,
            "entries_unclear": self.unclear,
            "entries_not_replicated": self.missing,
            "added_to_ledger_ids": self.renumbering.offset,
        }


def move(
    settings: Settings,
    tables: Tables,
    made_at: int,
    on_progress: OnProgress = lambda table, step, rows: None,
    on_warning: Callable[[str], None] = lambda text: None,
) -> Move:
    """Makes a restored warehouse one of the settings' broker, and has the job's subscriptions begin where it ends.

    Commands that were sent after the backup are not read: they name messages by ids of the earlier broker.

    Args:
        tables: of the warehouse, taken over, at the versions of the backup.
        made_at: when the backup was made, ms since the epoch.
        on_warning: called with one line for each topic partition that is not there, and where something may come twice.

    Raises:
        pulsar.PulsarException, PulsarError: the broker does not answer.
        FencedError: somebody else has taken the warehouse over.
    """
    found: dict[str, Partition] = {}
    client, admin = connect(settings.pulsar), AdminClient(settings.pulsar)
    try:
        for route in settings.routes:
            number = admin.partitions(route.source)
            for partition in range(number) if number else [-1]:
                name = partition_name(route.source, partition)
                if number is None or admin.internal_stats(name) is None:
                    on_warning(f"{name} is not there: what came after the backup is not read")
                since = _since(tables, route.source, partition, made_at)
                _subscribe(client, settings, name)
                replicas = read_replicas(client, settings.pulsar, admin, name, since)
                on_progress(name, "entries compared", replicas.num_rows)
                known = _known(tables, route.source, partition, pc.min(replicas["publish_time"]).as_py() or since)
                found[name] = one = compare(replicas, known, since)
                _begin(admin, settings, name, one.read_after, since)
        _subscribe(client, settings, settings.control.topic)
        for name in client.get_topic_partitions(settings.control.topic):
            admin.skip_all(name, settings.pulsar.subscription)
    finally:
        admin.close()
        client.close()
    pairs = pa.concat_tables([PAIRS.empty_table(), *(one.pairs for one in found.values())])
    read_after = {name: one.read_after for name, one in found.items() if one.read_after != START}
    renumbering = Renumbering(next_place(tables), pairs, read_after)
    rows = settings.tracker.max_indexes_per_bucket_snapshot_segment
    renumber(tables, renumbering, time.time_ns() // 1_000_000, rows, on_progress)
    totals = {
        name: sum(getattr(one, name) for one in found.values()) for name in ("known", "new", "unclear", "missing")
    }
    return Move(renumbering, **totals)


def _since(tables: Tables, topic: str, partition: int, made_at: int) -> int:
    """Returns from when on a topic partition may have entries that the backup lacks, ms; 0: all may be such."""
    last = tables.query(
        "entries",
        "SELECT min(publish_time) AS published FROM (SELECT publish_time FROM entries "  # noqa: S608
        f"WHERE {_of(topic, partition)} ORDER BY ledger_id DESC, entry_id DESC LIMIT {_LAST_ENTRIES}) AS last",
    )["published"][0].as_py()
    return 0 if last is None else max(0, min(last, made_at) - CLOCKS_MILLIS)


def _known(tables: Tables, topic: str, partition: int, since: int) -> pa.Table:
    """Returns a topic partition's entries that were published at a time or later, as `compare` wants them."""
    return tables.query(
        "entries",
        "SELECT ledger_id AS old_ledger, entry_id AS old_entry, publish_time, producer_name, batch_size FROM entries "  # noqa: S608
        f"WHERE {_of(topic, partition)} AND publish_time >= {since} ORDER BY ledger_id, entry_id",
    )


def _of(topic: str, partition: int) -> str:
    return f"topic = {literal(topic)} AND partition = {partition} AND ledger_id < {FIRST_IMPORTED_LEDGER}"


def _subscribe(client: pulsar.Client, settings: Settings, name: str) -> None:
    """Makes the job's subscription where there is none."""
    key_reader = crypto_key_reader(settings.pulsar)
    for partition in client.get_topic_partitions(name):
        close_quietly(subscribe(client, partition, settings.pulsar.subscription, key_reader))


def _begin(admin: AdminClient, settings: Settings, name: str, read_after: Position, since: int) -> None:
    if read_after == START:
        admin.reset_to_time(name, settings.pulsar.subscription, since)
    else:
        admin.reset_to_entry(name, settings.pulsar.subscription, *read_after)
