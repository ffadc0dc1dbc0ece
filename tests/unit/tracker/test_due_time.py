"""When a message is due."""

from __future__ import annotations

import pytest

from tracker.due_time import MAX_TIME_MILLIS, BadScheduleError, deliver_at, expires_at
from tracker.scheduling import scheduling


def test_times_are_read() -> None:
    assert deliver_at({"deliverAt": "1234"}, 5, 9) == 1234
    assert deliver_at({"deliverAfter": "1000"}, 5, 9) == 1005
    assert deliver_at({"deliverAt": "7", "deliverAfter": "1000"}, 5, 9) == 7
    assert deliver_at({"deliverAt": "0"}, 5, 9) == 0


@pytest.mark.parametrize("text", ["", "soon", "-1", "1.5", "1e12", " 1", "١٢", "9" * 25, str(2**62), "0x10", "NaN"])
def test_what_is_no_time_is_refused_in_one_line(text: str) -> None:
    for name in ("deliverAt", "deliverAfter"):
        with pytest.raises(BadScheduleError) as error:
            deliver_at({name: text}, 5, 9)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("properties", "reason"),
    [
        ({"deliverAt": "soon"}, "deliverAt is no whole number of milliseconds: 'soon'"),
        ({"deliverAfter": ""}, "deliverAfter is no whole number of milliseconds: ''"),
        ({"deliverAt": "x" * 99}, f"deliverAt is no whole number of milliseconds: '{'x' * 40}'"),
        ({"deliverAfter": "-1"}, "deliverAfter is negative: -1"),
        ({"deliverAt": str(MAX_TIME_MILLIS + 1)}, f"deliverAt {MAX_TIME_MILLIS + 1} is beyond the year 9999"),
        ({"deliverAfter": str(MAX_TIME_MILLIS)}, f"deliverAt {MAX_TIME_MILLIS + 5} is beyond the year 9999"),
        ({"deliverAt": "-1", "deliverAfter": "1"}, "deliverAt is negative: -1"),
    ],
)
def test_the_reason_says_what_is_wrong(properties: dict[str, str], reason: str) -> None:
    with pytest.raises(BadScheduleError) as error:
        deliver_at(properties, 5, 9)
    assert str(error.value) == reason


def test_signs_zeros_and_the_last_moment_are_taken() -> None:
    assert deliver_at({"deliverAt": "+12"}, 5, 9) == 12
    assert deliver_at({"deliverAfter": "-0"}, 5, 9) == 5
    assert deliver_at({"deliverAt": "0" * 10 + "12"}, 5, 9) == 12
    assert deliver_at({"deliverAt": str(MAX_TIME_MILLIS)}, 5, 9) == MAX_TIME_MILLIS
    assert deliver_at({"deliverAt": "7", "deliverAfter": "soon"}, 5, 9) == 7


def test_a_message_without_a_time_is_due_at_once_whatever_its_producers_clock() -> None:
    now = 1_000_000
    assert deliver_at({"other": "1"}, now - 5, now) == now - 5
    assert deliver_at({}, now + 3_600_000, now) == now
    assert deliver_at({"deliverAfter": "10"}, now + 3_600_000, now) == now + 3_600_010


def test_a_publish_time_beyond_the_last_moment_is_refused() -> None:
    for properties in ({}, {"deliverAt": "7"}, {"deliverAfter": "1"}):
        with pytest.raises(BadScheduleError, match=f"the publish time {MAX_TIME_MILLIS + 1} is beyond the year 9999"):
            deliver_at(properties, MAX_TIME_MILLIS + 1, 9)


def test_a_delay_beyond_the_longest_is_refused() -> None:
    assert deliver_at({"deliverAt": "1100"}, 100, 104, 1000) == 1100
    assert deliver_at({"deliverAfter": "1000"}, 100, 104, 1000) == 1100
    with pytest.raises(BadScheduleError, match="Exceeds max allowed delivery delay of 1000 milliseconds"):
        deliver_at({"deliverAt": "1101"}, 100, 104, 1000)


def test_the_earlier_end_counts() -> None:
    assert expires_at({}, 1_000) is None
    assert expires_at({"expireAfter": "5s"}, 1_000) == 6_000
    assert expires_at({"expireAt": "4000", "deliverAt": "1000"}, 1_000) == 4_000
    assert expires_at({"expireAt": "4000", "expireAfter": "1s"}, 1_000) == 2_000
    assert expires_at({"expireAt": "4000", "expireAfter": "1h"}, 1_000) == 4_000
    assert expires_at({"expireAfter": "366d"}, MAX_TIME_MILLIS - 1) == MAX_TIME_MILLIS


def test_an_end_that_is_none_or_before_the_messages_own_time_is_refused_with_the_propertys_name() -> None:
    own = {"deliverAt": "1000"}
    for wrong in ({"expireAt": "x"}, {"expireAt": "-1"}, {"expireAt": str(MAX_TIME_MILLIS + 1)}, {"expireAt": "1000"}):
        with pytest.raises(BadScheduleError, match=r"^expireAt "):
            expires_at(own | wrong, 1_000)
    for after in ("", "0", "-5s", "soon", "0.0001ms"):
        with pytest.raises(BadScheduleError, match=r"^expireAfter "):
            expires_at(own | {"expireAfter": after}, 1_000)
    assert expires_at({"expireAt": "500"}, 1_000) == 500, "it has no time of its own, and came late"


def test_what_a_messages_properties_say_of_its_end() -> None:
    def end(**properties: str) -> tuple[int | None, str | None]:
        found = scheduling(properties, 1_000, 1_000)
        return found.expires_at, found.reason

    assert end(deliverAfter="2000", expireAfter="1s") == (4_000, None)
    assert end(repeat="@every 1h", expireAfter="1s") == (None, None), "each occurrence has one of its own"
    assert end(repeat="@every 1h", expireAt="9000000")[1] == (
        "expireAt does not go with repeat: expireAfter is for each occurrence"
    )
    assert end(repeat="@every 1h", expireAfter="x")[1] is not None
    back = {"retryOf": "1:0:-1:-1", "retrySubscription": "a", "expireAfter": "1s"}
    assert end(**back) == (2_000, None)
    assert end(**back, **{"delaylake.expiresAt": "1500"}) == (1_500, None), "as it was before"
    assert end(**back, **{"delaylake.expiresAt": "no"}) == (2_000, None)
    assert end(**back, redriveRequest="r") == (None, None), "somebody wants it"
