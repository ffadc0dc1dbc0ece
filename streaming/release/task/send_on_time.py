"""Sends messages through several producers at once. A producer that can't send holds up no other."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from broker.client import PulsarError
from broker.protocol.building import OutgoingMessage
from broker.protocol.sending import RefusedEntry
from streaming.release.outgoing import cause_of
from streaming.release.task.producer_line import Line, Send
from streaming.release.task.shared_paces import Pace
from tracker.store import StateLostError
from warehouse.delta.fencing import PauseWatch

_BUILT_AT_ONCE = 20  # messages, which takes 0.1 ms; a message that comes due meanwhile is late by that time
_BUILT_BYTES = 8 << 20  # of payloads that are built and not handed over, about: the others are read when they are due
_SENT_AT_ONCE = 500  # messages, or one entry, until the lines are looked after again
_POLL_SECONDS = 0.01
_LOOK_SECONDS = 0.2  # between two looks at the lines with which nothing goes on: there may be hundreds
_LONGEST_REST_SECONDS = 0.5  # between two checks of the watch


class _Unsendable(NamedTuple):
    """Stands for a message that can't be built."""

    why: str


_Built = OutgoingMessage | _Unsendable | None  # None: it need not be sent


class _Entry:
    """The messages of a producer batch, or one message.

    Attributes:
        at: when it is handed to its line, ms since the epoch.
        first_id: the sequence id of its first message, whether that can be sent or not.
        places: the indexes of its messages.
        after: entries that have to arrive before.
        built: the messages; None: they are not built yet.
        n_bytes: of the payloads of messages that are built ahead.
        is_gone: nothing of it is sent, so that no other has to wait for it.
    """

    __slots__ = (
        "after",
        "at",
        "built",
        "first_id",
        "is_batched",
        "is_gone",
        "line",
        "n_bytes",
        "n_places",
        "pace",
        "places",
    )

    def __init__(self, send: Send) -> None:
        self.at = send.at
        self.line = send.line
        self.first_id = send.first_id
        self.is_batched = send.is_batched
        self.pace: Pace | None = send.pace
        self.n_places = send.n_places
        self.places: list[int] = []
        self.after: list[_Entry] = []
        self.built: list[_Built] | None = None
        self.n_bytes = 0
        self.is_gone = False


def send_on_time(
    sends: Sequence[Send],
    build: Callable[[int], OutgoingMessage | None],
    on_refused: Callable[[int, str], None],
    wake: threading.Event,
    watch: PauseWatch,
    after: Sequence[int] = (),
) -> list[int]:
    """Hands each message over, never before its time, and waits until all have arrived or their lines have failed.

    Args:
        sends: the messages, in order of `at`; their lines have been opened.
        build: called with an index in `sends`; returns the message; None: it need not be sent. If it raises, this
            message can't be sent, and the others are.
        on_refused: called with the index of a message that can't be built, or that the broker does not take, and why.
        wake: set when a line has made progress or has failed.
        watch: its `check` is called in each round; when it raises, nothing more is sent.
        after: for each message the index of an earlier message of another line that has to arrive before, -1: none;
            empty: no message waits for another. If the earlier message fails, so does the line of the later one.

    Returns:
        when each message was handed over or left out, ms since the epoch; undefined where its line has failed.
    """
    sending = _Sending(sends, _entries(sends, after), build, on_refused)
    while not sending.is_over():
        watch.check()
        now = time.time_ns() // 1_000_000
        sending.look_after_lines()
        sending.send_overdue(now)
        is_busy = sending.send_due(now)
        sending.flush()
        if is_busy or sending.is_any_ready() or sending.build_some():
            continue
        sending.rest(wake)
    return sending.sent_at


def _entries(sends: Sequence[Send], after: Sequence[int]) -> list[_Entry]:
    """Puts messages into entries, in order of `at`."""
    entries: list[_Entry] = []
    open_batches: dict[tuple[int, int], _Entry] = {}
    of_message: list[_Entry] = []
    for i, send in enumerate(sends):
        if send.is_batched:
            key = (id(send.line), send.first_id)
            entry = open_batches.get(key)
            if entry is None:
                entry = open_batches[key] = _Entry(send)
                entries.append(entry)
            entry.at = max(entry.at, send.at)
        else:
            entry = _Entry(send)
            entries.append(entry)
        entry.places.append(i)
        of_message.append(entry)
        if after and after[i] >= 0:
            entry.after.append(of_message[after[i]])
    entries.sort(key=lambda entry: entry.at)
    return entries


class _Sending:
    """The state of a task's entries: each is not due yet, waits in its line, or has been handed over.

    Arguments are as of `send_on_time`. Entries are named by their index in `entries`. A line is busy while an entry
    waits in it, or one that was handed over has not arrived. Each round looks at these lines alone.
    """

    def __init__(
        self,
        sends: Sequence[Send],
        entries: Sequence[_Entry],
        build: Callable[[int], OutgoingMessage | None],
        on_refused: Callable[[int, str], None],
    ) -> None:
        self._sends = sends
        self._entries = entries
        self._build = build
        self._on_refused = on_refused
        self._lines = list({id(entry.line): entry.line for entry in entries}.values())
        self._busy: dict[Line, None] = {}
        self._look_at = 0.0  # when all lines are looked after again, seconds, monotonic
        # Messages are built while there is time: once they are due, only handing over is left.
        self._n_built = 0
        self._built_bytes = 0
        self._n_due = 0  # the number of entries that have been handed over, or wait in their lines
        self._unflushed: set[Line] = set()
        self.sent_at = [0] * len(sends)

    def is_over(self) -> bool:
        """Whether each message has arrived, or its line has failed."""
        return self._n_due == len(self._entries) and self._are_lines_done()

    def look_after_lines(self) -> None:
        """Finds out which lines have failed, and closes them at once, so that no more of them is sent."""
        now = time.monotonic()
        is_time = now >= self._look_at
        if is_time:
            self._look_at = now + _LOOK_SECONDS
        for line in self._lines if is_time else list(self._busy):
            self._look_after(line)
            if line in self._busy and _is_done(line):
                del self._busy[line]

    def _look_after(self, line: Line) -> None:
        for refused in line.look_after():
            self._refuse_later(line, refused)
        if line.has_failed and line.producer is not None:
            line.close()

    def _begin_busy(self, line: Line) -> None:
        if line not in self._busy:
            self._busy[line] = None
            self._look_after(line)  # it may have failed since the last look

    def send_overdue(self, now: int) -> None:
        """Hands over entries that wait in their lines, in order over all lines, because several may share a topic."""
        lines = list(self._busy)
        ready = [(line.waiting[0], n) for n, line in enumerate(lines) if self._is_ready(line)]
        heapq.heapify(ready)
        left = _SENT_AT_ONCE * len(ready)
        while ready and left > 0:
            i, n = heapq.heappop(ready)
            if self._has_place(i):
                self._send(i, now)
                left -= len(self._entries[i].places)
                lines[n].waiting.popleft()
            else:
                left -= 1
            if self._is_ready(lines[n]):
                heapq.heappush(ready, (lines[n].waiting[0], n))

    def send_due(self, now: int) -> bool:
        """Hands over entries that have come due, or lets them wait in their lines; returns whether there were any."""
        entries, begin = self._entries, self._n_due
        if begin >= len(entries) or entries[begin].at > now:
            return False
        behind = {line.topic for line in self._busy if line.waiting and not line.error}
        left, i = _SENT_AT_ONCE, begin
        while left > 0 and i < len(entries) and entries[i].at <= now:
            line = entries[i].line
            self._begin_busy(line)
            left -= len(entries[i].places)
            if not line.error:
                if line.takes_messages and line.topic not in behind and self._may_go(i) and self._has_place(i):
                    self._send(i, now)
                else:
                    line.waiting.append(i)
                    behind.add(line.topic)
            i += 1
        self._n_due = i
        return True

    def flush(self) -> None:
        """Lets the network have what was handed over."""
        for line in self._unflushed:
            line.flush()
        self._unflushed.clear()

    def is_any_ready(self) -> bool:
        """Whether a line can take an entry that waits in it."""
        return any(self._is_ready(line) for line in self._busy)

    def build_some(self) -> bool:
        """Builds some of the next messages; returns False if all are built, or as many bytes as are built ahead."""
        left = _BUILT_AT_ONCE
        self._n_built = max(self._n_built, self._n_due)
        while left > 0 and self._n_built < len(self._entries) and self._built_bytes < _BUILT_BYTES:
            entry = self._entries[self._n_built]
            self._n_built += 1
            if entry.built is None and entry.line.producer is not None and not entry.line.error:
                entry.built = self._built(entry)
                entry.n_bytes = sum(len(one.payload or b"") for one in entry.built if isinstance(one, OutgoingMessage))
                self._built_bytes += entry.n_bytes
                left -= len(entry.places)
        return left < _BUILT_AT_ONCE

    def rest(self, wake: threading.Event) -> None:
        """Waits until the next message is due, or a line may take one; only a moment where lines are busy."""
        left = _POLL_SECONDS
        if self._n_due < len(self._entries):
            left = min(max(self._entries[self._n_due].at / 1e3 - time.time(), 0), _LONGEST_REST_SECONDS)
        if self._are_lines_done():
            time.sleep(left)
        else:
            paces = [pace for line in self._busy if line.waiting and (pace := self._entries[line.waiting[0]].pace)]
            wake.wait(min([left, _POLL_SECONDS, *(pace.wait_seconds or _POLL_SECONDS for pace in paces)]))
            wake.clear()

    def _are_lines_done(self) -> bool:
        """Whether all that was handed over has arrived, and nothing waits, in the lines that have not failed."""
        return all(map(_is_done, self._busy))

    def _is_ready(self, line: Line) -> bool:
        if not line.waiting or not line.takes_messages:
            return False
        pace = self._entries[line.waiting[0]].pace
        return (pace is None or not pace.wait_seconds) and self._may_go(line.waiting[0])

    def _may_go(self, i: int) -> bool:
        """Whether what has to arrive before this entry has; if that has failed, this one's line fails, too."""
        entry = self._entries[i]
        while entry.after:
            before = entry.after[-1]
            if not before.is_gone and before.line.arrived_to < before.first_id:
                if before.line.has_failed:
                    entry.line.is_behind = True
                    entry.line.fail(f"what has to arrive before has not: {before.line.error}")
                return False
            entry.after.pop()
        return True

    def _has_place(self, i: int) -> bool:
        """Takes the places of an entry from its rate; returns whether it got them, or needs none."""
        entry = self._entries[i]
        return entry.pace is None or entry.first_id <= entry.line.resume_after or entry.pace.take(entry.n_places)

    def _built(self, entry: _Entry) -> list[_Built]:
        return [self._build_alone(place) for place in entry.places]

    def _build_alone(self, place: int) -> _Built:
        """Builds a message; whatever `build` raises, only this message can't be sent.

        A payload that is not where it was put is no fault of the message: a rebuild has it.
        """
        try:
            return self._build(place)
        except (MemoryError, StateLostError):
            raise
        except Exception as error:
            return _Unsendable(cause_of(error))

    def _send(self, i: int, now: int) -> None:
        entry = self._entries[i]
        built, entry.built = self._built(entry) if entry.built is None else entry.built, []
        self._built_bytes -= entry.n_bytes
        entry.n_bytes = 0
        for place, message in zip(entry.places, built, strict=True):
            self.sent_at[place] = now
            if isinstance(message, _Unsendable):
                self._on_refused(place, message.why)
        messages = [message for message in built if isinstance(message, OutgoingMessage)]
        entry.is_gone = not messages
        if messages:
            try:
                entry.line.hand_over(messages, entry.is_batched)
                self._unflushed.add(entry.line)
            except PulsarError as error:
                self._refuse(entry, built, str(error))
        if entry.pace is not None and built[0] is not None:
            entry.pace.note_taken(entry.n_places)

    def _refuse(self, entry: _Entry, built: Sequence[_Built], why: str) -> None:
        entry.is_gone = True
        for place, message in zip(entry.places, built, strict=True):
            if isinstance(message, OutgoingMessage):
                self._on_refused(place, why)

    def _refuse_later(self, line: Line, refused: RefusedEntry) -> None:
        """Notes that the broker has not taken an entry; a batch fails its line, because its messages may be fine."""
        if refused.entry.n_messages > 1:
            line.fail(str(refused.error), is_refused=True)
            return
        for entry in self._entries:
            for place in entry.places:
                if entry.line is line and self._sends[place].sequence_id == refused.entry.sequence_id:
                    entry.is_gone = True
                    self._on_refused(place, str(refused.error))


def _is_done(line: Line) -> bool:
    """Whether a line has failed, or nothing waits in it, and all that was handed over has arrived."""
    return line.has_failed or (not line.waiting and line.has_arrived())
