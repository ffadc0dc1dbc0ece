"""A tick's bytes: what is handed out and kept is bounded, in order, and nothing is lost over it."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from streaming.checkpoint.offset import Offset
from tests.support.tracker.messages import TOPIC, messages, resumed, tick_at
from tracker.buckets.large_rows import LargeRows, LargeRule
from tracker.message_state.changes import HELD_DELIVER_AT
from tracker.messages import concat, int64, with_columns
from tracker.packing import payload_sizes
from tracker.schemas import PauseChange
from tracker.shard import Shard
from tracker.store import MemoryStore
from tracker.subscriptions import Subscriptions
from tracker.tick import Effects, Tick, TickInput

DUE = 50_000
BIG = 10_000
MOST = 6 * BIG  # of a tick: five rows with all their columns


def apply(store: MemoryStore, tick: Tick, rows: pa.Table | None = None) -> Effects:
    given = TickInput() if rows is None else TickInput(messages=rows)
    return Shard(store, {TOPIC: ["a"]}, 50_000).apply(tick, given)


def large(entries: range, deliver_at: int = DUE) -> pa.Table:
    return messages([(1, i, deliver_at) for i in entries], payload=b"x" * BIG)


def near(number: int, cutoff: int, **others: Any) -> Tick:
    large = LargeRows(LargeRule(BIG)).to_json()
    return tick_at(number, cutoff, load_horizon=90_000, near_until=80_000, max_bytes=MOST, large=large, **others)


def rows_of(effects: Effects, tick: int, is_planned: bool) -> pa.Table:
    return concat([r.rows for r in effects.releases if r.tick == tick and bool(r.kind) == is_planned])


def test_what_is_due_at_one_instant_is_handed_out_over_several_ticks_in_order() -> None:
    store = MemoryStore()
    apply(store, near(1, 1_000))
    apply(store, near(2, 1_001), large(range(8)))
    apply(store, near(3, 1_002), concat([large(range(8, 20)), messages([(1, 99, DUE)])]))
    came: list[int] = []
    for number in range(4, 20):
        effects = apply(store, near(number, DUE + number), messages([(2, number, DUE)]))
        planned = rows_of(effects, number, is_planned=True)
        assert payload_sizes(planned).sum() <= MOST
        came += int64(planned, "entry_id").tolist()
        if number == 4:
            assert came[-1:] == [99], "small messages do not wait behind them"
            came.pop()
        on_short_notice = rows_of(effects, number, is_planned=False)
        assert int64(on_short_notice, "entry_id").tolist() == [number], "it does not wait behind them"
        assert (effects.status["next_due"] <= DUE) == (len(came) < 20), "the next tick comes at once"
        if len(came) == 20:
            break
    assert came == list(range(20))
    assert number > 6


def test_what_comes_in_overdue_is_handed_out_over_several_ticks() -> None:
    store = MemoryStore()
    apply(store, near(1, DUE))
    effects = apply(store, near(2, DUE + 1), large(range(12), DUE - 100))
    came = int64(rows_of(effects, 2, is_planned=False), "entry_id").tolist()
    assert 0 < len(came) < 12
    for number in (3, 4, 5):
        effects = apply(store, near(number, DUE + number))
        came += int64(rows_of(effects, number, is_planned=True), "entry_id").tolist()
    assert came == list(range(12))


@pytest.mark.parametrize(("max_bytes", "sealed"), [(MOST, 7), (0, 0)])
def test_a_bucket_with_many_bytes_is_sealed_before_its_epoch_ends(max_bytes: int, sealed: int) -> None:
    store = MemoryStore()
    tick = {"seal_epoch": 1, "load_horizon": 2_000, "near_until": 1_500, "max_bytes": max_bytes}
    apply(store, tick_at(1, 1_000, **tick))
    apply(store, tick_at(2, 1_001, **tick), large(range(4)))
    effects = apply(store, tick_at(3, 1_002, **tick), large(range(4, 7)))
    assert effects.bucket.num_rows == sealed


def test_a_tick_of_an_earlier_program_is_replayed_as_it_was() -> None:
    before = {name: value for name, value in Offset(tick=3, run_id="r").to_json().items() if name != "max_bytes"}
    assert Offset.from_json(before).to_tick().max_bytes == 0
    store = MemoryStore()
    apply(store, near(1, 1_000))
    apply(store, near(2, 1_001), large(range(40)))
    effects = apply(store, tick_at(3, DUE, load_horizon=90_000, near_until=80_000))
    assert rows_of(effects, 3, is_planned=True).num_rows == 40


def test_an_offset_of_an_earlier_program_keeps_its_text() -> None:
    assert not {"large", "max_bytes"} & Offset(tick=3, run_id="r").to_json().keys()
    newer = Offset(tick=3, max_bytes=5, large=LargeRows(LargeRule(7), (1, 2, 3)).to_json())
    assert Offset.from_json(newer.to_json()) == newer
    assert newer.large_rows == LargeRows(LargeRule(7), (1, 2, 3))


def test_large_messages_that_were_parked_keep_their_order_while_others_wait_for_room() -> None:
    """They go out at once, as a round is bounded: in turn with the others they would come by their positions."""
    rule = LargeRule(BIG, is_whole=True, in_order=(TOPIC,))
    subscriptions = Subscriptions({TOPIC: ["a"]}, in_order={TOPIC: 1})
    store, stored = MemoryStore(), []

    def step(number: int, cutoff: int, after: tuple[int, int, int] | None = None, **changes: Any) -> Effects:
        large = LargeRows(rule, after).to_json()
        times = {"load_horizon": 90_000, "near_until": 80_000}
        tick = tick_at(number, cutoff, now=cutoff, max_bytes=MOST, large=large, **times)
        effects = Shard(store, subscriptions, 50_000).apply(tick, TickInput(**changes))
        stored.append(effects.bucket)
        return effects

    dues = {9: 1_000, 8: 2_000, 7: 3_000}
    rows = concat([large(range(entry, entry + 1), due) for entry, due in dues.items()])
    rows = with_columns(rows, key=pa.array(["k"] * 3))
    step(1, 100, messages=rows, request_ids={"p": 1}, pause_changes=[PauseChange("p", TOPIC, 1, True)])
    for number, cutoff in enumerate((1_500, 2_500, 3_500), 2):
        assert not step(number, cutoff).releases
    resume = [PauseChange("r", TOPIC, 1, False)]
    given = {"request_ids": {"r": 1}, "pause_changes": resume, **resumed(concat(stored), "a")}
    effects = step(5, 60_000, after=(50_000, 1, 1), **given)
    assert [int64(release.rows, "entry_id").tolist() for release in effects.releases] == [[9, 8, 7]]
    moved = effects.bucket.filter(pc.less(effects.bucket["deliver_at"], HELD_DELIVER_AT))
    assert set(moved["deliver_at"].to_pylist()) == {49_999}, "the index has them before what is loaded next"
