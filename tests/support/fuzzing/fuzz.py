"""Random messages, sent by Pulsar's Java and Python clients side by side."""

from __future__ import annotations

import base64
import itertools
import json
import random
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _pulsar
import pulsar

from tests.support.clients.java_client import command, make_key
from tests.support.service.harness import http, now
from tracker.due_time import MAX_TIME_MILLIS

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
OWN, STRANGERS = "own", "strangers"  # keys for which messages are encrypted: the job has the first
WORDS = ["", "a", "order", "käse", "\U0001f552", "x" * 300, "0", "\t\n", "YWJj", "user", "delay", "ß\u200d"]


class Order(pulsar.schema.Record):
    item = pulsar.schema.String()
    amount = pulsar.schema.Integer()


PYTHON_SCHEMAS = {"STRING": pulsar.schema.StringSchema(), "JSON": pulsar.schema.JsonSchema(Order)}


@dataclass
class Fuzz:
    """A run: what to send is the same for a seed, but for the times, which count from the moment.

    Attributes:
        n: how many messages.
        span_millis: what has a time is due within so long.
        prefix: of the topics' names.
        folder: for the keys.
    """

    seed: int
    n: int
    span_millis: int
    prefix: str
    folder: Path
    chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.plain = [f"{self.prefix}-{i}" for i in range(3)]
        self.typed = {kind: f"{self.prefix}-{kind.rstrip('2')}" for kind in SCHEMAS}
        self.python_typed = {kind: f"{self.prefix}-python-{kind}" for kind in PYTHON_SCHEMAS}
        self.key_files = {name: make_key(self.folder, name) for name in (OWN, STRANGERS)}
        self.producers: list[dict[str, Any]] = [
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
        for producer, key in zip(self.producers, (STRANGERS, OWN, OWN, OWN), strict=False):
            producer["encrypted"] = {self.chance.choice(["key", "käse"]): self.public_key(key).as_uri()}
        # What these are, the broker tells of no other ones: see warehouse/unseen_entries.py.
        self.producers[0] |= {"compression": "NONE", "chunk": 0}
        self.weights = [1, *[5] * (len(self.producers) - 1)]

    @property
    def topics(self) -> list[str]:
        return sorted({*self.plain, *self.typed.values(), *self.python_typed.values()})

    def public_key(self, name: str) -> Path:
        return self.folder / f"{name}.pem"

    def is_for_strangers(self, message: dict[str, Any]) -> bool:
        return self.public_key(STRANGERS).as_uri() in message.get("encrypted", {}).values()

    @property
    def partitioned(self) -> str:
        return self.plain[0]

    def messages(self, is_java: bool, first: int, n: int) -> Iterator[dict[str, Any]]:
        """Messages as `java_client.produce` takes them, each with its number in the property `n`."""
        chance = random.Random(f"{self.seed} {is_java}")
        large = {chance.randrange(n) for _ in range(min(8, n // 500) or 1)}
        transactions: list[str] = []  # that are open
        kinds = itertools.cycle(["abort", "commit", "commit"])
        for i in range(n):
            message = self._message(chance, is_java, str(first + i), i in large)
            if is_java and len(transactions) < 3 and chance.random() < 0.002:
                transactions.append(f"{next(kinds)}-{i}")
            if transactions and not message.get("chunk") and chance.random() < 0.2:
                message["transaction"] = chance.choice(transactions)
            yield message
            if transactions and chance.random() < 0.01:
                yield {"end": transactions.pop(chance.randrange(len(transactions)))}

    def _message(self, chance: random.Random, is_java: bool, name: str, is_large: bool) -> dict[str, Any]:
        message: dict[str, Any] = {"name": name, "properties": {"n": name, **self._properties(chance)}}
        if chance.random() < 0.2:
            topics = self.typed if is_java else self.python_typed
            kind = chance.choice(list(topics))
            message |= {"topic": topics[kind], "schema": kind, "n": chance.randrange(10_000)}
            message["batch"] = chance.choice([0, 5])
            kinds = "text"
            if chance.random() < 0.05:
                del message["n"]  # a tombstone
        else:
            [producer] = chance.choices(self.producers, self.weights)
            message |= producer
            kinds = producer["keys"]
            # The C++ client can't read what it has cut into chunks, compressed and encrypted itself.
            size = self._size(chance, is_large, bool(producer["chunk"]) and "encrypted" not in producer)
            if not is_java and producer["compression"] != "NONE":
                # What it has compressed itself the C++ client can't read where it is empty, or has become too large.
                size = min(max(size, 1), LARGEST - 30_000)
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
            properties["deliverAt"] = str(now() + chance.randint(-5_000, self.span_millis))
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
    """Both clients at work, in the background.

    Attributes:
        sent: the numbers of the messages that the broker has acknowledged, but for those of transactions that were
            aborted.
        unreadable: of these, those for which the job has no key, with the positions of their entries in `rejects`.
        refused: what clients, or the broker, did not take.
        aborted: how many messages were of transactions that were aborted.
    """

    def __init__(self, fuzz: Fuzz, service_url: str, client: pulsar.Client) -> None:
        self._java = subprocess.Popen(
            [*command(), "produce", service_url, "transactions"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._client = client
        self._fuzz = fuzz
        self.sent: set[str] = set()
        self.unreadable: dict[str, str] = {}
        self.refused: list[str] = []
        self.aborted = 0
        self._transactions: dict[str, str] = {}  # by message
        self._failed: set[str] = set()  # transactions that did not end as they should have
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
        assert self._java.wait(300) == 0
        aborted = {n for n, name in self._transactions.items() if name.startswith("abort") or name in self._failed}
        self.aborted = len(aborted)
        self.sent -= aborted
        self.unreadable = {n: position for n, position in self.unreadable.items() if n in self.sent}

    def _feed(self, messages: Iterator[dict[str, Any]]) -> None:
        assert self._java.stdin is not None
        with self._java.stdin as stdin:
            for message in messages:
                if "transaction" in message:
                    self._transactions[message["name"]] = message["transaction"]
                if self._fuzz.is_for_strangers(message):
                    self.unreadable[message["name"]] = ""
                print(json.dumps(message, default=_base64), file=stdin)

    def _read(self) -> None:
        assert self._java.stdout is not None
        with self._java.stdout as lines:
            for line in lines:
                if line.startswith("{"):
                    told = json.loads(line)
                    if "id" in told:
                        self._was_sent(told["name"], *told["id"].split(":")[:3])
                    elif told["name"].isdigit():
                        self.refused.append(line)
                    else:
                        self._failed.add(told["name"])

    def _was_sent(self, number: str, ledger: Any, entry: Any, partition: Any) -> None:
        self.sent.add(number)
        if number in self.unreadable:
            self.unreadable[number] = f"{ledger}:{entry}:{partition}:-1"

    def _send(self, messages: Iterator[dict[str, Any]]) -> None:
        producers: dict[str, Any] = {}
        for message in messages:
            key = f"{message.get('producer')} {message['topic']} {message['batch']}"
            if key not in producers:
                producers[key] = self._producer(message)
            if self._fuzz.is_for_strangers(message):
                self.unreadable[message["name"]] = ""

            def done(result: Any, message_id: Any, name: str = message["name"]) -> None:
                if result == pulsar.Result.Ok:
                    self._was_sent(name, message_id.ledger_id(), message_id.entry_id(), message_id.partition())
                else:
                    self.refused.append(f"{name}: {result}")

            try:
                producers[key]._producer.send_async(_built(message), done)
            except pulsar.PulsarException as error:  # too large for this client
                self.refused.append(f"{message['name']}: {error}")
        for producer in producers.values():
            producer.flush()
            producer.close()

    def _producer(self, message: dict[str, Any]) -> pulsar.Producer:
        options: dict[str, Any] = {}
        for name, key in message.get("encrypted", {}).items():
            reader = pulsar.CryptoKeyReader(key.removeprefix("file://"), "")
            options = {"encryption_key": name, "crypto_key_reader": reader}
        if "schema" in message:
            options["schema"] = PYTHON_SCHEMAS[message["schema"]]
        return self._client.create_producer(
            message["topic"],
            compression_type=COMPRESSIONS[message.get("compression", "NONE")],
            batching_enabled=message["batch"] > 0,
            batching_max_messages=max(message["batch"], 2),
            chunking_enabled=message.get("chunk", 0) > 0,
            block_if_queue_full=True,
            send_timeout_millis=0,
            **options,
        )


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _built(message: dict[str, Any]) -> Any:
    builder = _pulsar.MessageBuilder()
    if "size" in message:
        builder.content(random.Random(message["name"]).randbytes(message["size"]))
    elif "n" in message:
        text = f"item {message['n']}"
        value = text if message["schema"] == "STRING" else Order(item=text, amount=message["n"])
        builder.content(PYTHON_SCHEMAS[message["schema"]].encode(value))
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


def unload(admin_url: str, topic: str) -> None:
    """Lets the broker drop a topic, whose clients then connect again."""
    http.put(f"{admin_url}/admin/v2/{topic.replace('://', '/', 1)}/unload")
