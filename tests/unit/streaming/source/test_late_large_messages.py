"""Large messages that are late because they wait for room have an alert."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from status.alerts import LARGE_LATE, Alerts
from streaming.checkpoint.offset import Offset
from streaming.source.late_large_messages import LATE_MILLIS, LateLargeMessages
from tests.support.tracker.messages import TOPIC, messages
from tracker.buckets.large_rows import LargeRows, LargeRule
from tracker.messages import concat
from tracker.packing import LARGE_BYTES
from warehouse.delta.tables import Tables
from warehouse.queries.index_rows import to_index

DUE = 1_790_000_000_000
OTHER = "persistent://public/default/other"
SMALL = "persistent://public/default/small"
RULE = LargeRule(LARGE_BYTES, is_whole=True)


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    tables = Tables(f"file:{tmp_path}")
    tables.create()
    rows = [
        messages([(1, e, DUE + e) for e in range(5)], payload=b"x" * (1 << 20)),
        messages([(2, 0, DUE + 9_000)], payload=b"x" * LARGE_BYTES, topic=OTHER),
        messages([(3, 0, DUE)], payload=b"small", topic=SMALL),
    ]
    tables.append("delayed_index", to_index(concat(rows), 1), {})
    return tables


def offset(tables: Tables, now: int, after: tuple[int, int, int] | None) -> Offset:
    version = tables.version("delayed_index")
    return Offset(now=now, index_version=version, load_horizon=DUE + 60_000, large=LargeRows(RULE, after).to_json())


def named(alerts: Alerts) -> dict[str, tuple[int, str]]:
    return {one.name: (one.since, one.text) for one in alerts.current() if one.kind == LARGE_LATE}


def test_a_topic_is_named_once_its_messages_are_late_and_no_more_when_all_are_loaded(tables: Tables) -> None:
    alerts = Alerts()
    late = LateLargeMessages(tables, alerts)
    after = DUE + 1, 1, 1  # the first two are loaded
    late.look(offset(tables, DUE + LATE_MILLIS, after))
    assert not named(alerts), "the first that waits has not been due for long"
    late.look(offset(tables, DUE + LATE_MILLIS + 5_000, after))
    text = "3 large messages that are due wait for room, 3 MiB"
    assert named(alerts) == {TOPIC: (DUE + 2, text)}, "small ones, and those of a moment ago, are not named"
    after = DUE + 3, 1, 3
    late.look(offset(tables, DUE + 2 * LATE_MILLIS, after))
    assert named(alerts) == {
        TOPIC: (DUE + 2, "1 large messages that are due wait for room, 1 MiB"),
        OTHER: (DUE + 9_000, "1 large messages that are due wait for room, 1 MiB"),
    }
    late.look(offset(tables, DUE + 3 * LATE_MILLIS, (DUE + 4, 1, 4)))
    assert named(alerts).keys() == {OTHER}
    late.look(offset(tables, DUE + 3 * LATE_MILLIS + 200, None))
    assert not named(alerts)


def test_it_looks_again_after_the_clock_was_set_back(tables: Tables) -> None:
    alerts = Alerts()
    late = LateLargeMessages(tables, alerts)
    waiting = offset(tables, DUE + 3 * LATE_MILLIS, (DUE + 1, 1, 1))
    late.look(waiting)
    assert named(alerts)
    late.look(replace(waiting, now=DUE))
    assert not named(alerts)
