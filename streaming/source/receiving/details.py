"""Looks up the schemas of messages, of which an entry has the version alone."""

from __future__ import annotations

import hashlib

from deltalake.exceptions import DeltaError

from broker.client import PulsarError
from broker.position import SourceTopic
from conf.errors import DelayLakeError
from warehouse.message_schemas import VERSION_BYTES, MessageSchema, SchemaKeeper


class NotKnownYetError(DelayLakeError):
    """Broker or warehouse do not answer, so the message has to be ingested later. Control flow: it is caught."""


class MessageDetails:
    """Looks up the schemas of the messages of one topic partition. Not thread-safe.

    Args:
        source: the topic partition.
        schemas: stores schemas in the table `schemas`.
        registry: the topic in whose schema registry the messages' versions are, where it is another than the source
            topic: its schemas are stored under versions of their own. None: the source topic.
    """

    def __init__(self, source: SourceTopic, schemas: SchemaKeeper, registry: str | None = None) -> None:
        self._topic = source.topic
        self._schemas = schemas
        self._registry = registry or source.topic
        self._suffix = b"" if registry is None else hashlib.sha256(registry.encode()).digest()[:8]

    def schema(self, version: bytes) -> tuple[bytes, MessageSchema | None]:
        """Looks up a schema, and stores it in the warehouse.

        Args:
            version: the schema version of a message.

        Returns:
            (version under which the schema is stored, schema); the schema is None where the topic has no such version,
            or too many.

        Raises:
            NotKnownYetError: the broker does not answer, or the schema can't be stored.
        """
        if len(version) > VERSION_BYTES:
            return version[:VERSION_BYTES], None
        version += self._suffix
        try:
            return version, self._schemas.keep(self._topic, version, self._registry)
        except (PulsarError, DeltaError, OSError) as error:
            raise NotKnownYetError(f"a schema: {error}") from error
