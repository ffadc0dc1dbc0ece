"""Messages that wait and are in no table yet: the job has not acknowledged them to Pulsar, so they are found there.

A message is in the delayed index some seconds after it came in; one that is due sooner never is. Until its entry is
durable it stays in its source topic. Whoever lists what waits reads these entries, and leaves out what the tables know.
It costs the job nothing, and shows what came in while the job is down, too.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pyarrow as pa
from deltalake.exceptions import DeltaError

from broker.client import PulsarError
from broker.entries.message_ids import MessageRef
from broker.position import Position
from broker.protocol.brokers import Brokers
from broker.protocol.consumer import ReceivedEntry
from broker.protocol.encryption import Decryptor
from broker.protocol.entries import EntryError, Envelope, Message, is_dropped, messages_of
from broker.protocol.reading import read_entries
from broker.protocol.unpacking import UnpackedEntry, unpack
from broker.pulsar_admin.admin_rest import AdminClient
from conf.errors import UnreadableWarehouseError, one_line
from conf.partitions import partition_name
from conf.settings import Settings, Subscription
from tracker.ends import moved_end
from tracker.properties import DEBOUNCE_MAX
from tracker.scheduling import scheduling, with_native_time
from warehouse.delta.snapshot import Snapshot
from warehouse.named_queries import NamedQueries
from warehouse.pending import EFFECT
from warehouse.queries.index_rows import near_entries
from warehouse.queries.listing import PendingFilter, PendingMessage, State

# So much of a topic is read, of all partitions together; a note says where there is more.
MOST_ENTRIES = 2_000
MOST_MESSAGES = 10_000
MOST_BYTES = 64 << 20  # decompressed
_MOST_SECONDS = 5.0  # after these no further entry is read
_SECONDS = 2.0  # how long a broker is waited for
_LARGEST = 1 << 27  # bytes of a message: what the broker refuses need not be known here

_SQL = NamedQueries(__file__, effect=EFFECT)

_Id = tuple[int, int, int]  # ledger id, entry id, batch index (0: the entry is one message)


class Unacknowledged(NamedTuple):
    """What a source topic has that the job has not acknowledged.

    Attributes:
        messages: those that can be delivered, for all subscriptions, in any order.
        note: one line, why some may be missing; empty: none is.
    """

    messages: Sequence[PendingMessage]
    note: str = ""


NOTHING_MORE = Unacknowledged(())


@dataclass
class _Answer:
    """What was found last in a topic, or one partition of it, and when: seconds, monotonic."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    read_at: float = -math.inf
    found: Unacknowledged = NOTHING_MORE


class UnacknowledgedReader:
    """Reads what source topics have that the job has not acknowledged. May be used in any thread.

    Args:
        settings: of the job.
        keep_seconds: an answer is given again for so long.
    """

    def __init__(self, settings: Settings, keep_seconds: float = 0.0) -> None:
        self._settings = settings
        self._keep_seconds = keep_seconds
        self._lock = threading.Lock()
        self._answers: dict[tuple[str, int | None], _Answer] = {}

    def read(self, topic: str, partition: int | None, state: State = State.WAITING) -> Unacknowledged:
        """Reads a source topic, or one partition of it; what fails is in the note.

        It is read before a listing is begun: so nothing is missed that is sealed meanwhile.

        Args:
            topic: as the route names it.
            partition: its number; None: all.
            state: that is listed: what has only just been sent waits.
        """
        if state is not State.WAITING:
            return NOTHING_MORE
        answer = self._answer(topic, partition)
        with answer.lock:  # who asks while it is read gets the same answer
            if self._is_old(answer):
                answer.found = self._read(topic, partition)
                answer.read_at = time.monotonic()
            return answer.found

    def _answer(self, topic: str, partition: int | None) -> _Answer:
        """Returns the place of an answer, and forgets old ones."""
        with self._lock:
            kept = self._answers.items()
            self._answers = {key: one for key, one in kept if one.lock.locked() or not self._is_old(one)}
            return self._answers.setdefault((topic, partition), _Answer())

    def _is_old(self, answer: _Answer) -> bool:
        return time.monotonic() - answer.read_at >= self._keep_seconds

    def _read(self, topic: str, partition: int | None) -> Unacknowledged:
        found = Gathered(self._settings)
        try:
            self._read_partitions(topic, partition, found)
        except (PulsarError, OSError) as error:
            found.note = f"what came in within the last seconds may be missing: {one_line(error)}"
        return Unacknowledged(found.messages, found.note)

    def _read_partitions(self, topic: str, partition: int | None, found: Gathered) -> None:
        settings = self._settings.pulsar
        with closing(Brokers(settings, _SECONDS)) as brokers, AdminClient(settings, _SECONDS) as admin:
            n = admin.partitions(topic)
            if n is None:
                return
            numbers = [-1] if n == 0 else list(range(n)) if partition is None else [partition]
            for number in numbers:
                if found.is_late():
                    return
                name = partition_name(topic, number)
                stats = admin.internal_stats(name)
                if stats is None or settings.subscription not in stats.acknowledged:
                    continue
                after, end = Position(*stats.acknowledged[settings.subscription]), Position(*stats.end)
                if after >= end:
                    continue
                with closing(read_entries(brokers, name, after, _SECONDS)) as entries:
                    found.add_entries(entries, number)
                if found.note:
                    return


class Gathered:
    """The messages of entries that a topic's partitions have, as far as the bounds allow.

    Args:
        settings: of the job.

    Attributes:
        messages: those found, in any order.
        note: as of `Unacknowledged`; once it is set, nothing more is to be read.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._decryptor = Decryptor.of_settings(settings.pulsar)
        self._ends_at = time.monotonic() + _MOST_SECONDS
        self._n_entries = self._n_bytes = 0
        self.messages: list[PendingMessage] = []
        self.note = ""

    def add_entries(self, entries: Iterable[ReceivedEntry], partition: int) -> None:
        """Adds the messages of a partition's entries, until there are too many.

        Args:
            partition: its number; -1: the topic is not partitioned.
        """
        for entry in entries:
            self._n_entries += 1
            self._n_bytes += _size(entry)
            if self._n_entries > MOST_ENTRIES:
                self.note = f"more than {MOST_ENTRIES:,} entries have only just come in"
            elif self._n_bytes > MOST_BYTES:
                self.note = f"more than {MOST_BYTES >> 20} MiB have only just come in"
            if self.note or self.is_late():
                return
            for message in self._messages(entry, partition):
                if len(self.messages) == MOST_MESSAGES:
                    self.note = f"more than {MOST_MESSAGES:,} messages have only just come in"
                    return
                self.messages.append(message)

    def is_late(self) -> bool:
        """Whether the time for reading is over; then the note says so."""
        if time.monotonic() < self._ends_at:
            return False
        self.note = f"what came in within the last seconds may be missing: it takes over {_MOST_SECONDS:g} s to read"
        return True

    def _messages(self, received: ReceivedEntry, partition: int) -> Iterator[PendingMessage]:
        """Yields the messages of an entry. What can't be read, is in chunks, or gets its time later, is left out.

        What was replicated from another cluster is left out if the job leaves it out.
        """
        entry = unpack(received, self._decryptor, lambda *_: None, _LARGEST)
        if entry is None or entry.metadata is None or entry.payload is None:
            return
        if entry.metadata.replicated_from and self._settings.replicated != "all":
            return
        with suppress(EntryError):
            for message in messages_of(entry.metadata, entry.payload):
                with suppress(UnicodeDecodeError):
                    if (one := self._message(entry, message, partition)) is not None:
                        yield one

    def _message(self, entry: UnpackedEntry, message: Message, partition: int) -> PendingMessage | None:
        metadata = entry.metadata
        if metadata is None:
            return None
        native = metadata.deliver_at_time if metadata.deliver_at_time > 0 else None
        properties = with_native_time({name.decode(): value.decode() for name, value in message.properties}, native)
        published = metadata.publish_time
        now = time.time_ns() // 1_000_000
        given = scheduling(properties, published, now, self._settings.tracker.max_delay_millis)
        if given.reason is not None or given.retry is not None or DEBOUNCE_MAX in properties:
            return None  # when a retry is due, or one that is put off, the job says
        return PendingMessage(
            ref=MessageRef(*entry.position, partition, message.batch_index),
            deliver_at=given.deliver_at,
            subscriptions=(),
            batch_size=entry.n_messages,
            key=None if message.key is None else message.key.decode(),
            ordering_key=None if message.ordering_key is None else message.ordering_key.decode(),
            properties={name: value for name, value in properties.items() if not is_dropped(name)},
            sequence=0,
            event_time=message.event_time,
            publish_time=published,
            producer_name=metadata.producer_name.decode(),
            occurrence=given.occurrence,
            expires_at=given.expires_at,
        )


def _size(entry: ReceivedEntry) -> int:
    """Returns the bytes of an entry, decompressed."""
    stated = entry.envelope.metadata.uncompressed_size if isinstance(entry.envelope, Envelope) else 0
    return max(entry.n_bytes, stated)


def without_known(
    warehouse: str,
    found: Sequence[PendingMessage],
    subscriptions: Sequence[Subscription],
    wanted: PendingFilter,
    index_version: int,
) -> list[PendingMessage]:
    """Returns the messages that match a filter, each with the subscriptions for which no table knows what became of it.

    Args:
        warehouse: folder or URI of the tables.
        found: as `Unacknowledged.messages`, read before the version of the index was opened.
        subscriptions: those that are listed.
        wanted: the filter.
        index_version: of the delayed index that is listed.
    """
    at_any_time = wanted.model_copy(update={"due_from": None, "due_before": None})  # commands may have moved them
    found = [one for one in found if at_any_time.matches(one)] if wanted.state is State.WAITING else []
    if not found:
        return []
    known = _known(warehouse, found, index_version)
    return [part for one in found for part in _waiting(one, subscriptions, known) if wanted.matches(part)]


class _Change(NamedTuple):
    """What was done to a message, or a whole entry. By the first two fields the last one counts."""

    sequence: int
    effect: str
    deliver_at: int  # of a MOVE the new time, ms since the epoch
    subscription: str | None  # None: all


class _Known(NamedTuple):
    """What the tables know of messages, and of some others.

    Attributes:
        names: the subscriptions for which they know what became of a message; None: for all.
        changes: to messages, for a subscription; a row in the delayed index knows of them, too.
    """

    names: defaultdict[_Id, set[str | None]]
    changes: defaultdict[_Id, list[_Change]]


def _waiting(message: PendingMessage, subscriptions: Sequence[Subscription], known: _Known) -> Iterator[PendingMessage]:
    """Yields a message for those of some subscriptions that wait for it in no table, once for each time."""
    ref = message.ref
    ids = [(ref.ledger_id, ref.entry_id, index) for index in (max(ref.batch_index, 0), _WHOLE)]
    names = {name for id_ in ids for name in known.names[id_]}
    changes = sorted((change for id_ in ids for change in known.changes[id_]), key=lambda change: change[:2])
    parts: defaultdict[tuple[int, int], list[Subscription]] = defaultdict(list)
    for subscription in subscriptions:
        own = [change for change in changes if change.subscription in (None, subscription.name)]
        if not names & {None, subscription.name} and not (own and own[-1].effect == "CANCEL"):
            moves = [(change.deliver_at, change.sequence) for change in own if change.effect == "MOVE"]
            parts[moves[-1] if moves else (message.deliver_at, 0)].append(subscription)
    for (deliver_at, sequence), chosen in parts.items():
        part = replace(message, deliver_at=deliver_at, sequence=sequence, subscriptions=tuple(s.name for s in chosen))
        yield replace(part, expires_at=_end(part, [s.expire_after for s in chosen if s.expire_after is not None]))


def _end(message: PendingMessage, expire_after: Sequence[int]) -> int | None:
    """Returns when a message expires first, also by the `expire_after` (ms) of subscriptions; None: never."""
    ends = [message.deliver_at + millis for millis in expire_after]
    own = moved_end(message.expires_at, message.properties, message.deliver_at)
    ends += [] if own is None else [own]
    return min(ends, default=None)


_WHOLE = -1  # the batch index of what is known of a whole entry


def _known(warehouse: str, messages: Sequence[PendingMessage], index_version: int) -> _Known:
    """Looks up what the tables know.

    Args:
        messages: whose entries are looked up.
        index_version: as of `without_known`.
    """
    versions = {"delayed_index": index_version, "deliveries": None, "outcomes": None, "rejects": None}
    known = _Known(defaultdict(set), defaultdict(list))
    entries = [(one.ref.ledger_id, one.ref.entry_id) for one in messages]
    names = ("ledger_id", "entry_id")
    near = near_entries(pa.table([pa.array(column, pa.int64()) for column in zip(*entries, strict=True)], names=names))
    try:
        snapshot = Snapshot(warehouse, versions)
        for query in ("sealed", "delivered", "rejected"):
            for row in snapshot.sql(_SQL(query, near=near)).to_pylist():
                id_ = row["ledger_id"], row["entry_id"], max(row["batch_index"], 0)
                known.names[id_].add(row["subscription"])
        for row in snapshot.sql(_SQL("changed", near=near)).to_pylist():
            change = _Change(row["sequence"], row["effect"], row["deliver_at"] or 0, row["subscription"])
            known.changes[row["ledger_id"], row["entry_id"], row["batch_index"]].append(change)
    except (DeltaError, UnreadableWarehouseError, OSError):  # the listing itself says so
        return known
    return known
