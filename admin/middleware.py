"""Middleware that handles every request before its route is looked up."""

from __future__ import annotations

import re
from urllib.parse import unquote

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from admin.errors import error_response

_V1 = re.compile(
    r"/admin/(?:v1/)?(persistent|non-persistent)/([^/]+)/[^/]+/([^/]+)/([^/]+)"
    r"/(cancelDelayedMessage|acknowledgeMessage|subscription/[^/]+/(?:skipByMessageIds|skip/[^/]+))"
)


class PulsarPaths:
    """Middleware: rewrites the paths of requests to those of the routes.

    An encoded slash belongs to a name, and stays encoded. The v1 path of an operation becomes its v2 path, without the
    cluster.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            raw = scope["raw_path"].decode("ascii").split("/")
            path = "/".join(unquote(part).replace("/", "%2F") for part in raw)
            if v1 := _V1.fullmatch(path):
                path = "/admin/v2/" + "/".join(v1.groups())
            scope = {**scope, "path": path}
        await self._app(scope, receive, send)


class BodyLimit:
    """Middleware: answers 413 to a body of more than `max_bytes`, and does not read much more than that of it."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        reason = f"the body has more than {self._max_bytes:,} bytes"
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdigit() and int(declared) > self._max_bytes:
            await error_response(413, reason)(scope, receive, send)
            return
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise HTTPException(413, reason)
            return message

        await self._app(scope, receive_limited, send)


class HeadAsGet:
    """Middleware: hands a HEAD request on as a GET, and leaves the body of its answer out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_no_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app({**scope, "method": "GET"}, receive, send_no_body)
