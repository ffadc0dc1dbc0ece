"""The answers of the listings, as the API's description has them; the routes give what the tables' readers make."""

from __future__ import annotations

from pydantic import BaseModel


class PendingMessage(BaseModel):
    """A message that waits. Times are ms since the epoch."""

    messageId: str
    ledgerId: int
    entryId: int
    partitionIndex: int
    batchIndex: int
    deliverAt: int | None
    isHeld: bool
    isPaused: bool
    shapedFrom: int | None
    subscriptions: list[str]
    key: str | None
    orderingKey: str | None
    properties: dict[str, str]
    eventTime: int | None
    publishTime: int
    producerName: str | None
    attempt: int | None
    occurrence: int | None = None
    expiresAt: int | None = None
    isGoingOut: bool | None = None


class PendingPage(BaseModel):
    """A page of a listing of messages that wait."""

    version: int
    asOf: int
    messages: list[PendingMessage]
    nextCursor: str | None
    note: str | None = None


class ScheduleProgress(BaseModel):
    """How far a schedule has got for a subscription."""

    subscription: str
    state: str
    delivered: int
    lastOccurrence: int | None
    lastDeliverAt: int | None
    nextOccurrence: int | None
    nextDeliverAt: int | None


class Schedule(BaseModel):
    """A message that recurs. Times are ms since the epoch."""

    id: str
    repeat: str
    timeZone: str
    repeatUntil: int | None
    repeatTimes: int | None
    misfire: str
    firstDeliverAt: int
    state: str
    nextOccurrence: int | None
    nextDeliverAt: int | None
    key: str | None
    scheduleKey: str | None
    publishTime: int
    producerName: str | None
    subscriptions: list[ScheduleProgress]


class SchedulePage(BaseModel):
    """A page of a listing of messages that recur."""

    schedules: list[Schedule]
    nextCursor: str | None
