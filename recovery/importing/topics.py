"""Imports the messages of another Pulsar topic, and acknowledges them there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import pulsar
import pyarrow as pa
import pyarrow.compute as pc

from broker.client import NoAnswerError, connect, crypto_key_reader, subscribe
from broker.entries.continuity import Continuity, Gap, missing_ranges, positions_in
from broker.position import START, Position, SourceTopic
from broker.pulsar_admin.admin_rest import AdminClient
from broker.pulsar_admin.topic_questions import TopicQuestions
from conf.settings import Settings
from recovery.importing.importer import Importer, ImportFailedError, number_of, position_of, sendable, source_of
from recovery.importing.native_delays import not_acknowledged, with_native_times
from streaming.source.receiving.chunk_builder import ChunkBuilder, batch_size_of
from streaming.source.receiving.details import MessageDetails, NotKnownYetError
from tracker.messages import FIRST_IMPORTED_LEDGER, MESSAGES, concat, typed
from warehouse.message_schemas import SchemaKeeper
from warehouse.schemas import REJECTS
from warehouse.unseen_entries import find_not_seen

_MESSAGES_AT_ONCE = 100_000
_BYTES_AT_ONCE = 64 << 20
_IDLE_MILLIS = 10_000
_MOST_IDLE = 6  # how often in a row the import waits for the rest of an entry
_MAX_PARTS = 1_000  # the most entries at the end of a topic that the broker is asked about, one by one

SUBSCRIPTION = "delaylake-import"  # the import's subscription to other topics


def check_topic(settings: Settings, topic: str) -> None:
    """Checks that a topic can be imported.

    Raises:
        ImportFailedError: the topic is the source of a route, so the job reads it.
    """
    if source_of(settings, topic) is not None:
        raise ImportFailedError(f"{topic} is the source of a route: the job reads it by itself")


def import_topic(importer: Importer, name: str, subscription: str = SUBSCRIPTION) -> None:
    """Imports the messages that a subscription to another topic has not acknowledged, and acknowledges them.

    It imports the messages that the topic has when it begins. Their properties say when they are due, as in a source
    topic; without such properties it is the time at which Pulsar itself would deliver them.

    Args:
        importer: appends the messages.
        name: of the topic.
        subscription: if it is not SUBSCRIPTION, it must exist and have no consumers.

    Raises:
        ImportFailedError: there is no such subscription, messages do not come, or the broker does not tell their
            details.
        PulsarError, pulsar.PulsarException: the topic can't be read.
        FencedError: another job has taken the warehouse over.
    """
    client = connect(importer.settings.pulsar)
    admin = AdminClient(importer.settings.pulsar)
    schemas = SchemaKeeper(importer.settings.warehouse, admin)
    try:
        for partition in client.get_topic_partitions(name):
            if subscription != SUBSCRIPTION and admin.backlog(partition, subscription) is None:
                raise ImportFailedError(f"{partition} has no subscription {subscription}")
            source = SourceTopic(partition, importer.source_topic, -1)
            alone = [(Position(*a), Position(*b)) for a, b in admin.individually_acknowledged(partition, subscription)]
            app_id = f"import {partition} to {importer.source_topic}"
            written = position_of(importer.tables.written("entries", app_id))
            begin = max(TopicQuestions(admin, subscription).begin(partition), written)
            consumer = subscribe(client, partition, subscription, crypto_key_reader(importer.settings.pulsar))
            details = MessageDetails(source, admin, schemas, name)
            chunks = _chunks(importer, consumer, partition, subscription, written, details)
            for found, last in _with_not_seen(chunks, admin, source, begin, alone):
                messages = with_native_times(found, admin, partition, importer.settings.tracker.max_delay_millis)
                imported = importer.decided(sendable(_as_imported(messages)))
                importer.append(imported, app_id, number_of(last), is_by_position=True)
                consumer.acknowledge_cumulative(pulsar.MessageId(-1, last.ledger_id, last.entry_id, -1))
            consumer.close()
    except NotKnownYetError as error:
        raise ImportFailedError(f"{name}: {error}") from error
    finally:
        client.close()
        admin.close()


def _chunks(
    importer: Importer,
    consumer: pulsar.Consumer,
    partition: str,
    subscription: str,
    written: Position,
    details: MessageDetails,
) -> Iterator[tuple[pa.Table, Position]]:
    """Yields the messages that a topic partition has now, in whole entries.

    Args:
        importer: counts the messages that are left out.
        consumer: of the topic partition.
        partition: its name.
        subscription: of the consumer.
        written: the last entry that an earlier import has written; messages up to it are left out.
        details: looks up schemas and key encodings.

    Yields:
        (messages, position): MESSAGES, perhaps without rows, and the last entry that was read with them.
    """
    newest = consumer.get_last_message_id()
    end = Position(newest.ledger_id(), newest.entry_id())
    builder = _builder(importer, details)
    position = Position(-1, -1)
    idle = 0
    while position < end:
        try:
            message = consumer.receive(_IDLE_MILLIS)
            idle = 0
        except pulsar.Timeout:
            idle += 1
            if not builder.is_whole and idle < _MOST_IDLE:
                continue  # the rest of a batch
            if len(builder) and builder.is_whole:
                yield builder.build(), position
                builder = _builder(importer, details)
                continue
            # The last messages may have been acknowledged before, or be unreadable for the client.
            with AdminClient(importer.settings.pulsar) as admin:
                if not admin.backlog(partition, subscription):
                    yield MESSAGES.empty_table(), end
                    return
                # Or they are chunks of a message whose last chunk has not come, and may never come.
                last = max(position, written)
                passed = _before_parts(admin, partition, subscription, last, end)
                if passed is not None:
                    if passed > last:
                        yield MESSAGES.empty_table(), passed
                    return
            raise ImportFailedError(f"{partition}: no message after {position} comes, though there are") from None
        message_id = message.message_id()
        position = Position(message_id.ledger_id(), message_id.entry_id())
        batch_index, batch_size = message_id.batch_index(), batch_size_of(message_id)
        if position <= written:
            importer.done.already_there += 1
        else:
            if position in builder.entries:
                continue
            if not builder.is_adding(position):
                builder.start_entry(position, batch_size, None)
            builder.add(message, batch_index)
        if batch_index + 1 < batch_size and batch_index >= 0:
            position = Position(position.ledger_id, position.entry_id - 1)  # the entry has more messages
        elif len(builder) >= _MESSAGES_AT_ONCE or builder.n_bytes >= _BYTES_AT_ONCE or position >= end:
            # There are no messages if all were written before and not acknowledged.
            yield builder.build() if len(builder) else MESSAGES.empty_table(), position
            builder = _builder(importer, details)


def _builder(importer: Importer, details: MessageDetails) -> ChunkBuilder:
    source = SourceTopic(importer.source_topic, importer.source_topic, -1)
    return ChunkBuilder(source, importer.settings.tracker.max_delay_millis, importer.max_size, details)


def _before_parts(
    admin: AdminClient, partition: str, subscription: str, last: Position, end: Position
) -> Position | None:
    """Checks whether only chunks of incomplete messages, or markers, are left at the end of a topic partition.

    Args:
        admin: asks the broker.
        partition: the name of the topic partition.
        subscription: of the import.
        last: the last entry that the client has handed over, or that an earlier import has written.
        end: the last entry of the topic partition.

    Returns:
        the last entry before them; None: a message follows, or may follow.
    """
    stats = admin.internal_stats(partition)
    if stats is None:
        return last
    acknowledged = Position(*stats.acknowledged.get(subscription, START))
    passed = acknowledged if acknowledged.entry_id >= 0 and acknowledged > last else last
    left = list(islice(positions_in(missing_ranges(Gap(passed, end.next), stats.ledgers)), _MAX_PARTS + 1))
    entries = (admin.entry_metadata(partition, *position) for position in left)
    try:
        is_over = len(left) <= _MAX_PARTS and all(entry is None or entry.is_no_message for entry in entries)
    except NoAnswerError:
        return None
    return passed if is_over else None


def _with_not_seen(
    chunks: Iterable[tuple[pa.Table, Position]],
    admin: AdminClient,
    source: SourceTopic,
    begin: Position,
    acknowledged: list[tuple[Position, Position]],
) -> Iterator[tuple[pa.Table, Position]]:
    """Adds to each chunk of messages the entries that the client has not handed over, as rejected messages.

    Args:
        chunks: (messages, position): MESSAGES of a topic partition, and the last entry that was read with them.
        admin: asks the broker.
        source: the topic partition.
        begin: the entry before the first one.
        acknowledged: ranges of entries that are left out, as of `not_acknowledged`.
    """
    continuity = Continuity(begin)
    for messages, last in chunks:
        gaps = continuity.gaps(messages)
        if continuity.last < last:
            gaps.append(Gap(continuity.last, last.next))
            continuity.begin_after(last)
        gaps = list(not_acknowledged(gaps, acknowledged))
        found = pa.concat_tables(
            [REJECTS.empty_table(), *(find_not_seen(admin, source, gap, lambda _: None).rows for gap in gaps)]
        )
        n = found.num_rows
        columns = {name: found[name] for name in found.column_names} | {
            "batch_size": pa.repeat(1, n),
            "deliver_at": found["publish_time"],
            "event_time": pa.repeat(0, n),
        }
        yield concat([messages, typed(columns, MESSAGES)]), last


def _as_imported(messages: pa.Table) -> pa.Table:
    """Gives messages of another topic the ledger ids of imported messages, which no Pulsar cluster gives."""
    i = messages.schema.get_field_index("ledger_id")
    ledgers = pc.add(messages["ledger_id"], FIRST_IMPORTED_LEDGER)
    return messages.set_column(i, messages.schema.field(i), ledgers)
