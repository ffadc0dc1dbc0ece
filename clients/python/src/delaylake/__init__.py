"""Schedule messages on Apache Pulsar for later with delaylake, and cancel, move and list what waits."""

from delaylake.async_client import AsyncClient
from delaylake.client import Client
from delaylake.errors import (
    DelayLakeError,
    Forbidden,
    Gone,
    Invalid,
    NoAnswer,
    NotAllowed,
    NotFound,
    TooLate,
    Unavailable,
)
from delaylake.listing import MessageState, PendingMessage, Schedule, ScheduleProgress
from delaylake.message_ids import MessageId, Outcome, Redriven

__all__ = [
    "AsyncClient",
    "Client",
    "DelayLakeError",
    "Forbidden",
    "Gone",
    "Invalid",
    "MessageId",
    "MessageState",
    "NoAnswer",
    "NotAllowed",
    "NotFound",
    "Outcome",
    "PendingMessage",
    "Redriven",
    "Schedule",
    "ScheduleProgress",
    "TooLate",
    "Unavailable",
]
