"""Which keys are bytes."""

from __future__ import annotations

from typing import Any

import pytest

from broker.client import PulsarError
from broker.entries import key_encodings
from broker.entries.key_encodings import KeyEncodings
from broker.pulsar_admin import silent_producers
from broker.pulsar_admin.admin_rest import UnreadableEntryError

# What a broker answered of a batch by Pulsar's Java client: keyBytes(fe, "0" to "2"), orderingKey(ff, "0" to "2").
BATCH = b"".join(
    b"\0\0\0\x10\x12\x04/j%c=\x18\x02\x30\x01\x3a\x02\xff%d\x40%chi" % (letter, i, i) for i, letter in enumerate(b"ABC")
)
IN_BATCH = {"X-Pulsar-num-batch-message": "3"}
IS_BYTES = {"X-Pulsar-partition-key-b64-encoded": "true"}


class Admin:
    """A broker that has some entries, and counts how often it is asked."""

    def __init__(self, entries: dict[int, tuple[dict[str, str], bytes]]) -> None:
        self.entries = entries
        self.asked = 0

    def entry(self, topic: str, ledger_id: int, entry_id: int) -> tuple[dict[str, str], bytes] | None:
        self.asked += 1
        if entry_id >= 100:
            raise UnreadableEntryError("the broker tells nothing of it")
        if entry_id < 0:
            raise PulsarError("the broker is away")
        return self.entries.get(entry_id)


def encodings(entries: dict[int, tuple[dict[str, str], bytes]]) -> tuple[KeyEncodings, Any]:
    admin: Any = Admin(entries)
    return KeyEncodings(admin, "persistent://public/default/t"), admin


@pytest.mark.parametrize("key", ["k", "käse", "abc\n", "ab==", "a b=", "=abc"])
def test_of_a_key_that_can_be_no_bytes_nobody_is_asked(key: str) -> None:
    found, admin = encodings({1: (IS_BYTES, b"")})
    assert found.of(key, "p", 5, 1, -1) is None
    assert admin.asked == 0


def test_the_broker_is_asked_once_for_each_producer() -> None:
    found, admin = encodings({1: (IS_BYTES, b""), 2: ({}, b""), 9: (IN_BATCH, BATCH)})
    assert [found.of(key, "bytes", 5, 1, -1) for key in ("/wA=", "key7", "word")] == ["base64"] * 3
    assert [found.of(key, "text", 5, 2, -1) for key in ("/wA=", "key7")] == [None, None]
    assert [found.of("/jA=", "batches", 5, 9, i) for i in range(3)] == ["base64"] * 3
    assert found.of("key", "bytes", 5, 1, -1) is None
    assert admin.asked == 3


def test_of_ten_times_as_many_producers_as_are_remembered_the_last_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (key_encodings, silent_producers):
        monkeypatch.setattr(module, "MOST_PRODUCERS", 10)
    found, admin = encodings({1: (IS_BYTES, b"")})
    assert [found.of("/wA=", f"p{i}", 5, 1, -1) for i in range(100)] == ["base64"] * 100
    assert list(found._sends_bytes) == [f"p{i}" for i in range(90, 100)]
    for i in range(100):
        for _ in range(3):
            found.of("/wA=", f"q{i}", 5, 100, -1)
    silent = found._silent_producers
    assert list(silent._in_a_row) == list(silent._silent_until) == [f"q{i}" for i in range(90, 100)]
    assert (admin.asked, silent.is_silent("q99")) == (100 + 300, True)


def test_an_entry_that_is_gone_or_encrypted_says_nothing_of_its_producer() -> None:
    encrypted = (IN_BATCH | {"X-Pulsar-Is-Encrypted": "true"}, b"\xff" * 100)
    found, admin = encodings({1: encrypted, 3: (IS_BYTES, b"")})
    assert [found.of("/wA=", "p", 5, entry, 0) for entry in (1, 2)] == [None, None]
    assert found.of("/wA=", "p", 5, 3, -1) == "base64"
    assert admin.asked == 3


def test_a_key_of_an_entry_of_which_the_broker_tells_nothing_is_text_and_its_producer_is_soon_not_asked_for() -> None:
    found, admin = encodings({1: (IS_BYTES, b"")})
    assert [found.of("/wA=", "silent", 5, 100 + n, -1) for n in range(9)] == [None] * 9
    assert admin.asked == 3
    assert [found.of("/wA=", "p", 5, entry, -1) for entry in (100, 1, 101)] == [None, "base64", "base64"]


def test_a_broker_that_is_away_is_no_answer() -> None:
    found, _ = encodings({})
    with pytest.raises(PulsarError, match="away"):
        found.of("/wA=", "p", 5, -1, -1)
