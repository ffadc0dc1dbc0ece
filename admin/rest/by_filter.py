"""Changes all messages that match a filter, over HTTP: reads the body, sends the commands, and answers."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from admin.control.async_client import AsyncControlClient
from admin.control.bulk import (
    MAX_MATCHED,
    MOST_MATCHED,
    Change,
    Tally,
    check,
    filter_for,
    matching,
    plan,
    requests,
)
from admin.control.dead_letters import DeadLetterFilter
from admin.errors import AdminError
from admin.rest.pending_errors import invalid, refusal
from admin.rest.request_bodies import BadRequestError, parse_fields, parse_json
from admin.rest.target_topic import Target
from admin.rest.topics_schema import IDEMPOTENCY_KEY
from conf.settings import Settings
from tracker.commands.kinds import RESCHEDULE, Operation
from tracker.due_time import MAX_TIME_MILLIS
from warehouse.queries.listing import PendingError, PendingFilter
from warehouse.queries.pending_messages import Pending

_SHOWN = 100  # messages that a dry run shows


class BulkRequest(BaseModel):
    """The messages to be changed."""

    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel)

    filter: PendingFilter
    dry_run: bool = False
    max: Annotated[int, Field(ge=1, le=MOST_MATCHED, description="Do nothing where more match.")] = MAX_MATCHED


class RedriveRequest(BaseModel):
    """The dead letters to be delivered once more."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        alias_generator=to_camel,
        json_schema_extra={"examples": [{"filter": {"subscription": "billing", "reason": "timeout"}, "dryRun": True}]},
    )

    filter: DeadLetterFilter
    dry_run: bool = False
    max: Annotated[int, Field(ge=1, le=MOST_MATCHED, description="Do nothing where more match.")] = MAX_MATCHED


class BulkReschedule(BulkRequest):
    """The messages to be delivered at another time, and that time."""

    deliver_at: Annotated[int | None, Field(ge=0, lt=MAX_TIME_MILLIS, description="When, ms since the epoch.")] = None
    shift_millis: Annotated[int | None, Field(gt=-(2**62), lt=2**62, description="So much later.")] = None

    @model_validator(mode="after")
    def _one_time(self) -> BulkReschedule:
        if (self.deliver_at is None) == (self.shift_millis is None):
            raise ValueError("one of deliverAt and shiftMillis is needed")
        return self


def parse_bulk(body: bytes, operation: Operation) -> tuple[BulkRequest, Change]:
    """Reads a body with a filter instead of ids.

    Returns:
        the parsed body, and the change.

    Raises:
        AdminError: 400, the body can't be read.
    """
    try:
        if operation.kind == RESCHEDULE:
            moved = BulkReschedule.model_validate_json(body)
            fields = {} if moved.deliver_at is None else {"deliver_at": moved.deliver_at}
            return moved, Change(operation.kind, fields, moved.shift_millis)
        content = parse_json(body)
        change = Change(operation.kind, parse_fields(operation, content))
        names = {to_camel(one.name) for one in operation.fields}
        common = {name: value for name, value in content.items() if name not in names}
        return BulkRequest.model_validate_json(json.dumps(common)), change
    except BadRequestError as error:
        raise AdminError(400, str(error)) from error
    except ValidationError as error:
        raise invalid(error) from error


async def by_filter(
    request: Request, role: str, target: Target, subscription: str, body: BulkRequest, change: Change
) -> Response:
    """Changes all messages that match the body's filter; a dry run answers with those that would be changed.

    Raises:
        AdminError: the filter is not for this call, too many messages match, or they can't be changed or read.
        ControlUnavailableError, NoOutcomeError: as `AsyncControlClient.send_ahead`.
    """
    target.check_subscriptions([subscription])
    refuse_key(request)
    most = most_matched(request, body)
    wanted = body.filter
    if not wanted.is_selective:
        raise AdminError(400, 'the filter must say which messages are meant; {"dueFrom": 0} means all')
    if wanted.subscription not in (None, subscription):
        raise AdminError(400, "the filter has another subscription than the path")
    wanted = filter_for(wanted.model_copy(update={"subscription": subscription}), change.kind)
    settings: Settings = request.app.state.settings
    client: AsyncControlClient = request.app.state.control
    try:
        come_in = await asyncio.to_thread(target.read_come_in, request.app.state.unacknowledged, wanted.state)
        question = await asyncio.to_thread(Pending, settings, target.name, wanted)
        check(question, change.kind)
        note = await asyncio.to_thread(question.note_of_unsealed, come_in)
        noted = {"note": note} if note else {}
        if body.dry_run:
            return JSONResponse(await asyncio.to_thread(_would_match, question) | noted)
        rows = await asyncio.to_thread(matching, question, most)
    except PendingError as error:
        raise refusal(error) from error
    todo = await asyncio.to_thread(plan, question.subscriptions, rows, change)
    tally = Tally(todo)
    commands = requests(settings, role, question.topic, todo.calls)
    async for outcome in client.send_ahead(commands, settings.api.answer_timeout_millis / 1000):
        tally.add(outcome)
    return JSONResponse({"matched": rows.num_rows, **tally.to_json(), **noted})


def most_matched(request: Request, body: BulkRequest | RedriveRequest) -> int:
    """Returns how many messages a call with a filter may be for.

    Raises:
        AdminError: 413, its `max` is beyond what the settings allow.
    """
    settings: Settings = request.app.state.settings
    if "max" in body.model_fields_set:
        check_most(request, body.max)
    return min(body.max, settings.api.max_matched_per_filter)


def check_most(request: Request, n: int) -> None:
    """Raises AdminError (413) if a call is for more messages than the settings allow for one."""
    settings: Settings = request.app.state.settings
    if n > (most := settings.api.max_matched_per_filter):
        raise AdminError(413, f"one call may be for at most {most:,} messages (api.max_matched_per_filter)")


def refuse_key(request: Request) -> None:
    """Raises AdminError (400) if the call has an idempotency key: a filter matches other messages the next time."""
    if IDEMPOTENCY_KEY in request.headers:
        raise AdminError(400, f"{IDEMPOTENCY_KEY} is for calls that name messages by their ids")


def _would_match(question: Pending) -> dict[str, Any]:
    page = question.page(_SHOWN)
    return {"matched": question.count(), "messages": page.to_json()["messages"]}
