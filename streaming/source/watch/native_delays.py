"""Notices messages that are delayed by Pulsar's own means: a consumer does not see that, so they come at once.

The broker's admin API tells the time of an entry. It is asked now and then, about one message of a producer.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from broker.client import NoAnswerError
from broker.position import Position, SourceTopic
from broker.pulsar_admin.admin_rest import AdminClient
from status.troubles import NATIVE_DELAY, Troubles
from tracker.messages import int64
from tracker.properties.retry_of import RETRY_OF
from tracker.properties.schedule import DELIVER_AFTER, DELIVER_AT
from tracker.recurrence.recurrence import REPEAT

_log = logging.getLogger(__name__)

OWN_TIME = frozenset({DELIVER_AT, DELIVER_AFTER, REPEAT, RETRY_OF})  # properties that give a message a time

_FIRST_MILLIS = 10_000  # until the next question about a producer; it doubles with each
_LAST_MILLIS = 600_000
_TOLD_MILLIS = 3_600_000  # a trouble ends when so long no delay has been found
_LOOK_MILLIS = 1_000  # the rows of a topic partition are looked at so often
_MOST_WAITING = 1_000  # questions; beyond them none is added
_MOST_PRODUCERS = 10_000  # that are remembered, of all topics together
_AT_ONCE = 10  # questions of one round
_NAMED = 3  # producers that a trouble names
_NAME_CHARACTERS = 100


@dataclass(frozen=True)
class _Question:
    source: SourceTopic
    producer: str
    position: Position


@dataclass
class _Found:
    """The producers of a topic with delays of their own."""

    last_at: int  # ms since the epoch
    producers: dict[str, str]  # what is told of each; the first _NAMED
    others: set[str]


class NativeDelays:
    """Asks the broker for delays of messages that come at once. Thread-safe; only `ask` waits for the broker.

    Clients do not batch delayed messages, so only those are asked about that are alone in their entry.

    Args:
        troubles: gets a trouble for each topic with such messages.
    """

    def __init__(self, troubles: Troubles) -> None:
        self._troubles = troubles
        self._lock = threading.Lock()
        self._looked_at: dict[str, int] = {}  # by topic partition
        # By topic partition and producer: when the next question is due, and how long after the last one it is.
        self._next: dict[tuple[str, str], tuple[int, int]] = {}
        self._waiting: dict[tuple[str, str], _Question] = {}
        self._found: dict[str, _Found] = {}

    @property
    def has_questions(self) -> bool:
        """Whether `ask` has something to ask."""
        return bool(self._waiting)

    def came_in(self, source: SourceTopic, rows: pa.Table, now: int) -> None:
        """Notes of which producers the broker is to be asked about a message.

        Args:
            source: the topic partition.
            rows: messages that came in from it, as MESSAGES.
            now: ms since the epoch.
        """
        if now - self._looked_at.get(source.name, 0) < _LOOK_MILLIS:
            return
        self._looked_at[source.name] = now
        comes_at_once = int64(rows, "deliver_at") <= int64(rows, "publish_time")
        alone = np.flatnonzero(comes_at_once & (int64(rows, "batch_index") < 0))
        if not len(alone):
            return
        some = rows.select(["producer_name", "ledger_id", "entry_id", "reason"]).take(pa.array(alone))
        some = some.filter(pc.and_(pc.is_null(some["reason"]), pc.is_valid(some["producer_name"])))
        with self._lock:
            for producer in pc.unique(some["producer_name"]).to_pylist():
                self._add(source, producer, some, now)

    def _add(self, source: SourceTopic, producer: str, rows: pa.Table, now: int) -> None:
        key = source.name, producer
        if now < self._next.get(key, (0, 0))[0] or len(self._waiting) >= _MOST_WAITING:
            return
        row = pc.index(rows["producer_name"], producer).as_py()
        position = Position(rows["ledger_id"][row].as_py(), rows["entry_id"][row].as_py())
        self._waiting[key] = _Question(source, producer, position)

    def ask(self, admin: AdminClient, now: int) -> None:
        """Asks the next questions, and begins or ends troubles.

        Args:
            admin: asks the broker.
            now: ms since the epoch.

        Raises:
            PulsarError: the broker does not answer.
        """
        with self._lock:
            keys = list(self._waiting)[:_AT_ONCE]
            questions = [self._waiting.pop(key) for key in keys]
        for question in questions:
            self._postpone(question, now)
            try:
                entry = admin.entry_metadata(question.source.name, *question.position)
            except NoAnswerError as error:
                _log.debug("%s: the delay of %s is not known: %s", question.source.name, question.position, error)
                return  # a question without an answer takes seconds
            if entry is None or entry.deliver_at is None or not OWN_TIME.isdisjoint(entry.properties):
                continue
            early = (entry.deliver_at - (entry.publish_time or now)) / 1_000
            if early > 0:
                self._tell(question, early, now)
        for topic, found in list(self._found.items()):
            if now - found.last_at >= _TOLD_MILLIS:
                del self._found[topic]
                self._troubles.end(NATIVE_DELAY, topic)

    def _postpone(self, question: _Question, now: int) -> None:
        """Sets when the broker is asked about a producer again."""
        key = question.source.name, question.producer
        with self._lock:
            waited = self._next.pop(key, (0, 0))[1]
            wait = min(max(2 * waited, _FIRST_MILLIS), _LAST_MILLIS)
            self._next[key] = now + wait, wait
            while len(self._next) > _MOST_PRODUCERS:
                del self._next[next(iter(self._next))]

    def _tell(self, question: _Question, early: float, now: int) -> None:
        topic, producer = question.source.topic, question.producer[:_NAME_CHARACTERS]
        found = self._found.setdefault(topic, _Found(now, {}, set()))
        found.last_at = now
        if producer in found.producers or len(found.producers) < _NAMED:
            found.producers[producer] = f"{producer} (as {question.position}, {early:,.0f} s early)"
        elif len(found.others) < _MOST_PRODUCERS:
            found.others.add(producer)
        named = ", ".join(found.producers.values()) + (f" and {len(found.others)} more" if found.others else "")
        text = (
            "messages that are delayed by deliverAfter or deliverAt of a Pulsar client, and have no property deliverAt "
            f"or deliverAfter, come at once: of producer {named}"
        )
        self._troubles.begin(NATIVE_DELAY, topic, text)
        _log.warning("%s: %s", topic, text)
