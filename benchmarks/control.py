"""Measures how long a cancel takes, from publishing it to its APPLIED outcome, with the job on a broker of its own.

Prints one JSON object. The tracker alone is measured in tracker_operations.py.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import numpy as np
import pulsar

from admin.control.client import ControlClient
from admin.control.requests import Cancel
from broker.client import connect
from broker.message_ids import MessageRef
from broker.standalone import EmbeddedBroker
from tests.harness import Job, now, wait_until

PENDING = 20_000
SINGLE = 60


def main() -> None:
    topic = "persistent://public/default/cancels"
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker(Path(folder) / "broker")
        broker.start(port=0, http_port=0)
        job = Job(Path(folder), broker.settings, [{"source": topic, "subscriptions": [{"name": "a"}]}])
        client = connect(broker.settings)
        try:
            job.start()
            due = now() + 3_600_000
            ids: list[MessageRef] = []

            def sent(_: object, message_id: pulsar.MessageId) -> None:
                ids.append(MessageRef(message_id.ledger_id(), message_id.entry_id()))

            producer = client.create_producer(topic, block_if_queue_full=True)
            for i in range(PENDING):
                producer.send_async(str(i).encode(), sent, properties={"deliverAt": str(due)})
            producer.flush()
            wait_until(lambda: job.progress and job.progress[-1]["pending"] == PENDING, 60, "all pending")
            with ControlClient(job.settings, "bench") as control:
                took = []
                for message in ids[:SINGLE]:
                    begin = time.perf_counter()
                    assert [o.result for o in control.cancel(topic, [Cancel(message, due)], [], 20)] == ["APPLIED"]
                    took.append((time.perf_counter() - begin) * 1000)
                    time.sleep(0.05)
                begin = time.perf_counter()
                cancels = [Cancel(message, due) for message in ids[SINGLE:]]
                done = sum(o.is_done for o in control.cancel(topic, cancels, [], 120))
                seconds = time.perf_counter() - begin
            assert done == len(cancels)
        finally:
            client.close()
            job.stop()
            broker.kill()
    p50, p99 = np.percentile(took[10:], [50, 99])
    print(
        json.dumps(
            {
                "benchmark": "control",
                "cancel_to_outcome_millis": {"p50": round(p50), "p99": round(p99)},
                "cancels_answered_per_second": round(done / seconds),
            }
        )
    )


if __name__ == "__main__":
    main()
