"""The state anew from the Delta tables alone, where the checkpoint is lost."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pulsar
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable

from conf.settings import Settings
from streaming.clock import Offset
from streaming.pulsar_client import connect
from streaming.receiver import Position
from streaming.routes import subscription_names
from streaming.tables import DELIVERIES, Tables
from tracker.messages import int64
from tracker.rebuilt import REBUILT_KEPT_MILLIS, TAKEN
from tracker.request_log import KEPT_MILLIS
from tracker.shards import shard_of

# Inside the query's folder, so that it is lost with it and never taken for a later one's.
_FOLDER = Path("query/rebuild")

# Releases may have been sent and not written down. They are looked for at the end of the destinations, from this long
# before the last one that was written down.
_UNWRITTEN_MILLIS = 15 * 60 * 1000

_BOOKED = """
SELECT topic, partition, ledger_id, max(entry_id) AS entry_id FROM entries GROUP BY topic, partition, ledger_id
"""

# What was delivered, cancelled or skipped; batch_index -1 is a whole entry, or a message that is one.
_DONE = """
SELECT topic, subscription, ledger_id, entry_id, batch_index, deliver_at FROM deliveries
UNION ALL
SELECT topic, subscription, ledger_id, entry_id, batch_index, deliver_at FROM delayed_index WHERE operation = 'CANCEL'
UNION ALL
SELECT topic, subscription, ledger_id, entry_id, batch_index, 0 FROM outcomes
WHERE result IN ('APPLIED', 'ALREADY_APPLIED') AND ledger_id >= 0
"""

_PENDING = """
SELECT topic, ledger_id, entry_id, batch_index, batch_size, deliver_at FROM delayed_index WHERE operation = 'DELAY'
"""


def rebuild(settings: Settings, tables: Tables, checkpoint: Path) -> dict[str, int]:
    """Prepares a checkpoint that has no query yet, so that the job goes on from the tables and the source topics.

    Entries that are not booked come again from the source topics, where they have not been acknowledged. So what the
    delayed index has of them is removed, and what was delivered of them is kept in mind.

    Returns:
        counts of what was found.

    Raises:
        PulsarError, pulsar.PulsarException: the destinations can't be read.
    """
    booked = _booked(tables)
    unwritten = _write_missing_deliveries(settings, tables)
    _remove_unbooked(tables, booked)

    now = time.time_ns() // 1_000_000
    names = subscription_names(settings)
    taken = _taken(tables.sql(_DONE), names, now)
    pending = tables.sql(_PENDING)
    is_pending, is_unwanted = _pending(pending, taken, names)
    due = int64(pending, "deliver_at")
    first_due = int(due[is_pending].min()) if is_pending.any() else now
    waits = due >= first_due
    shards = shard_of(int64(pending, "ledger_id"), int64(pending, "entry_id"), settings.tracker.shards)
    sealed = np.bincount(shards[waits], minlength=settings.tracker.shards)
    unwanted = np.bincount(shards[waits & is_unwanted], minlength=settings.tracker.shards)
    request_ids = tables.sql(f"SELECT DISTINCT request_id FROM outcomes WHERE applied_at > {now - KEPT_MILLIS}")  # noqa: S608

    folder = checkpoint / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(taken, folder / "taken.parquet")
    tick = int(tables.sql("SELECT coalesce(max(batch_id), 0) AS t FROM deliveries")["t"][0].as_py())
    tick = max(tick, int(tables.sql("SELECT coalesce(max(bucket_id), 0) AS t FROM delayed_index")["t"][0].as_py()))
    offset = Offset(tick=tick, load_horizon=first_due, positions={name: str(p) for name, p in booked.items()})
    meta = {
        "offset": offset.to_json(),
        "sealed": sealed.tolist(),
        "unwanted": unwanted.tolist(),
        "request_ids": request_ids["request_id"].to_pylist(),
        "now": now,
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    return {
        "pending": int(is_pending.sum()),
        "taken_back_or_delivered": taken.num_rows,
        "deliveries_found_at_destinations": unwritten,
        "topic_partitions": len(booked),
    }


class Rebuilt:
    """What `rebuild` prepared, for the source to begin with."""

    def __init__(self, checkpoint: Path) -> None:
        self._folder = checkpoint / _FOLDER

    @property
    def offset(self) -> Offset | None:
        """Where the query begins; None: nothing was rebuilt."""
        meta = self._folder / "meta.json"
        return Offset.from_json(json.loads(meta.read_text())["offset"]) if meta.exists() else None

    def inputs(self, shards: int) -> list[tuple[dict[str, Any], pa.Table]]:
        """For each shard the counts and request ids, and the rows that are taken back or delivered."""
        meta = json.loads((self._folder / "meta.json").read_text())
        taken = pq.read_table(self._folder / "taken.parquet").cast(TAKEN)
        shard = shard_of(int64(taken, "ledger_id"), int64(taken, "entry_id"), shards)
        return [
            (
                {
                    "sealed": meta["sealed"][i],
                    "unwanted": meta["unwanted"][i],
                    "request_ids": meta["request_ids"],
                    "now": meta["now"],
                },
                taken.filter(pa.array(shard == i)),
            )
            for i in range(shards)
        ]


def _booked(tables: Tables) -> dict[str, Position]:
    """By topic partition the last entry that is booked."""
    last: dict[str, Position] = {}
    for row in tables.sql(_BOOKED).to_pylist():
        name = row["topic"] if row["partition"] < 0 else f"{row['topic']}-partition-{row['partition']}"
        position = Position(row["ledger_id"], row["entry_id"])
        last[name] = max(position, last.get(name, position))
    return last


def _remove_unbooked(tables: Tables, booked: dict[str, Position]) -> None:
    """Removes from the delayed index the messages that come again from the source topics."""
    index = tables.sql(
        "SELECT DISTINCT topic, partition, ledger_id FROM delayed_index WHERE operation = 'DELAY'"
    ).to_pylist()
    conditions = []
    for row in index:
        name = row["topic"] if row["partition"] < 0 else f"{row['topic']}-partition-{row['partition']}"
        last = booked.get(name, Position(-1, -1))
        if row["ledger_id"] > last.ledger_id:
            conditions.append(f"ledger_id = {row['ledger_id']}")
        elif row["ledger_id"] == last.ledger_id:
            conditions.append(f"(ledger_id = {row['ledger_id']} AND entry_id > {last.entry_id})")
    if conditions:
        DeltaTable(tables.path("delayed_index")).delete(f"operation = 'DELAY' AND ({' OR '.join(conditions)})")


def _taken(done: pa.Table, names: dict[str, list[str]], now: int) -> pa.Table:
    """The rows of what is done, with their subscription's number, each once; kept for at least a day."""
    number = {(topic, name): i for topic, of_topic in names.items() for i, name in enumerate(of_topic)}
    numbers = [
        number.get(key, -1) for key in zip(done["topic"].to_pylist(), done["subscription"].to_pylist(), strict=True)
    ]
    until = pc.max_element_wise(done["deliver_at"], now + REBUILT_KEPT_MILLIS)
    taken = pa.table(
        [
            pa.array(numbers, pa.int32()),
            done["ledger_id"],
            done["entry_id"],
            done["batch_index"].cast(pa.int32()),
            until.cast(pa.int64()),
        ],
        schema=TAKEN,
    ).filter(pa.array(np.array(numbers) >= 0))
    keys = [name for name in TAKEN.names if name != "until"]
    unique = taken.group_by(keys).aggregate([("until", "max")])
    return unique.rename_columns([*keys, "until"]).select(TAKEN.names).cast(TAKEN)


def _pending(pending: pa.Table, taken: pa.Table, names: dict[str, list[str]]) -> tuple[np.ndarray, np.ndarray]:
    """Which rows a subscription still wants, and which none does."""
    by_message = _count(
        taken.filter(pc.greater_equal(taken["batch_index"], 0)), ["ledger_id", "entry_id", "batch_index"]
    )
    by_entry = _count(taken.filter(pc.less(taken["batch_index"], 0)), ["ledger_id", "entry_id"])
    wanted = np.array([len(names.get(topic, ())) for topic in pending["topic"].to_pylist()], dtype=np.int64)
    keys = zip(*(pending[c].to_pylist() for c in ("ledger_id", "entry_id", "batch_index")), strict=True)
    # A subscription may have taken back the entry and single messages of it: then it counts once.
    counts = np.array(
        [len(by_entry.get((ledger, e), set()) | by_message.get((ledger, e, b), set())) for ledger, e, b in keys],
        dtype=np.int64,
    )
    return counts < wanted, counts >= wanted


def _count(taken: pa.Table, keys: list[str]) -> dict[tuple[int, ...], set[int]]:
    subscriptions: dict[tuple[int, ...], set[int]] = {}
    for *key, subscription in zip(
        *(taken[k].to_pylist() for k in keys), taken["subscription"].to_pylist(), strict=True
    ):
        subscriptions.setdefault(tuple(key), set()).add(subscription)
    return subscriptions


def _write_missing_deliveries(settings: Settings, tables: Tables) -> int:
    """Writes down what the destinations hold and `deliveries` does not; returns how many."""
    newest = tables.sql("SELECT coalesce(max(sent_at), 0) AS t FROM deliveries")["t"][0].as_py()
    since = max(0, int(newest) - _UNWRITTEN_MILLIS)
    known = tables.sql(
        f"SELECT subscription, position FROM deliveries WHERE sent_at >= {since - _UNWRITTEN_MILLIS}"  # noqa: S608
    )
    written = set(zip(known["subscription"].to_pylist(), known["position"].to_pylist(), strict=True))
    rows: list[dict[str, Any]] = []
    client = connect(settings.pulsar)
    try:
        for route in settings.routes:
            for subscription in route.subscriptions:
                for message in _messages_since(client, subscription.destination, since):
                    properties = message.properties()
                    position = properties.get("delaylake.messageId", "")
                    if properties.get("delaylake.source") != route.source or position.count(":") != 3:
                        continue
                    if (subscription.name, position) not in written:
                        written.add((subscription.name, position))
                        rows.append(_delivery(route.source, subscription.name, position, message))
    finally:
        client.close()
    if rows:
        found = pa.Table.from_pylist(rows, schema=DELIVERIES)
        tables.append("deliveries", found, {f"rebuild-{time.time_ns()}": 1})
    return len(rows)


def _delivery(topic: str, subscription: str, position: str, message: pulsar.Message) -> dict[str, Any]:
    ledger, entry, partition, batch_index = (int(part) for part in position.split(":"))
    return {
        "topic": topic,
        "subscription": subscription,
        "partition": partition,
        "ledger_id": ledger,
        "entry_id": entry,
        "batch_index": batch_index,
        "position": position,
        "deliver_at": int(message.properties().get("delaylake.deliverAt", 0)),
        "sent_at": message.publish_timestamp(),
        "short_notice": False,
        "destination": message.topic_name(),
        "destination_message_id": None,
        "batch_id": 0,
    }


def _messages_since(client: pulsar.Client, topic: str, since: int) -> Iterable[pulsar.Message]:
    """The messages that a destination has got since a time, as far as the broker still has them."""
    for partition in client.get_topic_partitions(topic):
        reader = client.create_reader(partition, pulsar.MessageId.earliest, receiver_queue_size=5_000)
        if since:
            reader.seek(since)
        while reader.has_message_available():
            message = reader.read_next(30_000)
            if message.publish_timestamp() >= since:
                yield message
        reader.close()
