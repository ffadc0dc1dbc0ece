"""The rows that a receiver makes of messages: their times, keys, details, and reasons to reject them."""

from __future__ import annotations

import json
import zlib
from typing import Any

import pytest

from broker.position import Position
from broker.protocol.consumer import ReceivedEntry
from broker.protocol.entries import SOURCE_POSITION, Envelope
from broker.protocol.wire.pulsar_pb2 import ZLIB, MessageMetadata
from streaming.source.receiving.details import NotKnownYetError
from tests.support.servers.fake_pulsar import FakeConsumer, batch, one
from tests.support.service.receiver_harness import Harness, rows_of
from tracker.due_time import MAX_TIME_MILLIS
from warehouse.message_schemas import MessageSchema


@pytest.mark.parametrize(
    "fields",
    [
        {"props": {"scheduleKey": ""}},
        {"props": {"repeat": "every day"}},
        {"props": {}, "happened": 2**63},
        {"props": {}, "payload": b"x" * 1_001},
    ],
)
def test_what_is_rejected_is_due_at_once_and_not_when_it_was_to_be_delivered(fields: dict[str, Any]) -> None:
    """Its release would be sent then, and keep a lane until then."""
    fields["props"] |= {"deliverAt": str(MAX_TIME_MILLIS)}
    [row] = rows_of(one(0, **fields))
    assert row["reason"]
    assert row["deliver_at"] <= row["publish_time"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"key": b"\xff"}, "what is not UTF-8 can't be read: key"),
        ({"props": {"a": b"\xff"}}, "what is not UTF-8 can't be read: properties"),
        ({"producer": b"\xff"}, "what is not UTF-8 can't be read: producer's name"),
        ({"key": b"\xff", "props": {b"\xff": "b"}}, "what is not UTF-8 can't be read: key, properties"),
        ({"happened": 2**63}, f"the event time {2**63} is negative or beyond 2^63"),
        ({"happened": 2**64 - 1}, f"the event time {2**64 - 1} is negative or beyond 2^63"),
        ({"published": MAX_TIME_MILLIS + 1}, f"the publish time {MAX_TIME_MILLIS + 1} is beyond the year 9999"),
        ({"published": 2**64 - 1}, f"the publish time {2**64 - 1} is beyond the year 9999"),
        ({"props": {"deliverAt": "soon"}}, "deliverAt is no whole number of milliseconds: 'soon'"),
        ({"props": {"deliverAfter": str(MAX_TIME_MILLIS)}}, "is beyond the year 9999"),
        ({"props": {"repeat": "every day"}}, "repeat is no cron expression"),
        ({"props": {"repeat": "FREQ=MONTHLY;BYDAY=20MO"}}, "repeat never occurs: 'FREQ=MONTHLY;BYDAY=20MO'"),
        ({"props": {"repeat": "@every 1m", "misfire": "never"}}, "misfire is none of once, all, skip: 'never'"),
        ({"props": {"repeat": "@every 1m", "repeatUntil": "5"}}, "repeatUntil is before the first occurrence"),
        ({"native": MAX_TIME_MILLIS + 1}, f"deliverAt {MAX_TIME_MILLIS + 1} is beyond the year 9999"),
    ],
)
def test_a_message_that_cannot_be_taken_is_put_aside_with_its_bytes_and_no_other_is_lost(
    fields: dict[str, Any], reason: str
) -> None:
    rows = rows_of([*one(0), *one(1, payload=b"odd", **fields), *batch(2, 2), *one(3)])
    assert [(row["entry_id"], row["batch_index"]) for row in rows] == [(0, -1), (1, -1), (2, 0), (2, 1), (3, -1)]
    assert reason in rows[1]["reason"]
    assert rows[1]["payload"] == b"odd"
    assert [row["reason"] for row in rows[:1] + rows[2:]] == [None] * 4


def test_what_was_read_of_a_message_that_cannot_be_taken_is_kept() -> None:
    [row] = rows_of(one(0, key="k", props={"deliverAt": "soon"}, happened=7))
    assert (row["key"], row["properties"], row["event_time"]) == ("k", [("deliverAt", "soon")], 7)


def test_an_ordering_key_of_bytes_is_taken_as_it_is() -> None:
    rows = rows_of([*one(0, ordering="o"), *one(1, ordering=b"\xff")])
    assert [row["ordering_key"] for row in rows] == ["o", None]
    assert [row["ordering_key_bytes"] for row in rows] == [None, b"\xff"]
    assert [row["reason"] for row in rows] == [None, None]


class Details:
    """What a broker knows, as far as it answers."""

    def __init__(self, schemas: dict[bytes, MessageSchema | None]) -> None:
        self.schemas = schemas
        self.answers = True

    def schema(self, version: bytes) -> tuple[bytes, MessageSchema | None]:
        if not self.answers:
            raise NotKnownYetError
        return version, self.schemas[version]


VERSION = b"\0" * 7 + b"\1"


def test_the_details_of_messages_go_with_them() -> None:
    harness = Harness(details=Details({VERSION: MessageSchema("STRING", "", {}), VERSION[:-1] + b"\xff": None}))
    large = VERSION[:-1] + b"\xff"
    harness.receive(
        [
            *one(0, key="/w==", is_key_bytes=True),
            *one(1, version=VERSION),
            *one(2, version=large),
            *batch(3, 2, key="k"),
        ]
    )
    rows = harness.take().to_pylist()
    assert [row["key_encoding"] for row in rows] == ["base64", None, None, None, None]
    assert [row["schema_version"] for row in rows] == [None, VERSION, large, None, None]
    assert [row["reason"] for row in rows] == [
        None,
        None,
        "the source topic has no version 255 of its schema any more, or has had more than 10,000, or "
        "definitions of more than 16 MiB",
        None,
        None,
    ]


def test_messages_whose_details_cannot_be_told_now_are_received_later() -> None:
    details = Details({VERSION: MessageSchema("STRING", "", {})})
    harness = Harness(details=details)
    script = [*one(0), *batch(1, 2, version=VERSION), *one(2)]
    details.answers = False
    consumer = FakeConsumer(script)
    with pytest.raises(NotKnownYetError):
        harness.receiver.receive(consumer)
    assert not harness.take().num_rows
    details.answers = True
    harness.receive(script)
    harness.take()
    assert harness.ids() == [(5, 0, -1), (5, 1, 0), (5, 1, 1), (5, 2, -1)]


def test_the_size_counts_bytes_keys_and_what_properties_take() -> None:
    def reason(**fields: Any) -> str | None:
        [row] = rows_of(one(0, **fields), max_size=1_000)
        result: str | None = row["reason"]
        return result

    assert reason(payload=b"x" * 1_000) is None
    assert reason(payload=b"x" * 1_001) == "1001 bytes are too many to be delivered with their delaylake properties"
    assert reason(payload=b"x" * 990, key="k" * 10) is None
    assert reason(payload=b"x" * 990, key="k" * 11) is not None
    assert reason(payload=b"x" * 990, ordering="€" * 4) is not None
    assert reason(payload=b"x" * 970, props={"€": "€" * 5}) is None, "30 bytes, 12 of them not the text's"
    assert reason(payload=b"x" * 970, props={"€": "€" * 6}) is not None
    assert reason(payload=b"", props={f"k{i:03}": "" for i in range(100)}) is not None


def test_properties_with_our_prefix_are_not_taken_over() -> None:
    # The last one is the broker's own, of what it replicated.
    props = {"delaylake.messageId": "1:2:3:4", "a": "b", "delaylake.": "", "delaylakeX": "c", SOURCE_POSITION: "7:1"}
    [row] = rows_of(one(0, props=props))
    assert row["properties"] == [("a", "b"), ("delaylakeX", "c")]
    assert row["reason"] is None


def test_what_is_sent_back_is_a_retry_whatever_time_and_key_it_has() -> None:
    given = {"retryOf": "1:7:-1:-1", "retrySubscription": "a", "retryReason": "no"}
    before = {"delaylake.attempt": "1", "delaylake.reasons": '["first"]', "deliverAt": "soon", "scheduleKey": ""}
    [row] = rows_of(one(0, props=given | before))
    assert (row["reason"], row["attempt"], row["schedule_key"]) == (None, 2, None)
    assert json.loads(row["retry_reasons"]) == ["first", "no"]
    assert not any(name.startswith("delaylake.") for name, _ in row["properties"])
    bytes_key = {"delaylake.keyEncoding": "base64"}
    assert [rows_of(one(0, key="/wA=", props=p | bytes_key))[0]["key_encoding"] for p in (given, {})] == [
        "base64",
        None,
    ]
    [anew] = rows_of(one(0, props=given | before | {"redriveRequest": "r"}))
    assert (anew["reason"], anew["attempt"], anew["retry_reasons"]) == (None, 0, None)
    [wrong] = rows_of(one(0, props=given | {"retryAfter": "soon"}))
    assert (wrong["reason"][:11], wrong["attempt"], wrong["retry_reasons"]) == ("retryAfter ", None, None)


def test_a_request_id_is_kept_also_of_what_is_rejected_and_not_of_copies() -> None:
    retry = {"retryOf": "1:7:-1:-1", "retrySubscription": "a"}
    for n in (1, 100):  # one by one, and in columns
        given: list[dict[str, str]] = [
            {"requestId": "r", "deliverAt": "7000"},
            {"requestId": "s", "deliverAt": "soon"},
            {"requestId": "t"} | retry,
            {"requestId": "u", "delaylake.messageId": "7:0:-1:-1"},
            {"requestId": ""},
            {"region": "eu"},
        ]
        entries = [entry for i, props in enumerate(given) for entry in one(i, props=props)]
        rows = rows_of(entries + [entry for i in range(n) for entry in one(10 + i, props={"region": "eu"})])
        assert [row["request_id"] for row in rows] == ["r", "s", None, None, None, None, *[None] * n]
        assert [row["reason"] is None for row in rows[:6]] == [True, False, True, True, False, True]
        # It arrives as it was sent.
        assert dict(rows[0]["properties"]) == given[0]


def test_a_recurring_message_comes_with_its_first_occurrence() -> None:
    every, named, once = rows_of(
        [
            *one(0, published=7_000, props={"repeat": "@every 90s", "delaylake.occurrence": "9"}),
            *one(1, published=7_000, props={"repeat": "0 18 * * *", "deliverAfter": "5000", "timeZone": "Asia/Tokyo"}),
            *one(2, published=7_000, props={"timeZone": "nowhere"}),
        ]
    )
    assert (every["deliver_at"], every["occurrence"], every["properties"]) == (97_000, 1, [("repeat", "@every 90s")])
    assert (named["deliver_at"], named["occurrence"]) == (12_000, 1)
    assert (once["occurrence"], once["reason"]) == (None, None)


def test_a_delivered_occurrence_begins_no_schedule_of_its_own() -> None:
    properties = {"repeat": "@every 90s", "deliverAt": "7000", "scheduleKey": "k"}
    delivered = {"delaylake.messageId": "7:0:-1:-1", "delaylake.occurrence": "3", "delaylake.source": "another"}
    rows = rows_of(
        [
            *one(0, published=9_000, props=properties | delivered),
            *one(1, published=9_000, props={**properties, "delaylake.messageId": "7:0:-1:-1"}),
        ]
    )
    assert [(row["occurrence"], row["schedule_key"], row["deliver_at"]) for row in rows] == [
        (None, None, 7_000),
        (1, "k", 7_000),
    ]
    assert dict(rows[0]["properties"]) == properties


def test_a_message_without_a_time_is_due_now_where_its_producers_clock_is_ahead() -> None:
    ahead, behind = rows_of([*one(0, published=MAX_TIME_MILLIS), *one(1, published=1_000)])
    assert ahead["deliver_at"] < MAX_TIME_MILLIS - 1_000_000_000
    assert behind["deliver_at"] == 1_000


def test_a_time_that_the_producers_client_gave_is_the_messages_and_a_property_goes_first() -> None:
    rows = rows_of(
        [
            *one(0, native=9_000),
            *batch(1, 2, native=9_500),
            *one(2, native=9_000, props={"deliverAt": "7000"}),
            *one(3, native=9_000, props={"deliverAfter": "50"}),
            *one(4, native=9_000, props={"repeat": "@every 90s"}),
            *one(5, native=-5),
        ]
    )
    assert [row["deliver_at"] for row in rows] == [9_000, 9_500, 9_500, 7_000, 1_050, 9_000, 1_000]
    assert [row["reason"] for row in rows] == [None] * 7
    assert rows[0]["properties"] == []
    assert rows[5]["occurrence"] == 1


@pytest.mark.parametrize("n", [1, 100])  # one by one, and in columns
def test_an_empty_key_is_not_an_absent_one(n: int) -> None:
    script = [e for i in range(n) for e in (*one(3 * i), *one(3 * i + 1, key=""), *one(3 * i + 2, ordering=b""))]
    rows = rows_of(script)[:3]
    assert [(row["key"], row["ordering_key"], row["key_encoding"]) for row in rows] == [
        (None, None, None),
        ("", None, None),
        (None, "", None),
    ]
    [row] = rows_of(batch(0, 1, key=b"", is_key_bytes=True))
    assert (row["key"], row["key_encoding"]) == ("", "base64")


def test_keys_say_whether_they_are_bytes_and_text_that_looks_like_base64_is_text() -> None:
    rows = rows_of([*one(0, key="user1234"), *one(1, key="/w==", is_key_bytes=True), *batch(2, 1, key="dGVzdA==")])
    assert [(row["key"], row["key_encoding"]) for row in rows] == [
        ("user1234", None),
        ("/w==", "base64"),
        ("dGVzdA==", None),
    ]


def test_what_an_entrys_messages_have_in_common_is_no_longer_for_each_of_them_than_a_name_may_be() -> None:
    """A batch of some KB would become rows of gigabytes."""
    rows = rows_of(batch(0, 100, producer="p" * 1_000_000))
    assert [row["producer_name"] for row in rows] == [None] * 100
    assert [row["reason"] for row in rows] == [None] * 100
    [row] = rows_of(one(0, producer="p" * 256))
    assert row["producer_name"] == "p" * 256


def test_of_a_message_that_is_far_too_large_the_bytes_of_its_entry_are_kept_and_others_of_it_come() -> None:
    """Decompressed, it may have any size: no row is so large."""
    [small], [large] = batch(0, 1, payload=b"x"), batch(0, 1, payload=b"y" * 2_001)
    first, second = small.envelope, large.envelope
    assert isinstance(first, Envelope)
    assert isinstance(second, Envelope)
    body = second.payload + first.payload + second.payload
    metadata = MessageMetadata(producer_name=b"p", publish_time=1_000, n_messages=3)
    metadata.compression, metadata.uncompressed_size = ZLIB, len(body)
    compressed = zlib.compress(body)
    entry = ReceivedEntry(
        Position(5, 0), Envelope(metadata, metadata.SerializeToString(), compressed, None), (), 3, len(compressed)
    )
    rows = rows_of([entry], max_size=1_000)
    assert [row["payload"] for row in rows] == [compressed, b"x", None]
    reason = "2001 bytes are too many to be delivered with their delaylake properties; here is its entry's payload"
    assert [row["reason"] for row in rows] == [reason, None, reason]


@pytest.mark.parametrize(("size", "is_decompressed"), [(2_000, True), (2_001, False), (2**32 - 1, False)])
def test_a_message_that_says_that_it_is_far_too_large_is_not_decompressed(size: int, is_decompressed: bool) -> None:
    """These bytes are no data of its codec, which only who decompresses them finds out."""
    metadata = MessageMetadata(producer_name=b"p", publish_time=1_000, compression=ZLIB, uncompressed_size=size)
    envelope = Envelope(metadata, metadata.SerializeToString(), b"no zlib", None)
    [row, good] = rows_of([ReceivedEntry(Position(5, 0), envelope, (), 1, 7), *one(1)], max_size=1_000)
    reason = f"{size} bytes are too many to be delivered with their delaylake properties; here is its entry's payload"
    assert row["reason"] == ("it can't be decompressed" if is_decompressed else reason)
    assert (row["payload"], good["reason"]) == (b"no zlib", None)


def test_a_cluster_s_name_may_be_anything_and_is_cut_off() -> None:
    [entry] = batch(0, 10)
    assert isinstance(entry.envelope, Envelope)
    entry.envelope.metadata.replicated_from = b"east" * 100_000
    harness = Harness(takes_replicated=False)
    harness.receive([entry])
    reasons = harness.take()["reason"].to_pylist()
    assert len(reasons) == 10
    assert all(reason.startswith("replicated from easteast") and len(reason) < 300 for reason in reasons)
