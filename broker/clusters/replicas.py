"""Reads the entries of a topic partition, with their positions in the cluster that they were replicated from."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import pyarrow as pa

from broker.position import Position
from broker.protocol.brokers import Brokers
from broker.protocol.entries import SOURCE_POSITION, EntryError, is_batch
from broker.protocol.reading import before_time, read_entries
from broker.protocol.wire.pulsar_pb2 import MessageMetadata
from broker.pulsar_admin.admin_rest import AdminClient

# A row for each entry, in the topic's order; for a chunked message one, that of its last entry.
REPLICAS = pa.schema(
    [
        ("ledger_id", pa.int64()),
        ("entry_id", pa.int64()),
        ("first_ledger", pa.int64()),  # with first_entry the message's first entry, another one if it is chunked
        ("first_entry", pa.int64()),
        ("publish_time", pa.int64()),
        ("producer_name", pa.string()),
        ("batch_size", pa.int32()),
        ("old_ledger", pa.int64()),  # in the cluster that it was replicated from; null: unknown
        ("old_entry", pa.int64()),
    ]
)

_MOST_INCOMPLETE = 10_000  # chunked messages at a time; beyond it the oldest one is no message
_MAX_BATCH = 2**31 - 1


class _Incomplete(NamedTuple):
    """A chunked message of which not all chunks have been read."""

    first: Position
    chunks: int


def read_replicas(brokers: Brokers, admin: AdminClient, name: str, since: int) -> pa.Table:
    """Reads the entries of a topic partition.

    Args:
        brokers: connections to the brokers.
        admin: a client for the admin API.
        name: the topic partition, which has to exist.
        since: entries before the first one published at this time or later may be left out; ms since the epoch.

    Returns:
        the entries, as REPLICAS; without those that can't be read.

    Raises:
        PulsarError: the broker does not answer.
    """
    rows: list[list[int | str | None]] = []
    incomplete: OrderedDict[bytes, _Incomplete] = OrderedDict()
    for entry in read_entries(brokers, name, before_time(admin, name, since)):
        if isinstance(entry.envelope, EntryError):
            continue
        metadata, first = entry.envelope.metadata, entry.position
        if entry.envelope.is_chunk:
            whole = _whole(incomplete, metadata, entry.position)
            if whole is None:
                continue
            first = whole
        size = min(max(metadata.n_messages, 1), _MAX_BATCH) if is_batch(metadata) else 1
        published = min(metadata.publish_time, 2**63 - 1)
        rows.append([*entry.position, *first, published, _name_of(metadata), size, *_source_of(metadata)])
    columns = zip(*rows, strict=True) if rows else [()] * len(REPLICAS)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, REPLICAS, strict=True)], schema=REPLICAS)


def _whole(
    incomplete: OrderedDict[bytes, _Incomplete], metadata: MessageMetadata, position: Position
) -> Position | None:
    """Notes a chunk; returns the position of its message's first one where all have come, in order."""
    known = incomplete.pop(metadata.uuid, None)
    if metadata.chunk_id == 0:
        known = _Incomplete(position, 0)
    if known is None or known.chunks != metadata.chunk_id:
        return None
    if metadata.chunk_id == metadata.n_chunks - 1:
        return known.first
    incomplete[metadata.uuid] = known._replace(chunks=known.chunks + 1)
    if len(incomplete) > _MOST_INCOMPLETE:
        incomplete.popitem(last=False)
    return None


def _name_of(metadata: MessageMetadata) -> str | None:
    try:
        return metadata.producer_name.decode()
    except UnicodeDecodeError:
        return None


def _source_of(metadata: MessageMetadata) -> tuple[int | None, int | None]:
    for one in metadata.properties:
        if one.key == SOURCE_POSITION.encode():
            return _parsed(one.value)
    return None, None


def _parsed(text: bytes) -> tuple[int | None, int | None]:
    try:
        return Position.parse(text.decode())
    except ValueError:
        return None, None
