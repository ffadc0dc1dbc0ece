"""The operator's input of a batch: each row is a part of one shard's input."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.kinds import ANSWER, REPEAT
from tracker.messages import Int64Array, has_keys, int64, is_among, where
from tracker.packing import in_parts, pack
from tracker.sharding import shard_of, shards_of


class InputKind:
    """Values of the column `kind` of the operator's input: they say how a row's `body` is to be read.

    REBUILT_CANCELLED, _DELIVERED, _MOVED, _WAITING, _KEYS, _OCCURRENCES and _OUTCOMES are names of files in prepared
    states, too.
    """

    TICK = "tick"  # body: the offset as JSON
    MESSAGES = "messages"  # body: packed rows, as of all other kinds without a comment on the body
    SEGMENT = "segment"
    COMMANDS = "commands"
    REQUEST_IDS = "request_ids"  # body: JSON
    PAUSE_CHANGES = "switches"  # body: JSON
    KNOWN_MESSAGES = "found"
    PAYLOAD_ROWS = "kept"
    PACE = "pace"  # body: JSON
    DRAINED = "drained"  # of the messages that are held back for slow destinations, those that go out
    DRAINED_UNTIL = "drained_until"  # body: JSON
    REJECTED_COMMANDS = "no_commands"
    NOTES = "notes"  # new messages of this shard's entries that other shards have, without payload
    TIME_ZONES = "time_zones"  # body: the time zones of the batch, as `TimeZones.pack` packs them
    REJECTED = "rejected"  # messages that were rejected while their rejects topic could not be written
    REBUILT = "rebuilt"  # body: JSON
    REBUILT_CANCELLED = "rebuilt_taken"
    REBUILT_DELIVERED = "rebuilt_delivered"
    REBUILT_MOVED = "rebuilt_moved"
    REBUILT_WAITING = "rebuilt_waiting"
    REBUILT_KEYS = "rebuilt_keys"
    REBUILT_OCCURRENCES = "rebuilt_occurrences"
    REBUILT_OUTCOMES = "rebuilt_outcomes"  # to be published (again)


# The same columns as `streaming.operator.schemas.INPUT_SCHEMA`.
ARROW_SCHEMA = pa.schema(
    [
        pa.field("shard", pa.int32(), False),
        pa.field("kind", pa.string(), False),
        pa.field("body", pa.binary(), False),
    ]
)

Part = tuple[int, str, bytes]  # Spark's key of the shard, kind, packed rows


def to_batches(rows: Iterable[tuple[int, str, bytes]]) -> Iterator[pa.RecordBatch]:
    """Yields rows, as `split` returns them, each as a record batch of ARROW_SCHEMA."""
    for row in rows:
        columns = [pa.array([value], field.type) for value, field in zip(row, ARROW_SCHEMA, strict=True)]
        yield pa.RecordBatch.from_arrays(columns, schema=ARROW_SCHEMA)


def split(rows: pa.Table, kind: str, shard_keys: list[int]) -> list[Part]:
    """Packs rows for their shards.

    Args:
        rows: as `tracker.sharding.shards_of` takes them.
        kind: a value of `InputKind`.
        shard_keys: Spark's key of each shard's rows, by shard number.

    Returns:
        (shard key, kind, packed rows), cut as `in_parts` does.
    """
    if not rows.num_rows:
        return []
    return _packed(rows, shards_of(rows, len(shard_keys)), kind, shard_keys)


def split_notes(rows: pa.Table, kind: str, shard_keys: list[int]) -> list[Part]:
    """Packs rows with a schedule key for the homes of their entries, where `split` gives them to other shards.

    Arguments and result are those of `split`.
    """
    if len(shard_keys) == 1 or not has_keys(rows):
        return []
    homes = shard_of(int64(rows, "ledger_id"), int64(rows, "entry_id"), len(shard_keys))
    is_elsewhere = homes != shards_of(rows, len(shard_keys))
    return _packed(where(rows, is_elsewhere), homes[is_elsewhere], kind, shard_keys)


def split_copies(commands: pa.Table, known: pa.Table, keyed: Collection[str], shard_keys: list[int]) -> list[Part]:
    """Packs copies of commands for shards that have their messages and are not the homes of the entries.

    Args:
        commands: as COMMAND_ROWS.
        known: as KNOWN: messages in the tables, of the entries that the commands name.
        keyed: the topics that have had schedule keys; in other topics each message is in the home of its entry.
        shard_keys: Spark's key of each shard's rows, by shard number.
    """
    if len(shard_keys) == 1 or not keyed or not commands.num_rows:
        return []
    is_by_id = pc.and_(pc.greater_equal(commands["ledger_id"], 0), pc.is_in(commands["topic"], pa.array(sorted(keyed))))
    is_by_id = pc.and_(is_by_id, pc.invert(pc.is_in(commands["kind"], pa.array([ANSWER, REPEAT]))))
    rows = commands.filter(is_by_id)
    homes = shard_of(int64(rows, "ledger_id"), int64(rows, "entry_id"), len(shard_keys))
    of_known = shards_of(known, len(shard_keys))
    is_known = is_among(rows, known, ["ledger_id", "entry_id"])
    parts = []
    for shard in range(len(shard_keys)):
        has = is_among(rows, where(known, of_known == shard), ["ledger_id", "entry_id"]) | ~is_known
        chosen = where(rows, has & (homes != shard))
        parts += _packed(chosen, np.full(chosen.num_rows, shard), InputKind.COMMANDS, shard_keys)
    return parts


def _packed(rows: pa.Table, shards: Int64Array, kind: str, shard_keys: list[int]) -> list[Part]:
    by_shard = {shard: rows.filter(pa.array(shards == shard)) for shard in np.unique(shards).tolist()}
    return [
        (shard_keys[shard], kind, pack(part)) for shard, of_shard in by_shard.items() for part in in_parts(of_shard)
    ]


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
