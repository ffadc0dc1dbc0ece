"""Shards that shape what comes due: never more than the rate, in order, exactly once, while windows are open."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import settings as effort
from hypothesis import strategies as st

from conf.shaping import Rate, Window
from streaming.release.feedback import Feedback
from tests.support.fuzzing.examples import examples
from tests.support.naive.rates import most_within
from tests.support.tracker.messages import TOPIC, messages
from tests.support.tracker.shaped_service import CLOSED, LOOKAHEAD, START, Service, many, rate
from tracker.context import Context
from tracker.ends import NO_END
from tracker.messages import concat, with_columns
from tracker.shaping.shaper import ShapedSubscription
from tracker.shaping.token_bucket import ShapingRule, rule_of
from tracker.sharding import shards_of
from tracker.store import MemoryStore
from tracker.subscriptions import Backoff, Subscriptions


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
    for shard_id in service.shard_ids:
        ids = pa.table({"ledger_id": [7] * 640, "entry_id": list(range(640))})
        own = {i for i in range(640) if shards_of(ids, 2)[i] == shard_id.number}
        in_order = [entry for _, entry, _, at, _ in sorted(shaped, key=lambda row: row[3]) if entry in own]
        assert in_order == sorted(own)
    assert max(row[3] for row in shaped) == pytest.approx(due + 1000 * 630 / 50, abs=700)
    # The other subscription has everything at its time.
    assert [row[3:] for row in service.of("t")] == [(due, None)] * 640


@pytest.mark.slow
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


@pytest.mark.slow
def test_what_is_within_the_rate_goes_out_at_its_time_as_if_there_were_none() -> None:
    service, plain = Service(rate(100)), Service(None)
    rows = messages([(7, i, START + 5_000 + 50 * i) for i in range(200)])
    for one in (service, plain):
        one.step(100, rows)
        one.run_until(START + 20_000)
    assert service.out == plain.out
    assert all(store.get("shaping", (0, 0)) is None for store in plain.stores)


@pytest.mark.slow
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


def test_near_places_are_sealed_at_once_with_the_moves_to_them() -> None:
    service = Service(rate(10, burst=1), shards=1)
    effects = service.step(100, many(30, START + 50))
    bucket = effects[0].bucket
    shaped = bucket.filter(bucket["shaped_from"].is_valid())
    assert shaped.num_rows == 30 - len(service.of("s"))
    moves = effects[0].cancels
    assert set(shaped["sequence"].to_pylist()) == set(moves["sequence"].to_pylist())
    assert moves["operation"].to_pylist() == ["MOVE"] * shaped.num_rows


def test_rows_of_an_earlier_version_are_shaped_too() -> None:
    service = Service(rate(10, burst=1), shards=1)
    rows = with_columns(many(20, START + 3_000), key=pa.nulls(20, pa.string())).drop_columns(["shaped_from"])
    service.step(100, concat([rows]))
    service.run_until(START + 10_000)
    assert len(service.of("s")) == 20


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


@pytest.mark.slow
def test_where_every_other_place_is_past_its_end_the_time_it_takes_is_not_quadratic() -> None:
    n, context = 40_000, Context(MemoryStore(), Subscriptions({TOPIC: ["s"]}), now=START, cutoff=START + LOOKAHEAD)
    shaped = ShapedSubscription(ShapingRule.from_json(rate(1, burst=1)), context)
    seconds = np.arange(n) // 2  # each two messages want this place: the second one only this, and the first any
    ends = np.where(np.arange(n) % 2, START + 1_000 * (seconds + 1), NO_END)
    began = time.process_time()
    places, _ = shaped.give_places(many(n, START), True, ends)
    assert time.process_time() - began < 5
    assert places[::2].tolist() == [float(START + 1_000 * second) for second in range(n // 2)]
    assert np.isnan(places[1])
    assert places[3::2].tolist() == ends[3::2].tolist()
