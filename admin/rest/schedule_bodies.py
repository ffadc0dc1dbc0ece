"""Reads the bodies of calls that schedule messages: strictly, so that what the job would reject is refused at once."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from admin.control.scheduling import SCHEMAS, NewMessage
from broker.protocol.entries import is_dropped
from conf.errors import DelayLakeError, one_line
from conf.message_size import FIELD_BYTES, max_size_bytes
from conf.settings import Settings
from conf.times import parse_duration
from tracker.due_time import DELIVER_AFTER, DELIVER_AT, MAX_TIME_MILLIS
from tracker.properties import NOT_PASSED_ON, REQUEST_ID, RETRY_OF, Mode
from tracker.recurrence.columns import accepted_first
from tracker.recurrence.recurrence import REPEAT
from tracker.scheduling import Scheduling, scheduling


class UnscheduledError(DelayLakeError):
    """A message can't be scheduled.

    Args:
        code: the HTTP status.
        reason: becomes one line.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(one_line(reason))
        self.code = code


def _number(value: object) -> object:
    """Returns the number of a text of digits, as some clients send 64-bit numbers."""
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20 else value


def _millis(value: object) -> object:
    return parse_duration(value) if isinstance(value, str) else value


Time = Annotated[int, BeforeValidator(_number, json_schema_input_type=int | str), Field(ge=0, le=MAX_TIME_MILLIS)]
Duration = Annotated[int, BeforeValidator(_millis, json_schema_input_type=int | str), Field(ge=0, le=MAX_TIME_MILLIS)]
Text = Annotated[str, Field(min_length=1)]


class ScheduleRequest(BaseModel):
    """A message to be delivered later. Times are ms since the epoch, durations ms or as 90s, 5m, 2h, 1d."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        alias_generator=to_camel,
        json_schema_extra={"examples": [{"payload": {"order": 7}, "deliverAfter": "10m", "key": "customer-7"}]},
    )

    payload: Annotated[Any, Field(description="Text, which is sent as UTF-8, or any other JSON, sent as JSON.")] = None
    payload_base64: Annotated[str | None, Field(description="The bytes, instead of payload.")] = None
    key: Annotated[str | None, Field(description="Pulsar's partition key.")] = None
    ordering_key: str | None = None
    properties: dict[str, str] = {}
    event_time: Time | None = None
    schema_type: Annotated[
        str | None, Field(alias="schema", description="Type of the topic's newest schema, as JSON or AVRO.")
    ] = None
    deliver_at: Annotated[Time | None, Field(description="When; without a time at once.")] = None
    deliver_after: Annotated[Duration | None, Field(description="In which time, instead of deliverAt.")] = None
    expire_at: Annotated[Time | None, Field(description="From when on it is not sent any more.")] = None
    expire_after: Annotated[
        Duration | None, Field(description="How long after it is due it is sent at the latest.", examples=["2h"])
    ] = None
    schedule_key: Annotated[Text | None, Field(description="One message waits for each.", examples=["order-7"])] = None
    schedule_mode: Annotated[Mode | None, Field(strict=False)] = None
    debounce_max: Duration | None = None
    repeat: Annotated[Text | None, Field(description="Cron, @every 90s or RRULE.", examples=["0 9 * * MON"])] = None
    time_zone: Text | None = None
    repeat_until: Time | None = None
    repeat_times: Annotated[int | None, Field(ge=1, lt=10**18)] = None
    misfire: Literal["once", "all", "skip"] | None = None
    request_id: Annotated[Text | None, Field(description="Instead of the header Idempotency-Key.")] = None


# The properties that have a field of their own, by the field.
# Ends the request ids that the header Idempotency-Key becomes with authentication: a hash of role and topic, and the
# number of a message of an array.
_KEY_OF_CALLER = re.compile(r"~[0-9a-f]{12}(\.[0-9]+)?$")

_PROPERTIES = {
    name: to_camel(name)
    for name in ScheduleRequest.model_fields
    if name not in ("payload", "payload_base64", "key", "ordering_key", "properties", "event_time", "schema_type")
}

_OURS = frozenset({*_PROPERTIES.values(), RETRY_OF, *NOT_PASSED_ON})


def new_message(content: object, settings: Settings, source: str, now: int, key: str = "") -> NewMessage:
    """Reads a message to be scheduled.

    Args:
        content: JSON.
        settings: limits of messages.
        source: the source topic.
        now: ms since the epoch.
        key: the request id that the call's Idempotency-Key stands for; empty: it has none.

    Raises:
        UnscheduledError: 413, the message is too large; 422, something is wrong with it.
    """
    given = _read(content)
    payload = _payload(given)
    if given.schema_type is not None and given.schema_type not in SCHEMAS:
        raise UnscheduledError(422, f"schema: must be one of {', '.join(SCHEMAS)}")
    properties = _checked_properties(given)
    if key and REQUEST_ID in properties:
        raise UnscheduledError(422, "requestId: the header Idempotency-Key is there, too")
    if not key and _KEY_OF_CALLER.search(properties.get(REQUEST_ID, "")):
        raise UnscheduledError(422, "requestId: ids that end so are those of the header Idempotency-Key")
    if request_id := key or properties.get(REQUEST_ID, ""):
        properties[REQUEST_ID] = request_id
    elif DELIVER_AFTER in properties and REPEAT not in properties:
        # So that the answer has the very time. With a request id a repetition has to be the same message.
        properties[DELIVER_AT] = str(now + int(properties.pop(DELIVER_AFTER)))
    found = _scheduling(properties, settings, now)
    if found.reason is not None:
        raise UnscheduledError(422, found.reason)
    texts = [given.key or "", given.ordering_key or "", *properties, *properties.values()]
    try:
        size = len(payload) + sum(len(text.encode()) for text in texts) + FIELD_BYTES * len(properties)
    except UnicodeEncodeError:
        raise UnscheduledError(422, "a text has half a surrogate pair") from None
    if size > (most := max_size_bytes(settings, source)):
        raise UnscheduledError(413, f"the message has {size:,} bytes; {most:,} are sent as one entry")
    return NewMessage(
        payload=payload,
        key=given.key,
        ordering_key=given.ordering_key,
        properties=properties,
        event_time=given.event_time or 0,
        deliver_at=found.deliver_at,
        request_id=request_id,
        schema=given.schema_type or "",
    )


def names_whole_topic(content: object) -> bool:
    """Whether a message to be scheduled has a key or an id for which all partitions of its topic count."""
    if not isinstance(content, dict):
        return False
    properties = content.get("properties")
    names = {*content, *(properties if isinstance(properties, dict) else ())}
    return not names.isdisjoint(("scheduleKey", REQUEST_ID))


def _read(content: object) -> ScheduleRequest:
    if not isinstance(content, dict):
        raise UnscheduledError(422, "a message is a JSON object")
    try:
        return ScheduleRequest.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:80]
        if first["type"] == "extra_forbidden":
            raise UnscheduledError(422, f"a message has no field {where!r}") from None
        raise UnscheduledError(422, f"{where}: {str(first['msg']).removeprefix('Value error, ')}") from None


def _payload(given: ScheduleRequest) -> bytes:
    has_json = "payload" in given.model_fields_set
    if has_json == (given.payload_base64 is not None) or (has_json and given.payload is None):
        raise UnscheduledError(422, "one of payload and payloadBase64 is needed")
    if given.payload_base64 is not None:
        try:
            return base64.b64decode(given.payload_base64, validate=True)
        except (binascii.Error, ValueError):
            raise UnscheduledError(422, "payloadBase64 is no base64") from None
    text = given.payload
    if not isinstance(text, str):
        try:
            text = json.dumps(text, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        except ValueError:
            raise UnscheduledError(422, "the payload has a number that JSON has not") from None
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise UnscheduledError(422, "the payload has half a surrogate pair") from None


def _checked_properties(given: ScheduleRequest) -> dict[str, str]:
    """Returns the message's properties, with those of its fields."""
    for name in given.properties:
        if name == REQUEST_ID and given.request_id is None:
            continue
        if name in _OURS:
            raise UnscheduledError(422, f"properties: {name} is a field of its own, or of retries")
        if is_dropped(name):
            raise UnscheduledError(422, f"properties: {name[:80]!r} is the job's own, and would be dropped")
    if given.deliver_at is not None and given.deliver_after is not None:
        raise UnscheduledError(422, "one of deliverAt and deliverAfter")
    if given.repeat is None:
        without = [n for n in ("time_zone", "repeat_until", "repeat_times", "misfire") if getattr(given, n) is not None]
        if without:
            raise UnscheduledError(422, f"{to_camel(without[0])} goes with repeat")
    if given.schedule_key is None and (given.schedule_mode or given.debounce_max is not None):
        raise UnscheduledError(422, "scheduleMode and debounceMax go with scheduleKey")
    values = {name: getattr(given, field) for field, name in _PROPERTIES.items()}
    return dict(given.properties) | {name: str(value) for name, value in values.items() if value is not None}


def _scheduling(properties: Mapping[str, str], settings: Settings, now: int) -> Scheduling:
    """Returns what the job reads from the properties, but for what it knows of other messages."""
    tracker = settings.tracker

    def first(of: Mapping[str, str], published: int) -> int:
        return accepted_first(of, published, tracker.max_delay_millis, tracker.min_repeat_millis)

    return scheduling(properties, now, now, tracker.max_delay_millis, first)
