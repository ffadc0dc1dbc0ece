"""The receivers of all topic partitions; threads look for new partitions, and acknowledge durable entries."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from broker.client import PulsarError, close_quietly, connect
from broker.clusters.new_cluster import NewClusterError, check_topics
from broker.position import START, Position, SourceTopic
from broker.protocol.brokers import Brokers
from broker.protocol.byte_budget import ByteBudget, Share
from broker.protocol.consumer import EntryConsumer
from broker.protocol.encryption import Decryptor
from broker.pulsar_admin.admin_rest import AdminClient
from broker.pulsar_admin.topic_questions import TopicQuestions
from conf.message_size import max_delivered_bytes
from conf.partitions import split_partition
from conf.settings import Settings
from status.alerts import Alerts
from status.internal_errors import InternalErrors
from streaming.checkpoint.offset import Offset
from streaming.source.arrivals import Arrivals
from streaming.source.discovery import Discovery
from streaming.source.receiving.details import MessageDetails
from streaming.source.receiving.receiver import Limits, Receiver, ReceiverEvents, TopicAccess
from streaming.source.receiving.recurring import Recurring
from streaming.source.receiving.unreadable_messages import Acceptance
from streaming.source.watch.source_watch import SourceWatch
from warehouse.delta.tables import Tables
from warehouse.message_schemas import SchemaKeeper

_log = logging.getLogger(__name__)

_DISCOVERY_SECONDS = 10
_DISCOVERING = "looking for new partitions"  # in the log and in alerts
_PREFETCHED = 20_000  # the most messages of a topic partition that the broker sends before they are received
_PREFETCHED_BYTES = 16 << 20  # and about the most bytes
_NEXT_COMMAND_SECONDS = 0.001  # as `Limits.next_seconds`: commands are few, and who sends one waits for the answer
# The most bytes that a batch takes of each partition of the control topic. A command may name a thousand entries; so
# many bytes name tens of thousands, which does not delay due messages.
MAX_COMMAND_BYTES = 512 * 1024

# So many full batches may all receivers together hold, and so many have as their own.
_BATCHES_HELD = 3
_BATCHES_OWN = 2


class Receivers:
    """Receives the source topics and the control topic, and looks for new partitions of them.

    Args:
        settings: of the job.
        tables: of the warehouse, which stores schemas.
        alerts: records source topics that stand still, and entries that were not seen.
        why_not_taking: returns why batches take no messages now; None: they do.

    Attributes:
        open: the receivers of all topics that are read, by topic partition.
        looked_up: the source topics all of whose partitions are known and read.
        arrivals: hears of all that has come in.
        stopped: set by `stop`.
    """

    def __init__(
        self, settings: Settings, tables: Tables, alerts: Alerts, why_not_taking: Callable[[], str | None]
    ) -> None:
        self.open: dict[str, Receiver] = {}
        self.looked_up: set[str] = set()
        self.arrivals = Arrivals()
        self.stopped = threading.Event()
        self._settings = settings
        self._errors = InternalErrors(alerts)
        self._client = connect(settings.pulsar)
        self._admin = AdminClient(settings.pulsar)
        self._brokers = Brokers(settings.pulsar)
        self._decryptor = Decryptor.of_settings(settings.pulsar)
        n_bytes = settings.ingest.max_bytes_per_batch
        self._budget = ByteBudget(_BATCHES_HELD * n_bytes, _BATCHES_OWN * n_bytes, _PREFETCHED_BYTES)
        self._control_budget = ByteBudget(n_bytes, n_bytes, _PREFETCHED_BYTES)  # commands wait for no message
        self._broker = TopicQuestions(self._admin, settings.pulsar.subscription)
        self._schemas = SchemaKeeper(settings.warehouse, self._admin)
        self._discovery = Discovery(self._client, settings, alerts)
        self._watch = SourceWatch(settings, alerts, lambda: list(self.open.values()), why_not_taking, tables)
        self._read = {settings.control.topic, *(route.source for route in settings.routes)}
        self._forgotten: dict[str, str] = {}  # by topic partition the last entry that was forgotten
        self._known = set(self._read)  # the topics that are read, and those that were
        self._replayed: dict[str, Receiver] = {}  # for a replayed batch: receivers of topics that are not read any more
        # The end of each partition of the control topic at the start; None: not known yet.
        self._old_commands: dict[str, Position | None] = {}
        self._to_acknowledge: queue.SimpleQueue[Mapping[str, str]] = queue.SimpleQueue()
        self._new_cluster: NewClusterError | None = None
        self._recurring: dict[str, Recurring] = {}

    @property
    def destinations(self) -> dict[str, int]:
        """As `Discovery.destinations`."""
        return self._discovery.destinations

    @property
    def old_commands(self) -> list[str]:
        """The control topic's partitions with commands from before this start that are in no batch yet."""
        return list(self._old_commands)

    def begin(self, at: Offset) -> None:
        """Begins to receive after the positions of an offset."""
        self._discovery.begin(at)
        self._known = {*self._read, *at.routes}
        for topic, position in at.positions.items():
            if self._source_topic(topic).topic in self._read:
                self.after(topic, Position.parse(position))
        self._discover_commands()
        self._discover()
        self._old_commands = {n: None for n, r in self.open.items() if self.is_control(r)}
        threading.Thread(target=self._keep_discovering, name="discover partitions", daemon=True).start()
        threading.Thread(target=self._keep_acknowledging, name="acknowledge", daemon=True).start()
        self._watch.start()

    def after(self, name: str, after: Position) -> Receiver:
        """Returns the receiver of a topic partition; if there is none, starts one that begins after an entry."""
        source = self._source_topic(name)
        receivers = self.open if source.topic in self._read else self._replayed
        if name not in receivers:
            is_control = source.topic == self._settings.control.topic
            share = (self._control_budget if is_control else self._budget).join()

            def open_consumer() -> EntryConsumer:
                self._watch.begin(source)
                consumer = self._brokers.subscribe(
                    name,
                    self._settings.pulsar.subscription,
                    max_bytes=_PREFETCHED_BYTES,
                    max_messages=_PREFETCHED,
                    share=share,
                )
                try:
                    self._watch.begin(source)  # now also of a topic that was not there
                except PulsarError:
                    close_quietly(consumer)  # the next one could not have the subscription
                    raise
                return consumer

            receivers[name] = Receiver(
                source,
                TopicAccess(open_consumer, self._broker),
                after,
                self._limits(is_control, share),
                self._acceptance(source, is_control),
                ReceiverEvents(
                    self.arrivals.note_command if is_control else self.arrivals.note,
                    self._watch.follow(source, after),
                    partial(self._watch.passed, source),
                    partial(self._errors.note, name),
                    partial(self._errors.succeeded, name),
                ),
            )
            receivers[name].start()
        return receivers[name]

    def _limits(self, is_control: bool, share: Share) -> Limits:
        most = self._settings.ingest
        max_bytes = 4 * MAX_COMMAND_BYTES if is_control else 2 * most.max_bytes_per_batch
        limits = Limits(2 * most.max_messages_per_batch, max_bytes, share)
        return replace(limits, next_seconds=_NEXT_COMMAND_SECONDS) if is_control else limits

    def _acceptance(self, source: SourceTopic, is_control: bool) -> Acceptance:
        settings, topic = self._settings, source.topic
        return Acceptance(
            settings.tracker.max_delay_millis,
            max_delivered_bytes(settings, topic),
            details=None if is_control else MessageDetails(source, self._schemas),
            # One for all partitions of a topic.
            recurring=None if is_control else self._recurring.setdefault(topic, Recurring.of(settings, topic)),
            takes_replicated=is_control or settings.replicated == "all",
            decryptor=self._decryptor,
        )

    def is_control(self, receiver: Receiver) -> bool:
        """Whether a receiver is of the control topic."""
        return receiver.source.topic == self._settings.control.topic

    def has_read_old_commands(self) -> bool:
        """Whether batches have all commands that were sent before this start.

        Until then batches take no messages: an overdue message would be dispatched before its command is read.
        """
        for name in list(self._old_commands):
            receiver = self.open[name]
            try:
                end = self._old_commands[name] or receiver.topic_end()
            except PulsarError:
                return False
            self._old_commands[name] = end
            if not receiver.are_in_batches(end):
                return False
            del self._old_commands[name]
        return True

    def check(self) -> None:
        """Raises NewClusterError where a topic was made again, in another cluster."""
        if self._new_cluster is not None:
            raise self._new_cluster

    def forget(self, positions: Mapping[str, str]) -> None:
        """Forgets the messages of committed batches.

        Args:
            positions: by topic partition the last entry of these batches.
        """
        for topic, position in self._of_read(positions):
            if self._forgotten.get(topic) != position:
                self.open[topic].forget(Position.parse(position))
                self._forgotten[topic] = position
        for receiver in self._replayed.values():
            receiver.stop()
        self._replayed.clear()

    def acknowledge(self, positions: Mapping[str, str]) -> None:
        """Acknowledges durable entries in a thread, without waiting for the broker.

        Args:
            positions: by topic partition the last entry to acknowledge.
        """
        self._watch.durable_through(positions)
        self._to_acknowledge.put(positions)

    def stop(self) -> None:
        """Stops all receivers and the watch, and closes the connection."""
        self.stopped.set()
        self._to_acknowledge.put({})
        for receiver in [*self.open.values(), *self._replayed.values()]:
            receiver.stop()
        self._watch.stop()
        self._brokers.close()
        self._client.close()

    def _keep_acknowledging(self) -> None:
        while not self.stopped.is_set():
            for topic, position in self._of_read(self._to_acknowledge.get()):
                doing = f"acknowledging {topic}"
                try:
                    self.open[topic].acknowledge(Position.parse(position))
                    self._errors.succeeded(doing)
                except Exception as error:  # a later acknowledgement covers these entries, too
                    self._errors.note(doing, error)

    def _of_read(self, positions: Mapping[str, str]) -> list[tuple[str, str]]:
        """Returns the positions of topic partitions that are read, as (topic partition, position)."""
        return [(name, position) for name, position in positions.items() if name in self.open]

    def _source_topic(self, name: str) -> SourceTopic:
        topic, partition = split_partition(name)
        return SourceTopic(name, topic, partition) if topic in self._known else SourceTopic(name, name, -1)

    def _keep_discovering(self) -> None:
        while not self.stopped.wait(_DISCOVERY_SECONDS):
            has_failed = False
            for look in (self._discover_commands, self._discover, self._check_ends):
                try:
                    look()
                except Exception as error:
                    _log.warning("%s: %s: %s; trying again", _DISCOVERING, type(error).__name__, error)
                    has_failed = True
                    if not self.stopped.is_set():
                        self._errors.note(_DISCOVERING, error)
            if not has_failed:
                self._errors.succeeded(_DISCOVERING)

    def _check_ends(self) -> None:
        """Notices that a topic ends before the last entry received: it was made again, in another cluster."""
        for name, receiver in list(self.open.items()):
            try:
                end = receiver.topic_end()
                if START < end < receiver.last_received:
                    check_topics(self._admin, {name: str(receiver.last_received)})
            except NewClusterError as error:
                self._new_cluster = error
            except PulsarError:
                continue

    def _discover_commands(self) -> None:
        """Begins to receive the control topic's partitions. A failure ends the start: old commands precede messages."""
        for name in self._client.get_topic_partitions(self._settings.control.topic):
            self.after(name, START)

    def _discover(self) -> None:
        read = {receiver.source.topic for receiver in list(self.open.values())}
        for route in self._settings.routes:
            names = self._discovery.source(route.source, route.source in read)
            for name in names:
                self.after(name, START)
            if names:
                self.looked_up.add(route.source)
        self._discovery.look_at_destinations()
