"""Beside the job the tables are maintained where that may find something to do; else no process starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.settings import Settings
from jobs.background_maintenance import BackgroundMaintenance
from tests.support.service.harness import wait_until
from tests.support.warehouse.tables import DAY, HOUR, NOW, bucket, make
from warehouse.delta.tables import Tables


class Counted(BackgroundMaintenance):
    """Counts the processes that it would start.

    Attributes:
        runs: the options of each process.
        status: the exit status of each.
        looks: how often it has looked at the tables.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.runs: list[list[str]] = []
        self.status = 0
        self.looks = 0

    def _maintain(self, options: list[str]) -> tuple[int, str]:
        self.runs.append(options)
        return self.status, ""

    def _newest_commits(self) -> dict[str, int] | None:
        self.looks += 1
        return super()._newest_commits()

    def look(self, times: int) -> None:
        """Waits until it has looked at the tables so often again, and has done what follows from it."""
        until = self.looks + times + 1
        wait_until(lambda: self.looks >= until, 10, "looks at the tables")


@pytest.fixture
def made(tmp_path: Path) -> tuple[Settings, Tables]:
    settings, tables = make(tmp_path)
    intervals = settings.maintain.model_copy(update={"interval_millis": 5, "retention_interval_millis": HOUR})
    return settings.model_copy(update={"maintain": intervals}), tables


def test_a_process_starts_only_when_a_table_has_changed(made: tuple[Settings, Tables]) -> None:
    settings, tables = made
    with Counted(settings) as maintenance:
        maintenance.look(5)
        assert maintenance.runs == [[]], "the first one removes old rows, too"
        tables.append("delayed_index", bucket(1, 3, NOW + DAY, DAY), {"job": 1})
        maintenance.look(5)
        assert maintenance.runs == [[], ["--merges-only"]]


def test_a_process_that_has_failed_is_tried_again(made: tuple[Settings, Tables]) -> None:
    with Counted(made[0]) as maintenance:
        maintenance.status = 1
        maintenance.look(5)
        assert len(maintenance.runs) >= 4


def test_old_rows_are_removed_in_time_also_where_no_table_has_changed(made: tuple[Settings, Tables]) -> None:
    settings, _ = made
    intervals = settings.maintain.model_copy(update={"retention_interval_millis": 0})
    with Counted(settings.model_copy(update={"maintain": intervals})) as maintenance:
        maintenance.look(5)
        assert len(maintenance.runs) >= 4
        assert set(map(tuple, maintenance.runs)) == {()}


def test_a_warehouse_that_can_not_be_read_is_left_to_the_process_which_says_so(
    made: tuple[Settings, Tables], tmp_path: Path
) -> None:
    settings, _ = made
    (tmp_path / "warehouse" / "entries" / "_delta_log").rename(tmp_path / "log")
    (tmp_path / "warehouse" / "entries" / "_delta_log").touch()
    with Counted(settings) as maintenance:
        maintenance.look(5)
        assert len(maintenance.runs) >= 4
