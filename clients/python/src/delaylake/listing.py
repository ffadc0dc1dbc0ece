"""What waits, as the admin API lists it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from delaylake.message_ids import MessageId
from delaylake.times import moment

PAGE = 1_000  # messages that a call lists; the API gives no more

STATES = {"waiting": "waiting", "held": "held", "cancelled": "takenBack"}  # as the API calls them


@dataclass(frozen=True)
class PendingMessage:
    """A message that is not delivered yet, as far as the tables know: a few seconds behind.

    Attributes:
        deliver_at: when it is due; None: it is held back by a pause.
        subscriptions: those for which it is in the state that was asked for.
        event_time: None: it has none.
    """

    id: MessageId
    deliver_at: datetime | None
    subscriptions: tuple[str, ...]
    key: str | None
    ordering_key: str | None
    properties: Mapping[str, str]
    event_time: datetime | None
    publish_time: datetime
    producer_name: str | None

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> PendingMessage:
        """Makes it of the API's JSON."""
        due = None if found["deliverAt"] is None else moment(found["deliverAt"])
        return cls(
            MessageId(found["ledgerId"], found["entryId"], found["partitionIndex"], found["batchIndex"], due),
            due,
            tuple(found["subscriptions"]),
            found["key"],
            found["orderingKey"],
            found["properties"],
            moment(found["eventTime"]) if found["eventTime"] else None,
            moment(found["publishTime"]),
            found["producerName"],
        )


@dataclass(frozen=True)
class MessageState:
    """A message that is not delivered to all of its subscriptions yet.

    Attributes:
        waiting_for: subscriptions to which it will go.
        cancelled_for: subscriptions for which it was cancelled or skipped, and can be restored.
    """

    message: PendingMessage
    waiting_for: tuple[str, ...] = ()
    cancelled_for: tuple[str, ...] = ()
