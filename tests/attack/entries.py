"""Entries that somebody sends for the worst who may produce on a source topic, and commands likewise."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from itertools import count

from broker.protocol.wire.pulsar_pb2 import ZLIB, BatchedMetadata, MessageMetadata
from tests.support.clients.raw_producer import batch, entry, metadata
from tests.support.service.harness import now
from tracker.wire.delaylake_pb2 import ControlCommand

_YEAR_10000 = 253_402_300_800_000
_KB = 1 << 10
_EXTREME = (0, 1, -1, 2**31 - 1, -(2**31), 2**53, 2**63 - 1, -(2**63), _YEAR_10000, _YEAR_10000 - 1)
_RULES = (
    *("@every 1s", "@every 1ms", "* * * * * *", "0 0 30 2 *", "FREQ=SECONDLY", "FREQ=NONSENSE", "\x00"),
    "FREQ=DAILY;" * 90,
    *("FREQ=DAILY;BYMONTH=2;BYMONTHDAY=30", "FREQ=MONTHLY;BYDAY=20MO", "FREQ=YEARLY;BYSETPOS=-366;BYDAY=MO"),
    *("FREQ=MONTHLY;BYMONTH=11;BYDAY=1MO,12TU", "FREQ=SECONDLY;INTERVAL=2147483647;COUNT=9999999999"),
)  # fmt: skip
_TEXTS = (
    "",
    "\x00",
    "\x1b[2J\x1b]0;owned\x07",
    "<script>alert(1)</script>",
    "=cmd|'/c calc'!A1",
    "\u202e\u0000",
    "x" * 600,
    "../" * 50,
)
_ZONES = ("UTC", "Moon/Base", "../../etc/passwd", "Pacific/Kiritimati", "", "\x00", "America/" * 40)

_BOMB = zlib.compress(bytes(20 << 20))
_EMPTY_BATCH = zlib.compress(batch((BatchedMetadata(), b"") for _ in range(10_000)))
_EMPTY_BATCH_BYTES = 10_000 * 6


class Sender:
    """Makes entries, each with a sequence id of its own."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._ids = count(1)
        self.kinds: list[Callable[[], tuple[bytes, int]]] = [
            *(self._plain, self._timed, self._native, self._keyed, self._recurring, self._sent_back),
            *(self._published, self._batch_that_lies, self._sizes_that_lie, self._chunk, self._chunk_with_a_long_id),
            *(self._named_at_length, self._replicated, self._bomb, self._many_in_little, self._many_properties),
            *(self._version, self._encrypted, self._transaction, self._marker, self._garbage),
        ]

    def entries(self) -> Iterator[tuple[bytes, int, int]]:
        """Yields (entry, sequence id, the number of its messages), without end."""
        while True:
            data, n = self._chance.choice(self.kinds)()
            yield data, next(self._ids), n

    def _one(self, payload: bytes = b"x" * 100, **fields: object) -> tuple[bytes, int]:
        properties = fields.pop("properties", {})
        assert isinstance(properties, dict)
        pairs = [{"key": name.encode(), "value": value.encode()} for name, value in properties.items()]
        published = fields.pop("published", now())
        assert isinstance(published, int)
        described = metadata(self._chance.getrandbits(40), published, properties=pairs, **fields)
        return entry(described, payload), 1

    def _any(self) -> str:
        return str(self._chance.choice(_EXTREME)) if self._chance.random() < 0.7 else self._chance.choice(_TEXTS)

    def _plain(self) -> tuple[bytes, int]:
        messages = [(BatchedMetadata(), b"p" * 100) for _ in range(100)]
        return entry(metadata(1, now(), n_messages=100), batch(messages)), 100

    def _timed(self) -> tuple[bytes, int]:
        name = self._chance.choice(("deliverAt", "deliverAfter", "expireAt", "expireAfter"))
        return self._one(properties={name: self._any()})

    def _native(self) -> tuple[bytes, int]:
        properties = {"deliverAt": self._any()} if self._chance.random() < 0.5 else {}
        return self._one(
            deliver_at_time=self._chance.choice([at for at in _EXTREME if abs(at) < 2**63]), properties=properties
        )

    def _keyed(self) -> tuple[bytes, int]:
        key = f"{self._chance.getrandbits(20)}" if self._chance.random() < 0.8 else self._chance.choice(_TEXTS)
        mode = self._chance.choice(("replace", "keep", "debounce", "?"))
        at = str(now() + self._chance.choice((1_000, 60_000, 10**11)))
        given = {"scheduleKey": key, "scheduleMode": mode, "debounceMax": self._any(), "deliverAt": at}
        return self._one(properties=given)

    def _recurring(self) -> tuple[bytes, int]:
        given = {"repeat": self._chance.choice(_RULES), "timeZone": self._chance.choice(_ZONES)}
        if self._chance.random() < 0.3:
            given |= {"repeatUntil": self._any(), "repeatTimes": self._any(), "misfire": "all"}
        return self._one(properties=given)

    def _sent_back(self) -> tuple[bytes, int]:
        given = {
            "retryOf": self._chance.choice(("7:0", f"{2**62}:0", "x", "0:0:0:0:0")),
            "retrySubscription": self._chance.choice(("a", "nobody", "")),
            "retryReason": self._chance.choice(_TEXTS) * 20,
            "retryAfter": self._any(),
            "delaylake.attempt": self._any(),
            "delaylake.reasons": "[" * 1_000,
        }
        if self._chance.random() < 0.3:
            given |= {"redriveRequest": "r" * self._chance.choice((10, 100_000)), "redriveBy": "root"}
        return self._one(properties=given)

    def _published(self) -> tuple[bytes, int]:
        at = self._chance.choice((0, 1, 2**63, 2**64 - 1, _YEAR_10000))
        return self._one(published=at, event_time=self._chance.choice((0, 2**63, 2**64 - 1)))

    def _batch_that_lies(self) -> tuple[bytes, int]:
        n = self._chance.choice((0, 1, 2, 4, 100_001, 2**31 - 1, -1, -(2**31)))
        return entry(metadata(1, now(), n_messages=n), batch((BatchedMetadata(), b"m") for _ in range(3))), 1

    def _sizes_that_lie(self) -> tuple[bytes, int]:
        size = self._chance.choice((-1, 0, 2, 2**31 - 1, -(2**31)))
        return entry(metadata(1, now(), n_messages=1), batch([(BatchedMetadata(payload_size=size), b"m")])), 1

    def _chunk(self) -> tuple[bytes, int]:
        uuid = b"%d" % self._chance.getrandbits(10)
        of, which = self._chance.choice((2, 3, 2**31 - 1, -1)), self._chance.choice((0, 0, 1, 2, -1, 5))
        return self._one(
            bytes(64 * _KB),
            uuid=uuid,
            n_chunks=of,
            chunk_id=which,
            chunked_size=self._chance.choice((1, -1, 2**31 - 1)),
        )

    def _chunk_with_a_long_id(self) -> tuple[bytes, int]:
        uuid = b"u" * 200 * _KB + b"%d" % self._chance.getrandbits(30)
        return self._one(uuid=uuid, n_chunks=2, chunk_id=0, chunked_size=2)

    def _named_at_length(self) -> tuple[bytes, int]:
        described = MessageMetadata(producer_name=b"p" * 200 * _KB, sequence_id=1, publish_time=now(), n_messages=500)
        return entry(described, batch((BatchedMetadata(), b"m") for _ in range(500))), 500

    def _replicated(self) -> tuple[bytes, int]:
        described = metadata(1, now(), n_messages=500, replicated_from=b"r" * 200 * _KB)
        return entry(described, batch((BatchedMetadata(), b"m") for _ in range(500))), 500

    def _bomb(self) -> tuple[bytes, int]:
        size = self._chance.choice((20 << 20, 80 << 20, 2**32 - 1, 1))
        return self._one(_BOMB, compression=ZLIB, uncompressed_size=size)

    def _many_in_little(self) -> tuple[bytes, int]:
        described = metadata(1, now(), n_messages=10_000, compression=ZLIB, uncompressed_size=_EMPTY_BATCH_BYTES)
        return entry(described, _EMPTY_BATCH), 10_000

    def _many_properties(self) -> tuple[bytes, int]:
        return self._one(properties={f"{i}": "" for i in range(10_000)})

    def _version(self) -> tuple[bytes, int]:
        return self._one(schema_version=self._chance.randbytes(self._chance.choice((1, 8, 8, 100 * _KB))))

    def _encrypted(self) -> tuple[bytes, int]:
        keys = [{"name": b"k%d" % i, "value": self._chance.randbytes(256)} for i in range(200)]
        return self._one(encryption_keys=keys, encryption_param=b"0" * 12)

    def _transaction(self) -> tuple[bytes, int]:
        return self._one(txn_id_low=self._chance.getrandbits(64), txn_id_high=self._chance.getrandbits(64))

    def _marker(self) -> tuple[bytes, int]:
        return self._one(marker_type=self._chance.choice((0, 1, 10, 20, 23, 2**31 - 1)))

    def _garbage(self) -> tuple[bytes, int]:
        return self._chance.randbytes(4) + bytes(self._chance.randrange(10_000)), 1


def commands(chance: random.Random, topic: str) -> Iterator[bytes]:
    """Yields commands for a topic, without end: bytes that are none, and such as nobody means."""
    while True:
        if chance.random() < 0.3:
            yield chance.randbytes(chance.randrange(2_000))
            continue
        command = ControlCommand(
            request_id=chance.choice(("", "again", f"{chance.getrandbits(60)}", "x" * 5_000)), topic=topic
        )
        command.subscriptions.extend(chance.choice((["a"], ["*"], ["nobody"], ["a"] * 1_000, [])))
        command.issued_by = chance.choice(_TEXTS)
        ledger = chance.choice((0, 7, 2**40, 2**63 - 1))
        if chance.random() < 0.5:
            for i in range(chance.choice((1, 1_000))):
                command.skip.entries.add(
                    ledger_id=ledger, entry_id=i, batch_indexes=[*range(chance.choice((0, 1, 500)))]
                )
        else:
            for i in range(chance.choice((1, 1_000))):
                at = now() + chance.choice((0, 1_000, 10**12))
                command.cancels.messages.add(ledger_id=ledger, entry_id=i, deliver_at=at)
        yield command.SerializeToString()
