"""What the broker knows of a topic partition's messages that the client does not tell."""

from __future__ import annotations

import hashlib

from deltalake.exceptions import DeltaError

from broker.admin_rest import AdminClient
from broker.client import PulsarError
from broker.key_encodings import BASE64, KeyEncodings
from broker.position import Position, SourceTopic
from warehouse.message_schemas import MessageSchema, SchemaKeeper


class NotKnownYet(Exception):
    """The broker or the warehouse does not answer: a message has to be taken in later."""


class MessageDetails:
    """Of one topic partition. Not safe in several threads.

    Args:
        registry: the topic that the messages come from, where it is another than their route's: its schemas are kept
            under versions of their own.
    """

    def __init__(
        self, source: SourceTopic, admin: AdminClient, schemas: SchemaKeeper, registry: str | None = None
    ) -> None:
        self._topic = source.topic
        self._encodings = KeyEncodings(admin, source.name)
        self._schemas = schemas
        self._registry = registry or source.topic
        self._suffix = b"" if registry is None else hashlib.sha256(registry.encode()).digest()[:8]

    def schema(self, version: bytes) -> tuple[bytes, MessageSchema | None]:
        """The version of a schema as it is kept, and the schema; None: the topic's registry has none.

        Raises:
            NotKnownYet: it could not be asked for, or kept.
        """
        version += self._suffix
        try:
            return version, self._schemas.keep(self._topic, version, self._registry)
        except (PulsarError, DeltaError, OSError) as error:
            raise NotKnownYet(f"a schema: {error}") from error

    def key_encoding(
        self, key: str, producer: str, schema: MessageSchema | None, position: Position, batch_index: int
    ) -> str | None:
        """BASE64, where a message's key is bytes; None: it is text.

        Raises:
            NotKnownYet: the broker does not answer.
        """
        if schema is not None and schema.has_separate_key:
            return BASE64
        try:
            return self._encodings.of(key, producer, *position, batch_index)
        except PulsarError as error:
            raise NotKnownYet(f"whether keys are bytes: {error}") from error
