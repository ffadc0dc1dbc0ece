"""When a batch ends, whether it takes messages, and what may be acknowledged: decided without clocks and I/O."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from conf.settings import IngestSettings
from conf.times import Moment
from streaming.checkpoint.offset import Offset
from streaming.release.feedback import Feedback
from streaming.source.batch_shares import is_too_much
from streaming.source.clock import MIN_TICK_SECONDS, Clock, tick_seconds
from streaming.source.rejects_rounds import is_round_due
from tracker.message_state.changes import HELD_DELIVER_AT

_MEASURED_BATCHES = 15  # the time between two batches follows from the durations of so many last ones


@dataclass(frozen=True)
class Backlog:
    """What has come from source topics and is in no batch yet.

    Attributes:
        messages: how many.
        n_bytes: their bytes.
        has_due: whether a message is due by a time, ms since the epoch.
        is_taken: whether batches take messages now.
        has_rounds: whether resumed subscriptions get more of what is parked for them.
    """

    messages: int
    n_bytes: int
    has_due: Callable[[int], bool]
    is_taken: bool
    has_rounds: bool = False


class BatchEnds:
    """Decides when a batch ends: at once for urgent work, for any other work some time after the last batch.

    Messages that are due later than the lookahead can wait for longest: each batch has a price, whatever it has.

    Args:
        limits: of a batch, and the time between two.
        clock: of the job.
    """

    def __init__(self, limits: IngestSettings, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._last_end = 0.0  # when the last batch ended, seconds, monotonic; 0: none has
        self._batch_seconds: deque[float] = deque([0.0], maxlen=_MEASURED_BATCHES)

    def note_ready(self, monotonic: float) -> None:
        """Notes when the query is ready for the next batch, seconds of a clock that never jumps."""
        if self._last_end:
            self._batch_seconds.append(monotonic - self._last_end)

    def note_end(self, monotonic: float) -> None:
        """Notes when a batch has ended, seconds of a clock that never jumps."""
        self._last_end = monotonic

    def seconds_left(self, monotonic: float, feedback: Feedback) -> float:
        """Returns how long messages that are due later wait for the end of a batch, seconds; 0 or less: not any more.

        Args:
            monotonic: the time, seconds of a clock that never jumps.
            feedback: of the driver.
        """
        return self._seconds_left(monotonic, feedback, self._limits.batch_interval_millis / 1000)

    def _seconds_left(self, monotonic: float, feedback: Feedback, least: float) -> float:
        # At most half the lookahead, so that each batch dispatches what comes due until the next one.
        most = self._clock.lookahead(feedback) / 2000
        return self._last_end + min(tick_seconds(statistics.median(self._batch_seconds), least), most) - monotonic

    def is_due(
        self,
        backlog: Backlog,
        last: Offset,
        now: Moment,
        feedback: Feedback,
        has_nothing_to_do: Callable[[], bool],
    ) -> bool:
        """Whether a batch is to end now.

        Args:
            backlog: what it could take.
            last: the last offset.
            now: the time.
            feedback: of the driver.
            has_nothing_to_do: as of `Clock.is_asked`.
        """
        has_new = backlog.is_taken and backlog.messages > 0
        if self._seconds_left(now.seconds, feedback, MIN_TICK_SECONDS) <= 0:
            if backlog.has_rounds or is_round_due(last, feedback):
                return True
            if self._clock.is_asked(last, now, feedback, has_nothing_to_do):
                return True
            if self.seconds_left(now.seconds, feedback) <= 0 or _waits_for_ticks(last, feedback):
                return has_new or self._clock.has_due(last, now.millis, feedback)
        return backlog.is_taken and (
            2 * backlog.messages >= self._limits.max_messages_per_batch
            or backlog.n_bytes >= self._limits.max_bytes_per_batch
            or backlog.has_due(now.millis + self._clock.lookahead(feedback))
        )


def _waits_for_ticks(last: Offset, feedback: Feedback) -> bool:
    """Whether commands wait for what comes in, or messages that are due wait for places or for room in a tick."""
    is_overdue = feedback.next_due is not None and feedback.next_due <= last.cutoff
    return bool(last.barriers) or bool(feedback.waiting[1]) or is_overdue


def may_rest(last: Offset, durable: Mapping[str, str], feedback: Feedback) -> bool:
    """Whether nothing in state comes due, nothing is in flight, and all that was ingested is durable.

    Args:
        last: the last offset.
        durable: as `Acknowledgements.durable`.
        feedback: of the driver.
    """
    return (
        last.positions == durable
        and not last.barriers
        and not feedback.in_flight
        and feedback.next_due is not None
        and feedback.next_due >= HELD_DELIVER_AT
        and last.large_rows.after is None
    )


def why_not_taking(
    feedback: Feedback, most_in_flight: int, short_disk: str | None, old_commands: Collection[str] = ()
) -> str | None:
    """Returns why batches take no messages, which wait in Pulsar, one line; None: they do.

    Args:
        feedback: of the driver.
        most_in_flight: as `release.max_in_flight_messages` in the settings.
        short_disk: why the job must not read further; None: its disks have room.
        old_commands: the partitions of the control topic with commands from before the start that have not come.
    """
    if feedback.in_flight > most_in_flight:
        return f"the senders are behind, with {feedback.in_flight:,} messages in flight"
    if is_too_much(feedback):
        return f"the senders are behind, with {feedback.in_flight_bytes >> 20:,} MiB in flight"
    if short_disk is not None:
        return short_disk
    if old_commands:
        return f"commands that were sent before the start have not all come: {', '.join(old_commands)}"
    return None


class Acknowledgements:
    """Decides which entries are acknowledged: those of seal epochs that are durable in a batch that is committed."""

    def __init__(self) -> None:
        self._positions: dict[int, dict[str, str]] = {}  # by seal epoch of this run the last entries, by partition
        self._acknowledged = 0  # a seal epoch's number
        self.durable: Mapping[str, str] = {}  # the last entry of the last durable seal epoch, by topic partition

    def note_seal_epoch(self, number: int, positions: dict[str, str]) -> None:
        """Notes the last entries of a seal epoch, by topic partition."""
        self._positions[number] = positions

    def note_commit(self, durable_through: int) -> Mapping[str, str] | None:
        """Notes that Spark has committed a batch.

        Args:
            durable_through: of the batch's offset.

        Returns:
            the entries up to which the topics are acknowledged, by topic partition; None: nothing more than before.
        """
        if durable_through <= self._acknowledged:
            return None
        self._acknowledged = durable_through
        self.durable = self._positions.pop(durable_through, {})
        self._positions = {number: found for number, found in self._positions.items() if number > durable_through}
        return self.durable
