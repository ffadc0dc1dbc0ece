"""Finds messages that a job has sent and not written to `deliveries`, by reading the destinations."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from broker.client import PulsarError
from broker.position import START, Position
from broker.protocol.brokers import Brokers
from broker.protocol.entries import EntryError
from broker.protocol.reading import ReadMessage, before_time, read_entries, read_messages
from broker.pulsar_admin.admin_rest import AdminClient
from checkpoint_from_tables.rebuild.context import ALL_DESTINATIONS, DestinationReading, RebuildContext
from checkpoint_from_tables.rebuild.delivered import CLOCKS_MILLIS, Delivered, is_not_durable
from checkpoint_from_tables.rebuild.trimmed import warn_of_trimmed
from conf.errors import DelayLakeError, one_line
from streaming.release.outgoing import is_own
from tracker.messages import concat, where
from tracker.properties import DELIVER_AT, SHAPED_FROM, MessagePosition
from warehouse.delivery_key import Key, key_of
from warehouse.delta.tables import Tables
from warehouse.named_queries import NamedQueries
from warehouse.schemas import DELIVERIES, MOVED_AT

_log = logging.getLogger(__name__)

_SQL = NamedQueries(__file__)
_MESSAGES_AT_ONCE = 20_000
_MOST_NOT_DURABLE = 1_000_000  # entries of a topic: more than what comes in before it is durable
_NEVER = 1 << 64  # later than any publish time

_MEANS = "what was sent there and not written down may come twice"

# Names of producers begin with the app id of a checkpoint: with any, because the job's may be lost.
_APPLICATION = "delaylake-[0-9a-f]{12}"

# Values of the job's properties, as far as they fit the columns; empty: the message lacks the property.
_TIME = re.compile(r"[0-9]{1,18}")  # delaylake.deliverAt, delaylake.shapedFrom
_ATTEMPT = re.compile(r"[0-9]{0,4}")  # delaylake.attempt
_OCCURRENCE = re.compile(r"([1-9][0-9]{0,17})?")  # delaylake.occurrence


class UnreadableDestinationError(DelayLakeError):
    """A destination can't be read. The message is one line, and says what to do."""


def write_missing_deliveries(
    context: RebuildContext,
    delivered: Delivered,
    overdue: Mapping[tuple[str, int], int],
    reading: DestinationReading = ALL_DESTINATIONS,
) -> int:
    """Adds messages that only the destinations have to `deliveries`.

    A destination is read from the earliest time at which such a message can have been sent: no message is sent before
    it is due, or before it was published. If the broker has trimmed the destination since then, there is a warning.

    Args:
        context: of the rebuild; the log gets its warnings, too.
        delivered: the messages in `deliveries`; those of the destinations are added.
        overdue: the least `deliver_at` of the overdue durable messages that a subscription has not got, ms since the
            epoch, by source topic and number of the subscription.
        reading: how destinations are read.

    Returns:
        the number of messages added.

    Raises:
        UnreadableDestinationError: a destination can't be read.
        PulsarError: the source topics can't be read.
    """
    settings, tables, reports, renumbering = context.known, context.tables, context.reports, reading.renumbering
    found: list[pa.Table] = []
    n = 0
    moved_at = 0 if renumbering is not None else max(0, tables.written("entries", MOVED_AT))
    brokers = Brokers(settings.pulsar)
    admin = AdminClient(settings.pulsar)

    def warn(text: str) -> None:
        _log.warning("%s", text)
        reports.on_warning(text)

    try:
        for route in settings.routes:
            not_durable = first_not_durable(brokers, route.source, context.durable)
            for number, subscription in enumerate(route.subscriptions):
                times = [t for t in (overdue.get((route.source, number)), not_durable) if t is not None]
                if not times:
                    continue
                destination = subscription.destination
                if destination in reading.without:
                    warn(f"{destination}: not read: {_MEANS}")
                    continue
                try:
                    since = max(moved_at, min(times) - CLOCKS_MILLIS)
                    messages = messages_since(brokers, admin, destination, since)
                    # The tables do not say whether there are dead letters: one is sent before its outcome is written.
                    dead = subscription.dead_letter_topic
                    if may_be_there(admin, dead):
                        messages = chain(messages, messages_since(brokers, admin, dead, since))
                    while some := list(islice(messages, _MESSAGES_AT_ONCE)):
                        rows = _deliveries(some, route.source, subscription.name)
                        if renumbering is not None:
                            rows, _ = renumbering.apply(rows)
                        missing = where(rows, ~delivered.contains(number, rows))
                        missing = _of_known_entries(tables, missing, delivered.durable)
                        delivered.add(missing)
                        found.append(missing)
                        n += len(some)
                        reports.on_progress("destinations", "messages read", n)
                    partitions = brokers.partition_names(destination)
                except PulsarError as error:
                    raise UnreadableDestinationError(
                        f"{destination} can't be read ({one_line(error)}): make it readable, or go on with "
                        f"--without-destination {destination}; then {_MEANS}"
                    ) from error
                warning = warn_of_trimmed(admin, tables, partitions, min(times), route.source, subscription.name)
                if warning is not None:
                    warn(warning)
    finally:
        admin.close()
        brokers.close()
    rows = concat(found, DELIVERIES)
    if rows.num_rows:
        tables.append("deliveries", rows, {f"rebuild-{time.time_ns()}": 1})
    return int(rows.num_rows)


def may_be_there(admin: AdminClient, topic: str) -> bool:
    """Whether a topic exists, or may exist if the admin API does not answer: to read a missing one would create it."""
    try:
        return admin.partitions(topic) is not None
    except PulsarError:
        return True


def first_not_durable(brokers: Brokers, topic: str, durable: Mapping[str, Position]) -> int | None:
    """Returns the least publish time of the messages that come again from a source topic, ms; None: none comes.

    A producer may say any time. So all entries are looked at that may have come in since the last durable ones: who
    lies does so for its own messages.
    """
    first = _NEVER
    partitions = brokers.partition_names(topic)
    for name in partitions:
        entries = read_entries(brokers, name, durable.get(name, START))
        for entry in islice(entries, _MOST_NOT_DURABLE // len(partitions) + 1):
            if not isinstance(entry.envelope, EntryError):  # what can't be read was sent nowhere
                first = min(first, entry.envelope.metadata.publish_time)
        entries.close()
    return first if first < _NEVER else None


def is_producer_of(subscription: str) -> Callable[[str], object]:
    """Returns a function that tells whether a producer's name is that of a job's for a subscription; "": rejects."""
    # Version 0.1.0 named its producers without a hash of the source topic.
    return re.compile(f"{_APPLICATION}-(?:[0-9a-f]{{8}}-)?{re.escape(subscription)}-.*", re.DOTALL).fullmatch


def _deliveries(messages: Iterable[ReadMessage], topic: str, subscription: str) -> pa.Table:
    """Returns the messages that the job has sent as rows of `deliveries`, one for each delivery key.

    Anybody who may produce to a destination can send messages with the job's properties, or forward such messages. So
    messages are left out if their producer's name is not the job's, or a property has a value that it never writes.
    """
    is_producer = is_producer_of(subscription)
    rows: dict[Key, dict[str, Any]] = {}
    for message in messages:
        properties = message.properties
        due = properties.get(DELIVER_AT, "")
        shaped_from = properties.get(SHAPED_FROM, "")
        key = text, attempt, occurrence = key_of(properties)
        if key in rows or not is_own(properties, topic) or not is_producer(message.producer):
            continue
        if not (_TIME.fullmatch(due) and _ATTEMPT.fullmatch(attempt) and _OCCURRENCE.fullmatch(occurrence)):
            continue
        rows[key] = {
            "topic": topic,
            "subscription": subscription,
            **MessagePosition.parse(text)._asdict(),
            "position": text,
            "deliver_at": int(due),
            "sent_at": message.published,
            "short_notice": False,
            "destination": message.topic,
            "destination_message_id": None,
            "batch_id": 0,
            "attempt": int(attempt) if attempt else None,
            "shaped_from": int(shaped_from) if _TIME.fullmatch(shaped_from) else None,
            "occurrence": int(occurrence) if occurrence else None,
            "occurrence_at": int(due) if occurrence else None,
        }
    return pa.Table.from_pylist(list(rows.values()), schema=DELIVERIES)


def _of_known_entries(tables: Tables, rows: pa.Table, durable: Mapping[str, Position]) -> pa.Table:
    """Returns those rows of one topic whose entry is in the tables, or comes again from the source topics."""
    if not rows.num_rows:
        return rows
    comes_again = is_not_durable(rows, durable)
    old = where(rows, ~comes_again)
    if not old.num_rows:
        return rows
    [topic] = pc.unique(rows["topic"]).to_pylist()
    ledgers = pc.unique(old["ledger_id"]).to_pylist()
    known = tables.sql(_SQL("known_entries", topic=topic, ledgers=ledgers))
    return concat([where(rows, comes_again), old.join(known, known.column_names, join_type="left semi")], rows.schema)


def messages_since(brokers: Brokers, admin: AdminClient, topic: str, since: int) -> Iterator[ReadMessage]:
    """Yields the messages that the broker still has of a destination, published since a time, ms since the epoch."""
    for partition in brokers.partition_names(topic):
        for message in read_messages(brokers, partition, before_time(admin, partition, since)):
            if message.published >= since:
                yield message
