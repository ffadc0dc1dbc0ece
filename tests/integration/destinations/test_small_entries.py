"""Thousands of small messages at one instant, and commands for as many, on a broker that takes small entries only."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from delaylake.commands import Ids

from admin.control.client import ControlClient
from broker.client import connect
from broker.standalone import EmbeddedBroker
from tests.integration.commands.test_control import send_due
from tests.support.servers.small_entries import broker_of_small_entries
from tests.support.service.harness import Collector, Job, now, wait_until
from tracker.commands.kinds import CANCEL

pytestmark = pytest.mark.long

SOURCE = "persistent://public/default/small"
N = 2_000
LARGEST = 64 << 10  # bytes of an entry, the least that the settings take


def test_batches_of_messages_and_outcomes_are_no_larger_than_the_broker_takes(
    broker: EmbeddedBroker, tmp_path: Path
) -> None:
    with broker_of_small_entries(tmp_path / "broker", broker, LARGEST) as small:
        urls = {"service_url": small.settings.service_url, "admin_url": small.settings.admin_url}
        routes = [{"source": SOURCE, "subscriptions": [{"name": "a" * 60}]}]
        job = Job(tmp_path, small.settings, routes, pulsar={**urls, "max_message_size_bytes": LARGEST})
        client = connect(small.settings)
        collector = Collector(client)
        try:
            job.start()
            collector.collect(f"{SOURCE}-{'a' * 60}")
            send_due(client, SOURCE, [now() + int(15_000 * job.pace)] * N)
            later = send_due(client, SOURCE, [now() + 3_600_000] * N)
            ids = Ids([message for message, _ in later.values()], [due for _, due in later.values()])
            outcomes = list(ControlClient(job.settings, "tester").send(SOURCE, CANCEL, ids, (), 90))
            assert Counter(one.result for one in outcomes) == {"APPLIED": N}
            wait_until(lambda: len(job.rows("deliveries")) + len(job.rows("rejects")) >= N, 90, f"sent\n{job.log}")
            assert job.rows("rejects") == []
            received = wait_until(
                lambda: len(found := collector.received[f"{SOURCE}-{'a' * 60}"]) >= N and found, 30, "all messages"
            )
            assert sorted(int(one.payload) for one in received) == list(range(N))
        finally:
            job.stop()
            collector.stop()
            client.close()
