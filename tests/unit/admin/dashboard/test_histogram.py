"""The schedule's histogram: a window that fits what is due, and bars by subscription."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from admin.dashboard import histogram as module
from admin.dashboard.histogram import ALL, FIT, histogram, width_for
from tests.support.fuzzing.examples import examples
from tests.support.tracker.messages import TOPIC, messages
from tests.support.warehouse.waiting import NOW, Warehouse
from tracker.message_state.changes import HELD_DELIVER_AT
from warehouse.queries.pending_messages import Pending

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


@pytest.mark.slow
def test_the_window_has_most_of_what_is_due_and_not_a_few_that_are_far_away(warehouse: Warehouse) -> None:
    due(warehouse, *(i * 1_000 for i in range(1, 100)), 300 * DAY)
    most = histogram(warehouse.settings, TOPIC, None, FIT, None, None)
    assert len(most.starts) * most.width <= 4 * MINUTE
    assert most.width < MINUTE, "few minutes are shown by the second"
    assert (most.counts.sum(axis=0).tolist(), most.n_before, most.n_after) == ([99, 99], 0, 2)
    everything = histogram(warehouse.settings, TOPIC, None, ALL, None, None)
    assert (everything.counts.sum(axis=0).tolist(), everything.n_after) == ([100, 100], 0)
    assert len(everything.starts) <= 101


def test_where_nothing_is_due_the_window_is_a_day(warehouse: Warehouse) -> None:
    found = histogram(warehouse.settings, TOPIC, None, FIT, None, None)
    assert len(found.starts) * found.width == DAY
    assert (found.counts.sum(), found.n_before, found.n_after) == (0, 0, 0)


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.integers(-5, 60) | st.integers(0, 100 * 24 * 60), max_size=30),
    st.sampled_from([FIT, ALL]),
    st.sampled_from([None, 0, 7 * MINUTE + 2]),
)
def test_the_window_ends_with_the_minute_by_which_most_is_due(minutes: list[int], span: str, start: int | None) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Pending", lambda made, topic, asked, now=NOW: Pending(made, topic, asked, None, now))
        warehouse = Warehouse(Path(folder))
        due(warehouse, *(n * MINUTE + 1 for n in minutes))
        begin = NOW + (start or 0)
        found = histogram(warehouse.settings, TOPIC, None, span, None if start is None else begin, None)
        at = sorted(NOW + n * MINUTE + 1 for n in minutes)
        waiting = [time for time in at if time >= begin]
        part = 0.95 if span == FIT else 1.0
        most = next((n for n in range(1, len(waiting)) if 2 * n >= 2 * len(waiting) * part), len(waiting))
        end = waiting[most - 1] // MINUTE * MINUTE + MINUTE if waiting else begin + DAY
        assert found.starts[-1] < end <= found.starts[-1] + found.width
        assert found.counts.sum(axis=0).tolist() == [sum(time < end for time in waiting)] * 2
        assert found.n_after == 2 * sum(time >= end for time in waiting)


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
