"""The messages that have been delivered: those in `deliveries`, and those that only the destinations have."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import pulsar
import pyarrow as pa
import pyarrow.compute as pc

from broker.admin_rest import AdminClient
from broker.client import PulsarError, connect
from broker.position import Position
from conf.errors import DelayLakeError, one_line
from conf.settings import Settings
from recovery.done_occurrences import DoneOccurrences
from recovery.message_set import MessageSet
from recovery.trimmed import warn_of_trimmed
from streaming.release.outgoing import is_own
from tracker.commands.rebuilt import NOT_TO_DELIVER
from tracker.messages import (
    FIRST_IMPORTED_LEDGER,
    BoolArray,
    Int64Array,
    attempts_of,
    concat,
    has_occurrences,
    int64,
    message_ids,
    subscription_numbers,
    typed,
    where,
)
from tracker.retry_of import ATTEMPT
from warehouse.renumbering import Renumbering
from warehouse.schemas import DELIVERIES, MOVED_AT
from warehouse.tables import OnProgress, Tables, literal
from warehouse.tenure import Tenures

_log = logging.getLogger(__name__)

# The clocks of those who publish, send and rebuild may differ by this.
CLOCKS_MILLIS = 15 * 60 * 1000

# A time, ms since the epoch, by source topic and number of a subscription.
Times = dict[tuple[str, int], int]

_MESSAGES_AT_ONCE = 20_000

_MEANS = "what was sent there and not written down may come twice"

_BATCH_BITS = 20  # a batch index is below 2^20

# Producers' names begin with the app id of a checkpoint: any one, since the job's may be lost.
_APPLICATION = "delaylake-[0-9a-f]{12}"

# What the job writes in `delaylake.deliverAt`, with a number that fits the column.
_DELIVER_AT = re.compile(r"[0-9]{1,18}")
_ATTEMPT = re.compile(r"[0-9]{0,4}")  # the same of `delaylake.attempt`, empty where it is not there

_OCCURRENCE = re.compile(r"([1-9][0-9]{0,17})?")  # of `delaylake.occurrence`

_DELIVERIES = (
    "SELECT topic, subscription, partition, ledger_id, entry_id, batch_index, deliver_at, attempt, occurrence, "
    "occurrence_at, sent_at FROM deliveries"
)

# Messages that a subscription is not to get (again), and when they were to be delivered.
DONE = pa.schema([*list(NOT_TO_DELIVER)[:-1], ("deliver_at", pa.int64())])


class Delivered:
    """The messages that have been delivered to the subscriptions of the routes.

    Args:
        names: for each source topic the names of its subscriptions, by number.
        durable: by topic partition the last entry that does not come again from the source topics.
        tenures: messages handed out while a subscription was not there are `missed` by it; None: there are none.

    Attributes:
        occurrences: those of recurring messages that have been delivered. Such a message is delivered only when it has
            ended.
    """

    def __init__(
        self, names: Mapping[str, Sequence[str]], durable: Mapping[str, Position], tenures: Tenures | None = None
    ) -> None:
        self._names = names
        self._tenures = tenures or Tenures()
        self._durable = durable
        self._messages = MessageSet()
        self.occurrences = DoneOccurrences()
        self._not_durable: list[pa.Table] = []

    @property
    def durable(self) -> Mapping[str, Position]:
        """By topic partition the last entry that does not come again from the source topics."""
        return self._durable

    @property
    def not_durable(self) -> pa.Table:
        """The delivered messages that come again from the source topics, as DONE; also those that were missed."""
        return concat(self._not_durable, DONE)

    def add(self, rows: pa.Table) -> None:
        """Adds rows of `deliveries`; those of subscriptions that no route has are passed over."""
        numbers = subscription_numbers(rows, self._names)
        if has_occurrences(rows):
            recurs = pc.is_valid(rows["occurrence"]).to_numpy(zero_copy_only=False)
            self.occurrences.add(where(rows, recurs & (numbers >= 0)), numbers[recurs & (numbers >= 0)])
            rows, numbers = where(rows, ~recurs), numbers[~recurs]
        for number in np.unique(numbers[numbers >= 0]).tolist():
            self._messages.add(number, *_attempt_ids(where(rows, numbers == number)))
        is_again = is_not_durable(rows, self._durable) & (numbers >= 0)
        again = rows.filter(pa.array(is_again))  # a copy: a slice would keep all rows in memory
        self._not_durable.append(as_done(again, numbers[is_again]))
        of_all = again.drop_columns("subscription")
        for number, is_missed in self.missed(of_all):
            self._not_durable.append(as_done(where(again, is_missed), np.full(int(is_missed.sum()), number)))

    def contains(self, number: int, rows: pa.Table) -> BoolArray:
        """Returns a mask of the messages that have been delivered to the subscription with a number: bool, (rows,).

        Where the rows have a column `attempt`, of a retry is meant its own delivery; where they have `occurrence`, of a
        recurring message that one.
        """
        found = self._messages.contains(number, *_attempt_ids(rows))
        return found | self.occurrences.contains(number, rows) if has_occurrences(rows) else found

    def add_ended(self, number: int, rows: pa.Table) -> None:
        """Adds recurring messages of which a subscription has had the last occurrence."""
        self._messages.add(number, *_attempt_ids(rows))

    def find(self, rows: pa.Table) -> Iterator[tuple[int, BoolArray]]:
        """Yields for each number of a subscription a mask of the messages that have been delivered to it."""
        for number in self._messages.subscriptions:
            yield number, self.contains(number, rows)

    def missed(self, rows: pa.Table) -> Iterator[tuple[int, BoolArray]]:
        """Yields for each number of a subscription that was absent for some time a mask of the messages that it missed.

        Args:
            rows: with the columns that `Tenures.were_missed` needs.
        """
        for topic, names in self._names.items():
            for name in self._tenures.of_topic(topic):
                if name in names:
                    yield list(names).index(name), self._tenures.were_missed(rows, topic, name)


def _attempt_ids(rows: pa.Table) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Returns ids of each row's message and attempt: as `message_ids`, with the attempt above the batch index."""
    ledgers, entries, indexes = message_ids(rows)
    return ledgers, entries, np.maximum(indexes, 0) | attempts_of(rows) << _BATCH_BITS


def as_done(rows: pa.Table, numbers: Int64Array) -> pa.Table:
    """Returns messages as DONE for the subscriptions with these numbers, one for each row."""
    return typed({name: rows[name] for name in DONE.names} | {"subscription": pa.array(numbers)}, DONE)


def is_not_durable(rows: pa.Table, durable: Mapping[str, Position]) -> BoolArray:
    """Tells which rows' entries come again from the source topics; those of imported messages never do.

    Args:
        rows: with topic, partition, ledger_id and entry_id.
        durable: by topic partition the last entry that does not come again.

    Returns:
        a mask, bool, (rows,).
    """
    if not rows.num_rows:
        return np.zeros(0, np.bool_)
    topics = rows["topic"].combine_chunks().dictionary_encode()
    partitions, place = np.unique(int64(rows, "partition"), return_inverse=True)
    last = np.array(
        [
            [durable.get(partition_name(topic, p), Position(-1, -1)) for p in partitions.tolist()]
            for topic in topics.dictionary.to_pylist()
        ],
        np.int64,
    )
    ledger, entry = last[topics.indices.to_numpy(), place].T
    ledgers = int64(rows, "ledger_id")
    is_later: BoolArray = (ledgers > ledger) | ((ledgers == ledger) & (int64(rows, "entry_id") > entry))
    return is_later & (ledgers < FIRST_IMPORTED_LEDGER)


def partition_name(topic: str, partition: int) -> str:
    """Returns the name of a topic partition, as a client subscribes to it; -1: the topic is not partitioned."""
    return topic if partition < 0 else f"{topic}-partition-{partition}"


def read_delivered(
    tables: Tables,
    names: Mapping[str, Sequence[str]],
    durable: Mapping[str, Position],
    tenures: Tenures,
    on_progress: OnProgress,
) -> Delivered:
    """Reads the messages that the table `deliveries` has; the arguments are those of `Delivered`."""
    delivered = Delivered(names, durable, tenures)
    n = 0
    for rows in tables.stream(_DELIVERIES):
        delivered.add(rows)
        n += rows.num_rows
        on_progress("deliveries", "rows read", n)
    return delivered


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
    """Returns the messages that the job has sent as rows of `deliveries`: each position, attempt and occurrence once.

    Anybody who may write to a destination can send messages with the job's properties, or send on a message that has
    them. Messages of a producer with another name, or with properties that the job does not write, are passed over.
    """
    # Version 0.1.0 named its producers without a hash of the source topic.
    is_producer = re.compile(f"{_APPLICATION}-(?:[0-9a-f]{{8}}-)?{re.escape(subscription)}-.*", re.DOTALL).fullmatch
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for message in messages:
        properties = message.properties
        text = properties.get("delaylake.messageId", "")
        due = properties.get("delaylake.deliverAt", "")
        shaped_from = properties.get("delaylake.shapedFrom", "")
        attempt, occurrence = properties.get(ATTEMPT, ""), properties.get("delaylake.occurrence", "")
        key = (text, attempt, occurrence)
        if key in rows or not is_own(properties, topic) or not is_producer(message.producer_name):
            continue
        if not (_DELIVER_AT.fullmatch(due) and _ATTEMPT.fullmatch(attempt) and _OCCURRENCE.fullmatch(occurrence)):
            continue
        ledger, entry, partition, batch_index = (int(part) for part in text.split(":"))
        rows[key] = {
            "topic": topic,
            "subscription": subscription,
            "partition": partition,
            "ledger_id": ledger,
            "entry_id": entry,
            "batch_index": batch_index,
            "position": text,
            "deliver_at": int(due),
            "sent_at": message.published_at,
            "short_notice": False,
            "destination": message.destination,
            "destination_message_id": None,
            "batch_id": 0,
            "attempt": int(attempt) if attempt else None,
            "shaped_from": int(shaped_from) if _DELIVER_AT.fullmatch(shaped_from) else None,
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
