"""A destination that takes less than is due for it holds up no other, is named, and gets all once, in order."""

from __future__ import annotations

import json
from pathlib import Path

import pulsar

from broker.standalone import EmbeddedBroker
from status.alerts import SLOW
from tests.support.service.destinations import Destination, send_numbered, wait_until_well, wait_until_written
from tests.support.service.harness import PATIENCE, Collector, Job, check_exactly_once, http, now, wait_until
from warehouse.audit.accounts import run_audit

MESSAGES = 1_200
WAITING = 50  # the last ones, which are cancelled while they wait for the slow destination


def test_a_throttled_destination_is_isolated_named_and_gets_its_messages_once_also_after_kills(
    broker: EmbeddedBroker,
    pulsar_client: pulsar.Client,
    topic: str,
    tmp_path: Path,
    collector: Collector,
) -> None:
    slow, well = f"{topic}_slow", f"{topic}_well"
    slow_to, well_to = f"{slow}-a", f"{well}-a"
    routes = [{"source": source, "subscriptions": [{"name": "a"}]} for source in (slow, well)]
    job = Job(tmp_path, broker.settings, routes, tracker={"shards": 2}, release={"max_in_flight_messages": 300})
    destination = Destination(broker, slow_to)
    rate = {"publishThrottlingRateInMsg": 10, "publishThrottlingRateInByte": -1}
    http.post(f"{destination.url}/publishRate", json=rate).raise_for_status()
    for to in (slow_to, well_to):
        collector.collect(to)

    def named() -> list[str]:
        alerts = json.loads(job.command("status", "--output", "json").stdout)["troubles"]
        assert {one["kind"] for one in alerts} <= {SLOW}, alerts
        return [one["name"] for one in alerts]

    try:
        job.start()
        begin = now() + 3_000
        dues = [begin + i * 40 for i in range(MESSAGES)]
        sent = {}
        ids: list[str] = []
        for source in (slow, well):
            producer = pulsar_client.create_producer(source, block_if_queue_full=True, batching_enabled=False)
            sent = send_numbered(producer, dues[:-WAITING])
            for i in range(MESSAGES - WAITING, MESSAGES):
                position = producer.send(f"{i}".encode(), properties={"deliverAt": str(dues[i])})
                sent[f"{i}"] = dues[i]
                if source == slow:
                    ids.append(f"{position.ledger_id()}:{position.entry_id()} {dues[i]}")
        end = dues[-1]
        wait_until(lambda: named() == [slow_to], 30, f"the status names {slow_to}\n{job.log}")
        named_at = now()
        wait_until(lambda: len(collector.received[well_to]) >= MESSAGES, (end - now()) / 1000 / PATIENCE + 6, job.log)
        check_exactly_once(sent, collector.received[well_to])
        since = named_at + 5_000 * job.pace  # until then what was sent through the same connection is sent again
        of_well = [(sent[m.payload.decode()], m.published_at) for m in collector.received[well_to]]
        late = sorted(at - due for due, at in of_well if due > since)
        assert late, "it was named too late to show anything"
        assert late[len(late) // 2] < 1_000 * job.pace, late[-20:]
        assert len(collector.received[slow_to]) < MESSAGES // 2
        wait_until(lambda: now() > end + 1_000, 30, "all are due")
        (tmp_path / "cancelled").write_text("\n".join(ids))
        from_file = ["--from-file", str(tmp_path / "cancelled"), "--timeout", "60"]
        done = job.command("topics", "cancel-delayed-message", slow, "-s", "a", *from_file)
        assert done.returncode == 0, done.stdout + done.stderr

        job.kill9()
        job.start()
        n = len(collector.received[slow_to])
        wait_until(lambda: len(collector.received[slow_to]) > n + 20, 30, job.log)
        job.kill9()
        job.start()
        rate["publishThrottlingRateInMsg"] = 2_000
        http.post(f"{destination.url}/publishRate", json=rate).raise_for_status()
        expected = {payload: due for payload, due in sent.items() if int(payload) < MESSAGES - WAITING}
        wait_until(lambda: len(collector.received[slow_to]) >= len(expected), 30, job.log)
        wait_until_well(job)
        wait_until_written(job, MESSAGES + len(expected))
        check_exactly_once(expected, collector.received[slow_to])
        assert job.terminate() == 0
    finally:
        job.stop()
    found = run_audit(job.settings)
    assert found.is_clean, found.findings
    # What was handed out before it was named went through several lanes side by side.
    in_order = [int(m.payload) for m in collector.received[slow_to] if sent[m.payload.decode()] > named_at]
    assert in_order, "it was named too late to show anything"
    assert in_order == sorted(in_order)
