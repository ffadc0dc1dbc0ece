"""The schedule's histogram: a window that fits what is due, and bars by subscription."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from admin.dashboard import histogram as module
from admin.dashboard.histogram import ALL, FIT, end_of, histogram, width_for
from tests.messages import TOPIC, messages
from tests.unit.warehouse.test_pending import NOW, Warehouse
from tracker.commands.moves import HELD_DELIVER_AT
from warehouse.queries.waiting import Pending

MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000


@pytest.fixture
def warehouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Warehouse:
    """Tables that are asked at NOW."""

    def asked(settings: object, topic: str, wanted: object = None, cursor: None = None, now: int = NOW) -> Pending:
        return Pending(settings, topic, wanted, cursor, now)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "Pending", asked)
    return Warehouse(tmp_path)


def due(warehouse: Warehouse, *delays: int) -> None:
    warehouse.seal(messages([(1, i, NOW + delay) for i, delay in enumerate(delays)]))


@pytest.mark.parametrize(
    ("length", "width"),
    [
        (MINUTE, 1_000),
        (10 * MINUTE, 10_000),
        (30 * MINUTE, 30_000),
        (HOUR, MINUTE),
        (DAY, 15 * MINUTE),
        (7 * DAY, 2 * HOUR),
        (30 * DAY, 12 * HOUR),
        (366 * DAY, 7 * DAY),
        (20_000 * DAY, 224 * DAY),
    ],
)
def test_bars_are_as_long_as_people_count_time(length: int, width: int) -> None:
    assert width_for(length) == width


def test_the_window_has_most_of_what_is_due_and_not_a_few_that_are_far_away(warehouse: Warehouse) -> None:
    due(warehouse, *(i * 1_000 for i in range(1, 100)), 300 * DAY)
    most = histogram(warehouse.settings, TOPIC, None, FIT, None, None)
    assert len(most.starts) * most.width <= 4 * MINUTE
    assert most.width < MINUTE, "few minutes are shown by the second"
    assert (most.counts.sum(axis=0).tolist(), most.n_before, most.n_after) == ([99, 99], 0, 2)
    everything = histogram(warehouse.settings, TOPIC, None, ALL, None, None)
    assert (everything.counts.sum(axis=0).tolist(), everything.n_after) == ([100, 100], 0)
    assert len(everything.starts) <= 101


def test_where_nothing_is_due_the_window_is_a_day() -> None:
    assert end_of(pa.table({"at": pa.array([], pa.int64()), "0": pa.array([], pa.int64())}), NOW, 0.95) == NOW + DAY


def test_each_message_is_in_the_bar_of_its_time_for_each_of_its_subscriptions(warehouse: Warehouse) -> None:
    due(warehouse, 1, 30 * MINUTE, 30 * MINUTE, 59 * MINUTE)
    warehouse.cancel([("b", 1, 1, -1, NOW + 30 * MINUTE)])
    found = histogram(warehouse.settings, TOPIC, None, "hour", None, None)
    assert found.subscriptions == ["a", "b"]
    bars = {
        int(at - NOW // MINUTE * MINUTE) // MINUTE: n
        for at, n in zip(found.starts, found.counts.tolist(), strict=True)
        if sum(n)
    }
    assert bars == {0: [1, 1], 30: [2, 1], 59: [1, 1]}
    assert found.n_after is None, "what comes later is not read"
    only_b = histogram(warehouse.settings, TOPIC, "b", "hour", None, None)
    assert (only_b.subscriptions, int(only_b.counts.sum())) == (["b"], 3)


def test_what_is_due_already_is_going_out_and_what_is_held_back_has_no_bar(warehouse: Warehouse) -> None:
    due(warehouse, -2 * MINUTE, HOUR, HELD_DELIVER_AT - NOW)
    found = histogram(warehouse.settings, TOPIC, None, "day", None, None)
    assert (found.n_before, found.counts.sum(axis=0).tolist()) == (2, [1, 1])


def test_a_window_may_begin_and_end_where_it_is_asked_to(warehouse: Warehouse) -> None:
    due(warehouse, HOUR, 2 * HOUR, 3 * HOUR)
    found = histogram(warehouse.settings, TOPIC, None, FIT, NOW + HOUR + 1, NOW + 3 * HOUR)
    assert (found.width, found.counts.sum(axis=0).tolist(), found.n_before) == (2 * MINUTE, [1, 1], 0)
