"""Payloads of pydantic's models and of Pulsar's schemas."""

from __future__ import annotations

import base64
import json
from datetime import timedelta
from typing import Any

import pytest
from delaylake.payloads import payload_bytes, schema_type
from delaylake.rest import schedule
from delaylake.scheduled import scheduled
from delaylake.testing import FakeClient
from pulsar.schema import BytesSchema, Integer, JsonSchema, Record, String, StringSchema
from pydantic import BaseModel, Field

HOUR = timedelta(hours=1)


class Order(Record):
    n = Integer(required=True)
    name = String()


class Model(BaseModel):
    n: int
    its_name: str = Field(alias="name")


def content(payload: Any, schema: Any = None) -> dict[str, Any]:
    """The body of the call that schedules a message."""
    made = schedule(scheduled("orders", payload, None, HOUR, None, None, None, None, schema=schema)).content
    assert isinstance(made, dict)
    return made


def test_a_model_of_pydantic_is_its_json_by_aliases() -> None:
    body = content(Model(n=7, name="Zoë"))
    assert json.loads(base64.b64decode(body["payloadBase64"])) == {"n": 7, "name": "Zoë"}
    assert "schema" not in body
    assert content(Model(n=7, name="x"), "JSON")["schema"] == "JSON"


def test_a_schema_of_pulsar_encodes_the_payload_and_is_named() -> None:
    body = content(Order(n=7, name="x"), JsonSchema(Order))
    assert json.loads(base64.b64decode(body["payloadBase64"])) == {"n": 7, "name": "x"}
    assert body["schema"] == "JSON"


def test_texts_and_bytes_have_schemas_too() -> None:
    assert payload_bytes("ü", StringSchema()) == "ü".encode()
    assert payload_bytes(b"\0", BytesSchema()) == b"\0"
    assert [schema_type(one) for one in (StringSchema(), BytesSchema(), "KEY_VALUE")] == [
        "STRING",
        "BYTES",
        "KEY_VALUE",
    ]


@pytest.mark.parametrize(("payload", "schema"), [({"n": 7}, JsonSchema(Order)), (Model(n=1, name=""), StringSchema())])
def test_what_is_not_of_the_schema_is_refused(payload: Any, schema: Any) -> None:
    with pytest.raises(TypeError):
        content(payload, schema)


@pytest.mark.parametrize("payload", [None, 7, {"n": 7}, Model, object()])
def test_other_payloads_are_refused(payload: Any) -> None:
    with pytest.raises(TypeError):
        content(payload)


@pytest.mark.parametrize("schema", [7, Order, {"type": "record"}])
def test_what_is_no_schema_is_refused(schema: Any) -> None:
    with pytest.raises(TypeError, match="schema is none of"):
        content(b"x", schema)


def test_the_service_in_memory_takes_the_same_payloads() -> None:
    lake = FakeClient()
    lake.schedule("orders", Model(n=7, name="x"), after=HOUR)
    lake.schedule("orders", Order(n=8, name="y"), after=HOUR, schema=JsonSchema(Order))
    assert sorted(json.loads(one.payload)["n"] for one in lake.advance(HOUR)) == [7, 8]
