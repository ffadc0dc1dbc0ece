"""Holds commands back until the messages that were published before them have been read."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace

from broker.client import PulsarError
from broker.position import START, Position
from streaming.checkpoint.offset import Offset
from streaming.source.receiving.receiver import Receiver

_log = logging.getLogger(__name__)

_CATCH_UP_SECONDS = 1.0  # how long commands wait for messages that were published before them
_SILENT_SECONDS = 10  # how long commands wait for a source topic whose end the broker does not tell
_MAX_BARRIERS = 16  # in an offset
_MOST_ASKED = 64  # source topic partitions that are asked at a time
_ANSWER_SECONDS = 0.05  # how long a batch waits for answers, which mostly come within some milliseconds

# The last entry of each source topic partition, as text; None: the broker did not answer, or can't look the topic up.
Ends = dict[str, str | None]


@dataclass(frozen=True)
class _Asked:
    """Commands that have come in, and the source topics whose ends were asked for just after."""

    commands: dict[str, Position]  # the last entry that has come in, by partition of the control topic
    answers: dict[str, Future[Position]]  # by source topic partition
    ends: Ends = field(default_factory=dict)  # those that are known, or are not waited for any more


@dataclass(frozen=True)
class _Waiting:
    """Commands that have come in, and the ends of the source topics just after."""

    commands: dict[str, Position]  # the last entry that has come in, by partition of the control topic
    ends: Ends
    deadline: float  # when a batch takes the commands in any case, seconds of the monotonic clock


class _Askers:
    """Daemon threads that ask brokers: those of a ThreadPoolExecutor would keep the process until they are answered.

    Args:
        most: so many ask at a time; further questions wait.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._questions: queue.SimpleQueue[tuple[Future[Position], Callable[[], Position]]] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._n = 0

    def submit(self, ask: Callable[[], Position]) -> Future[Position]:
        """Asks in a thread; returns what will have the answer. Called in one thread."""
        answer: Future[Position] = Future()
        self._questions.put((answer, ask))
        if not self._idle.acquire(blocking=False) and self._n < self._most:
            self._n += 1
            threading.Thread(target=self._run, name="topic ends", daemon=True).start()
        return answer

    def _run(self) -> None:
        while True:
            answer, ask = self._questions.get()
            try:
                answer.set_result(ask())
            except Exception as error:
                answer.set_exception(error)
            self._idle.release()


class Barriers:
    """Says when a batch may take commands, and when all messages published before them have come in.

    When commands come in, the broker is asked for the ends of the source topics. A batch takes the commands when these
    ends have been read, which mostly takes milliseconds, or after a second. After a second some messages may be
    missing: a command for such a message is answered WAITING, and NOT_FOUND only when an offset has passed the ends.

    Threads ask. So a broker that does not answer holds up commands for some seconds, and no batch.

    Args:
        receivers: of all topics that are read, by topic partition; the caller goes on adding to it.
        control_topic: the topic whose messages are commands.
        sources: the source topics of the settings, also those that can't be looked up.
        looked_up: the source topics all of whose partitions have receivers; the caller goes on adding to it. Another
            source topic has receivers for those partitions alone whose positions were in an offset.
    """

    def __init__(
        self,
        receivers: Mapping[str, Receiver],
        control_topic: str,
        sources: Collection[str],
        looked_up: Collection[str],
    ) -> None:
        self._receivers = receivers
        self._control_topic = control_topic
        self._sources = sources
        self._looked_up = looked_up
        self._silent_since: dict[str, float] = {}
        self._asked: _Asked | None = None
        self._waiting: _Waiting | None = None
        self._late: dict[str, Future[Position]] = {}  # the last questions of `_late_ends`
        self._threads = _Askers(_MOST_ASKED)

    @property
    def has_waiting(self) -> bool:
        """Whether commands have come in that no batch has taken."""
        return self._asked is not None or self._waiting is not None

    def take(self) -> tuple[dict[str, Position], Ends] | None:
        """Decides which commands the next batch takes.

        Returns:
            (last entry to take of each partition of the control topic, ends of the source topics just after the
            commands had come); None: no commands have come, or they have to wait longer.
        """
        waiting = self._waiting or self._begin()
        if waiting is None:
            return None
        if time.monotonic() < waiting.deadline and not self._are_read(waiting.ends):
            self._waiting = waiting
            return None
        self._waiting = None
        return waiting.commands, waiting.ends

    def advance(self, last: Offset, offset: Offset, ends: Ends | None) -> Offset:
        """Returns an offset with `ingested_through`, and with the `barriers` that it has not passed.

        Args:
            last: the offset before.
            offset: the new offset, with its positions.
            ends: the ends of the source topics after the commands of its batch; None: no command of it begins to wait.
        """
        barriers = [[tick, self._with_late_ends(before)] for tick, before in last.barriers]
        ingested_through = last.ingested_through
        if ends is not None:
            if len(barriers) >= _MAX_BARRIERS:
                barriers.pop()  # the new barrier is passed later, and so stands for both
            barriers.append([offset.tick, ends])
        while barriers and self._has_passed(offset.positions, barriers[0][1]):
            ingested_through = barriers.pop(0)[0]
        return replace(offset, barriers=barriers, ingested_through=ingested_through)

    def _begin(self) -> _Waiting | None:
        """Returns the commands that have come in; None: there are none, or a source topic's end is not known yet."""
        self._asked = asked = self._asked or self._ask()
        if asked is None:
            return None
        wait(asked.answers.values(), _ANSWER_SECONDS)
        for name, answer in asked.answers.items():
            try:
                asked.ends[name] = str(answer.result(0))
                self._silent_since.pop(name, None)
            except (PulsarError, TimeoutError) as error:
                if self._is_waited_for(name, error):
                    if answer.done():
                        asked.answers[name] = self._threads.submit(self._receivers[name].topic_end)
                    return None
                asked.ends[name] = None
        self._asked = None
        return _Waiting(asked.commands, asked.ends, time.monotonic() + _CATCH_UP_SECONDS)

    def _ask(self) -> _Asked | None:
        """Asks for the ends of all source topics; None: no commands have come in."""
        ends: Ends = {topic: None for topic in self._sources if not self._has_all(topic)}  # before they get receivers
        receivers = list(self._receivers.items())
        control = [(name, r) for name, r in receivers if r.source.topic == self._control_topic]
        if not any(receiver.waiting for _, receiver in control):
            return None
        # Read before the ends are asked for: later commands may name messages after these ends.
        commands = {name: receiver.read_to for name, receiver in control}
        others = [(name, r) for name, r in receivers if r.source.topic != self._control_topic]
        return _Asked(commands, {name: self._threads.submit(r.topic_end) for name, r in others}, ends)

    def _is_waited_for(self, name: str, error: Exception) -> bool:
        """Whether commands wait longer for the end of a topic partition that is not known."""
        if name not in self._silent_since:
            _log.warning("commands wait for an answer of %s: %s", name, error or "there is none yet")
        return time.monotonic() - self._silent_since.setdefault(name, time.monotonic()) < _SILENT_SECONDS

    def _are_read(self, ends: Ends) -> bool:
        return all(end is None or self._receivers[name].wait_for(Position.parse(end), 0) for name, end in ends.items())

    def _with_late_ends(self, ends: Ends) -> Ends:
        """Returns ends together with those that the broker did not tell before and tells now."""
        found: Ends = {}
        for name, end in ends.items():
            late: list[Receiver] = []
            if end is None and self._has_all(name):
                late = [r for r in list(self._receivers.values()) if _is_of(r, name)]
            found |= self._late_ends(late) or {name: end}
        return found

    def _late_ends(self, receivers: Sequence[Receiver]) -> Ends:
        """Asks for the ends of topic partitions; None where the answer does not come at once."""
        asked: dict[str, Future[Position]] = {}
        for receiver in receivers:
            name = receiver.source.name
            # What was asked before says nothing of what has come since.
            if name not in self._late or self._late[name].done():
                asked[name] = self._late[name] = self._threads.submit(receiver.topic_end)
        wait(asked.values(), _ANSWER_SECONDS)
        ends: Ends = {receiver.source.name: None for receiver in receivers}
        for name, answer in asked.items():
            with contextlib.suppress(PulsarError, TimeoutError):
                ends[name] = str(answer.result(0))
        return ends

    def _has_all(self, name: str) -> bool:
        """Whether a topic partition, or all partitions of a topic, have receivers."""
        return name in self._receivers or name in self._looked_up

    def _has_passed(self, positions: Mapping[str, str], ends: Ends) -> bool:
        for name, end in ends.items():
            if name not in self._receivers and name not in self._sources:
                continue  # the topic is not read any more, so no message comes
            # No batch has a message of a topic partition without a position: its end must be before its first entry.
            if end is None or Position.parse(positions.get(name, str(START))) < Position.parse(end):
                return False
        return True


def _is_of(receiver: Receiver, name: str) -> bool:
    """Whether a receiver reads the topic partition, or a partition of the topic, with a name."""
    return name in (receiver.source.name, receiver.source.topic)
