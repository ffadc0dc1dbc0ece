"""Large messages that are due soon wait in the delayed index until there is room for them: clock, shard and tables."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import streaming.source.clock
from conf.times import Moment
from streaming.checkpoint.offset import Offset
from streaming.release.feedback import Feedback
from streaming.source.clock import Clock, ClockSettings
from streaming.source.intake import TableIndex
from tests.support.tracker.messages import TOPIC, messages
from tracker.buckets.large_rows import LargeRule
from tracker.messages import concat, int64
from tracker.packing import LARGE_BYTES, payload_sizes
from tracker.shard import Shard, StateOptions
from tracker.store import MemoryStore
from tracker.subscriptions import DEFAULT_BACKOFF, Subscriptions
from tracker.tick import Effects, TickInput
from warehouse.delta.tables import Tables
from warehouse.queries.index_rows import (
    find_keyed_messages,
    large_due,
    read_large,
    read_light_segment,
    to_index,
)

START = 1_790_000_000_000
ROOM = 10 * LARGE_BYTES  # for large rows in state and on their way
KEY_IDLE_MILLIS = 1_000
LOOKAHEAD = 400
ORDERED = "persistent://public/default/ordered"

Position = tuple[int, int]


class Service:
    """A job of one shard on tables, without Spark and broker. What is handed out is written down `slow` ticks later."""

    def __init__(self, folder: Path, slow: int = 2, retried: Collection[str] = ()) -> None:
        self.tables = Tables(f"file:{folder}")
        self.tables.create()
        self.store = MemoryStore()
        self.clock = Clock(ClockSettings("run", LOOKAHEAD, 1_500, 6_000))
        self.offset = Offset()
        self.feedback = Feedback()
        self.now, self.slow = START, slow
        self.in_order = [ORDERED]
        self.on_their_way: list[tuple[int, int]] = []  # (tick, bytes)
        self.released: list[tuple[Position, int, int]] = []  # (position, due, cutoff when it was handed out)
        names = {TOPIC: ("a",), ORDERED: ("a",)}
        backoffs = {topic: {0: DEFAULT_BACKOFF} for topic in retried}
        self.subscriptions = Subscriptions(names, backoffs=backoffs, in_order={ORDERED: 1})
        self.most_bytes = 0  # of large payloads in state and on their way
        self.ticks_with_waiting = 0

    def restart(self) -> None:
        self.clock = Clock(ClockSettings(f"run{self.now}", LOOKAHEAD, 1_500, 6_000))

    def step(self, came: pa.Table | None = None, later: int = 200) -> Effects:
        self.now += later
        first = self.offset
        last = self.clock.next(
            first, Moment(self.now, self.now / 1000), self.feedback, TableIndex(self.tables, self.in_order)
        )
        self.offset = last = replace(last, max_bytes=ROOM)
        segment = []
        rule, version = last.large_rows.rule, last.index_version
        if first.load_horizon < last.load_horizon:
            segment.append(read_light_segment(self.tables, version, first.load_horizon, last.load_horizon, rule))
        if last.large and first.large_to < last.large_to:
            segment.append(read_large(self.tables, version, rule, first.large_to, last.large_to))
        shard = Shard(self.store, self.subscriptions, 50_000, options=StateOptions(key_idle_millis=KEY_IDLE_MILLIS))
        given = TickInput(
            messages=concat([came] if came is not None else []),
            segment=concat(segment),
            find_keyed=partial(find_keyed_messages, self.tables, last.index_version),
        )
        effects = shard.apply(Offset.from_json(last.to_json()).to_tick(), given)
        if effects.bucket.num_rows:
            self.tables.append("delayed_index", to_index(effects.bucket, last.tick), {"app": last.tick})
        for release in effects.releases:
            if release.tick == last.tick:
                rows = release.rows
                sizes = payload_sizes(rows)
                self.on_their_way.append((last.tick, int(sizes[sizes >= LARGE_BYTES].sum())))
                columns = (int64(rows, name).tolist() for name in ("ledger_id", "entry_id", "deliver_at"))
                self.released += [((lg, e), due, last.cutoff) for lg, e, due in zip(*columns, strict=True)]
        self.on_their_way = [(tick, n) for tick, n in self.on_their_way if tick > last.tick - self.slow]
        in_state = effects.status["large_bytes"]
        on_their_way = sum(n for _, n in self.on_their_way)
        self.most_bytes = max(self.most_bytes, in_state + on_their_way)
        self.ticks_with_waiting += last.large_rows.after is not None
        confirmed = last.tick - self.slow
        self.feedback = Feedback(
            confirmed=max(0, confirmed),
            next_due=effects.status["next_due"],
            in_flight_bytes=on_their_way,
            large_bytes=in_state,
        )
        return effects

    def run_until(self, n: int, most: int = 400) -> None:
        for _ in range(most):
            if len(self.released) >= n:
                break
            self.step()
        for _ in range(40):
            self.step()


@pytest.fixture(autouse=True)
def _little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming.source.clock, "MAX_LARGE_BYTES", ROOM)
    monkeypatch.setattr(streaming.source.clock, "_MAX_LOADED_BYTES", 5 * LARGE_BYTES)
    monkeypatch.setattr(streaming.source.clock, "_ROOM_FOR_MORE", 2 * LARGE_BYTES)


def large(ledger: int, entries: range, due: int, topic: str = TOPIC) -> pa.Table:
    return messages([(ledger, e, due) for e in entries], payload=b"x" * LARGE_BYTES, topic=topic, key="k")


def keyed(entry: int, due: int, key: str, published: int) -> pa.Table:
    named = {"schedule_key": key, "properties": [("scheduleKey", key)]}
    return messages([(7, entry, due)], payload=b"x" * LARGE_BYTES, publish_time=published, **named)


def recurring(entry: int, start: int) -> pa.Table:
    properties = [("repeat", "@every 10s"), ("repeatCount", "3"), ("deliverAt", str(start))]
    rows = messages([(8, entry, start)], payload=b"x" * LARGE_BYTES, properties=properties, occurrence=1)
    return rows


def small(ledger: int, entries: range, due: int, topic: str = TOPIC) -> pa.Table:
    return messages([(ledger, e, due) for e in entries], payload=b"s", topic=topic, key="k")


def check(service: Service, sent: pa.Table) -> None:
    positions = [position for position, _, _ in service.released]
    assert len(positions) == len(set(positions)), "one came twice"
    expected = set(zip(int64(sent, "ledger_id").tolist(), int64(sent, "entry_id").tolist(), strict=True))
    assert set(positions) == expected
    assert all(due <= cutoff for _, due, cutoff in service.released), "one came early"


@pytest.mark.slow
def test_large_messages_due_at_one_instant_come_as_there_is_room_and_small_ones_in_time(tmp_path: Path) -> None:
    service = Service(tmp_path)
    due = START + 20_000
    sent = []
    for i in range(20):
        rows = concat([large(1, range(3 * i, 3 * i + 3), due), small(2, range(i, i + 1), due + 50 * i)])
        sent.append(rows)
        service.step(rows)
    service.restart()
    service.run_until(80)
    check(service, concat(sent))
    assert service.ticks_with_waiting > 5
    assert service.most_bytes <= ROOM + 3 * LARGE_BYTES
    of_small = [(due, cutoff) for (ledger, _), due, cutoff in service.released if ledger == 2]
    assert max(cutoff - due for due, cutoff in of_small) < 1_000
    of_large = [position for position, _, _ in service.released if position[0] == 1]
    assert of_large == sorted(of_large), "in the order in which they are due"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_each_message_comes_once_whatever_comes_when(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    # What may be retried is sealed however soon it is due.
    service = Service(tmp_path, slow=rng.choice([1, 3]), retried=[TOPIC] if seed % 2 else [])
    sent = []
    entries = [0] * 6
    came: dict[Position, int] = {}  # of messages that have to come in order: when they came in
    for i in range(60):
        rows = []
        for ledger in rng.sample(range(1, 6), 2):
            n = rng.choice([0, 1, 4])
            of = range(entries[ledger], entries[ledger] + n)
            entries[ledger] += n
            due = service.now + rng.choice([-500, 100, 1_500, 4_000, 8_000, 15_000, rng.randrange(20_000)])
            topic = ORDERED if ledger >= 4 else TOPIC
            rows.append((small if ledger in (3, 5) else large)(ledger, of, due, topic))
            came |= {(ledger, e): service.now for e in of if ledger >= 4}
        rows = [one for one in rows if one.num_rows]
        sent += rows
        service.step(concat(rows) if rows else None, later=rng.choice([50, 200, 700]))
        if rng.random() < 0.05:
            service.restart()
        if i == 30:
            service.in_order = []  # the order was taken out of the settings
    service.run_until(sum(one.num_rows for one in sent))
    check(service, concat(sent))
    assert service.ticks_with_waiting > 0
    check_order(service, came)


def check_order(service: Service, came: dict[Position, int]) -> None:
    """Each comes before those due later, except what came in after these had been handed out."""
    released = [(position, due, cutoff) for position, due, cutoff in service.released if position in came]
    assert released
    for i, (position, due, _) in enumerate(released):
        for _, other_due, other_cutoff in released[:i]:
            assert other_due <= due or came[position] > other_cutoff - LOOKAHEAD


@pytest.mark.slow
def test_messages_in_order_wait_for_room_with_the_large_ones_of_their_topic(tmp_path: Path) -> None:
    service = Service(tmp_path)
    due = START + 14_000
    sent: list[pa.Table] = []
    came: dict[Position, int] = {}
    for i in range(12):
        rows = [large(4, range(3 * i, 3 * i + 3), due, ORDERED), small(5, range(i, i + 1), due + 10 * i, ORDERED)]
        rows.append(small(3, range(i, i + 1), due + 10 * i))
        sent.append(concat(rows))
        came |= {(4, e): 0 for e in range(3 * i, 3 * i + 3)} | {(5, i): 0}
        service.step(sent[-1])
    while service.now < due + 400:
        service.step()
    # What comes in late has its turn as well.
    sent.append(concat([small(5, range(90, 91), due + 200, ORDERED), small(3, range(90, 91), due + 200)]))
    came[5, 90] = 0
    at_once = service.step(sent[-1]).releases
    assert [row["ledger_id"] for release in at_once for row in release.rows.to_pylist() if row["entry_id"] == 90] == [3]
    service.run_until(sum(one.num_rows for one in sent))
    check(service, concat(sent))
    check_order(service, came)
    assert service.most_bytes <= ROOM + 3 * LARGE_BYTES
    others = [cutoff - due for (ledger, _), due, cutoff in service.released if ledger == 3]
    assert max(others) < 1_000, "messages without order do not wait"
    assert service.ticks_with_waiting > 3


@pytest.mark.slow
def test_large_messages_with_schedule_keys_wait_for_room_and_a_later_one_supersedes_one_that_waits(
    tmp_path: Path,
) -> None:
    service = Service(tmp_path)
    due = START + 30_000
    for i in range(60):
        service.step(keyed(i, due, f"k{i}", service.now))
    assert service.now < due - 10_000
    while service.now < due - 7_000:
        last = service.step()
    assert last.status["cold_schedule_keys"] == 60
    while service.now < due - 2_000:
        last = service.step()
    assert service.offset.load_horizon > due
    assert last.status["cold_schedule_keys"] > 40, "they wait for room in the delayed index"
    again = [keyed(100, service.now + 15_000, "k59", service.now), keyed(101, service.now + 15_000, "k0", service.now)]
    superseded = service.step(concat(again)).outcomes.to_pylist()
    assert {row["entry_id"] for row in superseded} == {0, 59}, "one in state, and one that waits"
    service.run_until(60)
    found = [position[1] for position, _, _ in service.released]
    assert sorted(found) == [*range(1, 59), 100, 101], "each once"
    assert found == sorted(found), "in the order in which they are due"
    assert service.most_bytes <= ROOM + 3 * LARGE_BYTES


@pytest.mark.slow
def test_large_recurring_messages_wait_for_room_and_recur(tmp_path: Path) -> None:
    service = Service(tmp_path)
    start = START + 12_000
    for i in range(0, 30, 3):
        service.step(concat([recurring(e, start) for e in range(i, i + 3)]))
    service.run_until(90)
    assert Counter(position[1] for position, _, _ in service.released) == dict.fromkeys(range(30), 3)
    assert service.ticks_with_waiting > 0
    assert service.most_bytes <= ROOM + 3 * LARGE_BYTES


def test_rows_without_a_payload_or_of_an_earlier_version_are_read_beside_large_ones(tmp_path: Path) -> None:
    """Payloads are bytes of any kind: their length is asked of the table where no column has it."""
    tables = Tables(f"file:{tmp_path}")
    tables.create()
    large, tombstone, small = b"\xff" * LARGE_BYTES, None, b"\xff\x00"
    rows = to_index(
        pa.concat_tables(
            [messages([(1, i, START + i)], payload=payload) for i, payload in enumerate((large, tombstone, small))]
        ),
        1,
    )
    tables.append("delayed_index", rows, {})
    old = rows.set_column(
        rows.schema.get_field_index("payload_bytes"), "payload_bytes", pa.nulls(rows.num_rows, pa.int64())
    )
    later = pc.add(old["entry_id"], 10)
    old = old.set_column(old.schema.get_field_index("entry_id"), "entry_id", later)
    rule = LargeRule(LARGE_BYTES, ())
    for n_large, added in ((1, None), (2, old)):
        if added is not None:
            tables.append("delayed_index", added, {})
        version = tables.version("delayed_index")
        found = large_due(tables, version, rule, (0, -1, -1), START + 100)
        assert [n_bytes for _, n_bytes in found] == [LARGE_BYTES] * n_large
        light = read_light_segment(tables, version, START, START + 100, rule)
        assert sorted(light["payload"].to_pylist(), key=str) == sorted([tombstone, small] * n_large, key=str)
