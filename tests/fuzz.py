"""Random messages, sent by Pulsar's Java and Python clients side by side, and whether each arrived as it was."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import _pulsar
import pulsar

from tests.harness import http, now
from tests.java_client import command
from tracker.schedule import MAX_TIME_MILLIS

NAMESPACE = "persistent://public/default"
SCHEMAS = ["STRING", "JSON", "AVRO", "AVRO2", "PROTOBUF_NATIVE", "KEY_VALUE"]
COMPRESSIONS = {
    "NONE": pulsar.CompressionType.NONE,
    "LZ4": pulsar.CompressionType.LZ4,
    "ZLIB": pulsar.CompressionType.ZLib,
    "ZSTD": pulsar.CompressionType.ZSTD,
    "SNAPPY": pulsar.CompressionType.SNAPPY,
}
LARGEST = 5_242_880
WORDS = ["", "a", "order", "käse", "\U0001f552", "x" * 300, "0", "\t\n", "YWJj", "user", "delay", "ß\u200d"]


@dataclass
class Fuzz:
    """A run: what to send is the same for a seed, but for the times, which count from the start."""

    seed: int
    n: int
    span_millis: int  # what has a time is due within so long
    prefix: str
    chance: random.Random = field(init=False)
    started: int = field(default_factory=now)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.plain = [f"{self.prefix}-{i}" for i in range(3)]
        self.typed = {kind: f"{self.prefix}-{kind.rstrip('2')}" for kind in SCHEMAS}
        self.producers = [
            {
                "producer": str(i),
                "topic": self.chance.choice(self.plain),
                "compression": self.chance.choice(list(COMPRESSIONS)),
                "batch": self.chance.choice([0, 0, 2, 17, 500]),
                "keys": self.chance.choice(["text", "bytes"]),
            }
            for i in range(12)
        ]
        for producer in self.producers:  # chunks are not batched
            producer["chunk"] = self.chance.choice([0, 50_000, 1_000_000]) if not producer["batch"] else 0

    @property
    def topics(self) -> list[str]:
        return sorted({*self.plain, *self.typed.values()})

    @property
    def partitioned(self) -> str:
        return self.plain[0]

    def messages(self, is_java: bool, first: int, n: int) -> Iterator[dict[str, Any]]:
        """Messages as `tests.java_client.produce` takes them, each with its number in the property `n`."""
        chance = random.Random(f"{self.seed} {is_java}")
        large = {chance.randrange(n) for _ in range(min(8, n // 500) or 1)}
        for i in range(n):
            yield self._message(chance, is_java, str(first + i), i in large)

    def _message(self, chance: random.Random, is_java: bool, name: str, is_large: bool) -> dict[str, Any]:
        message: dict[str, Any] = {"name": name, "properties": {"n": name, **self._properties(chance)}}
        if is_java and chance.random() < 0.2:
            kind = chance.choice(SCHEMAS)
            message |= {"topic": self.typed[kind], "schema": kind, "n": chance.randrange(10_000)}
            message["batch"] = chance.choice([0, 5])
            kinds = "text"
            if chance.random() < 0.05:
                del message["n"]  # a tombstone
        else:
            producer = chance.choice(self.producers)
            message |= producer
            kinds = producer["keys"]
            size = self._size(chance, is_large, bool(producer["chunk"]))
            if size:
                message["size"] = size
            elif chance.random() < 0.5:
                message["payload"] = ""
        if chance.random() < 0.4:
            if kinds == "text" or not is_java:
                message["key"] = chance.choice(WORDS) + chance.choice(["", str(chance.randrange(50))])
            else:
                message["key_bytes"] = chance.randbytes(chance.randint(1, 9))
        if chance.random() < 0.2:
            message["ordering_key"] = chance.randbytes(chance.randint(0, 5))
        if chance.random() < 0.2:
            message["event_time"] = chance.choice([1, 1_700_000_000_000, 2**53, 2**63 - 1])
            if not is_java and chance.random() < 0.05:
                message["event_time"] = 2**63 + 7
        return message

    def _properties(self, chance: random.Random) -> dict[str, str]:
        properties = {chance.choice(WORDS): chance.choice(WORDS) for _ in range(chance.choice([0, 0, 1, 3]))}
        if chance.random() < 0.02:
            properties[chance.choice(["delaylake.source", "delaylake.messageId", "delaylake.attempt"])] = "7:0:-1:-1"
        kind = chance.random()
        if kind < 0.6:
            properties["deliverAt"] = str(self.started + chance.randint(-5_000, self.span_millis))
        elif kind < 0.7:
            properties["deliverAfter"] = str(chance.randint(0, self.span_millis // 2))
        elif kind < 0.72:
            properties["deliverAt"] = chance.choice(["soon", "-1", "", "1.5", str(10**20), str(MAX_TIME_MILLIS + 1)])
        return properties

    def _size(self, chance: random.Random, is_large: bool, is_chunked: bool) -> int:
        if is_large:
            return LARGEST - chance.randint(0, 3_000) - 100 + (chance.choice([0, 200_000]) if is_chunked else -2_000)
        kind = chance.random()
        if kind < 0.02:
            return chance.randint(30_000, 130_000)
        return chance.randint(0, 300) if kind < 0.9 else chance.randint(300, 6_000)


class Producers:
    """Both clients at work, in the background; `wait` returns the numbers of the messages that the broker took."""

    def __init__(self, fuzz: Fuzz, service_url: str, client: pulsar.Client) -> None:
        self._java = subprocess.Popen(
            [*command(), "produce", service_url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._client = client
        self._fuzz = fuzz
        self.sent: set[str] = set()
        self.refused: list[str] = []
        half = fuzz.n // 2
        self._threads = [
            threading.Thread(target=self._feed, args=(fuzz.messages(True, 0, half),), daemon=True),
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._send, args=(fuzz.messages(False, half, fuzz.n - half),), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def are_busy(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def wait(self, seconds: float) -> None:
        for thread in self._threads:
            thread.join(seconds)
        assert not self.are_busy, f"{len(self.sent)} sent"
        assert self._java.wait(60) == 0

    def _feed(self, messages: Iterator[dict[str, Any]]) -> None:
        assert self._java.stdin is not None
        with self._java.stdin as stdin:
            for message in messages:
                print(json.dumps(message, default=_base64), file=stdin)

    def _read(self) -> None:
        assert self._java.stdout is not None
        for line in self._java.stdout:
            if line.startswith("{"):
                told = json.loads(line)
                if "id" in told:
                    self.sent.add(told["name"])
                else:
                    self.refused.append(line)

    def _send(self, messages: Iterator[dict[str, Any]]) -> None:
        producers: dict[str, Any] = {}
        for message in messages:
            key = message["producer"]
            if key not in producers:
                producers[key] = self._client.create_producer(
                    message["topic"],
                    compression_type=COMPRESSIONS[message["compression"]],
                    batching_enabled=message["batch"] > 0,
                    batching_max_messages=max(message["batch"], 2),
                    chunking_enabled=message["chunk"] > 0,
                    block_if_queue_full=True,
                    send_timeout_millis=0,
                )

            def done(result: Any, message_id: Any, name: str = message["name"]) -> None:
                if result == pulsar.Result.Ok:
                    self.sent.add(name)
                else:
                    self.refused.append(f"{name}: {result}")

            try:
                producers[key]._producer.send_async(_built(message), done)
            except pulsar.PulsarException as error:  # too large for this client
                self.refused.append(f"{message['name']}: {error}")
        for producer in producers.values():
            producer.flush()
            producer.close()


def _base64(value: bytes) -> str:
    import base64

    return base64.b64encode(value).decode()


def _built(message: dict[str, Any]) -> Any:
    builder = _pulsar.MessageBuilder()
    if "size" in message:
        builder.content(random.Random(message["name"]).randbytes(message["size"]))
    elif "payload" in message:
        builder.content(b"")
    else:
        builder.set_null_value()
    for name, value in message["properties"].items():
        builder.property(name, value)
    if message.get("key"):
        builder.partition_key(message["key"])
    if "ordering_key" in message:
        builder.ordering_key(message["ordering_key"])
    if "event_time" in message:
        builder.event_timestamp(message["event_time"])
    return builder.build()


@dataclass(frozen=True)
class Seen:
    """A message as a client sees it; two are equal where all of that is."""

    number: str
    digest: bytes
    schema_version: int
    size: int
    is_rejectable: bool
    properties: dict[str, str]


def seen(message: pulsar.Message) -> Seen:
    inner = message._message
    properties = message.properties()
    theirs = sorted((k, v) for k, v in properties.items() if not k.startswith("delaylake."))
    key, ordering_key = message.partition_key(), ordering_key_of(message)
    digest = hashlib.blake2b(digest_size=16)
    for part in (key, theirs, message.event_timestamp(), inner.has_null_value(), ordering_key):
        digest.update(repr(part).encode())
    data = message.data()
    digest.update(data)
    size = len(data) + len(key.encode()) + len(ordering_key)
    size += sum(len(k.encode()) + len(v.encode()) for k, v in properties.items())
    is_rejectable = size > LARGEST - 4_000 or message.event_timestamp() >= 2**63 or not _has_time(properties)
    number = properties.get("n", "")
    ours = {k: v for k, v in properties.items() if k.startswith("delaylake.")}
    return Seen(number, digest.digest(), inner.int_schema_version(), size, is_rejectable, ours)


def ordering_key_of(message: pulsar.Message) -> bytes:
    try:
        return bytes(message.ordering_key(), "utf-8")
    except UnicodeDecodeError as error:
        return bytes(error.object)


def _has_time(properties: dict[str, str]) -> bool:
    for name in ("deliverAt", "deliverAfter"):
        if name in properties:
            text = properties[name]
            return text.isascii() and text.isdigit() and len(text) < 19 and int(text) <= MAX_TIME_MILLIS
    return True


def read_all(client: pulsar.Client, topic: str) -> Iterator[tuple[str, pulsar.Message]]:
    """The messages of a topic, each with its id: ledger:entry:partition:batchIndex."""
    for name in client.get_topic_partitions(topic):
        partition = int(name.rpartition("-partition-")[2]) if name != topic else -1
        reader = client.create_reader(name, pulsar.MessageId.earliest, receiver_queue_size=200)
        while reader.has_message_available():
            message = reader.read_next(60_000)
            found = message.message_id()
            yield f"{found.ledger_id()}:{found.entry_id()}:{partition}:{found.batch_index()}", message
        reader.close()


def unload(admin_url: str, topic: str) -> None:
    """Lets the broker drop a topic, whose clients then connect again."""
    http.put(f"{admin_url}/admin/v2/{topic.replace('://', '/', 1)}/unload")


def check(fuzz: Fuzz, client: pulsar.Client, sent: set[str], rejects: dict[str, str]) -> dict[str, int]:
    """Asserts that each message that a source topic has came once to its destination as it was, or was rejected.

    Args:
        sent: the numbers of the messages that the broker has acknowledged.
        rejects: by id the reason, of the table.

    Returns:
        how many were delivered and rejected.
    """
    wrong: dict[str, list[str]] = {name: [] for name in ("lost", "doubled", "changed", "rejected", "unexpected")}
    left = set(sent)
    known: set[str] = set()
    n_delivered = n_rejected = 0
    for topic in fuzz.topics:
        source = {message_id: seen(message) for message_id, message in read_all(client, topic)}
        known |= source.keys()
        left -= {message.number for message in source.values()}
        came: set[str] = set()
        versions: set[tuple[int, int]] = set()
        for _, message in read_all(client, f"{topic}-a"):
            arrived = seen(message)
            message_id = arrived.properties.get("delaylake.messageId", "")
            original = source.get(message_id)
            if original is None or arrived.properties["delaylake.source"] != topic:
                wrong["unexpected"].append(f"{topic} {message_id}")
                continue
            if message_id in came or message_id in rejects:
                wrong["doubled"].append(f"{topic} {message_id}")
            came.add(message_id)
            if arrived.digest != original.digest or (arrived.schema_version < 0) != (original.schema_version < 0):
                wrong["changed"].append(f"{topic} {message_id} ({original.number})")
            if "delaylake.attempt" in arrived.properties:
                wrong["changed"].append(f"{topic} {message_id}: forged {arrived.properties}")
            versions.add((original.schema_version, arrived.schema_version))
        rejected = source.keys() & rejects.keys()
        wrong["rejected"] += [f"{topic} {i}: {rejects[i]}" for i in rejected if not source[i].is_rejectable]
        wrong["lost"] += [f"{topic} {i} ({source[i].number})" for i in source.keys() - came - rejected]
        assert len(versions) == len({of_source for of_source, _ in versions}), versions
        n_delivered, n_rejected = n_delivered + len(came), n_rejected + len(rejected)
    wrong["unexpected"] += [f"{i}: {reason}" for i, reason in rejects.items() if i not in known]
    assert not left, f"the sources lack {len(left)}: {sorted(left)[:5]}"
    assert not any(wrong.values()), {what: (len(found), found[:5]) for what, found in wrong.items() if found}
    return {"delivered": n_delivered, "rejected": n_rejected}
