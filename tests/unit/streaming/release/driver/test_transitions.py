"""The states of releases, remainders and destinations: each state with each event."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from itertools import product

import pytest

from streaming.release.driver.transitions import (
    TRANSITIONS,
    DestinationEvent,
    DestinationState,
    Event,
    ReleaseEvent,
    ReleaseState,
    RemainderEvent,
    RemainderState,
    State,
    TransitionError,
    after,
)

# By state and event the next state; "-": the event can't come.
TABLES = {
    (ReleaseState, ReleaseEvent): """
                 BEGUN  WRITTEN_BEFORE  TIME     UNBLOCKED  LOST     INCOMPLETE  COMPLETE  NAMED    STORED
        QUEUED   EARLY  -               -        -          -        -           -         -        -
        EARLY    -      SENT            BLOCKED  -          -        -           -         -        -
        BLOCKED  -      -               -        SENDING    -        -           -         -        -
        SENDING  -      -               -        -          BLOCKED  SENDING     SENT      -        -
        SENT     -      -               -        -          -        -           -         WRITING  -
        WRITING  -      -               -        -          -        -           -         -        WRITTEN
        WRITTEN  -      -               -        -          -        -           -         -        -
    """,
    (RemainderState, RemainderEvent): """
                 ARRIVED TAKEN_BACK
        OPEN     CLOSED  CLOSED
        RECALLED -       CLOSED
        CLOSED   -       -
    """,
    (DestinationState, DestinationEvent): """
                            REFUSED             LATE      ARRIVED    OVERDUE   SETTLED
        WRITABLE            UNWRITABLE          SLOW      -          -         -
        UNWRITABLE          UNWRITABLE          SLOW      UNWRITABLE REJECTING WRITABLE
        UNWRITABLE_WAS_SLOW UNWRITABLE_WAS_SLOW SLOW      SLOW       REJECTING -
        REJECTING           REJECTING           REJECTING REJECTING  -         WRITABLE
        SLOW                UNWRITABLE_WAS_SLOW SLOW      SLOW       -         WRITABLE
    """,
}


def cells() -> Iterator[tuple[State, Event, str]]:
    for (states, events), table in TABLES.items():
        header, *lines = [line.split() for line in table.strip().splitlines()]
        for state, *row in lines:
            for event, cell in zip(header, row, strict=True):
                yield states[state], events[event], cell  # type: ignore[misc]


@pytest.mark.parametrize(
    ("state", "event", "cell"), list(cells()), ids=lambda value: str(getattr(value, "name", value))
)
def test_each_event_in_each_state(state: State, event: Event, cell: str) -> None:
    if cell == "-":
        with pytest.raises(TransitionError, match=f"{type(state).__name__} {state}: {event} can't come"):
            after(state, event)
    else:
        assert after(state, event) is type(state)[cell]


def test_the_table_above_has_all_states_with_all_events() -> None:
    kinds: list[tuple[type[StrEnum], type[StrEnum]]] = list(TABLES)
    assert {(state, event) for state, event, _ in cells()} == {
        pair for states, events in kinds for pair in product(states, events)
    }
    assert len(TRANSITIONS) == sum(cell != "-" for *_, cell in cells())
