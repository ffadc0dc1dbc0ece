"""Holds commands back until what was published before them has been read."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import pulsar

from broker.position import START, Position
from streaming.checkpoint.offset import Offset
from streaming.source.receiving.receiver import Receiver

_log = logging.getLogger(__name__)

_CATCH_UP_SECONDS = 1.0  # how long commands wait until what was published before them has been read
_SILENT_SECONDS = 10  # how long commands wait for a source topic that does not say where it ends
_MAX_BARRIERS = 16  # in an offset

# By source topic partition its last entry as text; None: it did not answer, or it is a topic that can't be looked up.
Ends = dict[str, str | None]


@dataclass(frozen=True)
class _Waiting:
    """Commands that have come in, and where the source topics ended just after."""

    commands: dict[str, Position]  # by partition of the control topic its last entry that has come in
    ends: Ends
    deadline: float  # by the monotonic clock: then they are taken into a batch in any case


class Barriers:
    """Says when commands may be taken into a batch, and when all messages published before them have come in.

    Commands are taken into a batch when the source topics have been read up to where they ended when the commands had
    come, which mostly takes milliseconds, or after a second. Then some messages may not be known yet: a command for
    one is answered WAITING, and that there is no such message is only said when an offset has passed the ends.

    Args:
        receivers: by topic partition, of all that are read; the caller goes on adding to it.
        control_topic: the topic whose messages are commands.
        sources: the source topics that are to be read, also those that can't be looked up.
        looked_up: those of which all partitions have receivers; the caller goes on adding to it. Of the others, those
            have some that an offset had positions of.
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
        """Decides which commands are to be taken into a batch now.

        Returns:
            by partition of the control topic the last entry to be taken, and where the source topics ended just after
            these had come; None: no commands have come, or they are to wait longer.
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
        """Returns an offset with `barriers`, those that it has not passed, and `ingested_through`.

        Args:
            last: the offset before.
            offset: the new one, with its positions.
            ends: where the source topics ended after the commands in its batch; None: in it no command begins to wait.
        """
        barriers = [[tick, self._with_late_ends(before)] for tick, before in last.barriers]
        ingested_through = last.ingested_through
        if ends is not None:
            if len(barriers) >= _MAX_BARRIERS:
                barriers.pop()  # the new one is passed later, and so does for both
            barriers.append([offset.tick, ends])
        while barriers and self._has_passed(offset.positions, barriers[0][1]):
            ingested_through = barriers.pop(0)[0]
        return replace(offset, barriers=barriers, ingested_through=ingested_through)

    def _begin(self) -> _Waiting | None:
        """Returns the commands that have come in; None: there are none, or a source topic's end is not known yet."""
        ends: Ends = {topic: None for topic in self._sources if not self._has_all(topic)}  # before it gets receivers
        receivers = list(self._receivers.items())
        control = [(name, r) for name, r in receivers if r.source.topic == self._control_topic]
        if not any(receiver.waiting for _, receiver in control):
            return None
        # Before the ends are asked for: commands that come later may name messages behind these ends.
        commands = {name: receiver.read_to for name, receiver in control}
        for name, receiver in receivers:
            if receiver.source.topic == self._control_topic:
                continue
            try:
                ends[name] = str(receiver.end())
                self._silent_since.pop(name, None)
            except pulsar.PulsarException as error:
                if time.monotonic() - self._silent_since.setdefault(name, time.monotonic()) < _SILENT_SECONDS:
                    _log.warning("commands wait for an answer of %s: %s", name, error)
                    return None
                ends[name] = None
        return _Waiting(commands, ends, time.monotonic() + _CATCH_UP_SECONDS)

    def _are_read(self, ends: Ends) -> bool:
        return all(end is None or self._receivers[name].wait_for(Position.parse(end), 0) for name, end in ends.items())

    def _with_late_ends(self, ends: Ends) -> Ends:
        """Returns the ends with those, too, of topics that did not answer before and do now."""
        found: Ends = {}
        for name, end in ends.items():
            late: list[Receiver] = []
            if end is None and self._has_all(name):
                late = [r for r in list(self._receivers.values()) if _is_of(r, name)]
            found |= {receiver.source.name: _end(receiver) for receiver in late} or {name: end}
        return found

    def _has_all(self, name: str) -> bool:
        """Whether a topic partition, or all of a topic's, have receivers."""
        return name in self._receivers or name in self._looked_up

    def _has_passed(self, positions: Mapping[str, str], ends: Ends) -> bool:
        for name, end in ends.items():
            if name not in self._receivers and name not in self._sources:
                continue  # it is not read any more, and nothing comes
            # Of a topic partition without a position nothing is in a batch: it must have ended before its first entry.
            if end is None or Position.parse(positions.get(name, str(START))) < Position.parse(end):
                return False
        return True


def _is_of(receiver: Receiver, name: str) -> bool:
    """Whether a receiver is of a topic partition, or of a partition of a topic."""
    return name in (receiver.source.name, receiver.source.topic)


def _end(receiver: Receiver) -> str | None:
    with contextlib.suppress(pulsar.PulsarException):
        return str(receiver.end())
    return None
