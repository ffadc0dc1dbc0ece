"""The clock: how offsets follow one another, whatever the time does and whatever is coming."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.times import Moment
from streaming.checkpoint.offset import Offset
from streaming.release.feedback import Feedback
from streaming.source.clock import Clock, ClockSettings, tick_seconds
from tests.support.fuzzing.examples import examples
from tests.support.tracker.fake_index import FakeIndex
from tracker.buckets.time_slots import SLOT_MILLIS
from tracker.tick import Tick

SETTINGS = ClockSettings("run", lookahead_millis=1_000, seal_interval_millis=5_000, load_ahead_millis=60_000)
START = 1_000_000_000


def due_in(rows: dict[int, int]) -> Callable[[int, int, int], list[tuple[int, int]]]:
    """What is due in the delayed index: {slot: rows}."""
    return lambda version, start, end: [
        (slot, n) for slot, n in sorted(rows.items()) if start <= slot * SLOT_MILLIS < end
    ]


class Ticks:
    """A clock, its last offset, and a time that both of its kinds follow."""

    def __init__(self, last: Offset | None = None, rows: dict[int, int] | None = None, **changes: object) -> None:
        self.clock = Clock(replace(SETTINGS, **changes))  # type: ignore[arg-type]
        self.last = last or Offset()
        self.rows = rows or {}
        self.now = START
        self.monotonic = 0.0
        self.version = 7

    @property
    def at(self) -> Moment:
        return Moment(self.now, self.monotonic)

    def later(self, millis: int) -> Ticks:
        self.now += millis
        self.monotonic += millis / 1000
        return self

    def next(self, confirmed: int = 0, settled: int = 0, lookahead: int = 0, next_due: int | None = None) -> Offset:
        feedback = Feedback(confirmed, settled, lookahead, next_due)
        self.last = self.clock.next(self.last, self.at, feedback, FakeIndex(due_in(self.rows), self.version))
        return self.last

    def is_time(self, next_due: int | None = None, has_nothing_to_do: bool = False) -> bool:
        """Whether there is reason for a batch although no message has come in."""
        feedback = Feedback(next_due=next_due)
        is_asked = self.clock.is_asked(self.last, self.at, feedback, lambda: has_nothing_to_do)
        return is_asked or self.clock.has_due(self.last, self.now, feedback)


@settings(max_examples=examples(150), deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.integers(-20_000, 100_000),  # how far the wall clock moves: it may be set back
            st.integers(0, 6_000),
            st.one_of(st.none(), st.integers(1, 1_000)),
            st.integers(0, 3),
        ),
        min_size=1,
        max_size=30,
    ),
    rows=st.dictionaries(st.integers(0, 1_000), st.integers(1, 80_000), max_size=40),
    restarts=st.sets(st.integers(0, 30)),
    time_step=st.sampled_from([1_000, 20_000, 300_000]),
)
def test_what_a_shard_relies_on_holds_whatever_the_time_does(
    steps: list[tuple[int, int, int | None, int]], rows: dict[int, int], restarts: set[int], time_step: int
) -> None:
    """cutoff < near_until <= load_horizon; horizons move at the end of a seal epoch only, and marks are in order.

    Nothing goes back but, where the clock has been set back, the cutoff and what is near.
    """
    ticks = Ticks(
        rows={START // SLOT_MILLIS + slot: n for slot, n in rows.items()},
        max_segment_millis=time_step,
    )
    for i, (wall, monotonic, lookahead, lag) in enumerate(steps):
        if i in restarts:
            ticks.clock = Clock(replace(SETTINGS, run_id=f"run{i}", max_segment_millis=time_step))
        ticks.now += wall
        ticks.monotonic += monotonic / 1000
        last = ticks.last
        new = ticks.next(max(0, last.tick - lag), last.cutoff, lookahead or 0)
        assert new.cutoff <= ticks.now + max(1_000, lookahead or 0) + SLOT_MILLIS, (
            "nothing is handed out beyond the lookahead"
        )
        assert new.cutoff < new.near_until <= new.load_horizon
        assert new.tick == last.tick + 1
        assert new.seal_epoch - last.seal_epoch in (0, 1)
        monotone = ["load_horizon", "seal_epoch", "confirmed", "durable_through", "index_version", "lane_set"]
        for name in monotone if new.lane_set > last.lane_set else [*monotone, "cutoff", "near_until"]:
            assert getattr(new, name) >= getattr(last, name), name
        if new.seal_epoch == last.seal_epoch:
            assert (new.near_until, new.load_horizon) == (last.near_until, last.load_horizon)
            assert (new.marks, new.durable_through, new.index_version) == (
                last.marks,
                last.durable_through,
                last.index_version,
            )
        assert [mark[0] for mark in new.marks] == list(range(new.durable_through + 1, new.seal_epoch + 1))
        assert new.run_id != last.run_id or i not in restarts


def test_an_offset_comes_back_from_the_log_as_it_was() -> None:
    offset = Offset(
        tick=3,
        marks=[[1, 2, 3]],
        positions={"b": "1:2:-1", "a": "3:4:-1"},
        destinations={"z": 4, "y": 2},
        barriers=[[2, {"a": "1:1:-1"}]],
        lookup_versions=[4, 5],
    )
    text = json.dumps(offset.to_json())
    assert Offset.from_json(json.loads(text)) == offset
    assert json.dumps(Offset.from_json(json.loads(text)).to_json()) == text


def test_the_text_of_an_offset_does_not_depend_on_the_order_of_its_topics() -> None:
    one, other = Offset(positions={"a": "1", "b": "2"}), Offset(positions={"b": "2", "a": "1"})
    assert json.dumps(one.to_json()) == json.dumps(other.to_json())


def test_an_older_offset_lacks_what_was_added_since() -> None:
    assert Offset.from_json({"tick": 4, "cutoff": 9}) == Offset(tick=4, cutoff=9)


def test_an_offset_has_in_the_log_the_names_that_checkpoints_have() -> None:
    stored = {"turn": 7, "run": "r", "booked": 5, "passed": 3, "back": [["t", "a"]]}
    offset = Offset(seal_epoch=7, run_id="r", durable_through=5, ingested_through=3, reinstated=[["t", "a"]])
    assert Offset.from_json(stored) == offset
    assert {name: offset.to_json()[name] for name in stored} == stored
    assert offset.to_json().keys() == Offset.from_json(offset.to_json()).to_json().keys()
    assert list(offset.to_json())[:10] == [
        *("tick", "now", "cutoff", "turn", "load_horizon", "near_until", "run", "confirmed", "booked", "marks")
    ]


def test_a_tick_has_what_the_offset_says() -> None:
    numbers = {f.name: i for i, f in enumerate(fields(Offset), 1) if f.type == "int"}
    offset = Offset(**numbers, run_id="run", destinations={"b": 2, "a": 1})  # type: ignore[arg-type]
    tick = offset.to_tick()
    for field in fields(Tick):
        if field.name != "sending":
            assert getattr(tick, field.name) == getattr(offset, field.name), field.name
    assert json.loads(tick.sending) == {
        "lanes": offset.lanes,
        "batch_millis": offset.batch_millis,
        "lane_set": offset.lane_set,
        "partitions": {"a": 1, "b": 2},
        "routes": {},
    }


def test_the_first_tick_of_a_run_ends_a_seal_epoch() -> None:
    ticks = Ticks(Offset(tick=8, seal_epoch=4, run_id="the run before"))
    assert ticks.is_time()
    assert (ticks.next().seal_epoch, ticks.last.run_id) == (5, "run")
    assert ticks.next().seal_epoch == 5


def test_the_cutoff_is_the_end_of_the_last_whole_slot_that_the_lookahead_reaches() -> None:
    ticks = Ticks()
    assert ticks.next().cutoff == START + 1_000 - 1
    assert ticks.later(SLOT_MILLIS - 1).next().cutoff == START + 1_000 - 1
    assert ticks.later(1).next().cutoff == START + 1_000 + SLOT_MILLIS - 1
    # A shorter lookahead never takes back what was handed out.
    assert ticks.next(lookahead=200).cutoff == START + 1_000 + SLOT_MILLIS - 1


def test_a_seal_epoch_ends_each_seal_interval() -> None:
    ticks = Ticks()
    first = ticks.next().seal_epoch
    assert ticks.later(4_999).next().seal_epoch == first
    assert ticks.later(1).next().seal_epoch == first + 1
    assert ticks.later(5_000).is_time()


def test_a_seal_epoch_with_nothing_to_do_ends_each_minute() -> None:
    ticks = Ticks()
    ticks.next()

    def seals(seconds: int, has_nothing_to_do: bool) -> list[float]:
        """The seconds at which a batch is worth it; each of them has one."""
        found = []
        for _ in range(seconds):
            ticks.later(1_000)
            if ticks.is_time(ticks.now + 600_000, has_nothing_to_do):
                ticks.next()
                found.append(ticks.monotonic)
        return found

    assert seals(20, has_nothing_to_do=False) == [5, 10, 15, 20]
    assert seals(120, has_nothing_to_do=True) == [80, 140]
    assert seals(10, has_nothing_to_do=False) == [145, 150], "it is looked at each seal interval"


def test_a_seal_epoch_ends_before_the_cutoff_reaches_what_is_sealed() -> None:
    """After a wall clock that jumps ahead nothing that is due is left in a bucket."""
    ticks = Ticks(rows={START // SLOT_MILLIS + 600: 5})
    seal_epoch = ticks.next().seal_epoch
    ticks.now += 3_600_000
    offset = ticks.next()
    assert offset.seal_epoch == seal_epoch + 1
    assert offset.cutoff == ticks.now + 1_000 - 1
    assert offset.load_horizon == ticks.now + SETTINGS.load_ahead_millis


def test_a_clock_that_is_set_back_hands_out_no_further_than_it_looks_ahead() -> None:
    ticks = Ticks()
    before = ticks.next()
    ticks.now += 3_600_000
    ahead = ticks.next()
    ticks.now -= 3_600_000
    assert ticks.is_time(), "at once"
    after = ticks.next()
    assert (after.cutoff, after.near_until) == (before.cutoff, before.near_until)
    assert (after.seal_epoch, after.lane_set) == (ahead.seal_epoch + 1, ahead.lane_set + 1)
    assert after.load_horizon == ahead.load_horizon, "what is in state stays there"
    assert ticks.later(400).next().cutoff == before.cutoff + 400
    assert ticks.last.lane_set == after.lane_set


def test_a_clock_that_is_set_back_a_little_hands_out_nothing_anew() -> None:
    ticks = Ticks(max_lookahead_millis=4_000)
    before = ticks.next()
    ticks.now -= 3_000
    after = ticks.next()
    assert (after.cutoff, after.near_until, after.lane_set) == (before.cutoff, before.near_until, 0)


def test_too_many_rows_are_loaded_seal_by_seal() -> None:
    slot = (START + 2_000) // SLOT_MILLIS
    ticks = Ticks(rows={slot: 60, slot + 1: 60, slot + 2: 60}, max_segment_rows=130)
    offset = ticks.next()
    assert offset.load_horizon == (slot + 2) * SLOT_MILLIS
    assert offset.cutoff < offset.near_until == offset.load_horizon
    # It is behind, and so the next tick ends a seal epoch, at once.
    assert ticks.is_time()
    assert ticks.next().seal_epoch == offset.seal_epoch + 1
    assert ticks.last.load_horizon == START + SETTINGS.load_ahead_millis
    assert not ticks.is_time()


def test_what_is_not_loaded_yet_is_not_handed_out_though_it_is_due() -> None:
    """Too much is due at once: the cutoff stays below the load horizon, and follows it seal by seal."""
    slot = START // SLOT_MILLIS
    ticks = Ticks(rows={slot: 60, slot + 1: 60, slot + 2: 60}, max_segment_rows=70)
    for loaded in (1, 2):
        offset = ticks.next()
        assert offset.load_horizon == offset.near_until == START + loaded * SLOT_MILLIS
        assert offset.cutoff == offset.near_until - 1
    assert ticks.next().cutoff == START + SETTINGS.lookahead_millis - 1


def test_one_slot_is_loaded_whole_however_large() -> None:
    slot = (START + 2_000) // SLOT_MILLIS
    ticks = Ticks(rows={slot: 1_000_000, slot + 1: 1}, max_segment_rows=10)
    assert ticks.next().load_horizon == (slot + 1) * SLOT_MILLIS
    assert ticks.next().load_horizon > (slot + 1) * SLOT_MILLIS


def test_no_segment_spans_more_than_the_time_step() -> None:
    ticks = Ticks(load_ahead_millis=3_600_000, max_segment_millis=300_000)
    horizons = [ticks.next().load_horizon, *(ticks.later(5_000).next().load_horizon for _ in range(13))]
    assert horizons[:3] == [START + 300_000, START + 600_000, START + 900_000]
    assert max(after - before for before, after in pairwise(horizons)) == 300_000
    assert horizons[-1] == ticks.now + 3_600_000, "it has caught up"


def test_what_came_due_while_the_job_stood_still_is_loaded_at_once_however_short_the_time_step() -> None:
    day = 86_400_000
    stopped = Offset(tick=9, seal_epoch=3, run_id="before", load_horizon=START - day, near_until=START - day)
    ticks = Ticks(stopped, load_ahead_millis=60_000, max_segment_millis=1_000)
    offset = ticks.next()
    assert offset.load_horizon == offset.near_until > ticks.now + SETTINGS.seal_interval_millis
    assert offset.cutoff == ticks.now + SETTINGS.lookahead_millis - 1
    assert not ticks.is_time(), "it is not behind"
    ahead = ticks.later(5_000).next().load_horizon - offset.load_horizon
    assert ahead == 5_000, "the horizon keeps ahead of what is near"


def test_a_clock_that_is_set_back_loads_no_step_twice() -> None:
    ticks = Ticks(load_ahead_millis=3_600_000, max_segment_millis=300_000)
    before = ticks.next()
    ticks.now -= 200_000
    assert ticks.next().load_horizon == before.load_horizon + 300_000
    ticks.now -= 86_400_000
    assert ticks.next().load_horizon == before.load_horizon + 300_000


def test_a_batch_is_worth_it_when_something_is_due() -> None:
    due = START + 3_000
    ticks = Ticks()
    ticks.next()
    assert not ticks.is_time(due)
    assert not ticks.later(3_000 - 1_000 + SLOT_MILLIS - 1).is_time(due)
    assert ticks.later(1).is_time(due)
    assert ticks.next().cutoff >= due
    assert not ticks.is_time(due)


def test_what_a_new_run_does_not_know_is_asked_for_slot_by_slot() -> None:
    ticks = Ticks(Offset(tick=9, seal_epoch=3, run_id="before", load_horizon=START + 30_000, near_until=START + 9_000))
    ticks.next()
    assert not ticks.is_time()
    assert ticks.later(SLOT_MILLIS).is_time()


def test_a_seal_epoch_is_durable_when_all_of_it_is_settled() -> None:
    """Settled: what went unsealed was due before the mark's time, and is delivered."""
    ticks = Ticks()
    first = ticks.next()
    assert first.marks == [[1, 1, first.cutoff + 1]]
    second = ticks.later(5_000).next(confirmed=1, settled=first.cutoff)
    assert (second.durable_through, second.marks) == (1, [[2, 2, first.near_until]])
    # Confirmed, but what was near then is not delivered yet.
    third = ticks.later(5_000).next(confirmed=2, settled=first.near_until - 2)
    assert (third.durable_through, [mark[0] for mark in third.marks]) == (1, [2, 3])
    # Delivered, but the tick itself is not confirmed.
    third = ticks.later(5_000).next(confirmed=2, settled=first.near_until - 1)
    assert (third.durable_through, [mark[0] for mark in third.marks]) == (2, [3, 4])


def test_a_mark_that_is_not_settled_holds_back_those_after_it() -> None:
    ticks = Ticks(Offset(tick=9, seal_epoch=3, durable_through=0, marks=[[1, 2, START + 99_000], [2, 3, 0], [3, 4, 0]]))
    offset = ticks.next(confirmed=9, settled=START)
    assert (offset.durable_through, [mark[0] for mark in offset.marks]) == (0, [1, 2, 3, 4])
    offset = ticks.later(5_000).next(confirmed=9, settled=START + 98_999)
    assert (offset.durable_through, [mark[0] for mark in offset.marks]) == (3, [4, 5])


def test_a_driver_that_starts_anew_unconfirms_nothing() -> None:
    assert Ticks(Offset(confirmed=8)).next(confirmed=0).confirmed == 8


def test_batches_that_take_long_come_less_often() -> None:
    assert [tick_seconds(s) for s in (0, 0.2, 0.3)] == [0.3, 0.3, 0.3]
    assert tick_seconds(0.5) == pytest.approx(0.7)
    assert [tick_seconds(s) for s in (0.75, 2.0)] == [1.2, 1.2]


def test_what_waits_in_all_shards_gets_places_once_and_after_all_that_were_given() -> None:
    clock, last = (
        Clock(SETTINGS),
        Offset(tick=7, cutoff=START + 1_000, near_until=START + 60_000, run_id=SETTINGS.run_id),
    )

    def places(tick: int, given: int, now: int = START) -> dict[str, dict[str, Any]]:
        waiting = {"t": {"s": [[3, given], [0, 0]]}}
        feedback = Feedback(waiting=(tick, waiting))
        return clock.next(last, Moment(now, 0.0), feedback, FakeIndex()).places

    assert places(7, given=0) == {"t": {"s": [START + 1_000, [3, 0]]}}
    assert places(7, given=START + 9_000) == {"t": {"s": [START + 9_000, [3, 0]]}}
    assert places(7, given=0, now=START + 5_000) == {"t": {"s": [START + 5_000, [3, 0]]}}
    assert places(6, given=0) == {}  # of an earlier tick: it has been told, or is told again


def test_of_what_waits_each_shard_gets_its_share_of_the_places_of_a_tick() -> None:
    last = Offset(tick=7, near_until=START + 60_000, run_id=SETTINGS.run_id)
    feedback = Feedback(waiting=(7, {"t": {"s": [[3_000, 0], [0, 0], [999, 0], [1, 0]], "few": [[500, 0], [0, 0]]}}))
    clock = Clock(replace(SETTINGS, max_segment_rows=500))
    places = clock.next(last, Moment(START, 0.0), feedback, FakeIndex()).places
    assert {name: counts for name, (_, counts) in places["t"].items()} == {"s": [375, 0, 125, 1], "few": [500, 0]}


def test_what_waits_for_a_slow_recipient_gets_no_places_that_it_would_not_use() -> None:
    last = Offset(tick=7, near_until=START + 60_000, run_id=SETTINGS.run_id)
    waiting = {"t": {"slow": [[3, 0], [0, 0]], "down": [[3, 0], [0, 0]], "well": [[2, 0], [0, 0]]}}
    unwritable = {"t": {"slow": {"since": 1, "open": [], "round": 4, "most": 100}, "down": {"since": 1, "open": []}}}
    clock = Clock(SETTINGS)
    first = clock.next(last, Moment(START, 0.0), Feedback(waiting=(7, waiting), unwritable=unwritable), FakeIndex())
    assert first.places["t"].keys() == {"down", "well"}
    # Also where a new run does not know it yet.
    again = clock.next(first, Moment(START, 0.0), Feedback(waiting=(8, waiting)), FakeIndex())
    assert again.places["t"].keys() == {"down", "well"}
    back = clock.next(again, Moment(START, 0.0), Feedback(waiting=(9, waiting), unwritable={}), FakeIndex())
    assert back.places["t"].keys() == {"slow", "down", "well"}


def test_a_seal_epoch_is_not_durable_while_a_message_of_it_waits_for_a_place() -> None:
    """What waits for a place is due by a tick that is settled, but neither delivered nor sealed.

    It may get its place, and go out, in the very tick that is made while it waits: that tick has to be confirmed, too.
    """
    ticks = Ticks()
    first = ticks.next()
    ticks.later(5_000).next(confirmed=1, settled=first.cutoff)
    settled = first.near_until + 1_000
    waits = ticks.later(5_000).next(confirmed=2, settled=settled, next_due=first.near_until - 1)
    assert (waits.durable_through, [mark[0] for mark in waits.marks]) == (1, [2, 3])
    given = ticks.later(5_000).next(confirmed=2, settled=settled, next_due=first.near_until)
    assert (given.durable_through, [mark[0] for mark in given.marks]) == (1, [2, 3, 4])
    sent = ticks.later(5_000).next(confirmed=waits.tick, settled=settled, next_due=first.near_until)
    assert sent.durable_through >= 2


def test_after_a_standstill_a_seal_epoch_is_not_durable_while_a_message_that_came_overdue_waits_for_a_place() -> None:
    """The cutoff has passed the last `near_until` by then: what came in and is due in between is not sealed either."""
    ticks = Ticks()
    first = ticks.next()
    back = ticks.later(40_000).next(confirmed=1, settled=first.cutoff)
    assert back.cutoff >= first.near_until
    waits = ticks.later(5_000).next(confirmed=back.tick, settled=back.cutoff, next_due=back.cutoff)
    assert waits.durable_through < back.seal_epoch
    given = ticks.later(5_000).next(confirmed=back.tick, settled=back.cutoff, next_due=back.cutoff + 1)
    assert given.durable_through < back.seal_epoch  # it may have got its place in `waits`
    sent = ticks.later(5_000).next(confirmed=waits.tick, settled=waits.cutoff, next_due=waits.cutoff + 1)
    assert sent.durable_through >= back.seal_epoch
