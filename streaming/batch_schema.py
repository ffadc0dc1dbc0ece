"""What passes between source, operator and sinks in a batch: each kind of row is declared here, once, for both sides.

The source packs input with `input_rows`, the operator reads it with `read_input`. The operator packs output with
`output_rows`, the sink reads it with `BatchOutput`. Spark's columns of these rows are in `streaming.operator.schemas`.
Rows live as long as their batch, so both sides are of one program: a checkpoint keeps the names of files in
prepared states alone (`streaming.checkpoint.prepared`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.time_zones import TimeZones
from tracker.commands.kinds import ANSWER
from tracker.entry_log import ENTRIES, ENTRY_LOG_ROWS
from tracker.in_flight import IN_ORDER, PLANNED
from tracker.message_state.parking import Round, Rounds
from tracker.messages import MESSAGES, Int64Array, concat, has_keys, int64, is_among, where
from tracker.packing import in_parts, pack, unpack
from tracker.rebuilt import LIVE_KEYS, MOVED, NOT_TO_DELIVER, OCCURRENCES_DONE, PARKED_ENDS, Rebuilt
from tracker.schemas import CANCEL_ROWS, COMMAND_ROWS, KNOWN, OUTCOME_ROWS, PauseChange
from tracker.sharding import shard_of, shards_of
from tracker.tick import Effects, TickInput

InputRow = tuple[int, str, bytes]  # Spark's key of the shard, a value of `InputKind`, body
OutputRow = tuple[int, str, int, bytes]  # the shard's number, a value of `OutputKind`, tick, body

# Assigns rows to shards: called with (rows, number of shards), it yields (shard, its rows).
Routing = Callable[[Any, int], Iterator[tuple[int, Any]]]


def by_message(rows: pa.Table, shards: int) -> Iterator[tuple[int, pa.Table]]:
    """Gives each row to the shard that has its message."""
    yield from _grouped(rows, shards_of(rows, shards))


def by_other_home(rows: pa.Table, shards: int) -> Iterator[tuple[int, pa.Table]]:
    """Gives rows with a schedule key to the homes of their entries, where another shard has the message."""
    if shards > 1 and has_keys(rows):
        homes = shard_of(int64(rows, "ledger_id"), int64(rows, "entry_id"), shards)
        is_elsewhere = homes != shards_of(rows, shards)
        yield from _grouped(where(rows, is_elsewhere), homes[is_elsewhere])


def by_message_and_home(rows: pa.Table, shards: int) -> Iterator[tuple[int, pa.Table]]:
    """Gives each row to the shard that has its message, and to the home of its entry."""
    yield from by_message(rows, shards)
    yield from by_other_home(rows, shards)


def to_others(rows: pa.Table, shards: int) -> Iterator[tuple[int, pa.Table]]:
    """Gives each row to all shards but the home of its entry."""
    homes = shard_of(int64(rows, "ledger_id"), int64(rows, "entry_id"), shards)
    yield from ((shard, where(rows, homes != shard)) for shard in range(shards))


def to_all(value: Any, shards: int) -> Iterator[tuple[int, Any]]:
    """Gives every shard the same."""
    yield from ((shard, value) for shard in range(shards))


def to_each(values: Mapping[int, Any], shards: int) -> Iterator[tuple[int, Any]]:
    """Gives every shard what the caller has made for it: values by shard number."""
    yield from values.items()


def _grouped(rows: pa.Table, shards: Int64Array) -> Iterator[tuple[int, pa.Table]]:
    numbers = np.unique(shards).tolist()
    for shard in numbers:
        yield shard, rows if len(numbers) == 1 else rows.filter(pa.array(shards == shard))


@dataclass(frozen=True)
class Rows:
    """A body of packed rows; many rows go in several bodies.

    Attributes:
        schema: the columns when the operator has read them; rows of earlier versions may lack some.
    """

    schema: pa.Schema

    def pack(self, rows: pa.Table) -> Iterator[bytes]:
        """Yields the bodies; none without rows."""
        return (pack(part) for part in in_parts(rows))

    def read(self, bodies: Iterable[bytes]) -> pa.Table:
        """Returns the rows of all bodies."""
        return concat((unpack(bytes(body)) for body in bodies), self.schema)


@dataclass(frozen=True)
class Value:
    """A body that is one value.

    Attributes:
        to_body: packs the value.
        from_body: unpacks it.
        join: joins the values of several tasks, in any order; None: there is one, or they are all the same.
    """

    to_body: Callable[[Any], bytes]
    from_body: Callable[[bytes], Any]
    join: Callable[[list[Any]], Any] | None = None

    def pack(self, value: Any) -> Iterator[bytes]:
        """Yields the body."""
        yield self.to_body(value)

    def read(self, bodies: Iterable[bytes]) -> Any:
        """Returns the value."""
        values = [self.from_body(bytes(body)) for body in bodies]
        return values[-1] if self.join is None else self.join(values)


def _to_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _pack_pause_changes(changes: list[PauseChange]) -> bytes:
    return _to_json([asdict(change) for change in changes])


def _read_pause_changes(body: bytes) -> list[PauseChange]:
    return [PauseChange(**change) for change in json.loads(body)]


def _read_rebuilt(body: bytes) -> Rebuilt:
    """Reads what a prepared state has beside its rows; they come as kinds of their own."""
    values = json.loads(body)
    hashes = values["request_ids"]
    return Rebuilt(
        sealed=values["sealed"],
        unwanted=values["unwanted"],
        request_ids=hashes if isinstance(hashes, dict) else dict.fromkeys(hashes, 0),  # an earlier version's
        message_requests=values.get("message_requests", {}),  # an earlier version prepared none
        paused=values["paused"],
        shaped_until=values.get("shaped_until", {}),  # an earlier version prepared none
        released=values["released"],
    )


def _read_rounds(body: bytes) -> Rounds:
    found = json.loads(body)
    return {topic: {name: Round(*one) for name, one in names.items()} for topic, names in found.items()}


def _joined_rounds(parts: list[Rounds]) -> Rounds:
    """Joins the rounds that several tasks have read; of one subscription's that counts which goes further."""
    joined: dict[str, dict[str, Round]] = {}
    for rounds in parts:
        for topic, names in rounds.items():
            for name, one in names.items():
                before = joined.setdefault(topic, {}).get(name, one)
                joined[topic][name] = max(before, one, key=lambda found: (found.until is None, found.until or 0))
    return joined


_MESSAGES = Rows(MESSAGES)
_JSON = Value(_to_json, json.loads)
_PAUSE_CHANGES = Value(_pack_pause_changes, _read_pause_changes)


class InputKind(StrEnum):
    """The kinds of the operator's input: body, shards that get it, and who takes it in which of their fields."""

    body: Rows | Value
    routing: Routing
    taker: type | None
    field: str

    def __new__(
        cls, name: str, body: Rows | Value, routing: Routing, taker: type | None = None, field: str = ""
    ) -> InputKind:
        """Makes a kind.

        Args:
            name: the value of the column `kind`.
            body: how content is packed and read.
            routing: which shards get it.
            taker: the class of which the operator makes an object for the shard; None: the operator needs it itself.
            field: the object's field.
        """
        kind = str.__new__(cls, name)
        kind._value_ = name
        kind.body, kind.routing, kind.taker, kind.field = body, routing, taker, field
        return kind

    TICK = "tick", _JSON, to_all  # the offset
    TIME_ZONES = "time_zones", Value(bytes, TimeZones.unpack), to_all  # as `TimeZones.pack`, where others are in use
    MESSAGES = "messages", _MESSAGES, by_message, TickInput, "messages"
    NOTES = "notes", Rows(ENTRY_LOG_ROWS), by_other_home, TickInput, "elsewhere"
    SEGMENT = "segment", _MESSAGES, by_message, TickInput, "segment"
    COMMANDS = "commands", Rows(COMMAND_ROWS), by_message, TickInput, "commands"  # and copies: see `command_copies`
    HANDED_OVER = "handed_over", Rows(COMMAND_ROWS), to_others, TickInput, "handed_over"
    REQUEST_IDS = "request_ids", _JSON, to_all, TickInput, "request_ids"
    MESSAGE_REQUESTS = "message_requests", _JSON, to_all, TickInput, "message_requests"
    PAUSE_CHANGES = "pause_changes", _PAUSE_CHANGES, to_all, TickInput, "pause_changes"
    KNOWN_MESSAGES = "known_messages", Rows(KNOWN), by_message_and_home, TickInput, "known_messages"
    PAYLOAD_ROWS = "payload_rows", _MESSAGES, by_message, TickInput, "payload_rows"
    DRAINED = "drained", _MESSAGES, by_message, TickInput, "drained"
    ROUNDS = "rounds", Value(_to_json, _read_rounds, _joined_rounds), to_all, TickInput, "rounds"
    REJECTED_COMMANDS = "rejected_commands", _MESSAGES, by_message, TickInput, "rejected_commands"
    REJECTED = "rejected", _MESSAGES, by_message, TickInput, "rejected"
    REBUILT = "rebuilt", Value(_to_json, _read_rebuilt), to_each, TickInput, "rebuilt"
    # A prepared state has a file for each of these, of which the name is the file's.
    REBUILT_CANCELLED = "rebuilt_cancelled", Rows(NOT_TO_DELIVER), to_each, Rebuilt, "cancelled"
    REBUILT_DELIVERED = "rebuilt_delivered", Rows(NOT_TO_DELIVER), to_each, Rebuilt, "delivered"
    REBUILT_REJECTED = "rebuilt_rejected", Rows(NOT_TO_DELIVER), to_each, Rebuilt, "rejected"
    REBUILT_MOVED = "rebuilt_moved", Rows(MOVED), to_each, Rebuilt, "moved"
    REBUILT_WAITING = "rebuilt_waiting", Rows(COMMAND_ROWS), to_each, Rebuilt, "waiting"
    REBUILT_KEYS = "rebuilt_keys", Rows(LIVE_KEYS), to_each, Rebuilt, "keys"
    REBUILT_OCCURRENCES = "rebuilt_occurrences", Rows(OCCURRENCES_DONE), to_each, Rebuilt, "occurrences"
    REBUILT_ENDS = "rebuilt_ends", Rows(PARKED_ENDS), to_each, Rebuilt, "ends"
    REBUILT_OUTCOMES = "rebuilt_outcomes", Rows(OUTCOME_ROWS), to_each  # to be published (again)


def input_rows(kind: InputKind, content: Any, shard_keys: list[int]) -> list[InputRow]:
    """Packs content for the shards that its kind's routing gives it to.

    Args:
        kind: of the content.
        content: rows, or a value, as the kind's body and routing take it.
        shard_keys: Spark's key of each shard's rows, by shard number.
    """
    if isinstance(kind.body, Rows) and kind.routing is not to_each and not content.num_rows:
        return []
    if kind.routing is to_all:
        bodies = list(kind.body.pack(content))  # once for all shards
        return [(key, kind.value, body) for key in shard_keys for body in bodies]
    return [
        (shard_keys[shard], kind.value, body)
        for shard, of_shard in kind.routing(content, len(shard_keys))
        for body in kind.body.pack(of_shard)
    ]


def command_copies(
    commands: pa.Table, known: pa.Table, keyed: Collection[str], shard_keys: list[int]
) -> list[InputRow]:
    """Packs copies of commands for shards that have their messages and are not the homes of the entries.

    Args:
        commands: as COMMAND_ROWS.
        known: as KNOWN: messages in the tables, of the entries that the commands name. An entry may have others, which
            a shard has not sealed yet.
        keyed: the topics that have had schedule keys; in other topics each message is in the home of its entry.
        shard_keys: Spark's key of each shard's rows, by shard number.
    """
    if len(shard_keys) == 1 or not keyed or not commands.num_rows:
        return []
    is_by_id = pc.and_(pc.greater_equal(commands["ledger_id"], 0), pc.is_in(commands["topic"], pa.array(sorted(keyed))))
    rows = commands.filter(pc.and_(is_by_id, pc.not_equal(commands["kind"], ANSWER)))
    homes = shard_of(int64(rows, "ledger_id"), int64(rows, "entry_id"), len(shard_keys))
    known_shards = shards_of(known, len(shard_keys))
    is_known = is_among(rows, _known_in_full(known), ["ledger_id", "entry_id"])
    copies = []
    for shard, key in enumerate(shard_keys):
        has = is_among(rows, where(known, known_shards == shard), ["ledger_id", "entry_id"]) | ~is_known
        bodies = InputKind.COMMANDS.body.pack(where(rows, has & (homes != shard)))
        copies += [(key, InputKind.COMMANDS.value, body) for body in bodies]
    return copies


def _known_in_full(known: pa.Table) -> pa.Table:
    """Returns the entries with all of their messages among some, as KNOWN; of another one a shard may have the rest."""
    entries = known.group_by(["ledger_id", "entry_id"]).aggregate(
        [("batch_size", "max"), ("batch_index", "count"), ("batch_index", "min")]
    )
    is_there = pc.greater_equal(entries["batch_index_count"], entries["batch_size_max"])
    return entries.filter(pc.or_(is_there, pc.less(entries["batch_index_min"], 0)))  # a row for a whole entry


def read_input(rows: Iterable[Any]) -> dict[InputKind, Any]:
    """Reads a shard's input of a batch.

    Args:
        rows: all rows of the shard, with `kind` and `body`.

    Returns:
        the content by kind; kinds without a row are left out.
    """
    bodies: dict[str, list[bytes]] = {}
    for row in rows:
        bodies.setdefault(row.kind, []).append(row.body)
    return {kind: kind.body.read(bodies[kind]) for kind in InputKind if kind in bodies}


def fields_of(taker: type, received: Mapping[InputKind, Any]) -> dict[str, Any]:
    """Returns the fields of an object that a shard takes its input as, as far as the batch has something for them.

    Args:
        taker: `TickInput` or `Rebuilt`.
        received: by kind, as `read_input` returns it.
    """
    return {kind.field: content for kind, content in received.items() if kind.taker is taker}


class OutputKind(StrEnum):
    """The kinds of the operator's output, with the field of `Effects` that each is of.

    Large releases go in several rows, in order. STATUS, a `ShardStatus`, is of the operator's own.
    """

    field: str
    schema: pa.Schema  # the columns that the sink reads; a release's rows stay packed until a task sends them

    def __new__(cls, name: str, field: str = "", schema: pa.Schema = MESSAGES) -> OutputKind:
        """Makes a kind: the value of the column `kind`, the field of `Effects`, and the columns of its rows."""
        kind = str.__new__(cls, name)
        kind._value_ = name
        kind.field, kind.schema = field, schema
        return kind

    SHORT_NOTICE = "short_notice", "releases"
    RELEASE = "release", "releases"
    SHORT_NOTICE_IN_ORDER = "short_notice_in_order", "releases"
    RELEASE_IN_ORDER = "release_in_order", "releases"
    BUCKET = "bucket", "bucket"
    CANCELS = "cancels", "cancels", CANCEL_ROWS
    OUTCOMES = "outcomes", "outcomes", OUTCOME_ROWS
    ENTRIES = "entries", "entries", ENTRIES
    REJECTS = "rejects", "rejects"
    STATUS = "status"


# The kind of output of each kind of release, as `tracker.in_flight.Release.kind` numbers them.
RELEASE_KINDS = {
    0: OutputKind.SHORT_NOTICE,
    PLANNED: OutputKind.RELEASE,
    IN_ORDER: OutputKind.SHORT_NOTICE_IN_ORDER,
    PLANNED | IN_ORDER: OutputKind.RELEASE_IN_ORDER,
}
_TABLES = (OutputKind.BUCKET, OutputKind.CANCELS, OutputKind.ENTRIES, OutputKind.REJECTS, OutputKind.OUTCOMES)


@dataclass(frozen=True, kw_only=True)
class ShardStatus:
    """What a shard tells the driver of a tick. Fields from the offset are the same in all shards.

    Attributes:
        shard: the shard's number.
        tick: of the batch.
        now: of the batch's offset, ms since the epoch.
        cutoff: of the batch's offset, ms since the epoch.
        run_id: of the batch's offset.
        next_due: no message in the shard's state is due before this time, ms since the epoch.
        counts: by name, as `Effects.status` has them; also `operator_millis`.
        unwritable: of the batch's offset.
        changed: of the batch's offset.
        shaped_until: as of `Effects`.
        drained: as of `Effects`.
        resuming: as of `Effects`.
        waiting: as of `Effects`.
        paused: as of `Effects`.
        failures: as of `Effects`.
        payload_files: the names of the files with payloads to which the shard's state refers after the batch.
    """

    shard: int
    tick: int
    now: int
    cutoff: int
    run_id: str
    next_due: int
    counts: Mapping[str, int]
    unwritable: Mapping[str, Any] = field(default_factory=dict)
    changed: Mapping[str, Any] = field(default_factory=dict)
    shaped_until: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    drained: Mapping[str, Mapping[str, tuple[int, bool]]] = field(default_factory=dict)
    resuming: Mapping[str, Mapping[str, list[int]]] = field(default_factory=dict)
    waiting: Mapping[str, Mapping[str, list[int]]] = field(default_factory=dict)
    paused: Mapping[str, list[str]] = field(default_factory=dict)
    failures: list[tuple[str, str, str]] = field(default_factory=list)
    payload_files: list[str] = field(default_factory=list)


def output_rows(shard: int, tick: int, effects: Effects) -> Iterator[OutputRow]:
    """Packs a shard's effects of a tick, releases first.

    Args:
        shard: its number.
        tick: of the batch; a release may be of an earlier one.
        effects: of the tick.
    """
    for release in effects.releases:
        kind = RELEASE_KINDS[release.kind]
        yield from ((shard, kind.value, release.tick, pack(part)) for part in in_parts(release.rows))
    for kind in _TABLES:
        yield from ((shard, kind.value, tick, pack(part)) for part in in_parts(getattr(effects, kind.field)))


def status_row(status: ShardStatus) -> OutputRow:
    """Packs a shard's status."""
    return status.shard, OutputKind.STATUS.value, status.tick, _to_json(asdict(status))


class BatchOutput:
    """All shards' output of a batch, as the sink gets it.

    Args:
        rows: with the columns of OUTPUT_SCHEMA.
    """

    def __init__(self, rows: pa.Table) -> None:
        self._rows: dict[str, list[dict[str, Any]]] = {}
        for row in rows.to_pylist():
            self._rows.setdefault(row["kind"], []).append(row)

    def statuses(self) -> list[ShardStatus]:
        """Returns the shards' status, by shard number."""
        bodies = [json.loads(row["body"]) for row in self._rows.get(OutputKind.STATUS, [])]
        return [ShardStatus(**body) for body in sorted(bodies, key=lambda body: int(body["shard"]))]

    def releases(self) -> list[tuple[int, int, int, bytes]]:
        """Returns the releases' rows, as (shard, tick, kind of release, packed rows); a shard's are in order."""
        return [
            (row["shard"], row["tick"], release_kind, row["body"])
            for release_kind, kind in RELEASE_KINDS.items()
            for row in self._rows.get(kind, [])
        ]

    def rows(self, kind: OutputKind) -> pa.Table:
        """Returns all shards' rows of a kind, with the columns of its schema."""
        return concat((unpack(row["body"]) for row in self._rows.get(kind, [])), kind.schema)


def shard_keys(shards: int) -> list[int]:
    """Returns an integer key for each shard, chosen so that Spark's hash puts each into a partition of its own."""
    partitions = [_spark_hash(key) % shards for key in range(shards * 64)]
    return [partitions.index(shard) for shard in range(shards)]


def _spark_hash(value: int) -> int:
    """Returns Spark's hash() of an integer from 0 on: MurmurHash3_x86_32 with the seed 42, signed."""
    mask = 0xFFFFFFFF

    def rotated(number: int, bits: int) -> int:
        return (number << bits | number >> 32 - bits) & mask

    mixed = rotated(value * 0xCC9E2D51 & mask, 15) * 0x1B873593 & mask
    hashed = rotated(42 ^ mixed, 13) * 5 + 0xE6546B64 & mask
    hashed ^= 4  # the length of an integer, bytes
    hashed = (hashed ^ hashed >> 16) * 0x85EBCA6B & mask
    hashed = (hashed ^ hashed >> 13) * 0xC2B2AE35 & mask
    hashed ^= hashed >> 16
    return hashed - (hashed >> 31 << 32)
