"""The states of what is dispatched, and one table of how they change: of releases, their remainders, and destinations.

Neither the table nor who keeps the states (`releases.py`, `unwritable_destinations.py`) has threads, clocks or I/O:
threads and Spark call them, with time, answers and failures as arguments.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from conf.errors import DelayLakeError


class ReleaseState(StrEnum):
    """Where a release is on its way from its lane to the tables."""

    QUEUED = "queued"  # in its lane, behind older ones
    EARLY = "early"  # the first of its lane; its Spark job starts shortly before its first row is due
    BLOCKED = "blocked"  # its time has come; releases with messages that come before its own may have to end first
    SENDING = "sending"  # its tasks may run
    SENT = "sent"  # each message has arrived or is left open; an offset has yet to name what is open
    WRITING = "writing"  # its deliveries are being written
    WRITTEN = "written"  # its tick is confirmed when those of all releases before it are


class ReleaseEvent(StrEnum):
    """What happens to a release."""

    BEGUN = "begun"  # its lane has ended all older ones
    WRITTEN_BEFORE = "written before"  # an earlier run has written it
    TIME = "time"  # its time has come
    UNBLOCKED = "unblocked"  # its tasks may start; with an order signal they wait by themselves
    LOST = "lost"  # a task has failed without a report
    INCOMPLETE = "incomplete"  # tasks have reported, and some messages have to be sent again
    COMPLETE = "complete"  # each message has arrived or is left open
    NAMED = "named"  # an offset names what is open of it, and nothing older of its lane waits for that
    STORED = "stored"  # the tables have it


class RemainderState(StrEnum):
    """What becomes of a remainder: the messages of a release that have not arrived at one recipient."""

    OPEN = "open"  # it is sent again until it has arrived
    RECALLED = "recalled"  # nothing of it was sent: the shards are to park it
    CLOSED = "closed"  # it has arrived and is written, or the shards have it


class RemainderEvent(StrEnum):
    """What happens to a remainder."""

    ARRIVED = "arrived"  # it has arrived, and is written
    TAKEN_BACK = "taken back"  # an offset says that the shards park or reject its messages


class DestinationState(StrEnum):
    """What can be sent to a destination."""

    WRITABLE = "writable"
    UNWRITABLE = "unwritable"  # it refuses, or does not answer
    UNWRITABLE_WAS_SLOW = "unwritable, was slow"  # it is slow again when it can be written
    REJECTING = "rejecting"  # it could not be written for too long: what comes due for it is rejected
    SLOW = "slow"  # it gets in rounds what is parked for it


class DestinationEvent(StrEnum):
    """What happens to a destination."""

    REFUSED = "refused"  # messages have not arrived, or it accepts no producer
    LATE = "late"  # it answers, too late
    ARRIVED = "arrived"  # all that is open has arrived; without remainders: it accepts a producer
    OVERDUE = "overdue"  # it could not be written for as long as messages may wait
    SETTLED = "settled"  # nothing is open or on its way, and a slow one has kept up for a while


State = ReleaseState | RemainderState | DestinationState
Event = ReleaseEvent | RemainderEvent | DestinationEvent
S = TypeVar("S", bound=State)

# (state, event): the next state. A pair that is not here can't come: see `after`.
TRANSITIONS: dict[tuple[State, Event], State] = {
    (ReleaseState.QUEUED, ReleaseEvent.BEGUN): ReleaseState.EARLY,
    (ReleaseState.EARLY, ReleaseEvent.WRITTEN_BEFORE): ReleaseState.SENT,
    (ReleaseState.EARLY, ReleaseEvent.TIME): ReleaseState.BLOCKED,
    (ReleaseState.BLOCKED, ReleaseEvent.UNBLOCKED): ReleaseState.SENDING,
    (ReleaseState.SENDING, ReleaseEvent.LOST): ReleaseState.BLOCKED,
    (ReleaseState.SENDING, ReleaseEvent.INCOMPLETE): ReleaseState.SENDING,
    (ReleaseState.SENDING, ReleaseEvent.COMPLETE): ReleaseState.SENT,
    (ReleaseState.SENT, ReleaseEvent.NAMED): ReleaseState.WRITING,
    (ReleaseState.WRITING, ReleaseEvent.STORED): ReleaseState.WRITTEN,
    #
    (RemainderState.OPEN, RemainderEvent.ARRIVED): RemainderState.CLOSED,
    (RemainderState.OPEN, RemainderEvent.TAKEN_BACK): RemainderState.CLOSED,
    (RemainderState.RECALLED, RemainderEvent.TAKEN_BACK): RemainderState.CLOSED,
    #
    (DestinationState.WRITABLE, DestinationEvent.REFUSED): DestinationState.UNWRITABLE,
    (DestinationState.WRITABLE, DestinationEvent.LATE): DestinationState.SLOW,
    (DestinationState.UNWRITABLE, DestinationEvent.REFUSED): DestinationState.UNWRITABLE,
    (DestinationState.UNWRITABLE, DestinationEvent.LATE): DestinationState.SLOW,
    (DestinationState.UNWRITABLE, DestinationEvent.ARRIVED): DestinationState.UNWRITABLE,
    (DestinationState.UNWRITABLE, DestinationEvent.OVERDUE): DestinationState.REJECTING,
    (DestinationState.UNWRITABLE, DestinationEvent.SETTLED): DestinationState.WRITABLE,
    (DestinationState.UNWRITABLE_WAS_SLOW, DestinationEvent.REFUSED): DestinationState.UNWRITABLE_WAS_SLOW,
    (DestinationState.UNWRITABLE_WAS_SLOW, DestinationEvent.LATE): DestinationState.SLOW,
    (DestinationState.UNWRITABLE_WAS_SLOW, DestinationEvent.ARRIVED): DestinationState.SLOW,
    (DestinationState.UNWRITABLE_WAS_SLOW, DestinationEvent.OVERDUE): DestinationState.REJECTING,
    (DestinationState.REJECTING, DestinationEvent.REFUSED): DestinationState.REJECTING,
    (DestinationState.REJECTING, DestinationEvent.LATE): DestinationState.REJECTING,
    (DestinationState.REJECTING, DestinationEvent.ARRIVED): DestinationState.REJECTING,
    (DestinationState.REJECTING, DestinationEvent.SETTLED): DestinationState.WRITABLE,
    (DestinationState.SLOW, DestinationEvent.REFUSED): DestinationState.UNWRITABLE_WAS_SLOW,
    (DestinationState.SLOW, DestinationEvent.LATE): DestinationState.SLOW,
    (DestinationState.SLOW, DestinationEvent.ARRIVED): DestinationState.SLOW,
    (DestinationState.SLOW, DestinationEvent.SETTLED): DestinationState.WRITABLE,
}


class TransitionError(DelayLakeError):
    """An event that can't come in a state: the program is wrong, and the run ends before it sends or writes more."""


def after(state: S, event: Event) -> S:
    """Returns the state after an event.

    Raises:
        TransitionError: the event can't come in that state.
    """
    if (state, event) not in TRANSITIONS:
        raise TransitionError(f"{type(state).__name__} {state}: {event} can't come")
    return TRANSITIONS[state, event]  # type: ignore[return-value]
