"""Shards that shape what comes due: never more than the rate, in order, exactly once, through starts and commands."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import settings as effort
from hypothesis import strategies as st

from conf.shaping import Rate, Window
from streaming.checkpoint.offset import Offset
from streaming.release.feedback import Feedback
from streaming.sinks.batch_sink import _waiting
from streaming.source.clock import _places
from tests.support.fuzzing.examples import examples
from tests.support.tracker.messages import TOPIC, command, commands, messages
from tests.unit.tracker.shaping.test_bucket import most_within
from tracker.backoff import Backoff
from tracker.buckets.delayed_delivery_tracker import DelayedDeliveryTracker
from tracker.commands.message_state.rebuilt import Rebuilt
from tracker.commands.schema import KNOWN, RESCHEDULE, PauseChange
from tracker.messages import concat, int64, where, with_columns
from tracker.shaping.rule import rule_of
from tracker.shaping.spans import SHAPED, recorded
from tracker.shard import Shard
from tracker.sharding import Place, shards_of
from tracker.store import Key, MemoryStore
from tracker.subscriptions import Subscriptions
from tracker.tick import Effects, Tick, TickInput
from tracker.wire.delaylake_pb2 import Result

START = 1_770_000_000_000
LOOKAHEAD, NEAR, LOAD = 1_000, 3_000, 6_000

Row = tuple[int, int, str, int, int | None]  # tick, entry, subscription, time, shaped from


class Service:
    """Shards with two subscriptions, `s` with the rule and `t` without, their clock and their buckets."""

    def __init__(self, rule: str | None, shards: int = 2, places_at_most: int = 1_000_000) -> None:
        self.places_at_most = places_at_most
        self.subscriptions = Subscriptions({TOPIC: ["s", "t"]}, shaping={TOPIC: {0: rule}} if rule else {})
        self.stores = [MemoryStore() for _ in range(shards)]
        self.places = [Place(i, shards) for i in range(shards)]
        self.now, self.tick, self.seal_epoch, self.load, self.near = START, 0, 0, START, START
        self.run = self.cutoff = 0
        self.feedback = Feedback()
        self.sealed: list[pa.Table] = []
        self.moves: list[pa.Table] = []
        self.out: list[Row] = []
        self.again: list[Row] = []

    def step(self, millis: int, rows: pa.Table | None = None, **changes: Any) -> list[Effects]:
        self.now += millis
        self.tick += 1
        last = Offset(tick=self.tick - 1, cutoff=self.cutoff)
        ends = self.tick % 3 == 0 or self.now + LOOKAHEAD >= self.near
        load = max(self.load, self.now + LOAD) if ends else self.load
        self.near = max(self.near, self.now + NEAR) if ends else self.near
        self.seal_epoch += ends
        tick = Tick(
            tick=self.tick,
            cutoff=self.now + LOOKAHEAD,
            seal_epoch=self.seal_epoch,
            load_horizon=load,
            near_until=self.near,
            run_id=f"run{self.run}",
            confirmed=self.tick - 2,
            durable_through=0,
            now=self.now,
            ingested_through=self.tick,
            places=_places(last, self.now, self.feedback, self.places_at_most),
            sending=json.dumps({SHAPED: recorded(self.now, self.subscriptions.shaping)}),
        )
        self.cutoff = tick.cutoff
        rows = messages([]) if rows is None else rows
        due = [int64(part, "deliver_at") for part in self.sealed]
        segment = concat(where(r, (d >= self.load) & (d < load)) for r, d in zip(self.sealed, due, strict=True))
        self.load = load
        payload_rows = changes.get("payload_rows")
        found = []
        for place, store in zip(self.places, self.stores, strict=True):

            def own(table: pa.Table, place: Place = place) -> pa.Table:
                return where(table, place.has(table)) if table.num_rows else table

            if "payload_rows" in changes:
                changes["payload_rows"] = own(payload_rows)
            tick_input = TickInput(messages=own(rows), segment=own(segment), **changes)
            effects = Shard(store, self.subscriptions, 1_000_000, place=place).apply(tick, tick_input)
            self._note(effects)
            found.append(effects)
        statuses = [{"waiting": effects.waiting} for effects in found]
        self.feedback = Feedback(waiting=(self.tick, _waiting(statuses)))
        self.sealed += [effects.bucket for effects in found if effects.bucket.num_rows]
        self.moves += [effects.cancels for effects in found if effects.cancels.num_rows]
        return found

    def _note(self, effects: Effects) -> None:
        for release in effects.releases:
            for row in release.rows.to_pylist():
                for number, name in enumerate("st"):
                    if row["subscription_mask"] >> number & 1:
                        at = max(row["deliver_at"], self.now)
                        one = (release.tick, row["entry_id"], name, at, row["shaped_from"])
                        (self.out if release.tick == self.tick else self.again).append(one)

    def run_until(self, time: int, step: int = 400) -> None:
        while self.now < time:
            self.step(step)

    def run_until_some_wait(self, step: int) -> None:
        """Runs until more is due than there are places for."""
        while not any(effects.waiting for effects in self.step(step)):
            pass

    def run_out(self, n: int) -> None:
        """Runs until n messages have gone to `s`, and some time more."""
        end = self.now + 600_000
        while len(self.of("s")) < n and self.now < end:
            self.step(900)
        self.run_until(self.now + 3_000, step=900)

    def of(self, name: str) -> list[Row]:
        return [row for row in self.out if row[2] == name]


def rate(messages_per_second: float, burst: int | None = None, per: str = "subscription") -> str:
    rule = rule_of(Rate.model_validate({"messages_per_second": messages_per_second, "burst": burst, "per": per}), ())
    assert rule is not None
    return rule


# START is a Monday, 02:40 UTC.
CLOSED = rule_of(None, [Window.model_validate({"from": "02:41"})])


def many(n: int, due: int, first: int = 0, **columns: object) -> pa.Table:
    return messages([(7, first + i, due) for i in range(n)], **columns)


@pytest.mark.slow
@pytest.mark.parametrize("places_at_most", [1_000_000, 100])
def test_what_is_due_at_once_goes_out_at_the_rate_and_says_when_it_was_due(places_at_most: int) -> None:
    service = Service(rate(50, burst=10), places_at_most=places_at_most)
    due = START + 5_000
    service.step(100, many(640, due))
    service.run_until(START + 40_000)
    shaped = service.of("s")
    assert sorted(entry for _, entry, *_ in shaped) == list(range(640))
    assert most_within([row[3] for row in shaped], 1_000) <= 60
    assert most_within([row[3] for row in shaped], 10_000) <= 510
    assert all(shaped_from == (None if at == due else due) for *_, at, shaped_from in shaped)
    assert sum(row[4] is None for row in shaped) == 10
    # Of a shard, those with lower ids first; the whole rate is used, although one shard has more of them.
    for place in service.places:
        ids = pa.table({"ledger_id": [7] * 640, "entry_id": list(range(640))})
        own = {i for i in range(640) if shards_of(ids, 2)[i] == place.number}
        in_order = [entry for _, entry, _, at, _ in sorted(shaped, key=lambda row: row[3]) if entry in own]
        assert in_order == sorted(own)
    assert max(row[3] for row in shaped) == pytest.approx(due + 1000 * 630 / 50, abs=700)
    # The other subscription has everything at its time.
    assert [row[3:] for row in service.of("t")] == [(due, None)] * 640


@pytest.mark.parametrize("rule", [rate(0.1, burst=1), CLOSED])
def test_a_dead_letter_takes_no_place_and_does_not_wait(rule: str) -> None:
    service = Service(rule, shards=1)
    backoffs = {TOPIC: {0: Backoff(attempts=2)}}
    service.subscriptions = replace(service.subscriptions, backoffs=backoffs)
    sent_back = [("retryOf", "7:9"), ("retrySubscription", "s"), ("retryAfter", "5000")]
    service.step(100, many(4, START, 0, attempt=3, properties=sent_back))
    assert [(row[1], row[4]) for row in service.of("s")] == [(n, None) for n in range(4)]
    service.step(100, many(2, START, 4, attempt=2, properties=sent_back))
    service.run_until(START + 120_000)
    first, second = (row[3] - START for row in service.of("s")[4:])
    # The retries take the first two places.
    assert (first, second) == ((60_000, 60_000) if rule == CLOSED else (5_200, 15_200))


def test_a_queue_that_is_longer_than_the_calendar_waits() -> None:
    service = Service(rate(1e-5, burst=1), shards=1)
    service.step(100, many(3_000, START))
    service.step(100)
    times = [time for moves in service.moves for time in moves["deliver_at"].to_pylist()]
    assert len(service.of("s")) == 1
    assert len(times) == 2_999


@pytest.mark.slow
def test_a_tick_moves_no_more_than_there_are_places_and_the_rest_waits() -> None:
    service = Service(rate(50, burst=10), places_at_most=100)
    service.step(100, many(640, START + 5_000))
    moved = []
    while service.now < START + 15_000:
        effects = service.step(400)
        moved.append(sum(one.cancels.num_rows for one in effects))
    assert sum(moved) > 500
    # Rounding up is for each shard; what is within the rate moves within a tick, too.
    assert max(moved) <= 100 + len(service.places) + 10 + 50 * 0.4


@pytest.mark.slow
@pytest.mark.parametrize("rule", [rate(50, 10), rate(25, 5, "key"), CLOSED])
def test_a_shard_that_gives_places_alone_moves_no_more_than_so_many_in_a_tick(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outs = []
    for most in (1_000_000, 100):
        monkeypatch.setattr("tracker.shaping.target.MOST_PLACES", most)
        service = Service(rule, shards=1)
        keys = [{"key": f"k{i % 2}"} for i in range(640)]
        service.step(100, concat(many(1, START + 5_000, i, **keys[i]) for i in range(640)))
        moved = []
        while service.now < START + 90_000:
            moved.append(sum(one.cancels.num_rows for one in service.step(400)))
        assert sum(moved) >= 600
        assert (max(moved) <= 100) == (most == 100)
        outs.append(sorted(row[1:] for row in service.of("s")))
    assert len(outs[0]) == 640
    assert outs[0] == outs[1]


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_what_comes_at_short_notice_goes_behind_what_has_waited_for_a_place(
    shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracker.shaping.target.MOST_PLACES", 100)
    service = Service(rate(50, burst=2), shards, places_at_most=100)
    service.step(100, many(640, START + 5_000))
    service.run_until(START + 5_000)
    service.step(400, many(200, service.now, first=640))
    service.run_until(START + 30_000)
    at = {row[1]: row[3] for row in service.of("s")}
    assert len(at) == 840
    ids = pa.table({"ledger_id": [7] * 840, "entry_id": list(at)})
    for of_shard in (shards_of(ids, shards) == i for i in range(shards)):
        own = [entry for entry, is_own in zip(at, of_shard, strict=True) if is_own]
        assert min(at[entry] for entry in own if entry >= 640) > max(at[entry] for entry in own if entry < 640)


def test_what_is_within_the_rate_goes_out_at_its_time_as_if_there_were_none() -> None:
    service, plain = Service(rate(100)), Service(None)
    rows = messages([(7, i, START + 5_000 + 50 * i) for i in range(200)])
    for one in (service, plain):
        one.step(100, rows)
        one.run_until(START + 20_000)
    assert service.out == plain.out
    assert all(store.get("shaping", (0, 0)) is None for store in plain.stores)


@effort(max_examples=examples(40))
@given(
    st.sampled_from([rate(8, 1), rate(5, 1), rate(10, 3), rate(40), rate(5, 2, "key")]),
    st.integers(1, 3),
    st.sampled_from([1_000_000, 20]),
    st.lists(
        st.tuples(st.integers(-2_000, 9_000), st.integers(1, 15), st.booleans(), st.sampled_from([200, 900, 4_000])),
        min_size=1,
        max_size=6,
    ),
)
@example(rate(8, 1), 2, 1_000_000, [(455, 15, False, 900), (79, 15, False, 4_000)])
@example(rate(5, 1), 2, 1_000_000, [(235, 14, False, 900), (6_725, 9, True, 900)])
@example(rate(5, 1), 2, 1_000_000, [(664, 10, False, 4_000), (453, 11, True, 900), (6_776, 8, False, 4_000)])
def test_never_more_than_the_rate_each_once_and_never_before_its_time(
    rule: str, shards: int, places_at_most: int, blocks: list[tuple[int, int, bool, int]]
) -> None:
    service = Service(rule, shards, places_at_most)
    rule_json = json.loads(rule)
    due: dict[int, int] = {}
    for i, (delay, n, starts, millis) in enumerate(blocks):
        first = 100 * i
        time = service.now + millis + delay
        due |= dict.fromkeys(range(first, first + n), time)
        rows = concat(many(1, time, first + j, key=f"k{j % 2}" if rule_json["per_key"] else None) for j in range(n))
        if starts:  # after all that was handed out has arrived
            service.run += 1
            service.feedback = Feedback()
            millis += 3_000
        service.step(millis, rows)
        service.step(400)
    service.run_out(len(due))
    shaped = service.of("s")
    assert sorted(entry for _, entry, *_ in shaped) == sorted(due)
    assert all(at >= due[entry] for _, entry, _, at, _ in shaped)
    assert all(shaped_from is None or shaped_from == due[entry] for _, entry, _, at, shaped_from in shaped)
    keys = {entry: entry % 2 if rule_json["per_key"] else 0 for entry in due}
    for key in (0, 1):
        of_key = [float(at) for _, entry, _, at, _ in shaped if keys[entry] == key]
        assert most_within(of_key, 1_000) <= rule_json["burst"] + rule_json["rate"]
    assert sorted(entry for _, entry, *_ in service.of("t")) == sorted(due)


@pytest.mark.slow
def test_a_shard_that_is_replayed_or_taken_up_again_gives_the_same_places() -> None:
    runs = []
    for _ in range(2):
        service = Service(rate(20))
        service.step(100, many(300, START + 4_000))
        service.run_until(START + 30_000)
        runs.append(service.out)
    assert runs[0] == runs[1]


def test_after_a_stop_everything_is_put_off_and_what_is_in_flight_comes_first() -> None:
    service = Service(rate(50, burst=5))
    service.step(100, many(500, START + 2_000))
    service.run_until(START + 5_000)
    known = {row[1] for row in service.of("s")}
    last = max(row[3] for row in service.of("s"))
    service.run += 1
    service.feedback = Feedback()
    service.step(20_000)
    assert service.again
    assert {row[1] for row in service.again} <= known
    service.run_until(START + 40_000, step=950)
    later = [row for row in service.of("s") if row[1] not in known]
    assert sorted(known | {row[1] for row in later}) == list(range(500))
    assert len(later) == 500 - len(known)
    assert min(row[3] for row in later) - last > 19_000
    assert most_within([row[3] for row in later], 1_000) <= 55
    for place in service.places:
        ids = pa.table({"ledger_id": [7] * 500, "entry_id": list(range(500))})
        own = shards_of(ids, 2) == place.number
        in_order = [row[1] for row in sorted(later, key=lambda row: row[3]) if own[row[1]]]
        assert in_order == sorted(in_order)


@pytest.mark.slow
def test_nothing_goes_out_while_the_windows_are_closed() -> None:
    # START is a Monday, 02:40 UTC.
    window = Window.model_validate({"from": "02:41", "to": "02:42", "days": ["mon", "tue"]})
    rule = rule_of(Rate(messages_per_second=10), [window])
    service = Service(rule, shards=1)
    service.step(100, many(1_000, START + 5_000))
    opening = START - START % 60_000 + 60_000
    service.run_until(opening + 70_000, step=950)
    day = 24 * 3600 * 1000
    of_day = [row[3] for row in service.of("s")]
    assert all(opening <= at < opening + 60_000 for at in of_day)
    assert most_within([float(at) for at in of_day], 1_000) <= 20
    assert 500 < len(of_day) <= 610
    service.step(day - 90_000)
    service.run_until(opening + day + 70_000, step=950)
    rest = [row[3] for row in service.of("s")][len(of_day) :]
    assert all(opening + day <= at < opening + day + 60_000 for at in rest)
    assert len(of_day) + len(rest) == 1_000


def test_a_shaped_message_is_cancelled_or_moved_as_any_other() -> None:
    service = Service(rate(1, burst=2), shards=1)
    due = START + 3_000
    service.step(100, many(10, due))
    service.run_until(START + 6_000)
    waiting = [entry for entry in range(10) if entry not in {row[1] for row in service.of("s")}]
    cancelled, moved = waiting[-1], waiting[-2]
    rows = commands(
        [command("c", 7, cancelled, (0,)), command("m", 7, moved, (0,), cancel_at=START + 60_000, kind=RESCHEDULE)]
    )
    known = many(10, due).select(KNOWN.names).filter(pa.array([i in (cancelled, moved) for i in range(10)]))
    payload = concat(part.filter(pa.array(np.isin(int64(part, "entry_id"), [moved]))) for part in service.sealed)
    effects = service.step(
        400, commands=rows, request_ids={"c": 1, "m": 1}, known_messages=known.cast(KNOWN), payload_rows=payload
    )
    assert effects[0].outcomes["result"].to_pylist() == [int(Result.APPLIED)] * 2
    service.run_until(START + 62_000, step=900)
    shaped = {row[1]: row for row in service.of("s")}
    assert sorted(shaped) == [i for i in range(10) if i != cancelled]
    # Moved by a command it goes at that time: what shaping had done to it does not count any more.
    assert shaped[moved][3:] == (START + 60_000, None)


@pytest.mark.slow
@pytest.mark.parametrize("phase", range(3))
def test_what_a_pause_held_back_is_shaped_when_it_goes_on(phase: int) -> None:
    service = Service(rate(20, burst=2))
    for _ in range(phase):  # so that the seal epoch ends with another one of the ticks that follow
        service.step(1)
    # Another one that is cancelled for long: moves are looked at while there is anything of the kind.
    other = messages([(8, 0, START + 10**8)])
    service.step(1, other)
    rows, known = commands([command("c", 8, 0, (1,))]), other.select(KNOWN.names).cast(KNOWN)
    service.step(1, commands=rows, request_ids={"c": 1}, known_messages=known)
    pause = PauseChange("p", TOPIC, 1, is_paused=True)
    service.step(100, many(200, START + 3_000), pause_changes=[pause], request_ids={"p": 1})
    service.run_until(START + 8_000)
    assert not service.of("s")
    resume = PauseChange("r", TOPIC, 1, is_paused=False)
    held = concat(where(part, int64(part, "deliver_at") > START + 10**12) for part in service.sealed)
    service.step(400, pause_changes=[resume], request_ids={"r": 1}, payload_rows=held)
    service.run_until(START + 40_000)
    shaped = service.of("s")
    assert len({row[1] for row in shaped}) == len(shaped) == 200
    assert most_within([row[3] for row in shaped], 1_000) <= 22


def test_what_is_delivered_now_by_commands_is_shaped() -> None:
    service = Service(rate(20, burst=2), shards=1)
    waiting = many(100, START + 60_000)
    service.step(100, waiting)
    service.run_until(START + 5_000)
    ids = {f"n{entry}": 1 for entry in range(100)}
    rows = commands(
        [command(id_, 7, entry, (0,), cancel_at=service.now, kind=RESCHEDULE) for entry, id_ in enumerate(ids)]
    )
    known, payload = waiting.select(KNOWN.names).cast(KNOWN), concat(service.sealed)
    service.step(400, commands=rows, request_ids=ids, known_messages=known, payload_rows=payload)
    service.run_until(START + 30_000)
    shaped = service.of("s")
    assert len({row[1] for row in shaped}) == len(shaped) == 100
    assert most_within([row[3] for row in shaped], 1_000) <= 22
    assert not service.of("t")  # it was not named, and waits


def test_near_places_are_sealed_at_once_with_the_moves_to_them() -> None:
    service = Service(rate(10, burst=1), shards=1)
    effects = service.step(100, many(30, START + 50))
    bucket = effects[0].bucket
    shaped = bucket.filter(bucket["shaped_from"].is_valid())
    assert shaped.num_rows == 30 - len(service.of("s"))
    moves = effects[0].cancels
    assert set(shaped["sequence"].to_pylist()) == set(moves["sequence"].to_pylist())
    assert moves["operation"].to_pylist() == ["MOVE"] * shaped.num_rows


def test_after_a_rebuild_what_comes_due_goes_behind_what_has_its_place() -> None:
    service = Service(rate(10, burst=1))
    last = START + 30_000
    rebuilt = Rebuilt(released=START, shaped_until={TOPIC: {"s": last}})
    service.step(100, many(5, START + 2_000), rebuilt=rebuilt)
    service.run_until(START + 40_000, step=900)
    assert min(row[3] for row in service.of("s")) > last
    assert len(service.of("s")) == 5


def test_rows_of_an_earlier_version_are_shaped_too() -> None:
    service = Service(rate(10, burst=1), shards=1)
    rows = with_columns(many(20, START + 3_000), key=pa.nulls(20, pa.string())).drop_columns(["shaped_from"])
    service.step(100, concat([rows]))
    service.run_until(START + 10_000)
    assert len(service.of("s")) == 20


@pytest.mark.parametrize("shards", [1, 2])
def test_a_lower_rate_holds_for_what_has_a_place_too_and_a_higher_one_does_not(shards: int) -> None:
    service = Service(rate(50, burst=50), shards)
    service.step(100, many(600, START + 2_000))
    service.run_until(START + 4_000)
    n_before = len(service.of("s"))
    assert 100 < n_before < 300
    for rule in (rate(20, burst=5), rate(100, burst=5)):
        service.subscriptions = Subscriptions({TOPIC: ["s", "t"]}, shaping={TOPIC: {0: rule}})
        service.run += 1
        service.feedback = Feedback()
        service.step(3_000)
        since = service.now
        if rule == rate(20, burst=5):
            service.run_until(START + 15_000)
            # What was handed out before keeps its time.
            lower = [float(row[3]) for row in service.of("s") if since + 3_000 < row[3]]
            assert most_within(lower, 1_000) <= 25
            assert len(lower) > 50
    service.run_out(600)
    assert sorted(row[1] for row in service.of("s")) == list(range(600))
    after = [float(row[3]) for row in service.of("s") if since + 3_000 < row[3]]
    assert most_within(after, 1_000) <= 25
    assert {row[4] for row in service.of("s")} <= {None, START + 2_000}


def test_what_is_late_for_one_subscription_puts_off_no_other() -> None:
    service = Service(rate(20, burst=1), shards=1)
    shaping = {TOPIC: {0: rate(20, burst=1), 1: rate(500, burst=1)}}
    service.subscriptions = Subscriptions({TOPIC: ["s", "t"]}, shaping=shaping)
    service.step(100, many(100, START + 2_000))
    service.run_until(START + 3_800)
    assert len(service.of("t")) == 100
    service.step(3_000)  # longer than the lookahead: what is due for `s` meanwhile is late
    service.run_until(START + 20_000)
    assert len(service.of("s")) == 100
    after = service.now
    service.step(100, many(1, after + 2_000, first=100))
    service.run_until(after + 5_000)
    assert [row[3] for row in service.of("t")][100:] == [after + 2_000]


def test_a_long_queue_keeps_no_other_from_its_places() -> None:
    service = Service(rate(50, burst=10), places_at_most=100)
    shaping = {TOPIC: {0: rate(50, burst=10), 1: rate(1_000, burst=100)}}
    service.subscriptions = Subscriptions({TOPIC: ["s", "t"]}, shaping=shaping)
    service.step(100, many(2_000, START + 5_000))
    service.run_until(START + 20_000)
    assert len(service.of("t")) == 2_000
    assert most_within([row[3] for row in service.of("t")], 1_000) <= 1_100
    service.run_until(START + 60_000)
    assert sorted(row[1] for row in service.of("s")) == list(range(2_000))


@pytest.mark.parametrize("shards", [1, 2])
def test_what_waits_goes_out_when_it_is_shaped_no_more(shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracker.shaping.target.MOST_PLACES", 100)
    service = Service(rate(50, burst=10), shards, places_at_most=100)
    service.step(100, many(640, START + 5_000))
    service.run_until(START + 5_000)
    assert sum(n for effects in service.step(100) for n, _ in effects.waiting.get(TOPIC, {}).values())
    service.subscriptions = Subscriptions({TOPIC: ["s", "t"]})
    service.run += 1
    service.step(100)
    service.run_until(START + 20_000)
    assert sorted(row[1] for row in service.of("s")) == list(range(640))


def test_a_tick_touches_only_as_much_of_a_queue_as_gets_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracker.buckets.waiting_rows.PIECE_ROWS", 50)
    service = Service(rate(500, burst=10), places_at_most=100)
    service.step(100, many(4_000, START + 3_000))
    service.run_until_some_wait(100)
    kept: list[str] = []
    real = MemoryStore.put

    def put(store: MemoryStore, table: str, key: Key, value: bytes) -> None:
        kept.append(table)
        real(store, table, key, value)

    monkeypatch.setattr(MemoryStore, "put", put)
    of_ticks = []
    while any(effects.waiting for effects in service.step(100)):
        of_ticks.append(kept.count("waiting"))
        kept.clear()
    assert len(of_ticks) > 20
    assert max(of_ticks) <= len(service.stores)  # the piece that was cut, in each


@pytest.mark.parametrize("shards", [1, 2])
def test_a_pause_of_a_long_queue_puts_nothing_of_it_behind_the_rest(
    shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracker.shaping.target.MOST_PLACES", 20)
    service = Service(rate(50, burst=10), shards, places_at_most=20)
    service.subscriptions = replace(service.subscriptions, in_order={TOPIC: 1})
    service.step(100, concat(messages([(7, i, START + 5_000 + i)], key="k") for i in range(300)))
    service.run_until_some_wait(400)
    for is_paused, request in ((True, "p"), (False, "r")):
        held = concat(where(part, int64(part, "deliver_at") > START + 10**12) for part in service.sealed)
        change = PauseChange(request, TOPIC, 1, is_paused=is_paused)
        payload = {} if is_paused else {"payload_rows": held}
        service.step(400, pause_changes=[change], request_ids={request: 1}, **payload)
        service.step(400)
    service.run_until(START + 40_000)
    out = sorted(service.of("s"), key=lambda row: (row[0], row[3]))
    assert sorted(row[1] for row in out) == list(range(300))
    ids = pa.table({"ledger_id": [7] * 300, "entry_id": list(range(300))})
    for number in range(shards):
        of_shard = [row[1] for row in out if shards_of(ids, shards)[row[1]] == number]
        assert of_shard == sorted(of_shard)


def test_what_waits_is_not_handed_out_before_its_time_where_the_clock_is_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tracker.shaping.target.MOST_PLACES", 50)
    rule = rule_of(None, [Window.model_validate({"from": "01:00"})])  # open now
    service = Service(rule, shards=1)
    service.step(100, many(300, START + 5_000))
    service.run_until_some_wait(400)
    n_before = len(service.of("s"))
    service.now -= 60_000
    service.near = 0
    service.step(400)
    service.run_until(START - 10_000)
    assert len(service.of("s")) == n_before < 300
    service.run_until(START + 10_000)
    assert sorted(row[1] for row in service.of("s")) == list(range(300))


def test_rows_that_an_earlier_version_let_wait_get_the_places_that_its_offset_has() -> None:
    service = Service(rate(50, burst=2))
    service.step(100, many(300, START + 3_000))
    service.run_until_some_wait(400)
    for store in service.stores:  # where they were in their time slots
        tracker = DelayedDeliveryTracker(store)
        rows = tracker.take_waiting(lambda _: None, service.cutoff)
        assert rows.num_rows
        tracker._slots.add(rows)
        tracker.save()
    service.step(400, many(300, service.now, first=300))
    service.run_until(START + 60_000, 900)
    at = [float(row[3]) for row in service.of("s")]
    assert sorted(row[1] for row in service.of("s")) == list(range(600))
    assert most_within(at, 1_000) <= 52
