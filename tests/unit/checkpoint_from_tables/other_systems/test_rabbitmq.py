"""What is made of messages in a queue of RabbitMQ's."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from pika.spec import Basic, BasicProperties

from checkpoint_from_tables.other_systems.item import SourceError
from checkpoint_from_tables.other_systems.rabbitmq import RabbitMQ, _digest, message

NOW = 1_800_000_000_000
GOT = Basic.GetOk(1, False, "later", "mail", 0)


@pytest.mark.parametrize(
    ("about", "due"),
    [
        ({"headers": {"x-delay": 500}}, NOW + 500),
        ({"headers": {"x-delay": "500"}, "expiration": "7"}, NOW + 500),
        ({"expiration": "700"}, NOW + 700),
        ({"expiration": "700", "timestamp": 1_700_000_000}, 1_700_000_000_700),
        ({"expiration": "700", "timestamp": datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)}, 1_700_000_000_700),
        ({"headers": {"x-delay": 5, "timestamp_in_ms": 1_700_000_000_123}, "timestamp": 1}, 1_700_000_000_128),
        ({"headers": {"x-delay": -500}}, None),
        ({"headers": {"x-delay": 60_000.0}}, NOW + 60_000),
        ({"headers": {"x-delay": "60000.0"}}, NOW + 60_000),
        ({"headers": {"x-delay": Decimal("60000.5")}}, NOW + 60_001),
        ({"expiration": "700", "timestamp": 1_700_000_000_123}, 1_700_000_000_823),
        ({"expiration": "700", "timestamp": 0}, NOW + 700),
        ({"headers": {"x-delay": 5, "timestamp_in_ms": 0}}, NOW + 5),
    ],
)
def test_a_message_is_due_its_delay_after_it_was_published_as_far_as_that_is_told(
    about: dict[str, Any], due: int | None
) -> None:
    found = message("id", GOT, BasicProperties(**about), b"body", NOW)
    assert found is not None
    assert (found.id, found.due, found.payload, found.reason) == ("id", due, b"body", None)


def test_a_message_has_its_plain_headers_and_what_rabbitmq_has_of_it_as_properties() -> None:
    headers = {"x-delay": 5, "colour": "red", "n": 3, "x-death": [{"count": 1}], "delaylake.x": "y", "when": None}
    about = BasicProperties(headers=headers, content_type="text/plain", message_id="m")
    found = message("id", GOT, about, b"", NOW)
    assert found is not None
    own = {"exchange": "later", "routingKey": "mail", "contentType": "text/plain", "messageId": "m"}
    assert found.properties == {"colour": "red", "n": "3", **own}


def test_names_and_an_id_that_are_no_utf_8_have_escapes() -> None:
    headers = {"x-delay": 5, b"caf\xe9": "x", "table": {b"\xff": [{b"\xfe": 1}]}, "is_paid": True}
    about = BasicProperties(headers=headers, correlation_id=b"\xff1")
    found = message("id", GOT, about, b"", NOW)
    assert found is not None
    assert found.properties.items() >= {"caf\\xe9": "x", "correlationId": "\\xff1", "is_paid": "true"}.items()
    assert _digest(GOT, about, b"") == _digest(GOT, BasicProperties(headers=headers, correlation_id=b"\xff1"), b"")


def test_a_header_that_can_not_be_decoded_is_one_line_with_the_queue() -> None:
    milliseconds = b"T" + NOW.to_bytes(8, "big")  # where seconds belong
    field = b"\4when" + milliseconds

    class Channel:
        def basic_get(self, queue: str, auto_ack: bool) -> Any:
            return BasicProperties().decode(b"\x20\0" + len(field).to_bytes(4, "big") + field)

    with pytest.raises(SourceError, match="can't be read: a message in mail has a header that pika can't decode: year"):
        list(RabbitMQ("amqp://localhost", ["mail"])._of(Channel(), "mail"))


def test_how_often_a_message_was_read_makes_no_other_of_it() -> None:
    read = [{}, {"x-delivery-count": 0}, {"x-delivery-count": 1, "x-acquired-count": 2}]
    for headers in ({}, {"x-delay": 5}):
        about = [BasicProperties(headers=(headers | counts) or None, expiration="700") for counts in read]
        assert len({_digest(GOT, one, b"body") for one in about}) == 1
        properties = [found.properties for one in about if (found := message("id", GOT, one, b"", NOW)) is not None]
        assert properties == [properties[0]] * 3
        assert not {"x-delivery-count", "x-acquired-count"} & properties[0].keys()


def test_what_has_no_delay_is_left_and_one_that_is_no_number_is_a_reason() -> None:
    assert message("id", GOT, BasicProperties(headers={"colour": "red"}), b"", NOW) is None
    for delay in ([1], True, float("inf"), float("nan"), "soon", None):
        found = message("id", GOT, BasicProperties(headers={"x-delay": delay}), b"x", NOW)
        if delay is None:
            assert found is None
        else:
            assert found is not None
            assert (found.reason, found.payload) == (f"its delay {delay} is no number of milliseconds", b"x")
    huge = message("id", GOT, BasicProperties(headers={"x-delay": 1e300}), b"x", NOW)
    assert huge is not None
    assert "is no time" in str(huge.reason)


def test_a_url_or_queue_that_is_none_and_a_server_that_is_not_there_are_one_line() -> None:
    with pytest.raises(SourceError, match="--queue"):
        RabbitMQ("amqp://localhost", [])
    with pytest.raises(SourceError, match="--url"):
        RabbitMQ("http://a:secret@localhost", ["q"])
    with pytest.raises(SourceError, match="RabbitMQ can't be read: ") as error:
        list(RabbitMQ("amqp://a:secret@127.0.0.1:1/%2F?connection_attempts=1", ["q"]).items())
    assert "secret" not in str(error.value)
