"""Metrics: what the job and the API export, and what the alerts and the Grafana dashboard ask for."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from admin.monitoring.metrics import ApiMetrics
from conf.settings import Settings
from jobs.commands.status import _text
from status.batch_status import BatchStatus
from status.job_status import LATENESS_MILLIS, STALE_MILLIS, Lateness, read_status
from status.metrics import JobCollector
from status.status_writer import StatusWriter
from tests.support.service.batch_counts import COUNTS
from tests.support.service.harness import now
from warehouse.delta.tables import Tables
from warehouse.schemas import DELIVERIES

CONF = Path(__file__).parents[3] / "conf"


def deliveries(late: list[int], short_notice: bool = False) -> pa.Table:
    rows = [{"deliver_at": 1_000, "sent_at": 1_000 + millis, "short_notice": short_notice} for millis in late]
    return pa.Table.from_pylist(rows, schema=DELIVERIES)


def test_a_running_job_tells_what_it_does_and_that_it_has_ended(tmp_path: Path) -> None:
    assert read_status(str(tmp_path)) is None
    with StatusWriter(str(tmp_path), max_in_flight=4) as writer:
        writer.batch(BatchStatus(1, 2, 750, 1, COUNTS))
        writer.batch(BatchStatus(2, 3, 750, 2, COUNTS, state_memory_bytes=3 << 20))
        writer.deliveries(deliveries([0, 3, 70_000]))
        writer.deliveries(deliveries([40], short_notice=True))
        names = ["orders-a", "orders-a-dlq", "orders-a-dlq-partition-1", "orders-dlq-a"]
        retries = [{"deliver_at": 1, "sent_at": 1, "short_notice": True, "attempt": 3, "destination": n} for n in names]
        retries[0]["occurrence"] = 2
        writer.deliveries(pa.Table.from_pylist(retries, schema=DELIVERIES))
        status = writer.status()
    assert (status.retried, status.dead_letters, status.occurrences, status.misfires) == (4, 2, 1, 6)
    assert (status.schedule_keys, status.cold_schedule_keys) == (9, 6)
    assert (status.state, status.pending, status.in_flight, status.is_held_up) == ("running", 70, 5, True)
    assert (status.taken, status.delivered, status.rejected, status.batches) == (20, 8, 2, 2)
    assert (status.lookahead_millis, status.batch_millis_sum, status.state_memory_bytes) == (750, 600, 3 << 20)
    assert (sum(status.planned.counts), status.planned.counts[-1], status.planned.sum_millis) == (3, 1, 70_003)
    assert sum(status.short_notice.counts) == 5
    told = read_status(str(tmp_path))
    assert told is not None
    assert (told.state, told.taken) == ("stopped", 20)
    assert told.trouble(now()) == "the job has been stopped"


def test_a_job_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no more"), StatusWriter(str(tmp_path), 1):
        raise ValueError("no more\nroom")
    status = read_status(str(tmp_path))
    assert status is not None
    assert status.trouble(now()) == "the job has failed: no more room"


def test_a_job_that_says_nothing_or_finishes_nothing_is_in_trouble(tmp_path: Path) -> None:
    with StatusWriter(str(tmp_path), 1) as writer:
        writer.batch(BatchStatus(1, 2, 750, 1, COUNTS))
        status = writer.status()
    assert status.trouble(status.updated_at + STALE_MILLIS) is None
    assert "no sign of life" in (status.trouble(status.updated_at + STALE_MILLIS + 1_000) or "")
    for in_state, seconds in ((1, 31), (0, 91)):
        late = replace(status, in_state=in_state, in_flight=0, last_batch_at=status.updated_at - seconds * 1_000)
        assert f"no batch for {seconds} s" in (late.trouble(status.updated_at) or "")
        assert replace(late, last_batch_at=late.last_batch_at + 1_000).trouble(status.updated_at) is None


def test_lateness_is_counted_to_the_bound_that_it_reaches() -> None:
    counts = Lateness().with_values(np.array([*LATENESS_MILLIS, 0, -3, 60_001])).counts
    assert counts == [3, *[1] * (len(LATENESS_MILLIS) - 1), 1]


def exported(tmp_path: Path) -> set[str]:
    """The names of all samples of a running job and of the API."""
    settings = Settings(warehouse=str(tmp_path), routes=())
    Tables(str(tmp_path)).create()
    with StatusWriter(str(tmp_path), 1) as writer:
        writer.batch(BatchStatus(1, 2, 750, 1, COUNTS))
        job = CollectorRegistry()
        job.register(JobCollector(writer.status))
        text = generate_latest(job).decode()
    api = ApiMetrics(settings)
    api.requests.labels("GET", "/", "200").inc()
    api.seconds.labels("GET", "/").observe(1)
    text += generate_latest(api.registry).decode()
    families = list(text_string_to_metric_families(text))
    # Of a gauge the family's name, too: without a broker there is no backlog to be told.
    gauges = {family.name for family in families if family.type == "gauge"}
    return gauges | {sample.name for family in families for sample in family.samples}


def test_alerts_and_dashboard_ask_only_for_what_is_exported(tmp_path: Path) -> None:
    rules = yaml.safe_load((CONF / "prometheus/alerts.yaml").read_text())["groups"][0]["rules"]
    panels = json.loads((CONF / "grafana/delaylake.json").read_text())["panels"]
    asked = [rule["expr"] for rule in rules] + [t["expr"] for panel in panels for t in panel["targets"]]
    names = {name for expr in asked for name in re.findall(r"\b(?:delaylake|pulsar)_\w+", expr)}
    assert len(names) > 15
    assert names <= exported(tmp_path)


def test_every_metric_is_documented(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs/metrics.md").read_text()
    bases = {re.sub(r"_(total|created|bucket|count|sum)$", "", name) for name in exported(tmp_path)}
    assert {name for name in bases if f"`{name}" not in text} == set()


def test_what_a_resume_has_not_let_go_yet_is_told(tmp_path: Path) -> None:
    with StatusWriter(str(tmp_path), max_in_flight=4) as writer:
        writer.batch(BatchStatus(1, 2, 750, 1, COUNTS, resuming={"t": {"a": (1_234, 5 << 20)}}))
    status = read_status(str(tmp_path))
    assert status is not None
    assert "resuming: t: 1,234 messages (5 MiB) that were held back for a are still to go out" in _text(
        status, now(), None
    )
    registry = CollectorRegistry()
    registry.register(JobCollector(lambda: status))
    exported = generate_latest(registry).decode()
    assert 'delaylake_resuming_messages{subscription="a",topic="t"} 1234.0' in exported
    assert 'delaylake_resuming_bytes{subscription="a",topic="t"} 5.24288e+06' in exported
