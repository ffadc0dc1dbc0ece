"""Which subscriptions are paused: a pause that was forgotten holds messages back without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from admin.monitoring.metrics import WarehouseCollector
from tests.support.warehouse.schedule_tables import TOPIC, ScheduleTables
from warehouse.queries.paused import paused_subscriptions

pytestmark = pytest.mark.slow


def test_the_last_pause_change_of_a_subscription_counts(tmp_path: Path) -> None:
    tables = ScheduleTables(tmp_path)
    assert paused_subscriptions(f"file:{tmp_path}/none") == set()
    assert paused_subscriptions(tables.settings.warehouse) == set()
    for sequence, operation, name in ((5, "RESUME", "b"), (2, "PAUSE", "a"), (1, "PAUSE", "b"), (3, "PAUSE", "*")):
        tables.commanded(operation, name, 0, sequence)
    assert paused_subscriptions(tables.settings.warehouse) == {(TOPIC, "a"), (TOPIC, "*")}
    assert paused_subscriptions(tables.settings.warehouse, TOPIC) == {(TOPIC, "a"), (TOPIC, "*")}
    assert paused_subscriptions(tables.settings.warehouse, f"{TOPIC}-other") == set()


def test_the_metric_tells_of_the_settings_subscriptions(tmp_path: Path) -> None:
    tables = ScheduleTables(tmp_path)
    for name in ("a", "gone"):
        tables.commanded("PAUSE", name, 0, 1)
    [metric] = [m for m in WarehouseCollector(tables.settings).collect() if m.name == "delaylake_paused"]
    assert {s.labels["subscription"]: s.value for s in metric.samples} == {"a": 1, "b": 0}
