"""What `delaylake audit` prints."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import yaml

from jobs.commands.tables.audit import _json
from status.alerts import NO_ADMIN, SLOW, STANDING, UNWRITABLE, Alerts
from status.batch_status import BatchStatus
from status.status_writer import StatusWriter
from tests.conftest import Run
from tests.support.service.batch_counts import COUNTS
from warehouse.audit.accounts import Audit
from warehouse.audit.broker_comparison import ComparedTopic, Comparison
from warehouse.delta.tables import Tables

TOPIC = "persistent://public/default/orders"


def test_the_numbers_of_a_topic_have_the_names_that_scripts_know() -> None:
    topics = [ComparedTopic("t", 0, entries=3, durable=2, not_durable=1)]
    found = _json(Audit(counts=[], taken_in=0, rejected=0, findings={}, comparison=Comparison(topics=topics)))
    [topic] = found["comparison"]["topics"]
    names = ("topic", "partition", "entries", "booked", "not_booked", "no_message", "not_seen", "not_known", "trimmed")
    assert tuple(topic) == names
    assert (topic["booked"], topic["not_booked"]) == (2, 1)
    assert found["ok"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [STANDING, UNWRITABLE, SLOW])
def test_what_stands_still_or_cannot_be_written_is_named_while_the_job_runs(
    tmp_path: Path, kind: str, delaylake_here: Run
) -> None:
    file, warehouse = tmp_path / "settings.yaml", f"file:{tmp_path}/warehouse"
    routes = [{"source": TOPIC, "subscriptions": [{"name": "a"}]}]
    pulsar = {"admin_url": "http://127.0.0.1:9"}
    file.write_text(yaml.safe_dump({"warehouse": warehouse, "routes": routes, "pulsar": pulsar}))
    Tables(warehouse).create()
    alerts = Alerts()
    alerts.begin(NO_ADMIN, "http://127.0.0.1:9", "it does not answer")
    with StatusWriter(warehouse, 1, alerts.current) as status:
        status.batch(BatchStatus(1, time.time_ns() // 1_000_000, counts=COUNTS))
        status._write()
        assert delaylake_here("--config", str(file), "audit").returncode == 0
        alerts.begin(kind, f"{TOPIC}-a", "topic is terminated")
        status._write()
        told = delaylake_here("--config", str(file), "audit")
        assert told.returncode == 1
        assert f"{kind}: {TOPIC}-a: topic is terminated" in told.stdout.splitlines()
        told = delaylake_here("--config", str(file), "audit", "--output", "json")
        shown = json.loads(told.stdout)
        assert (told.returncode, shown["ok"], shown["findings"]) == (1, False, {})
        assert [(trouble["kind"], trouble["name"]) for trouble in shown["troubles"]] == [(kind, f"{TOPIC}-a")]
    # Of a job that was stopped nobody knows.
    assert delaylake_here("--config", str(file), "audit").returncode == 0
