"""Parsers of option values that several commands have: times, times, properties and recurrence."""

from __future__ import annotations

from enum import StrEnum

import typer

# A number below it is meant as seconds: as such it is a time before the year 5139.
_LEAST_MILLIS = 10**11


def parse_duration(text: str) -> int:
    """Returns a duration such as `10s`, `1.5h` or `250ms` in milliseconds.

    Raises:
        typer.BadParameter: the text is not a duration, or has no unit: it might be meant as seconds.
    """
    from conf import times

    given = text.strip()
    if given.isdecimal():
        raise typer.BadParameter(f"{given} what? {given}s, {given}m, {given}h, {given}d or {given}ms")
    try:
        return times.parse_duration(given)
    except ValueError:
        raise typer.BadParameter(f"{text!r} must be a duration, as 90s, 5m, 2h, 1d or 250ms") from None


def parse_shift(text: str) -> int:
    """Returns a duration as `parse_duration`, which may be negative, as `-30m`, and is not 0; in milliseconds.

    Raises:
        typer.BadParameter: the text is no such duration.
    """
    given = text.strip()
    millis = parse_duration(given.removeprefix("-"))
    if not millis:
        raise typer.BadParameter("it must not be 0")
    return -millis if given.startswith("-") else millis


def parse_time(text: str) -> int:
    """Returns a time as ms since the epoch; the text is that number, or ISO 8601 with a zone.

    Raises:
        typer.BadParameter: the text is neither.
    """
    from conf import times

    try:
        return times.parse_time(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def parse_due_time(text: str) -> int:
    """Returns a time as `parse_time`, at which something is to be delivered.

    Raises:
        typer.BadParameter: the text is none, or a number that is a time of 1970 to 1973 only as milliseconds.
    """
    due = parse_time(text)
    if text.strip().isdecimal() and 0 < due < _LEAST_MILLIS:
        raise typer.BadParameter(f"{text!r} is a time in the early seventies: give milliseconds since the epoch")
    return due


def parse_property(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise typer.BadParameter(f"{text!r} is no property: give key=value")
    return key, value


def parse_properties(texts: list[str] | None) -> dict[str, str]:
    """Returns the properties of an option that may be repeated.

    Raises:
        typer.BadParameter: one is none, or a name comes twice.
    """
    pairs = [parse_property(text) for text in texts or ()]
    properties = dict(pairs)
    if len(properties) < len(pairs):
        names = [key for key, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise typer.BadParameter(f"the property {twice} is given twice")
    return properties


class Misfire(StrEnum):
    """What happens to missed occurrences, as `tracker.recurrence.recurrence.Misfire`."""

    ONCE = "once"
    ALL = "all"
    SKIP = "skip"


def recurrence_properties(
    repeat: str | None, time_zone: str | None, until: int | None, times: int | None, misfire: Misfire | None
) -> dict[str, str]:
    """Returns the properties of a message that recurs as the options say; empty without options.

    Raises:
        typer.BadParameter: the options are wrong, or incomplete.
    """
    from tracker.recurrence.recurrence import RecurrenceError, recurrence_of

    given = {"timeZone": time_zone, "repeatUntil": until, "repeatTimes": times, "misfire": misfire}
    properties = {name: str(value) for name, value in given.items() if value is not None}
    if repeat is None:
        if properties:
            raise typer.BadParameter("--time-zone, --repeat-until, --repeat-times and --misfire go with --repeat")
        return {}
    properties["repeat"] = repeat
    try:
        recurrence_of(properties).check()
    except RecurrenceError as error:
        raise typer.BadParameter(str(error)) from None
    return properties
