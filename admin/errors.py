"""Errors of the admin API: an answer has a code and the body {"reason": "..."}."""

from __future__ import annotations

import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from delaylake.message_ids import Outcome
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from admin.control.async_client import ControlUnavailableError, NoOutcomeError
from admin.control.requests import outcome_json
from conf.errors import DelayLakeError, UnreadableWarehouseError


class AdminError(DelayLakeError):
    """A call that is answered with an error.

    Args:
        code: the HTTP status.
        reason: one line.
        outcomes: the outcomes of the commands, which may be done in part; None: the caller did not ask for them.
    """

    def __init__(self, code: int, reason: str, outcomes: list[Outcome] | None = None) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.outcomes = outcomes


class Reason(BaseModel):
    """The body of every error."""

    reason: str


def error_responses(**descriptions: str) -> dict[int | str, dict[str, Any]]:
    """Returns the `responses` of a route's description, as in `error_responses(_404="no such topic")`."""
    return {int(code[1:]): {"model": Reason, "description": text} for code, text in descriptions.items()}


ErrorPage = Callable[[Request, int, str], Response]


def answer_errors(app: FastAPI, page: ErrorPage) -> None:
    """Makes an application answer all errors, also of unknown paths and methods, with a reason.

    Args:
        app: the application.
        page: makes the HTML page with which browsers are answered instead, except for paths of the admin API.
    """

    def answer(request: Request, code: int, reason: str, *more: Any) -> Response:
        is_of_pages = request.method == "GET" and not request.url.path.startswith("/admin/")
        if is_of_pages and "text/html" in request.headers.get("accept", ""):
            return page(request, code, reason)
        return error_response(code, reason, *more)

    @app.exception_handler(AdminError)
    async def refuse(request: Request, error: AdminError) -> Response:
        return answer(request, error.code, error.reason, error.outcomes)

    @app.exception_handler(ControlUnavailableError)
    async def unavailable(_: Request, error: ControlUnavailableError) -> Response:
        return error_response(503, str(error))

    @app.exception_handler(NoOutcomeError)
    async def no_answer(_: Request, error: NoOutcomeError) -> Response:
        return error_response(504, str(error))

    @app.exception_handler(UnreadableWarehouseError)
    async def unreadable(request: Request, error: UnreadableWarehouseError) -> Response:
        return answer(request, 503, str(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        reason = str(error.detail)
        if error.status_code == 404 and reason == HTTPStatus(404).phrase:
            reason = f"no such path: {request.url.path[:200]!r}"
        return answer(request, error.status_code, reason, None, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return error_response(400, f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}")

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, error: ClientDisconnect) -> Response:
        return error_response(400, "the body was not complete")  # nobody gets it

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        return answer(request, 500, f"internal error: {type(error).__name__}")


def prefers_outcomes(request: Request) -> bool:
    """Whether the caller asks for the outcome of each message: `Prefer: return=representation`."""
    return "return=representation" in request.headers.get("prefer", "").replace(" ", "").lower()


def error_response(code: int, reason: str, outcomes: list[Outcome] | None = None, headers: Any = None) -> Response:
    """Makes the answer of an error: JSON with the reason, and the outcomes if there are any."""
    content: dict[str, object] = {"reason": reason}
    if outcomes is not None:
        content["outcomes"] = [outcome_json(outcome) for outcome in outcomes]
    return AsciiResponse(content, code, headers)


class AsciiResponse(JSONResponse):
    """JSON in ASCII: a request may have characters that UTF-8 can't encode, such as half a surrogate pair."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode("ascii")
