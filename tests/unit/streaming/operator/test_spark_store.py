"""Large values of the state: they pass through Spark in parts."""

from __future__ import annotations

from typing import Any

import pytest

import streaming.operator.spark_store
from streaming.operator.spark_store import SparkStore


class MapState:
    """Spark's map state, and the largest value that passed through it."""

    def __init__(self) -> None:
        self.values: dict[Any, bytes] = {}
        self.calls = 0

    def getValue(self, key: Any) -> Any:
        self.calls += 1
        return (self.values[key],) if key in self.values else None

    def updateValue(self, key: Any, value: Any) -> None:
        self.values[key] = bytes(value[0])

    def removeKey(self, key: Any) -> None:
        self.values.pop(key, None)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming.operator.spark_store, "PART_BYTES", 10)


def test_a_large_value_is_in_parts_and_comes_back_whole() -> None:
    state = MapState()
    SparkStore(state).put("slots", (3, 1), b"0123456789" * 3 + b"end")
    assert max(map(len, state.values.values())) <= 40
    assert [len(v) for k, v in state.values.items() if k[0] == "slots/1"] == [10, 10, 10, 3]
    assert SparkStore(state).get("slots", (3, 1)) == b"0123456789" * 3 + b"end"
    assert SparkStore(state).get("slots", (3, 2)) is None


def test_nothing_is_left_of_a_large_value_that_is_removed_or_gets_smaller() -> None:
    state = MapState()
    SparkStore(state).put("slots", (3, 1), b"x" * 35)
    SparkStore(state).put("slots", (4, 1), b"y" * 25)
    SparkStore(state).put("slots", (3, 1), b"x" * 15)
    SparkStore(state).put("slots", (4, 1), b"y")
    assert SparkStore(state).get("slots", (3, 1)) == b"x" * 15
    assert state.values.pop(("slots", 4, 1)) == b"y"
    SparkStore(state).remove("slots", (3, 1))
    assert state.values == {}


def test_a_value_that_grows_large_replaces_the_small_one() -> None:
    state = MapState()
    SparkStore(state).put("slots", (3, 1), b"small")
    SparkStore(state).put("slots", (3, 1), b"z" * 11)
    assert ("slots", 3, 1) not in state.values
    assert SparkStore(state).get("slots", (3, 1)) == b"z" * 11


def test_small_values_cost_one_question_more_a_batch() -> None:
    state = MapState()
    store = SparkStore(state)
    for i in range(5):
        store.put("slots", (i, 0), b"small")
    assert [store.get("slots", (i, 1)) for i in range(3)] == [None] * 3
    assert state.calls == 4


def test_it_knows_the_files_to_which_its_values_refer_also_in_the_next_batch() -> None:
    state = MapState()
    store = SparkStore(state)
    store.put("slots", (1, 0), b"small", ["4-a", "4-b"])
    store.put("slots", (2, 0), b"x" * 15, ["4-b"])
    store.put("slots", (3, 0), b"none")
    assert store.files == SparkStore(state).files == {"4-a", "4-b"}
    again = SparkStore(state)
    again.remove("slots", (1, 0))
    again.put("slots", (2, 0), b"y" * 12, ["5-c"])
    assert again.files == SparkStore(state).files == {"5-c"}
    assert SparkStore(state).get("slots", (2, 0)) == b"y" * 12
    again.put("slots", (2, 0), b"y")
    assert SparkStore(state).files == set()
    assert list(state.values) == [("slots", 3, 0), ("slots", 2, 0)]


def test_parts_that_an_earlier_version_has_noted_are_read() -> None:
    state = MapState()
    state.values = {
        ("parted", 0, 0): b'[["slots", 3, 1, 2]]',
        ("slots/1", 3, 0): b"0123456789",
        ("slots/1", 3, 1): b"x",
    }
    assert SparkStore(state).get("slots", (3, 1)) == b"0123456789x"
    assert SparkStore(state).files == set()
