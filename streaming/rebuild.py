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
from streaming.parts import REBUILT_MOVED, REBUILT_TAKEN, REBUILT_WAITING
from streaming.pulsar_client import connect
from streaming.receiver import Position
from streaming.routes import subscription_names
from streaming.tables import DELAYED_INDEX, DELIVERIES, Tables
from tracker.commands import COMMANDS, RESCHEDULE
from tracker.messages import int64
from tracker.rebuilt import MOVED, REBUILT_KEPT_MILLIS, TAKEN
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

# What was delivered, cancelled or skipped; batch_index -1 is a whole entry, or a message that is one. A delivery can't
# be undone: its sequence is beyond any. A CANCEL row is as late as what it takes back, or waits for it; one whose
# message is later waited in vain.
_DONE = f"""
SELECT topic, subscription, ledger_id, entry_id, batch_index, deliver_at, {2**62} AS sequence FROM deliveries
UNION ALL
SELECT DISTINCT c.topic, c.subscription, c.ledger_id, c.entry_id, c.batch_index, c.deliver_at, c.sequence
FROM delayed_index AS c
JOIN delayed_index AS i ON i.ledger_id = c.ledger_id AND i.entry_id = c.entry_id
WHERE c.operation = 'CANCEL' AND i.operation = 'DELAY' AND i.sequence IS NULL AND i.deliver_at <= c.deliver_at
    AND c.batch_index IN (-1, i.batch_index)
UNION ALL
SELECT c.topic, c.subscription, c.ledger_id, c.entry_id, c.batch_index, c.deliver_at, c.sequence
FROM delayed_index AS c
LEFT ANTI JOIN (SELECT ledger_id, entry_id FROM delayed_index WHERE operation = 'DELAY') AS i
    ON i.ledger_id = c.ledger_id AND i.entry_id = c.entry_id
WHERE c.operation = 'CANCEL' AND c.deliver_at >= {{now}}
UNION ALL
SELECT topic, subscription, ledger_id, entry_id, batch_index, 0, coalesce(sequence, 0) FROM outcomes
WHERE result IN ('APPLIED', 'ALREADY_APPLIED') AND operation IN ('CANCEL', 'SKIP') AND ledger_id >= 0
"""  # noqa: S608

# Messages that were restored, or moved, for a subscription. A MOVE alone does not say to what time.
_UNDONE = """
SELECT topic, subscription, ledger_id, entry_id, batch_index, operation, sequence, deliver_at FROM delayed_index
WHERE operation IN ('RESTORE', 'MOVE') OR (operation = 'DELAY' AND sequence IS NOT NULL)
UNION ALL
SELECT topic, subscription, ledger_id, entry_id, batch_index, operation, sequence, coalesce(deliver_at, 0) FROM outcomes
WHERE result = 'APPLIED' AND operation IN ('RESTORE', 'RESCHEDULE')
"""

_SWITCHES = """
SELECT topic, subscription, operation FROM outcomes WHERE result = 'APPLIED' AND operation IN ('PAUSE', 'RESUME')
ORDER BY sequence
"""

_PENDING = """
SELECT topic, partition, ledger_id, entry_id, batch_index, batch_size, deliver_at, subscription,
       coalesce(sequence, 0) AS sequence
FROM delayed_index WHERE operation = 'DELAY'
"""

# (topic, subscription, ledger_id, entry_id, message); a message alone in its entry is number 0
_Key = tuple[str, str, int, int, int]


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
    tick = _last_tick(tables)
    restored, moves = _undone(tables.sql(_UNDONE))
    done = _without_restored(tables.sql(_DONE.format(now=now)), restored, tables)
    taken = _taken(done, names, now)
    waiting = _complete_moves(tables, moves, done, names, tick)
    moved = _moved(moves, names, now)
    pending = tables.sql(_PENDING)
    is_pending, is_unwanted = _pending(pending, taken, moves, names)
    due = int64(pending, "deliver_at")
    first_due = int(due[is_pending].min()) if is_pending.any() else now
    waits = due >= first_due
    shards = shard_of(int64(pending, "ledger_id"), int64(pending, "entry_id"), settings.tracker.shards)
    sealed = np.bincount(shards[waits], minlength=settings.tracker.shards)
    unwanted = np.bincount(shards[waits & is_unwanted], minlength=settings.tracker.shards)
    request_ids = tables.sql(f"SELECT DISTINCT request_id FROM outcomes WHERE applied_at > {now - KEPT_MILLIS}")  # noqa: S608

    folder = checkpoint / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in ((REBUILT_TAKEN, taken), (REBUILT_MOVED, moved), (REBUILT_WAITING, waiting)):
        pq.write_table(rows, folder / f"{name}.parquet")
    offset = Offset(tick=tick, load_horizon=first_due, positions={name: str(p) for name, p in booked.items()})
    meta = {
        "offset": offset.to_json(),
        "sealed": sealed.tolist(),
        "unwanted": unwanted.tolist(),
        "request_ids": request_ids["request_id"].to_pylist(),
        "paused": _paused(tables.sql(_SWITCHES), names),
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

    @property
    def shards(self) -> int:
        """For how many shards."""
        return len(json.loads((self._folder / "meta.json").read_text())["sealed"])

    def inputs(self, shards: int) -> list[tuple[dict[str, Any], dict[str, pa.Table]]]:
        """For each shard the counts, request ids and pauses, and by kind its rows."""
        meta = json.loads((self._folder / "meta.json").read_text())
        kinds = ((REBUILT_TAKEN, TAKEN), (REBUILT_MOVED, MOVED), (REBUILT_WAITING, COMMANDS))
        tables = {kind: pq.read_table(self._folder / f"{kind}.parquet").cast(schema) for kind, schema in kinds}
        shard = {
            kind: shard_of(int64(rows, "ledger_id"), int64(rows, "entry_id"), shards) for kind, rows in tables.items()
        }
        return [
            (
                {**meta, "sealed": meta["sealed"][i], "unwanted": meta["unwanted"][i]},
                {kind: rows.filter(pa.array(shard[kind] == i)) for kind, rows in tables.items()},
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
        # A moved row does not come again; its message waits for it.
        DeltaTable(tables.path("delayed_index")).delete(
            f"operation = 'DELAY' AND sequence IS NULL AND ({' OR '.join(conditions)})"
        )


def _last_tick(tables: Tables) -> int:
    """The last tick that any table has rows of."""
    columns = [("deliveries", "batch_id"), ("outcomes", "batch_id"), ("delayed_index", "bucket_id")]
    return max(int(tables.sql(f"SELECT coalesce(max({c}), 0) AS t FROM {n}")["t"][0].as_py()) for n, c in columns)  # noqa: S608


def _keys(rows: pa.Table) -> list[_Key]:
    columns = (rows[c].to_pylist() for c in ("topic", "subscription", "ledger_id", "entry_id", "batch_index"))
    return [(*key, max(batch_index, 0)) for *key, batch_index in zip(*columns, strict=True)]


def _undone(rows: pa.Table) -> tuple[dict[_Key, int], dict[_Key, dict[str, Any]]]:
    """The sequence of each message's last restore, and its last move."""
    restored: dict[_Key, int] = {}
    moves: dict[_Key, dict[str, Any]] = {}
    for key, row in zip(_keys(rows), rows.to_pylist(), strict=True):
        if row["operation"] == "RESTORE":
            restored[key] = max(row["sequence"], restored.get(key, 0))
        else:
            row["is_time_known"] = row["operation"] != "MOVE"
            if key not in moves or _rank(moves[key]) < _rank(row):
                moves[key] = row
    return restored, moves


def _rank(move: dict[str, Any]) -> tuple[int, bool]:
    return move["sequence"], move["is_time_known"]


def _without_restored(done: pa.Table, restored: dict[_Key, int], tables: Tables) -> pa.Table:
    """What is done, without the messages that were restored later; the rest of their entries one by one."""
    if not restored:
        return done
    last: dict[_Key, int] = {}
    for key, index, sequence in zip(
        _keys(done), done["batch_index"].to_pylist(), done["sequence"].to_pylist(), strict=True
    ):
        key = (*key[:4], -1) if index < 0 else key
        last[key] = max(sequence, last.get(key, 0))
    entries = {key[:4] for key in restored}
    sizes = {
        (row["ledger_id"], row["entry_id"]): row["n"]
        for row in tables.sql(
            "SELECT ledger_id, entry_id, max(batch_size) AS n FROM delayed_index WHERE operation = 'DELAY' "
            "GROUP BY ledger_id, entry_id"
        ).to_pylist()
    }
    rows = []
    for row in done.to_pylist():
        entry = (row["topic"], row["subscription"], row["ledger_id"], row["entry_id"])
        if entry not in entries:
            rows.append(row)
            continue
        of_entry = range(sizes.get((row["ledger_id"], row["entry_id"]), 1))
        for message in of_entry if row["batch_index"] < 0 else [row["batch_index"]]:
            taken = max(last.get((*entry, message), 0), last.get((*entry, -1), 0))
            if taken > restored.get((*entry, message), -1):
                rows.append({**row, "batch_index": message if len(of_entry) > 1 else row["batch_index"]})
    return pa.Table.from_pylist(rows, schema=done.schema)


def _complete_moves(
    tables: Tables,
    moves: dict[_Key, dict[str, Any]],
    done: pa.Table,
    names: dict[str, list[str]],
    tick: int,
) -> pa.Table:
    """Writes down the rows of moves that were not sealed.

    Returns:
        commands for the messages that come in again, which are taken out of the moves.
    """
    if not moves:
        return COMMANDS.empty_table()
    rows = tables.sql("SELECT * FROM delayed_index WHERE operation = 'DELAY'")
    sealed = {(*key, s) for key, s in zip(_keys(rows), rows["sequence"].to_pylist(), strict=True) if s is not None}
    any_row = {key[2:]: i for i, key in enumerate(_keys(rows))}
    finished = set(_keys(done.filter(pc.greater_equal(done["sequence"], 2**62))))
    missing, waiting = [], []
    for key, move in list(moves.items()):
        if (*key, move["sequence"]) in sealed or key in finished or not move["is_time_known"]:
            continue
        if (i := any_row.get(key[2:])) is not None:
            extra = {name: move[name] for name in ("deliver_at", "subscription", "sequence")}
            missing.append({**rows.slice(i, 1).to_pylist()[0], **extra, "bucket_id": tick})
        else:
            del moves[key]
            if key[1] in names.get(key[0], ()):
                waiting.append(_reschedule(move, names))
    if missing:
        found = pa.Table.from_pylist(missing, schema=DELAYED_INDEX)
        tables.append("delayed_index", found, {f"rebuild-{time.time_ns()}": 1})
    return pa.Table.from_pylist(waiting, schema=COMMANDS)


def _reschedule(move: dict[str, Any], names: dict[str, list[str]]) -> dict[str, Any]:
    return {
        **{name: move[name] for name in ("topic", "ledger_id", "entry_id", "batch_index", "deliver_at")},
        "request_id": f"rebuild-{move['sequence']}",
        "kind": RESCHEDULE,
        "operation": RESCHEDULE.upper(),
        "partition": -1,
        "subscriptions": 1 << names[move["topic"]].index(move["subscription"]),
        "issued_by": "rebuild",
        "issued_at": 0,
    }


def _moved(moves: dict[_Key, dict[str, Any]], names: dict[str, list[str]], now: int) -> pa.Table:
    """The moves as the shards keep them."""
    rows = [
        {
            **{name: move[name] for name in ("ledger_id", "entry_id", "batch_index", "sequence", "deliver_at")},
            "subscription": names[move["topic"]].index(move["subscription"]),
            "until": max(move["deliver_at"], now + REBUILT_KEPT_MILLIS),
        }
        for move in moves.values()
        if move["subscription"] in names.get(move["topic"], ())
    ]
    return pa.Table.from_pylist(rows, schema=MOVED)


def _paused(switches: pa.Table, names: dict[str, list[str]]) -> dict[str, int]:
    """By topic the subscriptions that are paused, as bits."""
    paused: dict[str, int] = {}
    for row in switches.to_pylist():
        if row["subscription"] in names.get(row["topic"], ()):
            bit = 1 << names[row["topic"]].index(row["subscription"])
            before = paused.get(row["topic"], 0)
            paused[row["topic"]] = before | bit if row["operation"] == "PAUSE" else before & ~bit
    return {topic: bits for topic, bits in paused.items() if bits}


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


def _pending(
    pending: pa.Table, taken: pa.Table, moves: dict[_Key, dict[str, Any]], names: dict[str, list[str]]
) -> tuple[np.ndarray, np.ndarray]:
    """Which rows a subscription still wants, and which none does."""
    by_message = _count(
        taken.filter(pc.greater_equal(taken["batch_index"], 0)), ["ledger_id", "entry_id", "batch_index"]
    )
    by_entry = _count(taken.filter(pc.less(taken["batch_index"], 0)), ["ledger_id", "entry_id"])
    own = [
        {s for s, of_topic_name in enumerate(of_topic) if name in (None, of_topic_name)}
        for of_topic, name in zip(
            (names.get(topic, []) for topic in pending["topic"].to_pylist()),
            pending["subscription"].to_pylist(),
            strict=True,
        )
    ]
    last = {key: move["sequence"] for key, move in moves.items()}
    is_wanted = np.zeros(pending.num_rows, dtype=np.bool_)
    columns = (pending[c].to_pylist() for c in ("topic", "ledger_id", "entry_id", "batch_index", "sequence"))
    for i, (topic, ledger, e, b, sequence) in enumerate(zip(*columns, strict=True)):
        wants = own[i] - by_entry.get((ledger, e), set()) - by_message.get((ledger, e, b), set())
        if last:
            # Of a message's rows, a subscription wants that of its last move.
            wants = {s for s in wants if last.get((topic, names[topic][s], ledger, e, max(b, 0)), 0) == sequence}
        is_wanted[i] = bool(wants)
    return is_wanted, ~is_wanted


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
