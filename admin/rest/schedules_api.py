"""The routes that list the schedules of a topic with their next occurrences, and change them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated, Any

from delaylake.commands import Ids, Keys, done_results
from delaylake.control import RequestFactory
from delaylake.message_ids import MessageId, Outcome
from fastapi import APIRouter, Depends, Path, Query, Request, Response

from admin.errors import AdminError, error_responses
from admin.rest.commands import CANCEL_CODES, answer, check_whole_topic, command_factory, refuse_body, send
from admin.rest.listing_answers import SchedulePage
from admin.rest.pending_errors import refusal
from admin.rest.request_bodies import BadRequestError, parse_schedule_key, parse_subscriptions
from admin.rest.target_topic import Target, TargetTopic
from admin.rest.topics_schema import (
    ACTION_RESPONSES,
    CALLER_ERRORS,
    END_TEXT,
    TOPIC_PATH,
    Canceller,
    Reader,
    SubscriptionNames,
    operation_text,
)
from admin.security.policy import requires
from broker.entries.message_ids import MessageIdError, MessageRef, parse
from conf.api_settings import Operation as Right
from conf.settings import Settings
from tracker.commands.decode import resolve_topic
from tracker.commands.kinds import CANCEL, OPERATIONS, SKIP, SKIP_NEXT, Operation
from tracker.wire.delaylake_pb2 import Result
from warehouse.delta.tables import Tables
from warehouse.queries.first_answers import find_first_answers
from warehouse.queries.listing import PendingError
from warehouse.schedules.schedule import MAX_UPCOMING, Schedule
from warehouse.schedules.schedules import MAX_LIMIT, Schedules

_PAGE = 100  # schedules of a page if no limit is given
_UPCOMING = 5  # occurrences that are shown if no number is given

_ENDS = (CANCEL.upper(), SKIP.upper())  # the operations that end a schedule, as `outcomes` has them

_NAMES = {SKIP_NEXT: "skip_next_occurrence"}  # of routes, in OpenAPI, where they are not the operations'

router = APIRouter()


class UnknownScheduleError(AdminError):
    """The tables have no such recurring message."""


ScheduleId = Annotated[
    str,
    Path(
        alias="id",
        description="The message's id, as ledger:entry[:batchIndex] or ledger:entry:partition:batchIndex.",
        examples=["7:0:-1:-1"],
    ),
]
KeyOfSchedule = Annotated[
    str, Query(alias="scheduleKey", description="Schedule key of the recurring message.", examples=["order-7"])
]
OneSubscription = Annotated[str | None, Query(description="Subscription whose progress is shown; none: all.")]

_LISTING: dict[int | str, dict[str, Any]] = {200: {"model": SchedulePage}}
_READ_ERRORS = CALLER_ERRORS | {"_503": "The tables are not there: the job has not run yet."}


@router.get(
    TOPIC_PATH + "/schedules",
    summary="The topic's schedules: its recurring messages",
    description="In the order in which they came. A message is known here when the job has sealed it, a few seconds"
    " after it came, and so is how far it has got.",
    response_model=None,
    responses=_LISTING
    | error_responses(**_READ_ERRORS, _400="A parameter is wrong.", _404="No such topic or subscription."),
)
def list_schedules(
    request: Request,
    role: Reader,
    target: TargetTopic,
    subscription: OneSubscription = None,
    with_ended: Annotated[
        bool, Query(alias="withEnded", description="Also ended schedules, as long as the tables have them.")
    ] = False,
    limit: Annotated[int, Query(ge=1, le=MAX_LIMIT)] = _PAGE,
    cursor: Annotated[str | None, Query(description="nextCursor of the page before.")] = None,
) -> dict[str, Any]:
    try:
        return _ask(request, target, subscription).page(limit, cursor, with_ended).to_json()
    except PendingError as error:
        raise refusal(error) from error


@router.get(
    TOPIC_PATH + "/schedules/{id}",
    summary="A schedule, and its next occurrences",
    responses=error_responses(
        **_READ_ERRORS, _400="The id or a parameter is wrong.", _404="No such topic, subscription or schedule."
    ),
)
def show_schedule(
    request: Request,
    role: Reader,
    target: TargetTopic,
    schedule_id: ScheduleId,
    subscription: OneSubscription = None,
    upcoming: Annotated[
        int, Query(ge=0, le=MAX_UPCOMING, alias="next", description="Number of next occurrences in `upcoming`.")
    ] = _UPCOMING,
) -> dict[str, Any]:
    found = _find(request, target, schedule_id, subscription)
    return {**found.to_json(), "upcoming": [one.to_json() for one in found.upcoming(upcoming)]}


@router.delete(
    TOPIC_PATH + "/schedules/{id}",
    summary="End a schedule",
    description=END_TEXT,
    status_code=204,
    responses=ACTION_RESPONSES,
)
async def end_schedule(
    request: Request,
    role: Canceller,
    target: TargetTopic,
    schedule_id: ScheduleId,
    subscription_names: SubscriptionNames = None,
) -> Response:
    made = await _factory(request, role, target, subscription_names)
    try:
        found = await asyncio.to_thread(_find, request, target, schedule_id)
    except UnknownScheduleError:
        # The call may be a repeated one: retention has deleted the ended schedule since.
        if outcomes := await asyncio.to_thread(_first_outcomes, request, made, _ref(schedule_id)):
            return answer(request, outcomes, CANCEL_CODES)
        raise
    # A cancel is for a whole entry, which may have other messages.
    is_alone = found.batch_size == 1
    commands = made.make(CANCEL, Ids([found.ref], [found.cancel_at])) if is_alone else made.make(SKIP, Ids([found.ref]))
    return await send(request, commands, CANCEL_CODES)


def _add_change(operation: Operation) -> None:
    """Adds the routes of an operation on schedules: for the schedule with an id, and for that of a key."""
    may = Depends(requires(Right(operation.right)))
    kind, name = operation.kind, _NAMES.get(operation.kind, operation.kind)

    async def by_id(
        request: Request,
        *,
        role: str = may,
        target: TargetTopic,
        schedule_id: ScheduleId,
        subscription_names: SubscriptionNames = None,
    ) -> Response:
        made = await _factory(request, role, target, subscription_names)
        return await send(request, made.make(kind, Ids([_ref(schedule_id)])), CANCEL_CODES)

    async def by_key(
        request: Request,
        *,
        role: str = may,
        target: TargetTopic,
        schedule_key: KeyOfSchedule,
        subscription_names: SubscriptionNames = None,
    ) -> Response:
        made = await _factory(request, role, target, subscription_names)
        return await send(request, made.make(kind, Keys([_key(schedule_key)])), CANCEL_CODES)

    for middle, run, what, own_name in (
        ("/{id}", by_id, "a schedule", name),
        ("", by_key, "the schedule of a key", f"{name}_of_key"),
    ):
        path = f"{TOPIC_PATH}/schedules{middle}/{operation.path}"
        router.add_api_route(
            path,
            run,
            methods=["POST"],
            name=own_name,
            summary=f"{operation.summary} {what}",
            description=operation_text(operation),
            status_code=204,
            responses=ACTION_RESPONSES,
        )


for _operation in OPERATIONS.values():
    if _operation.is_of_schedule:
        _add_change(_operation)


async def _factory(request: Request, role: str, target: Target, given: Sequence[str] | None) -> RequestFactory:
    """Returns what makes the commands of a request, for the subscriptions that it names; none: for all."""
    try:
        names = parse_subscriptions(given)
    except BadRequestError as error:
        raise AdminError(400, str(error)) from error
    await refuse_body(request, "subscriptionNames is in the query")
    check_whole_topic(request, target.name)
    target.check_subscriptions(names)
    return command_factory(request, role, target, names)


def _find(request: Request, target: Target, schedule_id: str, subscription: str | None = None) -> Schedule:
    ref = _ref(schedule_id)
    try:
        found = _ask(request, target, subscription).find(ref)
    except PendingError as error:
        raise refusal(error) from error
    if found is None:
        raise UnknownScheduleError(
            404, f"the tables know of no recurring message {ref}: a new one is known after some seconds"
        )
    return found


def _first_outcomes(request: Request, made: RequestFactory, message: MessageRef) -> list[Outcome]:
    """Returns the outcomes of an earlier call with this request id that ended the schedule; empty: there was none."""
    if not made.request_id:
        return []
    settings: Settings = request.app.state.settings
    source, _ = resolve_topic(made.topic, {route.source for route in settings.routes})
    now = time.time_ns() // 1_000_000
    rows = find_first_answers(Tables(settings.warehouse), None, [made.request_id], now).to_pylist()
    outcomes = [
        Outcome(
            row["subscription"],
            MessageId(row["ledger_id"], row["entry_id"], -1, row["batch_index"]),
            result := Result.Name(row["result"]),
            row["reason"] or "",
            result in done_results(CANCEL, Ids([message])),
        )
        for row in rows
        if (row["topic"], row["ledger_id"], row["entry_id"]) == (source, message.ledger_id, message.entry_id)
        and (message.batch_index < 0 or row["batch_index"] in (-1, message.batch_index))
        and row["operation"] in _ENDS
    ]
    is_same = {outcome.subscription for outcome in outcomes} >= set(made.subscriptions)
    return outcomes if is_same else []


def _ask(request: Request, target: Target, subscription: str | None) -> Schedules:
    settings: Settings = request.app.state.settings
    return Schedules(settings, target.name, subscription)


def _ref(schedule_id: str) -> MessageRef:
    try:
        return parse(schedule_id)
    except MessageIdError as error:
        raise AdminError(400, str(error)) from error


def _key(given: str) -> str:
    try:
        return str(parse_schedule_key({"scheduleKey": given}))
    except BadRequestError as error:
        raise AdminError(400, str(error)) from error
