"""A warehouse that can't be read is never taken for an empty one, and is told in one line that names the setting."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest

from admin.control.async_client import AsyncControlClient
from conf.errors import UnreadableWarehouseError
from conf.files import FolderError
from conf.settings import Settings
from status.job_status import FILE, known_status, read_status
from status.status_writer import StatusWriter
from tests.support.service.admin_api import served
from tests.support.tracker.messages import TOPIC
from warehouse.audit.accounts import AuditError, run_audit
from warehouse.backup.copying import BackupError, back_up
from warehouse.delta.snapshot import Snapshot
from warehouse.delta.tables import Tables, exists
from warehouse.maintenance.maintain import maintain
from warehouse.queries.listing import NoTablesError
from warehouse.queries.paused import paused_subscriptions
from warehouse.queries.pending_messages import Pending
from warehouse.routes.missing_routes import settings_with
from warehouse.schedules.live_schedules import live_schedules
from warehouse.schedules.schedules import Schedules
from warehouse.schemas import SCHEMAS
from warehouse.views import Warehouse

pytestmark = pytest.mark.slow

Ask = Callable[[Settings], Any]

ASK_STATUS: dict[str, Ask] = {"status": lambda settings: read_status(settings.warehouse)}
ASK_TABLES: dict[str, Ask] = {
    "a snapshot": lambda settings: Snapshot(settings.warehouse, {"deliveries": None}),
    "tables": lambda settings: Tables(settings.warehouse).version("deliveries"),
    "whether a table is there": lambda settings: exists(settings.warehouse, "deliveries"),
    "pending": lambda settings: Pending(*_topic(settings)).page(1),
    "counts": lambda settings: Pending(*_topic(settings)).stats(),
    "schedules": lambda settings: Schedules(settings, TOPIC).page(1),
    "live schedules": lambda settings: live_schedules(settings, 1),
    "pauses": lambda settings: paused_subscriptions(settings.warehouse),
    "views": Warehouse,
    "audit": run_audit,
    "maintenance": maintain,
}


def _topic(settings: Settings) -> tuple[Settings, str]:
    return settings_with(settings, TOPIC)[0], TOPIC


def is_a_file(warehouse: Path) -> None:
    shutil.rmtree(warehouse)
    warehouse.write_text("")


def is_below_a_file(warehouse: Path) -> None:
    shutil.rmtree(warehouse.parent)
    warehouse.parent.write_text("")


def has_damaged_logs(warehouse: Path) -> None:
    for name in SCHEMAS:
        (warehouse / name / "_delta_log" / f"{0:020}.json").write_text("{half a comm")
    (warehouse / FILE).write_text("half a fi")


def has_logs_that_can_not_be_opened(warehouse: Path) -> None:
    """As without the permission to read them, which root has always."""
    for name in SCHEMAS:
        log = warehouse / name / "_delta_log"
        shutil.rmtree(log)
        log.write_text("")
    (warehouse / FILE).mkdir()


def may_not_be_read(warehouse: Path) -> None:
    warehouse.chmod(0)


DAMAGES = (is_a_file, is_below_a_file, has_damaged_logs, has_logs_that_can_not_be_opened, may_not_be_read)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = Settings.model_validate(
        {
            "pulsar": {"service_url": "pulsar://127.0.0.1:1", "admin_url": "http://127.0.0.1:1"},
            "warehouse": str(tmp_path / "parent" / "warehouse"),
            "routes": [{"source": TOPIC, "subscriptions": [{"name": "a"}]}],
        }
    )
    Tables(settings.warehouse).create()
    return settings


@pytest.fixture(params=DAMAGES, ids=lambda damage: damage.__name__)
def damaged(request: pytest.FixtureRequest, settings: Settings) -> Iterator[Settings]:
    if request.param is may_not_be_read and os.geteuid() == 0:
        pytest.skip("root may read all")
    request.param(Path(settings.warehouse))
    yield settings
    if request.param is may_not_be_read:
        Path(settings.warehouse).chmod(0o700)


@pytest.mark.parametrize("ask", [*ASK_STATUS.values(), *ASK_TABLES.values()], ids=[*ASK_STATUS, *ASK_TABLES])
def test_what_can_not_be_read_is_no_empty_warehouse(damaged: Settings, ask: Ask) -> None:
    with pytest.raises((UnreadableWarehouseError, FolderError)) as refused:
        ask(damaged)
    [line] = refused.value.lines
    assert damaged.warehouse in line
    assert "`warehouse` in the settings" in line
    assert "\x1b" not in line
    assert "<unknown>" not in line


def test_a_backup_of_it_is_refused(damaged: Settings, tmp_path: Path) -> None:
    with pytest.raises((BackupError, UnreadableWarehouseError)) as refused:
        back_up(damaged, str(tmp_path / "backup"))
    assert damaged.warehouse in refused.value.lines[0]
    assert "no table" not in refused.value.lines[0]


def test_the_api_says_so_with_503_and_counts_nothing(damaged: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncControlClient, "_run", lambda self: None)  # to give a broker up takes seconds
    with served(damaged) as client:
        for path in ("delayed", "delayed/stats", "schedules", "getMessageIdByIndex?index=1"):
            answer = client.get(f"/admin/v2/{TOPIC.replace('://', '/')}/{path}")
            assert (answer.status_code, "can't be read" in answer.json()["reason"]) == (503, True), path
        assert client.get("/ui/data/overview").json()["trouble"].startswith("the warehouse ")
        for page in ("", "ui/messages", "ui/recurring", "ui/retries", "ui/control", "ui/part/subscriptions"):
            shown = client.get(f"/{page}", headers={"Accept": "text/html"})
            assert shown.status_code in (200, 503), page
            assert "has not run" not in shown.text, page
        metrics = client.get("/metrics")
    assert metrics.status_code == httpx.codes.OK
    assert "delaylake_job_up 0.0" in metrics.text
    assert "\ndelaylake_schedules{" not in metrics.text
    assert "\ndelaylake_paused{" not in metrics.text
    assert "\ndelaylake_table_rows{" not in metrics.text


def test_a_job_goes_on_where_its_last_status_is_damaged(settings: Settings) -> None:
    (Path(settings.warehouse) / FILE).write_text("half a fi")
    assert known_status(settings.warehouse) is None
    with StatusWriter(settings.warehouse, 1):
        pass
    assert read_status(settings.warehouse) is not None


@pytest.mark.parametrize("is_folder", [False, True], ids=["no folder", "an empty folder"])
def test_where_there_is_none_it_is_empty(settings: Settings, is_folder: bool) -> None:
    shutil.rmtree(settings.warehouse)
    if is_folder:
        Path(settings.warehouse).mkdir()
    assert read_status(settings.warehouse) is None
    assert not exists(settings.warehouse, "deliveries")
    assert paused_subscriptions(settings.warehouse) == set()
    assert live_schedules(settings, 1) == {(TOPIC, "a"): 0}
    with pytest.raises(NoTablesError):
        Pending(settings, TOPIC)
    with pytest.raises(AuditError, match="has the job run"):
        run_audit(settings)


@pytest.mark.parametrize("content", [None, b"no parquet"], ids=["gone", "damaged"])
def test_a_file_of_a_table_that_can_not_be_read_is_told(settings: Settings, content: bytes | None) -> None:
    tables = Tables(settings.warehouse)
    row = {"topic": TOPIC, "subscription": "a", "operation": "PAUSE", "result": "APPLIED", "sequence": 1}
    from_row = [[row.get(field.name)] for field in SCHEMAS["outcomes"]]
    tables.append("outcomes", pa.table(from_row, schema=SCHEMAS["outcomes"]), {})
    [file] = (Path(settings.warehouse) / "outcomes").glob("*.parquet")
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(UnreadableWarehouseError, match="outcomes"):
        paused_subscriptions(settings.warehouse)
