"""Imports what waits in another Pulsar topic, and acknowledges it there."""

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
from recovery.importing.importer import Importer, ImportFailedError, number_of, position_of, source_of
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
_MOST_IDLE = 6  # how often in a row it waits in the middle of an entry
_MAX_PARTS = 1_000  # entries at the end of a topic that the broker is asked about, one by one

SUBSCRIPTION = "delaylake-import"  # with which other topics are read


def check_topic(settings: Settings, topic: str) -> None:
    """Checks that a topic can be imported.

    Raises:
        ImportFailedError: it is the source of a route, which the job reads by itself.
    """
    if source_of(settings, topic) is not None:
        raise ImportFailedError(f"{topic} is the source of a route: the job reads it by itself")


def import_topic(importer: Importer, name: str, subscription: str = SUBSCRIPTION) -> None:
    """Imports the messages of another topic that a subscription of it has not acknowledged, and acknowledges them.

    Imports the messages that the topic has when this begins. They are due by their properties, as those of a source
    topic are, or else when Pulsar itself would deliver them.

    Args:
        subscription: must be there, and have no consumers, if it is not SUBSCRIPTION.

    Raises:
        ImportFailedError: there is no such subscription, messages do not come, or the broker does not tell what is
            needed of them.
        PulsarError, pulsar.PulsarException: the topic can't be read.
        FencedError: somebody else has taken the warehouse over.
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
                importer.append(_as_imported(messages), app_id, number_of(last), is_by_position=True)
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
    """Yields a topic partition's messages up to the last one that it has now, in whole entries.

    Args:
        written: the last entry that an earlier import has written: messages up to it are left out.

    Yields:
        (messages, position): MESSAGES, of which there may be none, and the entry up to which they are.
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
            # The last messages may have been acknowledged before, or the client can't read them.
            with AdminClient(importer.settings.pulsar) as admin:
                if not admin.backlog(partition, subscription):
                    yield MESSAGES.empty_table(), end
                    return
                # Or they are the first chunks of a message whose last one has not come, and may never come.
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
            position = Position(position.ledger_id, position.entry_id - 1)  # there is more of the entry
        elif len(builder) >= _MESSAGES_AT_ONCE or builder.n_bytes >= _BYTES_AT_ONCE or position >= end:
            # No messages, where all were written already and had not been acknowledged.
            yield builder.build() if len(builder) else MESSAGES.empty_table(), position
            builder = _builder(importer, details)


def _builder(importer: Importer, details: MessageDetails) -> ChunkBuilder:
    source = SourceTopic(importer.source_topic, importer.source_topic, -1)
    return ChunkBuilder(source, importer.settings.tracker.max_delay_millis, importer.max_size, details)


def _before_parts(
    admin: AdminClient, partition: str, subscription: str, last: Position, end: Position
) -> Position | None:
    """Returns up to which entry a topic partition is read where only chunks of unfinished messages, or markers, follow.

    Args:
        subscription: by which it is read.
        last: the last entry that was handed over, or that an earlier import has written.
        end: the last entry of the topic partition.

    Returns:
        the last entry that is handed over or acknowledged; None: a message follows, or that is not known.
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
    """Adds to each chunk of a topic partition's messages those that the client did not hand over, to be rejected.

    Args:
        chunks: (messages, position): MESSAGES, and the entry up to which they are.
        begin: the entry before the first one.
        acknowledged: ranges of entries that are not missed, as of `not_acknowledged`.
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
    """Moves the messages of another topic to ledger ids of imported messages, which no cluster has."""
    i = messages.schema.get_field_index("ledger_id")
    ledgers = pc.add(messages["ledger_id"], FIRST_IMPORTED_LEDGER)
    return messages.set_column(i, messages.schema.field(i), ledgers)
