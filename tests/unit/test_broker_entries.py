"""What the broker tells of keys that the client can't."""

from __future__ import annotations

from typing import Any

import pytest

from streaming.broker_entries import BrokerEntries

# What a broker answered of a batch by Pulsar's Java client: keyBytes(fe, "0" to "2"), orderingKey(ff, "0" to "2").
BATCH = b"".join(
    b"\0\0\0\x10\x12\x04/j%c=\x18\x02\x30\x01\x3a\x02\xff%d\x40%chi" % (letter, i, i) for i, letter in enumerate(b"ABC")
)


class Admin:
    """A broker that has some entries, and counts how often it is asked."""

    def __init__(self, entries: dict[int, tuple[dict[str, str], bytes]]) -> None:
        self.entries = entries
        self.asked = 0

    def entry(self, topic: str, ledger_id: int, entry_id: int) -> tuple[dict[str, str], bytes] | None:
        self.asked += 1
        return self.entries.get(entry_id)


def entries(**by_number: tuple[dict[str, str], bytes]) -> tuple[BrokerEntries, Any]:
    admin: Any = Admin({int(name[1:]): answer for name, answer in by_number.items()})
    return BrokerEntries(admin, "persistent://public/default/t"), admin


def test_the_ordering_keys_of_a_batch_are_asked_for_once() -> None:
    found, admin = entries(_9=({"X-Pulsar-num-batch-message": "3"}, BATCH))
    assert [found.ordering_key(5, 9, i) for i in range(3)] == [b"\xff0", b"\xff1", b"\xff2"]
    assert admin.asked == 1


def test_the_ordering_key_of_a_message_alone_is_in_a_header() -> None:
    found, _ = entries(_7=({"X-Pulsar-Base64-ordering-key": "//4="}, b"hi"), _8=({}, b"hi"))
    assert found.ordering_key(5, 7, -1) == b"\xff\xfe"
    assert found.ordering_key(5, 8, -1) is None


def test_what_is_gone_or_encrypted_is_not_known() -> None:
    encrypted = {"X-Pulsar-num-batch-message": "3", "X-Pulsar-Is-Encrypted": "true"}
    found, _ = entries(_1=(encrypted, b"\xff" * 100))
    assert found.ordering_key(5, 1, 0) is None
    assert found.ordering_key(5, 2, -1) is None
    assert found.key_encoding("/jA=", "p", 5, 2, -1) is None


def test_each_producer_is_asked_for_once_and_only_where_its_key_could_be_bytes() -> None:
    is_bytes = {"X-Pulsar-partition-key-b64-encoded": "true"}
    found, admin = entries(_1=(is_bytes, b""), _2=({}, b""), _9=({"X-Pulsar-num-batch-message": "3"}, BATCH))
    for key in ("k", "käse", "abc\n", "ab==", "a b="):
        assert found.key_encoding(key, "bytes", 5, 1, -1) is None
    assert admin.asked == 0
    assert [found.key_encoding(key, "bytes", 5, 1, -1) for key in ("/wA=", "key7")] == ["base64", "base64"]
    assert [found.key_encoding(key, "text", 5, 2, -1) for key in ("/wA=", "key7")] == [None, None]
    assert found.key_encoding("/jA=", "batches", 5, 9, 1) == "base64"
    assert admin.asked == 3


def test_an_entry_that_is_gone_says_nothing_of_its_producer() -> None:
    found, admin = entries(_2=({"X-Pulsar-partition-key-b64-encoded": "true"}, b""))
    assert found.key_encoding("/wA=", "p", 5, 1, -1) is None
    assert found.key_encoding("/wA=", "p", 5, 2, -1) == "base64"
    assert admin.asked == 2


@pytest.mark.parametrize("batch_index", [3, 100])
def test_a_batch_has_no_more_messages_than_it_says(batch_index: int) -> None:
    found, _ = entries(_9=({"X-Pulsar-num-batch-message": "3"}, BATCH))
    assert found.ordering_key(5, 9, batch_index) is None
