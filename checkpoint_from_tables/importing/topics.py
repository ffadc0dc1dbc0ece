"""Imports the messages of another Pulsar topic, and acknowledges them there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import pyarrow as pa
import pyarrow.compute as pc

from broker.client import NoAnswerError, connect
from broker.entries.continuity import Continuity, Gap, missing_ranges, positions_in
from broker.position import START, Position, SourceTopic
from broker.protocol.brokers import Brokers
from broker.protocol.chunks import ChunkAssembler, Whole
from broker.protocol.consumer import EntryConsumer
from broker.protocol.encryption import Decryptor
from broker.protocol.unpacking import unpack
from broker.protocol.wire.pulsar_pb2 import MessageMetadata
from broker.pulsar_admin.admin_rest import AdminClient
from broker.pulsar_admin.topic_questions import TopicQuestions
from checkpoint_from_tables.importing.importer import (
    Importer,
    ImportFailedError,
    number_of,
    position_of,
    sendable,
    source_of,
)
from conf.settings import Settings
from streaming.source.receiving.details import MessageDetails, NotKnownYetError
from streaming.source.receiving.row_builder import RowBuilder
from streaming.source.receiving.unreadable_messages import MOST_KEPT, Acceptance
from tracker.messages import FIRST_IMPORTED_LEDGER, MESSAGES, concat, typed
from warehouse.message_schemas import SchemaKeeper
from warehouse.schemas import REJECTS
from warehouse.unseen_entries import find_not_seen


def not_acknowledged(gaps: Iterable[Gap], acknowledged: list[tuple[Position, Position]]) -> Iterator[Gap]:
    """Yields gaps without the entries that the subscription has acknowledged one by one.

    Args:
        gaps: of a topic partition.
        acknowledged: ranges of these entries, ascending: (position before the first entry, position of the last).
    """
    for gap in gaps:
        after = gap.after
        for before_first, last in acknowledged:
            if last > after and before_first < gap.before:
                if before_first > after:
                    yield Gap(after, before_first.next)
                after = last
        if after == gap.after:
            yield gap
        elif after < gap.before:
            yield Gap(after, gap.before)


_MESSAGES_AT_ONCE = 100_000

_BYTES_AT_ONCE = 64 << 20

_PREFETCHED_BYTES = 16 << 20

_CHUNKS_SECONDS = 3_600.0  # by the clocks of publishers, within which the chunks of a message come

_PREFETCHED = 20_000  # the most messages that the broker sends before they are imported

_IDLE_SECONDS = 10.0

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
    client, brokers = connect(importer.settings.pulsar), Brokers(importer.settings.pulsar)
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
            consumer = brokers.subscribe(partition, subscription, max_bytes=_PREFETCHED_BYTES, max_messages=_PREFETCHED)
            details = MessageDetails(source, schemas, name)
            incomplete = ChunkAssembler(_BYTES_AT_ONCE, MOST_KEPT * importer.max_size, max_seconds=_CHUNKS_SECONDS)
            read = _read_messages(importer, _Partition(partition, subscription, consumer, written), details, incomplete)
            for found, last in _with_not_seen(read, admin, source, begin, alone):
                imported = importer.decided(sendable(_as_imported(found)))
                importer.append(imported, app_id, number_of(last), is_by_position=True)
                # A run that is cut off has to get all chunks of a message that is not whole again.
                if (end := min(last, incomplete.may_be_acknowledged or last)) > START:
                    consumer.acknowledge(end)
            consumer.close()
    except NotKnownYetError as error:
        raise ImportFailedError(f"{name}: {error}") from error
    finally:
        brokers.close()
        client.close()
        admin.close()


@dataclass(frozen=True)
class _Partition:
    """A topic partition that is imported.

    Attributes:
        name: of the topic partition.
        subscription: of the consumer.
        consumer: receives its entries.
        written: the last entry that an earlier import has written; messages up to it are left out.
    """

    name: str
    subscription: str
    consumer: EntryConsumer
    written: Position


def _read_messages(
    importer: Importer, partition: _Partition, details: MessageDetails, incomplete: ChunkAssembler
) -> Iterator[tuple[pa.Table, Position]]:
    """Yields the messages that a topic partition has now, in whole entries.

    Args:
        importer: counts the messages that are left out.
        details: looks up schemas.
        incomplete: collects chunks.

    Yields:
        (messages, position): MESSAGES, perhaps without rows, and the last entry that was read with them.
    """
    consumer, written = partition.consumer, partition.written
    end = consumer.last_entry()
    builder = _builder(importer, details)
    position = Position(-1, -1)
    decryptor = Decryptor.of_settings(importer.settings.pulsar)

    def add_chunk(entry: Position, metadata: MessageMetadata, part: bytes) -> Whole | None:
        # In the time of their publishers: what is imported is old, and what was never whole must not hold up the rest.
        return incomplete.add(entry, position, metadata, part, metadata.publish_time / 1_000)

    while position < end:
        received = consumer.receive(_IDLE_SECONDS)
        if received is None:
            if len(builder):
                yield builder.build(), position
                builder = _builder(importer, details)
                continue
            # The last messages may have been acknowledged before.
            with AdminClient(importer.settings.pulsar) as admin:
                if not admin.backlog(partition.name, partition.subscription):
                    yield MESSAGES.empty_table(), end
                    return
                # Or they are chunks of a message whose last chunk has not come, and may never come.
                last = max(position, written)
                passed = _before_parts(admin, partition.name, partition.subscription, last, end)
                if passed is not None:
                    if passed > last:
                        yield MESSAGES.empty_table(), passed
                    return
            raise ImportFailedError(f"{partition.name}: no message after {position} comes, though there are")
        entry = unpack(received, decryptor, add_chunk, consumer.max_message_bytes)
        if entry is None:
            continue
        position = entry.position
        if entry.metadata is not None:
            incomplete.expire(entry.metadata.publish_time / 1_000)
        if position <= written:
            importer.done.already_there += entry.n_messages
        elif position not in builder.entries:
            builder.add(entry, None)
        if len(builder) >= _MESSAGES_AT_ONCE or builder.n_bytes >= _BYTES_AT_ONCE or position >= end:
            # There are no messages if all were written before and not acknowledged.
            yield builder.build() if len(builder) else MESSAGES.empty_table(), position
            builder = _builder(importer, details)


def _builder(importer: Importer, details: MessageDetails) -> RowBuilder:
    source = SourceTopic(importer.source_topic, importer.source_topic, -1)
    return RowBuilder(source, Acceptance(importer.settings.tracker.max_delay_millis, importer.max_size, details))


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
    read: Iterable[tuple[pa.Table, Position]],
    admin: AdminClient,
    source: SourceTopic,
    begin: Position,
    acknowledged: list[tuple[Position, Position]],
) -> Iterator[tuple[pa.Table, Position]]:
    """Adds to messages the entries among them that the client has not handed over, as rejected messages.

    Args:
        read: (messages, position): MESSAGES of a topic partition, and the last entry that was read with them.
        admin: asks the broker.
        source: the topic partition.
        begin: the entry before the first one.
        acknowledged: ranges of entries that are left out, as of `not_acknowledged`.
    """
    continuity = Continuity(begin)
    for messages, last in read:
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
