"""What destinations have of a job: up to which tick its producers have sent to each.

A broker with deduplication remembers a producer's last sequence id, and in it the tick. What was sent under a tick is
dropped as repeated when another message comes with it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

import pulsar

from broker.admin_rest import AdminClient, BrokerEntry, TopicLedgers
from broker.client import PulsarError, connect
from conf.errors import one_line
from conf.settings import Settings, rejects_topic
from streaming.checkpoint.checkpoint import Checkpoint
from streaming.checkpoint.offset import Offset
from streaming.release.attempt import Assignment, Generation
from streaming.release.naming import ROW_BITS, producer_name, schema_suffix
from streaming.release.outgoing import is_own
from streaming.release.producer_names import read_generations
from warehouse.message_schemas import read as read_schemas

_log = logging.getLogger(__name__)

_SECONDS = 5.0  # a start takes no longer because of destinations that don't answer
_THREADS = 16
_NAMES_AT_ONCE = 50  # of one topic, one after the other: a millisecond each, but for those that are in use
_BUSY_SECONDS = 0.2
_NAMED_TOPICS = 5
_LAST_ENTRIES = 1_000  # of a topic, among which what the job has sent last is looked for
_SPARE_SECONDS = 1.0  # before the end of the time nothing more is looked at
_CLOCKS_MILLIS = 15 * 60 * 1000  # by which machines' clocks may differ


class _Admin(Protocol):
    """Of `AdminClient` what is asked here."""

    def internal_stats(self, topic: str) -> TopicLedgers | None: ...
    def entry_metadata(self, topic: str, ledger_id: int, entry_id: int) -> BrokerEntry | None: ...


@dataclass(frozen=True)
class Names:
    """Producers of one topic partition, and up to which tick their names can be the job's own.

    Args:
        producers: their names, and the source topics of what each sends.
        newest_tick: the checkpoint's; most_tick: there can be no later one of its job.
        deadline: by the monotonic clock.
    """

    topic: str
    producers: tuple[tuple[str, str], ...]
    generations: Mapping[tuple[str, str], Generation]
    newest_tick: int
    most_tick: int
    deadline: float

    def last_tick(self, client: pulsar.Client, admin: _Admin) -> int:
        """The last tick of which one of them has sent anything; -1: none has.

        Raises:
            pulsar.PulsarException: the broker does not answer, or a producer is in use all the time.
        """
        return max(self._last_tick(client, admin, *producer) for producer in self.producers)

    def _last_tick(self, client: pulsar.Client, admin: _Admin, producer: str, source: str) -> int:
        number = self.generations.get((self.topic, producer), Generation(0, 0)).number
        while True:
            name = Generation(number, 0).name(producer)
            last_id = self._last_id(client, name)
            tick = last_id >> ROW_BITS
            if tick <= self.newest_tick:
                return tick
            if tick <= self.most_tick and self._is_sent(client, admin, name, source, last_id):
                return tick
            # Somebody else's: the job has gone on under the next name, or will.
            _log.warning("%s: somebody else has published as %s", self.topic, name)
            number += 1

    def _last_id(self, client: pulsar.Client, name: str) -> int:
        while True:
            try:
                producer = client.create_producer(self.topic, producer_name=name)
                break
            except pulsar.ProducerBusy:  # of what the job that was killed has left
                if time.monotonic() > self.deadline:
                    raise
                time.sleep(_BUSY_SECONDS)
        last: int = producer.last_sequence_id()
        producer.close()
        return last

    def _is_sent(self, client: pulsar.Client, admin: _Admin, name: str, source: str, last_id: int) -> bool:
        """Whether it was the job that has published under a name up to a sequence id, of a later tick than it knows.

        It was, unless the topic shows that what has this id, and all that has one of a later tick, is not as the job
        sends it. What the broker does not have any more, or does not tell, shows nothing.
        """
        is_found = False
        try:
            for (ledger_id, entry_id), is_job in reversed(self._last_entries(client, admin, name, source).items()):
                entry = admin.entry_metadata(self.topic, ledger_id, entry_id)
                if entry is None or entry.sequence_id is None:
                    return True
                if entry.sequence_id >> ROW_BITS <= self.newest_tick:
                    break
                is_found = is_found or entry.sequence_id >= last_id
                if is_job or not is_found:
                    return True
                self._check_time()
        except (PulsarError, pulsar.PulsarException) as error:
            _log.warning("%s: whether the job has published as %s is not known: %s", self.topic, name, one_line(error))
            return True
        return not is_found

    def _last_entries(
        self, client: pulsar.Client, admin: _Admin, name: str, source: str
    ) -> dict[tuple[int, int], bool]:
        """Of the topic's last entries those of a producer, in order, and whether they are as the job sends them."""
        stats, left = admin.internal_stats(self.topic), _LAST_ENTRIES
        start = pulsar.MessageId.earliest
        for ledger_id, n in sorted(stats.ledgers.items() if stats is not None else (), reverse=True):
            if n > left:
                start = pulsar.MessageId(-1, ledger_id, n - left - 1, -1)
                break
            left -= n
        reader = client.create_reader(self.topic, start)
        found: dict[tuple[int, int], bool] = {}
        try:
            while reader.has_message_available():
                message = reader.read_next(1_000)
                message_id = message.message_id()
                try:
                    if message.producer_name() == name:
                        found[message_id.ledger_id(), message_id.entry_id()] = False
                        found[message_id.ledger_id(), message_id.entry_id()] = is_own(message.properties(), source)
                except UnicodeDecodeError:
                    pass  # the job writes nothing like that
                self._check_time()
        finally:
            reader.close()
        return found

    def _check_time(self) -> None:
        if time.monotonic() > self.deadline - _SPARE_SECONDS:
            raise pulsar.Timeout("no time is left")


def most_tick(newest: Offset, now: int) -> int:
    """There can be no later tick of a checkpoint's job.

    Args:
        newest: an offset of it.
        now: ms since the epoch.
    """
    # There are not several ticks a millisecond.
    return newest.tick + max(0, now - newest.now) + _CLOCKS_MILLIS


def last_sent(
    settings: Settings, checkpoint: Checkpoint, newest: Offset, seconds: float = _SECONDS, now: int | None = None
) -> dict[str, int]:
    """By topic partition the last tick of which a checkpoint's job has sent anything to it, as far as its broker knows.

    It says in the log which of them could not be asked.

    Args:
        newest: the checkpoint's newest offset.
        seconds: it takes no longer.
        now: ms since the epoch; the time where not given.
    """
    last = most_tick(newest, time.time_ns() // 1_000_000 if now is None else now)
    generations = read_generations(checkpoint.folder)
    deadline = time.monotonic() + seconds
    client = connect(settings.pulsar, operation_timeout_seconds=max(1, int(seconds / 2)))
    threads = ThreadPoolExecutor(_THREADS, "last sent")
    try:
        asked = {}
        for topic, producers in _producers(settings, checkpoint.app_id, newest).items():
            for start in range(0, len(producers), _NAMES_AT_ONCE):
                some = tuple(producers[start : start + _NAMES_AT_ONCE])
                names = Names(topic, some, generations, newest.tick, last, deadline)
                asked[threads.submit(_ask, settings, client, names)] = topic
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
        threads.shutdown(wait=False, cancel_futures=True)
        threading.Thread(target=client.close, daemon=True).start()  # may wait for a broker that does not answer


def _ask(settings: Settings, client: pulsar.Client, names: Names) -> int:
    with AdminClient(settings.pulsar) as admin:
        if admin.internal_stats(names.topic) is None:
            return -1  # and it is not to be created here
        return names.last_tick(client, admin)


def _producers(settings: Settings, app_id: str, newest: Offset) -> dict[str, list[tuple[str, str]]]:
    """By topic partition the names under which the job of a checkpoint may have sent to it, and the source topics."""
    routes = newest.known_routes
    suffixes: dict[str, list[str]] = {}
    for topic, version in read_schemas(settings.warehouse):
        suffixes.setdefault(topic, []).append(schema_suffix(topic, version))
    lanes = sorted(
        {
            Assignment(app_id, 0, tick, is_planned, b"").lane(newest.lanes, newest.lane_set)
            for tick in range(newest.lanes)
            for is_planned in (False, True)
        }
    )
    found: dict[str, list[tuple[str, str]]] = {}
    for topic, route in routes.routes.items():
        to: list[tuple[str | None, str]] = [
            (None, rejects_topic(topic)),
            *((s.name, s.destination) for s in route.left),
        ]
        for subscription, destination in to:
            names = [
                (producer_name(app_id, topic, subscription, shard, lane, is_batched) + suffix, topic)
                for suffix in ("", *suffixes.get(topic, ()))
                for lane in lanes
                for shard in range(settings.tracker.shards)
                for is_batched in ((False, True) if newest.batch_millis else (False,))
                if subscription is not None or not (suffix or is_batched)
            ]
            for partition in _partitions(destination, newest.destinations.get(destination, 0)):
                found.setdefault(partition, []).extend(names)
    return found


def _partitions(topic: str, n: int) -> list[str]:
    return [f"{topic}-partition-{i}" for i in range(n)] if n > 0 else [topic]
