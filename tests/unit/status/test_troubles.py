"""Alerts: noted in one process, told in another, and named by `delaylake status`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from admin.dashboard.overview import _is_of
from conf.settings import Settings
from jobs.cli import app
from jobs.options import GlobalOptions
from status.alerts import NOT_SEEN, NOT_SENT, STANDING, UNWRITABLE, Alert, Alerts
from status.batch_status import BatchStatus
from status.job_status import read_status
from status.metrics import JobCollector
from status.status_writer import StatusWriter
from tests.support.service.batch_counts import COUNTS

ORDERS = "persistent://public/default/orders"


def test_a_trouble_keeps_the_time_since_when_and_has_its_newest_text(monkeypatch: pytest.MonkeyPatch) -> None:
    alerts = Alerts()
    monkeypatch.setattr("time.time_ns", lambda: 5_000_000_000)
    alerts.begin(STANDING, ORDERS, "no\nanswer")
    monkeypatch.setattr("time.time_ns", lambda: 9_000_000_000)
    alerts.begin(STANDING, ORDERS, "not allowed")
    alerts.begin(UNWRITABLE, ORDERS, "full")
    assert alerts.current() == [
        Alert(STANDING, ORDERS, 5_000, "not allowed"),
        Alert(UNWRITABLE, ORDERS, 9_000, "full"),
    ]
    alerts.end(STANDING, ORDERS)
    alerts.end(STANDING, ORDERS)
    assert [t.kind for t in alerts.current()] == [UNWRITABLE]


def test_another_process_reads_them_by_a_file(tmp_path: Path) -> None:
    file = tmp_path / "troubles.json"
    source, driver = Alerts(file), Alerts()
    driver.follow(file)
    assert driver.current() == []
    source.begin(STANDING, ORDERS, "first")
    driver.begin(UNWRITABLE, "d", "full")
    assert {t.kind for t in driver.current()} == {STANDING, UNWRITABLE}
    source.end(STANDING, ORDERS)
    assert {t.kind for t in driver.current()} == {UNWRITABLE}
    driver.follow(tmp_path / "of the next run")
    assert {t.kind for t in driver.current()} == {UNWRITABLE}


def test_entries_not_seen_are_told_until_the_job_ends_also_between_two_runs_of_its_query(
    tmp_path: Path,
) -> None:
    driver = Alerts()
    for number, counted in enumerate((2, 5)):
        file = tmp_path / f"run {number}"
        driver.follow(file)
        source = Alerts(file)
        source.begin(STANDING, ORDERS, "no answer")
        source.begin(NOT_SEEN, ORDERS, "2 entries were not seen", count=counted - 2 * number)
        driver.unfollow()
        file.unlink()
        [one] = driver.current()
        assert (one.kind, one.count) == (NOT_SEEN, counted)


def test_messages_that_were_not_sent_are_counted_as_rejected_and_the_last_is_named(tmp_path: Path) -> None:
    alerts = Alerts()
    alerts.add(NOT_SENT, ORDERS, "1:2:-1:-1 was not delivered to a", 3)
    alerts.add(NOT_SENT, ORDERS, "1:9:-1:-1 was not delivered to a", 1)
    [one] = alerts.current()
    assert (one.count, one.text) == (4, "1:9:-1:-1 was not delivered to a")
    writer = StatusWriter(f"file:{tmp_path}", 1, alerts.current)
    writer.batch(BatchStatus(tick=1, now=1, counts=COUNTS | {"rejected": 2}))
    assert writer.status().rejected == 6


@pytest.fixture
def settings_file(tmp_path: Path) -> Path:
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump({"warehouse": f"file:{tmp_path}"}))
    return file


def test_status_names_each_trouble_and_exits_with_1(
    tmp_path: Path, settings_file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("status.status_writer._WRITE_SECONDS", 3_600)  # it is written here, and not beside it
    caplog.set_level("INFO")
    alerts = Alerts()
    options = GlobalOptions(config=settings_file)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["status", *arguments], obj=options)

    with StatusWriter(str(tmp_path), 4, alerts.current) as writer:
        writer.batch(BatchStatus(1, 2, 750, 1, COUNTS))
        writer._write()
        assert run().exit_code == 0
        alerts.begin(STANDING, ORDERS, "nothing was taken in: the senders are behind")
        writer._write()
        done = run()
        assert done.exit_code == 1
        assert f"standing: {ORDERS}: nothing was taken in: the senders are behind (for 0 s)" in done.stdout
        # A restart does not mend it.
        assert run("--liveness").exit_code == 0
        [told] = json.loads(run("--output", "json").stdout)["troubles"]
        assert (told["kind"], told["name"]) == (STANDING, ORDERS)
        [metric] = [
            m for m in JobCollector(lambda: read_status(str(tmp_path))).collect() if m.name.endswith("troubles")
        ]
        assert [sample.labels for sample in metric.samples] == [{"kind": STANDING, "name": ORDERS}]
        alerts.end(STANDING, ORDERS)
        for _ in range(2):
            writer._write()
        assert run().exit_code == 0
    assert run("--liveness").exit_code == 1
    logged = [record.getMessage() for record in caplog.records if record.name == "status.status_writer"]
    assert logged == [
        f"standing: {ORDERS}: nothing was taken in: the senders are behind",
        f"over: standing: {ORDERS}",
    ]


def test_a_reader_sees_the_troubles_of_its_own_topics() -> None:
    [route, _] = Settings(
        routes=[  # type: ignore[arg-type]
            {"source": ORDERS, "subscriptions": [{"name": "billing", "destination": f"{ORDERS}-b"}]},
            {"source": f"{ORDERS}2", "subscriptions": [{"name": "billing"}]},
        ]
    ).routes

    def sees(name: str) -> bool:
        return _is_of(Alert(STANDING, name, 1, ""), [route])

    assert all(sees(name) for name in (ORDERS, f"{ORDERS}-partition-3", f"{ORDERS}-b", f"{ORDERS}-rejects"))
    assert not any(sees(name) for name in (f"{ORDERS}2", f"{ORDERS}2-billing", "secret"))
