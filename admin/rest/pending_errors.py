"""Turns errors of queries of pending messages into answers."""

from __future__ import annotations

from pydantic import ValidationError

from admin.control.bulk import CumulativeError, TooManyError
from admin.control.redrive import RedriveBusyError
from admin.errors import AdminError
from warehouse.queries.listing import CursorError, NoTablesError, PendingError, UnknownTopicError, VersionGoneError

_CODES: dict[type[PendingError], int] = {
    CursorError: 400,
    UnknownTopicError: 404,
    RedriveBusyError: 409,
    CumulativeError: 405,
    VersionGoneError: 410,
    TooManyError: 412,
    NoTablesError: 503,
}


def invalid(error: ValidationError) -> AdminError:
    """Returns the answer to a call with a filter that can't be read."""
    first = error.errors()[0]
    return AdminError(400, " ".join([*map(str, first["loc"]), first["msg"]]))


def refusal(error: PendingError) -> AdminError:
    """Returns the answer to a call whose query failed."""
    return AdminError(_CODES.get(type(error), 500), str(error))
