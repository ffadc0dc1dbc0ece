"""The job's main path in one short run, for whatever it is connected to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pulsar

from conf.settings import PulsarSettings
from tests.support.service.harness import Collector, Job, check_exactly_once, now, wait_until

_N = 300


def delivers_once(
    folder: Path, settings: PulsarSettings, client: pulsar.Client, topic: str, disturb: Callable[[str], None]
) -> None:
    """Asserts that a job delivers what is sent with either kind of time, once and not early, and obeys a command.

    Args:
        settings: of the job.
        client: of those who send and receive.
        topic: the source topic, not made yet.
        disturb: does something to a topic while messages are on their way.
    """
    destination = f"{topic}-a"
    pulsar_section = settings.model_dump(mode="json", exclude_unset=True)
    job = Job(
        folder,
        settings,
        [{"source": topic, "subscriptions": [{"name": "a"}]}],
        pulsar=pulsar_section,
        tracker={"load_ahead_millis": 1_000, "max_seal_interval_millis": 1_000},
    )
    collector = Collector(client)
    try:
        job.start()
        collector.collect(destination)
        producer = client.create_producer(topic, block_if_queue_full=True)
        sent: dict[str, int] = {}
        begin = now()
        for i in range(_N):
            due = begin + 2_000 + 40 * i
            sent[str(i)] = due
            if i % 2:
                producer.send_async(str(i).encode(), None, partition_key=f"k{i % 7}", deliver_at=due)
            else:
                producer.send_async(str(i).encode(), None, properties={"deliverAt": str(due)})
        producer.flush()
        later = producer.send(b"cancelled", properties={"deliverAt": str(begin + 600_000)})
        named = f"{later.ledger_id()}:{later.entry_id()}"

        def come() -> int:
            return len(collector.received[destination])

        wait_until(lambda: come() >= _N // 4, 30, f"the first messages\n{job.log}")
        disturb(topic)
        disturb(destination)
        wait_until(lambda: come() >= _N, 60, f"all messages\n{job.log}")
        told = job.command("topics", "skip-messages", topic, "-s", "a", "--messageId-triplet", named)
        assert told.returncode == 0, told.stderr
        check_exactly_once(sent, collector.received[destination])
        wait_until(lambda: len(job.rows("deliveries")) == _N, 20, "the deliveries are written down")
        assert job.terminate() == 0
        assert job.rows("rejects") == []
    finally:
        collector.stop()
        job.stop()
