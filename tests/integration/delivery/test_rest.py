"""A job that has nothing to do but to wait for the next occurrence of a recurring message."""

from __future__ import annotations

from pathlib import Path

import pulsar
import pytest

from broker.standalone import EmbeddedBroker
from tests.support.service.harness import Collector, Job, wait_until


@pytest.mark.long
def test_an_idle_job_does_not_rest_beyond_the_next_occurrence(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path, collector: Collector
) -> None:
    """A rest lasts a minute. With 9 s no seal epoch ends between some occurrence and the rest that would follow."""
    job = Job(tmp_path, broker.settings, [{"source": topic, "subscriptions": [{"name": "a"}]}])
    received = collector.collect(f"{topic}-a").received[f"{topic}-a"]
    try:
        job.start()
        repeat = {"repeat": "@every 9s", "repeatTimes": "12", "deliverAfter": "1000"}
        pulsar_client.create_producer(topic).send(b"beat", properties=repeat)
        wait_until(lambda: len(received) == 12, 300, f"twelve occurrences\n{job.log}")
    finally:
        job.stop()
    late = [one.received_at - int(one.properties["delaylake.deliverAt"]) for one in received]
    assert max(late) < 15_000, late
