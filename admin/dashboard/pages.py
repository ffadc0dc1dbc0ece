"""The routes of the dashboard's pages, and of parts of pages that are loaded separately."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any
from urllib.parse import urlencode

from deltalake.exceptions import DeltaError, TableNotFoundError
from fastapi import APIRouter, Depends, Form, Query, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse

from admin.dashboard.data import (
    WHICH_ATTEMPTS,
    attempts_of,
    changes_log,
    lookahead_millis,
    outcomes_of,
    refusals,
    storage,
)
from admin.dashboard.histogram import ALL, FIT, SPANS, histogram
from admin.dashboard.message import history_of, message_of, standings
from admin.dashboard.responses import COOKIE, page, page_in_parts, part, static_file
from admin.dashboard.search_form import Asked, Text, form_filter, parse_field_time, parse_ref
from admin.errors import AdminError
from admin.security.policy import Policy, Reader, is_from_another_site, open_to_all, requires_some
from conf.api_settings import Operation
from conf.errors import UnreadableWarehouseError, one_line
from conf.secrets import without_secrets
from conf.settings import Route, Settings
from status.job_status import known_status
from warehouse.queries.listing import Page, PendingError, State
from warehouse.queries.pending_messages import Pending
from warehouse.schedules.schedules import Schedules

_PAGE = 50
_LOGGED = 200
# The number of outcomes that are read for the control log, and for the last commands of the overview.
_READ_FOR_LOG, _READ_FOR_LAST = 20_000, 2_000

router = APIRouter(include_in_schema=False)

Caller = Annotated[Reader, Depends(requires_some(Operation.READ))]
Admin = Annotated[Reader, Depends(requires_some(Operation.ADMIN))]


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
    """Sets a cookie with the token; no script can read it, and no page of another site can send it."""
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


@router.get("/ui/part/recent")
def recent(request: Request, caller: Caller) -> Response:
    rows, problem = _logged(request, caller, {}, 8, _READ_FOR_LAST)
    return part(request, "parts/changes.html", caller, rows=rows, problem=problem, opens=False)


@router.get("/ui/part/outcomes")
def outcomes(
    request: Request,
    caller: Caller,
    request_id: Annotated[str, Query(alias="requestId")] = "",
    result: Text = "",
    subscription: Text = "",
) -> Response:
    """Shows the outcomes of a row of the control log."""
    topics = [route.source for route in caller.routes]
    try:
        rows = outcomes_of(_settings(request), topics, request_id, result, subscription, _LOGGED)
    except TableNotFoundError:
        rows = []
    return part(request, "parts/outcomes.html", caller, rows=rows, limit=_LOGGED)


@dataclass(frozen=True)
class Window:
    """What a page shows of what is due: of a subscription or of all, in a span of time; as the query has it."""

    topic: str
    subscription: str
    start: str
    end: str
    span: str

    @property
    def times(self) -> tuple[int | None, int | None]:
        """Begin and end, ms since the epoch; None: open. Raises AdminError (400) if one of them is no time."""
        start = parse_field_time("start", self.start) if self.start else None
        return start, parse_field_time("end", self.end) if self.end else None


def _window(topic: Text = "", subscription: Text = "", start: Text = "", end: Text = "", span: Text = FIT) -> Window:
    return Window(topic, subscription, start, end, span)


Shown = Annotated[Window, Depends(_window)]


@router.get("/ui/schedule")
def schedule(request: Request, caller: Caller, shown: Shown) -> Response:
    route = _route(caller, shown.topic)
    _check_subscription(route, shown.subscription)
    begin, until = shown.times
    status = known_status(_settings(request).warehouse)
    queues = status.queues(route.source, shown.subscription, _now()) if status is not None else []
    span = shown.span if shown.span in SPANS or shown.span == ALL else FIT
    return page(
        request, "schedule.html", caller, queues=queues, topics=caller.routes, route=route,
        subscription=shown.subscription, start=shown.start, end=shown.end, span=span, spans=[FIT, *SPANS, ALL],
        begin=begin, until=until,
    )  # fmt: skip


@router.get("/ui/data/schedule")
def schedule_data(request: Request, caller: Caller, shown: Shown) -> Response:
    """Answers with the number of messages due in each bar of a window, for each subscription, as JSON."""
    route = _route(caller, shown.topic)
    _check_subscription(route, shown.subscription)
    settings = _settings(request)
    begin, until = shown.times
    if begin is not None and until is not None and until <= begin:
        raise AdminError(400, "the window ends before it begins")
    try:
        found = histogram(settings, route.source, shown.subscription or None, shown.span, begin, until)
    except PendingError as error:
        raise AdminError(503, str(error)) from error
    status = known_status(settings.warehouse)
    return JSONResponse(
        {
            "version": found.version,
            "asOf": found.as_of,
            "width": found.width,
            "subscriptions": found.subscriptions,
            "bars": [[int(at), *n] for at, n in zip(found.starts, found.counts.tolist(), strict=True)],
            "before": found.n_before,
            "after": found.n_after,
            "mostPerSecond": status.most_per_second if status else 0,
        }
    )


@router.get("/ui/messages")
def messages(request: Request, caller: Caller, asked: Asked, cursor: Text = "") -> Response:
    route = _route(caller, asked["topic"])
    subscription = asked["subscription"]
    shown: dict[str, Any] = {"problem": None, "filter": None}
    pending, code = None, 200
    try:
        wanted = form_filter(asked)
        _check_subscription(route, subscription)
        shown["filter"] = wanted.model_dump(by_alias=True, exclude_defaults=True, mode="json", exclude={"subscription"})
        shown["is_selective"] = wanted.is_selective
        pending = Pending(_settings(request), route.source, wanted, cursor or None)
    except PendingError as error:
        shown["problem"], code = str(error), 400
    except AdminError as error:
        shown["problem"], code = error.reason, error.code
    # The form is shown while the messages are searched for.
    return page_in_parts(
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
        find=partial(_page_of, pending),
        lookahead=partial(lookahead_millis, _settings(request)),
        **shown,
    )


def _page_of(pending: Pending | None) -> tuple[Page | None, str | None]:
    """Returns the page of a listing, or None and what is wrong."""
    try:
        return (pending.page(_PAGE) if pending is not None else None), None
    except (PendingError, DeltaError, UnreadableWarehouseError) as error:
        return None, one_line(error)


@router.get("/ui/recurring")
def recurring(
    request: Request, caller: Caller, topic: Text = "", subscription: Text = "", which: Text = "", cursor: Text = ""
) -> Response:
    """Shows the topic's recurring messages, with their next occurrences."""
    route = _route(caller, topic)
    _check_subscription(route, subscription)
    found, problem, code = None, None, 200
    with_ended = which == "all"
    try:
        asked = Schedules(_settings(request), route.source, subscription or None)
        found = asked.page(_PAGE, cursor or None, with_ended)
    except PendingError as error:
        problem, code = str(error), 400
    query = urlencode({"topic": route.source, "subscription": subscription, "which": which})
    return page(
        request, "recurring.html", caller, code=code, topics=caller.routes, route=route, subscription=subscription,
        with_ended=with_ended, query=query, found=found, problem=problem,
        lookahead_millis=lookahead_millis(_settings(request)),
    )  # fmt: skip


@router.get("/ui/retries")
def retries(request: Request, caller: Caller, topic: Text = "", subscription: Text = "", which: Text = "") -> Response:
    """Shows the topic's messages that were retried, and a form to re-drive dead letters."""
    route = _route(caller, topic)
    _check_subscription(route, subscription)
    attempts, problem = [], None
    try:
        attempts = attempts_of(_settings(request), route.source, subscription or None, which, _LOGGED)
    except TableNotFoundError:
        problem = "there are no tables yet: the job has not run"
    return page(
        request, "retries.html", caller, topics=caller.routes, route=route, subscription=subscription, which=which,
        which_ones=WHICH_ATTEMPTS, attempts=attempts, limit=_LOGGED, problem=problem,
    )  # fmt: skip


@router.get("/ui/part/count")
def count(request: Request, caller: Caller, asked: Asked, cursor: Text = "") -> Response:
    """Shows the number of messages in a listing, in the version of the tables that its first page read."""
    try:
        n = Pending(
            _settings(request), _route(caller, asked["topic"]).source, form_filter(asked), cursor or None
        ).count()
    except PendingError as error:
        raise AdminError(410, str(error)) from error
    return part(request, "parts/count.html", caller, n=n)


@router.get("/ui/message")
def message(request: Request, caller: Caller, topic: Text = "", id: Text = "") -> Response:
    route = _route(caller, topic)
    ref = parse_ref(id)
    settings = _settings(request)
    found, standing, events, problem, code = None, [], [], None, 200
    try:
        found = message_of(settings, route.source, ref)
        events = history_of(settings, route.source, ref)
        standing = standings(settings, route, ref, found) if found else []
    except TableNotFoundError:
        problem = f"there are no tables in {settings.warehouse}: the job has not run yet"
    except PendingError as error:
        problem = str(error)
    if found is None and not events:
        code = 404
    return page(
        request, "message.html", caller, code=code, route=route, ref=ref, found=found, standings=standing,
        events=events, problem=problem, names=[s.name for s in route.subscriptions],
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
        request, "storage.html", caller, tables=storage(settings), status=known_status(settings.warehouse), now=_now()
    )


@router.get("/ui/settings")
def settings_page(request: Request, caller: Admin) -> Response:
    """Shows the settings in force to administrators of all topics, without secrets such as keys of an object store."""
    if not caller.is_admin:
        raise AdminError(403, f"the role {caller.role} may not admin all topics: the settings are those of all")
    settings = _settings(request)
    values = without_secrets(settings.model_dump(mode="json", exclude={"routes", "auth"}))
    sections = {name: value if isinstance(value, dict) else {"": value} for name, value in values.items()}
    return page(
        request, "settings.html", caller, sections=sections, routes=caller.routes, is_protected=settings.auth.enabled
    )


def _logged(
    request: Request, caller: Reader, asked: dict[str, str], limit: int, n_read: int = _READ_FOR_LOG
) -> tuple[list[dict[str, Any]], str | None]:
    try:
        topics = [route.source for route in caller.routes]
        return changes_log(_settings(request), topics, asked, limit, n_read), None
    except TableNotFoundError:
        return [], "there are no tables yet: the job has not run"
    except UnreadableWarehouseError as error:
        return [], str(error)


def _settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


def _route(caller: Reader, topic: str) -> Route:
    """Returns the route of a topic; of an empty topic the first route that the caller may read.

    Raises:
        AdminError: 404, there is no such route, or the caller may not read it.
    """
    for route in caller.routes:
        if topic in ("", route.source):
            return route
    raise AdminError(404, f"no such topic, or not for you to read: {topic[:200]!r}")


def _check_subscription(route: Route, subscription: str) -> None:
    if subscription and subscription not in [s.name for s in route.subscriptions]:
        raise AdminError(404, f"the topic has no subscription {subscription[:200]!r}")


def _now() -> int:
    return time.time_ns() // 1_000_000
