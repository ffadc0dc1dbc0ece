"""The route that schedules messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from admin.control.async_client import ControlUnavailableError, NoOutcomeError
from admin.control.scheduling import MessageRefusedError, MessageTooLargeError, NewMessage, Scheduler
from admin.errors import AdminError, AsciiResponse, error_responses
from admin.rest.commands import check_whole_topic, chosen_request_id
from admin.rest.request_bodies import BadRequestError, parse_json
from admin.rest.schedule_bodies import ScheduleRequest, UnscheduledError, names_whole_topic, new_message
from admin.rest.target_topic import Target, TargetTopic
from admin.rest.topics_schema import CHANGE_ERRORS, IDEMPOTENCY_KEY, TOPIC_PATH, Scheduling
from conf.settings import Settings

_AT_ONCE = 100  # messages of a call that are published before others are answered

_MANY: dict[int | str, dict[str, Any]] = {200: {"description": "The answers to an array of messages."}}

router = APIRouter()


class ScheduledAnswer(BaseModel):
    """The message that was scheduled, or that was scheduled under the same key before."""

    messageId: str
    deliverAt: int


_TEXT = (
    "Publishes a message on the source topic, and says when it is due. An array of messages is answered with 200 and an"
    " array: for each its `status`, and `messageId` and `deliverAt`, or `reason`."
    f"\n\nWith the header `{IDEMPOTENCY_KEY}`, a text that no other call has, the call can be repeated until it is"
    " answered: the message comes once, and each answer has its id and time. The job remembers a million keys of a"
    " topic for a day. Another message with the key is 422. Without the key a repeated call schedules a further"
    " message."
)
# FastAPI takes only the bodies that it reads itself into its description's components.
BODY_SCHEMAS: dict[str, Any] = models_json_schema(
    [(ScheduleRequest, "validation")], ref_template="#/components/schemas/{model}"
)[1]["$defs"]
_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "anyOf": [
                        {"$ref": "#/components/schemas/ScheduleRequest"},
                        {"type": "array", "items": {"type": "object"}},
                    ]
                },
                "examples": {
                    "in ten minutes": {"value": {"payload": {"order": 7}, "deliverAfter": "10m"}},
                    "at a time, bytes": {"value": {"payloadBase64": "AAH/", "deliverAt": 1_795_251_600_000}},
                    "each Monday": {"value": {"payload": "report", "repeat": "0 9 * * MON", "timeZone": "Europe/Rome"}},
                    "several": {"value": [{"payload": "1", "deliverAfter": 5_000}, {"payload": "2"}]},
                },
            }
        },
    }
}


@router.post(
    TOPIC_PATH + "/delayed",
    summary="Schedule a message",
    description=_TEXT,
    status_code=201,
    response_model=ScheduledAnswer,
    responses=_MANY
    | error_responses(
        **CHANGE_ERRORS
        | {
            "_413": "The body or a message is too large, or there are too many messages.",
            "_504": "Broker or job have not answered in time. The message may be scheduled: repeat the call.",
        },
        _400="The body is not JSON, or the key is not allowed.",
        _404="No such topic.",
        _405="The topic is not persistent.",
        _422="The message can't be scheduled as it is: the reason names what is wrong. Or another one has had the key.",
    ),
    openapi_extra=_BODY,
)
async def schedule_message(request: Request, role: Scheduling, target: TargetTopic) -> Response:
    settings: Settings = request.app.state.settings
    key = chosen_request_id(request, role, target)
    try:
        content = parse_json(await request.body())
    except BadRequestError as error:
        raise AdminError(400, str(error)) from error
    if any(map(names_whole_topic, content if isinstance(content, list) else [content])):
        check_whole_topic(request, target.name)
    if not isinstance(content, list):
        answer = await _schedule(request, target, content, key)
        if "reason" in answer:
            raise AdminError(answer["status"], answer["reason"])
        return JSONResponse({name: answer[name] for name in ("messageId", "deliverAt")}, 201)
    if len(content) > settings.api.max_ids_per_call:
        raise AdminError(413, f"{len(content):,} messages; a call may have {settings.api.max_ids_per_call:,}")
    return AsciiResponse(await _schedule_all(request, target, content, key))


async def _schedule_all(request: Request, target: Target, contents: Sequence[Any], key: str) -> list[dict[str, Any]]:
    """Schedules messages, and answers in their order."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def schedule(number: int, content: Any) -> dict[str, Any]:
        async with places:
            return await _schedule(request, target, content, f"{key}.{number}" if key else "")

    return await asyncio.gather(*(schedule(number, content) for number, content in enumerate(contents)))


async def _schedule(request: Request, target: Target, content: Any, key: str) -> dict[str, Any]:
    """Schedules a message; returns its status, and id and time or the reason why it is not scheduled."""
    settings: Settings = request.app.state.settings
    scheduler: Scheduler = request.app.state.scheduler
    source = target.route.source
    try:
        message: NewMessage = new_message(content, settings, source, time.time_ns() // 1_000_000, key)
        done = await scheduler.schedule(source, target.name, message)
    except UnscheduledError as error:
        return {"status": error.code, "reason": str(error)}
    except MessageTooLargeError as error:
        return {"status": 413, "reason": str(error)}
    except MessageRefusedError as error:
        return {"status": 422, "reason": str(error)}
    except ControlUnavailableError as error:
        return {"status": 503, "reason": str(error)}
    except NoOutcomeError as error:
        return {"status": 504, "reason": str(error)}
    return {"status": 201, "messageId": done.position, "deliverAt": done.deliver_at}
