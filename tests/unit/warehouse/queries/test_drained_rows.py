"""What a slow destination gets first, of what is held back for it."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from tests.support.tracker.messages import TOPIC, messages
from tracker.message_state.changes import HELD_DELIVER_AT
from tracker.messages import MESSAGES, concat, typed, with_columns
from tracker.schemas import CANCEL_ROWS
from warehouse.delta.tables import Tables
from warehouse.queries.drained_rows import find_first_held
from warehouse.queries.index_rows import cancels_to_index, to_index


def test_the_first_come_in_order_also_of_those_due_at_one_time_and_without_those_that_moved_on(tmp_path: Path) -> None:
    tables = Tables(f"file:{tmp_path}")
    tables.create()

    def hold(name: str, dues: dict[int, int], sequence: int = 5) -> None:
        rows = messages([(1, entry, HELD_DELIVER_AT) for entry in dues], payload=b"x", subscription=name)
        columns = {"was_due": pa.array(dues.values(), pa.int64()), "sequence": pa.array([sequence] * len(dues))}
        tables.append("delayed_index", to_index(with_columns(rows, **columns), 1), {})

    dues = {0: 30, 1: 10, 2: 20, 3: 20, 4: 20, 5: 5}
    hold("a", dues)
    hold("b", {7: 1})
    tables.append("delayed_index", to_index(messages([(1, 9, 1)]), 1), {})  # one that is not held back
    move = messages([(1, 5, HELD_DELIVER_AT)], subscription="a", sequence=6)
    values = {n: move[n] for n in CANCEL_ROWS.names if n in move.column_names}
    rows = typed(values | {"operation": pa.array(["MOVE"])}, CANCEL_ROWS)
    tables.append("delayed_index", cancels_to_index(rows, 2), {})
    version = tables.version("delayed_index")
    hold("a", {8: 1})

    def first(most: int) -> tuple[list[int], int | None]:
        found, until = find_first_held(tables, version, TOPIC, "a", most)
        assert found.schema == MESSAGES
        assert concat([found])["payload"].to_pylist() == [b"x"] * found.num_rows
        return found["entry_id"].to_pylist(), until

    assert first(3) == ([1, 2, 3], 20)
    assert first(5) == ([1, 2, 3, 4, 0], None)
    assert first(100) == ([1, 2, 3, 4, 0], None)
    assert find_first_held(tables, version, TOPIC, "c", 3)[1] is None


def test_a_round_is_bounded_in_bytes_and_has_one_message_at_least(tmp_path: Path) -> None:
    tables = Tables(f"file:{tmp_path}")
    tables.create()
    for entry, (due, size) in enumerate([(10, 10 << 20), (20, 5 << 20), (30, 5 << 20), (None, 1)]):
        rows = messages([(1, entry, HELD_DELIVER_AT)], payload=b"x" * size, subscription="a")
        columns = {"was_due": pa.array([due], pa.int64()), "sequence": pa.array([5])}
        tables.append("delayed_index", to_index(with_columns(rows, **columns), 1), {})
    version = tables.version("delayed_index")
    found, until = find_first_held(tables, version, TOPIC, "a", 100)
    assert (found["entry_id"].to_pylist(), until) == ([0, 1], 20)
    large = messages([(2, 0, HELD_DELIVER_AT)], payload=b"x" * (17 << 20), subscription="b")
    columns = {"was_due": pa.array([None], pa.int64()), "sequence": pa.array([5])}
    tables.append("delayed_index", to_index(with_columns(large, **columns), 1), {})
    found, until = find_first_held(tables, tables.version("delayed_index"), TOPIC, "b", 100)
    assert (found["entry_id"].to_pylist(), until) == ([0], None)
