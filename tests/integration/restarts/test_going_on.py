"""What a job and a rebuild make sure of with the broker before they go on."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

import pulsar
import pyarrow as pa
import pytest
from deltalake.exceptions import TableNotFoundError

from broker.clusters.new_cluster import NewClusterError, check_topics
from broker.pulsar_admin.admin_rest import AdminClient
from broker.standalone import EmbeddedBroker
from checkpoint_from_tables.rebuild.rebuild import rebuild
from conf.settings import ControlSettings, Route, Settings
from streaming.checkpoint.checkpoint import Checkpoint, CheckpointError
from streaming.checkpoint.offset import Offset
from streaming.crash_recovery import check_broker, check_sent
from streaming.release.attempt import Assignment, Attempt
from streaming.release.last_sent import last_sent
from streaming.release.naming import producer_name
from streaming.release.sequence_ids import sequence_id_of
from streaming.release.task.sender import send_releases
from streaming.sinks.outcomes import OutcomePublisher
from tests.support.service.harness import http, now, wait_until
from tests.support.tracker.messages import messages, release_rows
from tests.support.warehouse.tables import rows
from tracker.packing import pack, unpack
from tracker.schemas import OUTCOME_ROWS
from warehouse.delta.fencing import PAUSE_SECONDS, FencedError
from warehouse.delta.tables import Tables
from warehouse.message_schemas import MessageSchema, SchemaKeeper, version_bytes
from warehouse.routes.known_routes import known_routes

HOUR = 3_600_000


def made(broker: EmbeddedBroker, topic: str, folder: Path) -> tuple[Settings, Tables]:
    route = Route(source=topic, subscriptions=({"name": "a"}, {"name": "b"}))  # type: ignore[arg-type]
    control = ControlSettings(topic=f"{topic}_control", outcome_topic=f"{topic}_outcomes")
    settings = Settings(
        pulsar=broker.settings,
        control=control,
        warehouse=f"file:{folder}/warehouse",
        checkpoint=f"file:{folder}/checkpoint",
        routes=(route,),
    )
    tables = Tables(settings.warehouse)
    tables.create()
    return settings, tables


def send(client: pulsar.Client, topic: str, n: int) -> list[pulsar.MessageId]:
    producer = client.create_producer(topic)
    ids = [producer.send(b"%d" % i) for i in range(n)]
    producer.close()
    return ids


def deliver(client: pulsar.Client, settings: Settings, name: str, source: str, at: int) -> None:
    """Sends a message as the job would have; nobody writes it down."""
    lane = producer_name("delaylake-0123456789ab", settings.routes[0].source, name, 0, "planned0", False)
    producer = client.create_producer(f"{settings.routes[0].source}-{name}", producer_name=lane)
    own = {"delaylake.source": settings.routes[0].source, "delaylake.messageId": source, "delaylake.deliverAt": str(at)}
    producer.send(b"x", properties=own)
    producer.close()


def test_what_a_lane_sent_hours_before_the_others_came_to_a_standstill_is_not_sent_again(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path
) -> None:
    settings, tables = made(broker, topic, tmp_path)
    sent_at = now()
    durable, later = send(pulsar_client, topic, 2)
    ledger = durable.ledger_id()
    deliver(pulsar_client, settings, "a", f"{ledger}:0:-1:-1", sent_at)
    deliver(pulsar_client, settings, "a", f"{ledger}:1:-1:-1", sent_at)  # not durable: comes again from the source
    # The others went on for three hours, and b has had it, too.
    columns = {"topic": topic, "ledger_id": ledger, "entry_id": 0}
    tables.append(
        "delayed_index", rows("delayed_index", [{**columns, "operation": "DELAY", "deliver_at": sent_at}]), {}
    )
    tables.append("entries", rows("entries", [columns]), {})
    done = [
        {**columns, "subscription": "b", "deliver_at": sent_at, "sent_at": sent_at},
        {**columns, "entry_id": 7, "ledger_id": 1, "subscription": "a", "sent_at": sent_at + 3 * HOUR},
    ]
    tables.append("deliveries", rows("deliveries", done), {})
    found = rebuild(settings, tables, tmp_path / "checkpoint", now=sent_at + 3 * HOUR)
    assert found["deliveries_found_at_destinations"] == 2
    assert found["pending"] == 0
    assert later.entry_id() == 1


def test_a_topic_that_ends_before_what_was_read_of_it_is_of_a_new_cluster(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str
) -> None:
    last = send(pulsar_client, topic, 3)[-1]
    ledger, entry = last.ledger_id(), last.entry_id()
    with AdminClient(broker.settings) as admin:
        check_topics(admin, {topic: f"{ledger}:{entry}", f"{topic}_never": "7:0"})
        for read in (f"{ledger}:{entry + 1}", f"{ledger + 1_000}:0"):
            with pytest.raises(NewClusterError, match=f"was read up to entry {read}, and ends with {ledger}:{entry}"):
                check_topics(admin, {topic: read})
        # After an unload the topic has a ledger more, with nothing in it; the old one goes when all is acknowledged.
        url = f"{broker.settings.admin_url}/admin/v2/{topic.replace('://', '/')}"
        consumer = pulsar_client.subscribe(topic, "s", initial_position=pulsar.InitialPosition.Earliest)
        for _ in range(3):
            consumer.acknowledge(consumer.receive(60_000))
        consumer.close()
        http.put(f"{url}/unload").raise_for_status()
        check_topics(admin, {topic: f"{ledger}:{entry}"})
        new = send(pulsar_client, topic, 1)[0]
        assert new.ledger_id() > ledger
        check_topics(admin, {topic: f"{ledger}:{entry}"})


def test_outcomes_told_of_later_ticks_than_the_checkpoint_has_are_noticed(
    broker: EmbeddedBroker, topic: str, tmp_path: Path
) -> None:
    settings, _ = made(broker, topic, tmp_path)
    checkpoint = Checkpoint(tmp_path / "checkpoint")
    publisher = OutcomePublisher(settings, checkpoint.app_id, lambda: None)
    row = {"request_id": "r", "topic": topic, "operation": "SKIP", "result": 1}
    defaults = {f.name: 0 if pa.types.is_integer(f.type) else None for f in OUTCOME_ROWS}
    publisher.publish(pa.Table.from_pylist([defaults | row], OUTCOME_ROWS), 7, now())
    publisher.close()
    offsets = tmp_path / "checkpoint" / "query" / "offsets"
    offsets.mkdir(parents=True)
    (offsets / "0").write_text('v1\n{}\n{"tick": 7}')
    check_broker(settings, checkpoint)
    (offsets / "0").write_text('v1\n{}\n{"tick": 6}')
    with pytest.raises(
        CheckpointError, match=r"went back: it ends with tick 6, .*_outcomes with 7; run `delaylake reb"
    ):
        check_broker(settings, checkpoint)


def begun(checkpoint: Checkpoint, offset: Offset) -> None:
    """Has an offset as the checkpoint's newest."""
    offsets = checkpoint.folder / "query" / "offsets"
    offsets.mkdir(parents=True, exist_ok=True)
    (offsets / "0").write_text(f"v1\n{{}}\n{json.dumps(offset.to_json())}")


def test_a_destination_with_messages_of_later_ticks_than_the_checkpoint_is_noticed(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings, _ = made(broker, topic, tmp_path)
    checkpoint = Checkpoint(tmp_path / "checkpoint")
    http.put(
        f"{broker.settings.admin_url}/admin/v2/{topic.replace('://', '/')}-b/partitions", json=3
    ).raise_for_status()
    offset = Offset(
        tick=6,
        now=now(),
        lanes=4,
        batch_millis=5,
        destinations={f"{topic}-b": 3},
        routes=known_routes(settings).to_json(),
    )
    begun(checkpoint, offset)
    check_sent(settings, checkpoint)
    admin = AdminClient(settings.pulsar)
    assert admin.internal_stats(f"{topic}-a") is None, "it is not created by that"

    # As a job sends them, in the last second before a crash; by each kind of a producer that there is.
    for name, key, version in (("a", None, None), ("a", "k", None), ("b", None, None), ("b", None, version_bytes(3))):
        if version is not None:
            SchemaKeeper(settings.warehouse, admin)._write(topic, version, MessageSchema("STRING", "", {}))
        table = messages([(1, 7, now())], topic=topic, key=key, schema_version=version)
        body = pack(release_rows(table, 1 << "ab".index(name), offset.to_tick().sending))
        later = Assignment(checkpoint.app_id, 1, 7, True, body)
        [sent] = send_releases(settings.model_dump_json(), Attempt(), [later])
        assert unpack(sent.deliveries).num_rows == 1, sent.failed
        begun(checkpoint, replace(offset, tick=7))
        check_sent(settings, checkpoint)
        begun(checkpoint, offset)
        words = rf"went back: it ends with tick 6, {topic}-{name}.* with 7; run `delaylake rebuild --discard"
        with pytest.raises(CheckpointError, match=words):
            check_sent(settings, checkpoint)
        for n in range(3):
            for there in (f"{topic}-a", f"{topic}-b-partition-{n}"):
                url = f"{broker.settings.admin_url}/admin/v2/{there.replace('://', '/')}"
                http.delete(f"{url}?force=true")
    admin.close()

    # Whoever publishes as the job stops no start, be it with an id that it can't have reached, or that it can. What the
    # job itself has sent under its new name does.
    own = producer_name(checkpoint.app_id, topic, "a", 0, "planned3", False)
    as_sent = {"delaylake.source": topic, "delaylake.messageId": "1:7:-1:-1", "delaylake.deliverAt": "1"}
    for taken, tick, properties in ((own, 1 << 40, {}), (f"{own}-1", 7, {}), (f"{own}-2", 7, as_sent)):
        producer = pulsar_client.create_producer(f"{topic}-a", producer_name=taken)
        producer.send(b"x", sequence_id=sequence_id_of(tick, 0), properties=properties)
        producer.close()
        if not properties:
            check_sent(settings, checkpoint)
            assert f"somebody else has published as {taken}" in caplog.text
    with pytest.raises(CheckpointError, match="with 7"):
        check_sent(settings, checkpoint)


def test_destinations_that_do_not_answer_hold_up_no_start(
    broker: EmbeddedBroker, topic: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings, _ = made(broker, topic, tmp_path)
    with socket.socket() as silent:  # takes connections, and says nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"127.0.0.1:{silent.getsockname()[1]}"
        away = broker.settings.model_copy(update={"service_url": f"pulsar://{url}", "admin_url": f"http://{url}"})
        settings = settings.model_copy(update={"pulsar": away})
        checkpoint = Checkpoint(tmp_path / "checkpoint")
        started = time.monotonic()
        offset = Offset(tick=6, now=now(), lanes=4, routes=known_routes(settings).to_json())
        assert last_sent(settings, checkpoint, offset, seconds=1) == {}
        assert time.monotonic() - started < 30
    # Two destinations, their topics of dead letters, and the rejects topic.
    assert f"is not known of 5 topics: {topic}-a (no answer)" in caplog.text


def test_a_sender_that_wakes_up_in_another_epoch_sends_nothing_more(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path
) -> None:
    settings, tables = made(broker, topic, tmp_path)
    tables.take_over(1)
    reader = pulsar_client.create_reader(f"{topic}-a", pulsar.MessageId.earliest)
    start = now() + 4_000
    due = [start + 100 * i for i in range(150)]
    table = messages([(1, i, at) for i, at in enumerate(due)], topic=topic)
    body = pack(release_rows(table))
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    sender = context.Process(
        target=send_all, args=(settings.model_dump_json(), Assignment("app", 0, 1, True, body), results), daemon=True
    )
    sender.start()
    assert sender.pid is not None
    wait_until(reader.has_message_available, 30, "the first messages")
    os.kill(sender.pid, signal.SIGSTOP)
    stopped_at = now()
    Tables(settings.warehouse).take_over(2)
    wait_until(lambda: now() - stopped_at > 1000 * PAUSE_SECONDS + 1_000, 30, "a pause")
    os.kill(sender.pid, signal.SIGCONT)
    assert "FencedError" in results.get(timeout=60)
    sender.join(30)
    came = 0
    while reader.has_message_available():
        assert reader.read_next(60_000).publish_timestamp() <= stopped_at
        came += 1
    assert 0 < came < len(due)


def send_all(settings_json: str, assignment: Assignment, results: multiprocessing.Queue[str]) -> None:
    try:
        list(send_releases(settings_json, Attempt(), [assignment], epoch=1))
        results.put("all sent")
    except (FencedError, TableNotFoundError) as error:
        results.put(type(error).__name__)
