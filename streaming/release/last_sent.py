"""Asks the broker for the last tick whose messages a job has sent to each destination.

A broker with deduplication remembers a producer's last sequence id, which contains the tick. If that tick is later than
the checkpoint's last one, the checkpoint is an old copy: the job would give other messages the same sequence ids, and
the broker would drop them as repetitions.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Protocol

from broker.client import NoAnswerError, PulsarError
from broker.position import START, Position
from broker.protocol.brokers import Brokers
from broker.protocol.entries import EntryError, Message
from broker.protocol.reading import plain_messages, read_entries, texts_of
from broker.protocol.session import RefusedError
from broker.protocol.wire.pulsar_pb2 import ServerError
from broker.pulsar_admin.admin_rest import AdminClient
from broker.pulsar_admin.answers import TopicLedgers
from conf.errors import one_line
from conf.partitions import partition_name
from conf.settings import Settings, dead_letter_topic, rejects_topic
from streaming.checkpoint.checkpoint import Checkpoint
from streaming.checkpoint.offset import Offset
from streaming.release.attempt import Generation, lane_name
from streaming.release.naming import producer_name, schema_suffix
from streaming.release.outgoing import is_own
from streaming.release.producer_names import read_generations
from streaming.release.sequence_ids import tick_of
from tracker.in_flight import IN_ORDER, PLANNED
from warehouse.message_schemas import read as read_schemas

_log = logging.getLogger(__name__)

_SECONDS = 5.0  # the longest time that a start waits for destinations
_THREADS = 16
_NAMES_AT_ONCE = 50  # producer names of one topic that a thread asks for, a millisecond each unless a name is in use
_BUSY_SECONDS = 0.2  # between two attempts to get a producer
_SILENT_SECONDS = 1.0  # for which a broker may send nothing of a topic's last entries
# The broker does not know yet that the earlier job was killed, or the topic moves to another broker.
_PASSING = (ServerError.ProducerBusy, ServerError.ServiceNotReady)
_NAMED_TOPICS = 5  # the most topics that a log line names
_LAST_ENTRIES = 1_000  # the last entries of a topic that are searched for the job's last message
_SPARE_SECONDS = 1.0  # the search gives up so long before the deadline
_CLOCKS_MILLIS = 15 * 60 * 1000  # the most by which the clocks of machines differ


class _Admin(Protocol):
    """The part of `AdminClient` that is used here."""

    def internal_stats(self, topic: str) -> TopicLedgers | None: ...


def _is_own(message: Message, source: str) -> bool:
    try:
        return is_own(texts_of(message), source)
    except UnicodeDecodeError:
        return False


@dataclass(frozen=True)
class ProducerLookup:
    """The producer names under which a job may have sent to one topic partition, to be looked up at the broker.

    Attributes:
        topic: the destination, or a partition of it.
        producers: (name in the plan, source topic of its messages) of each producer.
        generations: of producers that have taken another name, by topic and the producer's name in the plan.
        newest_tick: of the checkpoint.
        latest_possible_tick: of the checkpoint's job; sequence ids of later ticks are somebody else's.
        deadline: seconds of the monotonic clock.
        is_of_job: called with a message and a source topic; returns whether the message looks as the job sends those of
            the source topic.
    """

    topic: str
    producers: tuple[tuple[str, str], ...]
    generations: Mapping[tuple[str, str], Generation]
    newest_tick: int
    latest_possible_tick: int
    deadline: float
    is_of_job: Callable[[Message, str], bool] = _is_own

    def last_tick(self, brokers: Brokers, admin: _Admin) -> int:
        """Returns the last tick whose messages one of the producers has sent; -1: none has sent any.

        It opens a producer for each name, which may create a missing topic.

        Raises:
            PulsarError: the broker does not answer, or a name is in use until the deadline.
        """
        return max(self._last_tick(brokers, admin, *producer) for producer in self.producers)

    def _last_tick(self, brokers: Brokers, admin: _Admin, producer: str, source: str) -> int:
        if time.monotonic() > self.deadline:
            raise NoAnswerError("no time is left")
        number = self.generations.get((self.topic, producer), Generation(0, 0)).number
        while True:
            name = Generation(number, 0).name(producer)
            last_id = self._last_id(brokers, name)
            tick = tick_of(last_id)
            if tick <= self.newest_tick:
                return tick
            if tick <= self.latest_possible_tick and self._is_sent(brokers, admin, name, source, last_id):
                return tick
            # Somebody else has published the sequence id: the job uses the next name, or will use it.
            _log.warning("%s: somebody else has published as %s", self.topic, name)
            number += 1

    def _last_id(self, brokers: Brokers, name: str) -> int:
        while True:
            try:
                producer = brokers.produce(self.topic, name)
                break
            except RefusedError as error:
                if error.error not in _PASSING or time.monotonic() > self.deadline:
                    raise
                time.sleep(_BUSY_SECONDS)
        last = producer.last_sequence_id
        producer.close()(_BUSY_SECONDS)
        return last

    def _is_sent(self, brokers: Brokers, admin: _Admin, name: str, source: str, last_id: int) -> bool:
        """Whether the job itself has published a sequence id of a tick after the checkpoint's last one.

        The answer is yes, unless the topic's last entries contain the message with this sequence id, and neither this
        message nor another one of such a tick looks as the job sends them.
        """
        is_found = False
        try:
            for sequence_id, is_job in reversed(self._last_entries(brokers, admin, name, source)):
                if tick_of(sequence_id) <= self.newest_tick:
                    break
                is_found = is_found or sequence_id >= last_id
                if is_job or not is_found:
                    return True
        except PulsarError as error:
            _log.warning("%s: whether the job has published as %s is not known: %s", self.topic, name, one_line(error))
            return True
        return not is_found

    def _last_entries(self, brokers: Brokers, admin: _Admin, name: str, source: str) -> list[tuple[int, bool]]:
        """Returns the entries among the topic's last ones that a producer has sent, in order.

        Returns:
            of each its sequence id (of a batch that of its first message), and whether it looks as the job sends it.
        """
        stats, left = admin.internal_stats(self.topic), _LAST_ENTRIES
        after = START
        for ledger_id, n in sorted(stats.ledgers.items() if stats is not None else (), reverse=True):
            if n > left:
                after = Position(ledger_id, n - left - 1)
                break
            left -= n
        found: list[tuple[int, bool]] = []
        with closing(read_entries(brokers, self.topic, after, _SILENT_SECONDS)) as entries:
            for entry in entries:
                envelope = entry.envelope
                if not isinstance(envelope, EntryError) and envelope.metadata.producer_name == name.encode():
                    is_job = any(self.is_of_job(one, source) for one in plain_messages(entry))
                    found.append((envelope.metadata.sequence_id, is_job))
                self._check_time()
        return found

    def _check_time(self) -> None:
        if time.monotonic() > self.deadline - _SPARE_SECONDS:
            raise NoAnswerError("no time is left")


def latest_possible_tick(newest: Offset, now: int) -> int:
    """Returns the latest tick that a checkpoint's job can have made since an offset.

    Args:
        newest: the offset.
        now: ms since the epoch.
    """
    # The job makes at most one tick a millisecond.
    return newest.tick + max(0, now - newest.now) + _CLOCKS_MILLIS


def last_sent(
    settings: Settings, checkpoint: Checkpoint, newest: Offset, seconds: float = _SECONDS, now: int | None = None
) -> dict[str, int]:
    """Returns by topic partition the last tick whose messages a checkpoint's job has sent to it; -1: none.

    Partitions whose broker does not answer in time are left out, and logged.

    Args:
        settings: of the job.
        checkpoint: of the job.
        newest: the checkpoint's newest offset.
        seconds: how long this may take.
        now: ms since the epoch; None: the machine's time.
    """
    last = latest_possible_tick(newest, time.time_ns() // 1_000_000 if now is None else now)
    generations = read_generations(checkpoint.folder)
    deadline = time.monotonic() + seconds
    brokers = Brokers(settings.pulsar, request_seconds=max(1, seconds / 2))
    threads = ThreadPoolExecutor(_THREADS, "last sent")
    try:
        asked = {}
        for topic, producers in _producers(settings, checkpoint.app_id, newest).items():
            for start in range(0, len(producers), _NAMES_AT_ONCE):
                some = tuple(producers[start : start + _NAMES_AT_ONCE])
                names = ProducerLookup(topic, some, generations, newest.tick, last, deadline)
                asked[threads.submit(_ask, settings, brokers, names)] = topic
        done, silent = wait(asked, seconds)
        ticks: dict[str, int] = {}
        unknown = {asked[one]: "no answer" for one in silent}
        for one in done:
            if (error := one.exception()) is not None:
                unknown[asked[one]] = one_line(error)
            else:
                ticks[asked[one]] = max(one.result(), ticks.get(asked[one], -1))
        if unknown:
            texts = [f"{topic} ({reason})" for topic, reason in sorted(unknown.items())]
            _log.warning(
                "whether the checkpoint is older than what was sent is not known of %d topics: %s",
                len(texts),
                ", ".join(texts[:_NAMED_TOPICS]),
            )
        return ticks
    finally:
        threading.Thread(target=_close, args=(threads, brokers), daemon=True).start()


def _close(threads: ThreadPoolExecutor, brokers: Brokers) -> None:
    """Closes connections when nobody uses them any more, which may take a while where the broker does not answer."""
    threads.shutdown(cancel_futures=True)
    brokers.close()


def _ask(settings: Settings, brokers: Brokers, names: ProducerLookup) -> int:
    with AdminClient(settings.pulsar) as admin:
        if admin.internal_stats(names.topic) is not None:
            return names.last_tick(brokers, admin)
        # A producer would create the topic. A topic of dead letters may have partitions that the offset does not know.
        if not (n := admin.partitions(names.topic)):
            return -1
        return max(replace(names, topic=name).last_tick(brokers, admin) for name in _partitions(names.topic, n))


def _producers(settings: Settings, app_id: str, newest: Offset) -> dict[str, list[tuple[str, str]]]:
    """Returns by topic partition the (name, source topic) of each producer that a checkpoint's job may have there."""
    routes = newest.known_routes
    suffixes: dict[str, list[str]] = {}
    for topic, version in read_schemas(settings.warehouse):
        suffixes.setdefault(topic, []).append(schema_suffix(topic, version))
    found: dict[str, list[tuple[str, str]]] = {}
    for topic, route in routes.routes.items():
        to: list[tuple[str | None, str, bool]] = [
            (None, rejects_topic(topic), False),
            *((s.name, s.destination, s.is_in_order) for s in route.left),
            *((s.name, dead_letter_topic(s.destination), s.is_in_order) for s in route.left),
        ]
        for subscription, destination, is_in_order in to:
            names = [
                (producer_name(app_id, topic, subscription, shard, lane, is_batched) + suffix, topic)
                for suffix in ("", *suffixes.get(topic, ()))
                for lane in _lanes(newest, is_in_order)
                for shard in range(settings.tracker.shard_count)
                for is_batched in ((False, True) if newest.batch_millis else (False,))
                if subscription is not None or not (suffix or is_batched)
            ]
            for partition in _partitions(destination, newest.destinations.get(destination, 0)):
                found.setdefault(partition, []).extend(names)
    return found


def _lanes(newest: Offset, is_in_order: bool) -> list[str]:
    """Returns the names of the lanes in which the job of an offset sends."""
    kinds = (0, PLANNED, *((IN_ORDER, IN_ORDER | PLANNED) if is_in_order else ()))
    return sorted(
        {lane_name(tick, kind, newest.lanes, newest.lane_set) for tick in range(newest.lanes) for kind in kinds}
    )


def _partitions(topic: str, n: int) -> list[str]:
    return [partition_name(topic, i) for i in range(n)] if n > 0 else [topic]
