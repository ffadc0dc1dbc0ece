"""Sequence ids rise with ticks and places, and say of which tick they are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streaming.release.sequence_ids import before_first, last_sequence_id, sequence_id_of, tick_of

MOST_TICKS, MOST_PLACES = (1 << 41) - 2, (1 << 22) - 2

ticks = st.integers(0, MOST_TICKS)
places = st.integers(0, MOST_PLACES)


@given(st.lists(st.tuples(ticks, places), min_size=2, max_size=2))
def test_they_rise_from_place_to_place_and_from_tick_to_tick(sent: list[tuple[int, int]]) -> None:
    first, then = sorted(sent)
    assert (sequence_id_of(*first) < sequence_id_of(*then)) == (first < then)


@given(ticks, places)
def test_they_say_their_tick_and_lie_within_it(tick: int, place: int) -> None:
    assert tick_of(sequence_id_of(tick, place)) == tick
    assert before_first(tick) < sequence_id_of(tick, place) <= last_sequence_id(tick) < before_first(tick + 1)


def test_of_none_that_the_broker_knows_the_tick_is_before_all() -> None:
    assert tick_of(-1) == -1


def test_the_last_one_is_a_number_that_pulsar_takes() -> None:
    assert sequence_id_of(MOST_TICKS, MOST_PLACES) <= last_sequence_id(MOST_TICKS) < 1 << 63
