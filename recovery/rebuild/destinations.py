"""The messages that only the destinations have: what a job has sent, and nobody came to write down."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import pulsar
import pyarrow as pa
import pyarrow.compute as pc

from broker.client import PulsarError, connect
from broker.position import Position
from broker.pulsar_admin.admin_rest import AdminClient
from conf.errors import DelayLakeError, one_line
from conf.settings import Settings
from recovery.rebuild.delivered import CLOCKS_MILLIS, Delivered, is_not_durable
from recovery.rebuild.trimmed import warn_of_trimmed
from streaming.release.outgoing import is_own
from tracker.messages import concat, where
from tracker.properties.delivered import DELIVER_AT, SHAPED_FROM
from tracker.properties.message_position import MessagePosition
from warehouse.delivery_key import Key, key_of
from warehouse.delta.tables import OnProgress, Tables, literal
from warehouse.renumbering import Renumbering
from warehouse.schemas import DELIVERIES, MOVED_AT

_log = logging.getLogger(__name__)

_MESSAGES_AT_ONCE = 20_000

_MEANS = "what was sent there and not written down may come twice"

# Producers' names begin with the app id of a checkpoint: any one, since the job's may be lost.
_APPLICATION = "delaylake-[0-9a-f]{12}"

# What the job writes in `delaylake.deliverAt`, with a number that fits the column.
_TIME = re.compile(r"[0-9]{1,18}")
_ATTEMPT = re.compile(r"[0-9]{0,4}")  # the same of `delaylake.attempt`, empty where it is not there

_OCCURRENCE = re.compile(r"([1-9][0-9]{0,17})?")  # of `delaylake.occurrence`


class UnreadableDestinationError(DelayLakeError):
    """A destination can't be read. The message is one line, with what can be done."""


def write_missing_deliveries(
    settings: Settings,
    tables: Tables,
    delivered: Delivered,
    durable: Mapping[str, Position],
    overdue: Mapping[tuple[str, int], int],
    on_progress: OnProgress,
    on_warning: Callable[[str], None] = lambda text: None,
    without: Collection[str] = (),
    renumbering: Renumbering | None = None,
) -> int:
    """Adds the messages that only the destinations have to `deliveries`; returns how many.

    A destination is read from the time on at which such a message can have been sent first: that is when it is due, and
    after it was published. Where the broker has trimmed the destination since then, that is a warning, also in the log.

    Args:
        delivered: the messages that `deliveries` has; those of the destinations are added.
        durable: by topic partition the last entry that does not come again from the source topics.
        overdue: for each subscription, by topic and number, that is still to get a durable message that is due the
            least time of such a one: ms since the epoch.
        on_warning: called with one line.
        without: destinations that are not read. That is a warning for each that was to be.
        renumbering: what the tables' ids have got just now; None: none. What a destination has from before an earlier
            one is passed over: its ids are of another broker.

    Raises:
        UnreadableDestinationError: a destination can't be read.
        PulsarError, pulsar.PulsarException: the source topics can't be read.
    """
    found: list[pa.Table] = []
    n = 0
    moved_at = 0 if renumbering is not None else max(0, tables.written("entries", MOVED_AT))
    client = connect(settings.pulsar)
    admin = AdminClient(settings.pulsar)

    def warn(text: str) -> None:
        _log.warning("%s", text)
        on_warning(text)

    try:
        for route in settings.routes:
            not_durable = _first_not_durable(client, route.source, durable)
            for number, subscription in enumerate(route.subscriptions):
                times = [t for t in (overdue.get((route.source, number)), not_durable) if t is not None]
                if not times:
                    continue
                destination = subscription.destination
                if destination in without:
                    warn(f"{destination}: not read: {_MEANS}")
                    continue
                try:
                    since = max(moved_at, min(times) - CLOCKS_MILLIS)
                    messages = _messages_since(client, destination, since)
                    # What is in the tables does not tell: a dead letter is sent before its outcome is written.
                    if _may_be_there(admin, subscription.dead_letter_topic):
                        messages = chain(messages, _messages_since(client, subscription.dead_letter_topic, since))
                    while some := list(islice(messages, _MESSAGES_AT_ONCE)):
                        rows = _deliveries(some, route.source, subscription.name)
                        if renumbering is not None:
                            rows, _ = renumbering.apply(rows)
                        missing = where(rows, ~delivered.contains(number, rows))
                        missing = _of_known_entries(tables, missing, delivered.durable)
                        delivered.add(missing)
                        found.append(missing)
                        n += len(some)
                        on_progress("destinations", "messages read", n)
                    partitions = client.get_topic_partitions(destination)
                except pulsar.PulsarException as error:
                    raise UnreadableDestinationError(
                        f"{destination} can't be read ({one_line(error)}): make it readable, or go on with "
                        f"--without-destination {destination}; then {_MEANS}"
                    ) from error
                warning = warn_of_trimmed(admin, tables, partitions, min(times), route.source, subscription.name)
                if warning is not None:
                    warn(warning)
    finally:
        admin.close()
        client.close()
    rows = concat(found, DELIVERIES)
    if rows.num_rows:
        tables.append("deliveries", rows, {f"rebuild-{time.time_ns()}": 1})
    return int(rows.num_rows)


def _may_be_there(admin: AdminClient, topic: str) -> bool:
    """Whether there is a topic, as far as the admin API tells; to read one that is not there would create it."""
    try:
        return admin.partitions(topic) is not None
    except PulsarError:
        return True


def _first_not_durable(client: pulsar.Client, topic: str, durable: Mapping[str, Position]) -> int | None:
    """Returns when the first message was published that comes again from a source topic, ms; None: there is none."""
    times = []
    for name in client.get_topic_partitions(topic):
        last = durable.get(name)
        start = pulsar.MessageId.earliest if last is None else pulsar.MessageId(-1, last.ledger_id, last.entry_id, -1)
        reader = client.create_reader(name, start, receiver_queue_size=10)
        while reader.has_message_available():
            message = reader.read_next(30_000)
            position = Position(message.message_id().ledger_id(), message.message_id().entry_id())
            if last is None or position > last:
                times.append(message.publish_timestamp())
                break
        reader.close()
    return min(times, default=None)


@dataclass(frozen=True)
class _Sent:
    """What is needed of a message that a destination has, without its payload, which may be large."""

    properties: dict[str, str]
    published_at: int
    destination: str
    producer_name: str


def _deliveries(messages: Iterable[_Sent], topic: str, subscription: str) -> pa.Table:
    """Returns the messages that the job has sent as rows of `deliveries`, one for each key.

    Anybody who may write to a destination can send messages with the job's properties, or send on a message that has
    them. Messages of a producer with another name, or with properties that the job does not write, are passed over.
    """
    # Version 0.1.0 named its producers without a hash of the source topic.
    is_producer = re.compile(f"{_APPLICATION}-(?:[0-9a-f]{{8}}-)?{re.escape(subscription)}-.*", re.DOTALL).fullmatch
    rows: dict[Key, dict[str, Any]] = {}
    for message in messages:
        properties = message.properties
        due = properties.get(DELIVER_AT, "")
        shaped_from = properties.get(SHAPED_FROM, "")
        key = text, attempt, occurrence = key_of(properties)
        if key in rows or not is_own(properties, topic) or not is_producer(message.producer_name):
            continue
        if not (_TIME.fullmatch(due) and _ATTEMPT.fullmatch(attempt) and _OCCURRENCE.fullmatch(occurrence)):
            continue
        rows[key] = {
            "topic": topic,
            "subscription": subscription,
            **MessagePosition.parse(text)._asdict(),
            "position": text,
            "deliver_at": int(due),
            "sent_at": message.published_at,
            "short_notice": False,
            "destination": message.destination,
            "destination_message_id": None,
            "batch_id": 0,
            "attempt": int(attempt) if attempt else None,
            "shaped_from": int(shaped_from) if _TIME.fullmatch(shaped_from) else None,
            "occurrence": int(occurrence) if occurrence else None,
            "occurrence_at": int(due) if occurrence else None,
        }
    return pa.Table.from_pylist(list(rows.values()), schema=DELIVERIES)


def _of_known_entries(tables: Tables, rows: pa.Table, durable: Mapping[str, Position]) -> pa.Table:
    """Returns the rows, all of one topic, whose entry is in `entries` or comes again from the source topics."""
    if not rows.num_rows:
        return rows
    comes_again = is_not_durable(rows, durable)
    old = where(rows, ~comes_again)
    if not old.num_rows:
        return rows
    [topic] = pc.unique(rows["topic"]).to_pylist()
    ledgers = ", ".join(map(str, pc.unique(old["ledger_id"]).to_pylist()))
    known = tables.query(
        "entries",
        "SELECT DISTINCT partition, ledger_id, entry_id FROM entries "  # noqa: S608
        f"WHERE topic = {literal(topic)} AND ledger_id IN ({ledgers})",
    )
    return concat([where(rows, comes_again), old.join(known, known.column_names, join_type="left semi")], rows.schema)


def _messages_since(client: pulsar.Client, topic: str, since: int) -> Iterator[_Sent]:
    """Yields the messages published to a destination since a time (ms), as far as the broker still has them."""
    for partition in client.get_topic_partitions(topic):
        reader = client.create_reader(partition, pulsar.MessageId.earliest, receiver_queue_size=5_000)
        if since:
            reader.seek(since)
        while reader.has_message_available():
            message = reader.read_next(30_000)
            if message.publish_timestamp() >= since:
                yield _Sent(
                    message.properties(), message.publish_timestamp(), message.topic_name(), message.producer_name()
                )
        reader.close()
