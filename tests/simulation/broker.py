"""A Pulsar cluster in memory, behind the connection that `broker.protocol` makes: its producers and consumers are real.

It promises what Pulsar's docs do, and `test_fakes.py` compares with a real one:

- A topic keeps entries in order; an entry that was answered is not lost ("Messaging", Persistent topics).
- Deduplication: an entry whose sequence id is not above the last one of its producer's name is answered with the id
  -1:-1, and dropped ("Message deduplication"). A name that nobody has used for six hours is forgotten
  (`brokerDeduplicationProducerInactivityTimeoutMinutes`); a broker that loads the topic after that may know it again,
  of entries after the last snapshot (`MessageDeduplication.purgeInactiveProducers`).
- Of a message in chunks it looks at the last chunk alone (PIP 37, and from 3.0.2 on `MessageDeduplication`).
- A broker that loads a topic has the last ids of the newest snapshot (`brokerDeduplicationEntriesInterval`), and of the
  entries after it: there each chunk counts as the whole message. All names are in use again from then on.
- A topic that no broker has is refused with ServiceNotReady, or whoever looks for it gets no answer. The others go on.
- A topic whose backlog is over its quota loses its producers, and refuses new ones (`producer_exception`).
- A topic that is deleted with force loses its producers and consumers, and is made anew, empty and with no producer
  known, when it is next used (`allowAutoTopicCreation`).
- A topic with a publish rate takes what comes, and the broker reads nothing more of its connection until the rate is
  kept again: whatever else is on the connection waits, too (`PublishRateLimiterImpl`, "Message throttling").
- A topic that is terminated takes nothing more, and its consumers go on ("Terminate topics" in the admin docs).
- A partitioned topic has no entries of its own: each partition is a topic, with a broker, ledgers and positions of its
  own ("Partitioned topics" in the concepts of messaging).
- A ledger that is full is closed, and another one follows (`managedLedgerMaxEntriesPerLedger`). Who skips entries of a
  subscription, or lets them expire, acknowledges them; what was sent before comes all the same. Closed ledgers whose
  entries are all acknowledged are trimmed; who truncates a topic clears its backlog first ("Truncate topics").
- Where a topic has broker entry metadata each entry comes with the index of its last message, which goes on from ledger
  to ledger (`AppendIndexMetadataInterceptor`); a topic that is made anew counts from 0.
- A frame that is larger than the broker takes ends the connection (`maxMessageSize`).
- A name, and an exclusive subscription, belong to one connection at a time: another one gets ProducerBusy or
  ConsumerBusy.
- A durable subscription goes on after its mark-delete position: what was not acknowledged comes again.
- Who asks for a topic's end may hear of an entry before it comes: a dispatcher reads entries in a thread of its own.
- An entry that comes from another cluster has a position of its own here, and says where it was published. Where the
  topic deduplicates it is dropped unless its position there is above the last one that came from that cluster
  (`MessageDeduplication.isDuplicateReplV2`, which Pulsar 4.2 has). What came from elsewhere is not replicated on.
- Of what is under way when a connection ends some is done and some is not, in the order in which it was asked for.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

import pulsar

from broker.client import NoAnswerError, PulsarError
from broker.position import START, Position
from broker.protocol.brokers import Brokers
from broker.protocol.building import OutgoingMessage, batch_entry
from broker.protocol.consumer import EntryConsumer
from broker.protocol.entries import SOURCE_POSITION, open_envelope
from broker.protocol.frames import Frame, FrameDecoder
from broker.protocol.producer import EntryProducer
from broker.protocol.session import ClosedError, DisconnectedError, RefusedError
from broker.protocol.wire.pulsar_pb2 import BrokerEntryMetadata, Command, LastMessageId, ProducerAnswer, ServerError
from broker.pulsar_admin.answers import BrokerEntry, TopicLedgers
from conf.partitions import partition_name
from tests.simulation.faults import Faults
from tests.simulation.scheduler import Future, Process, Scheduler, wait_seconds
from tests.support.clients.raw_producer import entry as raw_entry

REQUEST_SECONDS = 5.0
_NEXT_SECONDS = 1e-7  # between two things that come one after the other
LOST_AFTER_SECONDS = (30.0, 60.0)  # after which a broker drops a connection that is silent: `keepAliveIntervalSeconds`
_DISPATCH_SECONDS = (0.005, 0.05, 0.5)  # from when an entry is stored until it is sent to consumers, where it is late
_LATE_DISPATCHES = 0.1
FORGETS_SECONDS = 6 * 3600  # after which a broker forgets a producer's name that nobody uses
_UNSIGNED = (1 << 64) - 1
_BROKERS = 2
MAX_MESSAGE_BYTES = 131_072  # of which batches are well below
_SUBSCRIPTIONS = ("delaylake", "delaylake-import")  # each topic has one of them
SNAPSHOT_ENTRIES = 10  # from one snapshot to the next; Pulsar has 1,000 of them


@dataclass(frozen=True)
class Entry:
    """An entry of a topic."""

    position: Position
    data: bytes
    n_messages: int = 1
    producer: str = ""
    sequence_id: int = -1
    highest_sequence_id: int = -1
    sender: Process | None = None  # None: nobody of the service
    last_index: int = -1  # of its last message, among all of its topic


@dataclass(eq=False)
class Reader:
    """A consumer, as the broker has it."""

    link: Link
    id: int
    next: int  # the index of the entry that is sent next
    permits: int = 0


@dataclass(eq=False)
class Topic:
    """A topic, with one durable subscription. Readers that are not durable are beside it."""

    name: str
    ledger: int
    entries: list[Entry] = field(default_factory=list)
    n_acknowledged: int = 0  # so many entries, from the first on
    reader: Reader | None = None
    plain_readers: list[Reader] = field(default_factory=list)
    producers: dict[str, tuple[Link, int]] = field(default_factory=dict)
    last_ids: dict[str, int] = field(default_factory=dict)  # by producer
    replicated_to: dict[str, Position] = field(default_factory=dict)  # by cluster: the last entry that came from it
    seen_at: dict[str, float] = field(default_factory=dict)  # likewise, seconds
    snapshot: dict[str, int] = field(default_factory=dict)  # of `last_ids`
    n_in_snapshot: int = 0  # so many entries, from the first on
    is_open: bool = True  # else nobody has it now: who asks for it has to ask again
    offline_until: float = 0.0  # until then no broker has it, seconds
    full_until: float = 0.0  # until then its backlog is over its quota, likewise
    is_terminated: bool = False
    per_second: float = 0.0  # the most messages that are published; 0: any number
    limited_until: float = 0.0  # until then, seconds
    tokens: float = 0.0  # so many may be published at once
    counted_at: float = 0.0  # `tokens` is as of then, seconds
    is_subscribed: bool = False  # somebody has had its durable subscription
    most_in_ledger: int = 0  # entries of a ledger; 0: any number, and entries come without broker entry metadata
    n_trimmed: int = 0  # so many entries, from the first on, are gone

    @property
    def end(self) -> Position:
        return self.entries[-1].position if self.entries else Position(self.ledger, -1)

    @property
    def next(self) -> Position:
        """Where the next entry will be."""
        return self.end.next if self.end.ledger_id == self.ledger else Position(self.ledger, 0)

    @property
    def ledgers(self) -> dict[int, int]:
        """The entries of each ledger that is not trimmed."""
        kept = Counter(entry.position.ledger_id for entry in self.entries[self.n_trimmed :])
        return {**kept, self.ledger: kept[self.ledger]}

    def entry(self, ledger: int, entry: int) -> Entry | None:
        """The entry with this position; None: there is none, or none any more."""
        return next((one for one in self.entries[self.n_trimmed :] if one.position == (ledger, entry)), None)


class Cluster:
    """All topics.

    Args:
        scheduler: of the simulation.
        faults: that fall on connections.
        name: which entries have that were replicated from it.
    """

    def __init__(self, scheduler: Scheduler, faults: Faults, name: str = "here") -> None:
        self.scheduler, self.name = scheduler, name
        self.faults = faults
        self.topics: dict[str, Topic] = {}
        self.partitions: dict[str, int] = {}  # how many each partitioned topic has
        self.most_in_ledger: dict[str, int] = {}  # by topic, as `Topic.most_in_ledger`
        self.links: list[Link] = []
        self.is_up = True
        self.has_rates = False  # some topics have one, and an acknowledgement is lost with its connection alone
        self.on_stored: Callable[[Topic, Entry], None] = lambda topic, entry: None
        self.on_acknowledged: Callable[[Topic, Position], None] = lambda topic, position: None
        self.refusals: Counter[tuple[str, int]] = Counter()  # producers not given, by topic and `ServerError`
        self.names = itertools.count()  # of producers that have none
        self.chance = random.Random(f"topics {faults.seed}")
        self._ledgers = itertools.count(7, 3)
        self._dispatch = random.Random(f"dispatch {faults.seed}")

    def partition_names(self, name: str) -> list[str]:
        """Returns the names of a topic's partitions, or its own: it is not partitioned."""
        n = self.partitions.get(name, 0)
        return [partition_name(name, i) for i in range(n)] if n else [name]

    def topic(self, name: str) -> Topic:
        assert name not in self.partitions, f"{name} has partitions, and somebody uses it as a topic of entries"
        if name not in self.topics:
            self.topics[name] = Topic(name, next(self._ledgers), most_in_ledger=self.most_in_ledger.get(name, 0))
        return self.topics[name]

    def publish(self, name: str, data: bytes, n_messages: int = 1) -> Position:
        """Stores an entry of somebody who is no part of the service."""
        topic = self.topic(name)
        return self._store(topic, Entry(topic.next, data, n_messages))

    def terminate(self, topic: Topic) -> None:
        """Somebody terminates the topic."""
        topic.is_terminated = True
        self._end_producers(topic, [*topic.producers])

    def skip(self, topic: Topic, n: int) -> None:
        """The first n entries are acknowledged for the subscription: somebody skips them, or they expire."""
        topic.n_acknowledged = max(topic.n_acknowledged, n)
        if topic.reader is not None:
            topic.reader.next = max(topic.reader.next, n)

    def trim(self, topic: Topic) -> None:
        """The broker deletes the closed ledgers of which all is acknowledged."""
        kept = {topic.ledger, *(entry.position.ledger_id for entry in topic.entries[topic.n_acknowledged :])}
        topic.n_trimmed = next(
            (i for i, entry in enumerate(topic.entries) if entry.position.ledger_id in kept), len(topic.entries)
        )

    def truncate(self, topic: Topic) -> None:
        """Somebody truncates the topic."""
        self.skip(topic, len(topic.entries))
        self.trim(topic)

    def has(self, name: str) -> bool:
        """Whether a broker has a topic now, or makes it when it is used."""
        return self.is_up and not self.is_offline(name) and self.topic(name).is_open

    def replicate(self, name: str, entry: Entry, cluster: str, deduplicates: bool) -> Position | None:
        """Stores an entry of another cluster's topic; None: it is a repetition, or from a third cluster."""
        topic = self.topic(name)
        if open_envelope(entry.data).metadata.replicated_from:
            return None
        if deduplicates and entry.position <= topic.replicated_to.get(cluster, START):
            return None
        topic.replicated_to[cluster] = entry.position
        data = as_replicated(entry.data, cluster, entry.position)
        return self._store(topic, Entry(topic.end.next, data, entry.n_messages))

    def delete(self, topic: Topic) -> None:
        """Somebody deletes the topic."""
        self._disconnect(topic)
        del self.topics[topic.name]

    def unload(self, topic: Topic) -> None:
        """Another broker has the topic in a moment: who uses it has to look for it again."""
        self._disconnect(topic)
        self.scheduler.after(self.scheduler.random.uniform(0.05, 2.0), partial(self._load, topic))

    def _disconnect(self, topic: Topic) -> None:
        self._forget_unused(topic)
        topic.is_open = False
        self._end_producers(topic, [*topic.producers])
        if topic.reader is not None:
            topic.plain_readers.append(topic.reader)
            topic.reader = None
        for reader in topic.plain_readers:
            reader.link.tell(reader.id, Command(type=Command.CLOSE_CONSUMER, close_consumer={"consumer_id": reader.id}))
        topic.plain_readers = []

    def take_offline(self, topic: Topic, seconds: float) -> None:
        """No broker has the topic for a while, as where a bookie or the metadata that it needs is missing."""
        topic.offline_until = max(topic.offline_until, self.scheduler.now + seconds)
        self.unload(topic)
        self.scheduler.at(topic.offline_until, partial(self._load, topic))

    def fill(self, topic: Topic, seconds: float) -> None:
        """The topic's backlog is over its quota for a while."""
        topic.full_until = self.scheduler.now + seconds
        self._end_producers(topic, [*topic.producers])

    def limit(self, topic: Topic, per_second: float, seconds: float) -> None:
        """The topic has a publish rate for a while."""
        topic.per_second, topic.limited_until = per_second, self.scheduler.now + seconds
        topic.tokens, topic.counted_at = per_second, self.scheduler.now

    def throttle(self, topic: Topic, n_messages: int) -> float:
        """Counts what is published to a topic; returns how long its connection is not read then, seconds."""
        now = self.scheduler.now
        if now >= topic.limited_until:
            return 0.0
        refilled = topic.tokens + (now - topic.counted_at) * topic.per_second
        topic.tokens, topic.counted_at = min(refilled, topic.per_second) - n_messages, now
        return max(0.0, -topic.tokens / topic.per_second)

    def refuse(self, name: str, error: int, why: str) -> NoReturn:
        """Refuses a producer of a topic."""
        self.refusals[name, error] += 1
        raise RefusedError(error, why.encode())

    def takes_nothing(self, name: str) -> bool:
        """Whether nothing can be published to a topic now though the broker is there."""
        topic = self.topics.get(name)
        is_closed = topic is not None and (topic.is_terminated or self.scheduler.now < topic.full_until)
        return self.is_up and (is_closed or self.is_offline(name))

    def is_offline(self, name: str) -> bool:
        return name in self.topics and self.scheduler.now < self.topics[name].offline_until

    def _load(self, topic: Topic) -> None:
        """A broker has the topic from now on, and knows of its producers what is stored."""
        if self.is_offline(topic.name):
            return
        topic.is_open = True
        topic.last_ids = dict(topic.snapshot)
        for entry in topic.entries[topic.n_in_snapshot :]:
            if entry.producer:
                topic.last_ids[entry.producer] = entry.highest_sequence_id
        topic.seen_at = dict.fromkeys(topic.last_ids, self.scheduler.now)

    def crash(self, seconds: float) -> None:
        """The broker ends, and is there again after a while. Entries and cursors are at the bookies."""
        self.is_up = False
        for topic in self.topics.values():
            self._forget_unused(topic)
        for link in [*self.links]:
            link.cut(DisconnectedError("the broker has ended"))
        self.scheduler.after(seconds, self._begin)

    def _begin(self) -> None:
        self.is_up = True
        for topic in self.topics.values():
            self._load(topic)

    def _end_producers(self, topic: Topic, names: list[str]) -> None:
        for name in names:
            link, producer_id = topic.producers.pop(name)
            topic.seen_at[name] = self.scheduler.now
            command = Command(type=Command.CLOSE_PRODUCER, close_producer={"producer_id": producer_id})
            link.tell(producer_id, command)

    def forget(self, link: Link) -> None:
        """Ends all that is on a connection."""
        for topic in self.topics.values():
            for name, (of, _) in list(topic.producers.items()):
                if of is link:
                    del topic.producers[name]
                    topic.seen_at[name] = self.scheduler.now
            if topic.reader is not None and topic.reader.link is link:
                topic.reader = None
            topic.plain_readers = [reader for reader in topic.plain_readers if reader.link is not link]

    def _forget_unused(self, topic: Topic) -> None:
        """Forgets the names that nobody has used for long, and takes a snapshot without them, as of the last one."""
        forgotten_at = self.scheduler.now - FORGETS_SECONDS
        names = [name for name, at in topic.seen_at.items() if at < forgotten_at and name not in topic.producers]
        for name in names:
            del topic.seen_at[name]
            topic.last_ids.pop(name, None)
        if names:
            topic.snapshot = dict(topic.last_ids)

    def produce(self, link: Link, topic: Topic, name: str, producer_id: int) -> int:
        """Gives a connection a producer's name; returns its last sequence id."""
        if topic.producers.get(name, (link, producer_id)) != (link, producer_id):
            raise RefusedError(ServerError.ProducerBusy, f"{name} is connected".encode())
        self._forget_unused(topic)
        topic.producers[name] = link, producer_id
        return topic.last_ids.get(name, -1)

    def store(self, topic: Topic, name: str, entry: Any, data: bytes, sender: Process | None = None) -> Position | None:
        """Stores what a producer has sent; None: it is a repetition."""
        highest = max(entry.highest_sequence_id, entry.sequence_id)
        if not entry.is_chunk or _is_last_chunk(data):
            if entry.sequence_id <= topic.last_ids.get(name, -1):
                return None
            topic.last_ids[name] = highest
        stored = Entry(topic.next, data, entry.n_messages, name, entry.sequence_id, highest, sender)
        position = self._store(topic, stored)
        if len(topic.entries) >= topic.n_in_snapshot + SNAPSHOT_ENTRIES:
            topic.snapshot, topic.n_in_snapshot = dict(topic.last_ids), len(topic.entries)
        return position

    def _store(self, topic: Topic, entry: Entry) -> Position:
        before = topic.entries[-1].last_index if topic.entries else -1
        topic.entries.append(replace(entry, last_index=before + entry.n_messages))
        if topic.most_in_ledger and entry.position.entry_id + 1 >= topic.most_in_ledger:
            topic.ledger = next(self._ledgers)
        self.on_stored(topic, entry)
        seconds = self._dispatch.choice(_DISPATCH_SECONDS) if self._dispatch.random() < _LATE_DISPATCHES else 0.0
        self.scheduler.after(seconds, partial(self.feed, topic))
        return entry.position

    def feed(self, topic: Topic) -> None:
        """Sends consumers what they have asked for."""
        for reader in [*topic.plain_readers, *([topic.reader] if topic.reader is not None else [])]:
            self._feed(topic, reader)

    def _feed(self, topic: Topic, reader: Reader) -> None:
        reader.next = max(reader.next, topic.n_trimmed)
        while reader.permits > 0 and reader.next < len(topic.entries):
            entry = topic.entries[reader.next]
            reader.next += 1
            reader.permits -= entry.n_messages
            position = {"ledger_id": entry.position.ledger_id, "entry_id": entry.position.entry_id}
            command = Command(type=Command.MESSAGE, message={"consumer_id": reader.id, "id": position})
            reader.link.tell(reader.id, command, _with_index(entry) if topic.most_in_ledger else entry.data)

    def acknowledge(self, topic: Topic, position: Position) -> None:
        done = sum(entry.position <= position for entry in topic.entries)
        if done > topic.n_acknowledged:
            self.on_acknowledged(topic, position)
            topic.n_acknowledged = done

    def reset(self, topic: Topic, n_acknowledged: int) -> None:
        """Lets the subscription go on after so many entries; its consumer has to look for the topic again."""
        if topic.reader is not None:
            command = Command(type=Command.CLOSE_CONSUMER, close_consumer={"consumer_id": topic.reader.id})
            topic.reader.link.tell(topic.reader.id, command)
            topic.reader = None
        topic.n_acknowledged = n_acknowledged


class Link:
    """Stands in for `broker.protocol.connection.Connection`. What is sent each way comes in order, or not at all."""

    def __init__(self, cluster: Cluster, process: Process) -> None:
        self.address = "the broker"
        self.error: PulsarError | None = None
        self.max_message_bytes = MAX_MESSAGE_BYTES
        self._cluster, self._scheduler, self._process = cluster, cluster.scheduler, process
        self._ids = itertools.count(1)
        self._attached: dict[int, Any] = {}
        self._topics: dict[int, Topic] = {}  # of producers and consumers
        self._names: dict[int, str] = {}  # of producers
        self._to_broker = self._to_client = self._scheduler.now  # when the last one comes
        self._answers: list[Future[Any]] = []
        self._is_cut = False  # the broker hears nothing more
        self._read_from = 0.0  # until then the broker reads nothing, seconds
        self._unread: deque[Callable[[], None]] = deque()  # what has come meanwhile
        cluster.links.append(self)

    def attach(self, one: Any) -> int:
        own_id = next(self._ids)
        self._attached[own_id] = one
        return own_id

    def detach(self, own_id: int) -> None:
        self._attached.pop(own_id, None)

    def flush(self) -> None:
        pass

    def write(self, frame: bytes, is_more: bool = False) -> None:
        self._check()
        [(command, data)] = FrameDecoder().feed(frame)
        if len(data) > self.max_message_bytes:
            self._scheduler.after(0.0, partial(self.cut, DisconnectedError("the frame is too large")))
        self._ask_broker(partial(self._sent, command.send, data))

    def send(self, kind: Command.Type, **fields: Any) -> None:
        self._check()
        if kind == Command.FLOW:
            flow = fields["flow"]
            self._ask_broker(partial(self._flow, flow["consumer_id"], flow["permits"]))

    def request(self, kind: Command.Type, name: str, **fields: Any) -> Any:
        return self.ask(kind, name, **fields).wait(REQUEST_SECONDS)

    def ask(self, kind: Command.Type, name: str, **fields: Any) -> Answer:
        self._check()
        answer: Future[Any] = Future()
        self._answers.append(answer)
        self._ask_broker(partial(self._requested, kind, fields, answer))
        return Answer(answer)

    def close(self) -> None:
        """What has been sent before comes to the broker, and then the end: also where the process is killed in it."""
        self._ask_broker(self._hang_up)
        self._end(DisconnectedError("the connection is closed"))

    def cut(self, error: PulsarError) -> None:
        """The connection ends; both sides hear of it, and of what is under way nothing comes."""
        self._hang_up()
        self._scheduler.after(0.0, partial(self._scheduler.within, self._process, partial(self._end, error)))

    def leave(self) -> None:
        """The process has ended: of what it has sent some comes to the broker."""
        self._scheduler.after(self._scheduler.random.choice([0.0, 0.002, 0.1]), self._hang_up)

    def tell(self, own_id: int, command: Command, data: bytes = b"") -> None:
        """Sends a frame to a producer or consumer."""
        if not self._is_cut:
            self._to_client = max(self._to_client + _NEXT_SECONDS, self._scheduler.now + self._latency())
            self._scheduler.at(self._to_client, partial(self._came, own_id, Frame(command, data)))

    def _latency(self) -> float:
        chance = self._scheduler.random
        return chance.uniform(0.0002, 0.003) if chance.random() < 0.98 else chance.uniform(0.01, 1.0)

    def _check(self) -> None:
        if self.error is not None:
            raise DisconnectedError(f"the connection has ended: {self.error}")

    def _end(self, error: PulsarError) -> None:
        if self.error is not None:
            return
        self.error = error
        attached, answers = list(self._attached.values()), self._answers
        self._attached, self._answers = {}, []
        _tell_end(attached, answers, error)

    def _hang_up(self) -> None:
        if not self._is_cut:
            self._is_cut = True
            self._cluster.forget(self)
            self._cluster.links.remove(self)

    def _ask_broker(self, action: Callable[[], None]) -> None:
        """Lets something come to the broker, unless the connection ends before."""
        if self._cluster.faults.is_now("connection lost"):
            self._scheduler.after(0.0, partial(self.cut, DisconnectedError("the connection is lost")))
        self._to_broker = max(self._to_broker + _NEXT_SECONDS, self._scheduler.now + self._latency())
        self._scheduler.at(self._to_broker, partial(self._reach_broker, action))

    def _reach_broker(self, action: Callable[[], None]) -> None:
        if self._is_cut:
            return
        if self._unread:
            self._unread.append(action)
        elif self._scheduler.now < self._read_from:
            self._unread.append(action)
            self._scheduler.at(self._read_from, self._read_on)
        else:
            action()

    def _read_on(self) -> None:
        while self._unread and not self._is_cut:
            if self._scheduler.now < self._read_from:
                self._scheduler.at(self._read_from, self._read_on)
                return
            self._unread.popleft()()

    def _came(self, own_id: int, frame: Frame) -> None:
        """A frame has come to the process."""

        def take() -> None:
            if (one := self._attached.get(own_id)) is not None:
                one.received(frame)

        self._scheduler.within(self._process, take)

    def _answer(self, answer: Future[Any], result: Any) -> None:
        if self._is_cut or self._cluster.faults.is_now("no answer"):
            return
        self._to_client = max(self._to_client + _NEXT_SECONDS, self._scheduler.now + self._latency())

        def came() -> None:
            if not self._is_cut and not answer.done():
                if isinstance(result, Exception):
                    answer.set_exception(result)
                else:
                    answer.set_result(result)

        self._scheduler.at(self._to_client, partial(self._scheduler.within, self._process, came))

    def _flow(self, consumer_id: int, permits: int) -> None:
        topic = self._topics.get(consumer_id)
        if topic is not None and (reader := self._reader(topic, consumer_id)) is not None:
            reader.permits += permits
            self._cluster.feed(topic)

    def _reader(self, topic: Topic, consumer_id: int) -> Reader | None:
        readers = [*topic.plain_readers, *([topic.reader] if topic.reader is not None else [])]
        return next((one for one in readers if (one.link, one.id) == (self, consumer_id)), None)

    def _sent(self, send: Any, data: bytes) -> None:
        topic = self._topics.get(send.producer_id)
        name = self._names.get(send.producer_id, "")
        if topic is None or topic.producers.get(name) != (self, send.producer_id):
            return
        if self._cluster.faults.is_now("unload"):
            self._cluster.unload(topic)
            return
        self._read_from = self._scheduler.now + self._cluster.throttle(topic, send.n_messages)
        position = self._cluster.store(topic, name, send, data, self._process)
        ledger, entry = (_UNSIGNED, _UNSIGNED) if position is None else position
        receipt = {
            "producer_id": send.producer_id,
            "sequence_id": send.sequence_id,
            "highest_sequence_id": send.highest_sequence_id,
            "id": {"ledger_id": ledger, "entry_id": entry},
        }
        self.tell(send.producer_id, Command(type=Command.SEND_RECEIPT, send_receipt=receipt))

    def _requested(self, kind: Command.Type, fields: dict[str, Any], answer: Future[Any]) -> None:
        try:
            self._answer(answer, self._result(kind, fields))
        except PulsarError as error:
            self._answer(answer, error)

    def _result(self, kind: Command.Type, fields: dict[str, Any]) -> Any:
        cluster = self._cluster
        if kind == Command.PRODUCER:
            topic = self._open(fields["topic"])
            if topic.is_terminated:
                cluster.refuse(topic.name, ServerError.TopicTerminatedError, "the topic is terminated")
            if self._scheduler.now < topic.full_until:
                why = "the backlog is over its quota"
                cluster.refuse(topic.name, ServerError.ProducerBlockedQuotaExceededException, why)
            name = fields.get("producer_name") or f"standalone-{next(cluster.names)}"
            last = cluster.produce(self, topic, name, fields["producer_id"])
            self._topics[fields["producer_id"]], self._names[fields["producer_id"]] = topic, name
            return ProducerAnswer(producer_name=name.encode(), last_sequence_id=last)
        if kind == Command.CLOSE_PRODUCER:
            found = self._topics.pop(fields["producer_id"], None)
            name = self._names.pop(fields["producer_id"], "")
            if found is not None and found.producers.get(name) == (self, fields["producer_id"]):
                del found.producers[name]
                found.seen_at[name] = self._scheduler.now
            return None
        if kind == Command.SUBSCRIBE:
            topic = self._open(fields["topic"])
            if not fields["durable"]:
                first = fields["start_message_id"]
                start = Position(_signed(first["ledger_id"]), _signed(first["entry_id"]))
                following = sum(entry.position <= start for entry in topic.entries)
                topic.plain_readers.append(Reader(self, fields["consumer_id"], following))
                self._topics[fields["consumer_id"]] = topic
                return None
            if topic.reader is not None:
                raise RefusedError(ServerError.ConsumerBusy, b"the subscription is exclusive")
            topic.reader, topic.is_subscribed = Reader(self, fields["consumer_id"], topic.n_acknowledged), True
            self._topics[fields["consumer_id"]] = topic
            return None
        found = self._topics.get(fields["consumer_id"])
        reader = None if found is None else self._reader(found, fields["consumer_id"])
        if found is None or reader is None:
            raise RefusedError(ServerError.ServiceNotReady, b"no such consumer")
        topic = found
        if kind == Command.CLOSE_CONSUMER:
            if topic.reader is reader:
                topic.reader = None
            else:
                topic.plain_readers.remove(reader)
            return None
        if kind == Command.GET_LAST_MESSAGE_ID:
            return LastMessageId(id={"ledger_id": topic.end.ledger_id, "entry_id": topic.end.entry_id & _UNSIGNED})
        if kind == Command.ACK:
            if reader is topic.reader and cluster.faults.is_now("acknowledgement lost"):
                if cluster.has_rates:
                    self.cut(DisconnectedError("the connection is lost"))
            elif reader is topic.reader:
                [last] = fields["ids"]
                cluster.acknowledge(topic, Position(last["ledger_id"], last["entry_id"]))
            return None
        raise AssertionError(f"nobody asks for {kind}")

    def _open(self, name: str) -> Topic:
        topic = self._cluster.topic(name)
        if not topic.is_open:
            raise RefusedError(ServerError.ServiceNotReady, b"the topic is being loaded")
        return topic


def _with_index(entry: Entry) -> bytes:
    """Returns an entry as a broker sends it that keeps indexes."""
    metadata = BrokerEntryMetadata(index=entry.last_index).SerializeToString()
    return b"\x0e\x02" + len(metadata).to_bytes(4) + metadata + entry.data


def _is_last_chunk(data: bytes) -> bool:
    metadata = open_envelope(data).metadata
    return metadata.chunk_id == metadata.n_chunks - 1


def as_replicated(data: bytes, cluster: str, position: Position) -> bytes:
    """Returns an entry as it is in the clusters to which it was replicated."""
    envelope = open_envelope(data)
    envelope.metadata.replicated_from = cluster.encode()
    envelope.metadata.properties.add(key=SOURCE_POSITION.encode(), value=str(position).encode())
    return raw_entry(envelope.metadata, envelope.payload)


def _signed(number: int) -> int:
    return number - (1 << 64) if number > _UNSIGNED >> 1 else number


def _tell_end(attached: list[Any], answers: list[Future[Any]], error: PulsarError) -> None:
    for answer in answers:
        if not answer.done():
            answer.set_exception(error)
    for one in attached:
        one.disconnected(error)


class Answer:
    """Stands in for `broker.protocol.connection.Answer`."""

    def __init__(self, answer: Future[Any]) -> None:
        self._answer = answer

    def when_done(self, take: Callable[[Any], None]) -> None:
        self._answer.add_done_callback(take)

    def wait(self, seconds: float) -> Any:
        try:
            return self._answer.result(seconds)
        except TimeoutError:
            raise NoAnswerError("the broker does not answer a request") from None


def _broker_of(topic: str) -> int:
    return zlib.crc32(topic.encode()) % _BROKERS


class SimulatedBrokers(Brokers):
    """A process's connections to the cluster, which has two brokers: what comes by one may overtake the other's."""

    def __init__(self, cluster: Cluster, process: Process) -> None:
        self._cluster, self._process = cluster, process
        self._links: dict[int, Link] = {}  # by broker
        self._is_closed = False

    @property
    def links(self) -> list[Link]:
        """The connections that there are, or were."""
        return list(self._links.values())

    def _connection_for(self, topic: str) -> Any:
        if self._is_closed:
            raise ClosedError("the connections are closed")
        if not self._cluster.is_up:
            self._cluster.scheduler.wait(0.1)
            raise NoAnswerError("the broker does not answer")
        if self._cluster.is_offline(topic):
            self._look_for(topic)
        number = _broker_of(topic)
        link = self._links.get(number)
        if link is None or link.error is not None:
            link = self._links[number] = Link(self._cluster, self._process)
        return link

    def _look_for(self, topic: str) -> None:
        """Waits for a broker that has a topic.

        Raises:
            PulsarError: none has it.
        """
        cluster = self._cluster
        if cluster.chance.random() < 0.5:
            cluster.refuse(topic, ServerError.ServiceNotReady, "no broker has the topic")
        ends_at = cluster.scheduler.now + REQUEST_SECONDS
        cluster.scheduler.wait(min(ends_at, cluster.topics[topic].offline_until) - cluster.scheduler.now)
        if self._is_closed:
            raise ClosedError("the connections are closed")
        if cluster.is_offline(topic):
            raise NoAnswerError("the broker does not answer a request")

    def _known_connection(self, topic: str) -> Any:
        link = self._links.get(_broker_of(topic))
        return None if self._is_closed or link is None or link.error is not None else link

    def subscribe(self, topic: str, subscription: str, **limits: Any) -> EntryConsumer:
        return EntryConsumer(self._connection_for(topic), topic, subscription, **limits)

    def produce(
        self, topic: str, name: str = "", schema: Any = None, on_progress: Callable[[], None] = lambda: None
    ) -> EntryProducer:
        return EntryProducer(lambda: self._connection_for(topic), topic, name, schema, on_progress)

    def partitions(self, topic: str) -> int:
        return self._cluster.partitions.get(topic, 0)

    def close(self) -> None:
        self._is_closed = True
        for link in self.links:
            if link.error is None:
                link.close()


class Admin:
    """Stands in for `AdminClient`: what the service asks of it in a simulation.

    A subscription that is reset loses its consumers, and goes on with an entry, or with the first one that was
    published at a time or later ("Reset cursor" in Pulsar's admin docs).

    Args:
        point: called with the name of a side effect.
    """

    url = "the broker's admin API"

    def __init__(self, cluster: Cluster, point: Callable[[str], None] = lambda name: None) -> None:
        self._cluster, self._point = cluster, point

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass

    def health(self) -> bool:
        return self._cluster.is_up

    def partitions(self, topic: str) -> int | None:
        if not self._cluster.is_up:
            raise PulsarError("the broker does not answer")
        return self._cluster.partitions.get(topic, 0 if topic in self._cluster.topics else None)

    def entry_published_at(self, topic: str, time: int) -> tuple[int, int] | None:
        return None  # as where the broker does not say: all entries are read

    def _found(self, name: str) -> Topic | None:
        """The topic; None: there is none.

        Raises:
            PulsarError: the broker does not answer, or has not loaded it.
        """
        if not self._cluster.is_up:
            raise PulsarError("the broker does not answer")
        if self._cluster.is_offline(name):
            raise PulsarError(f"no broker has {name}")
        return self._cluster.topics.get(name)

    def message_index(self, topic: str, ledger: int, entry: int) -> int | None:
        of = self._found(topic)
        found = None if of is None or not of.most_in_ledger else of.entry(ledger, entry)
        return None if found is None else found.last_index

    def entry_of_index(self, topic: str, index: int) -> tuple[int, int] | None:
        of = self._found(topic)
        entries = [] if of is None else of.entries
        number, found = next(((i, e) for i, e in enumerate(entries) if e.last_index >= index), (0, None))
        if of is None or found is None:
            return None
        return Position(-1, -1) if number < of.n_trimmed else found.position

    def has_room(self, topic: str, subscription: str) -> bool:
        of = self._found(topic)
        return of is None or of.reader is None or of.reader.permits > 0

    def entry(self, topic: str, ledger: int, entry: int) -> tuple[dict[str, str], bytes] | None:
        of = self._found(topic)
        found = None if of is None else of.entry(ledger, entry)
        return None if found is None else ({}, open_envelope(found.data).payload)

    def connections(self, topic: str, subscription: str) -> list[str]:
        return [] if self._cluster.topic(topic).reader is None else ["somebody"]

    def entry_metadata(self, topic: str, ledger: int, entry: int) -> BrokerEntry | None:
        of = self._found(topic)
        found = None if of is None else of.entry(ledger, entry)
        if found is None:
            return None
        metadata = open_envelope(found.data).metadata
        is_part = metadata.chunk_id < metadata.n_chunks - 1
        name = metadata.producer_name.decode()
        return BrokerEntry(found.n_messages, metadata.publish_time, name, None, {}, False, is_part)

    def skip_all(self, topic: str, subscription: str) -> None:
        self._reset(topic, len(self._cluster.topic(topic).entries))

    def reset_to_entry(self, topic: str, subscription: str, ledger: int, entry: int) -> None:
        entries = self._cluster.topic(topic).entries
        self._reset(topic, sum(one.position < (ledger, entry) for one in entries))

    def reset_to_time(self, topic: str, subscription: str, published_at: int) -> None:
        times = [open_envelope(one.data).metadata.publish_time for one in self._cluster.topic(topic).entries]
        self._reset(topic, next((i for i, time in enumerate(times) if time >= published_at), len(times)))

    def _reset(self, topic: str, n_acknowledged: int) -> None:
        self._point("rewind: before")
        if not self._cluster.is_up:
            raise PulsarError("the broker does not answer")
        self._cluster.reset(self._cluster.topic(topic), n_acknowledged)
        self._point("rewind: a subscription is reset")

    def internal_stats(self, name: str) -> TopicLedgers | None:
        topic = self._found(name)
        if topic is None:
            return None
        first = topic.entries[0].position if topic.entries else topic.next
        done = topic.entries[topic.n_acknowledged - 1].position if topic.n_acknowledged else first._replace(entry_id=-1)
        index = len(topic.entries) if topic.reader is None else topic.reader.next
        following = topic.entries[index].position if index < len(topic.entries) else topic.next
        return TopicLedgers(
            topic.ledgers,
            dict.fromkeys(_SUBSCRIPTIONS, done),
            dict.fromkeys(_SUBSCRIPTIONS, following),
            topic.end,
        )

    def backlog(self, topic: str, subscription: str) -> int | None:
        of = self._found(topic)
        return None if of is None else sum(entry.n_messages for entry in of.entries[of.n_acknowledged :])

    def individually_acknowledged(self, topic: str, subscription: str) -> list[Any]:
        return []


class Client:
    """Stands in for `pulsar.Client`. Its producers are those of `broker.protocol`, with the other one's methods."""

    def __init__(self, brokers: SimulatedBrokers) -> None:
        self._brokers = brokers

    def get_topic_partitions(self, topic: str) -> list[str]:
        return self._brokers.partition_names(topic)

    def create_producer(self, topic: str, producer_name: str, **_: Any) -> ClientProducer:
        try:
            return ClientProducer(self._brokers.produce(topic, producer_name))
        except RefusedError as error:
            raise pulsar.ProducerBusy(str(error)) from error
        except PulsarError as error:
            raise pulsar.Timeout(str(error)) from error

    def close(self) -> None:
        self._brokers.close()


class ClientProducer:
    """Stands in for `pulsar.Producer` with batches that only `flush` and `flush_async` end, and no limit of time.

    As with the real one the broker hears of a batch's first sequence id alone, and repeats go by that.
    """

    def __init__(self, producer: EntryProducer) -> None:
        self._producer: Any = self  # the real one has the C++ producer there
        self._entries = producer
        self._batch: list[OutgoingMessage] = []
        self._callbacks: list[tuple[int, Callable[[Any, Any], None]]] = []  # with the first sequence id of the batch
        self._sent = self._published = producer.last_sequence_id

    def last_sequence_id(self) -> int:
        return self._published

    def send_async(self, body: bytes, callback: Any, partition_key: str, sequence_id: int) -> None:
        self._batch.append(OutgoingMessage(sequence_id, body, key=partition_key.encode()))
        if callback is not None:
            self._callbacks.append((self._batch[0].sequence_id, callback))

    def flush_async(self, _: Any) -> None:
        if self._batch:
            entry = batch_entry(self._batch, self._entries.name, 1)
            self._entries.send(entry._replace(highest_sequence_id=entry.sequence_id))
            self._sent = entry.sequence_id + len(self._batch) - 1
            self._batch = []

    def flush(self) -> None:
        self.flush_async(None)
        self._entries.flush()
        while not self._entries.has_arrived:
            if self._entries.error is not None:
                raise pulsar.AlreadyClosed(str(self._entries.error))
            wait_seconds(0.01)
        self._published = self._sent
        for first, callback in self._callbacks:
            is_repeated = self._entries.repeated_to >= first
            callback(pulsar.Result.Ok, SimpleNamespace(ledger_id=lambda at=-1 if is_repeated else 1: at))
        self._callbacks = []

    def close(self) -> None:
        self._entries.close()(REQUEST_SECONDS)
