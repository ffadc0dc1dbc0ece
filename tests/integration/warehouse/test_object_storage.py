"""The warehouse on object storage, which here is a server that speaks as much of S3 as is needed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pulsar
import pytest
from fastapi.testclient import TestClient

from admin.app import create_app
from broker.standalone import EmbeddedBroker
from conf.errors import UnreadableWarehouseError
from conf.settings import Settings
from status.job_status import read_status
from status.status_writer import StatusWriter
from tests.support.servers.object_storage import ObjectStorage
from tests.support.service.harness import Collector, Job, check_exactly_once, now, wait_until
from tests.support.warehouse.tables import NOW, bucket, content
from warehouse.audit.accounts import run_audit
from warehouse.backup.copying import back_up
from warehouse.backup.marker import remove_marker
from warehouse.backup.restoring import restore
from warehouse.delta.snapshot import Snapshot
from warehouse.delta.tables import Tables, exists
from warehouse.maintenance.maintain import maintain
from warehouse.maintenance.table_files import TableFiles
from warehouse.views import Warehouse


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStorage]:
    server = ObjectStorage()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.stop()


def settings(folder: Path, warehouse: str, **sections: Any) -> Settings:
    return Settings(warehouse=warehouse, checkpoint=f"file:{folder}/checkpoint", **sections)


def test_tables_are_written_read_merged_and_vacuumed(storage: ObjectStorage, tmp_path: Path) -> None:
    made = settings(tmp_path, "s3://bucket/tables", maintain={"keep_versions_millis": 60_000})
    tables = Tables(made.warehouse)
    assert not exists(made.warehouse, "delayed_index")
    tables.create(keep_versions_millis=60_000)
    for number in range(1, 13):
        assert tables.append("delayed_index", bucket(number, 20, NOW, 1_000), {"job": number})
    assert not tables.append("delayed_index", bucket(12, 20, NOW, 1_000), {"job": 12})
    before = content(tables, "delayed_index")

    report = next(r for r in maintain(made) if r.table == "delayed_index")

    assert (report.files_before, report.files_after) == (12, 1)
    assert content(tables, "delayed_index") == before
    assert Snapshot(made.warehouse, {"delayed_index": None}).largest("delayed_index", "deliver_at") is not None
    assert Warehouse(made).sql("SELECT count(*) AS n FROM delayed_index").to_pylist() == [{"n": len(before)}]
    assert (tmp_path / "checkpoint" / "maintain.lock").exists()


def test_of_writers_at_the_same_time_none_overwrites_the_commit_of_another(storage: ObjectStorage) -> None:
    Tables("s3://bucket/writers").create()
    together = threading.Barrier(3, timeout=60)

    def write(number: int) -> None:
        tables = Tables("s3://bucket/writers")
        for version in range(1, 9):
            together.wait()
            tables.append("delayed_index", bucket(number, 1, NOW, 1_000), {f"job{number}": version})

    writers = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(TableFiles(Tables("s3://bucket/writers"), "delayed_index").all()) == 24
    assert storage.refused > 0


def test_the_job_tells_of_itself_there_and_the_api_finds_it(storage: ObjectStorage, tmp_path: Path) -> None:
    made = settings(tmp_path, "s3://bucket/status")
    assert read_status(made.warehouse) is None
    Tables(made.warehouse).create()
    with StatusWriter(made.warehouse, 1):
        pass
    status = read_status(made.warehouse)
    assert status is not None
    assert status.state == "stopped"
    assert storage.has("bucket/status/_job_status.json")
    with TestClient(create_app(made), base_url="http://localhost") as client:
        assert 'delaylake_table_files{table="entries"} 0.0' in client.get("/metrics").text


def test_a_backup_goes_there_and_comes_back(storage: ObjectStorage, tmp_path: Path) -> None:
    made = settings(tmp_path, f"file:{tmp_path}/warehouse")
    tables = Tables(made.warehouse)
    tables.create()
    for number in range(1, 4):
        tables.append("delayed_index", bucket(number, 20, NOW, 1_000), {"job": number})
        back_up(made, "s3://bucket/backup")
    assert storage.has("bucket/backup/_backup.json")
    copy = Tables("s3://bucket/backup")
    assert content(copy, "delayed_index") == content(tables, "delayed_index")
    copy.append("delayed_index", bucket(9, 20, NOW, 1_000), {"job": 9})
    assert restore("s3://bucket/backup") is not None
    assert content(copy, "delayed_index") == content(tables, "delayed_index")
    remove_marker("s3://bucket/backup")
    back_up(settings(tmp_path, "s3://bucket/backup"), f"file:{tmp_path}/again")
    assert content(Tables(str(tmp_path / "again")), "delayed_index") == content(tables, "delayed_index")


@pytest.mark.parametrize("warehouse", ["nonsense://bucket/x", "s3://"])
def test_a_warehouse_that_is_nowhere_does_not_end_what_tells_of_the_job(warehouse: str) -> None:
    with StatusWriter(warehouse, 1):
        pass
    with pytest.raises(UnreadableWarehouseError):
        read_status(warehouse)


@pytest.mark.chaos
def test_the_job_delivers_with_its_tables_there(
    storage: ObjectStorage, broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path
) -> None:
    routes = [{"source": topic, "subscriptions": [{"name": "a"}]}]
    tracker = {"max_seal_interval_millis": 1_000, "load_ahead_millis": 2_000}
    warehouse = "s3://bucket/job"
    job = Job(tmp_path, broker.settings, routes, warehouse=warehouse, tracker=tracker)
    collector = Collector(pulsar_client).collect(f"{topic}-a")
    producer = pulsar_client.create_producer(topic)
    try:
        job.start()
        due = now() + 1_000
        sent = {f"m{i}": due + i * 40 for i in range(200)}
        for text, at in sent.items():
            producer.send_async(text.encode(), None, properties={"deliverAt": str(at)})
        producer.flush()
        wait_until(lambda: len(collector.received[f"{topic}-a"]) >= len(sent), 30, f"all messages\n{job.log}")
        audit = wait_until(lambda: (a := run_audit(job.settings)).taken_in == len(sent) and a, 15, "all entries")
        assert audit.is_clean, audit.findings
        assert Tables(warehouse).sql("SELECT 1 FROM delayed_index WHERE operation = 'DELAY'").num_rows > 0
        status = read_status(warehouse)
        assert status is not None
        assert status.trouble(now()) is None
        assert job.terminate() == 0
        check_exactly_once(sent, collector.received[f"{topic}-a"])
        assert not (tmp_path / "warehouse").exists()
    finally:
        collector.stop()
        job.stop()
