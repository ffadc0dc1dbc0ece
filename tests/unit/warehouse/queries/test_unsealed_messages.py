"""Messages that are in no table yet, beside those of the delayed index: each once, and none that a table knows of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from broker.entries.message_ids import MessageRef
from conf.settings import Settings
from tests.support.tracker.messages import messages
from tests.support.warehouse.waiting import NOW, Warehouse
from warehouse.queries.listing import PendingFilter, PendingMessage, State
from warehouse.queries.pending_messages import Pending
from warehouse.queries.unsealed_messages import Unacknowledged, UnacknowledgedReader

TOPIC = "persistent://public/default/t"

pytestmark = pytest.mark.slow


@pytest.fixture
def warehouse(tmp_path: Path) -> Warehouse:
    return Warehouse(tmp_path)


def come_in(*rows: tuple[int, int], key: str | None = None) -> Unacknowledged:
    """Messages of (entry, when it is due) that the source topic still has."""
    return Unacknowledged(
        [PendingMessage(MessageRef(1, entry, -1, -1), due, (), 1, key, None, {}, 0, 0, NOW, "p") for entry, due in rows]
    )


def listed(warehouse: Warehouse, found: Unacknowledged, limit: int = 100, **wanted: Any) -> list[list[int]]:
    """The entries of each page."""
    pages, cursor = [], None
    while True:
        question = Pending(warehouse.settings, TOPIC, PendingFilter.model_validate(wanted), cursor, NOW)
        page = question.page(limit, found)
        pages.append([message.ref.entry_id for message in page.messages])
        if (cursor := page.cursor) is None:
            return pages


def test_they_are_listed_in_order_beside_the_others_and_none_twice(warehouse: Warehouse) -> None:
    warehouse.seal(messages([(1, entry, NOW + 1_000 * entry) for entry in range(1, 8)]))
    found = come_in((3, NOW + 3_000), (10, NOW + 500), (11, NOW + 3_500), (12, NOW + 99_000))
    everything = [10, 1, 2, 3, 11, 4, 5, 6, 7, 12]
    assert listed(warehouse, found) == [everything]
    for limit in range(1, 10):
        pages = listed(warehouse, found, limit)
        assert [entry for page in pages for entry in page] == everything
        assert all(len(page) <= limit for page in pages)


def test_what_the_tables_know_of_is_left_out(warehouse: Warehouse) -> None:
    warehouse.seal(messages([(1, 0, NOW + 90_000)]))
    warehouse.deliver([("a", 1, 1, -1, NOW), ("a", 1, 2, -1, NOW), ("b", 1, 2, -1, NOW)])
    found = come_in((1, NOW), (2, NOW), (3, NOW + 4_000))
    first, second, last = Pending(warehouse.settings, TOPIC, None, None, NOW).page(9, found).messages
    assert (first.ref.entry_id, first.subscriptions, first.is_going_out) == (1, ("b",), True)
    assert (second.ref.entry_id, second.subscriptions, second.is_going_out) == (3, ("a", "b"), False)
    assert last.ref.entry_id == 0


@pytest.mark.parametrize(
    ("wanted", "entries"),
    [
        ({"key": "k"}, [1, 2]),
        ({"key": "other"}, []),
        ({"due_before": NOW + 1_500}, [1]),
        ({"due_from": NOW + 1_500}, [2]),
        ({"ledger_id": 1, "entry_id": 2}, [2]),
        ({"ledger_id": 2}, []),
        ({"properties": {"a": "b"}}, []),
        ({"state": State.CANCELLED}, []),
        ({"state": State.HELD}, []),
        ({"subscription": "b"}, [1, 2]),
    ],
)
def test_a_filter_is_for_them_too(warehouse: Warehouse, wanted: dict[str, Any], entries: Sequence[int]) -> None:
    warehouse.seal(messages([]))
    assert listed(warehouse, come_in((1, NOW + 1_000), (2, NOW + 2_000), key="k"), **wanted) == [list(entries)]


def test_without_a_broker_the_listing_says_what_may_be_missing() -> None:
    nobody = {"service_url": "pulsar://127.0.0.1:1", "admin_url": "http://127.0.0.1:1"}
    settings = Settings.model_validate({"pulsar": nobody})
    found = UnacknowledgedReader(settings).read(TOPIC, None)
    assert not found.messages
    assert found.note.startswith("what came in within the last seconds may be missing: ")
