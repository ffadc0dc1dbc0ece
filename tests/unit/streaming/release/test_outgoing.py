"""A message as it goes to a destination."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from conf.settings import Route, Settings
from streaming.release.attempt import Assignment, Attempt
from streaming.release.naming import producer_name
from streaming.release.outgoing import MAX_REJECTED_BYTES, UnsendableError, delivered, rejected, why_unsendable
from streaming.release.task.planning.plan_release import plan_release
from tests.support.servers.fake_destinations import seen
from tests.support.service.plans import sends_of
from tests.support.tracker.messages import TOPIC, messages, release_rows
from tracker.messages import MESSAGES
from tracker.packing import pack

MOST = 5_000_000
OWN = {"delaylake.source": TOPIC, "delaylake.messageId": "7:3:-1:-1"}


def columns(**values: Any) -> dict[str, list[Any]]:
    rows = messages([(7, 3, 5_000)], **values)
    return {name: rows[name].to_pylist() for name in rows.column_names}


def test_a_message_goes_as_it_came() -> None:
    given = columns(
        key="kü",
        ordering_key="o",
        event_time=9,
        properties=[("deliverAt", "5000"), ("", "x"), ("empty", ""), ("ü", "é")],
        payload=bytes(range(256)),
    )
    properties, message = seen(delivered(given, 0, 5_000, 17))
    assert message.payload == bytes(range(256))
    assert (message.key, message.is_key_base64) == ("kü".encode(), False)
    assert (message.ordering_key, message.event_time) == (b"o", 9)
    theirs = {"deliverAt": "5000", "": "x", "empty": "", "ü": "é"}
    assert properties == {**theirs, **OWN, "delaylake.deliverAt": "5000"}


@pytest.mark.parametrize("payload", [None, b""])
def test_no_payload_is_not_an_empty_one(payload: bytes | None) -> None:
    assert seen(delivered(columns(payload=payload), 0, 5_000, 1)).message.payload == payload


@pytest.mark.parametrize("key", [None, ""])
def test_no_key_is_not_an_empty_one(key: str | None) -> None:
    message = seen(delivered(columns(key=key, ordering_key=key), 0, 5_000, 1)).message
    assert message.key == message.ordering_key == (None if key is None else b"")


def test_an_ordering_key_of_bytes_goes_as_it_came() -> None:
    given = columns(ordering_key=None, ordering_key_bytes=b"\xff\x00\xfe")
    assert seen(delivered(given, 0, 5_000, 1)).message.ordering_key == b"\xff\x00\xfe"


def test_a_key_of_bytes_goes_as_bytes_and_a_dead_letter_says_so_in_a_property_too() -> None:
    given = columns(key="/wA=", key_encoding="base64")
    properties, message = seen(delivered(given, 0, 5_000, 1))
    assert (message.key, message.is_key_base64) == (b"/wA=", True)
    assert "delaylake.keyEncoding" not in properties
    dead = seen(delivered(given, 0, 5_000, 1, dead_letter_of="a"))
    assert dead.message.is_key_base64
    assert dead.properties["delaylake.keyEncoding"] == "base64"


def test_an_occurrence_has_its_number() -> None:
    assert seen(delivered(columns(occurrence=7), 0, 5_000, 1)).properties["delaylake.occurrence"] == "7"
    assert "delaylake.occurrence" not in seen(delivered(columns(), 0, 5_000, 1)).properties


def test_a_rejected_message_has_its_reason_and_goes_as_it_came() -> None:
    given = columns(reason="x" * 5_000, key="k", payload=b"p", properties=[("a", "b")])
    properties, message = seen(rejected(given, 0, 1, MOST))
    assert properties == {**OWN, "a": "b", "delaylake.reason": "x" * 1_000}
    assert (message.payload, message.key) == (b"p", b"k")


@pytest.mark.parametrize("max_size", [MOST, 60_000])
@pytest.mark.parametrize("kind", ["payload", "key", "ordering_key_bytes", "properties", "names"])
def test_a_rejected_message_goes_without_what_makes_it_too_large_to_send(kind: str, max_size: int) -> None:
    n = min(max_size - 3_000, MAX_REJECTED_BYTES + 1)
    large: dict[str, Any] = {
        "payload": b"x" * n,
        "key": "ü" * (n // 2 + 1),
        "ordering_key_bytes": b"\xff" * n,
        "properties": [("a", "ü" * (n // 2 + 1))],
        "names": [("", "")] * (n // 12 + 1),
    }
    given = columns(reason="too large", **{kind.replace("names", "properties"): large[kind]})
    properties, message = seen(rejected(given, 0, 1, max_size))
    assert (message.payload, message.key, message.ordering_key) == (None, None, None)
    assert properties == {**OWN, "delaylake.reason": "too large"}


NAME = producer_name("app", TOPIC, "a", 0, "planned1", False)


def plan(rows: pa.Table) -> list[tuple[str, bool]]:
    """By which producer each row goes, and whether in a batch."""
    rows = release_rows(rows, sending='{"lanes": 4, "batch_millis": 5}')
    settings = Settings(routes=(Route(source=TOPIC, subscriptions=({"name": "a"},)),))  # type: ignore[arg-type]
    release = Assignment("app", 0, 1, True, pack(rows))
    return [(s.producer, s.is_batched) for s in sends_of(plan_release(settings, release, Attempt()))]


def test_what_an_earlier_release_handed_out_is_sent_by_the_same_producer() -> None:
    rows = messages([(1, 1, 10)])
    assert plan(rows) == plan(rows.select(MESSAGES.names[:18])) == [(f"{NAME}-batched", True)]


def test_a_message_with_a_key_of_any_kind_goes_alone() -> None:
    for key in ({"key": "k"}, {"ordering_key": "k"}, {"ordering_key_bytes": b"\xff"}):
        assert plan(messages([(1, 1, 10)], **key)) == [(NAME, False)]


def test_each_version_of_a_topics_schema_has_producers_of_its_own() -> None:
    versions = [None, b"\0" * 8, b"\0" * 7 + b"\1", b"\0" * 7 + b"\1other"]
    rows = pa.concat_tables([messages([(1, i, 10)], schema_version=v) for i, v in enumerate(versions)])
    names = [name for name, _ in plan(rows)]
    assert len(set(names)) == 4
    assert names == [name for name, _ in plan(rows)]
    assert names[1].startswith(f"{NAME}-batched-schema0-")


def test_a_dead_letter_says_whose_it_is() -> None:
    dead = delivered(columns(attempt=6, retry_reasons="[]"), 0, 5_000, 1, dead_letter_of="a")
    assert seen(dead).properties["delaylake.subscription"] == "a"
    assert "delaylake.subscription" not in seen(delivered(columns(), 0, 5_000, 1)).properties


def test_how_a_message_was_sent_back_is_not_passed_on() -> None:
    asked = ("retrySubscription", "retryReason", "retryAfter", "redriveRequest", "redriveBy")
    given = [(name, "x") for name in asked] + [("n", "1")]
    sent_back = columns(properties=[("retryOf", "7:0:-1:-1"), *given])
    expected = {"retryOf": "7:0:-1:-1", "n": "1", **OWN, "delaylake.deliverAt": "5000"}
    assert seen(delivered(sent_back, 0, 5_000, 1)).properties == expected
    # Somebody's own properties of these names, and those of what is rejected.
    assert seen(delivered(columns(properties=given), 0, 5_000, 1)).properties.keys() > set(asked)
    wrong = columns(properties=[("retryOf", "7"), *given], reason="no id")
    assert seen(rejected(wrong, 0, 1, MOST)).properties.keys() > set(asked)


def test_a_retry_has_its_number_and_reasons() -> None:
    first = seen(delivered(columns(), 0, 5_000, 1)).properties
    again = seen(delivered(columns(attempt=2, retry_reasons='["no", "no"]'), 0, 6_000, 2)).properties
    added = {"delaylake.attempt": "2", "delaylake.reasons": '["no", "no"]', "delaylake.deliverAt": "6000"}
    assert again == {**first, **added}
    large = columns(attempt=2, retry_reasons='["no"]', payload=b"x" * (MAX_REJECTED_BYTES + 1))
    assert "delaylake.reasons" not in seen(delivered(large, 0, 6_000, 3)).properties


UNSENDABLE = [
    ({"properties": [("a", "b"), ("region", None)]}, "the property 'region' has no value"),
    ({"event_time": -157_766_400_000}, "the event time -157766400000 is negative or beyond 2^63"),
]


@pytest.mark.parametrize(("values", "reason"), UNSENDABLE)
def test_what_no_message_can_have_is_named(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsendableError) as error:
        delivered(columns(**values), 0, 5_000, 1)
    assert str(error.value) == reason
    both = pa.concat_tables([messages([(7, 2, 5_000)]), messages([(7, 3, 5_000)], **values)])
    assert why_unsendable(both) == [None, reason]


@pytest.mark.parametrize("values", [values for values, _ in UNSENDABLE])
def test_a_rejected_message_comes_with_its_reason_whatever_else_it_has(values: dict[str, Any]) -> None:
    for max_size in (0, MOST):
        message = rejected(columns(reason="why", **values), 0, 1, max_size)
        assert {"delaylake.reason": "why", **OWN}.items() <= seen(message).properties.items()
