"""Which dead letters a re-drive is for, held against a naive reading, and what goes back of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from admin.control.dead_letters import DeadLetter, DeadLetterFilter, belongs_to, sequence_id
from broker.position import Position
from broker.protocol.building import OutgoingMessage, encoded_property
from broker.protocol.entries import Message
from broker.protocol.wire.pulsar_pb2 import MessageMetadata
from conf.partitions import java_string_hash
from conf.settings import Route

SOURCE = "persistent://public/default/t"
PROPERTIES = {
    "color": "red",
    "delaylake.source": SOURCE,
    "delaylake.messageId": "7:3:2:1",
    "delaylake.deliverAt": "1000",
    "delaylake.attempt": "6",
    "delaylake.reasons": '["no"]',
    "delaylake.subscription": "a",
}


def message(properties: dict[str, str], **values: Any) -> Message:
    pairs = [(name.encode(), value.encode()) for name, value in properties.items()]
    empty = Message(-1, None, False, None, pairs, b"x", 0)
    return empty._replace(**values)


def letter(props: dict[str, str] | None = None, published: int = 1_000, **values: Any) -> DeadLetter:
    metadata = MessageMetadata(publish_time=published, schema_version=b"\0\0v")
    read = DeadLetter.of(message(PROPERTIES | (props or {}), **values), metadata)
    assert read is not None
    return read


few = st.sampled_from(["x", "y", "xy"])
times = st.integers(0, 5)


@pytest.mark.slow
@given(
    wanted=st.fixed_dictionaries(
        {},
        optional={
            "key": few,
            "properties": st.dictionaries(few, few, max_size=2),
            "messageIds": st.lists(st.sampled_from(["7:0", "7:0:1", "7:1:0", "7:1", "8:0", "7:0:5:1"]), max_size=3),
            "reason": few,
            "publishedFrom": times,
            "publishedBefore": times,
        },
    ),
    entry=st.integers(0, 1),
    index=st.integers(-1, 1),
    key=few,
    properties=st.dictionaries(few, few, max_size=2),
    reasons=st.lists(few, max_size=2),
    published=times,
)
def test_all_conditions_hold_for_what_matches(
    wanted: dict[str, Any],
    entry: int,
    index: int,
    key: str,
    properties: dict[str, str],
    reasons: list[str],
    published: int,
) -> None:
    own = {"delaylake.messageId": f"7:{entry}:-1:{index}", "delaylake.reasons": json.dumps(reasons)}
    one = letter(own | properties, published, key=key.encode())
    asked = DeadLetterFilter.model_validate_json(json.dumps({"subscription": "a"} | wanted))
    is_meant = True
    if "key" in wanted:
        is_meant &= wanted["key"] == key
    for name, value in wanted.get("properties", {}).items():
        is_meant &= properties.get(name) == value
    if "messageIds" in wanted:
        named = []
        for text in wanted["messageIds"]:
            ledger, of_entry, *others = map(int, text.split(":"))
            named.append((ledger, of_entry) == (7, entry) and (not others or others[-1] == max(index, 0)))
        is_meant &= any(named)
    if "reason" in wanted:
        is_meant &= any(wanted["reason"] in reason for reason in reasons)
    is_meant &= wanted.get("publishedFrom", 0) <= published < wanted.get("publishedBefore", 9)
    assert one.matches(asked, asked.refs) == is_meant


BACK = {
    "color": "red",
    "retryOf": "7:3:2:1",
    "retrySubscription": "a",
    "redriveRequest": "r",
    "redriveBy": "ops",
}


@pytest.mark.parametrize(
    ("values", "back"),
    [
        ({}, {}),
        ({"key": b"k", "payload": b""}, {"key": b"k", "payload": b""}),
        ({"key": b"/wA=", "is_key_base64": True}, {"key": b"/wA=", "is_key_base64": True}),
        # Of an earlier version's dead letter only the property says that its key is bytes.
        ({"key": b"/wA=", "props": {"delaylake.keyEncoding": "base64"}}, {"key": b"/wA=", "is_key_base64": True}),
        ({"key": b"", "ordering_key": b"\xff\0"}, {"key": b"", "ordering_key": b"\xff\0"}),
        ({"payload": None, "event_time": 2**63 - 1}, {"payload": None, "event_time": 2**63 - 1}),
    ],
)
def test_it_goes_back_as_it_was_sent_at_first(values: dict[str, Any], back: dict[str, Any]) -> None:
    given = letter(**values)
    properties = [encoded_property(*one) for one in BACK.items()]
    assert given.sent_back("a", "r", "ops", 12) == OutgoingMessage(
        12, properties=properties, **{"payload": b"x"} | back
    )
    assert given.schema_version == b"\0\0v"
    assert given.to_json("a")["messageId"] == "7:3:2:1"


def test_it_goes_back_to_the_partition_from_which_it_came() -> None:
    assert letter().target(3) == f"{SOURCE}-partition-2"
    assert letter().target(2) is None
    assert letter().target(0) is None
    imported = {"delaylake.messageId": "7:3:-1:-1"}
    assert letter(imported).target(0) == SOURCE
    assert letter(imported).target(2) == f"{SOURCE}-partition-1"
    assert letter(imported, key=b"k7").target(5) == f"{SOURCE}-partition-{java_string_hash('k7') % 5}"


@pytest.mark.parametrize("name", ["delaylake.source", "delaylake.messageId"])
def test_what_the_job_has_not_sent_is_no_dead_letter(name: str) -> None:
    others = {key: value for key, value in PROPERTIES.items() if key != name}
    no_text = [(b"color", b"\xff")]
    for wrong in (
        message(others),
        message(PROPERTIES | {"delaylake.messageId": "seven"}),
        message(PROPERTIES, key=b"\xff"),
        message({})._replace(properties=message(PROPERTIES).properties + no_text),
    ):
        assert DeadLetter.of(wrong, MessageMetadata()) is None


@pytest.mark.parametrize(
    ("attempt", "reasons", "expected"),
    [
        ("6", '["no", 1]', (6, ["no", "1"])),
        ("9" * 5_000, '"no"', (None, [])),
        ("six", "[" * 100_000, (None, [])),
        ("", '["\\ud800"]', (None, ["?"])),
        ("1", "[" + "9" * 5_000 + "]", (1, [])),
    ],
)
def test_what_somebody_else_wrote_in_them_can_be_shown(attempt: str, reasons: str, expected: Any) -> None:
    shown = letter({"delaylake.attempt": attempt, "delaylake.reasons": reasons}, published=2**64 - 1).to_json("a")
    assert (shown["attempt"], shown["reasons"]) == expected
    assert json.dumps(shown, ensure_ascii=False).encode()


def test_it_is_of_the_subscription_that_it_names() -> None:
    subscriptions = [
        {"name": "a", "destination": f"{SOURCE}-d"},
        {"name": "b", "destination": f"{SOURCE}-d"},
        {"name": "c"},
    ]
    route = Route.model_validate({"source": SOURCE, "subscriptions": subscriptions})
    a, b, c = route.subscriptions
    named = older = letter()
    older = DeadLetter(**vars(older) | {"subscription": None})
    assert [belongs_to(named, one, route.subscriptions) for one in (a, b, c)] == [True, False, False]
    assert [belongs_to(older, one, route.subscriptions) for one in (a, b, c)] == [False, False, True]


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 2**22 - 1), st.integers(-1, 1_000)), max_size=5))
def test_sequence_ids_rise_as_positions_do(positions: list[tuple[int, int, int]]) -> None:
    by_id = sorted(set(positions), key=lambda at: sequence_id(Position(at[0], at[1]), at[2]))
    assert by_id == sorted(set(positions))
    assert all(0 < sequence_id(Position(*at[:2]), at[2]) < 2**63 for at in positions)


def test_what_has_no_place_in_them_is_refused() -> None:
    with pytest.raises(OverflowError, match="2147483648:0:-1"):
        sequence_id(Position(2**31, 0), -1)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"subscription": ""}, "at least 1 character"),
        ({"messageIds": ["seven"]}, "no message id"),
        ({"reason": ""}, "at least 1 character"),
        ({"publishedFrom": -1}, "greater than or equal to 0"),
        ({"publishedfrom": 1}, "Extra inputs"),
    ],
)
def test_a_wrong_filter_is_refused(wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        DeadLetterFilter.model_validate({"subscription": "a"} | wrong)
