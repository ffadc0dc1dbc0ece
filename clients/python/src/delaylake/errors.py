"""What can go wrong, one class each. What is wrong with an argument itself is a ValueError."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from delaylake.message_ids import Outcome


class DelayLakeError(Exception):
    """The base of all errors of this package.

    Attributes:
        outcomes: what became of each message and subscription, where something was tried: a part of it may be done.
        request_id: of the command; "": it was none. With it the same call can be made again.
        deliver_at: of a reschedule, the time that it asked for; None: it was none. Where the call had `after`, which is
            another time each time, the same call is one with this as `at`.
    """

    def __init__(self, reason: str, outcomes: Sequence[Outcome] = (), request_id: str = "") -> None:
        super().__init__(reason)
        self.outcomes = tuple(outcomes)
        self.request_id = request_id
        self.deliver_at: datetime | None = None


class TooLate(DelayLakeError):
    """The message was handed out already, some seconds before its time: it is delivered."""


class NotFound(DelayLakeError):
    """There is no such topic, subscription or message."""


class NotAllowed(DelayLakeError):
    """The subscription's type, Exclusive or Failover, acknowledges cumulatively: cancel instead of skip."""


class Invalid(DelayLakeError):
    """The call makes no sense: what was cancelled is rescheduled, or a request id was another command's."""


class Forbidden(DelayLakeError):
    """The token is not accepted, or its role may not do this."""


class Gone(DelayLakeError):
    """The version of the tables that a listing reads was removed meanwhile: begin it again."""


class Unavailable(DelayLakeError):
    """The API or the broker can't be reached, and could not in the time given."""


class NoAnswer(Unavailable):
    """The call may be done, or be done yet: the time was over before the answer came.

    A command with the same `request_id` does nothing twice, and is told what the first one was.
    """


def of_result(result: str) -> type[DelayLakeError]:
    """Returns the error of an outcome's result."""
    return _OF_RESULT.get(result, DelayLakeError)


def gravity(result: str) -> int:
    """Returns where a result stands among those that are errors, gravest first."""
    return list(_OF_RESULT).index(result) if result in _OF_RESULT else len(_OF_RESULT)


_OF_RESULT: dict[str, type[DelayLakeError]] = {
    "INVALID": Invalid,
    "NOT_ALLOWED": NotAllowed,
    "TOO_LATE": TooLate,
    "NOT_FOUND": NotFound,
}
