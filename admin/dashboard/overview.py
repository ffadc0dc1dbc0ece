"""The overview page: the job's status, and the pending messages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from admin.dashboard.responses import page, part
from admin.security.policy import Reader, requires_some
from conf.api_settings import Operation
from conf.errors import UnreadableWarehouseError
from conf.partitions import without_partition
from conf.settings import Route
from status.alerts import Alert
from status.job_status import known_status, read_status
from warehouse.queries.listing import PendingError

_NO_STATUS = "no job has run on these settings yet: start it with `delaylake run`"

router = APIRouter(include_in_schema=False)

Caller = Annotated[Reader, Depends(requires_some(Operation.READ))]


@router.get("/")
def overview(request: Request, caller: Caller) -> Response:
    return page(request, "overview.html", caller, topics=caller.routes)


@router.get("/ui/data/overview")
def overview_data(request: Request, caller: Caller) -> Response:
    """Answers with the job's status as JSON: figures, and the points of the charts."""
    now = time.time_ns() // 1_000_000
    status, trouble = None, _NO_STATUS
    try:
        status = read_status(request.app.state.settings.warehouse)
    except UnreadableWarehouseError as error:
        trouble = str(error)
    if status is None:
        return JSONResponse({"now": now, "state": "unknown", "trouble": trouble, "troubles": [], "history": []})
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
            "pending": status.pending if status.last_batch_at else None,
            "inState": status.in_state,
            "inFlight": status.in_flight,
            "lookaheadMillis": status.lookahead_millis,
            "batchMillis": status.batch_millis_last,
            "rejected": status.rejected,
            "taken": status.taken,
            "delivered": status.delivered,
            "mostPerSecond": status.most_per_second,
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


def _is_of(alert: Alert, routes: Sequence[Route]) -> bool:
    """Whether an alert is about a source topic, rejects topic or destination of the routes, or about a partition."""
    name = without_partition(alert.name)
    return any(
        name in (route.source, route.rejects_topic, *(s.destination for s in route.subscriptions)) for route in routes
    )


@router.get("/ui/part/subscriptions")
def subscriptions(request: Request, caller: Caller) -> Response:
    """Shows pending messages by subscription, and queues of shaped ones, for all topics that the caller may read."""
    found, problem = [], None
    for route in caller.routes:
        try:
            found.append(request.app.state.stats.of(route.source))
        except (PendingError, UnreadableWarehouseError) as error:
            problem = str(error)
    status, now = known_status(request.app.state.settings.warehouse), time.time_ns() // 1_000_000
    queues = (
        []
        if status is None
        else [(r.source, name, until) for r in caller.routes for name, until in status.queues(r.source, "", now)]
    )
    return part(request, "parts/subscriptions.html", caller, stats=found, queues=queues, problem=problem)
