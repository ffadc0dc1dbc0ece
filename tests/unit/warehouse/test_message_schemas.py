"""Schemas of source topics: kept when they are first seen, and given to producers at the destinations."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from broker.client import PulsarError
from broker.position import SourceTopic
from broker.protocol.wire.pulsar_pb2 import Schema
from streaming.source.receiving.details import MessageDetails, NotKnownYetError
from warehouse import message_schemas
from warehouse.message_schemas import (
    DestinationSchemas,
    MessageSchema,
    SchemaKeeper,
    UnknownSchemaError,
    on_the_wire,
    read,
    version_bytes,
)

TOPIC = "persistent://public/default/t"
FIRST = b"\0" * 8
PROPERTIES = [{"key": "a", "value": "b"}]
AVRO = ("AVRO", '{"type": "record"}', {"a": "b"})


class Admin:
    """A broker with schemas of topics."""

    def __init__(self, schemas: dict[tuple[str, int], tuple[str, str, dict[str, str]]]) -> None:
        self.schemas = schemas
        self.asked: list[tuple[str, int]] = []
        self.registered: list[tuple[Any, ...]] = []
        self.answers = True

    def schema(self, topic: str, version: int) -> tuple[str, str, dict[str, str]] | None:
        if not self.answers:
            raise PulsarError("no answer")
        self.asked.append((topic, version))
        return self.schemas.get((topic, version))

    def register_schema(self, *schema: Any) -> int:
        self.registered.append(schema)
        return 7


def test_a_schema_is_asked_for_once_and_outlives_its_registry(tmp_path: Path) -> None:
    admin: Any = Admin({(TOPIC, 0): AVRO})
    keeper = SchemaKeeper(str(tmp_path), admin)
    assert [keeper.keep(TOPIC, FIRST, TOPIC) for _ in range(2)] == [MessageSchema(*AVRO)] * 2
    assert admin.asked == [(TOPIC, 0)]

    admin.schemas.clear()
    assert SchemaKeeper(str(tmp_path), admin).keep(TOPIC, FIRST, TOPIC) == MessageSchema(*AVRO)
    assert read(str(tmp_path)) == {(TOPIC, FIRST): MessageSchema(*AVRO)}
    assert read(str(tmp_path), "another") == {}


def test_that_there_is_none_is_kept_too_so_that_a_replay_says_the_same(tmp_path: Path) -> None:
    admin: Any = Admin({})
    assert SchemaKeeper(str(tmp_path), admin).keep(TOPIC, FIRST, TOPIC) is None
    admin.schemas[TOPIC, 0] = AVRO
    assert SchemaKeeper(str(tmp_path), admin).keep(TOPIC, FIRST, TOPIC) is None


def test_of_ten_times_as_many_versions_as_a_topic_may_have_the_first_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, most in (("MOST_VERSIONS", 5), ("_MOST_UNKNOWN", 2), ("_MOST_REFUSED", 3)):
        monkeypatch.setattr(message_schemas, name, most)
    admin: Any = Admin({(TOPIC, n): AVRO for n in range(100, 150)})
    keeper = SchemaKeeper(str(tmp_path), admin)
    versions = [*range(20), *range(100, 150)]
    found = [keeper.keep(TOPIC, version_bytes(n), TOPIC) for n in versions]
    kept = {(TOPIC, version_bytes(n)): None for n in (0, 1)}
    assert read(str(tmp_path)) == kept | {(TOPIC, version_bytes(n)): MessageSchema(*AVRO) for n in (100, 101, 102)}
    assert [n for n, schema in zip(versions, found, strict=True) if schema] == [100, 101, 102]
    assert len(keeper._refused) == 3
    # Another topic has its own, and what is kept is still there.
    admin.schemas["other", 0] = AVRO
    assert keeper.keep("other", FIRST, "other") == MessageSchema(*AVRO)
    assert keeper.keep(TOPIC, version_bytes(100), TOPIC) == MessageSchema(*AVRO)


def test_a_version_that_is_longer_than_any_is_none(tmp_path: Path) -> None:
    admin: Any = Admin({(TOPIC, 0): AVRO})
    details = MessageDetails(SourceTopic(TOPIC, TOPIC, -1), SchemaKeeper(str(tmp_path), admin))
    assert details.schema(FIRST + b"x" * 1_000_000) == (FIRST, None)
    assert admin.asked == []


def test_a_broker_that_does_not_answer_is_asked_again(tmp_path: Path) -> None:
    admin: Any = Admin({(TOPIC, 0): AVRO})
    details = MessageDetails(SourceTopic(TOPIC, TOPIC, -1), SchemaKeeper(str(tmp_path), admin))
    admin.answers = False
    with pytest.raises(NotKnownYetError):
        details.schema(FIRST)
    admin.answers = True
    assert details.schema(FIRST) == (FIRST, MessageSchema(*AVRO))


def test_schemas_of_an_imported_topic_do_not_pass_for_those_of_the_route(tmp_path: Path) -> None:
    other = "persistent://public/default/other"
    admin: Any = Admin({(TOPIC, 0): AVRO, (other, 0): ("STRING", "", {})})
    keeper = SchemaKeeper(str(tmp_path), admin)
    source = SourceTopic(TOPIC, TOPIC, -1)
    version, schema = MessageDetails(source, keeper).schema(FIRST)
    imported_version, imported = MessageDetails(source, keeper, other).schema(FIRST)
    assert (schema, imported) == (MessageSchema(*AVRO), MessageSchema("STRING", "", {}))
    assert version != imported_version
    assert len(read(str(tmp_path))) == 2


def test_a_schema_is_registered_once_with_each_destination(tmp_path: Path) -> None:
    admin: Any = Admin({(TOPIC, 0): AVRO, (TOPIC, 1): ("EXTERNAL", "", {})})
    keeper = SchemaKeeper(str(tmp_path), admin)
    keeper.keep(TOPIC, FIRST, TOPIC)
    schemas = DestinationSchemas(str(tmp_path), admin)
    found = [schemas.schema(destination, TOPIC, FIRST) for destination in "aab"]
    assert found == 3 * [Schema(name="", type=Schema.AVRO, definition=AVRO[1].encode(), properties=PROPERTIES)]
    assert admin.registered == [("a", *AVRO), ("b", *AVRO)]

    second = b"\0" * 7 + b"\1"
    with pytest.raises(UnknownSchemaError, match="schema version 1 is not in the table schemas"):
        schemas.schema("a", TOPIC, second)
    keeper.keep(TOPIC, second, TOPIC)
    assert schemas.schema("a", TOPIC, second) is None, "the protocol has no such type"
    assert len(admin.registered) == 2


@pytest.mark.parametrize(
    ("definition", "expected"),
    [
        ('{"key":"","value":{"type": "é"}}', b'\0\0\0\0\0\0\0\x0d{"type":"\xc3\xa9"}'),
        ('{"key":{"a":1},"value":""}', b'\0\0\0\7{"a":1}\0\0\0\0'),
    ],
)
def test_a_pair_of_schemas_is_as_the_broker_has_it(definition: str, expected: bytes) -> None:
    schema = on_the_wire(MessageSchema("KEY_VALUE", definition, {}))
    assert schema is not None
    assert (schema.type, schema.definition) == (Schema.KEY_VALUE, expected)


@pytest.mark.parametrize("kind", ["INT32", "BOOLEAN", "TIMESTAMP", "LOCAL_DATE", "STRING", "PROTOBUF_NATIVE"])
def test_every_type_of_the_admin_api_is_one_of_the_protocol(kind: str) -> None:
    schema = on_the_wire(MessageSchema(kind, "", {}))
    assert schema is not None
    assert Schema.Type.Name(schema.type) == kind
    assert on_the_wire(MessageSchema("NONE", "", {})) is None


def test_of_ten_times_as_many_bytes_as_a_topic_s_schemas_may_have_the_first_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_schemas, "MOST_BYTES", 1_000)
    admin: Any = Admin({(TOPIC, n): ("AVRO", "x" * 200, {}) for n in range(50)})
    keeper = SchemaKeeper(str(tmp_path), admin)
    found = [keeper.keep(TOPIC, version_bytes(n), TOPIC) for n in range(50)]
    assert [schema is not None for schema in found] == [True] * 5 + [False] * 45
    assert len(read(str(tmp_path))) == 5


def test_ten_times_as_many_schemas_as_a_sender_remembers_are_registered_and_the_table_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_schemas, "_MOST_INFOS", 3)
    admin: Any = Admin({(TOPIC, n): AVRO for n in range(30)})
    keeper = SchemaKeeper(str(tmp_path), admin)
    for n in range(30):
        keeper.keep(TOPIC, version_bytes(n), TOPIC)
    reads: list[str] = []

    def noted(warehouse: str, topic: str) -> dict[tuple[str, bytes], MessageSchema | None]:
        reads.append(topic)
        return read(warehouse, topic)

    monkeypatch.setattr(message_schemas, "read", noted)
    schemas = DestinationSchemas(str(tmp_path), admin)
    for n in range(30):
        assert schemas.schema("a", TOPIC, version_bytes(n)) is not None
    assert len(admin.registered) == 30
    assert len(schemas._registered) == 3
    assert reads == [TOPIC]


def test_a_process_registers_few_schemas_at_once_and_says_so_to_whoever_waits_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_schemas, "_TURN_SECONDS", 0.0)
    admin: Any = Admin({(TOPIC, n): AVRO for n in range(8)})
    keeper = SchemaKeeper(str(tmp_path), admin)
    for n in range(8):
        keeper.keep(TOPIC, version_bytes(n), TOPIC)
    schemas = DestinationSchemas(str(tmp_path), admin)
    may_answer, asked = threading.Event(), threading.Semaphore(0)

    def register(*schema: Any) -> int:
        asked.release()
        assert may_answer.wait(30)
        return 7

    admin.register_schema = register
    threads = [threading.Thread(target=schemas.schema, args=("a", TOPIC, version_bytes(n))) for n in range(4)]
    for thread in threads:
        thread.start()
        assert asked.acquire(timeout=30)
    with pytest.raises(PulsarError, match="a: other schemas are being registered"):
        schemas.schema("a", TOPIC, version_bytes(5))
    may_answer.set()
    for thread in threads:
        thread.join()
    assert schemas.schema("a", TOPIC, version_bytes(5)) is not None
