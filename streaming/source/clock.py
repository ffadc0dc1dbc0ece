"""The clock: decides when a batch is made, how far it looks ahead, and when buckets are sealed and segments loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from conf.times import Moment
from streaming.checkpoint.offset import Offset
from streaming.release.feedback import Feedback
from tracker.buckets.large_rows import LargeKey, LargeRows, LargeRule
from tracker.buckets.time_slots import SLOT_MILLIS

# The shortest time between two batches without urgent work: more batches would only take CPU time from the senders.
MIN_TICK_SECONDS = 0.3
_MAX_TICK_SECONDS = 1.2

# What large messages may have, in bytes, that are loaded, or dispatched and not recorded; what a tick loads of
# them; and with how much room a tick is made for more of them.
MAX_LARGE_BYTES = 96 << 20
_MAX_LOADED_BYTES = 32 << 20
_ROOM_FOR_MORE = 8 << 20

# The longest time without a batch, while a batch would have nothing to do.
MAX_REST_SECONDS = 60.0


class DelayedIndex(Protocol):
    """What the clock asks of the table `delayed_index`. Times are ms since the epoch."""

    def version(self) -> int:
        """Returns the newest version of the table."""

    def rows_due(self, version: int, start: int, end: int) -> list[tuple[int, int]]:
        """Returns (number of the time slot, number of rows) of the rows that are due from start to before end.

        They ascend. A slot is SLOT_MILLIS long.
        """

    def large_rule(self, version: int, start: int, end: int) -> LargeRule:
        """Returns which of the rows that are due from start to before end are large."""

    def large_due(self, version: int, rule: LargeRule, after: LargeKey, end: int) -> list[tuple[LargeKey, int]]:
        """Returns (key, bytes) of the large rows after a key that are due before end.

        They ascend. Of very many it returns the first.
        """


@dataclass(frozen=True)
class ClockSettings:
    """The settings of the clock.

    Attributes:
        run_id: of this run of the query.
        lookahead_millis: the lookahead until the feedback has a measured one.
        seal_interval_millis: the longest time from one seal epoch's end to the next, while there is something to do.
        load_ahead_millis: how far the load horizon is ahead of now.
        max_segment_rows: the most rows that a tick loads, unless one time slot has more; also the most messages of a
            subscription that get a place from its rate in a tick.
        max_lookahead_millis: the longest lookahead that the feedback can ask for; 0: lookahead_millis.
        max_segment_millis: the longest time from now on that a segment spans.
    """

    run_id: str
    lookahead_millis: int
    seal_interval_millis: int
    load_ahead_millis: int
    max_segment_rows: int = 100_000
    max_lookahead_millis: int = 0
    max_segment_millis: int = 300_000


def tick_seconds(batch_seconds: float, least: float = MIN_TICK_SECONDS) -> float:
    """Returns how long after a batch the next one begins when it has no urgent work, seconds.

    Batches without a pause would make the senders late on busy cores, because each batch has a fixed cost.

    Args:
        batch_seconds: how long a batch usually takes.
        least: the shortest such time, seconds, of quick batches.
    """
    return min(max(least, 2 * batch_seconds - MIN_TICK_SECONDS), _MAX_TICK_SECONDS)


class Clock:
    """Makes the next offset from the last one, the time, and the driver's feedback on the batches before.

    Callers pass the time. The clock remembers when the next seal epoch is to end, and whether the last segment was cut
    short.
    """

    def __init__(self, settings: ClockSettings) -> None:
        self._settings = settings
        self._next_seal = 0.0
        self._rests_until = 0.0
        self._is_behind = False

    def is_asked(
        self,
        last: Offset,
        now: Moment,
        feedback: Feedback,
        has_nothing_to_do: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Whether there is reason for a batch other than messages that have come in, or come due in state.

        Args:
            last: the last offset.
            now: the time.
            feedback: of the driver.
            has_nothing_to_do: whether there is nothing to seal, load or settle; called when a seal epoch would end.
        """
        return (
            last.run_id != self._settings.run_id
            or self._is_behind
            or self._loads_more(last, feedback)
            or self._is_set_back(last, now.millis, feedback)
            or self._ends_seal_epoch(now.seconds, has_nothing_to_do)
            or (feedback.unwritable is not None and feedback.unwritable != last.unwritable)
        )

    def next(self, last: Offset, at: Moment, feedback: Feedback, index: DelayedIndex) -> Offset:
        """Makes the next offset. The caller adds positions, routes and other fields that the clock does not know.

        Args:
            last: the last offset.
            at: the time.
            feedback: of the driver.
            index: asked at the end of a seal epoch. While large rows wait, which are large stays as it was.
        """
        now = at.millis
        is_set_back = self._is_set_back(last, now, feedback)
        furthest_cutoff = self._lookahead_end(now, feedback) if is_set_back else self._next_cutoff(last, now, feedback)
        tick = last.tick + 1
        seal_epoch, load, near, durable_through, marks, version = (
            last.seal_epoch,
            last.load_horizon,
            last.near_until,
            last.durable_through,
            last.marks,
            last.index_version,
        )
        if feedback.next_due is not None:
            # What was due by a mark and waits for a place under a rate goes out in this tick at the earliest.
            marks = [[epoch, tick if feedback.next_due < due else marked, due] for epoch, marked, due in marks]
        confirmed = max(last.confirmed, feedback.confirmed)
        is_new_run = last.run_id != self._settings.run_id
        is_seal_due = at.seconds >= self._next_seal or furthest_cutoff >= last.near_until
        is_seal_due |= self._loads_more(last, feedback)
        large = last.large_rows
        if is_new_run or self._is_behind or is_set_back or is_seal_due:
            self._next_seal = at.seconds + self._settings.seal_interval_millis / 1000
            self._rests_until = at.seconds + MAX_REST_SECONDS
            seal_epoch += 1
            version = index.version()
            load, near, has_segment = self._horizons(last, now, feedback, version, index)
            if not has_segment and large.after is None:
                large = LargeRows(index.large_rule(version, load, load))
            else:
                rule = large.rule if large.after else index.large_rule(version, last.load_horizon, load)
                large = self._large(last, feedback, index.large_due(version, rule, last.large_to, load), rule)
            near = near if is_set_back else max(last.near_until, near)
            # A message that was due by then and waits for a place is neither delivered nor sealed.
            settled_until = feedback.settled + 1
            if feedback.next_due is not None:
                settled_until = min(settled_until, feedback.next_due)
            while marks and marks[0][1] <= confirmed and marks[0][2] <= settled_until:
                durable_through = marks[0][0]
                marks = marks[1:]
        cutoff = min(furthest_cutoff, near - 1)
        if not is_set_back:
            cutoff = max(last.cutoff, cutoff)
        if seal_epoch != last.seal_epoch:
            # After a standstill the cutoff is beyond the last `near_until`: what comes in by then is not sealed either.
            marks = [*marks, [seal_epoch, tick, max(last.near_until, cutoff + 1)]]
        unwritable = last.unwritable if feedback.unwritable is None else feedback.unwritable
        return Offset(
            tick=tick,
            now=now,
            cutoff=cutoff,
            seal_epoch=seal_epoch,
            load_horizon=load,
            near_until=near,
            run_id=self._settings.run_id,
            confirmed=confirmed,
            durable_through=durable_through,
            marks=marks,
            index_version=version,
            unwritable=unwritable,
            places=_places(last, now, feedback, unwritable, self._settings.max_segment_rows),
            large=large.to_json() if large.rule.n_bytes else {},
            lane_set=last.lane_set + is_set_back,
        )

    def _loads_more(self, last: Offset, feedback: Feedback) -> bool:
        """Whether large rows wait in the delayed index, and there is room for some."""
        on_their_way = feedback.in_flight_bytes + feedback.large_bytes
        return last.large_rows.after is not None and (
            MAX_LARGE_BYTES - on_their_way >= _ROOM_FOR_MORE or not on_their_way
        )

    def _large(
        self, last: Offset, feedback: Feedback, large_due: list[tuple[LargeKey, int]], rule: LargeRule
    ) -> LargeRows:
        """Returns which large rows are in state after the tick: as many more as there is room for.

        Args:
            last: the last offset.
            feedback: of the driver.
            large_due: (key, bytes) of those that wait, due before the new load horizon, ascending.
            rule: which rows are large.
        """
        on_their_way = feedback.in_flight_bytes + feedback.large_bytes
        room = min(MAX_LARGE_BYTES - on_their_way, _MAX_LOADED_BYTES)
        after = last.large_to
        for key, n_bytes in large_due:
            # Larger than all room is, the first goes alone where the room is the largest that there ever is.
            is_alone = after == last.large_to and (not on_their_way or room >= _MAX_LOADED_BYTES)
            if n_bytes > room and not is_alone:
                return LargeRows(rule, after)
            room -= n_bytes
            after = key
        return LargeRows(rule)

    def _ends_seal_epoch(self, monotonic: float, has_nothing_to_do: Callable[[], bool]) -> bool:
        if monotonic < self._next_seal:
            return False
        if monotonic < self._rests_until and has_nothing_to_do():
            self._next_seal = min(monotonic + self._settings.seal_interval_millis / 1000, self._rests_until)
            return False
        return True

    def _next_cutoff(self, last: Offset, now: int, feedback: Feedback) -> int:
        """Returns the cutoff that the lookahead asks for, ms since the epoch: never before the last one."""
        return max(last.cutoff, self._lookahead_end(now, feedback))

    def _lookahead_end(self, now: int, feedback: Feedback) -> int:
        """Returns the end of the last whole time slot that the lookahead reaches, ms since the epoch."""
        return _slot_start(now + self.lookahead(feedback)) - 1

    def _is_set_back(self, last: Offset, now: int, feedback: Feedback) -> bool:
        """Whether the machine's clock was set back: no lookahead reaches from now to the last cutoff.

        Then the cutoff goes back, too. Else messages that come in and are due before the old cutoff would be dispatched
        long before their time, and hold up due messages in their lanes.
        """
        limits = self._settings
        most = max(limits.max_lookahead_millis, limits.lookahead_millis, self.lookahead(feedback))
        return last.cutoff > now + most + SLOT_MILLIS

    def lookahead(self, feedback: Feedback) -> int:
        """Returns how long before its time a message is dispatched, ms."""
        return feedback.lookahead_millis or self._settings.lookahead_millis

    def has_due(self, last: Offset, now: int, feedback: Feedback) -> bool:
        """Whether a message in state may be due by the next cutoff, and that is after the last one.

        Args:
            last: the last offset.
            now: ms since the epoch.
            feedback: of the driver.
        """
        cutoff = self._next_cutoff(last, now, feedback)
        return cutoff > last.cutoff and (feedback.next_due is None or feedback.next_due <= cutoff)

    def _horizons(
        self,
        last: Offset,
        now: int,
        feedback: Feedback,
        version: int,
        index: DelayedIndex,
    ) -> tuple[int, int, bool]:
        """Returns the new `load_horizon` and `near_until`, earlier ones where too many rows are due before them.

        And whether there are rows to load.

        Rows that came due while the job stood still, or are due within seconds, are loaded at once however long a time
        they span. Beyond them the horizon moves no further than `max_segment_millis`.
        """
        near = _slot_start(now + self._settings.seal_interval_millis + self.lookahead(feedback) + 2 * SLOT_MILLIS)
        furthest = max(last.load_horizon, now) + self._settings.max_segment_millis
        load = max(last.load_horizon, near, _slot_start(min(now + self._settings.load_ahead_millis, furthest)))
        rows = 0
        for slot, count in index.rows_due(version, last.load_horizon, load):
            if rows and rows + count > self._settings.max_segment_rows:
                load = slot * SLOT_MILLIS
                break
            rows += count
        self._is_behind = load < near
        return load, min(near, load), rows > 0


def _slot_start(time: int) -> int:
    return time // SLOT_MILLIS * SLOT_MILLIS


def _places(
    last: Offset, now: int, feedback: Feedback, unwritable: Mapping[str, Mapping[str, Any]], at_most: int
) -> dict[str, dict[str, Any]]:
    """Returns the places for shaped messages that wait in the shards: see `Offset.places`.

    Places begin after all places given so far; a place that a shard gave by itself is due by the last cutoff. Messages
    without a place wait on: a tick that moved millions of messages would hold up all others. So do all messages for a
    slow recipient: with their places they would be parked once more, and each round would use up as many places again.

    Args:
        last: the last offset.
        now: ms since the epoch.
        feedback: of the driver.
        unwritable: as `Offset.unwritable`; a slow recipient has a `round`.
        at_most: the most places of a subscription; rounding may add one for each shard.
    """
    tick, waiting = feedback.waiting
    if tick != last.tick:  # the feedback after the next batch has these numbers again
        return {}
    return {
        topic: {
            name: [
                max(now, last.cutoff, *(given for _, given in of_shards)),
                _shares([n for n, _ in of_shards], at_most),
            ]
            for name, of_shards in names.items()
            if "round" not in unwritable.get(topic, {}).get(name, {})
        }
        for topic, names in waiting.items()
    }


def _shares(counts: list[int], at_most: int) -> list[int]:
    """Scales counts down so that they add up to `at_most`, each rounded up; returns smaller ones as they are."""
    total = sum(counts)
    return counts if total <= at_most else [-(-n * at_most // total) for n in counts]
