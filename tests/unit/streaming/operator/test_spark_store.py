"""The values of a shard in Spark's state: large ones in parts, small ones that each tick reads together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import streaming.operator.spark_store
from streaming.operator.spark_store import SINGLE, SparkStore


class MapState:
    """Spark's map state, and which calls there were."""

    def __init__(self) -> None:
        self.values: dict[Any, bytes] = {}
        self.calls: list[str] = []

    def getValue(self, key: Any) -> Any:
        self.calls.append(f"get {key[0]}")
        return (self.values[key],) if key in self.values else None

    def updateValue(self, key: Any, value: Any) -> None:
        self.calls.append(f"put {key[0]}")
        self.values[key] = bytes(value[0])

    def removeKey(self, key: Any) -> None:
        self.calls.append(f"remove {key[0]}")
        self.values.pop(key, None)


@contextmanager
def batch(state: MapState) -> Iterator[SparkStore]:
    """A batch on a state: a new store, which is saved."""
    yield (store := SparkStore(state))
    store.save()


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming.operator.spark_store, "PART_BYTES", 10)


def test_a_large_value_is_in_parts_and_comes_back_whole() -> None:
    state = MapState()
    with batch(state) as store:
        store.put("slots", (3, 1), b"0123456789" * 3 + b"end")
    assert [len(v) for k, v in state.values.items() if k[0] == "slots/1"] == [10, 10, 10, 3]
    assert SparkStore(state).get("slots", (3, 1)) == b"0123456789" * 3 + b"end"
    assert SparkStore(state).get("slots", (3, 2)) is None


def test_nothing_is_left_of_a_large_value_that_is_removed_or_gets_smaller() -> None:
    state = MapState()
    for key, value in (((3, 1), b"x" * 35), ((4, 1), b"y" * 25), ((3, 1), b"x" * 15), ((4, 1), b"y")):
        with batch(state) as store:
            store.put("slots", key, value)
    assert SparkStore(state).get("slots", (3, 1)) == b"x" * 15
    assert state.values.pop(("slots", 4, 1)) == b"y"
    with batch(state) as store:
        store.remove("slots", (3, 1))
    assert [key[0] for key in state.values] == ["together"]
    assert SparkStore(state).get("slots", (3, 1)) is None


def test_a_value_that_grows_large_replaces_the_small_one() -> None:
    state = MapState()
    for value in (b"small", b"z" * 11):
        with batch(state) as store:
            store.put("slots", (3, 1), value)
    assert ("slots", 3, 1) not in state.values
    assert SparkStore(state).get("slots", (3, 1)) == b"z" * 11


def test_a_batch_reads_what_each_tick_reads_with_one_call_and_writes_it_with_one() -> None:
    state = MapState()
    tables = [f"table{i}" for i in range(5)]
    with batch(state) as store:  # of the first batch nothing is known
        for table in tables:
            assert store.get(table, SINGLE) is None
            store.put(table, SINGLE, table.encode())
        assert store.get("none", SINGLE) is None
    state.calls.clear()
    with batch(state) as store:
        assert [store.get(table, SINGLE) for table in (*tables, "none")] == [*(t.encode() for t in tables), None]
        store.remove("none", SINGLE)
        store.put("table1", SINGLE, b"")
        store.put("table2", SINGLE, b"\n\n")
        store.remove("table3", SINGLE)
    assert state.calls == ["get together", "put together"]
    state.calls.clear()
    with batch(state) as store:
        found = [store.get(table, SINGLE) for table in tables]
        store.put("table0", SINGLE, b"table0")
    assert found == [b"table0", b"", b"\n\n", None, b"table4"]
    assert state.calls == ["get together"]


def test_other_values_cost_their_own_calls_alone() -> None:
    state = MapState()
    with batch(state) as store:
        store.put("slots", (1, 0), b"small")
    state.calls.clear()
    with batch(state) as store:
        assert [store.get("slots", (i, 0)) for i in (1, 1, 2)] == [b"small", b"small", None]
    assert state.calls == ["get together", "get slots", "get slots"]


@pytest.mark.parametrize(
    "sizes", [[3, 20_000, 3], [20_000, 3, 20_000], [20_000, 5_000, None, 5_000], [25, 3, 25, None]]
)
def test_a_single_value_that_grows_and_shrinks_is_there_once(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int | None]
) -> None:
    if max(size or 0 for size in sizes) > 100:
        monkeypatch.setattr(streaming.operator.spark_store, "PART_BYTES", 8_000)
    state = MapState()
    for size in sizes:
        with batch(state) as store:
            if size is None:
                store.remove("control", SINGLE)
            else:
                store.put("control", SINGLE, b"x" * size)
        assert SparkStore(state).get("control", SINGLE) == (None if size is None else b"x" * size)
        own = sum(len(value) for key, value in state.values.items() if key[0] != "together")
        assert own == (size if size and size > 10 else 0)


def test_it_knows_the_files_to_which_its_values_refer_also_in_the_next_batch() -> None:
    state = MapState()
    with batch(state) as store:
        store.put("slots", (1, 0), b"small", ["4-a", "4-b"])
        store.put("slots", (2, 0), b"x" * 15, ["4-b"])
        store.put("slots", (3, 0), b"none")
        store.put("mutable", SINGLE, b"small", ["4-c"])
        assert store.files == {"4-a", "4-b", "4-c"}
    assert SparkStore(state).files == {"4-a", "4-b", "4-c"}
    with batch(state) as store:
        store.remove("slots", (1, 0))
        store.put("slots", (2, 0), b"y" * 12, ["5-c"])
        store.put("mutable", SINGLE, b"small")
        assert store.files == {"5-c"}
    assert SparkStore(state).files == {"5-c"}
    assert SparkStore(state).get("slots", (2, 0)) == b"y" * 12
    with batch(state) as store:
        store.put("slots", (2, 0), b"y")
    assert SparkStore(state).files == set()
    assert [key for key in state.values if key[0] == "slots"] == [("slots", 3, 0), ("slots", 2, 0)]


def test_the_state_of_an_earlier_version_is_read_and_goes_on() -> None:
    state = MapState()
    state.values = {
        ("parted", 0, 0): b'[["slots", 3, 1, 2], ["slots", 4, 0, 0, ["4-a"]], ["waiting", 0, 0, 2]]',
        ("slots/1", 3, 0): b"0123456789",
        ("slots/1", 3, 1): b"x",
        ("slots", 4, 0): b"small",
        ("waiting/0", 0, 0): b"9876543210",
        ("waiting/0", 0, 1): b"y",
        ("tracker", 0, 0): b"{}",
        ("control", 0, 0): b"[]",
    }
    for _ in range(2):
        with batch(state) as store:
            assert store.files == {"4-a"}
            assert store.get("slots", (3, 1)) == b"0123456789x"
            assert store.get("slots", (4, 0)) == b"small"
            assert store.get("waiting", SINGLE) == b"9876543210y"
            assert store.get("tracker", SINGLE) == b"{}"
    with batch(state) as store:  # the other one is not looked at: it stays as it was
        store.put("tracker", SINGLE, b"{1}")
        store.put("waiting", SINGLE, b"z")
    assert [key for key in state.values if key[1:] == (0, 0)] == [("control", 0, 0), ("together", 0, 0)]
    store = SparkStore(state)
    found = [store.get(table, SINGLE) for table in ("tracker", "control", "waiting")]
    assert found == [b"{1}", b"[]", b"z"]
