"""How a recurring message recurs: its rule, its time zone and its end."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from typing import Protocol
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from conf.errors import one_line
from conf.time_zones import TimeZones, packaged, time_zone, used
from tracker.due_time import MAX_TIME_MILLIS, BadScheduleError, duration
from tracker.recurrence.rrule import CalendarRule, Parts, parse, shortest_in_day, shortest_of

# Read now: a file that can't be read later would reject the message that needs its time zone, or end its schedule.
packaged()


class RecurrenceError(BadScheduleError):
    """A property of a recurring message can't be read. The error's message begins with the property's name.

    Attributes:
        reason: the error's message without the name.
    """

    def __init__(self, property_name: str, reason: str) -> None:
        super().__init__(f"{property_name} {reason}")
        self.property_name = property_name
        self.reason = reason


REPEAT = "repeat"

TIME_ZONE = "timeZone"

REPEAT_UNTIL = "repeatUntil"

REPEAT_TIMES = "repeatTimes"

MISFIRE = "misfire"

MAX_REPEAT_BYTES = 512

SHORTEST_MILLIS = 1_000

_EVERY = "@every "

_ZONE_BEFORE = ("CRON_TZ=", "TZ=")  # as some crons have it

_UTC_NAMES = ("UTC", "Etc/UTC")

_MAX_CACHED = 2 * MAX_REPEAT_BYTES  # characters: longer properties are refused, and not remembered

_PROBE_FROM = 54 * 365 * 86_400  # a time in 2023: a rule without an occurrence after it is refused


class Misfire(StrEnum):
    """The misfire policy: how many occurrences are delivered whose time passed while they could not be dispatched."""

    ONCE = "once"  # one for all of them
    ALL = "all"  # each of them
    SKIP = "skip"  # none


class Recurrence:
    """The rule by which a message recurs. Immutable. Occurrences are numbered from 1, and all at different times.

        rule = Recurrence("0 9 * * MON-FRI", "Europe/Berlin")
        start = rule.first(published_millis, None)
        number, at = rule.next_occurrence(1, start, start, now_millis)

    Times are ms since the epoch. Each method takes bounded time, 5 ms at the most, usually 10 to 50 µs.

    Attributes:
        repeat: the property `repeat`.
        time_zone: the property `timeZone`.
        until_millis: no occurrence is later than this; None: no such end. An RRULE's UNTIL counts, too.
        times: the number of the last occurrence; None: no such end. An RRULE's COUNT counts, too.
        misfire: the policy for missed occurrences.
        why_unreadable: why the rule can't be read, so that it has no occurrence; None: it can.
    """

    def __init__(
        self,
        repeat: str,
        time_zone: str = "UTC",
        until_millis: int | None = None,
        times: int | None = None,
        misfire: str = Misfire.ONCE,
    ) -> None:
        """Reads how a message recurs.

        Args:
            repeat: a cron expression of five or six fields, `@every` and a duration, or an RFC 5545 RRULE.
            time_zone: IANA name of the zone whose wall clock a cron expression or RRULE means.
            until_millis: no occurrence is later, ms since the epoch; None: no such end.
            times: how many occurrences there are; None: no such end.
            misfire: the policy for missed occurrences, a value of `Misfire`.

        Raises:
            RecurrenceError: one of them can't be read, or the rule is of more often than once a second.
        """
        if not repeat or len(repeat.encode("utf-8", "surrogatepass")) > MAX_REPEAT_BYTES:
            raise RecurrenceError(REPEAT, f"is empty or has more than {MAX_REPEAT_BYTES} bytes")
        if misfire not in list(Misfire):
            raise RecurrenceError(MISFIRE, f"is none of {', '.join(Misfire)}: {misfire[:40]!r}")
        if times is not None and times < 1:
            raise RecurrenceError(REPEAT_TIMES, f"is less than 1: {times}")
        if until_millis is not None and not 0 <= until_millis <= MAX_TIME_MILLIS:
            raise RecurrenceError(REPEAT_UNTIL, f"is no time up to the year 9999: {until_millis}")
        self.repeat, self.time_zone, self.misfire = repeat, time_zone, Misfire(misfire)
        self.until_millis, self.times = until_millis, times
        self.why_unreadable: str | None = None
        self._zone = _zone(time_zone)
        self._every: int | None = None
        self._cron: CronRule | None = None
        self._parts: Parts | None = None
        self._read()

    @classmethod
    def of_properties(cls, properties: Mapping[str, str]) -> Recurrence | None:
        """Reads how a message recurs from its properties, and caches the result; None: it does not recur.

        Raises:
            RecurrenceError: a property can't be read, or the rule is of more often than once a second.
        """
        repeat = properties.get(REPEAT)
        if repeat is None:
            return None
        given = (
            repeat,
            properties.get(TIME_ZONE, "UTC"),
            _number(REPEAT_UNTIL, properties.get(REPEAT_UNTIL)),
            _number(REPEAT_TIMES, properties.get(REPEAT_TIMES)),
            properties.get(MISFIRE, Misfire.ONCE),
        )
        if sum(len(text) for text in (given[0], given[1], given[4])) > _MAX_CACHED:
            return Recurrence(*given)
        found = _parsed(used(), *given)
        if isinstance(found, RecurrenceError):
            raise RecurrenceError(found.property_name, found.reason)
        return found

    def check(self, shortest_millis: int = SHORTEST_MILLIS) -> None:
        """Checks that a new message may have the rule. A rule that is in use already is not asked again.

        Args:
            shortest_millis: the shortest time between two occurrences that is accepted, ms.

        Raises:
            RecurrenceError: the rule never recurs, or more often.
        """
        why = _why_refused(self, shortest_millis)
        if why is not None:
            raise RecurrenceError(REPEAT, why)

    @classmethod
    def unreadable(cls, properties: Mapping[str, str], why: str) -> Recurrence:
        """Returns a rule without any occurrence, instead of one that can't be read.

        Args:
            properties: the message's.
            why: it can't be read.
        """
        rule = cls(f"{_EVERY}1d")
        rule._every = None
        rule.repeat, rule.time_zone = properties.get(REPEAT, ""), properties.get(TIME_ZONE, "UTC")
        rule.why_unreadable = why
        return rule

    @property
    def every_millis(self) -> int | None:
        """The interval of an `@every` rule, ms; None: the rule is of another kind."""
        return self._every

    @property
    def never_occurs(self) -> bool:
        """Whether a cron expression or RRULE has no time at all, whatever its first occurrence."""
        if self._every is not None:
            return False
        probe = self._cron or CalendarRule(self._rrule()._replace(interval=1), _PROBE_FROM)
        return next_instant(probe, None, _PROBE_FROM) is None

    @property
    def shortest_millis(self) -> int:
        """A time that no two occurrences by the rule are nearer to each other, ms; by a clock that is not changed."""
        if self._every is not None:
            return self._every
        return 1_000 * (self._cron.shortest if self._cron is not None else shortest_of(self._rrule()))

    @property
    def is_cron(self) -> bool:
        """Whether the rule is a cron expression, whose times do not depend on the first occurrence."""
        return self._cron is not None

    @property
    def last_millis(self) -> int:
        """No occurrence is later than this, ms since the epoch."""
        return MAX_TIME_MILLIS if self.until_millis is None else self.until_millis

    def first(self, published_millis: int, deliver_at: int | None) -> int | None:
        """Returns when the first occurrence is, ms since the epoch; None: it would be after the schedule's end.

        Args:
            published_millis: when the message was published, ms since the epoch.
            deliver_at: the time that the message names for it, ms since the epoch; None: the rule's first time after
                the publish time.
        """
        if deliver_at is not None:
            return self._in_time(deliver_at)
        start = published_millis // 1_000 * 1_000 if self._every is None else published_millis
        return self._in_time(self._next(published_millis, start))

    def following(self, after_millis: int, start_millis: int) -> int | None:
        """Returns when the next occurrence after a time is, ms since the epoch; None: the schedule ends before.

        It raises nothing: a rule that fails has no further occurrence (see `why_failed`).

        Args:
            after_millis: the result is later than this, ms since the epoch.
            start_millis: the first occurrence, ms since the epoch: the origin of `@every`, and DTSTART of an RRULE.
        """
        try:
            return self._following(after_millis, start_millis)
        except MemoryError:
            raise
        except Exception:
            return None

    def why_failed(self, after_millis: int, start_millis: int) -> str | None:
        """Returns why the rule fails where `following` returns None, one line; None: it does not fail.

        Arguments are those of `following`.
        """
        if self.why_unreadable is not None:
            return f"can't be read any more: {self.why_unreadable}"
        try:
            self._following(after_millis, start_millis)
        except MemoryError:
            raise
        except Exception as error:
            return f"fails with {type(error).__name__} ({one_line(error)[:200]}): {self.repeat[:80]!r}"
        return None

    def _following(self, after_millis: int, start_millis: int) -> int | None:
        if after_millis < start_millis:
            return self._in_time(start_millis)
        return self._in_time(self._next(after_millis, start_millis))

    def next_occurrence(
        self, number: int, at_millis: int, start_millis: int, now_millis: int
    ) -> tuple[int, int] | None:
        """Returns the occurrence that follows one that is dispatched; None: there is none.

        With the policy `all` it is the next one by the rule, however late. With other policies it is the first one
        after `now_millis`; missed ones in between have no numbers.

        Args:
            number: of the occurrence that is dispatched.
            at_millis: when this was due by the rule, ms since the epoch.
            start_millis: when the first occurrence was due, ms since the epoch.
            now_millis: occurrences due up to this time, ms since the epoch, are missed.

        Returns:
            number of the following occurrence, and its time, ms since the epoch.
        """
        if self.times is not None and number >= self.times:
            return None
        at = self.following(at_millis if self.misfire is Misfire.ALL else max(at_millis, now_millis), start_millis)
        return None if at is None else (number + 1, at)

    def _next(self, after: int, start: int) -> int | None:
        """Returns the same as `following`, but ignores the schedule's end."""
        if self._every is not None:
            return start + max(0, (after - start) // self._every + 1) * self._every
        # An RRULE's occurrences have the ms of its DTSTART.
        rest = 0 if self._parts is None else start % 1_000
        found = next_instant(self._rule(start // 1_000), self._zone, (after - rest) // 1_000)
        return None if found is None else found * 1_000 + rest

    def _rule(self, start: int) -> Rule:
        if self._cron is not None:
            return self._cron
        return _anchored(self._rrule(), wall_time(self._zone, start))

    def _rrule(self) -> Parts:
        if self._parts is None:
            raise RecurrenceError(REPEAT, f"is no RRULE: {self.repeat[:40]!r}")
        return self._parts

    def _in_time(self, at: int | None) -> int | None:
        return None if at is None or at > self.last_millis else at

    def _read(self) -> None:
        if self.repeat.startswith(_EVERY):
            try:
                self._every = duration(REPEAT, self.repeat.removeprefix(_EVERY).strip())
            except BadScheduleError as error:
                raise RecurrenceError(REPEAT, str(error).removeprefix(REPEAT + " ")) from error
            if self._every < SHORTEST_MILLIS:
                raise RecurrenceError(REPEAT, f"is more often than once a second: {self.repeat[:40]!r}")
            return
        if self.repeat.upper().startswith(_ZONE_BEFORE):
            raise RecurrenceError(
                REPEAT, f"has its time zone before it, which belongs in {TIME_ZONE}: {self.repeat[:80]!r}"
            )
        try:
            if "=" in self.repeat:
                self._read_rrule(parse(self.repeat))
            else:
                self._cron = CronRule(self.repeat)
        except ValueError as error:
            kind = "RRULE" if "=" in self.repeat else "cron expression"
            raise RecurrenceError(REPEAT, f"is no {kind} that can be read, it {error}: {self.repeat[:80]!r}") from error

    def _read_rrule(self, parts: Parts) -> None:
        self._parts = parts._replace(times=None, until=None)
        if parts.times is not None:
            self.times = min(parts.times, self.times or parts.times)
        if parts.until is not None:
            zone = parts.until.tzinfo or self._zone or UTC
            until = int(parts.until.replace(tzinfo=zone).timestamp()) * 1_000 + 999
            self.until_millis = min(until, until if self.until_millis is None else self.until_millis)


def recurrence_of(properties: Mapping[str, str]) -> Recurrence:
    """Reads how a recurring message recurs.

    Args:
        properties: the message's.

    Raises:
        RecurrenceError: a property can't be read, or `repeat` is missing.
    """
    rule = Recurrence.of_properties(properties)
    if rule is None:
        raise RecurrenceError(REPEAT, "is missing")
    return rule


@lru_cache(maxsize=4_096)
def _parsed(
    of: TimeZones, repeat: str, time_zone: str, until: int | None, times: int | None, misfire: str
) -> Recurrence | RecurrenceError:
    """Returns what is read; what can't be read is remembered, too: many messages may have it."""
    try:
        return Recurrence(repeat, time_zone, until, times, misfire)
    except RecurrenceError as error:
        return RecurrenceError(error.property_name, error.reason)


@lru_cache(maxsize=4_096)
def _why_refused(rule: Recurrence, shortest_millis: int) -> str | None:
    """Returns why no new message may have a rule; None: it may."""
    if rule.never_occurs:
        return f"never occurs: {rule.repeat[:80]!r}"
    if rule.shortest_millis < shortest_millis:
        return f"is more often than once in {shortest_millis} ms, the shortest accepted: {rule.repeat[:80]!r}"
    return None


@lru_cache(maxsize=4_096)
def _anchored(parts: Parts, start: int) -> CalendarRule:
    return CalendarRule(parts, start)


def _zone(name: str) -> ZoneInfo | None:
    if name in _UTC_NAMES:
        return None
    try:
        return time_zone(name)
    except KeyError:
        raise RecurrenceError(TIME_ZONE, f"is no IANA time zone, as Europe/Berlin: {name[:40]!r}") from None


def _number(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise RecurrenceError(name, f"is no whole number: {text[:40]!r}")
    return int(text)


_WEEK = 7 * 86_400  # no time zone changes its offset there and back within a week

_NEAR = 2 * 86_400  # a change of a clock is less than this


class Rule(Protocol):
    """A rule that says which wall times recur.

    A wall time is an int: the seconds between 1970-01-01T00:00:00 and the time that a wall clock shows, as if each day
    had 24 hours.
    """

    # Whether it recurs in both passes of an hour that the clock shows twice: unless it is of certain times of the day.
    every_pass: bool

    def after(self, wall: int) -> int | None:
        """Returns the first wall time of the rule after another; None: there is none within 50 years, at least."""


def next_instant(rule: Rule, zone: ZoneInfo | None, after: int) -> int | None:
    """Returns when a rule next recurs: seconds since the epoch; None: there is none.

    When the clock is put forward, a rule of certain times of the day recurs at the end of the gap instead of within it;
    any other rule ignores the gap. When the clock is put back, a rule of certain times of the day recurs only in the
    first of the two passes, any other rule in both.

    Args:
        rule: on the wall clock.
        zone: the wall clock's time zone; None: UTC.
        after: the result is later than this, seconds since the epoch.
    """
    try:
        if zone is None:
            return rule.after(after)
        return _every_pass(rule, zone, after) if rule.every_pass else _first_pass(rule, zone, after)
    except (OverflowError, ValueError):  # beyond the year 9999
        return None


def wall_time(zone: ZoneInfo | None, instant: int) -> int:
    """Returns the wall time of a zone (None: UTC) at an instant, seconds since the epoch."""
    return instant if zone is None else instant + _offset(zone, instant)


def _every_pass(rule: Rule, zone: ZoneInfo, after: int) -> int | None:
    offset = _offset(zone, after)
    shown = after + offset
    while True:
        wall = rule.after(shown)
        instant = None if wall is None else wall - offset
        near = after + _NEAR
        change = _first_change(zone, after, near if instant is None else min(instant, near))
        if change is not None:
            # From the change on the clock shows other times: search again from the second before it.
            after, offset = change, _offset(zone, change)
            shown = after + offset - 1
        elif instant is None or instant <= near:
            return instant
        else:
            # The rule has no time until then, whatever the clock shows: the changes in between do not matter.
            after = max(near, instant - _NEAR)
            offset = _offset(zone, after)
            shown = after + offset


def _first_pass(rule: Rule, zone: ZoneInfo, after: int) -> int | None:
    offset = _offset(zone, after)
    shown = after + offset
    first = _instant(zone, shown)
    if first < after:  # in the second pass: all times that it shows were in the first pass
        change = _change(zone, first, after)
        shown = max(shown, change - 1 + _offset(zone, first))
    wall = rule.after(shown)
    return None if wall is None else _instant(zone, wall)


def _instant(zone: ZoneInfo, wall: int) -> int:
    """Returns the first instant at which the clock shows `wall`; if `wall` is in a gap, the end of the gap."""
    shown = _datetime(wall)
    before = _seconds(zone.utcoffset(shown))
    after = _seconds(zone.utcoffset(shown.replace(fold=1)))
    if before >= after:  # the clock shows it once, or twice: the earlier instant
        return wall - before
    return _change(zone, wall - after - 1, wall - before)


def _change(zone: ZoneInfo, low: int, high: int) -> int:
    """Returns the same as `_first_change`, for a zone whose offset at `high` differs from that at `low`."""
    change = _first_change(zone, low, high)
    if change is None:
        raise LookupError(f"{zone} keeps its offset between {low} and {high}")
    return change


def _first_change(zone: ZoneInfo, low: int, high: int) -> int | None:
    """Returns the first instant after `low`, up to `high`, with another offset than `low`; None: it stays."""
    offset = _offset(zone, low)
    while low < high:
        end = min(low + _WEEK, high)
        if _offset(zone, end) != offset:
            while end - low > 1:
                middle = (low + end) // 2
                if _offset(zone, middle) == offset:
                    low = middle
                else:
                    end = middle
            return end
        low = end
    return None


def _offset(zone: ZoneInfo, instant: int) -> int:
    return _seconds(datetime.fromtimestamp(instant, zone).utcoffset())


_EPOCH = datetime(1970, 1, 1)


def _datetime(wall: int) -> datetime:
    return _EPOCH + timedelta(seconds=wall)


def _seconds(offset: timedelta | None) -> int:
    if offset is None:
        raise LookupError("a time zone without an offset from UTC")
    return offset.days * 86_400 + offset.seconds


_SECOND = timedelta(seconds=1)


class CronRule:
    """The wall times of a cron expression, as Debian's cron reads it: a `tracker.recurrence.recurrence.Rule`.

    Args:
        expression: five fields, or six of which the first are seconds.

    Raises:
        ValueError: it can't be read; its message goes on after "it".
    """

    def __init__(self, expression: str) -> None:
        fields = expression.split()
        if len(fields) not in (5, 6):
            raise ValueError(f"has {len(fields)} fields: a cron expression has five, or six with seconds")
        try:
            # Without a time zone: `tracker.recurrence.recurrence` handles its changes.
            self._sim = CronSim(expression, _EPOCH)
        except CronSimError as error:
            message = str(error)
            raise ValueError(f"has a {message[:1].lower()}{message[1:]}") from error
        self.every_pass = any(field.startswith("*") for field in fields[-5:-3])

    @property
    def shortest(self) -> int:
        """The shortest time between two of its times, in seconds, on a day or on two that follow each other."""
        seconds = self._sim.seconds or {0}
        return shortest_in_day(self._sim.hours, self._sim.minutes, seconds)

    def after(self, wall: int) -> int | None:
        """Returns the first wall time of the rule after another; None: there is none within 50 years."""
        sim = copy(self._sim)
        sim.dt = _EPOCH + timedelta(seconds=wall)
        found = next(sim, None)
        return None if found is None else (found - _EPOCH) // _SECOND
