"""The admin REST API as an ASGI application."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI

from admin.control.async_client import AsyncControlClient
from admin.control.scheduling import Scheduler
from admin.dashboard import overview, pages
from admin.dashboard.data import Stats
from admin.dashboard.responses import error_page
from admin.errors import answer_errors
from admin.middleware import BodyLimit, HeadAsGet, PulsarPaths
from admin.monitoring import health_api
from admin.monitoring.metrics import ApiMetrics, CountRequests
from admin.rest import dead_letters_api, index_api, pending_api, schedule_api, schedules_api, topics_api
from admin.security.hosts import AllowedHosts, host_check
from admin.security.policy import Policy, check_policies
from admin.security.proxies import TrustedProxies
from admin.security.refusals import Refusals
from conf.settings import Settings
from warehouse.delta.tables import Tables
from warehouse.queries.message_index import MessageIndex
from warehouse.queries.unsealed_messages import UnacknowledgedReader


class _AdminApi(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Returns the OpenAPI document without FastAPI's own 422 for invalid requests, which is never used."""
        described = super().openapi()
        described["components"]["schemas"].update(schedule_api.BODY_SCHEMAS)
        for path in described["paths"].values():
            for operation in path.values():
                if "HTTPValidationError" in json.dumps(operation["responses"].get("422")):
                    del operation["responses"]["422"]
        return described


def create_app(settings: Settings) -> FastAPI:
    """Makes the application. Once started, it connects to the broker in the background, and reconnects if it has to.

    Raises:
        TokenKeyError: the key for tokens can't be used.
        PolicyError: a route declares no policy.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncControlClient(settings) as app.state.control, refusals:
            app.state.scheduler = Scheduler(settings, app.state.control, app.state.tables)
            yield

    app = _AdminApi(
        title="delaylake",
        version=version("delaylake"),
        description="Cancels delayed messages, with the paths of Pulsar's admin API. The v1 paths of"
        " cancelDelayedMessage, acknowledgeMessage and the skips by ids and by number are"
        " `/admin/persistent/{property}/{cluster}/{namespace}/{topic}/...`, also after `/admin/v1`.",
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # the framework's page loads scripts from elsewhere
        redoc_url=None,
    )
    app.state.settings = settings
    app.state.tables = Tables(settings.warehouse)
    refusals = Refusals(Tables(settings.warehouse))
    app.state.policy = Policy(settings, refusals)
    app.state.metrics = ApiMetrics(settings)
    app.state.stats = Stats(settings)
    app.state.unacknowledged = UnacknowledgedReader(settings, keep_seconds=1.0)
    app.state.message_index = MessageIndex(app.state.tables)
    app.include_router(topics_api.router, tags=["topics"])
    app.include_router(schedule_api.router, tags=["schedules"])
    app.include_router(index_api.router, tags=["topics"])
    app.include_router(pending_api.router, tags=["pending messages"])
    app.include_router(schedules_api.router, tags=["schedules"])
    app.include_router(dead_letters_api.router, tags=["dead letters"])
    app.include_router(health_api.router, tags=["health"])
    app.include_router(overview.router)
    app.include_router(pages.router)
    answer_errors(app, error_page)
    # The innermost middleware: others pass on a copy of the request's scope, and outside of them the route is unknown.
    app.add_middleware(CountRequests, metrics=app.state.metrics)
    app.add_middleware(BodyLimit, max_bytes=settings.api.max_body_bytes)
    app.add_middleware(PulsarPaths)
    app.add_middleware(HeadAsGet)
    app.add_middleware(
        AllowedHosts, is_allowed=host_check(settings), refusals=refusals, rate_limit=app.state.policy.rate_limit
    )
    app.add_middleware(TrustedProxies, proxies=settings.api.trusted_proxies)
    check_policies(app)
    return app
