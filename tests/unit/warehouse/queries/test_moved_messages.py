"""A message that was moved for several subscriptions has a row for each of them, and is listed once."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fuzzing.examples import examples
from tests.support.tracker.messages import TOPIC, messages
from tests.support.warehouse.waiting import NOW, SUBSCRIPTIONS, Warehouse
from tracker.message_state.changes import HELD_DELIVER_AT
from warehouse.queries.listing import PendingMessage, State
from warehouse.schemas import DELAYED_INDEX

pytestmark = pytest.mark.slow

Waits = tuple[int, int, tuple[str, ...]]


def move(warehouse: Warehouse, moves: list[tuple[str, int, int]], first: int = 1, **columns: Any) -> None:
    """Moves messages: for each (subscription, entry id, new time) the rows that the job writes."""
    rows = []
    for sequence, (subscription, entry, at) in enumerate(moves, first):
        own = {"topic": TOPIC, "partition": -1, "ledger_id": 1, "entry_id": entry, "batch_index": -1, "batch_size": 1}
        own |= {"subscription": subscription, "sequence": sequence, "deliver_at": at, **columns}
        own |= {"event_time": 0, "publish_time": NOW, "producer_name": "p"}
        rows += [{**own, "operation": "MOVE", "deliver_at": max(at, NOW + 900_000)}, {**own, "operation": "DELAY"}]
    warehouse.tables.append("delayed_index", pa.Table.from_pylist(rows, DELAYED_INDEX), {"moves": first})


def waits(found: list[PendingMessage]) -> list[Waits]:
    return [(m.deliver_at, m.ref.entry_id, m.subscriptions) for m in found]


@pytest.mark.parametrize("limit", range(1, 6))
def test_it_is_listed_once_also_where_a_page_ends_between_its_rows(tmp_path: Path, limit: int) -> None:
    warehouse = Warehouse(tmp_path)
    warehouse.seal(messages([(1, entry, NOW + 1_000) for entry in range(4)]))
    move(warehouse, [(name, entry, NOW + 5_000) for entry in (1, 2) for name in ("b", "a")])
    move(warehouse, [("b", 3, NOW + 5_000)], 9)
    assert waits(warehouse.listed(limit)) == [
        (NOW + 1_000, 0, ("a", "b")),
        (NOW + 1_000, 3, ("a",)),
        (NOW + 5_000, 1, ("a", "b")),
        (NOW + 5_000, 2, ("a", "b")),
        (NOW + 5_000, 3, ("b",)),
    ]
    assert waits(warehouse.listed(limit, subscription="b"))[1:] == [(NOW + 5_000, n, ("b",)) for n in (1, 2, 3)]


def test_one_that_is_moved_to_where_it_is_stays_one(tmp_path: Path) -> None:
    warehouse = Warehouse(tmp_path)
    warehouse.seal(messages([(1, 0, NOW + 1_000)], publish_time=NOW, producer_name="p"))
    move(warehouse, [("a", 0, NOW + 1_000)])
    assert waits(warehouse.listed()) == [(NOW + 1_000, 0, ("a", "b"))]


def test_what_is_held_back_for_both_is_one_and_retries_that_differ_are_two(tmp_path: Path) -> None:
    warehouse = Warehouse(tmp_path)
    move(warehouse, [("b", 0, HELD_DELIVER_AT), ("a", 0, HELD_DELIVER_AT)])
    move(warehouse, [("a", 1, NOW + 7)], 5, attempt=1)
    move(warehouse, [("b", 1, NOW + 7)], 6, attempt=2)
    assert waits(warehouse.listed(1, state=State.HELD)) == [(HELD_DELIVER_AT, 0, ("a", "b"))]
    retries = warehouse.listed(1)[:2]
    assert [(m.subscriptions, m.attempt) for m in retries] == [(("a",), 1), (("b",), 2)]


def test_a_page_of_moved_messages_alone_is_read_in_few_queries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warehouse = Warehouse(tmp_path)
    move(warehouse, [(name, entry, NOW + 5_000) for entry in range(300) for name in SUBSCRIPTIONS])
    pending = warehouse.pending()
    read = []
    rows = pending._rows
    monkeypatch.setattr(pending, "_rows", lambda *asked: read.append(asked[0]) or rows(*asked))  # type: ignore[func-returns-value]
    page = pending.page(100)
    assert len(page.messages) == 100
    assert page.cursor
    assert len(read) == 2


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 7))
def test_as_a_naive_model_has_it(seed: int, limit: int) -> None:
    chance = random.Random(seed)
    times = [NOW + 1_000, NOW + 1_001, NOW + 1_002, HELD_DELIVER_AT]
    sealed = {entry: chance.choice(times[:3]) for entry in range(chance.randint(0, 9))}
    due = {(name, entry): at for entry, at in sealed.items() for name in SUBSCRIPTIONS}
    moves = []
    for _ in range(chance.randint(0, 20) if sealed else 0):
        entry, at = chance.choice(list(sealed)), chance.choice(times)
        for name in chance.sample(SUBSCRIPTIONS, chance.randint(1, 2)):
            moves.append((name, entry, at))
            due[name, entry] = at
    expected = sorted(
        {(at, entry, tuple(n for n in SUBSCRIPTIONS if due[n, entry] == at)) for (_, entry), at in due.items()}
    )
    with tempfile.TemporaryDirectory() as folder:
        warehouse = Warehouse(Path(folder))
        warehouse.seal(messages([(1, *row) for row in sealed.items()], publish_time=NOW, producer_name="p"))
        if moves:
            move(warehouse, moves)
        assert waits(warehouse.listed(limit)) == expected
