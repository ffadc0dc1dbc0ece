"""Somebody publishes under the name of one of the job's producers: nothing is lost or comes twice, and it is said."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pulsar
import pyarrow as pa
import pytest

from broker.standalone import EmbeddedBroker
from status.alerts import FOREIGN_PRODUCER, Alerts
from streaming.checkpoint.checkpoint import Checkpoint, CheckpointError
from streaming.checkpoint.offset import Offset
from streaming.crash_recovery import check_broker, check_sent
from streaming.release.attempt import Assignment, Attempt, FailedProducer
from streaming.release.driver.releaser import Releaser, Run
from streaming.release.naming import producer_name
from streaming.release.producer_names import ProducerNames, read_generations
from streaming.release.task.sender import send_releases
from streaming.sinks.outcomes import OutcomePublisher
from tests.integration.restarts.test_going_on import begun, made
from tests.support.service.fake_releaser import Recorded, Spark, batch
from tests.support.service.harness import http, now, wait_until
from tests.support.tracker.messages import messages, release_rows
from tracker.packing import pack
from tracker.schemas import OUTCOME_ROWS
from tracker.wire.delaylake_pb2 import ControlOutcome
from warehouse.delta.tables import Tables
from warehouse.routes.known_routes import known_routes

N = 40
HUGE = 1 << 60
FOREIGN = b"foreign"


def steal(client: pulsar.Client, topic: str, name: str, payload: bytes = FOREIGN) -> None:
    """Sends a message to a topic under a producer's name, with a sequence id that makes all of its later ones old."""
    producer = client.create_producer(topic, producer_name=name)
    producer.send(payload, sequence_id=HUGE)
    producer.close()


def test_what_is_sent_under_a_name_that_somebody_took_comes_once_also_after_kills(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path
) -> None:
    settings, _ = made(broker, topic, tmp_path)
    checkpoint = Checkpoint(tmp_path / "checkpoint")
    offset = Offset(tick=9, now=now(), batch_millis=5, routes=known_routes(settings).to_json())
    begun(checkpoint, offset)
    tables = Tables(settings.warehouse)
    destination = f"{topic}-a"
    own = producer_name(checkpoint.app_id, topic, "a", 0, "planned0", True)
    reader = pulsar_client.create_reader(destination, pulsar.MessageId.earliest)
    received: Counter[str] = Counter()

    def body(tick: int, rows: int = N, ledger: int | None = None, **columns: Any) -> bytes:
        """The first rows of a release; each is in a batch of its own."""
        due = [(ledger or tick, i, start + 20 * i) for i in range(rows)]
        table = messages(due, topic=topic, **columns)
        return pack(release_rows(table, sending='{"lanes": 1, "batch_millis": 5}'))

    def sent_before_the_kill(tick: int, rows: int) -> None:
        """Sends the first rows of a release, which nobody comes to write down."""
        attempt = Attempt(generations=read_generations(checkpoint.folder))
        what = Assignment(checkpoint.app_id, 0, tick, True, body(tick, rows))
        [sent] = send_releases(settings.model_dump_json(), attempt, [what])
        assert not sent.failed

    def run(tick: int, of_tick: int, **columns: Any) -> list[Any]:
        """A run of the job hands a release out, again where it is of an earlier tick; returns the alerts."""
        alerts, feedback = Alerts(), Recorded()
        releaser = Releaser(
            Spark(),  # type: ignore[arg-type]
            settings,
            tables,
            Run(checkpoint.app_id, feedback),  # type: ignore[arg-type]
            lambda rows: None,
            alerts,
        )
        try:
            releaser.submit(batch(tick, [(0, of_tick, True, body(of_tick, **columns))], at=now()))
            wait_until(lambda: feedback.last.confirmed >= tick, 60, f"{releaser.failure} {alerts.current()}")
        finally:
            releaser.stop()
        return alerts.current()

    def arrived() -> Counter[str]:
        while reader.has_message_available():
            message = reader.read_next(60_000)
            if message.data() != FOREIGN:
                received[message.properties()["delaylake.messageId"]] += 1
        return received

    def all_of(*ticks: int) -> Counter[str]:
        return Counter(f"{tick}:{i}:-1:-1" for tick in ticks for i in range(N))

    start = now()
    assert run(1, 1) == []
    assert arrived() == all_of(1)

    # Between two releases.
    steal(pulsar_client, destination, own)
    [trouble] = run(2, 2)
    assert (trouble.kind, trouble.name) == (FOREIGN_PRODUCER, destination)
    assert f"somebody else has published as {own}, up to the sequence id {HUGE}" in trouble.text
    assert arrived() == all_of(1, 2)

    # While the job is down, which was killed in the midst of a release: what it had sent is known under the new name.
    sent_before_the_kill(3, N // 2)
    steal(pulsar_client, destination, f"{own}-1")
    assert [t.kind for t in run(4, 3)] == [FOREIGN_PRODUCER]
    assert arrived() == all_of(1, 2, 3)

    # It is killed when it has taken a new name, and has sent a part under it.
    steal(pulsar_client, destination, f"{own}-2")
    failed = FailedProducer(destination, own, (topic, "a"), "", is_refused=True, foreign_id=HUGE)
    assert ProducerNames(settings, Alerts(), tables.check_epoch).renew([failed], 5) == []
    sent_before_the_kill(5, N // 2)
    assert run(6, 5) == []
    assert arrived() == all_of(1, 2, 3, 5)
    rows = tables.query("deliveries", "SELECT position FROM deliveries")["position"].to_pylist()
    assert Counter(rows) == all_of(1, 2, 3, 5)

    # Of a schedule an occurrence has arrived, and the name is taken before the next one.
    assert run(7, 7, occurrence=1) == []
    steal(pulsar_client, destination, f"{own}-3")
    assert [t.kind for t in run(8, 8, ledger=7, occurrence=2)] == [FOREIGN_PRODUCER]
    assert arrived() == all_of(1, 2, 3, 5, 7, 7)

    # A start is stopped by what was sent under the new name, and not by what somebody else did.
    check_sent(settings, checkpoint)
    begun(checkpoint, replace(offset, tick=4))
    with pytest.raises(CheckpointError, match=f"{destination} with 8"):
        check_sent(settings, checkpoint)


def test_outcomes_are_told_under_another_name_when_somebody_took_it(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path
) -> None:
    settings, _ = made(broker, topic, tmp_path)
    checkpoint = Checkpoint(tmp_path / "checkpoint")
    outcome_topic = settings.control.outcome_topic
    reader = pulsar_client.create_reader(outcome_topic, pulsar.MessageId.earliest)

    def outcomes(*request_ids: str) -> pa.Table:
        defaults = {f.name: 0 if pa.types.is_integer(f.type) else None for f in OUTCOME_ROWS}
        one = {"topic": topic, "operation": "SKIP", "result": 1}
        return pa.Table.from_pylist([defaults | one | {"request_id": name} for name in request_ids], OUTCOME_ROWS)

    def has_more() -> bool:
        for _ in range(100):
            try:
                return bool(reader.has_message_available())
            except pulsar.PulsarException:  # it has lost its connection, too, where the topic was unloaded
                time.sleep(0.1)
        raise AssertionError("the reader has no connection")

    def told() -> list[str]:
        found = []
        while has_more():
            found.append(ControlOutcome.FromString(reader.read_next(60_000).data()).request_id)
        return [name for name in found if name]

    own = f"{checkpoint.app_id}-outcomes-batched"
    alerts = Alerts()
    publisher = OutcomePublisher(settings, checkpoint.app_id, lambda: None, alerts)
    publisher.publish(outcomes("a", "b"), 5, now())
    assert (told(), alerts.current()) == (["a", "b"], [])

    # While it runs: its producer is connected, and whoever takes the name has to wait for a moment in which it is not.
    publisher._close_producer()
    steal(pulsar_client, outcome_topic, own, b"")
    publisher.publish(outcomes("c"), 6, now())
    [trouble] = alerts.current()
    assert (trouble.kind, trouble.name) == (FOREIGN_PRODUCER, outcome_topic)
    assert told() == ["c"]
    publisher.close()

    # At a start, which it does not stop; and what is told again is not told twice.
    begun(checkpoint, Offset(tick=6, now=now()))
    check_broker(settings, checkpoint)
    again = OutcomePublisher(settings, checkpoint.app_id, lambda: None)
    again.publish(outcomes("c"), 6, now())
    again.publish(outcomes("d"), 7, now())
    assert told() == ["d"]
    # The connection was lost in between, and the client opens its producer again by itself.
    http.put(f"{broker.settings.admin_url}/admin/v2/{outcome_topic.replace('://', '/')}/unload").raise_for_status()
    again.publish(outcomes("e"), 8, now())
    assert told() == ["e"]
    again.close()
