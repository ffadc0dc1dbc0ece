"""Rows and commands with any values, by every way in: none raises an error, and their neighbours come once, in time.

The values are made up without a look at what is checked where.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as effort
from hypothesis import strategies as st

from broker.position import SourceTopic
from broker.protocol.unpacking import unpack
from checkpoint_from_tables.importing.importer import Importer
from checkpoint_from_tables.other_systems.importing import import_items
from checkpoint_from_tables.other_systems.item import Item, item, rejected_item
from streaming.release.outgoing import why_unsendable
from streaming.source.receiving.row_builder import RowBuilder
from streaming.source.receiving.unreadable_messages import Acceptance
from tests.support.fuzzing.examples import examples
from tests.support.servers.fake_pulsar import one
from tests.support.service.one_shard import NAMES, NOW, SECOND, Service
from tests.support.tracker.messages import TOPIC, command, messages
from tracker.commands.decode import decode
from tracker.commands.kinds import OPERATIONS, RETRY
from tracker.entry_log import entries_of
from tracker.messages import MESSAGES
from tracker.schemas import SubscriptionRule
from tracker.wire.delaylake_pb2 import ControlCommand
from warehouse.queries.index_rows import to_index

DUE = NOW + 8 * SECOND
# The first entries of what is in the tables and what comes by the topic: of rows with any values, and their neighbours.
PLANTED, BESIDE, SENT, BESIDE_SENT = 0, 10, 20, 30
BESIDE_IMPORTED = 40  # of a ledger of their own, behind the items of another system
N = 4  # neighbours

NUMBERS = st.sampled_from(
    [0, 1, -1, NOW, DUE, DUE - 1, NOW - 10**12, 2**31 - 1, 2**53, 2**62, 253_402_300_799_999, 253_402_300_800_000]
)
WORDS = st.sampled_from(
    [
        *("", "0", "-1", "1", "9" * 18, "9" * 30, "1e9", "NaN", "5s", "1.5h", str(DUE), str(NOW), "\x00", "é" * 600),
        *("replace", "keep", "debounce", "once", "all", "skip", "UTC", "Europe/Berlin", "Moon/Base", "a", "b", "zzz"),
        *("@every 1s", "@every 5s", "@every 0s", "* * * * *", "*/2 * * * * *", "0 0 31 2 *", "FREQ=DAILY;COUNT=3"),
        *("FREQ=MONTHLY;BYMONTH=11;BYDAY=1MO,12TU", "FREQ=YEARLY;BYWEEKNO=53", "FREQ=", "RRULE:FREQ=SECONDLY"),
        *("1:100", "1:100:-1:-1", "7:0:x", "[]", "[", '["\\ud800"]', "base64", "1:101:0:0", "redrive-x"),
    ]
)
NAMED = st.sampled_from(
    [
        *("deliverAt", "deliverAfter", "scheduleKey", "scheduleMode", "debounceMax", "repeat", "timeZone", "misfire"),
        *("repeatUntil", "repeatTimes", "retryOf", "retrySubscription", "retryReason", "retryAfter", "redriveRequest"),
        *("redriveBy", "expireAt", "expireAfter", "delaylake.messageId", "delaylake.occurrence", "delaylake.attempt"),
        *("delaylake.reasons", "delaylake.shapedFrom", "delaylake.keyEncoding", "", "traceparent"),
    ]
)
PAIRS = st.lists(st.tuples(NAMED, WORDS), max_size=5, unique_by=lambda pair: pair[0])
MAYBE = st.none() | WORDS

# Any row of the table; what identifies it is as it is.
ROW = st.fixed_dictionaries(
    {},
    optional={
        "deliver_at": NUMBERS,
        "publish_time": NUMBERS,
        "event_time": NUMBERS,
        "producer_name": MAYBE,
        "key": MAYBE,
        "ordering_key": MAYBE,
        "ordering_key_bytes": st.none() | st.binary(max_size=3),
        "properties": st.lists(st.tuples(NAMED, MAYBE), max_size=5, unique_by=lambda pair: pair[0]),
        "payload": st.none() | st.binary(max_size=3),
        "key_encoding": MAYBE,
        "was_due": st.none() | NUMBERS,
        "schedule_key": MAYBE,
        "key_since": st.none() | NUMBERS,
        "attempt": st.none() | st.sampled_from([0, 1, -1, 5, 2**31 - 1]),
        "retry_reasons": MAYBE,
        "shaped_from": st.none() | NUMBERS,
        "occurrence": st.none() | st.sampled_from([0, 1, 7, -1, 2**62]),
        "occurrence_at": st.none() | NUMBERS,
    },
)
MESSAGE = st.fixed_dictionaries(
    {"props": PAIRS.map(dict)},
    optional={
        "payload": st.none() | st.binary(max_size=3),
        "key": WORDS,
        "ordering": WORDS,
        "published": NUMBERS.filter(lambda n: n >= 0),
        "happened": st.integers(0, 2**64 - 1),
        "producer": WORDS,
    },
)
KINDS = st.sampled_from([kind for kind, operation in OPERATIONS.items() if not operation.is_of_subscription])
ORDER = st.tuples(KINDS, st.integers(0, 6), NUMBERS.filter(lambda n: 0 < n < 253_402_300_800_000), st.integers(1, 3))

# An item of another system, as one of its readers finds it.
ITEM = st.fixed_dictionaries(
    {
        "id": WORDS.filter(bool),
        "due": st.none() | NUMBERS | st.floats() | st.sampled_from([1e18, -1e18, 2**63, 0.5]),
        "payload": st.none() | st.binary(max_size=3),
        "properties": st.dictionaries(NAMED, MAYBE | NUMBERS | st.sampled_from(["\ud800", True]), max_size=5),
        "key": MAYBE,
    }
)


class Items:
    """Another system with these items, others that are rejected, and neighbours, from BESIDE_IMPORTED on."""

    def __init__(self, found: list[dict[str, Any]]) -> None:
        self.left: Counter[str] = Counter()
        self._found = found

    def items(self) -> Iterator[Item]:
        for number, values in enumerate(self._found):
            yield item(**{**values, "id": f"{number} {values['id']}"})
        for number in range(len(self._found), BESIDE_IMPORTED):
            yield rejected_item(f"filler {number}", "no job", b"")
        for number in range(N):
            yield item(f"neighbour {number}", DUE + number, b"")


def neighbours(first: int) -> pa.Table:
    return messages([(1, first + i, DUE + i) for i in range(N)], publish_time=NOW)


def came_in(found: list[dict[str, Any]], first: int) -> pa.Table:
    """What a receiver makes of messages."""
    builder = RowBuilder(SourceTopic(TOPIC, TOPIC, -1), Acceptance(0, 1 << 20))
    for i, fields in enumerate(found):
        [entry] = one(first + i, ledger=1, **fields)
        unpacked = unpack(entry, None, lambda *_: None, 1 << 20)
        assert unpacked is not None
        builder.add(unpacked, None)
    return builder.build()


@pytest.mark.slow
@effort(
    max_examples=examples(300),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to make an example smaller takes minutes
)
@given(
    st.lists(ROW, min_size=1, max_size=4),
    st.lists(MESSAGE, min_size=1, max_size=4),
    st.lists(ITEM, max_size=4),
    st.lists(ORDER, max_size=4),
    st.booleans(),
)
def test_no_row_and_no_command_stops_its_neighbours(
    rows: list[dict[str, Any]],
    sent: list[dict[str, Any]],
    imported: list[dict[str, Any]],
    orders: list[tuple[str, int, int, int]],
    is_lost: bool,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        service = Service(Path(folder))
        service.is_contained = True
        # By the tables, as an import or an earlier version left them.
        planted = [
            messages([(1, PLANTED + i, row.get("deliver_at", DUE))], **{**row, "properties": row.get("properties", [])})
            for i, row in enumerate(rows)
        ]
        in_tables = pa.concat_tables([*planted, neighbours(BESIDE)])
        service.tables.append("delayed_index", to_index(in_tables, 0), {})
        service.tables.append("entries", entries_of(in_tables), {})
        # By an import from another system.
        import_items(Importer(service.settings, TOPIC), Items(imported))
        service.lose_checkpoint()
        # By the topic.
        service.step(pa.concat_tables([came_in(sent, SENT), neighbours(BESIDE_SENT)]), seals=True)
        for number, (kind, entry, at, bits) in enumerate(orders):
            place = PLANTED + entry if entry < 4 else SENT + entry - 4
            chosen = [b for b in (0, 1) if bits >> b & 1]
            service.step(order=command(f"r{number}", 1, place, chosen, -1, at, kind=kind))
        if is_lost:
            service.lose_checkpoint()
        for _ in range(20):
            effects = service.step(seals=True)
            for release in effects.releases:
                why_unsendable(release.rows.select(MESSAGES.names))
            service.arrive([True], is_written=True)
        beside = [first + i for first in (BESIDE, BESIDE_SENT, BESIDE_IMPORTED) for i in range(N)]
        for name in NAMES:
            for entry in beside:
                assert service.numbers(name, entry) == [None], (name, entry)
        # By a retry of each by its id, from the tables: a neighbour's comes.
        for place in (*range(PLANTED, PLANTED + 4), *range(SENT, SENT + 4), BESIDE):
            service.order(RETRY, place, (0,))
        for _ in range(15):  # the backoff is ten seconds
            effects = service.step(seals=True)
            for release in effects.releases:
                why_unsendable(release.rows.select(MESSAGES.names))
            service.arrive([True], is_written=True)
        for entry in beside:
            assert service.numbers(NAMES[0], entry) == [None] * (2 if entry == BESIDE else 1), entry
            assert service.numbers(NAMES[1], entry) == [None], entry


@effort(max_examples=examples(2_000), deadline=None)
@given(st.lists(st.binary(max_size=60) | st.builds(lambda **of: ControlCommand(**of).SerializeToString(),
       request_id=WORDS, topic=WORDS | st.just(TOPIC), subscriptions=st.lists(WORDS, max_size=3), issued_by=WORDS,
       issued_at=NUMBERS), max_size=4))  # fmt: skip
def test_no_bytes_on_the_control_topic_raise_an_error(payloads: list[bytes]) -> None:
    rows = pa.concat_tables(
        [MESSAGES.empty_table(), *(messages([(9, i, 0)], payload=payload) for i, payload in enumerate(payloads))]
    )
    decoded = decode(rows, {TOPIC: [SubscriptionRule(name, False) for name in NAMES]})
    assert decoded.rejects.num_rows <= len(payloads)
