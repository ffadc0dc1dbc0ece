"""What calls say is read in all its forms, and refused in any other."""

from __future__ import annotations

import base64
import contextlib
import json
from typing import Any

import pulsar
import pytest
from delaylake.commands import Ids
from hypothesis import given
from hypothesis import strategies as st

from admin.rest.request_bodies import (
    BadRequestError,
    TooManyIdsError,
    parse_cancel,
    parse_index,
    parse_json,
    parse_skip,
    parse_skip_map,
    parse_subscriptions,
)
from admin.rest.topics_schema import SKIP_BODY
from broker.entries.message_ids import MessageIdError, MessageRef

REFUSED = (BadRequestError, MessageIdError)

IDS = st.integers(0, 2**63 - 1)
ENTRIES = st.integers(0, 2**32 - 1)
REFS = st.builds(MessageRef, IDS, ENTRIES, st.integers(-1, 100), st.integers(-1, 1_000))


def skip(content: Any, max_ids: int = 1_000) -> list[MessageRef]:
    return parse_skip(json.dumps(content).encode(), max_ids)


def as_base64(message: MessageRef) -> str:
    message_id = pulsar.MessageId(message.partition, message.ledger_id, message.entry_id, message.batch_index)
    return base64.b64encode(message_id.serialize()).decode()


def as_object(message: MessageRef, number: type) -> dict[str, object]:
    names = {"ledgerId": "ledger_id", "entryId": "entry_id", "batchIndex": "batch_index", "partitionIndex": "partition"}
    return {name: number(getattr(message, attribute)) for name, attribute in names.items()}


@given(st.lists(REFS, min_size=1, max_size=20, unique=True))
def test_the_same_messages_in_every_form(messages: list[MessageRef]) -> None:
    texts = [as_base64(m) for m in messages]
    assert skip(texts) == messages
    assert skip({"type": "byteArray", "messageIds": texts}) == messages
    assert skip([str(m) for m in messages]) == messages
    for number in (int, str):
        assert skip({"type": "messageId", "messageIds": [as_object(m, number) for m in messages]}) == messages


@given(st.dictionaries(IDS, ENTRIES, min_size=1, max_size=20))
def test_a_map_of_ledgers_to_entries(entries: dict[int, int]) -> None:
    expected = [MessageRef(ledger, entry) for ledger, entry in entries.items()]
    for number in (int, str):
        content = {str(ledger): number(entry) for ledger, entry in entries.items()}
        assert skip(content) == parse_skip_map(json.dumps(content).encode(), 1_000) == expected


@pytest.mark.parametrize("kind", ["messageId", "MESSAGEID", "messageid"])
def test_a_type_is_in_any_case(kind: str) -> None:
    ids = [{"ledgerId": 1, "entryId": 2}, None, {"ledgerId": "3", "entryId": 4, "batchIndex": "-7"}]
    assert skip({"type": kind, "messageIds": ids}) == [MessageRef(1, 2), MessageRef(3, 4)]


@pytest.mark.parametrize("content", [{}, {"type": None}, {"type": ""}, {"type": "BYTEARRAY"}])
@pytest.mark.parametrize("text", ["CAcQAA==", "CAcQAA"])
def test_without_a_type_ids_are_byte_arrays_with_padding_or_without(content: dict[str, Any], text: str) -> None:
    assert skip({**content, "messageIds": [text]}) == skip([text]) == [MessageRef(7, 0)]


def test_the_examples_of_the_description_name_the_same_message() -> None:
    [body] = SKIP_BODY["requestBody"]["content"].values()
    examples = {name: example["value"] for name, example in body["examples"].items()}
    third = [MessageRef(7, 0, -1, 3)]
    assert skip(examples["objects"]) == skip(examples["byte arrays"]) == skip(examples["base64"]) == third
    assert skip(examples["triplets"])[:1] == third


def test_null_is_passed_over_and_what_comes_twice_counts_once() -> None:
    assert skip(["1:2:3", None, "1:2:3"]) == [MessageRef(1, 2, -1, 3)]
    assert skip({"1": "2", "3": None}) == [MessageRef(1, 2)]
    assert skip({"type": "messageId", "messageIds": [{"ledgerId": 1, "entryId": 2, "batchIndex": None}]}) == [
        MessageRef(1, 2)
    ]


@pytest.mark.parametrize(
    "content",
    [
        None,
        False,
        1,
        "1:2:3",
        [],
        {},
        [None],
        {"1": None},
        [False],
        [1],
        [["1:2:3"]],
        ["1:2:3:4:5"],
        ["-1:2"],
        ["%%%"],
        ["9223372036854775808:1"],
        [{"ledgerId": 1, "entryId": 2}],
        {"1": 2.0},
        {"1": "2.5"},
        {"1": False},
        {"-1": "2"},
        {"a": "2"},
        {"1": {"2": 3}},
        {"type": "messageId"},
        {"type": ""},
        {"messageIds": ["1:2:3"]},
        {"messageIds": {"1": "2"}},
        {"messageIds": []},
        {"messageIds": [{"ledgerId": 1, "entryId": 2}]},
        {"type": "messageId", "messageIds": []},
        {"type": "messageId", "messageIds": {}},
        {"type": "nonsense", "messageIds": ["1:2:3"]},
        {"type": None, "messageIds": ["1:2:3"]},
        {"type": " ", "messageIds": ["CAcQAA=="]},
        {"type": True, "messageIds": ["1:2:3"]},
        {"type": "byteArray", "messageIds": ["1:2:3"]},
        {"type": "byteArray", "messageIds": [{"ledgerId": 1, "entryId": 2}]},
        {"type": "messageId", "messageIds": ["1:2:3"]},
        {"type": "messageId", "messageIds": [{"ledgerId": 1}]},
        {"type": "messageId", "messageIds": [{"ledgerId": True, "entryId": 2}]},
        {"type": "messageId", "messageIds": [{"ledgerId": 1, "entryId": -2}]},
        {"type": "messageId", "messageIds": [{"ledgerId": 1, "entryId": 2, "batchIndex": 1.5}]},
        {"type": "messageId", "messageIds": [{"ledgerId": 1, "entryId": 2, "batchIndex": 2**31}]},
        {"type": "messageId", "messageIds": [{"ledgerId": 1, "entryId": 2, "batchindex": 3}]},
        {"type": "messageId", "messageIds": [{"ledgerId": 2**63, "entryId": 2}]},
        {"type": "messageId", "messageIds": [{"ledgerId": 1, "entryId": 2}], "else": 1},
    ],
)
def test_any_other_body_is_refused_in_one_line(content: Any) -> None:
    with pytest.raises(REFUSED) as error:
        skip(content)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"1": "2"} x', b'{"1": NaN}', b"\xff\xff", b"[" * 100_000, b"1" * 5_000, b'{"1": "2", "1": "3"}'],
)
def test_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequestError):
        parse_json(body)


NAMES = st.sampled_from(["type", "messageIds", "ledgerId", "entryId", "batchIndex", "1"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["messageId", "1:2"])
ANYTHING = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner), max_leaves=8)


@pytest.mark.slow
@given(st.binary(max_size=60) | ANYTHING.map(lambda content: json.dumps(content).encode()))
def test_any_body_is_ids_or_refused(body: bytes) -> None:
    for parse in (parse_skip, parse_skip_map):
        with contextlib.suppress(BadRequestError, MessageIdError, TooManyIdsError):
            assert parse(body, 5)


def test_more_ids_than_allowed_are_too_many() -> None:
    assert len(skip([f"1:{i}" for i in range(5)], max_ids=5)) == 5
    for content in ([f"1:{i}" for i in range(6)], {str(i): "1" for i in range(6)}):
        with pytest.raises(TooManyIdsError):
            skip(content, max_ids=5)


@given(IDS, IDS, st.integers(1, 2**63 - 1))
def test_a_cancel_by_numbers_or_texts(ledger: int, entry: int, due: int) -> None:
    given = {"ledgerId": ledger, "entryId": entry, "deliverAt": due}
    for parameters in (given, {name: str(value) for name, value in given.items()}):
        assert parse_cancel(parameters) == Ids([MessageRef(ledger, entry)], [due])


@pytest.mark.parametrize("name", ["ledgerId", "entryId", "deliverAt"])
@pytest.mark.parametrize("value", [None, "", "a", "-1", -1, 1.5, "1.5", True, "1e3", 2**63, "\u0661", [1], " 1"])
def test_a_cancel_without_its_numbers_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(BadRequestError, match=name):
        parse_cancel({"ledgerId": 1, "entryId": 2, "deliverAt": 3, name: value})


def test_a_cancel_is_for_a_time() -> None:
    with pytest.raises(BadRequestError, match="deliverAt"):
        parse_cancel({"ledgerId": 1, "entryId": 2, "deliverAt": 0})


def test_subscriptions_are_repeated_or_separated_by_commas() -> None:
    assert parse_subscriptions(None) == parse_subscriptions([]) == parse_subscriptions("") == []
    assert parse_subscriptions("a") == ["a"]
    assert parse_subscriptions(["a,b", " c ", "a", ""]) == ["a", "b", "c"]
    for wrong in (1, [1], {"a": 1}, [None], False):
        with pytest.raises(BadRequestError):
            parse_subscriptions(wrong)


def test_an_index_is_a_whole_number() -> None:
    assert parse_index("42") == 42
    assert parse_index("-1") == -1
    for wrong in (None, "", "x", "1.0", str(2**63)):
        with pytest.raises(BadRequestError):
            parse_index(wrong)
