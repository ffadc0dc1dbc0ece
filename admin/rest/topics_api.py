"""The routes for commands about messages, with the paths and codes of Pulsar's admin API."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from delaylake.commands import Ids, Keys
from fastapi import APIRouter, Depends, Request, Response
from starlette.exceptions import HTTPException

from admin.control.bulk import Change
from admin.errors import AdminError
from admin.rest.by_filter import by_filter, parse_bulk
from admin.rest.commands import CANCEL_CODES, SKIP_CODES, answer, command_factory, refuse_body, send
from admin.rest.request_bodies import (
    BadRequestError,
    TooManyIdsError,
    parse_cancel,
    parse_command,
    parse_json,
    parse_message,
    parse_named,
    parse_schedule_key,
    parse_skip_map,
    parse_subscriptions,
)
from admin.rest.target_topic import Target, TargetTopic
from admin.rest.topics_schema import (
    ACKNOWLEDGE_RESPONSES,
    ACKNOWLEDGE_TEXT,
    ACTION_RESPONSES,
    CANCEL_RESPONSES,
    CANCEL_TEXT,
    DELIVER_NOW_TEXT,
    FILTER_BODY,
    RETRY_RESPONSES,
    SKIP_BODY,
    SKIP_MAP_BODY,
    SKIP_RESPONSES,
    SKIP_TEXT,
    TOPIC_PATH,
    Acknowledger,
    Authoritative,
    Canceller,
    DeliverAt,
    Deliverer,
    EntryId,
    LedgerId,
    ScheduleKey,
    Skipper,
    Subscription,
    SubscriptionNames,
    UnusedDeliverAt,
    fields_body,
    operation_body,
    operation_text,
)
from admin.security.policy import open_to_all, requires
from broker.entries.message_ids import MessageIdError
from conf.api_settings import Operation as Right
from conf.settings import Settings
from tracker.commands.kinds import CANCEL, OPERATIONS, RESCHEDULE, RESTORE, RETRY, SKIP, Operation
from tracker.subscriptions import ALSO_LATER

_T = TypeVar("_T")
_NO_IDS = (b"", b"{}", b"null")

router = APIRouter()


@router.post(
    TOPIC_PATH + "/cancelDelayedMessage",
    summary="Cancel a delayed message",
    description=CANCEL_TEXT,
    status_code=204,
    responses=CANCEL_RESPONSES,
    openapi_extra=fields_body("ledgerId", "entryId", "deliverAt"),
)
async def cancel_delayed_message(
    request: Request,
    role: Canceller,
    target: TargetTopic,
    ledger_id: LedgerId = None,
    entry_id: EntryId = None,
    deliver_at: DeliverAt = None,
    schedule_key: ScheduleKey = None,
    subscription_names: SubscriptionNames = None,
    authoritative: Authoritative = None,
) -> Response:
    query = {"ledgerId": ledger_id, "entryId": entry_id, "deliverAt": deliver_at, "scheduleKey": schedule_key}
    named, names = await _named_by_parameters(request, query, subscription_names, parse_cancel)
    target.check_subscriptions(names)
    made = command_factory(request, role, target, names)
    return await send(request, made.make(CANCEL, named), CANCEL_CODES)


@router.post(
    TOPIC_PATH + "/acknowledgeMessage",
    summary="Acknowledge a message",
    description=ACKNOWLEDGE_TEXT,
    status_code=204,
    responses=ACKNOWLEDGE_RESPONSES,
    openapi_extra=fields_body("ledgerId", "entryId"),
)
async def acknowledge_message(
    request: Request,
    role: Acknowledger,
    target: TargetTopic,
    ledger_id: LedgerId = None,
    entry_id: EntryId = None,
    deliver_at: UnusedDeliverAt = None,
    schedule_key: ScheduleKey = None,
    subscription_names: SubscriptionNames = None,
    authoritative: Authoritative = None,
) -> Response:
    query = {"ledgerId": ledger_id, "entryId": entry_id, "deliverAt": deliver_at, "scheduleKey": schedule_key}
    named, names = await _named_by_parameters(request, query, subscription_names, lambda one: Ids([parse_message(one)]))
    target.check_subscriptions(names)
    made = command_factory(request, role, target, names)
    return await send(request, made.make(SKIP, named), CANCEL_CODES)


@router.post(
    TOPIC_PATH + "/subscription/{subscription}/skipByMessageIds",
    summary="Skip messages by their ids",
    description=SKIP_TEXT,
    status_code=204,
    responses=SKIP_RESPONSES,
    openapi_extra=SKIP_BODY,
)
async def skip_by_message_ids(
    request: Request,
    role: Skipper,
    target: TargetTopic,
    subscription: Subscription,
    authoritative: Authoritative = None,
) -> Response:
    named = await _named(request, target, subscription, parse_named)
    made = command_factory(request, role, target, [subscription])
    return await send(request, made.make(SKIP, named), SKIP_CODES)


@router.post(
    TOPIC_PATH + "/subscription/{subscription}/skip/0",
    summary="Skip entries by a map of ledger ids to entry ids",
    description=SKIP_TEXT,
    status_code=204,
    responses=SKIP_RESPONSES,
    openapi_extra=SKIP_MAP_BODY,
)
async def skip_by_map(
    request: Request,
    role: Skipper,
    target: TargetTopic,
    subscription: Subscription,
    authoritative: Authoritative = None,
) -> Response:
    if (await request.body()).strip() in _NO_IDS:
        # As in Pulsar, where it skips the next 0 messages.
        target.check_subscriptions([subscription])
        return answer(request, [], SKIP_CODES)
    messages = await _named(request, target, subscription, parse_skip_map)
    made = command_factory(request, role, target, [subscription])
    return await send(request, made.make(SKIP, Ids(messages)), SKIP_CODES)


@router.post(
    TOPIC_PATH + "/subscription/{subscription}/deliverNow",
    summary="Deliver messages at once",
    description=DELIVER_NOW_TEXT,
    status_code=204,
    responses=ACTION_RESPONSES,
    openapi_extra=FILTER_BODY,
)
async def deliver_now(request: Request, role: Deliverer, target: TargetTopic, subscription: Subscription) -> Response:
    if await _has_filter(request):
        wanted, _ = parse_bulk(await request.body(), OPERATIONS[RESTORE])  # a filter alone, without a time
        at_once = Change(RESCHEDULE, {"deliver_at": 0})
        return await by_filter(request, role, target, subscription, wanted, at_once)
    named = await _named(request, target, subscription, parse_named)
    made = command_factory(request, role, target, [subscription])
    return await send(request, made.make(RESCHEDULE, named, deliver_at=0), CANCEL_CODES)


def _add_route(operation: Operation) -> None:
    """Adds the route of an operation, as its description has it."""
    may = Depends(requires(Right(operation.right)))

    # The role first: who may not ask is not told what there is.
    async def run(request: Request, *, role: str = may, target: TargetTopic, subscription: Subscription) -> Response:
        if operation.by_filter and await _has_filter(request):
            return await by_filter(request, role, target, subscription, *parse_bulk(await request.body(), operation))
        if operation.is_of_subscription:
            await refuse_body(request, "it is for all that the subscription gets")
            target.check_subscriptions([subscription])
            made = command_factory(request, role, target, [subscription])
            return await send(request, made.make(operation.kind), CANCEL_CODES)
        named, fields = await _named(request, target, subscription, partial(parse_command, operation))
        if operation.kind == RETRY and subscription == ALSO_LATER:
            names = ", ".join(one.name for one in target.route.subscriptions)
            text = f"a retry is for the one subscription whose consumer failed, and not for {ALSO_LATER}"
            raise AdminError(412, f"{text}: the topic has {names}")
        made = command_factory(request, role, target, [subscription])
        return await send(request, made.make(operation.kind, named, **fields), CANCEL_CODES)

    router.add_api_route(
        f"{TOPIC_PATH}/subscription/{{subscription}}/{operation.path}",
        run,
        methods=["POST"],
        name=operation.kind,
        summary=operation.summary,
        description=operation_text(operation),
        status_code=204,
        responses=RETRY_RESPONSES if operation.kind == RETRY else ACTION_RESPONSES,
        openapi_extra=operation_body(operation),
    )


for _operation in OPERATIONS.values():
    if _operation.summary and not _operation.is_of_schedule:
        _add_route(_operation)


@router.api_route(
    "/admin/v2/non-persistent/{rest:path}",
    methods=["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"],
    include_in_schema=False,
    dependencies=[Depends(open_to_all)],
)
async def non_persistent(rest: str) -> Response:
    code = 406 if rest.endswith("/getMessageIdByIndex") else 405
    raise AdminError(code, "not for non-persistent topics: they keep no messages")


async def _has_filter(request: Request) -> bool:
    """Whether the body names messages by a filter, and not by their ids."""
    try:
        content = parse_json(await request.body())
    except BadRequestError:
        return False
    return isinstance(content, dict) and "filter" in content


async def _named(request: Request, target: Target, subscription: str, parse: Callable[[bytes, int], _T]) -> _T:
    """Returns the result of `parse` for the body.

    Raises:
        AdminError: 400, the body can't be read; 404, there is no such subscription; 413, too many messages are named.
    """
    settings: Settings = request.app.state.settings
    target.check_subscriptions([subscription])
    try:
        return parse(await request.body(), settings.api.max_ids_per_call)
    except (BadRequestError, MessageIdError) as error:
        raise AdminError(400, str(error)) from error
    except TooManyIdsError as error:
        raise AdminError(413, str(error)) from error


async def _named_by_parameters(
    request: Request,
    query: Mapping[str, object],
    subscription_names: list[str] | None,
    parse: Callable[[Mapping[str, object]], Ids],
) -> tuple[Ids | Keys, list[str]]:
    """Returns the message that the parameters name, by its key or else as `parse` reads it, and the subscriptions.

    Raises:
        AdminError: 412, a parameter is wrong.
    """
    try:
        given = await _given(request, **query, subscriptionNames=subscription_names)
        names = parse_subscriptions(given.get("subscriptionNames"))
        key = parse_schedule_key(given)
        return (Keys([key]) if key is not None else parse(given)), names
    except (BadRequestError, MessageIdError) as error:
        raise AdminError(412, str(error)) from error


async def _given(request: Request, **query: object) -> dict[str, object]:
    """Returns the parameters of the query, completed from the body, which is a form or JSON.

    Raises:
        BadRequestError: the body is neither, or has others: a misspelt name would be for all subscriptions.
    """
    body = await request.body()
    content: dict[str, object] = {}
    if body.lstrip()[:1] in (b"{", b"["):
        parsed = parse_json(body)
        if not isinstance(parsed, dict):
            raise BadRequestError("the body must be an object")
        content = parsed
    elif body:
        try:
            form = await request.form()
        except HTTPException as error:
            raise BadRequestError(f"the body is no form: {error.detail}") from error
        content = {name: form.getlist(name) if name == "subscriptionNames" else form[name] for name in form}
        if not content:
            raise BadRequestError("the body is neither a form nor JSON")
    if unknown := content.keys() - query.keys() - {"authoritative"}:
        raise BadRequestError(f"the call has no parameter {min(unknown)[:80]!r}")
    return content | {name: value for name, value in query.items() if value is not None}
