"""The recurrences of many messages in columns: where they begin, and their next occurrences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.errors import one_line
from conf.time_zones import TimeZones, used
from tracker.due_time import DELIVER_AFTER, DELIVER_AT, TOO_FAR, BadScheduleError, deliver_at
from tracker.messages import BoolArray, Int64Array, int64
from tracker.properties import MESSAGE_ID, OCCURRENCE
from tracker.recurrence.recurrence import (
    MISFIRE,
    REPEAT,
    REPEAT_TIMES,
    REPEAT_UNTIL,
    SHORTEST_MILLIS,
    TIME_ZONE,
    Misfire,
    Recurrence,
    RecurrenceError,
    recurrence_of,
)


def is_occurrence(properties: Mapping[str, str]) -> bool:
    """Tells whether a message is a delivered occurrence that comes in: from a destination, or because it is sent again.

    It has the properties of its schedule, but begins no new one: the schedule continues where it began.
    """
    return MESSAGE_ID in properties and OCCURRENCE in properties


def counts_from(last: int, published: int, now: int) -> int:
    """Returns the time after which occurrences count as missed, ms since the epoch.

    That is the last occurrence or the publish time, whichever is later. A producer's clock may be ahead, so a publish
    time after `now` counts as `now`.

    Args:
        last: when the last occurrence was due, ms since the epoch.
        published: when the message was published, ms since the epoch.
        now: ms since the epoch.
    """
    return max(last, min(published, now))


def accepted_first(
    properties: Mapping[str, str], published: int, max_delay_millis: int, shortest_millis: int = SHORTEST_MILLIS
) -> int:
    """Returns when the first occurrence of a new recurring message is, ms since the epoch.

    Args:
        properties: the message's. `deliverAt` or `deliverAfter` is the time of the first occurrence.
        published: when it was published, ms since the epoch.
        max_delay_millis: the longest delay of the first occurrence that is accepted, ms; 0: any.
        shortest_millis: the shortest time between two occurrences that is accepted, ms.

    Raises:
        BadScheduleError: a property can't be read, or the rule is none that is accepted, or the first occurrence would
            be after the schedule's end, or too late.
    """
    recurrence_of(properties).check(shortest_millis)
    return first_of(properties, published, max_delay_millis)


def stored(properties: Mapping[str, str], published: int) -> tuple[Recurrence, int]:
    """Returns the rule of a message that was taken in, and when its first occurrence is, ms since the epoch.

    What an earlier version has taken in may be none that this one reads, as of a time zone that is no more: then the
    schedule has ended. A message without any properties has lost them, and has ended, too.

    Args:
        properties: the message's.
        published: when it was published, ms since the epoch.
    """
    try:
        rule = recurrence_of(properties)
    except BadScheduleError as error:
        return Recurrence.unreadable(properties, str(error)), published
    except Exception as error:  # whatever it is, it is of this message alone
        why = f"{REPEAT} fails with {type(error).__name__}: {one_line(error)[:200]}"
        return Recurrence.unreadable(properties, why), published
    try:
        return rule, first_of(properties, published)
    except Exception:
        return rule, published


def first_of(properties: Mapping[str, str], published: int, max_delay_millis: int = 0) -> int:
    """Returns when the first occurrence of a recurring message is, ms since the epoch.

    Args:
        properties: the message's. `deliverAt` or `deliverAfter` is the time of the first occurrence.
        published: when it was published, ms since the epoch.
        max_delay_millis: the longest delay of the first occurrence that is accepted, ms; 0: any.

    Raises:
        BadScheduleError: a property can't be read, or the first occurrence would be after the schedule's end, or too
            late.
    """
    rule = recurrence_of(properties)
    has_time = DELIVER_AT in properties or DELIVER_AFTER in properties
    named = deliver_at(properties, published, published, max_delay_millis) if has_time else None
    first = rule.first(published, named)
    if first is None:
        # The schedule may end by `repeatUntil`, by the rule's UNTIL, or with the year 9999: the error names the first.
        if rule.until_millis is None:
            raise RecurrenceError(REPEAT, "has no occurrence up to the year 9999, or in 400 years")
        if properties.get(REPEAT_UNTIL) is None or int(properties[REPEAT_UNTIL]) > rule.until_millis:
            raise RecurrenceError(REPEAT, "has an UNTIL before the first occurrence")
        raise RecurrenceError(REPEAT_UNTIL, "is before the first occurrence")
    if 0 < max_delay_millis < first - published:
        raise BadScheduleError(TOO_FAR.format(max_delay_millis))
    return first


# In arrays of times: there is no time.
NEVER = -1

_OF_RULE = (REPEAT, TIME_ZONE, REPEAT_UNTIL, REPEAT_TIMES, MISFIRE)

_PLAIN_NUMBER = "^[0-9]{1,18}$"

_Properties = tuple[tuple[str, str], ...]


class Recurrences:
    """The rules by which the messages of a table recur.

    Args:
        rows: with the columns properties and publish_time; all of recurring messages.
    """

    def __init__(self, rows: pa.Table) -> None:
        self._published = int64(rows, "publish_time")
        self._texts = texts = _values(rows["properties"].combine_chunks(), [*_OF_RULE, DELIVER_AT, DELIVER_AFTER])
        self._at, self._after = texts[DELIVER_AT], texts[DELIVER_AFTER]
        self._rules: list[Recurrence] = []
        self._rule_of, firsts = _groups([texts[name] for name in _OF_RULE])
        for i in firsts.tolist():
            given = {name: text for name in _OF_RULE if (text := texts[name][i].as_py()) is not None}
            self._rules.append(stored(given, 0)[0])

    @property
    def published(self) -> Int64Array:
        """When the messages were published: int64, (messages,), ms since the epoch."""
        return self._published

    def __len__(self) -> int:
        """The number of messages."""
        return len(self._published)

    def have_misfire(self, misfire: Misfire) -> BoolArray:
        """Tells which messages have a misfire policy: bool, (messages,)."""
        return np.array([rule.misfire is misfire for rule in self._rules], np.bool_)[self._rule_of]

    def rule(self, i: int) -> Recurrence:
        """Returns the rule of a message."""
        return self._rules[int(self._rule_of[i])]

    def one(self, i: int) -> tuple[Recurrence, int]:
        """Returns the rule of a message, and when its first occurrence is, ms since the epoch."""
        names = (*_OF_RULE, DELIVER_AT, DELIVER_AFTER)
        properties = tuple((name, text) for name in names if (text := self._texts[name][i].as_py()) is not None)
        return self.rule(i), _start(used(), properties, int(self._published[i]))

    def following(self, numbers: Int64Array, after: Int64Array) -> Int64Array:
        """Returns when the next occurrences are: int64, (messages,), ms since the epoch; NEVER: there is none.

        Args:
            numbers: int64, (messages,): numbers of the occurrences before them.
            after: int64, (messages,), ms since the epoch: the next occurrences are later than this.
        """
        found = np.full(len(self), NEVER, np.int64)
        if not self._rules:
            return found
        parts = np.split(np.argsort(self._rule_of, kind="stable"), np.cumsum(np.bincount(self._rule_of))[:-1].tolist())
        for rule, rows in zip(self._rules, parts, strict=True):
            rule_groups = rows if rule.times is None else rows[numbers[rows] < rule.times]
            if len(rule_groups):
                found[rule_groups] = self._following(rule, rule_groups, after[rule_groups])
        return found

    def _following(self, rule: Recurrence, rows: Int64Array, after: Int64Array) -> Int64Array:
        """Returns when the next occurrences of messages with one rule are: int64, (rows,), ms since the epoch."""
        starts = self._starts(rows)
        if rule.every_millis is not None:
            starts = np.where(starts < 0, self._published[rows] + rule.every_millis, starts)
            steps = np.maximum(0, (after - starts) // rule.every_millis + 1)
            return _in_time(rule, np.where(after < starts, starts, starts + steps * rule.every_millis))
        # A message without a time of its own has its first occurrence at the rule's first time after its publish time.
        is_alone = (after < self._published[rows]) & (starts < 0) if rule.is_cron else np.ones(len(rows), np.bool_)
        found = np.empty(len(rows), np.int64)
        for i in np.flatnonzero(is_alone).tolist():
            at = rule.following(int(after[i]), self.one(int(rows[i]))[1])
            found[i] = NEVER if at is None else at
        others = np.flatnonzero(~is_alone)
        seconds, of = np.unique(after[others] // 1_000, return_inverse=True)
        times = [rule.following(second * 1_000, 0) for second in seconds.tolist()]
        found[others] = np.array([NEVER if at is None else at for at in times], np.int64)[of]
        return np.where(after < starts, _in_time(rule, starts), found)

    def _starts(self, rows: Int64Array) -> Int64Array:
        """Returns the times that messages name for their first occurrence, int64, (rows,), ms; -1: none is named."""
        index = pa.array(rows)
        at, after = self._at.take(index), self._after.take(index)
        times = _numbers(at)
        later = _numbers(after)
        starts = np.where((times < 0) & (later >= 0), self._published[rows] + later, times)
        # Texts such as +5 and -0.
        is_odd = (times < 0) & at.is_valid().to_numpy(zero_copy_only=False)
        is_odd |= (starts < 0) & after.is_valid().to_numpy(zero_copy_only=False)
        for i in np.flatnonzero(is_odd).tolist():
            starts[i] = self.one(int(rows[i]))[1]
        return starts


def _values(properties: pa.MapArray, names: Sequence[str]) -> dict[str, pa.Array]:
    """Returns, by property name, the property's value in each row, as strings; null: the row lacks it."""
    offsets = properties.offsets.to_numpy()
    keys = properties.keys.slice(offsets[0], offsets[-1] - offsets[0])
    items = properties.items.slice(offsets[0], offsets[-1] - offsets[0])
    encoded = keys.dictionary_encode()
    codes, known = encoded.indices.to_numpy(), encoded.dictionary.to_pylist()
    found: dict[str, pa.Array] = {}
    for name in names:
        if name not in known:
            found[name] = pa.nulls(len(properties), items.type)
            continue
        at = np.full(len(properties), -1, np.int64)
        places = np.flatnonzero(codes == known.index(name))
        at[np.searchsorted(offsets - offsets[0], places, side="right") - 1] = places  # the last one counts
        found[name] = items.take(pa.array(at, mask=at < 0))
    return found


def _groups(columns: Sequence[pa.Array]) -> tuple[Int64Array, Int64Array]:
    """Groups rows that have the same texts in all columns.

    Returns:
        the number of each row's group, int64, (rows,); and the index of each group's first row, int64, (groups,).
    """
    groups = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        if column.null_count < len(column):
            encoded = column.dictionary_encode("encode")
            if len(encoded.dictionary) > 1:
                _, groups = np.unique(
                    groups * len(encoded.dictionary) + encoded.indices.to_numpy(), return_inverse=True
                )
    _, firsts, groups = np.unique(groups, return_index=True, return_inverse=True)
    return groups, firsts


def _numbers(texts: pa.Array) -> Int64Array:
    """Reads texts as numbers, int64, (texts,); -1: the text is null, or has other characters than digits."""
    if texts.null_count == len(texts):
        return np.full(len(texts), -1, np.int64)
    is_plain = pc.fill_null(pc.match_substring_regex(texts, _PLAIN_NUMBER), False)
    numbers = pc.if_else(is_plain, texts, "-1").cast(pa.int64())
    return np.asarray(numbers)


def _in_time(rule: Recurrence, times: Int64Array) -> Int64Array:
    """Returns times, int64, (n,), with NEVER instead of those after the end of a rule."""
    return np.where(times > rule.last_millis, NEVER, times)


@lru_cache(maxsize=100_000)
def _start(of: TimeZones, properties: _Properties, published: int) -> int:
    return stored(dict(properties), published)[1]


class Occurrence(NamedTuple):
    """An occurrence of a recurring message. Times are ms since the epoch."""

    number: int  # from 1
    due: int
    at: int | None = None  # when it is due by the rule; None: at `due`
    was_due: int | None = None  # when a late one was due; None: not late


class PendingOccurrences:
    """The pending occurrences of n messages in columns, int64, (n,). Times are ms since the epoch.

    Attributes:
        numbers: from 1.
        times: when they are due; NEVER: there is none.
        by_rule: when they are due by the rule; NEVER: at `times`.
        was_due: when late ones were due; NEVER: not late.
    """

    def __init__(
        self,
        numbers: Int64Array,
        times: Int64Array,
        by_rule: Int64Array | None = None,
        was_due: Int64Array | None = None,
    ) -> None:
        self.numbers, self.times = numbers, times
        self.by_rule = np.full(len(numbers), NEVER, np.int64) if by_rule is None else by_rule
        self.was_due = np.full(len(numbers), NEVER, np.int64) if was_due is None else was_due

    def put(self, i: int, one: Occurrence | None) -> None:
        """Sets the occurrence of the i-th message; None: there is none."""
        if one is None:
            self.times[i] = NEVER
        else:
            self.numbers[i], self.times[i] = one.number, one.due
            self.by_rule[i] = NEVER if one.at is None else one.at
            self.was_due[i] = NEVER if one.was_due is None else one.was_due

    def take_rows(self, index: Int64Array) -> PendingOccurrences:
        """Returns the occurrences of some messages, by their indexes, int64, (m,)."""
        columns = (self.numbers, self.times, self.by_rule, self.was_due)
        return PendingOccurrences(*(column[index] for column in columns))
