"""Which resumed subscriptions get a round of what was parked: in turn, while there is room, once for each tick."""

from __future__ import annotations

from dataclasses import replace

from streaming.checkpoint.offset import Offset
from streaming.release.feedback import Feedback
from streaming.source.clock import MAX_LARGE_BYTES
from streaming.source.resumed_rounds import resumed_rounds, without_unwritable

LAST = Offset(tick=7)
RESUMING = Feedback(resuming=(7, {"t": {"a": 5, "b": 0}, "u": {"a": 9}}))
MOST = 100_000


def test_all_get_one_after_the_tick_of_the_feedback_and_only_then() -> None:
    assert resumed_rounds(LAST, RESUMING, MOST) == {"t": {"a": 5, "b": 0}, "u": {"a": 9}}
    assert resumed_rounds(Offset(tick=8), RESUMING, MOST) == {}
    assert resumed_rounds(LAST, Feedback(), MOST) == {}


def test_none_gets_one_while_much_is_on_its_way() -> None:
    for full in (
        replace(RESUMING, in_flight=MOST - 5_000),
        replace(RESUMING, in_flight_bytes=MAX_LARGE_BYTES, large_bytes=1),
    ):
        assert resumed_rounds(LAST, full, MOST) == {}
    assert resumed_rounds(LAST, replace(RESUMING, in_flight=MOST - 20_000), MOST)
    assert resumed_rounds(LAST, RESUMING, 1), "however few may be in flight, when nothing is"
    assert not resumed_rounds(LAST, replace(RESUMING, in_flight=1), 1)


def test_one_of_which_much_waits_for_places_gets_none() -> None:
    waiting = (7, {"t": {"a": [[4_000, 1], [6_000, 1]], "b": [[10, 1], [0, 0]]}})
    assert resumed_rounds(LAST, replace(RESUMING, waiting=waiting), MOST) == {"t": {"b": 0}, "u": {"a": 9}}


def test_of_many_each_has_its_turn() -> None:
    many = {f"t{n:02}": {"a": n} for n in range(20)}
    had: list[str] = []
    for tick in range(5):
        found = resumed_rounds(Offset(tick=tick), Feedback(resuming=(tick, many)), MOST)
        assert len(found) == 8
        had += found
    assert {had.count(topic) for topic in many} == {2}


def test_one_that_can_not_be_written_now_gets_none() -> None:
    rounds = {"t": {"a": 5, "b": 0}, "u": {"a": 9}}
    assert without_unwritable(rounds, {"t": {"a": {}}, "u": {"a": {}, "b": {}}}) == {"t": {"b": 0}}
    assert without_unwritable(rounds, {"t": {"a": {"rejects": "gone"}}}) == rounds, "what is rejected goes on"
