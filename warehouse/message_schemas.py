"""Stores the schemas of source topics: when a message is delivered, the source topic's registry may be gone.

A receiver writes a schema to the table `schemas` before it ingests the first message with it. A sender registers the
schema with the destination, and makes its producer with it.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa

from broker.client import NoAnswerError
from broker.protocol.wire.pulsar_pb2 import Schema
from broker.pulsar_admin.admin_rest import AdminClient
from conf.errors import DelayLakeError
from warehouse.delta.tables import Tables, exists
from warehouse.named_queries import NamedQueries
from warehouse.schemas import MESSAGE_SCHEMAS as TABLE

K = TypeVar("K")

V = TypeVar("V")


class BoundedDict(OrderedDict[K, V]):
    """Remembers the keys that were set last, and forgets the others.

    Args:
        most: the most keys.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self._most:
            self.popitem(last=False)


COLUMNS = pa.schema(
    [
        ("topic", pa.string()),  # as the route names it
        ("schema_version", pa.binary()),  # as messages have it
        ("type", pa.string()),  # as Pulsar's admin API names it; null: the topic's registry has no such version
        ("definition", pa.string()),  # as the admin API gives it
        ("properties", pa.map_(pa.string(), pa.string())),
        ("seen_at", pa.int64()),  # ms since the epoch
    ]
)

_SQL = NamedQueries(__file__)

VERSION_BYTES = 8

# Whoever publishes chooses the versions of messages, and may register schemas.
MOST_VERSIONS = 10_000  # of a topic in the table

_MOST_UNKNOWN = 100  # of these those that the topic's registry does not have

_MOST_REFUSED = 1_000  # versions that are remembered as not stored

MOST_BYTES = 16 << 20  # of all definitions of a topic: whoever ingests or sends messages has them in memory

_MOST_INFOS = 20_000  # schemas of destinations that a sender remembers: all of one topic for two destinations

_AT_ONCE = 4  # schemas that a process registers at once: each is a ledger at the broker, which others need, too

_TURN_SECONDS = 2.0  # how long a thread waits to be one of these

_WITHOUT = ("NONE",)  # the type of topics without a schema


def version_bytes(version: int) -> bytes:
    """Returns a schema version as messages have it: 8 bytes, big-endian."""
    return version.to_bytes(VERSION_BYTES, "big", signed=True)


def version_number(version: bytes) -> int:
    """Returns the number of a schema version, from the bytes that messages have."""
    return int.from_bytes(version[:VERSION_BYTES], "big", signed=True)


@dataclass(frozen=True)
class MessageSchema:
    """A version of a topic's schema, as Pulsar's admin API has it."""

    type: str
    definition: str
    properties: dict[str, str]

    @property
    def n_bytes(self) -> int:
        """About how many bytes it takes."""
        return len(self.definition) + sum(len(name) + len(value) for name, value in self.properties.items())


class SchemaKeeper:
    """Stores the schemas of source topics. Safe in several threads of one process."""

    def __init__(self, warehouse: str, admin: AdminClient) -> None:
        self._warehouse = warehouse
        self._tables = Tables(warehouse)
        self._admin = admin
        self._lock = threading.Lock()
        self._stored: dict[tuple[str, bytes], MessageSchema | None] | None = None
        # Versions that are not stored, because too many are.
        self._refused: BoundedDict[tuple[str, bytes], None] = BoundedDict(_MOST_REFUSED)

    def keep(self, topic: str, version: bytes, registry: str) -> MessageSchema | None:
        """Returns a version of a topic's schema, and writes it to the table if it is not there yet.

        Args:
            topic: the source topic, as the route names it.
            version: the version's bytes, as messages have them.
            registry: the topic whose schema registry is asked.

        Returns:
            the schema; None: the registry had no such version when it was first asked, or the table has MOST_VERSIONS
            or MOST_BYTES of the topic.

        Raises:
            PulsarError: the broker does not answer, or refuses.
            OSError: the table can't be written.
        """
        key = (topic, version)
        if self._stored is not None and key in self._stored:
            return self._stored[key]
        with self._lock:
            if self._stored is None:
                self._stored = read(self._warehouse)
            if key not in self._stored and key not in self._refused:
                found = self._admin.schema(registry, version_number(version))
                schema = None if found is None else MessageSchema(*found)
                if self._has_room(topic, schema):
                    self._write(topic, version, schema)
                    self._stored[key] = schema
                else:
                    self._refused[key] = None
            return self._stored.get(key)

    def _has_room(self, topic: str, schema: MessageSchema | None) -> bool:
        """Whether the table may have a further version of a topic; None: one that its registry does not have."""
        topic_schemas = [schema for (name, _), schema in (self._stored or {}).items() if name == topic]
        if schema is None:
            return len(topic_schemas) < MOST_VERSIONS and topic_schemas.count(None) < _MOST_UNKNOWN
        n_bytes = sum(one.n_bytes for one in [*topic_schemas, schema] if one is not None)
        return len(topic_schemas) < MOST_VERSIONS and n_bytes <= MOST_BYTES

    def _write(self, topic: str, version: bytes, schema: MessageSchema | None) -> None:
        self._tables.create({TABLE: COLUMNS})
        row: dict[str, Any] = {"topic": topic, "schema_version": version, "seen_at": time.time_ns() // 1_000_000}
        if schema is not None:
            row |= {"type": schema.type, "definition": schema.definition, "properties": list(schema.properties.items())}
        self._tables.append(TABLE, pa.Table.from_pylist([row], schema=COLUMNS), {})


def read(warehouse: str, topic: str | None = None) -> dict[tuple[str, bytes], MessageSchema | None]:
    """Reads the table `schemas`.

    Args:
        topic: the source topic whose schemas are read; None: all.

    Returns:
        the schemas by topic and version (bytes); None: the topic's registry had no such version. Empty if there is no
        such table.
    """
    if not exists(warehouse, TABLE):
        return {}
    rows = Tables(warehouse).query(TABLE, _SQL("all_schemas") if topic is None else _SQL("in_topic", topic=topic))
    return {
        (row["topic"], row["schema_version"]): None
        if row["type"] is None
        else MessageSchema(row["type"], row["definition"], dict(row["properties"] or ()))
        for row in rows.to_pylist()  # the oldest row of a version counts, which comes last here
    }


class UnknownSchemaError(DelayLakeError):
    """A message's schema is not in the table `schemas`."""


class DestinationSchemas:
    """Registers source topics' schemas with destinations, for a sender's producers, some at a time. Thread-safe."""

    def __init__(self, warehouse: str, admin: AdminClient) -> None:
        self._warehouse = warehouse
        self._admin = admin
        self._registered: BoundedDict[tuple[str, str, bytes], None] = BoundedDict(_MOST_INFOS)
        self._stored: dict[str, dict[tuple[str, bytes], MessageSchema | None]] = {}  # by topic, what the table had
        self._reading = threading.Lock()
        self._turns = threading.BoundedSemaphore(_AT_ONCE)

    def schema(self, destination: str, topic: str, version: bytes) -> Schema | None:
        """Registers a version of a source topic's schema with a destination, once, and returns it for a producer.

        Args:
            destination: the destination's topic.
            topic: the source topic, as the route names it.
            version: the version's bytes, as messages have them.

        Returns:
            the schema; None, unregistered, if its type is none that Pulsar's protocol has.

        Raises:
            UnknownSchemaError: the table `schemas` does not have the schema.
            PulsarError: the broker does not answer, has too many others to register, or does not take the schema.
        """
        key = (destination, topic, version)
        schema = self._schema(topic, version)
        own = on_the_wire(schema)
        if own is not None and key not in self._registered:
            if not self._turns.acquire(timeout=_TURN_SECONDS):
                raise NoAnswerError(f"{destination}: other schemas are being registered")
            try:
                # Not by the producer alone: the namespace may let nobody but the admin API register schemas.
                self._admin.register_schema(destination, schema.type, schema.definition, schema.properties)
                self._registered[key] = None
            finally:
                self._turns.release()
        return own

    def _schema(self, topic: str, version: bytes) -> MessageSchema:
        with self._reading:
            schema = self._stored.get(topic, {}).get((topic, version))
            if schema is None:
                self._stored[topic] = read(self._warehouse, topic)
                schema = self._stored[topic].get((topic, version))
        if schema is None:
            raise UnknownSchemaError(f"{topic}: schema version {version_number(version)} is not in the table {TABLE}")
        return schema


def on_the_wire(schema: MessageSchema) -> Schema | None:
    """Returns a schema of the admin API as Pulsar's protocol has it; None: its type is none of the protocol.

    The broker knows it as the one that the admin API has registered.

    Raises:
        UnknownSchemaError: its definition is none of its type.
    """
    if schema.type in _WITHOUT or schema.type not in Schema.Type.keys():  # noqa: SIM118 (an enum of protobuf)
        return None
    definition = schema.definition.encode()
    if schema.type == "KEY_VALUE":  # as `SchemaUtils.convertKeyValueDataStringToSchemaInfoSchema` of Pulsar does it
        try:
            pair = json.loads(schema.definition)
            parts = pair["key"], pair["value"]
        except (LookupError, TypeError, ValueError):
            raise UnknownSchemaError("the table has no pair of schemas, but something else") from None
        definition = b""
        for one in parts:
            text = b"" if one == "" else json.dumps(one, separators=(",", ":"), ensure_ascii=False).encode()
            definition += len(text).to_bytes(4, "big") + text
    properties = [{"key": name, "value": value} for name, value in schema.properties.items()]
    return Schema(name="", type=schema.type, definition=definition, properties=properties)
