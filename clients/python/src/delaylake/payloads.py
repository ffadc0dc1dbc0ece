"""Payloads of all kinds become bytes, and a schema is known by the name of its type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from delaylake.arguments import check_text


class JsonModel(Protocol):
    """A model that makes JSON of itself, as those of pydantic do; pydantic itself is not needed."""

    def model_dump_json(self, *, by_alias: bool) -> str: ...


class PulsarSchema(Protocol):
    """A schema of Pulsar's client, such as `pulsar.schema.JsonSchema(Order)`."""

    def encode(self, obj: Any) -> bytes: ...
    def schema_info(self) -> Any: ...


class PulsarRecord(Protocol):
    """A value of a record of `pulsar.schema`, for a schema of that record."""

    @classmethod
    def schema(cls) -> Any: ...


Payload = bytes | str | JsonModel | PulsarRecord | Mapping[str, Any]


def payload_bytes(payload: Any, schema: PulsarSchema | str | None) -> bytes:
    """Returns a payload's bytes: of a text those of UTF-8, of a model its JSON, by names of aliases.

    Args:
        schema: a schema of Pulsar's client encodes the payload, and checks it; one that is only named does not.

    Raises:
        TypeError: the payload is none of these, or not of the schema's record.
        ValueError: the text is not one of Unicode.
    """
    if schema is not None and not isinstance(schema, str):
        return schema.encode(payload)
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(payload)
    if isinstance(payload, str):
        check_text("payload", payload)
        return payload.encode()
    dump = getattr(payload, "model_dump_json", None)
    if not callable(dump):
        raise TypeError(f"the payload is neither bytes nor a text nor a model of pydantic: {type(payload).__name__}")
    text: str = dump(by_alias=True)
    return text.encode()


def schema_type(schema: PulsarSchema | str) -> str:
    """Returns the name of a schema's type, such as `JSON`.

    Raises:
        TypeError: it is neither a schema nor a name.
    """
    if isinstance(schema, str):
        check_text("schema", schema)
        return schema
    if isinstance(schema, type) or not callable(getattr(schema, "schema_info", None)):
        raise TypeError(f"schema is none of Pulsar's client, nor the name of a type: {schema!r}")
    name: str = schema.schema_info().schema_type().name
    return name
