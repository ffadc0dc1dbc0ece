"""Reads what a topic partition has, and where the cluster that it was replicated from has the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from broker.client import NoAnswerError, crypto_key_reader
from broker.clusters.replication import SOURCE_POSITION
from broker.position import Position
from broker.pulsar_admin.admin_rest import AdminClient
from conf.settings import PulsarSettings
from tracker.wire.message_id_pb2 import MessageIdData

if TYPE_CHECKING:
    import pulsar

# An entry each, in the topic's order. That of a chunked message is its last one.
REPLICAS = pa.schema(
    [
        ("ledger_id", pa.int64()),
        ("entry_id", pa.int64()),
        ("first_ledger", pa.int64()),  # where the message begins: of a chunked one its first entry
        ("first_entry", pa.int64()),
        ("publish_time", pa.int64()),
        ("producer_name", pa.string()),
        ("batch_size", pa.int32()),
        ("old_ledger", pa.int64()),  # in the cluster that it was replicated from; null: the broker does not tell
        ("old_entry", pa.int64()),
    ]
)

_READ_MILLIS = 30_000
_QUESTIONS_AT_ONCE = 8


def read_replicas(
    client: pulsar.Client, settings: PulsarSettings, admin: AdminClient, name: str, since: int
) -> pa.Table:
    """Reads the entries of a topic partition.

    A client sees where a message was replicated from, unless it is in a batch: then the admin API is asked, an entry a
    call.

    Args:
        name: the topic partition, which has to be there.
        since: entries before the first one that was published then or later are left out; ms since the epoch.

    Returns:
        REPLICAS.

    Raises:
        pulsar.PulsarException, PulsarError: the broker does not answer.
    """
    import pulsar

    rows: list[list[int | str | None]] = []
    batches: dict[int, Position] = {}  # by the number of its row
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
            told = admin.entry_metadata(name, *position)
        except NoAnswerError:
            return None
        return None if told is None else told.properties.get(SOURCE_POSITION)

    with ThreadPoolExecutor(_QUESTIONS_AT_ONCE) as pool:
        for row, text in zip(batches, pool.map(ask, batches.values()), strict=True):
            rows[row][-2:] = _parsed(text)
    columns = zip(*rows, strict=True) if rows else [()] * len(REPLICAS)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, REPLICAS, strict=True)], schema=REPLICAS)


def _data_of(at: pulsar.MessageId) -> tuple[Position, int]:
    """Returns where a message begins, and how many messages its entry has."""
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
