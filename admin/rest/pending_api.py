"""The routes that list pending messages, and cancel or skip them by a filter."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from typing import Annotated, Any

import pyarrow as pa
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import ValidationError

from admin.control.async_client import AsyncControlClient
from admin.control.bulk import MOST_MATCHED, NAMED, Change, Tally, check, plan, requests
from admin.errors import AdminError, error_responses, prefers_outcomes
from admin.rest.by_filter import BulkRequest, by_filter, check_most, refuse_key
from admin.rest.listing_answers import PendingPage
from admin.rest.pending_errors import invalid, refusal
from admin.rest.request_bodies import BadRequestError, parse_count
from admin.rest.target_topic import PARTITIONED, Target, TargetTopic
from admin.rest.topics_schema import (
    CALLER_ERRORS,
    CHANGE_ERRORS,
    SKIP_NEXT_RESPONSES,
    SKIP_NEXT_TEXT,
    TOPIC_PATH,
    Authoritative,
    Canceller,
    Count,
    Reader,
    Skipper,
    Subscription,
)
from conf.settings import Settings
from status.job_status import known_status
from tracker.commands import kinds
from tracker.messages import int64
from tracker.wire.delayed_index_pb2 import CANCEL, DELAY, DelayedIndex, DelayedOperationType
from warehouse.queries.listing import PendingError, PendingFilter, State
from warehouse.queries.pending_messages import MAX_LIMIT, Pending

_PAGE = 100  # messages of a page if no limit is given
_STREAMED_AT_ONCE = 100_000
PROTOBUF = "application/x-protobuf"

_MEANT = (
    "\n\nA message is known here when the job has sealed it, a few seconds after it came; one that is due sooner than"
    " about ten seconds may never be."
)
_NOTED = " A `note` says how many more match that were sent within the last seconds, and are not changed."

_LISTED = (
    "\n\nWhat came in within the last seconds is read from the source topic itself, as far as a `note` does not say"
    " otherwise; with `isGoingOut` it is due within moments, or has just been delivered. Without these are listings as"
    " DelayedIndex: there a message is known when the job has sealed it, a few seconds after it came."
)

router = APIRouter()


def pending_filter(
    due_from: Annotated[int | None, Query(alias="dueFrom", description="Due at this time or later, ms.")] = None,
    due_before: Annotated[int | None, Query(alias="dueBefore", description="Due before this time, ms.")] = None,
    key: Annotated[str | None, Query(description="With this key.")] = None,
    subscription: Annotated[str | None, Query(description="Pending for this one; none: for any.")] = None,
    properties: Annotated[list[str] | None, Query(alias="property", description="name=value; repeatable.")] = None,
    producer_name: Annotated[str | None, Query(alias="producerName", description="Of this producer.")] = None,
    ledger_id: Annotated[int | None, Query(alias="ledgerId", description="Of this ledger.")] = None,
    entry_id: Annotated[int | None, Query(alias="entryId", description="Of this entry of the ledger.")] = None,
    state: Annotated[
        State,
        Query(
            description="`held`: only what is parked; `takenBack`, or `cancelled`: what was cancelled or skipped and"
            " is not past."
        ),
    ] = (State.WAITING),
) -> PendingFilter:
    """A dependency that returns the filter in the query's parameters."""
    pairs = [text.partition("=") for text in properties or ()]
    if wrong := [name for name, equals, _ in pairs if not (name and equals)]:
        raise AdminError(400, f"property must be name=value: {wrong[0][:80]!r}")
    try:
        return PendingFilter(
            subscription=subscription,
            key=key,
            properties={name: value for name, _, value in pairs},
            due_from=due_from,
            due_before=due_before,
            producer_name=producer_name,
            ledger_id=ledger_id,
            entry_id=entry_id,
            state=state,
        )
    except ValidationError as error:
        raise invalid(error) from error


Filter = Annotated[PendingFilter, Depends(pending_filter)]
_READ_ERRORS = CALLER_ERRORS | {
    "_400": "A parameter is wrong, or the cursor is not of this listing.",
    "_404": "No such topic or subscription.",
    "_503": "The tables are not there: the job has not run yet.",
}
_LISTING: dict[int | str, dict[str, Any]] = {200: {"model": PendingPage, "content": {PROTOBUF: {}}}}
_BULK_ERRORS = CHANGE_ERRORS | {
    "_400": "The body is not understood, or its filter says nothing.",
    "_404": "No such topic or subscription.",
    "_412": "More messages match than `max`: nothing was done.",
}


@router.get(
    TOPIC_PATH + "/delayed",
    summary="The messages that wait, soonest first",
    description="All pages of a listing are of the version of the tables that the first one was of. With"
    f" `Accept: {PROTOBUF}` all entries, or `limit` of them, as length-delimited messages DelayedIndex of"
    " proto/delayed_index.proto: each once for each time at which messages of it are due." + _LISTED,
    response_model=None,
    responses=_LISTING
    | error_responses(
        **_READ_ERRORS,
        _405="The topic is partitioned: name a partition.",
        _410="The listing's version of the tables is gone: begin it again.",
    ),
)
def list_delayed(
    request: Request,
    role: Reader,
    target: TargetTopic,
    wanted: Filter,
    limit: Annotated[int | None, Query(ge=1, le=MAX_LIMIT, description="Default 100.")] = None,
    cursor: Annotated[str | None, Query(description="nextCursor of the page before.")] = None,
) -> Response:
    try:
        if PROTOBUF in request.headers.get("accept", "").lower():
            return _stream(target, _ask(request, target, wanted, cursor), limit, request.app.state.control)
        come_in = target.read_come_in(request.app.state.unacknowledged, wanted.state)
        return JSONResponse(_ask(request, target, wanted, cursor).page(limit or _PAGE, come_in).to_json())
    except PendingError as error:
        raise refusal(error) from error


def _stream(target: Target, question: Pending, limit: int | None, control: AsyncControlClient) -> Response:
    """Answers with the entries of a listing, at most `limit`, as length-delimited messages DelayedIndex."""
    tables = question.entries(_STREAMED_AT_ONCE)
    first = next(tables, None)
    # DelayedIndex has no field for the partition.
    if first is None:
        target.refuse_whole(control)
    else:
        _check_partition(target, first)
    kind = CANCEL if question.lists_cancelled else DELAY

    def parts() -> Iterator[bytes]:
        left = limit
        for table in itertools.chain([] if first is None else [first], tables):
            yield _delimited(table if left is None else table.slice(0, left), kind)
            if left is not None and (left := left - table.num_rows) <= 0:
                return

    return StreamingResponse(parts(), media_type=PROTOBUF)


def _delimited(entries: pa.Table, kind: DelayedOperationType) -> bytes:
    made = (
        DelayedIndex(timestamp=due, ledger_id=ledger, entry_id=entry, delayed_operation_type=kind).SerializeToString()
        for due, ledger, entry in zip(
            *(entries[name].to_pylist() for name in ("deliver_at", "ledger_id", "entry_id")), strict=True
        )
    )
    return b"".join(
        bytes([len(one)]) + one for one in made
    )  # a length of less than 128 bytes, as each has, is one byte


@router.get(
    TOPIC_PATH + "/delayed/stats",
    summary="How many messages wait, by subscription",
    description="`takenBack` counts messages and whole entries that were cancelled and would be due later." + _MEANT,
    responses=error_responses(**_READ_ERRORS),
)
def delayed_stats(request: Request, role: Reader, target: TargetTopic, wanted: Filter) -> dict[str, Any]:
    try:
        return _ask(request, target, wanted).stats()
    except PendingError as error:
        raise refusal(error) from error


@router.post(
    TOPIC_PATH + "/subscription/{subscription}/cancel",
    summary="Cancel all messages that match a filter",
    description="Answers with counts by result. Of a batch on a subscription that acknowledges cumulatively, all"
    " messages must match." + _MEANT + _NOTED,
    responses=error_responses(**_BULK_ERRORS, _405="The topic is not persistent."),
)
async def cancel_by_filter(
    request: Request, role: Canceller, target: TargetTopic, subscription: Subscription, body: BulkRequest
) -> Response:
    return await by_filter(request, role, target, subscription, body, Change(kinds.CANCEL))


@router.post(
    TOPIC_PATH + "/subscription/{subscription}/skip",
    summary="Skip all messages that match a filter",
    description="Answers with counts by result." + _MEANT + _NOTED,
    responses=error_responses(
        **_BULK_ERRORS, _405="The subscription's type acknowledges cumulatively, or the topic is not persistent."
    ),
)
async def skip_by_filter(
    request: Request, role: Skipper, target: TargetTopic, subscription: Subscription, body: BulkRequest
) -> Response:
    return await by_filter(request, role, target, subscription, body, Change(kinds.SKIP))


@router.post(
    TOPIC_PATH + "/subscription/{subscription}/skip/{n}",
    summary="Skip the next messages",
    description=SKIP_NEXT_TEXT,
    status_code=204,
    responses=SKIP_NEXT_RESPONSES,
)
async def skip_next(
    request: Request,
    role: Skipper,
    target: TargetTopic,
    subscription: Subscription,
    n: Count,
    authoritative: Authoritative = None,
) -> Response:
    try:
        wanted = parse_count(n)
    except BadRequestError as error:
        raise AdminError(400, str(error)) from error
    if await request.body():
        raise AdminError(400, "a number of messages goes without a body; message ids go to skip/0 or skipByMessageIds")
    target.check_subscriptions([subscription])
    refuse_key(request)
    await asyncio.to_thread(target.refuse_whole, request.app.state.control)
    try:
        question = await asyncio.to_thread(_not_handed_out, request, target, subscription)
        check(question, kinds.SKIP)
        if wanted > request.app.state.settings.api.max_matched_per_filter:
            check_most(request, min(wanted, await asyncio.to_thread(question.count)))
        tally = await _skip_next(request, role, target, question, wanted)
    except PendingError as error:
        raise refusal(error) from error
    if prefers_outcomes(request):
        return JSONResponse(tally.to_json())
    return Response(status_code=204)


async def _skip_next(request: Request, role: str, target: Target, question: Pending, n: int) -> Tally:
    """Skips the next n messages of a listing, or all if there are fewer.

    Messages that were dispatched or cancelled since the table was written do not count: later ones are skipped instead.
    """
    settings: Settings = request.app.state.settings
    client: AsyncControlClient = request.app.state.control
    timeout_seconds = settings.api.answer_timeout_millis / 1000
    tally = Tally()
    tried = 0
    deadline = time.monotonic() + timeout_seconds
    while (left := n - tally.results["APPLIED"]) > 0:
        rows = (await asyncio.to_thread(question.rows, tried + min(left, MOST_MATCHED), NAMED.names)).slice(tried)
        if not rows.num_rows:
            break
        _check_partition(target, rows)
        if tried and time.monotonic() > deadline:
            raise AdminError(
                504, f"{n - left:,} of {n:,} were skipped in {timeout_seconds:g} s: call again for the rest"
            )
        tried += rows.num_rows
        todo = await asyncio.to_thread(plan, question.subscriptions, rows, Change(kinds.SKIP))
        commands = requests(settings, role, question.topic, todo.calls)
        before = tally.results["APPLIED"]
        async for outcome in client.send_ahead(commands, timeout_seconds):
            tally.add(outcome)
        if tally.results["APPLIED"] > before:
            deadline = time.monotonic() + timeout_seconds
    return tally


def _check_partition(target: Target, rows: pa.Table) -> None:
    """Checks that the call names a partition if the topic is partitioned.

    Args:
        target: the topic that the call names.
        rows: messages of the topic, at least one.

    Raises:
        AdminError: 405, the call does not name a partition.
    """
    if target.partition < 0 and int64(rows, "partition").max() >= 0:
        raise AdminError(405, PARTITIONED)


def _not_handed_out(request: Request, target: Target, subscription: str) -> Pending:
    """Returns the pending messages of a subscription that are not dispatched yet, by the job's lookahead."""
    settings: Settings = request.app.state.settings
    status = known_status(settings.warehouse)
    horizon = time.time_ns() // 1_000_000 + (status.lookahead_millis if status else 0)
    return _ask(request, target, PendingFilter(subscription=subscription, due_from=horizon))


def _ask(request: Request, target: Target, wanted: PendingFilter, cursor: str | None = None) -> Pending:
    return Pending(request.app.state.settings, target.name, wanted, cursor)
