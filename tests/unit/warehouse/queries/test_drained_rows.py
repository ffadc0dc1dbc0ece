"""What goes out first, of what is parked for a subscription."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from tests.support.tracker.messages import TOPIC, messages
from tracker.message_state.changes import HELD_DELIVER_AT
from tracker.message_state.parking import Round
from tracker.messages import MESSAGES, concat, typed, with_columns
from tracker.schemas import CANCEL_ROWS
from warehouse.delta.tables import Tables
from warehouse.queries import drained_rows
from warehouse.queries.drained_rows import Limits, find_first_held, first_rounds, next_rounds
from warehouse.queries.index_rows import cancels_to_index, to_index

MIB = 1 << 20


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    made = Tables(f"file:{tmp_path}")
    made.create()
    return made


def park(
    tables: Tables,
    name: str,
    dues: dict[int, int | None],
    sequence: int = 5,
    size: int = 1,
    topic: str = TOPIC,
    properties: Sequence[tuple[str, str]] = (),
) -> None:
    """Seals parked messages, by entry when they were due; their sequences rise."""
    own = {"payload": b"x" * size, "subscription": name, "topic": topic, "properties": list(properties)}
    rows = messages([(1, entry, HELD_DELIVER_AT) for entry in dues], **own)
    sequences = pa.array(range(sequence, sequence + len(dues)))
    rows = with_columns(rows, was_due=pa.array(dues.values(), pa.int64()), sequence=sequences)
    tables.append("delayed_index", to_index(rows, 1), {})


def move_on(tables: Tables, name: str, entries: list[int], sequence: int = 1_000) -> None:
    """Seals that parked messages were moved to another time."""
    move = messages([(1, entry, HELD_DELIVER_AT) for entry in entries], subscription=name, sequence=sequence)
    values = {n: move[n] for n in CANCEL_ROWS.names if n in move.column_names}
    rows = typed(values | {"operation": pa.array(["MOVE"] * len(entries))}, CANCEL_ROWS)
    tables.append("delayed_index", cancels_to_index(rows, 2), {})


def test_the_first_come_in_order_also_of_those_due_at_one_time_and_without_those_that_moved_on(tables: Tables) -> None:
    park(tables, "a", {0: 30, 1: 10, 2: 20, 3: 20, 4: 20, 5: 5})
    park(tables, "b", {7: 1})
    tables.append("delayed_index", to_index(messages([(1, 9, 1)]), 1), {})  # one that is not held back
    move_on(tables, "a", [5])
    version = tables.version("delayed_index")
    park(tables, "a", {8: 1})

    def first(most: int) -> tuple[list[int], Round]:
        found, one = find_first_held(tables, version, TOPIC, "a", Limits(most))
        assert found.schema == MESSAGES
        assert concat([found])["payload"].to_pylist() == [b"x"] * found.num_rows
        return found["entry_id"].to_pylist(), one

    assert first(3) == ([1, 2, 3], Round(20, 2, 2))
    assert first(5) == ([1, 2, 3, 4, 0], Round())
    assert first(100) == ([1, 2, 3, 4, 0], Round())
    assert find_first_held(tables, version, TOPIC, "c", Limits(3))[1] == Round()


def test_a_round_is_bounded_in_bytes_and_has_one_message_at_least(tables: Tables) -> None:
    for entry, (due, size) in enumerate([(10, 10 * MIB), (20, 5 * MIB), (30, 5 * MIB), (None, 1)]):
        park(tables, "a", {entry: due}, size=size)
    found, one = find_first_held(tables, tables.version("delayed_index"), TOPIC, "a", Limits())
    assert (found["entry_id"].to_pylist(), one) == ([0, 1], Round(20, 2, 5 * MIB + 1))
    park(tables, "b", {0: None}, size=17 * MIB)
    found, one = find_first_held(tables, tables.version("delayed_index"), TOPIC, "b", Limits())
    assert (found["entry_id"].to_pylist(), one) == ([0], Round())


def test_of_many_due_at_one_instant_a_round_reads_its_own_alone(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    for start in range(0, 60, 10):
        park(tables, "a", dict.fromkeys(range(start, start + 10), 7), sequence=start + 1, size=100)
    read: list[int] = []
    query = Tables.query

    def noted(self: Tables, name: str, sql: str, version: int | None = None) -> pa.Table:
        rows = query(self, name, sql, version)
        read.append(rows.num_rows if "payload" in rows.column_names else 0)
        return rows

    monkeypatch.setattr(Tables, "query", noted)
    came: list[int] = []
    for n in range(4):
        found, one = find_first_held(
            tables, tables.version("delayed_index"), TOPIC, "a", Limits(17, since=7 if n else 0)
        )
        entries = found["entry_id"].to_pylist()
        left = 60 - 17 * (n + 1)
        assert one == (Round(7, left, 100 * left) if n < 3 else Round())
        move_on(tables, "a", entries)
        came += entries
    assert came == list(range(60))
    assert max(read) == 17


def test_those_that_have_gone_out_are_passed_however_many_they_are(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drained_rows, "_LEAST_PLACES", 4)
    park(tables, "a", {entry: 10 + entry for entry in range(100)})
    move_on(tables, "a", list(range(95)))
    version = tables.version("delayed_index")
    for since in (0, 100):
        found, one = find_first_held(tables, version, TOPIC, "a", Limits(2, since=since))
        assert (found["entry_id"].to_pylist(), one) == ([95, 96], Round(106, 3, 3))


def test_subscriptions_that_are_resumed_together_share_a_round(tables: Tables) -> None:
    names = [f"s{n:02}" for n in range(12)]
    for name in names[:11]:
        park(tables, name, {entry: entry for entry in range(10)}, size=MIB)
    rows, rounds = first_rounds(tables, tables.version("delayed_index"), [(TOPIC, name) for name in names])
    assert rows.num_rows == 16  # 16 MiB
    assert [rounds[TOPIC][name] for name in names] == [
        *[Round(1, 8, 8 * MIB)] * 8,
        *[Round(0, 10, 10 * MIB)] * 3,
        Round(),
    ]
    drains = {TOPIC: {"s09": 5, "s10": 100}}
    rows, rounds = next_rounds(tables, tables.version("delayed_index"), drains, {TOPIC: {"s09": 0}})
    assert rounds == {TOPIC: {"s09": Round(4, 5, 5 * MIB), "s10": Round(7, 2, 2 * MIB)}}
    assert rows.num_rows == 13


def test_topics_have_their_own(tables: Tables) -> None:
    park(tables, "a", {0: 1})
    park(tables, "a", {1: 2}, topic="other")
    version = tables.version("delayed_index")
    rows, rounds = first_rounds(tables, version, [("other", "a"), ("another", "a")])
    assert (rows["entry_id"].to_pylist(), rounds) == ([1], {"other": {"a": Round()}, "another": {"a": Round()}})
    assert first_rounds(tables, version, [])[0].num_rows == 0


def test_a_move_to_its_own_row_is_none_and_nor_is_one_of_another_subscription(tables: Tables) -> None:
    park(tables, "a", {0: 1, 1: 1, 2: 1})
    move_on(tables, "a", [0], sequence=5)
    move_on(tables, "a", [1], sequence=7)
    move_on(tables, "b", [2], sequence=9)
    found, _ = find_first_held(tables, tables.version("delayed_index"), TOPIC, "a", Limits())
    assert found["entry_id"].to_pylist() == [0, 2]


def test_properties_count_in_a_round(tables: Tables) -> None:
    park(tables, "a", {entry: entry for entry in range(40)}, size=10, properties=[("name", "x" * MIB)])
    version = tables.version("delayed_index")
    rows, one = find_first_held(tables, version, TOPIC, "a", Limits(n_bytes=5 * MIB))
    assert (rows["entry_id"].to_pylist(), one) == ([0, 1, 2, 3], Round(3, 36, 360))
    assert rows["properties"][0].as_py() == [("name", "x" * MIB)]
