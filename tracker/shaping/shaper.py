"""Shapes what comes due: gives each message for a subscription with a rate or windows its place in time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.moment import Moment
from tracker.commands.operations import Operations
from tracker.commands.schema import SEQUENCE_BITS
from tracker.messages import (
    MESSAGES,
    BoolArray,
    Int64Array,
    concat,
    empty_table,
    int64,
    subscription_numbers,
    typed,
    with_columns,
)
from tracker.shaping.bucket import Bucket, FloatArray, own_ranks
from tracker.shaping.open_time import OpenTime
from tracker.shaping.rule import Rule
from tracker.sharding import Place
from tracker.store import Store
from tracker.subscriptions import Subscriptions, by_topic

_TABLE = "shaping"

# A place this much after the time of its message is none: the two are the same but for rounding, ms.
_TOLERANCE_MILLIS = 0.01

# Messages may be so late, ms, and by half of what a burst may save up, if that is less, without places being put off.
_LATE_MILLIS = 500.0

# After a start it takes about so long until what is in flight can be sent again, ms.
_START_MILLIS = 3_000

_PLACED = MESSAGES.append(pa.field("subscription_mask", pa.int64()))

_NO_KEY = ""


@dataclass
class _Target:
    """The state of a subscription.

    Attributes:
        next_times: by key the state of its bucket as a real time, ms since the epoch; without keys that of `_NO_KEY`.
        last: the last place that was given to a message that was moved to it, ms since the epoch.
        floor: after a rebuild the state of each bucket that is not in `next_times`.
        put_off: [tick, open time in ms]: by how much all places given before that tick are later now.
        rate: messages a second, burst, and whether by key, by which the last places were given; empty: not known.
        since: places given before this tick are those of a rate that was higher: they count no more.
        since_until: the last of these, ms since the epoch.
    """

    next_times: dict[str, float] = field(default_factory=dict)
    last: int = 0
    put_off: list[list[float]] = field(default_factory=list)
    floor: float = 0.0
    rate: list[Any] = field(default_factory=list)
    since: int = 0
    since_until: int = 0


# By source topic and subscription: a time, ms since the epoch, after which there are places, and how many messages wait
# for one in each shard.
Places = Mapping[str, Mapping[str, tuple[int, Sequence[int]]]]


class Shaped(NamedTuple):
    """What has become of due rows."""

    masks: Int64Array  # (rows,): the subscriptions to which each row goes as it is, as bits
    placed: pa.Table  # further rows for this release, as MESSAGES and `subscription_mask`, int64: with another time
    waiting: pa.Table  # rows, as MESSAGES, that are to come due again in the next tick, which has places for them


class Shaper:
    """Gives messages places: at most as many as their subscription's rate and burst allow, and within its windows.

    What comes due takes the next free place from its time on. One whose place is after the cutoff is moved there, and
    goes out when it comes due there; so it is listed, cancelled and rebuilt as any moved message. Its row has in
    `shaped_from` when it was due at first, by which it is known to have a place.

    What is beyond a shard's own share of the rate waits for the next tick, whose offset has places for all shards' rows
    together: as many for each as it has waiting. So the whole rate is used, however the messages lie in the shards.

    Places that could not be kept, because the job stood still, are put off, all of a subscription by the same time: a
    row that was given its place before is moved on by it when it comes due.

    Args:
        store: where the state is kept.
        subscriptions: those of each source topic, with their rules.
        operations: to which moves are added.
        place: which shard this is.
    """

    def __init__(self, store: Store, subscriptions: Subscriptions, operations: Operations, place: Place) -> None:
        self._store = store
        self._subscriptions = subscriptions
        self._operations = operations
        self._place = place
        self._saved = store.get(_TABLE, (0, 0))
        saved = json.loads(self._saved) if self._saved else []
        self._targets = {(topic, number): _Target(*state) for topic, number, *state in saved}
        self.n_moved = 0  # messages that this tick has given a place after its cutoff
        self._n_waiting: dict[tuple[str, int], int] = {}
        self._given: dict[tuple[str, int], FloatArray] = {}  # places of this tick's offset that are left, real time

    def __bool__(self) -> bool:
        """Whether any subscription's messages are shaped."""
        return bool(self._subscriptions.shaping)

    @property
    def waiting(self) -> dict[str, dict[str, list[int]]]:
        """By source topic and subscription how many rows wait for the next tick, and the last place given, ms."""
        found: dict[str, dict[str, list[int]]] = {}
        for (topic, number), n in self._n_waiting.items():
            name = self._subscriptions.names[topic][number]
            found.setdefault(topic, {})[name] = [n, self._target(topic, number).last]
        return found

    def give(self, places: Places) -> None:
        """Takes over the places that the tick's offset gives to what waits in all shards.

        All shards get each other's numbers, so that each knows which places are its own: every shard's are spread
        evenly among all of them.

        Args:
            places: of the tick's offset.
        """
        for topic, names in places.items():
            for number, name in enumerate(self._subscriptions.names.get(topic, ())):
                rule = self._rule(topic, number)
                if name not in names or rule is None or rule.rate is None:
                    continue
                after, waiting = names[name]
                opened, interval = OpenTime(rule.windows, after), 1000 / rule.rate
                begin = float(opened.to_open(np.array([float(after)]))[0])
                ranks = own_ranks(waiting, self._place.number)
                self._given[topic, number] = opened.to_real(begin + interval * (ranks + 1).astype(np.float64))
                end = float(opened.to_real(np.array([begin + sum(waiting) * interval]))[0])
                target = self._target(topic, number)
                target.last = max(target.last, ceil(end))
                target.next_times[_NO_KEY] = self._full(topic, number, target.last)

    @property
    def until(self) -> dict[str, dict[str, int]]:
        """By source topic and subscription's name the last place given, ms since the epoch."""
        found: dict[str, dict[str, int]] = {}
        for (topic, number), target in self._targets.items():
            names = self._subscriptions.names.get(topic, ())
            if target.last and number < len(names):
                found.setdefault(topic, {})[names[number]] = target.last
        return found

    def begin_again(self, since: Mapping[tuple[str, int], int], moment: Moment) -> None:
        """Puts places off after a start, by as long as what is in flight is sent later than it was to be.

        Args:
            since: by topic and subscription when the first message is due that is in flight, ms since the epoch.
            moment: of this tick.
        """
        for (topic, number), first in since.items():
            rule = self._rule(topic, number)
            if rule is not None and rule.rate is not None and first < moment.now + _START_MILLIS:
                self._put_off(topic, number, rule, first, moment.now + _START_MILLIS, moment)
        # What another shard has in flight may be of some ticks, so its rows go that much later than here they would.
        self._follow_other_shards(moment.now + 2 * _START_MILLIS, moment)

    def rebuild(self, until: Mapping[str, Mapping[str, int]]) -> None:
        """Begins after a rebuild: what comes due goes after the last place that was given.

        Args:
            until: as the property of that name, of all shards together.
        """
        for topic, rules in self._subscriptions.shaping.items():
            for number in rules:
                last = until.get(topic, {}).get(self._subscriptions.names[topic][number], 0)
                if last:
                    # Without a burst: of the places before nothing can have been saved up.
                    self._targets[topic, number] = _Target({}, last, floor=self._full(topic, number, last))

    def notice_late(self, rows: pa.Table, moment: Moment) -> None:
        """Puts the places of subscriptions off some of whose due rows could not be kept to theirs.

        Args:
            rows: as MESSAGES: all that come due in this tick, before any of them is shaped.
            moment: of this tick.
        """
        if self:
            self._notice_own_late(rows, moment)
            self._follow_other_shards(moment.now, moment)

    def _follow_other_shards(self, until: float, moment: Moment) -> None:
        """Puts places off, of which those after the last tick's cutoff are past: another shard may have rows there.

        All shards know how far places were given, and that shard puts its rows off: without this, the places that these
        get would be given here once more.

        Args:
            until: to when it puts the first one off, ms since the epoch.
            moment: of this tick.
        """
        for (topic, number), target in list(self._targets.items()):
            # Where places were put off before, the first of them is not before that.
            rule, first = self._rule(topic, number), max(moment.released + 1, target.floor)
            if rule is None or rule.rate is None or rule.is_per_key or self._place.shards == 1:
                continue
            is_known = any(tick == moment.tick for tick, _ in target.put_off)
            if target.last >= first and first < until - _slack(rule) and not is_known:
                self._put_off(topic, number, rule, first, until, moment)

    def _notice_own_late(self, rows: pa.Table, moment: Moment) -> None:
        """Puts places off where rows, as MESSAGES, that come due in this tick could not be kept to theirs."""
        if rows["shaped_from"].null_count == rows.num_rows:
            return
        placed = rows.filter(pc.is_valid(rows["shaped_from"]))
        # A row that has a place is for one subscription.
        own = np.left_shift(1, np.maximum(subscription_numbers(placed, self._subscriptions.names), 0))
        for topic, number, rule, chosen in self._by_target(placed, self._masks(placed) & own):
            of_target = placed.take(pa.array(chosen))
            of_target = of_target.filter(pa.array(self._have_places(topic, number, rule, of_target, moment)))
            if rule.rate is None or not of_target.num_rows:
                continue
            opened = OpenTime(rule.windows, min(moment.now, int(int64(placed, "deliver_at").min())))
            times = self._put_off_places(topic, number, of_target, opened)
            if times.min() < moment.now - _slack(rule):
                self._put_off(topic, number, rule, float(times.min()), moment.now, moment)

    def shape(self, rows: pa.Table, masks: Int64Array, moment: Moment, cutoff: int) -> Shaped:
        """Gives due rows their places; those with a place after the cutoff are moved there.

        Args:
            rows: as MESSAGES, in the order of delivery.
            masks: int64, (rows,): the subscriptions that each row goes to, as bits.
            moment: of this tick.
            cutoff: of this tick, ms since the epoch.
        """
        nothing = empty_table(_PLACED)
        shaped = masks & self._masks(rows)
        if not shaped.any():
            return Shaped(masks, nothing, empty_table(MESSAGES))
        masks = masks.copy()
        placed: list[pa.Table] = []
        waiting: list[pa.Table] = []
        for topic, number, rule, chosen in self._by_target(rows, shaped):
            of_target = rows.take(pa.array(chosen))
            due = int64(of_target, "deliver_at")
            places, has_place = self._places(topic, number, rule, of_target, moment, cutoff)
            if (has_none := np.isnan(places)).any():
                masks[chosen[has_none]] &= ~(1 << number)
                waiting.append(self._waiting(of_target.filter(pa.array(has_none)), number))
                self._n_waiting[topic, number] = self._n_waiting.get((topic, number), 0) + waiting[-1].num_rows
                chosen, of_target, due = chosen[~has_none], of_target.filter(pa.array(~has_none)), due[~has_none]
                places, has_place = places[~has_none], has_place[~has_none]
            at = np.ceil(places - _TOLERANCE_MILLIS).astype(np.int64)
            # What is overdue goes at once as it is, where there is a place now.
            is_kept = at <= np.where(has_place, due, np.maximum(due, moment.now))
            masks[chosen[~is_kept]] &= ~(1 << number)
            is_later = ~is_kept & (at > cutoff)
            in_time = self._retimed(of_target, at, ~is_kept & ~is_later)
            if in_time.num_rows:
                names = self._subscriptions.names_of(in_time["topic"], number)
                in_time = with_columns(in_time, subscription=names)
                bits = pa.array(np.full(in_time.num_rows, 1 << number))
                placed.append(typed(in_time, MESSAGES).append_column("subscription_mask", bits))
            later = self._retimed(of_target, at, is_later)
            if later.num_rows:
                original, sequence = of_target.filter(pa.array(is_later)), self._operations.next_sequence(moment)
                shaped_from = int64(later, "shaped_from")
                self._operations.move(original, number, at[is_later], sequence, shaped_from=shaped_from)
                self._target(topic, number).last = max(self._target(topic, number).last, int(at[is_later].max()))
                self.n_moved += later.num_rows
        return Shaped(masks, concat(placed, nothing.schema), concat(waiting))

    def save(self) -> None:
        """Writes what is not in the store yet."""
        if not self._targets and self._saved is None:
            return
        state = [[*key, *vars(t).values()] for key, t in sorted(self._targets.items())]
        data = json.dumps(state, separators=(",", ":")).encode()
        if data != self._saved:
            self._store.put(_TABLE, (0, 0), data)
            self._saved = data

    def forget_past(self, now: int) -> None:
        """Forgets buckets that are full again, and places that are past, ms since the epoch."""
        for key, target in list(self._targets.items()):
            if target.last <= now:
                target.last, target.put_off = 0, []
            if target.floor <= now:
                target.floor = 0.0
            if target.since_until <= now:
                target.since = target.since_until = 0
            target.next_times = {name: time for name, time in target.next_times.items() if time > now}
            if not target.next_times and not target.last and not target.floor and not target.since:
                del self._targets[key]

    def _places(
        self, topic: str, number: int, rule: Rule, rows: pa.Table, moment: Moment, cutoff: int
    ) -> tuple[FloatArray, BoolArray]:
        """Returns the places of rows of one subscription, float64, (rows,), ms; and which had one before.

        NaN is the place of a row that gets none in this tick.
        """
        due = int64(rows, "deliver_at")
        opened = OpenTime(rule.windows, min(moment.now, int(due.min())))
        places = due.astype(np.float64)
        has_place = self._have_places(topic, number, rule, rows, moment)
        if has_place.any():
            places[has_place] = self._put_off_places(topic, number, rows.filter(pa.array(has_place)), opened)
            # Other windows in the settings than when the place was given: it needs another one. Without a rate there is
            # a place whenever it is open.
            has_place &= opened.is_open(places if rule.rate is not None else np.maximum(places, moment.now))
        new = np.flatnonzero(~has_place)
        if len(new):
            keys = rows["key"].take(pa.array(new)) if rule.is_per_key else None
            times = np.maximum(due[new], moment.now).astype(np.float64)
            given = self._given.pop((topic, number), times[:0])
            n = min(len(given), len(new))
            places[new[:n]] = np.maximum(given[:n], times[:n])
            self._given[topic, number] = given[n:]
            new, times = new[n:], opened.to_open(times[n:])
            target = self._target(topic, number)
            if rule.rate is not None and not rule.is_per_key and self._place.shards > 1:
                # Alone a shard gives only places of this tick.
                n = self._number_of_places(target, rule, times, opened, cutoff)
                places[new[n:]] = np.nan
                new, times = new[:n], times[:n]
            places[new] = opened.to_real(self._take(target, rule, times, keys, opened))
        return places, has_place

    def _have_places(self, topic: str, number: int, rule: Rule, rows: pa.Table, moment: Moment) -> BoolArray:
        """Tells which rows of one subscription have a place that counts: bool, (rows,).

        Where the rate is lower than it was, those that were given before have none any more: they get new ones.
        """
        has_place: BoolArray = np.asarray(pc.is_valid(rows["shaped_from"]))
        target, rate = self._target(topic, number), [rule.rate, rule.burst, rule.is_per_key]
        if target.rate and target.rate != rate and target.last > moment.now and _is_less(rate, target.rate):
            target.since, target.since_until = moment.tick, max(target.since_until, target.last)
            target.last, target.put_off, target.next_times = moment.now, [], {}
            target.floor = self._full(topic, number, moment.now)
        target.rate = rate
        if target.since and has_place.any():
            has_place = has_place & (_ticks(rows) >= target.since)
        return has_place

    def _take(
        self, target: _Target, rule: Rule, times: FloatArray, keys: pa.ChunkedArray | None, opened: OpenTime
    ) -> FloatArray:
        """Takes places from the buckets of a subscription, in open time, for times in open time: float64, (n,)."""
        if rule.rate is None:
            return times
        bucket = Bucket.of(rule.rate, rule.burst, self._place)
        if keys is None:
            names, numbers = [_NO_KEY], np.zeros(len(times), np.int64)
        else:
            encoded = pc.fill_null(keys.cast(pa.string()), _NO_KEY).combine_chunks().dictionary_encode()
            names, numbers = encoded.dictionary.to_pylist(), encoded.indices.to_numpy().astype(np.int64)
        before = np.array([target.next_times.get(name, target.floor) for name in names])
        if keys is None:
            places, after = bucket.places(times, float(opened.to_open(before)[0]))
            states = np.array([after])
        else:
            places, states = bucket.places_of_keys(times, numbers, opened.to_open(before))
        target.next_times |= dict(zip(names, opened.to_real(states).tolist(), strict=True))
        return places

    def _number_of_places(self, target: _Target, rule: Rule, times: FloatArray, opened: OpenTime, cutoff: int) -> int:
        """Returns for how many messages the shard has places until the cutoff, ms; times are in open time."""
        assert rule.rate is not None
        state = float(opened.to_open(np.array([target.next_times.get(_NO_KEY, target.floor)]))[0])
        places, _ = Bucket.of(rule.rate, rule.burst, self._place).places(times, state)
        return int((opened.to_real(places) <= cutoff).sum())

    def _waiting(self, rows: pa.Table, number: int) -> pa.Table:
        """Returns rows as they are, but for one subscription."""
        return with_columns(rows, subscription=self._subscriptions.names_of(rows["topic"], number))

    def _put_off_places(self, topic: str, number: int, rows: pa.Table, opened: OpenTime) -> FloatArray:
        """Returns where the places of rows are now: float64, (rows,), ms since the epoch."""
        places = int64(rows, "deliver_at").astype(np.float64)
        target = self._targets.get((topic, number))
        if target is None or not target.put_off:
            return places
        of_tick = _ticks(rows)
        by = sum((np.where(of_tick < tick, millis, 0.0) for tick, millis in target.put_off), np.zeros(len(places)))
        is_later = by > 0
        places[is_later] = opened.to_real(opened.to_open(places[is_later]) + by[is_later])
        return places

    def _put_off(self, topic: str, number: int, rule: Rule, first: float, until: float, moment: Moment) -> None:
        """Puts all places of a subscription off, so that the one at `first` is at `until`; both ms since the epoch."""
        opened = OpenTime(rule.windows, min(first, moment.now))
        start, end = opened.to_open(np.array([first, until]))
        by = float(end - start)
        if by <= 0:
            return
        target = self._target(topic, number)
        target.floor = max(target.floor, 0 if rule.is_per_key else until)
        names = list(target.next_times)
        times = opened.to_open(np.maximum(np.array([target.next_times[name] for name in names]), first)) + by
        target.next_times = dict(zip(names, opened.to_real(times).tolist(), strict=True))
        if target.last:
            target.last = int(opened.to_real(opened.to_open(np.array([float(target.last)])) + by)[0])
            target.put_off.append([moment.tick, by])

    def _full(self, topic: str, number: int, last: int) -> float:
        """Returns the state of a bucket of which the last place was at a time, and nothing is saved up: ms."""
        rule = self._rule(topic, number)
        if rule is None or rule.rate is None:
            return float(last)
        bucket = Bucket.of(rule.rate, rule.burst, self._place)
        opened = OpenTime(rule.windows, last)
        after = opened.to_open(np.array([float(last)])) + max(1, bucket.burst) * bucket.interval
        return float(opened.to_real(after)[0])

    def _target(self, topic: str, number: int) -> _Target:
        return self._targets.setdefault((topic, number), _Target())

    def _rule(self, topic: str, number: int) -> Rule | None:
        text = self._subscriptions.shaping.get(topic, {}).get(number)
        return None if text is None else Rule.from_json(text)

    def shapes(self, rows: pa.Table) -> BoolArray:
        """Tells which rows are of topics with a subscription whose messages are shaped: bool, (rows,)."""
        shapes: BoolArray = self._masks(rows) != 0 if self else np.zeros(rows.num_rows, np.bool_)
        return shapes

    def _masks(self, rows: pa.Table) -> Int64Array:
        """Returns the subscriptions whose messages are shaped, of each row's topic, as bits: int64, (rows,)."""
        shaping = self._subscriptions.shaping
        return by_topic(rows, lambda topic: sum(1 << number for number in shaping.get(topic, ())))

    def _by_target(self, rows: pa.Table, masks: Int64Array) -> Iterator[tuple[str, int, Rule, Int64Array]]:
        """Yields topic, number and rule of each subscription, with the indexes of its rows, int64, ascending."""
        topics = rows["topic"].combine_chunks().dictionary_encode()
        indices = topics.indices.to_numpy()
        for i, topic in enumerate(topics.dictionary.to_pylist()):
            for number in self._subscriptions.shaping.get(topic, ()):
                chosen = np.flatnonzero((indices == i) & (masks >> number & 1 > 0))
                if len(chosen) and (rule := self._rule(topic, number)) is not None:
                    yield topic, number, rule, chosen

    @staticmethod
    def _retimed(rows: pa.Table, at: Int64Array, chosen: BoolArray) -> pa.Table:
        """Returns the chosen rows with another time, and when they were due at first."""
        if not chosen.any():
            return rows.slice(0, 0)
        rows = rows.filter(pa.array(chosen))
        shaped_from = pc.coalesce(rows["shaped_from"], rows["was_due"], rows["deliver_at"])
        was_due = pa.nulls(rows.num_rows, pa.int64())
        return with_columns(rows, deliver_at=pa.array(at[chosen]), shaped_from=shaped_from, was_due=was_due)


def _ticks(rows: pa.Table) -> Int64Array:
    """Returns in which tick rows were given their places, int64, (rows,); 0: that is not known."""
    ticks: Int64Array = pc.fill_null(rows["sequence"], 0).to_numpy().astype(np.int64) >> SEQUENCE_BITS
    return ticks


def _is_less(rate: Sequence[Any], before: Sequence[Any]) -> bool:
    """Whether places of a rate before are more than a rate allows; both as `_Target.rate`."""
    if rate[0] is None:
        return False
    return before[0] is None or rate[0] < before[0] or rate[1] < before[1] or rate[2] != before[2]


def _slack(rule: Rule) -> float:
    """Returns how late messages may be, ms, before places are put off."""
    return min(_LATE_MILLIS, 500 * rule.burst / rule.rate) if rule.rate is not None else _LATE_MILLIS
