"""Measures how long a cancel takes, from publishing it to its APPLIED outcome, with the job on a broker of its own.

Some are sent over the control topic, and as many to the REST API, a process of its own, which answers when the job has.
Prints one JSON object. The tracker alone is measured in tracker_operations.py.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import numpy as np
import pulsar
from delaylake.commands import Ids

from admin.control.client import ControlClient
from broker.client import connect
from broker.entries.message_ids import MessageRef
from broker.standalone import EmbeddedBroker
from tests.support.service.harness import Api, Job, now, wait_until
from tracker.commands.kinds import CANCEL

PENDING = 20_000
SINGLE = 60
FIRST = 10  # of them, which are left out


def times_of(cancel: Callable[[MessageRef], bool], messages: Sequence[MessageRef]) -> dict[str, int]:
    """Returns how long the cancel of a message takes, ms, one after the other."""
    took = []
    for message in messages:
        begin = time.perf_counter()
        assert cancel(message)
        took.append((time.perf_counter() - begin) * 1000)
        time.sleep(0.05)
    p50, p99 = np.percentile(took[FIRST:], [50, 99])
    return {"p50": round(p50), "p99": round(p99)}


def over_rest(job: Job, topic: str, due: int, messages: Sequence[MessageRef]) -> dict[str, int]:
    """Returns how long the cancel of a message takes over the REST API, ms."""
    api = Api(job.file)
    path = f"/admin/v2/{topic.replace('://', '/')}/cancelDelayedMessage"
    try:
        with httpx.Client(base_url=api.url, timeout=90) as http:
            wait_until(lambda: http.get("/readyz").status_code == 200, 20, "the API")

            def cancel(message: MessageRef) -> bool:
                fields = {"ledgerId": message.ledger_id, "entryId": message.entry_id, "deliverAt": due}
                return http.post(path, params=fields).is_success

            return times_of(cancel, messages)
    finally:
        api.stop()


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

                def cancel(message: MessageRef) -> bool:
                    return [o.result for o in control.send(topic, CANCEL, Ids([message], [due]), [], 20)] == ["APPLIED"]

                direct = times_of(cancel, ids[:SINGLE])
                rest = over_rest(job, topic, due, ids[SINGLE : 2 * SINGLE])
                begin = time.perf_counter()
                cancels = Ids(ids[2 * SINGLE :], [due] * len(ids[2 * SINGLE :]))
                done = sum(o.is_done for o in control.send(topic, CANCEL, cancels, [], 120))
                seconds = time.perf_counter() - begin
            assert done == len(cancels)
        finally:
            client.close()
            job.stop()
            broker.kill()
    print(
        json.dumps(
            {
                "benchmark": "control",
                "cancel_to_outcome_millis": direct,
                "cancel_over_rest_millis": rest,
                "cancels_answered_per_second": round(done / seconds),
            }
        )
    )


if __name__ == "__main__":
    main()
