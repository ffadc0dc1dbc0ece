"""The schemas of source topics, kept for as long as messages wait: the topics' own registry may be gone by then.

Whoever reads a source topic keeps a schema in the table `schemas` before it takes the first message that has it. A
sender registers it with the destination, and gives its producer there the same.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import _pulsar
import pulsar
import pyarrow as pa

from broker.admin_rest import AdminClient
from conf.errors import DelayLakeError
from warehouse.tables import MESSAGE_SCHEMAS as TABLE
from warehouse.tables import Tables, exists, literal

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

_VERSION_BYTES = 8

# What Pulsar's C++ client can send with a schema. Others it sends without.
_CARRIED = ("STRING", "JSON", "AVRO", "PROTOBUF", "PROTOBUF_NATIVE", "KEY_VALUE")


def version_bytes(version: int) -> bytes:
    """A schema version as messages carry it."""
    return version.to_bytes(_VERSION_BYTES, "big", signed=True)


def version_number(version: bytes) -> int:
    """The number of a schema version that messages carry."""
    return int.from_bytes(version[:_VERSION_BYTES], "big", signed=True)


@dataclass(frozen=True)
class MessageSchema:
    """A version of a topic's schema, as Pulsar's admin API tells it."""

    type: str
    definition: str
    properties: dict[str, str]

    @property
    def has_separate_key(self) -> bool:
        """Whether messages' keys are bytes: those of a pair's first half."""
        return self.type == "KEY_VALUE" and self.properties.get("kv.encoding.type") == "SEPARATED"


class SchemaKeeper:
    """Keeps the schemas of topics that are read. Safe in several threads of one process."""

    def __init__(self, warehouse: str, admin: AdminClient) -> None:
        self._warehouse = warehouse
        self._tables = Tables(warehouse)
        self._admin = admin
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, bytes], MessageSchema | None] | None = None

    def keep(self, topic: str, version: bytes, registry: str) -> MessageSchema | None:
        """The schema, which is in the table from now on; None: the topic's registry had none when it was first seen.

        Args:
            topic: as messages' route names it.
            registry: the topic that has it.

        Raises:
            PulsarError: the broker does not answer.
            OSError: the table can't be written.
        """
        key = (topic, version)
        if self._kept is not None and key in self._kept:
            return self._kept[key]
        with self._lock:
            if self._kept is None:
                self._kept = read(self._warehouse)
            if key not in self._kept:
                found = self._admin.schema(registry, version_number(version))
                schema = None if found is None else MessageSchema(*found)
                self._write(topic, version, schema)
                self._kept[key] = schema
            return self._kept[key]

    def _write(self, topic: str, version: bytes, schema: MessageSchema | None) -> None:
        self._tables.create({TABLE: COLUMNS})
        row: dict[str, Any] = {"topic": topic, "schema_version": version, "seen_at": time.time_ns() // 1_000_000}
        if schema is not None:
            row |= {"type": schema.type, "definition": schema.definition, "properties": list(schema.properties.items())}
        self._tables.append(TABLE, pa.Table.from_pylist([row], schema=COLUMNS), {})


def read(warehouse: str, topic: str | None = None) -> dict[tuple[str, bytes], MessageSchema | None]:
    """The schemas that are kept, by topic and version.

    Args:
        topic: of it alone.
    """
    if not exists(warehouse, TABLE):
        return {}
    condition = "" if topic is None else f" WHERE topic = {literal(topic)}"
    rows = Tables(warehouse).query(TABLE, f"SELECT * FROM {TABLE}{condition} ORDER BY seen_at DESC")  # noqa: S608
    return {
        (row["topic"], row["schema_version"]): None
        if row["type"] is None
        else MessageSchema(row["type"], row["definition"], dict(row["properties"] or ()))
        for row in rows.to_pylist()  # of several the first, which comes last here, holds
    }


_PLAIN = pulsar.schema.BytesSchema().schema_info()


class UnknownSchema(DelayLakeError):
    """A message's schema is not in the table `schemas`."""


class DestinationSchemas:
    """The schemas of a sender's producers, for each destination and schema of a source topic."""

    def __init__(self, warehouse: str, admin: AdminClient) -> None:
        self._warehouse = warehouse
        self._admin = admin
        self._infos: dict[tuple[str, str, bytes], _pulsar.SchemaInfo] = {}

    def info(self, client: pulsar.Client, destination: str, topic: str, version: bytes) -> _pulsar.SchemaInfo:
        """A source topic's schema, registered with a destination; that of plain bytes where its type can't be carried.

        Raises:
            UnknownSchema: the table `schemas` does not have it.
            PulsarError: the broker does not answer, or the destination does not take it.
        """
        key = (destination, topic, version)
        if key not in self._infos:
            schema = read(self._warehouse, topic).get((topic, version))
            if schema is None:
                raise UnknownSchema(f"{topic}: schema version {version_number(version)} is not in the table {TABLE}")
            if schema.type not in _CARRIED:
                return _PLAIN
            # The client can't be told a schema's properties. The broker's registry can, and tells the client.
            at = self._admin.register_schema(destination, schema.type, schema.definition, schema.properties)
            self._infos[key] = client._client.get_schema_info(destination, at)
        return self._infos[key]


def producer_with_schema(client: pulsar.Client, topic: str, info: _pulsar.SchemaInfo, **options: Any) -> Any:
    """A producer whose messages have a schema, and are sent as they are: encoded already.

    Args:
        options: of `pulsar.Client.create_producer`.
    """
    if info.schema_type() == _pulsar.SchemaType.KEY_VALUE:
        return KeyValueProducer(client, topic, info, **options)
    return client.create_producer(topic, schema=AsItIs(info), **options)


class AsItIs(pulsar.schema.BytesSchema):  # type: ignore[misc]  # the client has no types
    """A schema for a producer whose payloads are encoded already."""

    def __init__(self, info: _pulsar.SchemaInfo) -> None:
        super().__init__()
        self._schema_info = info


class KeyValueProducer:
    """A producer of pairs that are encoded already.

    Pulsar's C++ client encodes what a KEY_VALUE producer sends, and takes nothing that is. It does so when a message is
    handed over, by the schema of the producer's configuration: for that moment this is another.
    """

    def __init__(self, client: pulsar.Client, topic: str, info: _pulsar.SchemaInfo, **options: Any) -> None:
        self._info = info
        self._configuration = _pulsar.ProducerConfiguration()
        for name, value in options.items():
            getattr(self._configuration, name)(value)
        self._configuration.schema(info)
        self._inner = client._client.create_producer(topic, self._configuration)
        self._producer = self
        self.flush_async = self._inner.flush_async
        self.flush = self._inner.flush
        self.close = self._inner.close
        self.last_sequence_id = self._inner.last_sequence_id

    def send_async(self, message: _pulsar.Message, callback: Any) -> None:
        """Hands over a message whose payload is encoded already; `callback` gets the result and the message id."""
        self._configuration.schema(_PLAIN)
        try:
            self._inner.send_async(message, callback)
        finally:
            self._configuration.schema(self._info)
