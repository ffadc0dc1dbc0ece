"""Whatever Pulsar's Java client sends arrives as it was sent: docs/messages.md, row by row.

Each message is sent twice: due at once, and later, so that it waits in the delayed index.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.protocol.entries import NOT_DECRYPTED
from broker.pulsar_admin.admin_rest import AdminClient
from broker.standalone import EmbeddedBroker
from status.alerts import NOT_SEEN_REASON
from tests.support.clients import java_client
from tests.support.service.harness import Job, http, now, wait_until

NAMESPACE = "persistent://public/default"
STRICT = "persistent://public/strict"  # where a producer without a schema is refused
DELAY_MILLIS = 40_000
SCHEMAS = ["STRING", "JSON", "AVRO", "PROTOBUF_NATIVE", "KEY_VALUE", "SEPARATED", "INT32", "BOOL"]


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def plain(**values: Any) -> dict[str, Any]:
    return {"topic": f"{NAMESPACE}/plain", "payload": b64(b"payload"), **values}


# What is sent, by row of the table.
ROWS: dict[str, dict[str, Any]] = {
    "empty payload": plain(payload=""),
    "tombstone": plain(payload=None, key="gone"),
    "large payload": plain(size=5_200_000),
    "bytes of any kind": plain(payload=b64(bytes(range(256)))),
    **{f"compressed by {c}": plain(size=100_000, compression=c) for c in ("NONE", "LZ4", "ZLIB", "ZSTD", "SNAPPY")},
    **{f"batched by {c}": plain(size=5_000, compression=c, batch=3) for c in ("NONE", "LZ4", "ZSTD")},
    "text key": plain(key="kü"),
    "text key that looks like base64": plain(key="user", schema="BYTES", compression="LZ4"),
    "text key in a batch": plain(key="k", batch=3, compression="ZLIB"),
    "bytes key": plain(key_bytes=b64(b"\xff\x00\xfe"), compression="ZSTD"),
    "bytes key in a batch": plain(key_bytes=b64(b"\xff\x00\xfd"), compression="SNAPPY", batch=3),
    "empty key": plain(key=""),
    "empty key in a batch": plain(key="", batch=3, compression="LZ4"),
    "empty bytes key": plain(key_bytes=""),
    "empty ordering key": plain(ordering_key="", key="k"),
    "text ordering key": plain(ordering_key=b64("oü".encode())),
    "bytes ordering key": plain(ordering_key=b64(b"\xff\xfe\x00")),
    "bytes ordering key in a batch": plain(ordering_key=b64(b"\xc3\x28"), batch=3),
    "unicode properties": plain(properties={"ü": "é \U0001f552", "empty": "", "": "no name", "long": "x" * 3_000}),
    "forged properties": plain(properties={"delaylake.source": "theirs", "delaylake.attempt": "3", "own": "1"}),
    "event time": plain(event_time=1_700_000_000_123),
    "chunked": plain(size=1_500_000, chunk=400_000),
    "chunked, larger than an entry": plain(size=6_000_000, chunk=400_000, key="", properties={"a": "1"}),
    "larger than an entry, to a partition": plain(
        topic=f"{NAMESPACE}/parted", size=9_000_000, chunk=4_000_000, key_bytes=b64(b"\xff\xfe")
    ),
    "larger than an entry when decompressed": plain(size=6_500_000, compression="ZSTD", ordering_key=b64(b"\xff\0")),
    "partitioned": plain(topic=f"{NAMESPACE}/parted", key="k7"),
    "partitioned, empty key": plain(topic=f"{NAMESPACE}/parted", key=""),
    "partitioned, bytes key": plain(topic=f"{NAMESPACE}/parted", key_bytes=b64(b"\xff\xfe\xfd")),
    **{f"schema {s}": {"topic": f"{NAMESPACE}/{s}", "schema": s, "n": 7} for s in SCHEMAS},
    "schema, batched": {"topic": f"{NAMESPACE}/AVRO", "schema": "AVRO", "n": 8, "batch": 3},
    "schema, later version": {"topic": f"{NAMESPACE}/AVRO", "schema": "AVRO2", "n": 9},
    "schema, tombstone": {"topic": f"{NAMESPACE}/JSON", "schema": "JSON", "payload": None, "key": "gone"},
    "schema, partitioned": {"topic": f"{NAMESPACE}/parted-avro", "schema": "AVRO", "n": 10},
    "schema that is enforced": {"topic": f"{STRICT}/orders", "schema": "JSON", "n": 11},
    "committed": plain(transaction="commit"),
    "encrypted, own key": plain(encrypted=["own"], key="k", properties={"a": "1"}),
    "encrypted, compressed": plain(encrypted=["own"], size=100_000, compression="ZSTD"),
    "encrypted, batched": plain(encrypted=["own"], size=5_000, compression="LZ4", batch=3),
    "encrypted, chunked": plain(encrypted=["own"], size=1_500_000, chunk=400_000),
    "encrypted, chunked and compressed": plain(
        encrypted=["own"], size=4_000_000, chunk=30_000, compression="ZLIB", key="k"
    ),
    "encrypted for several": plain(encrypted=["strangers", "own"]),
    # Its time is not a property, but Pulsar's own.
    "native time": plain(native=True),
    "native time in a batch": plain(native=True, batch=3, compression="LZ4", key="k"),
    "encrypted, larger than an entry": plain(encrypted=["own"], size=5_800_000, chunk=2_000_000, event_time=1_700),
    "native time of chunks": plain(native=True, size=1_500_000, chunk=400_000),
    "native time, encrypted": plain(native=True, encrypted=["own"], size=5_000, compression="ZSTD"),
}

# Of these nothing comes.
ABORTED = plain(transaction="abort")
REJECTED = {
    "chunked, too large": plain(size=11_000_000, chunk=4_000_000),
}
# Nothing of these can be read.
ENCRYPTED = {
    "strangers' key": plain(encrypted=["strangers"], key="k"),
    "strangers' key, batched": plain(encrypted=["strangers"], batch=3, compression="LZ4"),
    "strangers' key, chunked": plain(encrypted=["strangers"], size=1_500_000, chunk=400_000),
}

PARTED = {f"{NAMESPACE}/parted": 2, f"{NAMESPACE}/parted-avro": 2}

VALUES = {
    "STRING": "STRING text ü {n}",
    "JSON": 'JSON {{"item":"item {n}","amount":{n}}}',
    "AVRO": 'AVRO {{"amount": {n}, "item": "item {n}"}}',
    "AVRO2": 'AVRO {{"amount": {n}, "item": "item {n}", "note": "note {n}"}}',
    "PROTOBUF_NATIVE": "PROTOBUF_NATIVE seconds: {n}\n",
    "KEY_VALUE": 'KEY_VALUE key {n} = AVRO {{"amount": {n}, "item": "item {n}"}}',
    "SEPARATED": "KEY_VALUE key {n} = value {n}",
    "INT32": "INT32 {n}",
    "BOOL": "BOOLEAN false",
}
BY_CLASS = {
    "STRING": "text ü 7",
    "JSON": '{"item":"item 7","amount":7}',
    "AVRO": '{"item":"item 7","amount":7}',
    "PROTOBUF_NATIVE": "seconds: 7\n",
    "KEY_VALUE": 'key 7 = {"item":"item 7","amount":7}',
    "SEPARATED": "key 7 = value 7",
    "INT32": "7",
    "BOOL": "false",
}


@dataclass
class Arrived:
    """What was sent, and what Java's client saw of it at the destinations."""

    ids: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # by row
    due: dict[str, int] = field(default_factory=dict)  # by id
    seen: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))  # by id, AUTO_CONSUME
    by_class: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))  # by schema
    rejects: list[dict[str, Any]] = field(default_factory=list)

    def of(self, row: str) -> list[dict[str, Any]]:
        """The row's two messages, each of which came once."""
        found = [self.seen[message_id] for message_id in self.ids[row]]
        assert [len(of_id) for of_id in found] == [1, 1], found
        return [of_id[0] for of_id in found]


def specs(first: int, keys: Path) -> Iterator[dict[str, Any]]:
    """Each message due at once, and later.

    Args:
        keys: the folder of the public keys.
    """
    for later in (False, True):
        for name, spec in [*ROWS.items(), *REJECTED.items(), *ENCRYPTED.items(), ("aborted", ABORTED)]:
            properties = {**spec.get("properties", {})}
            if later and "native" not in spec:
                properties["deliverAt"] = str(first + DELAY_MILLIS)
            message = {**spec, "name": f"{name}/{later}", "properties": properties}
            if later and "native" in spec:
                message["deliver_at"] = first + DELAY_MILLIS
            if "encrypted" in spec:
                message["encrypted"] = {f"of {name}": (keys / f"{name}.pem").as_uri() for name in spec["encrypted"]}
            yield message


@pytest.fixture(scope="module")
def arrived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arrived]:
    folder = tmp_path_factory.mktemp("arrives")
    broker = EmbeddedBroker(folder / "broker", {"transactionCoordinatorEnabled": "true"})
    broker.start(port=0, http_port=0)
    topics = sorted({spec["topic"] for spec in ROWS.values()})
    java_client.make_key(folder, "strangers")
    urls = {"service_url": broker.settings.service_url, "admin_url": broker.settings.admin_url}
    job = Job(
        folder,
        broker.settings,
        [{"source": topic, "subscriptions": [{"name": "a"}]} for topic in topics],
        tracker={"load_ahead_millis": 1_000, "max_seal_interval_millis": 1_000},
        pulsar={**urls, "crypto_private_key_file": str(java_client.make_key(folder, "own"))},
    )
    try:
        prepare(broker)
        yield run(broker, job, topics)
    finally:
        job.stop()
        broker.stop()


def prepare(broker: EmbeddedBroker) -> None:
    admin = f"{broker.settings.admin_url}/admin/v2"
    http.put(f"{admin}/namespaces/public/strict", json={}).raise_for_status()
    http.post(f"{admin}/namespaces/public/strict/schemaValidationEnforced", json=True).raise_for_status()
    with AdminClient(broker.settings) as client:
        for topic, partitions in PARTED.items():
            client.create_partitioned_topic(topic, partitions)


def run(broker: EmbeddedBroker, job: Job, topics: list[str]) -> Arrived:
    arrived = Arrived()
    url = broker.settings.service_url
    sent = list(specs(now(), job.folder))
    named = java_client.produce(url, sent, has_transactions=True)
    for spec in sent:
        message_id = named[spec["name"]]
        arrived.ids[spec["name"].rpartition("/")[0]].append(message_id)
        arrived.due[message_id] = int(spec.get("deliver_at") or spec["properties"].get("deliverAt", 0))
    job.start()
    n = 2 * (len(ROWS) + len(REJECTED))
    counted = "SELECT coalesce(sum(batch_size), 0) AS n FROM {table}"
    n_encrypted = sum(len(arrived.ids[row]) for row in ENCRYPTED)

    def are_taken_in() -> bool:
        unreadable = len(encrypted(job.rows("rejects")))
        return unreadable >= n_encrypted and job.rows("entries", counted)[0]["n"] == n + unreadable

    wait_until(are_taken_in, 60, f"all taken in\n{job.log}")
    for topic in topics:  # a delay may be longer than the registry of its topic lives
        path = topic.replace("persistent://", "/admin/v2/schemas/")
        http.delete(f"{broker.settings.admin_url}{path}/schema").raise_for_status()
    wait_until(lambda: len(job.rows("deliveries")) >= 2 * len(ROWS), 60, f"all delivered\n{job.log}")
    assert job.terminate() == 0
    arrived.rejects = job.rows("rejects")

    counts = Counter(spec["topic"] for spec in ROWS.values())
    wanted = [{"topic": f"{topic}-a", "n": 2 * counts[topic]} for topic in topics]
    wanted += [
        {"topic": f"{NAMESPACE}/{schema}-a", "schema": schema, "n": 2 * counts[f"{NAMESPACE}/{schema}"]}
        for schema in SCHEMAS
    ]
    for message in java_client.consume(url, wanted):
        if message["as"] == "AUTO":
            arrived.seen[message["properties"]["delaylake.messageId"]].append(message)
        else:
            arrived.by_class[message["as"]].append(message)
    return arrived


def entry_of(message_id: str) -> str:
    return ":".join(message_id.split(":")[:2])


def encrypted(rejects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rejects if row["reason"] == NOT_DECRYPTED]


def filled(size: int) -> bytes:
    """As Messages.java fills a payload."""
    i = np.arange(size, dtype=np.int64)
    return bytes((i * 31 + i // 251 + i // 65_521).astype(np.uint8))


def expected(spec: dict[str, Any]) -> dict[str, Any]:
    """What a consumer is to see of a message, but for its properties."""
    key_bytes = spec.get("key_bytes")
    if spec.get("schema") == "SEPARATED":
        key_bytes = b64(f"key {spec['n']}".encode())
    values = {
        "key": spec.get("key", key_bytes),
        "key_is_base64": key_bytes is not None,
        "ordering_key": spec.get("ordering_key"),
        "event_time": spec.get("event_time", 0),
        "is_null": "payload" in spec and spec["payload"] is None,
    }
    if "n" in spec:
        values["value"] = VALUES[spec["schema"]].format(n=spec["n"])
    elif not values["is_null"]:
        payload = filled(spec["size"]) if "size" in spec else base64.b64decode(spec["payload"])
        values |= {"size": len(payload), "sha256": hashlib.sha256(payload).hexdigest()}
    return values


@pytest.mark.parametrize("row", ROWS)
def test_it_arrives_as_it_was_sent(arrived: Arrived, row: str) -> None:
    spec = ROWS[row]
    wanted = expected(spec)
    theirs = {k: v for k, v in spec.get("properties", {}).items() if not k.startswith("delaylake.")}
    for message_id, message in zip(arrived.ids[row], arrived.of(row), strict=True):
        assert {name: message.get(name) for name in wanted} == wanted, message
        due = arrived.due[message_id]
        own = {"delaylake.source": spec["topic"], "delaylake.messageId": message_id}
        properties = message["properties"]
        told = int(properties.pop("delaylake.deliverAt"))
        assert told == due or not due
        assert properties == {**theirs, **own, **({"deliverAt": str(due)} if due and "native" not in spec else {})}
        assert message["publish_time"] >= due


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_consumer_with_its_own_class_reads_it(arrived: Arrived, schema: str) -> None:
    of_row = arrived.ids[f"schema {schema}"]
    found = [m for m in arrived.by_class[schema] if m["properties"]["delaylake.messageId"] in of_row]
    assert [message["value"] for message in found] == [BY_CLASS[schema]] * 2


def test_nothing_comes_of_an_aborted_transaction(arrived: Arrived) -> None:
    assert len(arrived.ids["aborted"]) == 2
    assert not any(arrived.seen.get(message_id) for message_id in arrived.ids["aborted"])
    assert not set(arrived.ids["aborted"]) & {row["position"] for row in arrived.rejects}


def rejected(arrived: Arrived, row: str) -> list[dict[str, Any]]:
    found = {row["position"]: row for row in arrived.rejects}
    return [found.pop(message_id) for message_id in arrived.ids[row]]


def test_what_is_larger_than_can_be_sent_is_rejected_with_its_payload(arrived: Arrived) -> None:
    for row in rejected(arrived, "chunked, too large"):
        assert "too many" in row["reason"]
        assert row["payload"] == filled(11_000_000)


@pytest.mark.parametrize("row", ENCRYPTED)
def test_what_is_encrypted_for_others_is_rejected_with_its_raw_bytes(arrived: Arrived, row: str) -> None:
    entries = {entry_of(message_id) for message_id in arrived.ids[row]}
    mine = [r for r in encrypted(arrived.rejects) if f"{r['ledger_id']}:{r['entry_id']}" in entries]
    assert len(mine) == len(arrived.ids[row])
    for reject in mine:
        assert (reject["payload"] is not None) == (reject["batch_index"] <= 0)
        assert reject["payload"] != b""
        assert b"payload" not in (reject["payload"] or b"")


def test_nothing_else_comes(arrived: Arrived) -> None:
    sent = {message_id for row in ROWS for message_id in arrived.ids[row]}
    assert set(arrived.seen) == sent
    assert not [row["reason"] for row in arrived.rejects if row["reason"].startswith(NOT_SEEN_REASON)]
