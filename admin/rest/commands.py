"""Sends the commands of a call, waits for their outcomes, and answers with these."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence

from delaylake.control import ControlRequest, RequestFactory
from delaylake.message_ids import Outcome
from delaylake.wire.delaylake_pb2 import ControlCommand
from fastapi import Request, Response
from fastapi.responses import JSONResponse

from admin.control.async_client import AsyncControlClient
from admin.control.requests import outcome_json, outcome_text, request_factory
from admin.errors import AdminError, prefers_outcomes
from admin.rest.request_bodies import BadRequestError, parse_request_id
from admin.rest.target_topic import Target
from admin.rest.topics_schema import IDEMPOTENCY_KEY
from admin.security.policy import Policy
from conf.settings import Settings
from tracker.commands.decode import resolve_topic
from tracker.commands.kinds import OPERATIONS

# The HTTP statuses of unsuccessful results, gravest first: a call has one status.
CANCEL_CODES = {"INVALID": 412, "NOT_ALLOWED": 412, "TOO_LATE": 412, "NOT_FOUND": 404}
SKIP_CODES = {"INVALID": 400, "NOT_ALLOWED": 405, "TOO_LATE": 404, "NOT_FOUND": 404}

_SHOWN = 5  # outcomes in a reason


def command_factory(request: Request, role: str, target: Target, subscriptions: Sequence[str]) -> RequestFactory:
    """Returns the factory for the commands of a call, with the request id that its caller has chosen.

    Raises:
        AdminError: 400, the request id is not allowed.
    """
    request_id = chosen_request_id(request, role, target)
    return request_factory(request.app.state.settings, role, target.name, subscriptions, request_id=request_id)


def chosen_request_id(request: Request, role: str, target: Target) -> str:
    """Returns the request id that a call's Idempotency-Key stands for; "" if it has none.

    With authentication that of a role and topic: nobody can use up the keys of others.

    Raises:
        AdminError: 400, the key is not allowed.
    """
    try:
        key = parse_request_id(request.headers.get(IDEMPOTENCY_KEY))
    except BadRequestError as error:
        raise AdminError(400, str(error)) from error
    settings: Settings = request.app.state.settings
    if not key or not settings.auth.enabled:
        return key
    scope = json.dumps([role, target.route.source]).encode()
    return f"{key}~{hashlib.blake2b(scope, digest_size=6).hexdigest()}"


async def refuse_body(request: Request, why: str) -> None:
    """Raises an AdminError (400) where a call that has no body comes with one: what that says would be skipped."""
    if (await request.body()).strip() not in (b"", b"{}", b"null"):
        raise AdminError(400, f"the call goes without a body: {why}")


async def send(request: Request, requests: Iterable[ControlRequest], codes: Mapping[str, int]) -> Response:
    """Sends commands, waits for their outcomes, and answers with these, or with 204.

    Args:
        request: the call.
        requests: the commands.
        codes: the HTTP statuses of unsuccessful results, gravest first.

    Raises:
        AdminError: an outcome is not a success.
        ControlUnavailableError, NoOutcomeError: as `AsyncControlClient.send`.
    """
    settings: Settings = request.app.state.settings
    client: AsyncControlClient = request.app.state.control
    requests = iter(requests)
    first = next(requests)
    if _is_for_whole_topic(first.command):
        check_whole_topic(request, first.command.topic)
    requests = itertools.chain([first], requests)
    return answer(request, await client.send(requests, settings.api.answer_timeout_millis / 1000), codes)


def check_whole_topic(request: Request, topic: str) -> None:
    """Checks that the caller may do this on a whole topic, of which the call may name a partition.

    Raises:
        HTTPException: 403, the caller may do it on the partition alone.
    """
    settings: Settings = request.app.state.settings
    source, _ = resolve_topic(topic, {route.source for route in settings.routes})
    policy: Policy = request.app.state.policy
    policy.check_whole_topic(request, source or topic)


def _is_for_whole_topic(command: ControlCommand) -> bool:
    """Whether a command is for a whole topic, whichever partition it names: a pause, or one that names schedule keys.

    All commands of a call are of one kind.
    """
    field = command.WhichOneof("operation") or ""
    if field in OPERATIONS and OPERATIONS[field].is_of_topic:
        return True
    named = getattr(command, field)
    entries = getattr(named, "entries", None) or getattr(named, "messages", None) or ()
    return any(entry.schedule_key for entry in entries)


def answer(request: Request, outcomes: list[Outcome], codes: Mapping[str, int]) -> Response:
    """Returns the answer to a call whose commands have these outcomes.

    Raises:
        AdminError: as `send`.
    """
    wants_outcomes = prefers_outcomes(request)
    if failed := [outcome for outcome in outcomes if not outcome.is_done]:
        results = {outcome.result for outcome in failed}
        code = next((code for result, code in codes.items() if result in results), 500)
        raise AdminError(code, _reason(failed, len(outcomes)), outcomes if wants_outcomes else None)
    if wants_outcomes:
        return JSONResponse({"outcomes": [outcome_json(outcome) for outcome in outcomes]})
    return Response(status_code=204)


def _reason(failed: Sequence[Outcome], n: int) -> str:
    shown = "; ".join(outcome_text(outcome) for outcome in failed[:_SHOWN])
    more = f"; and {len(failed) - _SHOWN:,} more" if len(failed) > _SHOWN else ""
    others = f" ({n - len(failed):,} of {n:,} done)" if len(failed) < n else ""
    return f"{shown}{more}{others}"
