"""Pending messages and schedules, as the admin API lists them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from delaylake.message_ids import MessageId
from delaylake.times import moment

PAGE = 1_000  # messages or schedules in a page: the API's maximum

STATES = {"waiting": "waiting", "held": "held", "cancelled": "takenBack"}  # as the API calls them
_STATE_OF = {name: state for state, name in STATES.items()}


@dataclass(frozen=True)
class PendingMessage:
    """A message that is not delivered yet. What a command has done to it is seen a few seconds later.

    Attributes:
        deliver_at: when it is due; None: it is parked, or its schedule is paused.
        subscriptions: those for which it is in the listed state.
        event_time: None: the message has none.
        expires_at: from when on it is not sent any more to the first of these subscriptions; None: it has no end.
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
    expires_at: datetime | None = None

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> PendingMessage:
        """Makes a message of the API's JSON."""
        due = _moment(found["deliverAt"])
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
            _moment(found.get("expiresAt")),
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


@dataclass(frozen=True)
class ScheduleProgress:
    """How far a schedule has got for a subscription.

    Attributes:
        state: `waiting`, `held` (parked by a pause), `cancelled` or `ended`.
        delivered: the number of delivered occurrences, as far as the tables still have them.
        last_occurrence: the number of the last occurrence that was delivered or skipped; None: none yet.
        next_occurrence: the number of the occurrence that waits; None: none waits.
        next_deliver_at: when the next occurrence is due; None: none waits, or it is parked.
    """

    subscription: str
    state: str
    delivered: int
    last_occurrence: int | None
    next_occurrence: int | None
    next_deliver_at: datetime | None

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> ScheduleProgress:
        """Makes a subscription's progress of the API's JSON."""
        return cls(
            found["subscription"],
            _STATE_OF.get(found["state"], found["state"]),
            found["delivered"],
            found["lastOccurrence"],
            found["nextOccurrence"],
            _moment(found["nextDeliverAt"]),
        )


@dataclass(frozen=True)
class Schedule:
    """A recurring message, as far as the tables know: a few seconds behind.

    Attributes:
        id: the message's id.
        state: the first of `waiting`, `held`, `paused`, `cancelled` and `ended` that any subscription is in.
        next_occurrence: the number of the soonest occurrence that waits; None: none waits.
        next_deliver_at: when the next occurrence is due; None: none waits, or it is parked or paused.
        subscriptions: the progress of each subscription.
    """

    id: MessageId
    repeat: str
    time_zone: str
    repeat_until: datetime | None
    repeat_times: int | None
    misfire: str
    first_deliver_at: datetime
    state: str
    next_occurrence: int | None
    next_deliver_at: datetime | None
    key: str | None
    schedule_key: str | None
    publish_time: datetime
    producer_name: str | None
    subscriptions: tuple[ScheduleProgress, ...]

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Schedule:
        """Makes a schedule of the API's JSON."""
        due = _moment(found["nextDeliverAt"])
        return cls(
            MessageId.parse(found["id"], due),
            found["repeat"],
            found["timeZone"],
            _moment(found["repeatUntil"]),
            found["repeatTimes"],
            found["misfire"],
            moment(found["firstDeliverAt"]),
            _STATE_OF.get(found["state"], found["state"]),
            found["nextOccurrence"],
            due,
            found["key"],
            found["scheduleKey"],
            moment(found["publishTime"]),
            found["producerName"],
            tuple(map(ScheduleProgress.of_json, found["subscriptions"])),
        )


def _moment(since_epoch: int | None) -> datetime | None:
    return None if since_epoch is None else moment(since_epoch)
