"""The parameters, bodies and answers of the operations on topics, as OpenAPI describes them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Path, Query
from pydantic import BaseModel, WithJsonSchema
from pydantic.alias_generators import to_camel

from admin.errors import error_responses
from admin.security.policy import requires
from broker.entries.message_ids import MAX_INT64
from conf.api_settings import Operation as Right
from tracker.commands.kinds import RESCHEDULE, Operation

TOPIC_PATH = "/admin/v2/persistent/{tenant}/{namespace}/{topic}"

_EXAMPLES = {"ledgerId": 7, "entryId": 0, "deliverAt": 1_795_251_600_000}


def _whole_number(example: int, least: int = 0) -> WithJsonSchema:
    """Describes a whole number that the routes read as text, because its errors have other codes than FastAPI's."""
    return WithJsonSchema(
        {"type": "integer", "format": "int64", "minimum": least, "maximum": MAX_INT64, "examples": [example]}
    )


LedgerId = Annotated[str | None, _whole_number(7), Query(alias="ledgerId", description="Ledger id of the message.")]
EntryId = Annotated[str | None, _whole_number(0), Query(alias="entryId", description="Entry id of the message.")]
DeliverAt = Annotated[
    str | None,
    _whole_number(_EXAMPLES["deliverAt"], least=1),
    Query(alias="deliverAt", description="When the message is due, ms since the epoch, UTC."),
]
# Who cancels and acknowledges by the same code gives it to both.
UnusedDeliverAt = Annotated[str | None, Query(alias="deliverAt", include_in_schema=False)]
ScheduleKey = Annotated[
    str | None,
    Query(
        alias="scheduleKey",
        description="Schedule key of the message, instead of its ids.",
        examples=["order-7"],
    ),
]
Index = Annotated[str | None, _whole_number(42), Query(description="Index of the message in the topic, from 0.")]
SubscriptionNames = Annotated[
    list[str] | None,
    Query(
        alias="subscriptionNames",
        description="Repeated, or separated by commas; none: all of the topic's; `*`: also those added later.",
        examples=[["billing", "audit"]],
    ),
]
Subscription = Annotated[str, Path(examples=["billing"])]
Count = Annotated[str, _whole_number(5, least=1), Path(description="How many messages.")]
Authoritative = Annotated[
    str | None, WithJsonSchema({"type": "boolean"}), Query(description="Accepted, as by Pulsar, and ignored.")
]

# Dependencies that return the caller's role, if it may do the operation.
Canceller = Annotated[str, Depends(requires(Right.CANCEL))]
Deliverer = Annotated[str, Depends(requires(Right.DELIVER))]
Acknowledger = Annotated[str, Depends(requires(Right.ACKNOWLEDGE))]
Scheduling = Annotated[str, Depends(requires(Right.SCHEDULE))]
Skipper = Annotated[str, Depends(requires(Right.SKIP))]
Reader = Annotated[str, Depends(requires(Right.READ))]


class _Outcome(BaseModel):
    subscription: str
    ledgerId: int
    entryId: int
    batchIndex: int
    result: str
    reason: str


class _Outcomes(BaseModel):
    outcomes: list[_Outcome]


class MessageIdOfIndex(BaseModel):
    ledgerId: int
    entryId: int
    partitionIndex: int


IDEMPOTENCY_KEY = "Idempotency-Key"

_HEADERS = (
    "\n\nWith the header `Prefer: return=representation` the status of success is 200, and the answer has the outcome"
    " of each message and subscription in `outcomes`; so do errors, beside their reason, if there are outcomes."
    f"\n\nWith the header `{IDEMPOTENCY_KEY}`, a text that no other call has, the call can be repeated without doing"
    " anything twice: it is the command's request id, and answered as the first time. Another call with it is INVALID."
)
_DONE: dict[int | str, dict[str, Any]] = {
    200: {"model": _Outcomes, "description": "Done; the outcomes were asked for."},
    204: {"description": "Done."},
}
CALLER_ERRORS = {
    "_401": "The caller is unknown.",
    "_403": "The caller may not do this.",
    "_421": "The call's Host is no name of this API.",
    "_429": "The caller calls too often: see the header Retry-After.",
    "_500": "Internal error.",
}
CHANGE_ERRORS = CALLER_ERRORS | {
    "_413": "The body is too large, or has too many ids.",
    "_503": "The broker can't be reached: nothing was done.",
    "_504": "The job has not answered in time. The command may still be done: the reason has the request id.",
}

CANCEL_TEXT = (
    "Cancels a delayed message, on all subscriptions or those named. A cancel for a message that has not come yet waits"
    " until two ticks after the time that it names." + _HEADERS
)
CANCEL_RESPONSES = _DONE | error_responses(
    **CHANGE_ERRORS,
    _400=f"{IDEMPOTENCY_KEY} is not allowed.",
    _404="No such topic or subscription.",
    _405="The topic is not persistent.",
    _412="An id is negative, deliverAt is not positive, or the message could not be cancelled, because it was handed"
    " out already (TOO_LATE). What could be cancelled on other subscriptions was.",
)

ACKNOWLEDGE_TEXT = "Skips one entry that waits, on all subscriptions or those named." + _HEADERS
ACKNOWLEDGE_RESPONSES = _DONE | error_responses(
    **CHANGE_ERRORS,
    _400=f"{IDEMPOTENCY_KEY} is not allowed.",
    _404="No such topic, subscription or message.",
    _405="The topic is not persistent.",
    _412="An id is negative, the message was dispatched already (TOO_LATE), or a subscription's type acknowledges"
    " cumulatively (NOT_ALLOWED). What could be acknowledged on other subscriptions was.",
)

SKIP_TEXT = (
    "A message that was dispatched already, some seconds before it is due, can't be skipped: like one that never was,"
    " it is not in the subscription's backlog, which is 404, and the reason says TOO_LATE. So 204 always means that"
    " none of the messages will be delivered. If only some can be skipped, these are." + _HEADERS
)
SKIP_RESPONSES = _DONE | error_responses(
    **CHANGE_ERRORS,
    _400="The body is not JSON, or has none of the forms, or an id is wrong.",
    _404="No such topic, subscription or message, or the message was dispatched already.",
    _405="The subscription's type acknowledges cumulatively, or the topic is not persistent.",
)

SKIP_NEXT_TEXT = (
    "Skips the next n messages that wait for the subscription, soonest first, or all if fewer wait. Messages that were"
    " dispatched, cancelled or skipped before do not count. A message is known here when the job has sealed it, a few"
    " seconds after it came. Unlike in Pulsar messages are counted, and not entries: n may end within a batch. With the"
    " header `Prefer: return=representation` the status of success is 200, with counts by result."
)
_COUNTED: dict[int | str, dict[str, Any]] = {
    200: {"description": "Done; the counts by result, as `applied` and `tooLate`, were asked for."},
    204: {"description": "Done."},
}
SKIP_NEXT_RESPONSES = _COUNTED | error_responses(
    **CHANGE_ERRORS,
    _400="n is not a number, or negative, or there is a body.",
    _404="No such topic or subscription.",
    _405="The topic is partitioned (name a partition), the subscription's type acknowledges cumulatively, or the topic"
    " is not persistent.",
)

_OR_FILTER = (
    " The body has message ids, or a filter: then the answer is 200 with counts by result. With `dryRun` nothing is"
    " done, and the answer has the matching messages."
)
DELIVER_NOW_TEXT = "Delivers messages that wait for the subscription at once." + _OR_FILTER + _HEADERS
END_TEXT = (
    "Ends a schedule, on all subscriptions or those named: no further occurrence is delivered, except one that is"
    " dispatched already. A subscription that is added later gets a schedule that has not begun, unless that was ended"
    " for `*`. It is a cancel of the message: `restore` takes the schedule up again until the cancelled occurrence"
    " would be due." + _HEADERS
)


def operation_text(operation: Operation) -> str:
    """Returns what is said of the route of an operation that is made of its description."""
    return operation.text + (_OR_FILTER if operation.by_filter else "") + _HEADERS


ACTION_RESPONSES = _DONE | error_responses(
    **CHANGE_ERRORS,
    _400="The body is not JSON, or has none of the forms, or an id is wrong.",
    _404="No such topic, subscription or message.",
    _405="The topic is not persistent.",
    _412="A message was dispatched already (TOO_LATE), or was cancelled (INVALID). The change is done for the others.",
)

RETRY_RESPONSES = _DONE | error_responses(
    **CHANGE_ERRORS,
    _400="The body is not JSON, or not of this form, or an id is wrong.",
    _404="No such topic or subscription; or no such message, or its payload is not kept.",
    _405="The topic is not persistent.",
    _412="The message was cancelled, and is not due yet (INVALID). The retry is done for the others.",
)

INDEX_TEXT = (
    "The answer is from the entries that the job has accounted for, some seconds behind the topic. Each index of a"
    " batch gives its entry, and that of one of the broker's own markers the next entry. An index before the first"
    " known entry, or of an entry that retention has removed, has expired, and gives -1:-1."
)
INDEX_RESPONSES = error_responses(
    **CALLER_ERRORS,
    _400="The call has another parameter.",
    _404="No such topic, or the index is not a number, negative, or beyond the last.",
    _405="The topic is partitioned: name a partition.",
    _406="The topic is not persistent.",
    _412="Entries of the topic were recorded without an index.",
    _503="The tables are not there: the job has not run yet.",
)


def fields_body(*names: str) -> dict[str, Any]:
    """Describes a body, as a form or JSON, with parameters that may be missing in the query."""
    properties: dict[str, Any] = {key: {"type": "integer", "format": "int64"} for key in names}
    properties["scheduleKey"] = {"type": "string"}
    properties["subscriptionNames"] = {"type": "array", "items": {"type": "string"}}
    schema = {"type": "object", "properties": properties}
    example = {name: _EXAMPLES[name] for name in names} | {"subscriptionNames": ["billing"]}
    return {
        "requestBody": {
            "description": "What is not in the query.",
            "content": {
                "application/json": {"schema": schema, "example": example},
                "application/x-www-form-urlencoded": {"schema": schema},
            },
        }
    }


def _json_body(schema: dict[str, Any], examples: dict[str, Any], required: bool = True) -> dict[str, Any]:
    examples = {name: {"value": value} for name, value in examples.items()}
    return {
        "requestBody": {"required": required, "content": {"application/json": {"schema": schema, "examples": examples}}}
    }


_MAP = {"type": "object", "additionalProperties": {"type": "string"}}

SKIP_BODY = _json_body(
    {"anyOf": [{"type": "object"}, {"type": "array", "items": {"type": "string"}}]},
    {
        "objects": {"type": "messageId", "messageIds": [{"ledgerId": 7, "entryId": 0, "batchIndex": 3}]},
        "byte arrays": {"type": "byteArray", "messageIds": ["CAcQACAD"]},
        "base64": ["CAcQACAD"],
        "triplets": ["7:0:3", "7:1"],
        "map of ledger to entry": {"7": "0"},
        "schedule keys": {"scheduleKeys": ["order-7"]},
    },
)
FILTER_BODY = _json_body(
    {"anyOf": [{"type": "object"}, {"type": "array", "items": {"type": "string"}}]},
    {
        "triplets": ["7:0:3", "7:1"],
        "filter": {"filter": {"key": "customer-7"}, "dryRun": True, "max": 10_000},
    },
)
SKIP_MAP_BODY = _json_body(_MAP, {"map of ledger to entry": {"7": "0"}}, required=False)


def operation_body(operation: Operation) -> dict[str, Any]:
    """Describes the body of an operation's route; empty: it has none."""
    if operation.is_of_subscription:
        return {}
    if not operation.fields:
        return FILTER_BODY
    needed = {to_camel(one.name): one.example for one in operation.fields if not one.is_optional}
    examples: dict[str, Any] = {"triplets": {"messageIds": ["7:0:3", "7:1"], **needed}}
    if optional := {to_camel(one.name): one.example for one in operation.fields if one.is_optional}:
        examples["with all fields"] = {"messageIds": ["7:0:3"], **needed, **optional}
    if operation.by_key:
        examples["schedule keys"] = {"scheduleKeys": ["order-7"], **needed}
    if operation.by_filter:
        examples["filter"] = {"filter": {"properties": {"region": "eu"}}, **needed, "dryRun": True}
    if operation.kind == RESCHEDULE:
        examples["filter, an hour later"] = {"filter": {"key": "customer-7"}, "shiftMillis": 3_600_000}
    return _json_body({"type": "object"}, examples)
