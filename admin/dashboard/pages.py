"""The dashboard's pages, and the parts of them that are loaded by themselves."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any
from urllib.parse import urlencode

from deltalake.exceptions import DeltaError
from fastapi import APIRouter, Depends, Form, Query, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse
from pydantic import ValidationError

from admin.dashboard.data import control_log, history_of, message_of, refusals, storage
from admin.dashboard.responses import COOKIE, page, part, static_file
from admin.errors import AdminError
from admin.security.policy import Policy, Reader, is_from_another_site, open_to_all, requires_some
from broker.message_ids import MessageIdError, MessageRef
from broker.message_ids import parse as parse_id
from conf.errors import one_line
from conf.secrets import without_secrets
from conf.settings import Operation, Route, Settings
from conf.times import parse_time
from status.job_status import read_status
from status.troubles import Trouble
from warehouse.queries.listing import PendingError, PendingFilter, State
from warehouse.queries.waiting import Pending

_PAGE = 50
_LOGGED = 200

# The lengths of the schedule's window and of a bar in it, ms, by the name on the page.
SPANS = {
    "hour": (3_600_000, 60_000),
    "day": (86_400_000, 900_000),
    "week": (7 * 86_400_000, 7_200_000),
    "month": (30 * 86_400_000, 43_200_000),
    "year": (366 * 86_400_000, 7 * 86_400_000),
}

router = APIRouter(include_in_schema=False)

Caller = Annotated[Reader, Depends(requires_some(Operation.READ))]
Admin = Annotated[Reader, Depends(requires_some(Operation.ADMIN))]
Text = Annotated[str, Query()]


@router.get("/ui/static/{rest}", dependencies=[Depends(open_to_all)])
def static(rest: str) -> Response:
    return static_file(rest)


@router.get("/docs", dependencies=[Depends(open_to_all)])
def api_description(request: Request) -> Response:
    """Shows /openapi.json as a page for people."""
    return page(request, "docs.html", described=request.app.openapi())


@router.get("/ui/login", dependencies=[Depends(open_to_all)])
def login_page(request: Request) -> Response:
    return page(request, "login.html")


@router.post("/ui/login", dependencies=[Depends(open_to_all)])
def login(request: Request, token: Annotated[str, Form()] = "") -> Response:
    """Sets a cookie with the token, which no script can read and no page of another site can send."""
    policy: Policy = request.app.state.policy
    try:
        policy.login(request, token.strip())
    except AdminError as error:
        return page(request, "login.html", code=403 if error.code == 403 else 400, problem=error.reason)
    answer = RedirectResponse("/", 303)
    answer.set_cookie(
        COOKIE, token.strip(), httponly=True, samesite="strict", secure=request.url.scheme == "https", path="/"
    )
    return answer


@router.post("/ui/logout", dependencies=[Depends(open_to_all)])
def logout(request: Request) -> Response:
    if is_from_another_site(request):
        raise AdminError(403, "no page of another site may log you out")
    answer = RedirectResponse("/ui/login", 303)
    answer.delete_cookie(COOKIE, path="/")
    return answer


@router.get("/")
def overview(request: Request, caller: Caller) -> Response:
    return page(request, "overview.html", caller, topics=caller.routes)


@router.get("/ui/data/overview")
def overview_data(request: Request, caller: Caller) -> Response:
    """Answers with the job's status as JSON: figures, and the points of the charts."""
    now = _now()
    status = read_status(_settings(request).warehouse)
    if status is None:
        return JSONResponse({"now": now, "state": "unknown", "trouble": _NO_STATUS, "troubles": [], "history": []})
    last = status.history[-1] if status.history else None
    return JSONResponse(
        {
            "now": now,
            "age": now - status.updated_at,
            "state": status.state,
            "trouble": status.trouble(now),
            "troubles": [asdict(t) for t in status.troubles if caller.sees_all or _is_of(t, caller.routes)],
            "isHeldUp": status.is_held_up,
            "startedAt": status.started_at,
            "lastBatchAge": now - status.last_batch_at if status.last_batch_at else None,
            "pending": status.pending,
            "inState": status.in_state,
            "inFlight": status.in_flight,
            "lookaheadMillis": status.lookahead_millis,
            "batchMillis": status.batch_millis_last,
            "rejected": status.rejected,
            "taken": status.taken,
            "delivered": status.delivered,
            "takenPerSecond": last.taken_per_second if last else None,
            "deliveredPerSecond": last.delivered_per_second if last else None,
            "lateP50": last.late_millis_p50 if last else None,
            "lateP99": last.late_millis_p99 if last else None,
            "history": [
                [p.at, p.taken_per_second, p.delivered_per_second, p.late_millis_p50, p.late_millis_p99]
                for p in status.history
            ],
        }
    )


def _is_of(trouble: Trouble, routes: Sequence[Route]) -> bool:
    """Whether a trouble is of a source topic, rejects topic or destination of the routes, or of a partition of one."""
    name = re.sub(r"-partition-\d+$", "", trouble.name)
    return any(
        name in (route.source, route.rejects_topic, *(s.destination for s in route.subscriptions)) for route in routes
    )


_NO_STATUS = "the job has told nothing of itself: start it with `delaylake run` on these settings"


@router.get("/ui/part/subscriptions")
def subscriptions(request: Request, caller: Caller) -> Response:
    """Shows the counts of pending messages by subscription, for all topics that the caller may read."""
    found, problem = [], None
    for route in caller.routes:
        try:
            found.append(request.app.state.stats.of(route.source))
        except PendingError as error:
            problem = str(error)
    return part(request, "parts/subscriptions.html", stats=found, problem=problem)


@router.get("/ui/part/recent")
def recent(request: Request, caller: Caller) -> Response:
    rows, problem = _logged(request, caller, {}, 8)
    return part(request, "parts/outcomes.html", rows=rows, problem=problem)


@router.get("/ui/schedule")
def schedule(
    request: Request, caller: Caller, topic: Text = "", subscription: Text = "", start: Text = "", span: Text = "day"
) -> Response:
    route = _route(caller, topic)
    _check_subscription(route, subscription)
    begin = _time("start", start) if start else None
    return page(
        request, "schedule.html", caller, topics=caller.routes, route=route, subscription=subscription,
        start=start, span=span if span in SPANS else "day", spans=SPANS, begin=begin,
    )  # fmt: skip


@router.get("/ui/data/schedule")
def schedule_data(
    request: Request, caller: Caller, topic: Text = "", subscription: Text = "", start: Text = "", span: Text = "day"
) -> Response:
    """Answers with the number of messages due in each bar of the window, as JSON."""
    route = _route(caller, topic)
    _check_subscription(route, subscription)
    length, width = SPANS.get(span, SPANS["day"])
    begin = (_time("start", start) if start else _now()) // width * width
    wanted = PendingFilter(subscription=subscription or None, due_from=begin, due_before=begin + length)
    try:
        question = Pending(_settings(request), route.source, wanted)
        bars = question.histogram(width)
    except PendingError as error:
        raise AdminError(503, str(error)) from error
    counts = dict(bars)
    return JSONResponse(
        {
            "version": question.version,
            "asOf": question.as_of,
            "width": width,
            "bars": [[at, counts.get(at, 0)] for at in range(begin, begin + length, width)],
        }
    )


def _asked(
    topic: Text = "",
    subscription: Text = "",
    state: Text = State.WAITING,
    key: Text = "",
    property: Text = "",
    producer: Text = "",
    id: Text = "",
    due_from: Annotated[str, Query(alias="dueFrom")] = "",
    due_before: Annotated[str, Query(alias="dueBefore")] = "",
) -> dict[str, str]:
    """A dependency: the fields of the search form, as they were filled in."""
    return {
        "topic": topic,
        "subscription": subscription,
        "state": state,
        "key": key,
        "property": property,
        "producer": producer,
        "id": id,
        "dueFrom": due_from,
        "dueBefore": due_before,
    }


Asked = Annotated[dict[str, str], Depends(_asked)]


@router.get("/ui/messages")
def messages(request: Request, caller: Caller, asked: Asked, cursor: Text = "") -> Response:
    route = _route(caller, asked["topic"])
    subscription = asked["subscription"]
    shown: dict[str, Any] = {"found": None, "problem": None, "filter": None}
    code = 200
    try:
        wanted = _wanted(asked)
        _check_subscription(route, subscription)
        shown["filter"] = wanted.model_dump(by_alias=True, exclude_defaults=True, mode="json", exclude={"subscription"})
        shown["is_selective"] = wanted.is_selective
        shown["found"] = Pending(_settings(request), route.source, wanted, cursor or None).page(_PAGE)
    except PendingError as error:
        shown["problem"], code = str(error), 400
    except AdminError as error:
        shown["problem"], code = error.reason, error.code
    return page(
        request,
        "messages.html",
        caller,
        code=code,
        topics=caller.routes,
        route=route,
        asked=asked,
        cursor=cursor,
        query=urlencode({**{name: value for name, value in asked.items() if value}, "topic": route.source}),
        names=[subscription] if subscription else [s.name for s in route.subscriptions],
        states=list(State),
        **shown,
    )


@router.get("/ui/part/count")
def count(request: Request, caller: Caller, asked: Asked, cursor: Text = "") -> Response:
    """Shows how many messages a listing has, in the version of the tables that its first page read."""
    try:
        n = Pending(_settings(request), _route(caller, asked["topic"]).source, _wanted(asked), cursor or None).count()
    except PendingError as error:
        raise AdminError(410, str(error)) from error
    return part(request, "parts/count.html", n=n)


@router.get("/ui/message")
def message(request: Request, caller: Caller, topic: Text = "", id: Text = "") -> Response:
    route = _route(caller, topic)
    ref = _ref(id)
    settings = _settings(request)
    found, events, problem, code = None, [], None, 200
    try:
        found = message_of(settings, route.source, ref)
        events = history_of(settings, route.source, ref)
    except DeltaError:
        problem = f"there are no tables in {settings.warehouse}: the job has not run yet"
    if found is None and not events:
        code = 404
    return page(
        request, "message.html", caller, code=code, route=route, ref=ref, found=found, events=events, problem=problem,
        names=[s.name for s in route.subscriptions],
    )  # fmt: skip


@router.get("/ui/control")
def control(
    request: Request,
    caller: Caller,
    topic: Text = "",
    result: Text = "",
    who: Text = "",
    request_id: Annotated[str, Query(alias="requestId")] = "",
) -> Response:
    asked = {"topic": topic, "result": result, "issued_by": who, "request_id": request_id}
    rows, problem = _logged(request, caller, asked, _LOGGED)
    refused = refusals(_settings(request), [r.source for r in caller.routes], caller.sees_all, _LOGGED)
    return page(
        request, "control.html", caller, topics=caller.routes, asked=asked, rows=rows, problem=problem, refused=refused
    )


@router.get("/ui/storage")
def storage_page(request: Request, caller: Caller) -> Response:
    settings = _settings(request)
    return page(
        request, "storage.html", caller, tables=storage(settings), status=read_status(settings.warehouse), now=_now()
    )


@router.get("/ui/settings")
def settings_page(request: Request, caller: Admin) -> Response:
    """Shows the settings in force to administrators, without secrets such as the keys of an object store."""
    settings = _settings(request)
    values = without_secrets(settings.model_dump(mode="json", exclude={"routes", "auth"}))
    sections = {name: value if isinstance(value, dict) else {"": value} for name, value in values.items()}
    return page(
        request, "settings.html", caller, sections=sections, routes=caller.routes, is_protected=settings.auth.enabled
    )


def _logged(
    request: Request, caller: Reader, asked: dict[str, str], limit: int
) -> tuple[list[dict[str, Any]], str | None]:
    try:
        return control_log(_settings(request), [route.source for route in caller.routes], asked, limit), None
    except DeltaError:
        return [], "there are no tables yet: the job has not run"


def _settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


def _route(caller: Reader, topic: str) -> Route:
    """Returns the route of a topic, or with an empty one the first that the caller may read.

    Raises:
        AdminError: 404, there is none.
    """
    for route in caller.routes:
        if topic in ("", route.source):
            return route
    raise AdminError(404, f"no such topic, or not for you to read: {topic[:200]!r}")


def _check_subscription(route: Route, subscription: str) -> None:
    if subscription and subscription not in [s.name for s in route.subscriptions]:
        raise AdminError(404, f"the topic has no subscription {subscription[:200]!r}")


def _wanted(asked: dict[str, str]) -> PendingFilter:
    """Returns the search form as a filter.

    Raises:
        AdminError: 400, a field can't be read.
    """
    name, _, value = asked["property"].partition("=")
    if asked["property"] and not name:
        raise AdminError(400, "a property must be name=value")
    position = _ref(asked["id"]) if asked["id"] else None
    try:
        return PendingFilter(
            subscription=asked["subscription"] or None,
            state=State(asked["state"]),
            key=asked["key"] or None,
            properties={name: value} if name else {},
            producer_name=asked["producer"] or None,
            due_from=_time("due from", asked["dueFrom"]) if asked["dueFrom"] else None,
            due_before=_time("due before", asked["dueBefore"]) if asked["dueBefore"] else None,
            ledger_id=None if position is None else position.ledger_id,
            entry_id=None if position is None else position.entry_id,
        )
    except (ValidationError, ValueError) as error:
        raise AdminError(400, one_line(error)[:200]) from error


def _ref(text: str) -> MessageRef:
    try:
        return parse_id(text.strip())
    except MessageIdError as error:
        raise AdminError(400, str(error)) from error


def _time(name: str, text: str) -> int:
    try:
        return parse_time(text.strip())
    except ValueError as error:
        raise AdminError(400, f"{name}: {error}") from error


def _now() -> int:
    return time.time_ns() // 1_000_000
