"""When Pulsar itself would deliver messages, and what of a gap a subscription has acknowledged."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from broker.entries.continuity import Gap, missing_ranges, positions_in
from broker.position import Position
from broker.pulsar_admin.admin_connection import AdminConnection
from broker.pulsar_admin.admin_rest import AdminClient, UnreadableEntryError
from broker.pulsar_admin.answers import BrokerEntry
from conf.settings import PulsarSettings
from recovery.importing.native_delays import not_acknowledged, with_native_times
from tests.support.tracker.messages import messages
from tracker.messages import with_columns

NOW = 1_800_000_000_000


class FakeAdmin:
    """Tells a time for the entries of some messages; asked about those of others it fails."""

    def __init__(self, times: dict[int, Any]) -> None:
        self.times = times

    def entry_metadata(self, topic: str, ledger_id: int, entry_id: int) -> BrokerEntry | None:
        answer = self.times[entry_id]
        if answer == "not told":
            raise UnreadableEntryError("no")
        if answer == "gone":
            return None
        return BrokerEntry(1, 1, None, None, {}, False, False, False, deliver_at=answer)


def test_only_messages_without_a_time_of_their_own_are_asked_for() -> None:
    admin: Any = FakeAdmin(
        {0: NOW + 5, 1: None, 5: "not told", 6: "gone", 7: NOW + 2_000, 8: 253_402_300_800_000, 9: NOW + 1_000}
    )
    rows = messages([(5, entry, NOW) for entry in range(10)])
    properties: list[Any] = [[] for _ in range(10)]
    properties[0] = [("colour", "red")]
    properties[2] = [("deliverAt", "1")]
    properties[3] = [("deliverAfter", "1")]
    given = with_columns(
        rows,
        properties=pa.array(properties, rows.schema.field("properties").type),
        reason=pa.array([None] * 4 + ["wrong"] + [None] * 5, pa.string()),
        publish_time=pa.array([NOW] * 10, pa.int64()),
    )
    found = with_native_times(given, admin, "t", 1_000)
    assert found.schema == given.schema
    assert found["deliver_at"].to_pylist() == [NOW + 5, *[NOW] * 8, NOW + 1_000]
    assert found["reason"].to_pylist() == [
        *[None] * 4,
        "wrong",
        "the broker does not tell when it is due, as of a message with many properties",
        None,
        "Exceeds max allowed delivery delay of 1000 milliseconds",
        "its native deliverAt is beyond the year 9999",
        None,
    ]


def test_messages_of_batches_are_not_asked_for() -> None:
    of_batch = with_columns(messages([(5, 0, NOW)]), batch_index=pa.array([0], pa.int32()))
    admin: Any = FakeAdmin({})
    assert with_native_times(of_batch, admin, "t", 0) == of_batch


@given(
    st.lists(st.integers(0, 12), min_size=2, max_size=2, unique=True),
    st.sets(st.integers(0, 12)),
    st.integers(1, 12),
)
def test_of_a_gap_just_what_was_not_acknowledged_is_left(ends: list[int], acknowledged: set[int], cut: int) -> None:
    """Against a plain set of entries, over two ledgers that meet at `cut`."""

    def at(i: int) -> Position:
        return Position(5, i) if i < cut else Position(6, i - cut)

    ledgers = {5: cut, 6: 13 - cut}
    first, last = at(min(ends)), at(max(ends))
    before_first = Position(first.ledger_id, first.entry_id - 1)
    ranges = [(Position(at(i).ledger_id, at(i).entry_id - 1), at(i)) for i in sorted(acknowledged)]
    gaps = not_acknowledged([Gap(before_first, last)], ranges)
    left = [position for gap in gaps for position in positions_in(missing_ranges(gap, ledgers))]
    assert left == [at(i) for i in range(min(ends), max(ends)) if i not in acknowledged]


def test_ranges_are_read_as_the_broker_writes_them(monkeypatch: Any) -> None:
    class Response:
        status_code = 200

        def json(self) -> Any:
            cursor = {"individuallyDeletedMessages": "[(8:-1..8:0],(7:1..7:4],[9:1..9:3)]"}
            return {"cursors": {"s": cursor, "none": {"individuallyDeletedMessages": "[]"}}}

    monkeypatch.setattr(AdminConnection, "request", lambda *_: Response())
    with AdminClient(PulsarSettings()) as admin:
        found = admin.individually_acknowledged("persistent://a/b/c", "s")
        assert found == [((7, 1), (7, 4)), ((8, -1), (8, 0)), ((9, 0), (9, 2))]
        assert admin.individually_acknowledged("persistent://a/b/c", "none") == []
        assert admin.individually_acknowledged("persistent://a/b/c", "other") == []
