"""The keys of waiting messages, hot and cold: they are maps, also as an earlier version has written them, and small."""

from __future__ import annotations

import random
import struct
import time

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracker.keys import cold_keys, live_keys
from tracker.keys.cold_keys import ColdKeys
from tracker.keys.live_keys import LastMessage, LiveKeys, PackedBucket
from tracker.messages import BoolArray
from tracker.store import MemoryStore

NUMBERS = st.integers(-1, 2**40)
LIVES = st.tuples(NUMBERS, NUMBERS, *[st.integers(-1, 2**31 - 1)] * 3, NUMBERS, NUMBERS).map(LastMessage._make)
HASHES = st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-3, 3))


@pytest.mark.slow
@given(
    old=st.dictionaries(HASHES, LIVES, max_size=6),
    changes=st.lists(st.tuples(st.one_of(HASHES, st.integers(0, 3).map(lambda n: (n, 0))), LIVES, st.booleans())),
    searched=st.sampled_from([0, 3, 2_048]),
    every=st.integers(1, 5),
)
def test_a_bucket_is_a_map_also_as_an_earlier_version_has_written_it(
    old: dict[tuple[int, int], LastMessage],
    changes: list[tuple[tuple[int, int], LastMessage, bool]],
    searched: int,
    every: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tracker.keys.live_keys._SEARCHED_ROWS", searched)
        check_bucket(old, changes, every)


def check_bucket(
    old: dict[tuple[int, int], LastMessage], changes: list[tuple[tuple[int, int], LastMessage, bool]], every: int
) -> None:
    written = b"".join(struct.pack("<4q3i2q", *key, *live) for key, live in old.items())
    bucket, model = PackedBucket(written), dict(old)
    bucket.n_old, first = len(bucket), set(model)  # those that have not been put since
    for i, (key, live, is_there) in enumerate(changes):
        first.discard(key)
        if is_there:
            bucket.put(key, live)
            model[key] = live
        else:
            assert bucket.remove(key) == (model.pop(key, None) is not None)
        assert len(bucket) == len(model)
        assert bucket.n_old == len(first)
        if i % every == 0:
            bucket = PackedBucket(bucket.pack(), bucket.n_old)
    assert {key: bucket.get(key) for key in [*model, *(key for key, *_ in changes)]} == {
        key: model.get(key) for key in [*model, *(key for key, *_ in changes)]
    }
    assert sorted(rows_of(bucket)) == sorted(model.values())
    assert sorted(rows_of(bucket)[: bucket.n_old]) == sorted(model[key] for key in first)
    other = bucket.split(0)
    assert sorted(rows_of(other)) == sorted(live for key, live in model.items() if key[0] & 1)
    assert sorted(rows_of(bucket)) == sorted(live for key, live in model.items() if not key[0] & 1)


def rows_of(bucket: PackedBucket) -> list[tuple[int, ...]]:
    return [tuple(row.values()) for row in bucket.positions().to_pylist()]


@given(
    changes=st.lists(st.tuples(st.integers(-(2**62), 2**62), st.booleans()), max_size=200),
    rows=st.integers(1, 4),
)
def test_a_map_of_keys_is_a_map(changes: list[tuple[int, bool]], rows: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tracker.keys.live_keys._BUCKET_ROWS", rows)
        store = MemoryStore()
        model: dict[tuple[int, int], LastMessage] = {}
        for i, (number, is_there) in enumerate(changes):
            keys = LiveKeys(store)
            live = LastMessage(1, i, -1, -1, 1, number, 0)
            keys.update({(number, 7): live if is_there else None})
            model.pop((number, 7), None)
            model |= {(number, 7): live} if is_there else {}
            keys.save()
            assert len(keys) == len(model)
        assert LiveKeys(store).find_hot({(number, 7) for number, _ in changes}) == model
        keys = LiveKeys(store)
        for _ in range(2 * len(changes) + 1):
            keys.sweep(lambda of: (np.ones(of.num_rows, np.bool_), np.zeros(of.num_rows, np.bool_)), 0, 0, 0)
        keys.save()
        assert len(LiveKeys(store)) == 0
        assert {table for table, _ in store.values} <= {"schedule_keys_meta"}


PRINTS = st.integers(0, (1 << cold_keys.FINGERPRINT_BITS) - 1)
GROUPS = st.one_of(st.integers(0, 3), st.integers(-(2**30), 2**40))


@given(
    keys=st.lists(st.tuples(PRINTS, GROUPS), max_size=40),
    copies=st.sampled_from([1, 1, 20]),
    level=st.integers(0, 20),
    at=st.integers(0, 2**20),
)
def test_cold_keys_are_a_set_of_fingerprints_and_groups(
    keys: list[tuple[int, int]], copies: int, level: int, at: int
) -> None:
    number = at & (1 << level) - 1
    model = sorted((fingerprint >> level << level | number, group) for fingerprint, group in keys * copies)

    def again(cold: ColdKeys, level: int = level, number: int = number) -> ColdKeys:
        return ColdKeys(cold.pack(level), number)

    def all_of(cold: ColdKeys) -> list[tuple[int, int]]:
        return sorted(zip(*(column.tolist() for column in cold._columns()), strict=True))

    cold = ColdKeys()
    cold.add_keys(*np.array(model, np.int64).reshape(-1, 2).T)
    cold = again(cold)
    assert len(cold) == len(model)
    assert all_of(cold) == model
    for key in {*keys[:5], *model[:5]}:
        assert cold.groups_of(key[0]) == sorted({group for fingerprint, group in model if fingerprint == key[0]})
    if model:
        gone = model.pop(len(model) // 2)
        cold.remove(*gone)
        assert all_of(again(cold)) == model
    n = len(model)
    model = [key for key in model if key[1] >= 2]
    assert again(cold).drop_before(2) == n - len(model)
    cold.drop_before(2)
    other = cold.split(level)
    upper = again(other, level + 1, number | 1 << level)
    assert all_of(upper) == [key for key in model if key[0] >> level & 1]
    assert all_of(again(cold, level + 1)) == [key for key in model if not key[0] >> level & 1]


def all_rest(rows: pa.Table) -> tuple[BoolArray, BoolArray]:
    """Judges that no message's time has come, and that the delayed index has them all."""
    return np.zeros(rows.num_rows, np.bool_), np.ones(rows.num_rows, np.bool_)


@pytest.mark.long
def test_a_cold_key_costs_four_bytes_and_a_hot_one_six_times_that() -> None:
    store = MemoryStore()
    keys = LiveKeys(store)
    random = np.random.default_rng(1)
    n, day = 100_000, 86_400_000
    hashes = random.integers(-(2**63), 2**63 - 1, (n, 2)).tolist()
    dues = random.integers(0, day, n).tolist()
    keys.update(
        {
            (one, two): LastMessage(7, i, -1, -1, 1, due, due)
            for i, ((one, two), due) in enumerate(zip(hashes, dues, strict=True))
        }
    )
    keys.save()
    hot = sum(map(len, store.values.values())) / n
    for _ in range(2 * live_keys._SWEEPS):
        keys.sweep(all_rest, 0, 0, 0)
    keys.save()
    assert keys.n_cold == n
    assert 20 < hot < 30
    assert sum(map(len, store.values.values())) / n < 5.5
    # Filled as a map is that grows while its keys are cold.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_keys, "_SWEEPS", 1)
        store = MemoryStore()
        keys = LiveKeys(store)
        for start in range(0, n, 1_000):
            for i in range(start, start + 1_000):
                keys.update({tuple(hashes[i]): LastMessage(7, i, -1, -1, 1, dues[i], dues[i])})
            for _ in range(2):
                keys.sweep(all_rest, 0, 0, 0)
    keys.save()
    assert sum(map(len, store.values.values())) / n < 4.6
    assert keys.find_cold(map(tuple, hashes[:1_000])).keys() == set(map(tuple, hashes[:1_000]))
    others = random.integers(-(2**63), 2**63 - 1, (1_000, 2)).tolist()
    assert len(keys.find_cold(map(tuple, others))) <= 1


def test_a_map_that_an_earlier_version_has_written_is_read_and_becomes_cold() -> None:
    store = MemoryStore()
    bucket = PackedBucket()
    live = LastMessage(1, 2, -1, -1, 1, 10**12, 0)
    bucket.put((5, 7), live)
    store.put("schedule_keys", (0, 0), bucket.pack())
    store.put("schedule_keys_meta", (0, 0), struct.pack("<3q", 1, 1, 0))
    assert LiveKeys(store).find_hot([(5, 7)]) == {(5, 7): live}
    for _ in range(2):
        keys = LiveKeys(store)
        keys.sweep(all_rest, 0, 0, 0)
        keys.save()
    keys = LiveKeys(store)
    assert (len(keys), keys.n_cold) == (1, 1)
    keys.warm((5, 7), live)
    keys.save()
    assert LiveKeys(store).find_hot([(5, 7)]) == {(5, 7): live}
    assert LiveKeys(store).n_cold == 0


@pytest.mark.slow
def test_keys_that_somebody_has_chosen_to_be_in_one_bucket_hold_up_nothing() -> None:
    """Who produces can try keys until their hashes are alike; each one is due sooner than all before."""
    store, chance = MemoryStore(), random.Random(41)
    n, at_once, seconds = 20_000, 1_000, 0.0
    for first in range(0, n, at_once):
        messages = {
            (chance.getrandbits(30) << 32, chance.getrandbits(63)): LastMessage(
                1, first, -1, -1, 1, 2**41 - first - i, 5
            )
            for i in range(at_once)
        }
        began = time.process_time()
        keys = LiveKeys(store)
        assert not keys.find_hot(messages)
        keys.update(messages)
        keys.save()
        seconds = time.process_time() - began
    assert len(keys) == n
    assert len(PackedBucket(store.values["schedule_keys", (0, 0)])) == n
    assert LiveKeys(store).find_hot(messages) == messages
    assert seconds < 2, "of the last thousand; it was more than five seconds"
