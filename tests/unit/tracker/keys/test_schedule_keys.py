"""Messages with schedule keys: several shards against a naive model, and single behaviours."""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import Phase, given
from hypothesis import settings as effort
from hypothesis import strategies as st

from tests.support.fuzzing.examples import examples
from tests.support.tracker.messages import TOPIC, batches, command, commands
from tracker.commands.schema import CANCEL, KNOWN, OF_ROWS, RESCHEDULE, SKIP, PauseChange
from tracker.entry_log import KEPT_SCHEMA
from tracker.keys import cold_keys, live_keys
from tracker.keys.cold_keys import ColdKeys
from tracker.keys.live_keys import Live, LiveKeys
from tracker.keys.packed_bucket import PackedBucket
from tracker.keys.sealed_keys import KEYED
from tracker.messages import MESSAGES, BoolArray, concat, int64, typed, where
from tracker.properties.schedule import BadScheduleError
from tracker.properties.schedule_key import schedule_key
from tracker.shard import Shard
from tracker.sharding import Place, shard_of, shards_of
from tracker.store import MemoryStore
from tracker.subscriptions import Subscriptions
from tracker.tick import Tick, TickInput
from tracker.wire.delaylake_pb2 import Result

NAMES = {TOPIC: ["a", "b"]}
NEAR_MILLIS, AHEAD_MILLIS = 500, 2_000


def keyed(
    entry: int, key: str | None, due: int, published: int, index: int = -1, size: int = 1, **rule: str
) -> pa.Table:
    properties = [("scheduleKey", key), *rule.items()] if key is not None else []
    return batches([(1, entry * 64, index, size, due)], publish_time=published, properties=properties, schedule_key=key)


class Job:
    """Shards of which each gets what the source gives it; what they seal is loaded again."""

    def __init__(self, shards: int = 3, ahead_millis: int = AHEAD_MILLIS, idle_millis: int = 600_000) -> None:
        self.ahead_millis = ahead_millis
        self.idle_millis = idle_millis
        self.subscriptions = Subscriptions(NAMES)
        self.stores = [MemoryStore() for _ in range(shards)]
        self.n = shards
        self.tick = self.now = self.seal_epoch = self.load = self.near = self.durable = 0
        self.sealed = MESSAGES.empty_table()
        self.entries: list[tuple[int, int]] = []
        self.delivered: dict[str, list[tuple[int, int]]] = {"a": [], "b": []}
        self.outcomes: list[dict[str, object]] = []
        self.n_looked_up = 0

    def step(
        self,
        rows: pa.Table | None = None,
        orders: list[dict[str, object]] = (),  # type: ignore[assignment]
        later: int = 0,
        pauses: list[PauseChange] = (),  # type: ignore[assignment]
    ) -> list[dict[str, object]]:
        """A tick of all shards, which ends a seal epoch; returns its outcomes."""
        self.now += later
        self.tick += 1
        self.seal_epoch += 1
        rows = MESSAGES.empty_table() if rows is None else rows
        before, self.load = self.load, max(self.load, self.now + self.ahead_millis)
        self.near = self.now + NEAR_MILLIS
        tick = Tick(
            tick=self.tick,
            now=self.now,
            cutoff=self.now,
            seal_epoch=self.seal_epoch,
            load_horizon=self.load,
            near_until=self.near,
            run_id="r",
            confirmed=self.tick - 1,
            durable_through=self.durable,
            ingested_through=self.tick,
        )
        due = int64(self.sealed, "deliver_at")
        sealed = self.sealed

        def find_keyed(names: Collection[tuple[str, str]], groups: Sequence[int]) -> pa.Table:
            self.n_looked_up += 1
            keys = pa.array({key for _, key in names}, pa.string())
            is_there = pc.and_(pc.is_in(sealed["schedule_key"], keys), pc.is_null(sealed["sequence"]))
            of_group = np.isin(cold_keys.group_of(due), groups)
            return typed(sealed.filter(pc.and_(is_there, pa.array(of_group))), KEYED)

        segment = where(self.sealed, (due >= before) & (due < self.load))
        ordered = commands(orders)
        told = []
        new = []
        for number, store in enumerate(self.stores):
            copy = MemoryStore()
            copy.values = dict(store.values)

            def of(table: pa.Table, number: int = number) -> pa.Table:
                return where(table, shards_of(table, self.n) == number) if table.num_rows else table

            homes = shard_of(int64(rows, "ledger_id"), int64(rows, "entry_id"), self.n)
            notes = where(rows, (homes == number) & (shards_of(rows, self.n) != number)).select(KEPT_SCHEMA.names)
            copied = where(ordered, (shards_of(ordered, self.n) != number) & (int64(ordered, "ledger_id") >= 0))
            payload = self.sealed if any(o["kind"] in OF_ROWS for o in orders) or pauses else MESSAGES.empty_table()
            tick_input = TickInput(
                messages=of(rows),
                notes=notes,
                segment=of(segment),
                commands=pa.concat_tables([of(ordered), copied]),
                request_ids={str(o["request_id"]): 1 for o in orders} | {p.request_id: 1 for p in pauses},
                known_messages=KNOWN.empty_table(),
                payload_rows=of(payload),
                pause_changes=pauses,
                find_keyed=find_keyed,
            )
            effects, again = (
                Shard(one, self.subscriptions, 1_000_000, 1_000, None, Place(number, self.n), self.idle_millis).apply(
                    tick, tick_input
                )
                for one in (store, copy)
            )
            assert again.outcomes.equals(effects.outcomes)
            assert again.bucket.equals(effects.bucket)
            assert copy.values == store.values
            new.append(effects.bucket)
            told += effects.outcomes.to_pylist()
            self.entries += zip(*(effects.entries[n].to_pylist() for n in ("ledger_id", "entry_id")), strict=True)
            for release in effects.releases:
                for row in release.rows.to_pylist():
                    for bit, name in enumerate(("a", "b")):
                        if row["subscription_mask"] >> bit & 1:
                            self.delivered[name].append((row["entry_id"] // 64, max(row["batch_index"], 0)))
        self.sealed = concat([self.sealed, *new])
        self.outcomes += told
        return told

    def all_entries(self) -> list[tuple[int, int]]:
        """The entries that are written down once everything is durable."""
        self.durable = self.seal_epoch
        self.step()
        return sorted(self.entries)

    def superseded(self) -> set[tuple[int, str]]:
        """(entry, the entry that it yields to) of what was superseded for both subscriptions."""
        found: dict[tuple[int, str], set[str]] = {}
        for row in self.outcomes:
            if row["result"] == Result.SUPERSEDED and row["subscription"] != "*":
                other = str(int(str(row["superseded_by"]).split(":")[1]) // 64)
                names = found.setdefault((row["entry_id"] // 64, other), set())  # type: ignore[operator]
                assert row["subscription"] not in names
                names.add(str(row["subscription"]))
        assert all(names == {"a", "b"} for names in found.values())
        return set(found)


def by_key(
    request: str, key: str, kind: str = CANCEL, at: int = 0, subscriptions: tuple[int, ...] = (0, 1)
) -> dict[str, object]:
    return command(request, -1, -1, subscriptions, kind=kind, cancel_at=at) | {"schedule_key": key}


@dataclass
class One:
    entry: int
    due: int
    since: int
    came: int
    cancelled: set[str] = field(default_factory=set)


Message = tuple[str | None, str, int, int]
MOST_AGO = 6_000

MODES = st.sampled_from(["replace", "keep", "debounce"])
STEPS = st.lists(
    st.tuples(
        st.integers(0, 1_500),  # later
        st.lists(
            st.tuples(
                st.sampled_from(["k1", "k2", "k3", None]),
                MODES,
                st.integers(-200, 4_000),  # delay
                st.sampled_from([0, 0, 1, 300, 2_000, MOST_AGO]),  # read so long after it was published
            ),
            max_size=5,
        ),
        st.sampled_from([None, None, CANCEL, RESCHEDULE, "by id"]),
        st.sampled_from(["k1", "k2"]),
        st.integers(-100, 3_000),
    ),
    max_size=12,
)


@pytest.mark.slow
@effort(max_examples=examples(60), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(steps=STEPS, shards=st.integers(1, 3), prints=st.sampled_from([None, None, 0, 1, (1 << 38) - 1]))
def test_shards_against_the_model(
    steps: list[tuple[int, list[Message], str | None, str, int]], shards: int, prints: int | None
) -> None:
    """Of each key one message waits: the newest, the first, or the newest within its limit; commands change it.

    With `prints` keys become cold as soon as they can, and have no more than these bits of their hashes in common.
    """
    with pytest.MonkeyPatch.context() as patch:
        if prints is not None:
            patch.setattr(cold_keys, "GROUP_MILLIS", 700)
            patch.setattr(live_keys, "_PRINT", prints)
        check_shards(steps, Job(shards) if prints is None else Job(shards, NEAR_MILLIS, 0))


def check_shards(steps: list[tuple[int, list[Message], str | None, str, int]], job: Job) -> None:
    now, n = MOST_AGO, 0  # as in Pulsar, nothing was published before the epoch
    job.step(later=now)
    live: dict[str, One] = {}
    waiting: list[One] = []
    superseded: set[tuple[int, str]] = set()
    delivered: list[int] = []
    for later, new, kind, key, at in steps:
        released, now = now, now + later
        live = {k: one for k, one in live.items() if one.due > released}
        rows = []
        for of_key, mode, delay, ago in sorted(new, key=lambda message: -message[3]):
            published = now - ago
            due = published + delay
            one = One(n, due, published, job.tick)
            rule = {"scheduleMode": mode, "debounceMax": "3s"} if of_key is not None else {}
            rows.append(keyed(n, of_key, due, published, -1, 1, **rule))
            n += 1
            if of_key is None:
                waiting.append(one)
                continue
            before = live.get(of_key)
            if before is not None and before.cancelled:
                before = None
            # What came in with it was still waiting when it was published, or not.
            if before is not None and before.came == job.tick and before.due <= min(now, published):
                before = None
            if before is not None:
                one.since = before.since
            if mode == "debounce":
                one.due = min(due, one.since + 3_000)
            if before is not None and mode == "keep":
                superseded.add((one.entry, str(before.entry)))
                continue
            if before is not None:
                superseded.add((before.entry, str(one.entry)))
                waiting.remove(before)
            waiting.append(one)
            live[of_key] = one
        live = {k: one for k, one in live.items() if one.due > now or one.came < job.tick}
        orders = []
        expected: set[int] | None = None
        target = live.get(key)
        if kind in (CANCEL, RESCHEDULE):
            orders.append(by_key(f"r{job.tick}", key, kind, now + at if kind == RESCHEDULE else 0))
        elif kind == "by id" and target is not None:
            orders.append(command(f"r{job.tick}", 1, target.entry * 64, (0, 1), kind=SKIP))
        if orders:
            if target is None:
                expected = {Result.NOT_FOUND}
            elif target.cancelled:
                expected = {Result.INVALID if kind == RESCHEDULE else Result.ALREADY_APPLIED}
            else:
                expected = {Result.APPLIED}
                if kind == RESCHEDULE:
                    target.due = max(now + at, now)
                else:
                    target.cancelled = {"a", "b"}
                    waiting.remove(target)
        told = job.step(concat(rows) if rows else None, orders, later)
        answers = [row["result"] for row in told if row["result"] != Result.SUPERSEDED]
        if expected is not None:
            assert set(answers) == expected
            assert len(answers) == 2
        else:
            assert answers == []
        delivered += [one.entry for one in waiting if one.due <= now]
        waiting = [one for one in waiting if one.due > now]
    assert job.superseded() == superseded
    job.step(later=20_000)
    job.step()
    delivered += [one.entry for one in waiting]
    for name in ("a", "b"):
        assert sorted(entry for entry, _ in job.delivered[name]) == sorted(delivered)
    assert job.all_entries() == [(1, i * 64) for i in range(n)]


@pytest.mark.slow
def test_of_very_many_messages_of_a_key_one_is_sealed_and_delivered() -> None:
    job = Job(2)
    job.step()
    rows = batches(
        [(1, i, -1, 1, 5_000) for i in range(10_000)],
        publish_time=0,
        properties=[("scheduleKey", "k")],
        schedule_key="k",
    )
    job.step(rows)
    job.step()
    assert job.sealed["entry_id"].to_pylist() == [9_999]
    job.step(later=6_000)
    assert len(job.delivered["a"]) == 1
    assert sum(row["result"] == Result.SUPERSEDED for row in job.outcomes) == 2 * 9_999
    assert len(job.all_entries()) == 10_000


def test_where_all_that_comes_in_is_known_nothing_changes() -> None:
    job = Job(1)
    job.step()
    rows = concat([keyed(1, "k", 3_000, 0), keyed(2, "other", 3_000, 0)])
    for _ in range(2):
        assert job.step(rows) == []
    job.step(later=4_000)
    assert sorted(job.delivered["a"]) == [(1, 0), (2, 0)]


def test_messages_of_a_batch_go_to_their_keys_shards_and_the_entry_is_written_down_once() -> None:
    job = Job(3)
    job.step()
    size = 6
    keys = ["a", "b", None, "c", "a", None]
    rows = concat(keyed(1, key, 3_000, 0, i, size) for i, key in enumerate(keys))
    job.step(rows)
    whole = job.step(orders=[command("r", 1, 64, (0,), kind=SKIP)])
    results = {(row["batch_index"], row["result"]) for row in whole}
    # The first was superseded by the fifth.
    assert results == {(0, Result.ALREADY_APPLIED), *((i, Result.APPLIED) for i in range(1, 6))} or results == {
        (-1, Result.APPLIED)
    }
    job.step(later=4_000)
    job.step()
    assert sorted(job.delivered["b"]) == [(1, i) for i in range(1, 6)]
    assert job.delivered["a"] == []
    assert job.all_entries() == [(1, 64)]


def test_a_message_that_is_held_back_is_replaced_and_a_kept_key_begins_anew() -> None:
    job = Job(2)
    job.step()
    job.step(concat([keyed(1, "r", 1_000, 0), keyed(2, "k", 1_000, 0)]), pauses=[PauseChange("p", TOPIC, 1, True)])
    job.step(later=2_000)
    job.step(concat([keyed(3, "r", 5_000, 2_000), keyed(4, "k", 5_000, 2_000, scheduleMode="keep")]))
    job.step(later=5_000)
    job.step(pauses=[PauseChange("q", TOPIC, 1, False)])
    job.step(later=1)
    assert sorted(job.delivered["a"]) == [(2, 0), (3, 0), (4, 0)]
    assert sorted(job.delivered["b"]) == [(1, 0), (2, 0), (3, 0), (4, 0)]


@pytest.mark.slow
def test_a_command_that_waited_applies_where_the_message_is() -> None:
    for entry in range(8):  # homes and keys are in several shards
        job = Job(3)
        job.step()
        job.step(orders=[command("r", 1, entry * 64, (0, 1), cancel_at=3_000)])
        assert {row["result"] for row in job.step(keyed(entry, "k", 3_000, 0))} == {Result.APPLIED}
        job.step(later=4_000)
        assert job.delivered == {"a": [], "b": []}
        assert not any(row["result"] == Result.NOT_FOUND for row in job.outcomes)


@pytest.mark.parametrize(
    ("properties", "name"),
    [
        ({"scheduleKey": "x" * 513}, "scheduleKey"),
        ({"scheduleKey": "ö" * 257}, "scheduleKey"),
        ({"scheduleKey": ""}, "scheduleKey"),
        ({"scheduleKey": "k", "scheduleMode": "last"}, "scheduleMode"),
        ({"scheduleKey": "k", "debounceMax": "-5s"}, "debounceMax"),
        ({"scheduleKey": "k", "debounceMax": "0"}, "debounceMax"),
        ({"scheduleKey": "k", "scheduleMode": "debounce", "debounceMax": "5 min"}, "debounceMax"),
    ],
)
def test_a_wrong_property_is_named(properties: dict[str, str], name: str) -> None:
    with pytest.raises(BadScheduleError, match=f"^{name} "):
        schedule_key(properties)


def test_a_key_of_512_bytes_is_taken() -> None:
    assert schedule_key({"scheduleKey": "ö" * 256, "scheduleMode": "debounce", "debounceMax": "1d"}) == "ö" * 256
    assert schedule_key({"scheduleMode": "anything"}) is None


NUMBERS = st.integers(-1, 2**40)
LIVES = st.tuples(NUMBERS, NUMBERS, *[st.integers(-1, 2**31 - 1)] * 3, NUMBERS, NUMBERS).map(Live._make)
HASHES = st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-3, 3))


@given(
    old=st.dictionaries(HASHES, LIVES, max_size=6),
    changes=st.lists(st.tuples(st.one_of(HASHES, st.integers(0, 3).map(lambda n: (n, 0))), LIVES, st.booleans())),
)
def test_a_bucket_is_a_map_also_as_an_earlier_version_has_written_it(
    old: dict[tuple[int, int], Live], changes: list[tuple[tuple[int, int], Live, bool]]
) -> None:
    written = b"".join(struct.pack("<4q3i2q", *key, *live) for key, live in old.items())
    bucket, model = PackedBucket(written), dict(old)
    for key, live, is_there in changes:
        if is_there:
            bucket.put(key, live)
            model[key] = live
        else:
            assert bucket.remove(key) == (model.pop(key, None) is not None)
        bucket = PackedBucket(bucket.pack())
        assert len(bucket) == len(model)
    assert {key: bucket.get(key) for key in [*model, *(key for key, *_ in changes)]} == {
        key: model.get(key) for key in [*model, *(key for key, *_ in changes)]
    }
    assert sorted(rows_of(bucket)) == sorted(model.values())
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
        model: dict[tuple[int, int], Live] = {}
        for i, (number, is_there) in enumerate(changes):
            keys = LiveKeys(store)
            live = Live(1, i, -1, -1, 1, number, 0)
            keys.update({(number, 7): live if is_there else None})
            model.pop((number, 7), None)
            model |= {(number, 7): live} if is_there else {}
            keys.save()
            assert len(keys) == len(model)
        assert LiveKeys(store).find({(number, 7) for number, _ in changes}) == model
        keys = LiveKeys(store)
        for _ in range(2 * len(changes) + 1):
            keys.sweep(lambda of: (np.ones(of.num_rows, np.bool_), np.zeros(of.num_rows, np.bool_)), 0, 0, 0)
        keys.save()
        assert len(LiveKeys(store)) == 0
        assert {table for table, _ in store.values} <= {"schedule_keys_meta"}


PRINTS = st.integers(0, (1 << cold_keys.PRINT_BITS) - 1)
GROUPS = st.one_of(st.integers(0, 3), st.integers(-(2**30), 2**40))


@given(
    keys=st.lists(st.tuples(PRINTS, GROUPS), max_size=40),
    copies=st.sampled_from([1, 1, 20]),
    level=st.integers(0, 20),
    at=st.integers(0, 2**20),
)
def test_cold_keys_are_a_set_of_prints_and_groups(
    keys: list[tuple[int, int]], copies: int, level: int, at: int
) -> None:
    number = at & (1 << level) - 1
    model = sorted((print_ >> level << level | number, group) for print_, group in keys * copies)

    def again(cold: ColdKeys, level: int = level, number: int = number) -> ColdKeys:
        return ColdKeys(cold.pack(level), number)

    def all_of(cold: ColdKeys) -> list[tuple[int, int]]:
        return sorted(zip(*(column.tolist() for column in cold._columns()), strict=True))

    cold = ColdKeys()
    cold.add(*np.array(model, np.int64).reshape(-1, 2).T)
    cold = again(cold)
    assert len(cold) == len(model)
    assert all_of(cold) == model
    for key in {*keys[:5], *model[:5]}:
        assert cold.groups_of(key[0]) == sorted({group for print_, group in model if print_ == key[0]})
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


def test_a_cold_key_is_looked_up_where_it_is_named_and_when_its_message_is_loaded() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cold_keys, "GROUP_MILLIS", 700)
        job = Job(2, idle_millis=0)
        names = ["replaced", "kept", "cancelled", "moved", "by id", "held", "left alone", "loaded"]
        job.step(concat(keyed(n, key, 20_000 + 1_000 * (key == "loaded"), 0) for n, key in enumerate(names)))
        job.step()
        job.step()
        assert [n_cold(store) for store in job.stores] == [len(LiveKeys(store)) for store in job.stores]
        assert job.n_looked_up == 0
        job.step(concat([keyed(10, "replaced", 20_000, 1), keyed(11, "kept", 20_000, 1, scheduleMode="keep")]))
        assert job.superseded() == {(0, "10"), (11, "1")}
        job.step(keyed(12, "nobody's", 20_000, 1))
        n_looked_up = job.n_looked_up
        job.step(keyed(13, "nobody's, either", 20_000, 1))
        assert job.n_looked_up == n_looked_up, "a key of which nothing is known is not looked up"
        answers = job.step(orders=[by_key("c", "cancelled"), by_key("m", "moved", RESCHEDULE, 30_000)])
        assert {row["result"] for row in answers} == {Result.APPLIED}
        answers = job.step(orders=[command("i", 1, 4 * 64, (0, 1), kind=SKIP)])
        assert {row["result"] for row in answers} == {Result.APPLIED}
        job.step(pauses=[PauseChange("p", TOPIC, 1, True)])
        for request, key in [("c2", "cancelled"), ("i2", "by id")]:
            assert {row["result"] for row in job.step(orders=[by_key(request, key)])} == {Result.ALREADY_APPLIED}
        job.step()
        job.step(later=20_500)
        job.step()
        # What is held back is hot as long as it is, and is replaced.
        job.step(keyed(14, "held", 25_000, 20_600))
        assert sum(row["result"] == Result.SUPERSEDED and row["subscription"] == "a" for row in job.outcomes) == 3
        job.step(keyed(15, "loaded", 26_000, 20_600))
        job.step(keyed(16, "moved", 26_000, 20_600))
        job.step(pauses=[PauseChange("q", TOPIC, 1, False)])
        for _ in range(3):
            job.step(later=5_000)
        assert sorted(entry for entry, _ in job.delivered["b"]) == [1, 5, 6, 10, 12, 13, 14, 15, 16]
        assert sorted(entry for entry, _ in job.delivered["a"]) == [1, 6, 10, 12, 13, 14, 15, 16]
        for _ in range(3):
            job.step()
        assert all(len(LiveKeys(store)) == 0 for store in job.stores)


def all_rest(rows: pa.Table) -> tuple[BoolArray, BoolArray]:
    """Judges that no message's time has come, and that the delayed index has them all."""
    return np.zeros(rows.num_rows, np.bool_), np.ones(rows.num_rows, np.bool_)


def n_cold(store: MemoryStore) -> int:
    return LiveKeys(store).n_cold


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
            (one, two): Live(7, i, -1, -1, 1, due, due)
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
                keys.update({tuple(hashes[i]): Live(7, i, -1, -1, 1, dues[i], dues[i])})
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
    live = Live(1, 2, -1, -1, 1, 10**12, 0)
    bucket.put((5, 7), live)
    store.put("schedule_keys", (0, 0), bucket.pack())
    store.put("schedule_keys_meta", (0, 0), struct.pack("<3q", 1, 1, 0))
    assert LiveKeys(store).find([(5, 7)]) == {(5, 7): live}
    for _ in range(2):
        keys = LiveKeys(store)
        keys.sweep(all_rest, 0, 0, 0)
        keys.save()
    keys = LiveKeys(store)
    assert (len(keys), keys.n_cold) == (1, 1)
    keys.warm((5, 7), live)
    keys.save()
    assert LiveKeys(store).find([(5, 7)]) == {(5, 7): live}
    assert LiveKeys(store).n_cold == 0
