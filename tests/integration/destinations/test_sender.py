"""A release that is sent again after a crash comes once, in the same batches."""

from __future__ import annotations

import json
import multiprocessing
import random
import time
from pathlib import Path

import pulsar
import pyarrow as pa

from broker.standalone import EmbeddedBroker
from conf.settings import Settings
from streaming.release.attempt import Assignment, Attempt
from streaming.release.task.sender import send_releases
from tests.support.service.harness import Job, now
from tests.support.tracker.messages import messages, release_rows
from tracker.packing import pack, unpack

SPAN_MILLIS = 5_000
ROWS = 8_000


def assignment(topic: str, batch_millis: int, first_due: int, last: int = 0) -> Assignment:
    """Messages of some milliseconds' distance: most without a key, some with one, some large.

    Args:
        last: so many of them come later, one after the other.
    """
    chance = random.Random(3)
    due = sorted(first_due + chance.randrange(SPAN_MILLIS) for _ in range(ROWS - last))
    due += [first_due + SPAN_MILLIS + 150 * i for i in range(last)]
    rows = messages([(1, i, at) for i, at in enumerate(due)], topic=topic)
    columns = {
        "key": [f"k{i}" if i % 7 == 0 else None for i in range(ROWS)],
        "payload": [str(i).encode().ljust(150_000 if i % 400 == 5 else 40) for i in range(ROWS)],
    }
    for name, values in columns.items():
        rows = rows.set_column(rows.column_names.index(name), rows.schema.field(name), [pa.array(values)])
    sending = json.dumps({"lanes": 1, "partitions": {}, "batch_millis": batch_millis})
    return Assignment("app", 0, 1, True, pack(release_rows(rows, sending=sending)))


def send(settings_json: str, what: Assignment) -> None:
    list(send_releases(settings_json, Attempt(), [what]))


def test_a_release_sent_again_after_kills_comes_once_and_never_early(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path
) -> None:
    job = Job(tmp_path, broker.settings, [{"source": topic, "subscriptions": [{"name": "a"}]}])
    settings: Settings = job.settings
    reader = pulsar_client.create_reader(f"{topic}-a", pulsar.MessageId.earliest)
    last = 200  # half a minute, in which the kills come also on a slow machine
    what = assignment(topic, 5, now() + 1_500, last)
    chance = random.Random(5)
    spawn = multiprocessing.get_context("spawn")
    received = []
    for _ in range(3):
        process = spawn.Process(target=send, args=(settings.model_dump_json(), what))
        process.start()
        received.append(reader.read_next(120_000))  # beyond what was sent before
        time.sleep(chance.uniform(0, 0.2))
        process.kill()
        process.join()
        while reader.has_message_available():
            received.append(reader.read_next(60_000))
    assert len(received) < ROWS, "it was killed too late to show anything"
    deliveries = unpack(next(send_releases(settings.model_dump_json(), Attempt(), [what])).deliveries)
    assert deliveries.num_rows == ROWS

    while reader.has_message_available():
        received.append(reader.read_next(60_000))
    rows = unpack(what.body)
    due = dict(zip(rows["entry_id"].to_pylist(), rows["deliver_at"].to_pylist(), strict=True))
    assert sorted(int(m.data()) for m in received) == list(range(ROWS))
    assert all(m.publish_timestamp() >= due[int(m.data())] for m in received)
    for keyed in (True, False):
        order = [int(m.data()) for m in received if bool(m.partition_key()) == keyed and len(m.data()) == 40]
        assert order == sorted(order), "each of the two producers sends in order"
    entries = {(m.message_id().ledger_id(), m.message_id().entry_id()) for m in received if not m.partition_key()}
    n_large = ROWS // 400
    assert len(entries) <= SPAN_MILLIS / 5 + 1 + n_large + last, "what is due within 5 ms goes in one batch"
    alone = [m for m in received if m.partition_key()]
    assert len({(m.message_id().ledger_id(), m.message_id().entry_id()) for m in alone}) == len(alone)


def test_without_batches_each_message_is_an_entry(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path
) -> None:
    job = Job(tmp_path, broker.settings, [{"source": topic, "subscriptions": [{"name": "a"}]}])
    send(job.settings.model_dump_json(), assignment(topic, 0, now() - SPAN_MILLIS))
    reader = pulsar_client.create_reader(f"{topic}-a", pulsar.MessageId.earliest)
    received = [reader.read_next(60_000) for _ in range(ROWS)]
    ids = {(m.message_id().ledger_id(), m.message_id().entry_id()) for m in received}
    assert len(ids) == ROWS
    assert not reader.has_message_available()
