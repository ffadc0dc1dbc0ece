"""The route that re-drives dead letters by a filter."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from fastapi import APIRouter, Request

from admin.control.redrive import Redrive
from admin.errors import error_responses
from admin.rest.by_filter import RedriveRequest, most_matched
from admin.rest.commands import chosen_request_id
from admin.rest.pending_errors import refusal
from admin.rest.target_topic import TargetTopic
from admin.rest.topics_schema import CHANGE_ERRORS, IDEMPOTENCY_KEY, TOPIC_PATH, Deliverer
from warehouse.queries.listing import PendingError

router = APIRouter()


@router.post(
    TOPIC_PATH + "/dlq/redrive",
    summary="Deliver dead letters once more",
    description="Sends the dead letters of a subscription that match the filter back to the topic, from where they are"
    " delivered to that subscription at once; their attempts begin again. Answers when all have been sent back, with"
    " `matched`, `redriven`, `alreadyRedriven`, `refused`, `requestId`, and `unreadable`: how many entries of the topic"
    " of dead letters can't be read, and stay. The table `outcomes` has them as REDRIVE under the request id"
    " `redrive-<requestId>`. With `dryRun` nothing is done: it answers with `matched`, `unreadable`, and `messages`,"
    " the first 100, of very large ones fewer."
    f"\n\nWith the header `{IDEMPOTENCY_KEY}`, a text that no other call has, a call that was broken off can be"
    " repeated: dead letters that were sent back are not sent again.",
    responses=error_responses(
        **CHANGE_ERRORS,
        _400="The body or the request id is not understood.",
        _404="No such topic or subscription.",
        _405="The topic is not persistent.",
        _409="Another re-drive of the same dead letters is at work.",
        _412="More dead letters match than `max`: nothing was done.",
    ),
)
async def redrive(request: Request, role: Deliverer, target: TargetTopic, body: RedriveRequest) -> dict[str, Any]:
    target.check_subscriptions([body.filter.subscription])
    request_id = chosen_request_id(request, role, target) or uuid.uuid4().hex
    asked = Redrive(request.app.state.settings, role, target.name, body.filter, request_id, most_matched(request, body))
    try:
        return await asyncio.to_thread(asked.dry_run if body.dry_run else asked.run)
    except PendingError as error:
        raise refusal(error) from error
