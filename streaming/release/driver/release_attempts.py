"""The attempts to send a release: what each one is to send, and what follows from the reports of its tasks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa

from streaming.release.attempt import MOST_CONNECTIONS, Attempt, FailedProducer, Generation, SendReport, note_arrived
from streaming.release.driver.lane_release import LaneRelease, Remainder, SentRelease
from streaming.release.driver.transitions import ReleaseEvent
from streaming.release.naming import Recipient
from tracker.messages import concat
from tracker.packing import unpack
from warehouse.schemas import DELIVERIES

_PATIENCE_SECONDS = 5.0  # how long a destination that does not answer may hold up a lane, once


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What follows from an attempt.

    Attributes:
        event: COMPLETE or INCOMPLETE.
        reasons: why the destination of each recipient to be left can't be written; an empty text: as before.
        remainders: the messages that are left open, by recipient.
        slow: the recipients of these whose destinations are slow.
        again: the failed producers whose messages the next attempt sends.
        waits: whether the next attempt is made after a pause.
    """

    event: ReleaseEvent
    reasons: Mapping[Recipient, str]
    remainders: Mapping[Recipient, Remainder]
    slow: frozenset[Recipient]
    again: list[FailedProducer]
    waits: bool


class ReleaseAttempts:
    """The attempts to send a release. No threads, clocks or I/O.

    Args:
        release: which is sent.
        lately_slow: the recipients whose destinations were slow a short while ago.
        slow_seconds: a destination that takes for longer what it is given is slow; 0: none is.
        put_off: as `Spacing.put_off` returns it.
        pace_file: as `Attempt.pace_file`.
    """

    def __init__(
        self,
        release: LaneRelease,
        lately_slow: frozenset[Recipient],
        slow_seconds: float,
        put_off: Mapping[tuple[str, int], int],
        pace_file: str = "",
    ) -> None:
        self._release = release
        self._apart = lately_slow
        # What has to come in order is not parked because its destination is slow: what is in the delayed index already
        # would then go first. Its lanes wait, which have nothing else.
        self._slow_seconds = 0.0 if release.is_in_order else slow_seconds
        self._put_off = put_off
        self._pace_file = pace_file
        self._arrived: frozenset[tuple[int, str, str]] = frozenset()
        self._arrived_to: dict[tuple[str, str], int] = {}
        self._is_first = release.is_new
        self._was_first = False
        self.finished = SentRelease(release)

    def next(
        self, unwritable: frozenset[Recipient], generations: Mapping[tuple[str, str], Generation], order_signal: str
    ) -> Attempt:
        """Returns the next attempt.

        Args:
            unwritable: the recipients whose destinations are not writable.
            generations: as `Attempt.generations`.
            order_signal: as `Attempt.order_signal`.
        """
        self._was_first, self._is_first = self._is_first, False
        return Attempt(
            skipped=unwritable,
            done=self._arrived,
            arrived_to=self._arrived_to,
            generations=generations,
            is_first=self._was_first,
            sent_to=self._release.sent_to,
            put_off={self._release.id: self._put_off},
            pace_file=self._pace_file,
            patience_seconds=_PATIENCE_SECONDS,
            apart=self._apart,
            slow_after_seconds=self._slow_seconds,
            order_signal=order_signal,
        )

    def take(self, reports: Collection[SendReport]) -> list[FailedProducer]:
        """Takes what has arrived by the reports of an attempt's tasks; returns the producers that have failed."""
        finished = self.finished
        self._arrived |= {line for one in reports for line in one.done}
        finished.deliveries = concat([finished.deliveries, *(unpack(one.deliveries) for one in reports)], DELIVERIES)
        finished.refused = concat([finished.refused, refused_of(reports, self._release.id)])
        failed = [producer for one in reports for producer in one.failed]
        note_arrived(self._arrived_to, failed)
        return failed

    def candidates(self, reports: Collection[SendReport], others: Collection[FailedProducer]) -> list[FailedProducer]:
        """Returns the failed producers whose destinations may be left, if it is not the broker that fails.

        Args:
            reports: of the attempt's tasks.
            others: the failed producers that are not sent to again under another name.
        """
        slow = _slow(others)
        # Where others are answered, or few are late a second time, it is not the broker that is slow.
        is_known = len(slow) <= MOST_CONNECTIONS and (slow <= self._apart or any(one.done for one in reports))
        return [one for one in others if not one.is_slow or (is_known and one.is_alone)]

    def decide(
        self,
        reports: Collection[SendReport],
        failed: Collection[FailedProducer],
        others: Collection[FailedProducer],
        is_broker_there: bool,
    ) -> Decision:
        """Decides which destinations the release waits for no longer, and whether there is another attempt.

        Args:
            reports: of the attempt's tasks.
            failed: as `take` returned it.
            others: as for `candidates`.
            is_broker_there: whether the broker answers. While it does not, no destination is left.
        """
        given_up = {
            one.recipient: one.reason
            for one in self.candidates(reports, others)
            if (one.is_refused or is_broker_there) and not one.is_behind
        }
        skipped = {recipient: "" for one in reports for recipient in one.skipped}
        slow, reasons = _slow(others), skipped | given_up
        untouched = {*skipped, *_untouched(failed, self.finished)} if self._was_first else set()
        remainders = {
            recipient: Remainder(
                self._release, recipient, self._arrived, self._arrived_to, is_untouched=recipient in untouched
            )
            for recipient in reasons
        }
        again = [one for one in others if one.recipient not in given_up]
        suspects = slow - given_up.keys() if again else frozenset()
        if suspects:
            # One of those that share a connection may hold up the others. Where all of many are slow, each with few
            # others, it is the broker.
            self._slow_seconds = 0.0 if suspects == self._apart else self._slow_seconds
            self._apart = suspects
        # A producer that goes on under another name is sent to again, too.
        is_complete = not again and len(others) == len(failed)
        return Decision(
            event=ReleaseEvent.COMPLETE if is_complete else ReleaseEvent.INCOMPLETE,
            reasons=reasons,
            remainders=remainders,
            slow=slow,
            again=again,
            waits=bool(again) and not suspects,
        )


def refused_of(reports: Iterable[SendReport], release_id: tuple[int, int]) -> pa.Table:
    """Returns the messages of a release (tick, kind) that the client does not take, from the reports of tasks."""
    return concat(unpack(one.refused[release_id]) for one in reports if release_id in one.refused)


def _slow(failed: Collection[FailedProducer]) -> frozenset[Recipient]:
    return frozenset(one.recipient for one in failed if one.is_slow)


def _untouched(failed: Collection[FailedProducer], finished: SentRelease) -> set[Recipient]:
    """Returns recipients of failed producers to which nothing can have arrived in the release's first attempt."""
    if not failed:
        return set()
    touched = {one.recipient for one in failed if not one.is_untouched}
    for rows in (finished.deliveries, finished.refused):
        pairs = (
            rows.select(["topic", "subscription"]).group_by(["topic", "subscription"], use_threads=False).aggregate([])
        )
        touched |= set(zip(*(column.to_pylist() for column in pairs.columns), strict=True))
    return {one.recipient for one in failed} - touched
