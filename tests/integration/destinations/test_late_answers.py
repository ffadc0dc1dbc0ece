"""A destination of a broker that takes all at once and answers late holds up no other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pulsar
import pytest

from broker.standalone import EmbeddedBroker
from status.alerts import SLOW
from tests.support.servers.late_broker import LateBroker
from tests.support.service.destinations import Destination, send_numbered, wait_until_well, wait_until_written
from tests.support.service.harness import PATIENCE, Collector, Job, check_exactly_once, now, wait_until
from warehouse.audit.accounts import run_audit

MESSAGES = 600
LATE_SECONDS = 3.0


@pytest.fixture
def late_to(topic: str) -> str:
    return f"{topic}_late-a"


@pytest.fixture
def proxy(broker: EmbeddedBroker, late_to: str) -> Iterator[LateBroker]:
    proxy = LateBroker(broker.settings.service_url, late_to)
    yield proxy
    proxy.close()


@pytest.mark.long
def test_a_destination_that_is_answered_late_makes_no_other_late_and_gets_all_once(
    broker: EmbeddedBroker,
    proxy: LateBroker,
    late_to: str,
    pulsar_client: pulsar.Client,
    topic: str,
    tmp_path: Path,
    collector: Collector,
) -> None:
    late, well, well_to = late_to.removesuffix("-a"), f"{topic}_well", f"{topic}_well-a"
    routes = [{"source": source, "subscriptions": [{"name": "a"}]} for source in (late, well)]
    through_proxy = broker.settings.model_copy(update={"service_url": proxy.service_url})
    job = Job(tmp_path, through_proxy, routes, tracker={"shards": 2}, release={"slow_after_millis": 1_000})
    Destination(broker, late_to)
    for to in (late_to, well_to):
        collector.collect(to)

    def named() -> list[str]:
        troubles = json.loads(job.command("status", "--output", "json").stdout)["troubles"]
        assert {one["kind"] for one in troubles} <= {SLOW}, troubles
        return [one["name"] for one in troubles]

    try:
        job.start()
        begin = now() + 3_000
        dues = [begin + i * 40 for i in range(MESSAGES)]
        proxy.seconds = LATE_SECONDS
        sent = {}
        for source in (late, well):
            producer = pulsar_client.create_producer(source, block_if_queue_full=True, batching_enabled=False)
            sent = send_numbered(producer, dues)
        end = dues[-1]
        wait_until(lambda: len(collector.received[well_to]) >= MESSAGES, (end - now()) / 1000 / PATIENCE + 6, job.log)
        check_exactly_once(sent, collector.received[well_to])
        since = begin + min(5_000 * job.pace, 20 * MESSAGES)  # the first ones share a connection with the late ones
        of_well = [(sent[m.payload.decode()], m.published_at) for m in collector.received[well_to]]
        in_time = sorted(at - due for due, at in of_well if due > since)
        assert in_time[len(in_time) // 2] < 1_000 * job.pace, in_time[-20:]
        assert in_time[len(in_time) * 99 // 100] < 2_000 * job.pace, in_time[-20:]
        wait_until(lambda: named() == [late_to], 10, f"it is answered late all the time\n{job.log}")
        proxy.seconds = 0.0
        wait_until(lambda: len(collector.received[late_to]) >= MESSAGES, 30, job.log)
        wait_until_well(job)
        wait_until_written(job, 2 * MESSAGES)
        check_exactly_once(sent, collector.received[late_to])
        assert proxy.n_late > 0
        assert job.terminate() == 0
    finally:
        job.stop()
    found = run_audit(job.settings)
    assert found.is_clean, found.findings
