"""The client's errors. A wrong argument is a ValueError or TypeError instead."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from delaylake.message_ids import Outcome


class DelayLakeError(Exception):
    """The base of all errors of this package.

    Attributes:
        outcomes: the outcome for each message and subscription, if there are any: some may be done.
        request_id: the command's request id, with which the same call can be repeated; empty if it was no command.
        deliver_at: the new time of a reschedule, else None. To repeat a call that had `after`, give this as `at`.
    """

    def __init__(self, reason: str, outcomes: Sequence[Outcome] = (), request_id: str = "") -> None:
        super().__init__(reason)
        self.outcomes = tuple(outcomes)
        self.request_id = request_id
        self.deliver_at: datetime | None = None


class TooLate(DelayLakeError):
    """The message has been released to the senders, which is some seconds before its time: it is delivered."""


class NotFound(DelayLakeError):
    """There is no such topic, subscription or message."""


class NotAllowed(DelayLakeError):
    """The subscription's type, Exclusive or Failover, acknowledges cumulatively: cancel instead of skip."""


class Invalid(DelayLakeError):
    """The call makes no sense: as to reschedule a cancelled message, or to use another command's request id."""


class Forbidden(DelayLakeError):
    """The token is not accepted, or its role may not do this."""


class Gone(DelayLakeError):
    """The version of the tables that a listing reads has been removed: begin the listing again."""


class Unavailable(DelayLakeError):
    """The API or the broker could not be reached in the given time."""


class NoAnswer(Unavailable):
    """The time was over before the answer came: the call may have been done, or may still be.

    To repeat a command with the same `request_id` is safe: it is applied once, and gets the first answer.
    """


def result_error(result: str) -> type[DelayLakeError]:
    """Returns the error class for an outcome's result."""
    return _RESULT_ERRORS.get(result, DelayLakeError)


def gravity(result: str) -> int:
    """Returns the rank of a result among the errors: 0 is the gravest."""
    return list(_RESULT_ERRORS).index(result) if result in _RESULT_ERRORS else len(_RESULT_ERRORS)


_RESULT_ERRORS: dict[str, type[DelayLakeError]] = {
    "INVALID": Invalid,
    "NOT_ALLOWED": NotAllowed,
    "TOO_LATE": TooLate,
    "NOT_FOUND": NotFound,
}
