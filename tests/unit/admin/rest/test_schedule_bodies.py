"""What a call that schedules a message says, and what of it is refused."""

from __future__ import annotations

import base64
import math
from typing import Any

import pytest

from admin.control.scheduling import NewMessage
from admin.rest.schedule_bodies import UnscheduledError, new_message
from conf.settings import Settings

SOURCE = "persistent://public/default/orders"
NOW = 1_700_000_000_000


def read(content: object, key: str = "") -> NewMessage:
    settings = Settings.model_validate(
        {
            "pulsar": {"max_message_size_bytes": 70_000},
            "tracker": {"max_delay_millis": 1_000_000, "min_repeat_millis": 60_000},
            "routes": [{"source": SOURCE, "subscriptions": [{"name": "a"}]}],
        }
    )
    return new_message(content, settings, SOURCE, NOW, key)


def refusal(content: object, key: str = "") -> tuple[int, str]:
    with pytest.raises(UnscheduledError) as refused:
        read(content, key)
    assert "\n" not in str(refused.value)
    return refused.value.code, str(refused.value)


@pytest.mark.parametrize(
    ("payload", "sent"),
    [
        ("ü", "ü"),
        ("", ""),
        ({"b": 1, "a": ["ü", None, 1.5]}, '{"b":1,"a":["ü",null,1.5]}'),
        (7, "7"),
        (False, "false"),
        ([], "[]"),
        (2**70, str(2**70)),
    ],
)
def test_a_payload_is_text_or_json(payload: Any, sent: str) -> None:
    assert read({"payload": payload}).payload == sent.encode()


def test_a_payload_may_be_any_bytes() -> None:
    assert read({"payloadBase64": base64.b64encode(bytes(range(256))).decode()}).payload == bytes(range(256))
    assert read({"payloadBase64": ""}).payload == b""


def test_all_fields_become_what_a_producer_would_send() -> None:
    content = {
        "payload": "x",
        "key": "k",
        "orderingKey": "o",
        "properties": {"region": "eu"},
        "eventTime": NOW - 1,
        "schema": "JSON",
        "deliverAt": str(NOW + 1_000),
        "scheduleKey": "s",
        "scheduleMode": "debounce",
        "debounceMax": "5m",
        "repeat": "@every 90s",
        "timeZone": "Europe/Berlin",
        "repeatUntil": NOW + 500_000,
        "repeatTimes": 3,
        "misfire": "all",
    }
    assert read(content, "mine") == NewMessage(
        b"x",
        "k",
        "o",
        {
            "region": "eu",
            "deliverAt": str(NOW + 1_000),
            "scheduleKey": "s",
            "scheduleMode": "debounce",
            "debounceMax": "300000",
            "repeat": "@every 90s",
            "timeZone": "Europe/Berlin",
            "repeatUntil": str(NOW + 500_000),
            "repeatTimes": "3",
            "misfire": "all",
            "requestId": "mine",
        },
        NOW - 1,
        NOW + 1_000,
        "mine",
        "JSON",
    )


def test_the_answer_has_the_time_and_a_repeated_call_is_the_same_message() -> None:
    assert read({"payload": ""}).deliver_at == NOW
    once = read({"payload": "", "deliverAfter": "90s"})
    assert (once.deliver_at, once.properties) == (NOW + 90_000, {"deliverAt": str(NOW + 90_000)})
    keyed = read({"payload": "", "deliverAfter": "90s"}, "mine")
    assert keyed.properties == {"deliverAfter": "90000", "requestId": "mine"}
    by_rule = read({"payload": "", "repeat": "@every 90s"})
    assert by_rule.deliver_at == NOW + 90_000
    for given in ({"requestId": "own"}, {"properties": {"requestId": "own"}}):
        found = read({"payload": "", "deliverAfter": 5_000, **given})
        assert (found.properties, found.request_id) == ({"deliverAfter": "5000", "requestId": "own"}, "own")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (1, "a message is a JSON object"),
        ({}, "one of payload and payloadBase64"),
        ({"payload": None}, "one of payload and payloadBase64"),
        ({"payload": "", "payloadBase64": ""}, "one of payload and payloadBase64"),
        ({"payload": "\ud800"}, "half a surrogate pair"),
        ({"payload": {"a": math.inf}}, "the payload has a number that JSON has not"),
        ({"payload": "", "requestId": "order-7~0123456789ab"}, "those of the header"),
        ({"payload": "", "properties": {"requestId": "order-7~0123456789ab.3"}}, "those of the header"),
        ({"payload": "", "key": "\ud800"}, "surrogate"),
        ({"payloadBase64": "%"}, "payloadBase64 is no base64"),
        ({"payload": "", "deliverat": 1}, "a message has no field 'deliverat'"),
        ({"payload": "", "deliverAt": -1}, "deliverAt: "),
        ({"payload": "", "deliverAt": True}, "deliverAt: "),
        ({"payload": "", "deliverAt": 1.5}, "deliverAt: "),
        ({"payload": "", "deliverAt": "soon"}, "deliverAt: "),
        ({"payload": "", "deliverAt": 1, "deliverAfter": 1}, "one of deliverAt and deliverAfter"),
        ({"payload": "", "deliverAfter": "5x"}, "deliverAfter: must be a duration, as 90s"),
        ({"payload": "", "deliverAfter": "1h"}, "1000000"),
        ({"payload": "", "repeat": "nope"}, "repeat is no cron expression"),
        ({"payload": "", "repeat": "@every 5s"}, "repeat"),
        ({"payload": "", "repeat": "@every 90s", "timeZone": "Nowhere"}, "timeZone"),
        ({"payload": "", "repeat": "@every 90s", "repeatUntil": NOW}, "repeatUntil"),
        ({"payload": "", "misfire": "all"}, "misfire goes with repeat"),
        ({"payload": "", "scheduleMode": "keep"}, "scheduleMode and debounceMax go with scheduleKey"),
        ({"payload": "", "scheduleKey": "s" * 513}, "scheduleKey has more than 512 bytes"),
        ({"payload": "", "scheduleKey": "s", "scheduleMode": "no"}, "scheduleMode: "),
        ({"payload": "", "properties": {"a": 1}}, "properties.a: "),
        ({"payload": "", "properties": {"deliverAt": "1"}}, "deliverAt is a field of its own"),
        ({"payload": "", "properties": {"retryOf": "1:2:-1:-1"}}, "retryOf is a field of its own, or of retries"),
        ({"payload": "", "properties": {"delaylake.attempt": "1"}}, "'delaylake.attempt' is the job's own"),
        ({"payload": "", "requestId": "r" * 257}, "requestId is empty or has more than 256 bytes"),
        ({"payload": "", "eventTime": "yesterday"}, "eventTime: "),
        ({"payload": "", "schema": "KEY_VALUE"}, "schema: must be one of STRING, JSON"),
    ],
)
def test_what_is_wrong_is_named(wrong: object, why: str) -> None:
    code, reason = refusal(wrong)
    assert code == 422
    assert why in reason


def test_a_call_has_one_request_id() -> None:
    assert refusal({"payload": "", "requestId": "r"}, "mine")[0] == 422
    assert refusal({"payload": "", "properties": {"requestId": "r"}}, "mine")[0] == 422


def test_a_message_that_could_not_be_delivered_is_too_large() -> None:
    assert len(read({"payload": "x" * 67_000}).payload) == 67_000
    code, reason = refusal({"payload": "x" * 68_000})
    assert (code, "the message has 68,000 bytes" in reason) == (413, True)
