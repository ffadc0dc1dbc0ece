"""One grammar of durations, wherever one is given."""

from __future__ import annotations

import pytest
import typer
from pydantic import TypeAdapter, ValidationError

from conf.setting_types import Duration
from conf.times import parse_duration
from jobs.parsers import parse_duration as parse_option
from tracker.due_time import BadScheduleError, duration

_SETTING = TypeAdapter(Duration)


@pytest.mark.parametrize(
    ("text", "millis"),
    [
        ("250ms", 250),
        ("90s", 90_000),
        ("1.5h", 5_400_000),
        ("0.1d", 8_640_000),
        ("1.0006s", 1_001),
        ("123456789012345678ms", 123_456_789_012_345_678),
    ],
)
def test_settings_options_and_properties_read_the_same_durations(text: str, millis: int) -> None:
    assert parse_duration(text) == _SETTING.validate_python(text) == parse_option(text) == millis
    if millis < 1e15:
        assert duration("retryAfter", text) == millis
    else:
        with pytest.raises(BadScheduleError):
            duration("retryAfter", text)


def test_an_option_names_its_unit() -> None:
    """Who writes 10 means seconds: a message would be sent at once."""
    assert parse_duration("5000") == _SETTING.validate_python("5000") == duration("retryAfter", "5000") == 5_000
    for text in ("10", "5000", " 0 "):
        given = text.strip()
        with pytest.raises(typer.BadParameter, match=f"^{given} what\\? {given}s, {given}m, .* or {given}ms$"):
            parse_option(text)


@pytest.mark.parametrize("text", ["", "s", "-1s", "+1s", "1.5", ".5s", "1.s", "1 s", "1w", "1e3s", "1h30m", "\u0661s"])
def test_and_refuse_the_same(text: str) -> None:
    for read, error in (
        (parse_duration, ValueError),
        (_SETTING.validate_python, ValidationError),
        (parse_option, typer.BadParameter),
        (lambda text: duration("retryAfter", text), BadScheduleError),
    ):
        with pytest.raises(error):
            read(text)


def test_a_property_is_above_0() -> None:
    assert parse_duration("0.0001s") == 0
    for text in ("0", "0s", "0.0001s"):
        with pytest.raises(BadScheduleError, match="above 0"):
            duration("retryAfter", text)
