"""Sends messages through several producers at once. A producer that can't send holds up no other."""

from __future__ import annotations

import heapq
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pulsar

from streaming.release.outgoing import cause_of
from streaming.release.task.producer_line import Line, Send
from warehouse.delta.epoch import PauseWatch

_BUILT_AT_ONCE = 20  # messages, which takes 0.25 ms; a message that comes due meanwhile is late by that time
_SENT_AT_ONCE = 100  # messages, until the lines are looked after again
_POLL_SECONDS = 0.01
_LONGEST_REST_SECONDS = 0.5  # between two checks of the watch

_UNBUILT = object()


class _Unsendable(NamedTuple):
    """Stands for a message that can't be built."""

    why: str


def send_on_time(
    sends: Sequence[Send],
    build: Callable[[int], Any | None],
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
        on_refused: called with the index of a message that can't be built, or that the client does not take, and why.
        wake: set when a line has made progress or has failed.
        watch: its `check` is called in each round; when it raises, nothing more is sent.
        after: for each message the index of an earlier message of another line that has to arrive before, -1: none;
            empty: no message waits for another. If the earlier message fails, so does the line of the later one.

    Returns:
        when each message was handed over or left out, ms since the epoch; undefined where its line has failed.
    """
    sending = _Sending(sends, build, on_refused, after)
    while not sending.is_over():
        watch.check()
        now = time.time_ns() // 1_000_000
        sending.look_after_lines()
        sending.send_overdue(now)
        if sending.send_due(now) or sending.is_any_ready() or sending.build_some():
            continue
        sending.rest(wake)
    return sending.sent_at


class _Sending:
    """The state of a task's messages: each is not due yet, waits in its line, or has been handed over.

    Arguments are as of `send_on_time`. Messages are named by their index in `sends`.
    """

    def __init__(
        self,
        sends: Sequence[Send],
        build: Callable[[int], Any | None],
        on_refused: Callable[[int, str], None],
        after: Sequence[int],
    ) -> None:
        self._sends = sends
        self._build = build
        self._on_refused = on_refused
        self._after = after
        self._due = [send.at for send in sends]
        self._lines = list({id(send.line): send.line for send in sends}.values())
        # Messages are built while there is time: once they are due, only handing over is left.
        self._built: list[Any] = [_UNBUILT] * len(sends)
        self._n_built = 0
        self._n_due = 0  # the number of messages that have been handed over, or wait in their lines
        self._gone: set[int] = set()  # messages that are not sent, so that no other has to wait for them
        self.sent_at = [0] * len(sends)

    def is_over(self) -> bool:
        """Whether each message has arrived, or its line has failed."""
        return self._n_due == len(self._sends) and all(
            line.has_failed or (not line.waiting and _has_ended(line)) for line in self._lines
        )

    def look_after_lines(self) -> None:
        """Finds out which lines have failed, and closes them at once, so that the client sends no more of them."""
        for line in self._lines:
            line.look_after()
            if line.has_failed and line.producer is not None:
                line.close()

    def send_overdue(self, now: int) -> None:
        """Hands over messages that wait in their lines, in order over all lines, because several may share a topic."""
        lines = self._lines
        ready = [(line.waiting[0], n) for n, line in enumerate(lines) if self._is_ready(line)]
        heapq.heapify(ready)
        for _ in range(_SENT_AT_ONCE * len(ready)):
            if not ready:
                break
            i, n = heapq.heappop(ready)
            if self._has_place(i):
                self._send(i, now)
                lines[n].waiting.popleft()
            if self._is_ready(lines[n]):
                heapq.heappush(ready, (lines[n].waiting[0], n))

    def send_due(self, now: int) -> bool:
        """Hands over messages that have come due, or lets them wait in their lines; returns whether there were any."""
        begin = self._n_due
        end = min(bisect_right(self._due, now), begin + _SENT_AT_ONCE) if begin < len(self._sends) else begin
        if end <= begin:
            return False
        self._build_to(end)
        behind = {line.topic for line in self._lines if line.waiting and not line.error}
        for i in range(begin, end):
            line = self._sends[i].line
            if line.error:
                continue
            if line.takes_messages and line.topic not in behind and self._may_go(i) and self._has_place(i):
                self._send(i, now)
            else:
                line.waiting.append(i)
                behind.add(line.topic)
        self._n_due = end
        return True

    def is_any_ready(self) -> bool:
        """Whether a line can take a message that waits in it."""
        return any(self._is_ready(line) for line in self._lines)

    def build_some(self) -> bool:
        """Builds some of the next messages; returns False if all are built."""
        if self._n_built >= len(self._sends):
            return False
        self._build_to(min(self._n_built + _BUILT_AT_ONCE, len(self._sends)))
        return True

    def rest(self, wake: threading.Event) -> None:
        """Waits until the next message is due, or a line may take one; only a moment where lines are busy."""
        left = _POLL_SECONDS
        if self._n_due < len(self._sends):
            left = min(max(self._due[self._n_due] / 1e3 - time.time(), 0), _LONGEST_REST_SECONDS)
        if all(line.has_failed or (not line.waiting and _has_ended(line)) for line in self._lines):
            time.sleep(left)
        else:
            paces = [pace for line in self._lines if line.waiting and (pace := self._sends[line.waiting[0]].pace)]
            wake.wait(min([left, _POLL_SECONDS, *(pace.wait_seconds or _POLL_SECONDS for pace in paces)]))
            wake.clear()

    def _is_ready(self, line: Line) -> bool:
        if not line.waiting or not line.takes_messages:
            return False
        pace = self._sends[line.waiting[0]].pace
        return (pace is None or not pace.wait_seconds) and self._may_go(line.waiting[0])

    def _may_go(self, i: int) -> bool:
        """Whether the message that has to arrive before this one has; if it has failed, this one's line fails, too."""
        if not self._after or self._after[i] < 0 or self._after[i] in self._gone:
            return True
        before = self._sends[self._after[i]]
        if before.line.arrived_to >= before.first_id:
            return True
        if before.line.has_failed:
            self._sends[i].line.is_behind = True
            self._sends[i].line.fail(f"what has to arrive before has not: {before.line.error}")
        return False

    def _has_place(self, i: int) -> bool:
        """Takes the places of a message's batch from its rate; returns whether it got them, or needs none."""
        send = self._sends[i]
        return send.pace is None or send.first_id <= send.line.resume_after or send.pace.take(send.n_places)

    def _build_to(self, end: int) -> None:
        for i in range(self._n_built, end):
            line = self._sends[i].line
            if line.producer is not None and not line.error:
                self._built[i] = self._build_alone(i)
        self._n_built = max(self._n_built, end)

    def _build_alone(self, i: int) -> Any | None:
        """Builds a message; whatever `build` raises, only this message can't be sent."""
        try:
            return self._build(i)
        except MemoryError:
            raise
        except Exception as error:
            return _Unsendable(cause_of(error))

    def _send(self, i: int, now: int) -> None:
        send = self._sends[i]
        message, self._built[i] = self._built[i], None
        if message is _UNBUILT:
            message = self._build_alone(i)
        if isinstance(message, _Unsendable):
            self._on_refused(i, message.why)
            self._gone.add(i)
            send.line.leave_out(send)
        elif message is not None:
            try:
                send.line.hand_over(message, send)
            except pulsar.PulsarException as error:
                self._on_refused(i, f"{type(error).__name__}: {error}")
                self._gone.add(i)
        else:
            self._gone.add(i)
        self.sent_at[i] = now
        if send.pace is not None and message is not None:
            send.pace.note_taken(send.n_places)


def _has_ended(line: Line) -> bool:
    return line.producer is not None and line.has_arrived()
