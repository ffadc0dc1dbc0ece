"""Reads the entries of a topic partition, with their positions in the cluster that they were replicated from."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from broker.client import NoAnswerError, crypto_key_reader
from broker.position import Position
from broker.protocol.entries import SOURCE_POSITION
from broker.pulsar_admin.admin_rest import AdminClient
from conf.settings import PulsarSettings
from tracker.wire.message_id_pb2 import MessageIdData

if TYPE_CHECKING:
    import pulsar

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

_READ_MILLIS = 30_000
_QUESTIONS_AT_ONCE = 8


def read_replicas(
    client: pulsar.Client, settings: PulsarSettings, admin: AdminClient, name: str, since: int
) -> pa.Table:
    """Reads the entries of a topic partition.

    A consumer sees the position that a message was replicated from, unless it is in a batch: then the admin API is
    asked, an entry in each call.

    Args:
        client: a client of Pulsar.
        settings: the `pulsar` section.
        admin: a client for the admin API.
        name: the topic partition, which has to exist.
        since: entries before the first one published at this time or later are left out; ms since the epoch.

    Returns:
        the entries, as REPLICAS.

    Raises:
        pulsar.PulsarException, PulsarError: the broker does not answer.
    """
    import pulsar

    rows: list[list[int | str | None]] = []
    batches: dict[int, Position] = {}  # by number of the row
    reader = client.create_reader(
        name,
        pulsar.MessageId.earliest,
        receiver_queue_size=5_000,
        crypto_key_reader=crypto_key_reader(settings),
        crypto_failure_action=pulsar.ConsumerCryptoFailureAction.DISCARD,
    )
    try:
        if since > 0:
            reader.seek(since)
        while reader.has_message_available():
            message = reader.read_next(_READ_MILLIS)
            at = message.message_id()
            if at.batch_index() > 0:
                continue
            if at.batch_index() == 0:
                batches[len(rows)] = Position(at.ledger_id(), at.entry_id())
            (first, size), name_ = _data_of(at), _name_of(message)
            ids = (at.ledger_id(), at.entry_id(), *first)
            rows.append([*ids, message.publish_timestamp(), name_, size, *_source_of(message)])
    finally:
        reader.close()

    def ask(position: Position) -> str | None:
        try:
            entry = admin.entry_metadata(name, *position)
        except NoAnswerError:
            return None
        return None if entry is None else entry.properties.get(SOURCE_POSITION)

    with ThreadPoolExecutor(_QUESTIONS_AT_ONCE) as pool:
        for row, text in zip(batches, pool.map(ask, batches.values()), strict=True):
            rows[row][-2:] = _parsed(text)
    columns = zip(*rows, strict=True) if rows else [()] * len(REPLICAS)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, REPLICAS, strict=True)], schema=REPLICAS)


def _data_of(at: pulsar.MessageId) -> tuple[Position, int]:
    """Returns the position of a message's first entry, and the number of messages in its entry."""
    data = MessageIdData.FromString(at.serialize())
    first = data.first_chunk_message_id if data.HasField("first_chunk_message_id") else data
    return Position(first.ledgerId, first.entryId), data.batch_size or 1


def _name_of(message: Any) -> str | None:
    try:
        return str(message.producer_name())
    except UnicodeDecodeError:
        return None


def _source_of(message: Any) -> tuple[int | None, int | None]:
    try:
        return _parsed(message.properties().get(SOURCE_POSITION))
    except UnicodeDecodeError:
        return None, None


def _parsed(text: str | None) -> tuple[int | None, int | None]:
    try:
        return Position.parse(text) if text else (None, None)
    except ValueError:
        return None, None
