"""The places of a token bucket, against one that is filled and emptied message by message."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.naive import rates
from tracker.shaping.token_bucket import TokenBucket, own_ranks
from tracker.sharding import ShardId

RATES = st.sampled_from([0.5, 1.0, 3.0, 50.0, 2_000.0])
TIMES = st.lists(st.integers(0, 5_000), max_size=60).map(sorted)


def naive(times: list[int], interval: float, burst: int) -> list[float]:
    """When each message finds a whole token in a bucket that was full at first, ms."""
    tokens, at, found = float(burst), 0.0, []
    for time in times:
        now = max(float(time), at)
        tokens = min(burst, tokens + (now - at) / interval)
        if tokens < 1 - 1e-9:
            now += (1 - tokens) * interval
            tokens = 1.0
        tokens, at = tokens - 1, now
        found.append(now)
    return found


def most_within(places: list[float], millis: float) -> int:
    """The most places in any span of so many ms, but for what rounding takes from a time."""
    return rates.most_within(places, millis - 1e-6)


@given(RATES, st.integers(1, 20), TIMES, st.integers(0, 60))
def test_each_message_gets_the_place_at_which_a_bucket_has_a_token_for_it(
    rate: float, burst: int, times: list[int], cut: int
) -> None:
    bucket = TokenBucket.share_of(rate, burst, ShardId())
    first, state = bucket.places(np.array(times[:cut], float), -1e12)
    second, _ = bucket.places(np.array(times[cut:], float), state)
    assert np.allclose([*first, *second], naive(times, 1000 / rate, burst))


@given(RATES, st.integers(1, 20), st.integers(1, 5), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3_000))))
def test_all_shards_together_give_no_more_places_than_rate_and_burst_allow(
    rate: float, burst: int, shards: int, messages: list[tuple[int, int]]
) -> None:
    places: list[float] = []
    for number in range(shards):
        times = sorted(time for shard, time in messages if shard % shards == number)
        given_, _ = TokenBucket.share_of(rate, burst, ShardId(number, shards)).places(np.array(times, float), -1e12)
        assert all(place >= time for place, time in zip(given_, times, strict=True))
        places += list(given_)
    for millis in (1.0, 100.0, 1_000.0, 4_000.0):
        assert most_within(places, millis) <= burst + math.ceil(rate * millis / 1000 - 1e-6)


@given(RATES, st.integers(1, 6), TIMES, st.data())
def test_each_key_has_a_bucket_of_its_own(rate: float, burst: int, times: list[int], data: st.DataObject) -> None:
    keys = np.array(data.draw(st.lists(st.integers(0, 4), min_size=len(times), max_size=len(times))), np.int64)
    for shard_id in (ShardId(), ShardId(1, 3)):
        bucket = TokenBucket.share_of(rate, burst, shard_id)
        places, states = bucket.places_of_keys(np.array(times, float), keys, np.zeros(5))
        for key in range(5):
            of_key = keys == key
            expected, state = bucket.places(np.array(times, float)[of_key], 0.0)
            assert np.allclose(places[of_key], expected)
            assert np.isclose(states[key], state)


def test_many_messages_with_few_of_each_key_take_as_few_rounds_as_many_with_one() -> None:
    times, bucket = np.zeros(20_000), TokenBucket.share_of(1, 1, ShardId())
    places, _ = bucket.places_of_keys(times, np.arange(20_000) % 10_000, np.zeros(10_000))
    assert sorted(set(places)) == [0, 1_000]
    assert len(set(bucket.places_of_keys(times, np.zeros(20_000, np.int64), np.zeros(1))[0])) == 20_000


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5))
def test_places_of_all_shards_are_shared_out_evenly_and_none_is_left_out(counts: list[int]) -> None:
    ranks = [own_ranks(counts, shard) for shard in range(len(counts))]
    assert [len(one) for one in ranks] == counts
    assert sorted(np.concatenate(ranks).tolist()) == list(range(sum(counts)))
    for own, n in zip(ranks, counts, strict=True):  # at any time each has had its part, but for one place of each shard
        assert (np.abs((np.arange(n) + 0.5) / max(n, 1) * sum(counts) - own) <= len(counts)).all()


# Of these rates all times are exact: none is moved over an end by rounding.
@given(
    st.sampled_from([1.0, 2.0, 5.0, 8.0, 1_000.0]),
    st.integers(1, 6),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 2), st.integers(1, 4_000) | st.just(10**15)), max_size=40),
)
def test_who_gets_no_place_before_its_end_takes_none(
    rate: float, burst: int, shards: int, messages: list[tuple[int, int, int]]
) -> None:
    messages.sort(key=lambda message: message[0])
    columns = np.array(messages, float).reshape(-1, 3)
    times, keys, ends = columns[:, 0], columns[:, 1].astype(np.int64), columns[:, 0] + columns[:, 2]
    for number in range(shards):
        bucket = TokenBucket.share_of(rate, burst, ShardId(number, shards))
        states, expected = [0.0, 0.0, 1_500.0], []
        for time, key, end in zip(times, keys, ends, strict=True):
            (place,), after = bucket.places(np.array([time]), states[key])
            expected.append(place < end)
            states[key] = after if place < end else states[key]
        assert bucket.kept_before(times, keys, np.array([0.0, 0.0, 1_500.0]), ends).tolist() == expected
