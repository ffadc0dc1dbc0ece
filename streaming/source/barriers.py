"""Holds commands back until the messages that were published before them have been read."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from broker.client import PulsarError
from broker.position import START, Position
from streaming.checkpoint.offset import Offset
from streaming.source.receiving.receiver import Receiver

_log = logging.getLogger(__name__)

_CATCH_UP_SECONDS = 1.0  # how long commands wait for messages that were published before them
_SILENT_SECONDS = 10  # how long commands wait for a source topic whose end the broker does not tell
_MAX_BARRIERS = 16  # in an offset

# The last entry of each source topic partition, as text; None: the broker did not answer, or can't look the topic up.
Ends = dict[str, str | None]


@dataclass(frozen=True)
class _Waiting:
    """Commands that have come in, and the ends of the source topics just after."""

    commands: dict[str, Position]  # the last entry that has come in, by partition of the control topic
    ends: Ends
    deadline: float  # when a batch takes the commands in any case, seconds of the monotonic clock


class Barriers:
    """Says when a batch may take commands, and when all messages published before them have come in.

    When commands come in, the broker is asked for the ends of the source topics. A batch takes the commands when these
    ends have been read, which mostly takes milliseconds, or after a second. After a second some messages may be
    missing: a command for such a message is answered WAITING, and NOT_FOUND only when an offset has passed the ends.

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
        self._waiting: _Waiting | None = None

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
        ends: Ends = {topic: None for topic in self._sources if not self._has_all(topic)}  # before they get receivers
        receivers = list(self._receivers.items())
        control = [(name, r) for name, r in receivers if r.source.topic == self._control_topic]
        if not any(receiver.waiting for _, receiver in control):
            return None
        # Read before the ends are asked for: later commands may name messages after these ends.
        commands = {name: receiver.read_to for name, receiver in control}
        for name, receiver in receivers:
            if receiver.source.topic == self._control_topic:
                continue
            try:
                ends[name] = str(receiver.topic_end())
                self._silent_since.pop(name, None)
            except PulsarError as error:
                if time.monotonic() - self._silent_since.setdefault(name, time.monotonic()) < _SILENT_SECONDS:
                    _log.warning("commands wait for an answer of %s: %s", name, error)
                    return None
                ends[name] = None
        return _Waiting(commands, ends, time.monotonic() + _CATCH_UP_SECONDS)

    def _are_read(self, ends: Ends) -> bool:
        return all(end is None or self._receivers[name].wait_for(Position.parse(end), 0) for name, end in ends.items())

    def _with_late_ends(self, ends: Ends) -> Ends:
        """Returns ends together with those that the broker did not tell before and tells now."""
        found: Ends = {}
        for name, end in ends.items():
            late: list[Receiver] = []
            if end is None and self._has_all(name):
                late = [r for r in list(self._receivers.values()) if _is_of(r, name)]
            found |= {receiver.source.name: _end(receiver) for receiver in late} or {name: end}
        return found

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


def _end(receiver: Receiver) -> str | None:
    with contextlib.suppress(PulsarError):
        return str(receiver.topic_end())
    return None
