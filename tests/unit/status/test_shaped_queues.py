"""When what a rate or windows have put off is out: in the status, as a metric, and on the schedule's page."""

from __future__ import annotations

from pathlib import Path

from fastapi.testclient import TestClient

from admin.app import create_app
from conf.settings import Settings
from status.batch_status import BatchStatus
from status.job_status import read_status
from status.metrics import JobCollector
from status.status_writer import StatusWriter
from tests.support.service.batch_counts import COUNTS
from tests.support.service.harness import now
from warehouse.delta.tables import Tables

TOPIC = "persistent://public/default/orders"


def test_the_queue_of_each_subscription_is_told(tmp_path: Path) -> None:
    route = {"source": TOPIC, "subscriptions": [{"name": "sms"}, {"name": "mail"}, {"name": "audit"}]}
    settings = Settings.model_validate({"warehouse": f"file:{tmp_path}/warehouse", "routes": [route]})
    Tables(settings.warehouse).create()
    until = now() + 3_600_000
    with StatusWriter(settings.warehouse, max_in_flight=4) as writer:
        told = {TOPIC: {"sms": until, "mail": until + 1, "audit": now() - 1_000}}
        writer.batch(BatchStatus(1, now(), counts=COUNTS | {"shaped": 7}, shaped_until=told))
    status = read_status(settings.warehouse)
    assert status is not None
    assert status.shaped == 7
    assert status.queues(TOPIC, "", now()) == [("mail", until + 1), ("sms", until)]
    assert status.queues(TOPIC, "sms", now()) == [("sms", until)]
    assert status.queues(f"{TOPIC}-other", "", now()) == []
    [metric] = [m for m in JobCollector(lambda: status).collect() if m.name == "delaylake_shaped_until_time_seconds"]
    assert {s.labels["subscription"]: s.value for s in metric.samples}["sms"] == until / 1000
    with TestClient(create_app(settings)) as client:
        page = client.get("/ui/schedule", params={"topic": TOPIC}, headers={"host": "localhost"}).text
    assert "sms: what its rate and windows have put off is out at" in page
    assert "audit: what its rate" not in page
