"""What Pulsar's Go client sends arrives as it was sent, and its consumer reads it.

Each message is sent twice: due at once, and later, so that it waits in the delayed index.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from broker.standalone import EmbeddedBroker
from tests.integration.source.test_what_arrives import filled
from tests.support.clients import go_client, java_client
from tests.support.service.harness import Job, now, wait_until

pytestmark = pytest.mark.long

NAMESPACE = "persistent://public/default/go"
DELAY_MILLIS = 40_000
SCHEMAS = ["STRING", "INT32", "DOUBLE", "JSON", "AVRO"]
# Go's client gives a version of its schema to messages in batches alone: the others' are bytes for a consumer.
BODIES = {
    "STRING": "text ü 7".encode(),
    "INT32": struct.pack("<i", 7),  # as Go's client writes it
    "DOUBLE": struct.pack(">d", 1.75),
    "JSON": b'{"item":"item 7","amount":7}',
}
ORDER = {"item": "item 7", "amount": 7}


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def plain(**values: Any) -> dict[str, Any]:
    sizes = {} if "size" in values else {"payload": b64(b"payload")}
    return {"topic": f"{NAMESPACE}-plain", **sizes, **values}


# What is sent. Go's keys are text or any bytes, without a word which of them.
ROWS: dict[str, dict[str, Any]] = {
    "empty payload": plain(payload=""),
    "no payload": plain(payload=None, key=b64(b"gone")),
    "large payload": plain(size=5_200_000),
    **{f"compressed by {c}": plain(size=100_000, compression=c) for c in ("LZ4", "ZLIB", "ZSTD", "SNAPPY")},
    **{f"batched by {c}": plain(size=5_000, compression=c, batch=3) for c in ("", "LZ4", "ZLIB", "ZSTD")},
    "text key": plain(key=b64("kü".encode())),
    "text key in a batch": plain(key=b64(b"k"), batch=3, compression="ZLIB"),
    "text ordering key": plain(ordering_key=b64("oü".encode())),
    "bytes ordering key": plain(ordering_key=b64(b"\xff\xfe\x00")),
    "bytes ordering key in a batch": plain(ordering_key=b64(b"\xc3\x28"), batch=3),
    **{f"a batch of one key, {k}": plain(key=b64(k[:1].encode()), batch=4, by_key=True) for k in ("a1", "b1", "a2")},
    "unicode properties": plain(properties={"ü": "é \U0001f552", "empty": "", "": "no name"}),
    "event time": plain(event_time=1_700_000_000_123),
    "event time in a batch": plain(event_time=1_700_000_000_124, batch=3),
    "chunked": plain(size=1_500_000, chunk=400_000),
    "encrypted": plain(encrypted="own", key=b64(b"k")),
    "encrypted, compressed": plain(encrypted="own", size=100_000, compression="ZSTD"),
    "encrypted, batched": plain(encrypted="own", size=5_000, compression="LZ4", batch=3),
    "encrypted, chunked": plain(encrypted="own", size=1_500_000, chunk=10_000, compression="LZ4"),
    **{f"schema {s}": {"topic": f"{NAMESPACE}-{s}", "schema": s, "n": 7} for s in SCHEMAS},
    "schema, batched": {"topic": f"{NAMESPACE}-AVRO", "schema": "AVRO", "n": 7, "batch": 3},
    # Its time is not a property, but Pulsar's own.
    "DeliverAt": plain(native="at"),
    "DeliverAfter": plain(native="after"),
    "DeliverAt, of a producer of batches": plain(native="at", batch=2, compression="LZ4", key=b64(b"k")),
    "DeliverAfter, of a producer of batches of one key": plain(native="after", batch=3, by_key=True, key=b64(b"k")),
    "DeliverAt of chunks": plain(native="at", size=1_500_000, chunk=400_000),
    "DeliverAfter, encrypted": plain(native="after", encrypted="own", size=5_000, compression="ZSTD"),
    "DeliverAt, schema": {"topic": f"{NAMESPACE}-JSON", "schema": "JSON", "n": 7, "native": "at"},
}


@dataclass
class Arrived:
    """What was sent, and what Go's client saw of it at the destinations."""

    began: int = 0  # when the first was sent
    ended: int = 0  # when all were
    ids: dict[str, str] = field(default_factory=dict)  # by name
    seen: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by name


def specs(first: int, keys: Path, later: bool) -> Iterator[dict[str, Any]]:
    """Each message, due at once or later."""
    for row, spec in ROWS.items():
        name = f"{row}/{later}"
        message = {**spec, "name": name, "properties": {**spec.get("properties", {}), "name": name}}
        native = message.pop("native", None)
        if later and native == "at":
            message["deliver_at"] = first + DELAY_MILLIS
        elif later and native == "after":
            message["deliver_after"] = DELAY_MILLIS
        elif later:
            message["properties"]["deliverAt"] = str(first + DELAY_MILLIS)
        if "encrypted" in spec:
            message["encrypted"] = str(keys / f"{spec['encrypted']}.pem")
        yield message


@pytest.fixture(scope="module")
def arrived(tmp_path_factory: pytest.TempPathFactory, broker: EmbeddedBroker) -> Arrived:
    go_client.skip_without_it()
    folder = tmp_path_factory.mktemp("go")
    topics = sorted({spec["topic"] for spec in ROWS.values()})
    urls = {"service_url": broker.settings.service_url, "admin_url": broker.settings.admin_url}
    job = Job(
        folder,
        broker.settings,
        [{"source": topic, "subscriptions": [{"name": "a"}]} for topic in topics],
        tracker={"load_ahead_millis": 1_000, "max_seal_interval_millis": 1_000},
        pulsar={**urls, "crypto_private_key_file": str(java_client.make_key(folder, "own"))},
    )
    made = Arrived(began=now())
    try:
        # Go's client sends a message with a native time at once, before the batch that its producer has begun: the
        # broker's deduplication then drops that batch. So each round has producers of its own.
        for later in (False, True):
            made.ids |= go_client.produce(urls["service_url"], list(specs(made.began, folder, later)))
        made.ended = now()
        job.start()
        n = 2 * len(ROWS)
        wait_until(lambda: len(job.rows("deliveries")) >= n, 180, f"all delivered\n{job.log}")
        assert job.terminate() == 0
        assert job.rows("rejects") == []
    finally:
        job.stop()
    counts = Counter(spec["topic"] for spec in ROWS.values())
    wanted = [
        {"topic": f"{topic}-a", "schema": "AVRO" if topic.endswith("AVRO") else "", "n": 2 * counts[topic]}
        for topic in topics
    ]
    for message in go_client.consume(urls["service_url"], wanted):
        made.seen.setdefault(message["properties"].pop("name"), []).append(message)
    return made


@pytest.mark.parametrize("row", ROWS)
def test_it_arrives_as_it_was_sent(arrived: Arrived, row: str) -> None:
    spec = ROWS[row]
    wanted: dict[str, Any] = {
        "key": spec.get("key", ""),
        "ordering_key": spec.get("ordering_key", ""),
        "event_time": spec.get("event_time", 0),
    }
    if spec.get("schema") == "AVRO":
        wanted["value"] = ORDER
    else:
        payload = BODIES[spec["schema"]] if "schema" in spec else base64.b64decode(spec.get("payload") or "")
        payload = filled(spec["size"]) if "size" in spec else payload
        wanted |= {"size": len(payload), "sha256": hashlib.sha256(payload).hexdigest()}
    for later in (False, True):
        name = f"{row}/{later}"
        [message] = arrived.seen[name]
        assert {field: message[field] for field in wanted} == wanted, message
        properties = message["properties"]
        due = int(properties.pop("delaylake.deliverAt"))
        # Go's client has batch index 0 for a message that is sent alone.
        assert properties.pop("delaylake.messageId").split(":")[:2] == arrived.ids[name].split(":")[:2]
        told = {"delaylake.source": spec["topic"], **spec.get("properties", {})}
        if later and "native" not in spec:
            told["deliverAt"] = str(arrived.began + DELAY_MILLIS)
        assert properties == told
        assert message["publish_time"] >= due
        if later and spec.get("native") == "after":
            assert arrived.began + DELAY_MILLIS <= due <= arrived.ended + DELAY_MILLIS
        elif later:
            assert due == arrived.began + DELAY_MILLIS


def test_nothing_else_comes(arrived: Arrived) -> None:
    assert set(arrived.seen) == set(arrived.ids)
