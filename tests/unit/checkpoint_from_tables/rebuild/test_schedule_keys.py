"""A rebuild finds the schedule keys whose message waits, and gives each shard its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

from checkpoint_from_tables.rebuild.rebuild import rebuild
from streaming.batch_schema import InputKind, fields_of
from streaming.checkpoint.prepared import PreparedState
from tests.support.service.one_shard import NOW as START
from tests.support.service.one_shard import SECOND, Service
from tests.support.tracker.messages import batches, command, handed_out, tick_at
from tests.support.warehouse.rebuilt import without_destinations
from tests.support.warehouse.tables import HOUR, NOW, TOPIC, make, rows
from tracker.commands.kinds import PAUSE_SCHEDULE, RESCHEDULE, RESUME_SCHEDULE
from tracker.due_time import MAX_TIME_MILLIS
from tracker.entry_log import ENTRY_LOG_ROWS
from tracker.keys import cold_keys
from tracker.messages import MESSAGES, concat
from tracker.properties import key_hash
from tracker.rebuilt import Rebuilt
from tracker.shard import Shard
from tracker.sharding import ShardId, shard_of
from tracker.store import MemoryStore
from tracker.tick import Effects, TickInput
from tracker.wire.delaylake_pb2 import Result


@pytest.mark.slow
def test_keys_of_what_waits_are_rebuilt_and_those_that_go_on(tmp_path: Path) -> None:
    made, tables = make(tmp_path)
    made = made.model_copy(update={"tracker": made.tracker.model_copy(update={"shards": 3})})

    def delay(entry: int, key: str | None, due: int = NOW + HOUR) -> dict[str, object]:
        keyed = {"schedule_key": key, "key_since": None if key is None else NOW - entry}
        return {
            "operation": "DELAY",
            "ledger_id": 1,
            "entry_id": entry,
            "deliver_at": due,
            "subscription": None,
            **keyed,
        }

    def superseded(entry: int, by: str, subscription: str = "a") -> dict[str, object]:
        return {
            **{"ledger_id": 1, "entry_id": entry, "subscription": subscription, "request_id": "superseded"},
            **{"result": "SUPERSEDED", "operation": "CANCEL", "sequence": 9, "schedule_key": "goes on"},
            **{"superseded_by": by, "deliver_at": NOW - 77, "issued_by": "delaylake"},
        }

    imported = {**delay(5, "imported"), "key_since": None}
    index = [imported, delay(0, "waits"), delay(1, "goes on"), delay(2, "delivered", NOW - HOUR), delay(3, None)]
    held = {**delay(4, "held", MAX_TIME_MILLIS + 1), "subscription": "a", "sequence": 5}
    moved = {**held, "operation": "MOVE"}
    original = delay(4, "held", NOW - HOUR)
    # The last message of a key is a retry of one that was delivered: the imported one before it waits.
    retry = {**delay(2, "retried"), "subscription": "a", "sequence": 6, "attempt": 1}
    before_retry = {**delay(7, "retried"), "ledger_id": -5, "key_since": None}
    # Moved for one subscription alone, and for both of them.
    for_one = {**delay(6, "for one", NOW + 9 * HOUR), "subscription": "a", "sequence": 7}
    for_both = [
        {**delay(8, "for both", NOW + n * HOUR), "subscription": name, "sequence": n}
        for name, n in (("a", 4), ("b", 6))
    ]
    more = [retry, before_retry, delay(6, "for one", NOW + 2 * HOUR), for_one, delay(8, "for both", NOW + 3 * HOUR)]
    more += for_both
    moves = [{**row, "operation": "MOVE"} for row in (for_one, *for_both)]
    delivered = [{"ledger_id": 1, "entry_id": 2, "subscription": name, "deliver_at": NOW - HOUR} for name in "ab"]
    delivered.append({"ledger_id": 1, "entry_id": 4, "subscription": "b", "deliver_at": NOW - HOUR})
    tables.append("delayed_index", rows("delayed_index", [*index, original, held, moved, *more, *moves]), {"job": 1})
    tables.append("deliveries", rows("deliveries", delivered), {"job": 1})
    tables.append("entries", rows("entries", [{"ledger_id": 1, "entry_id": i} for i in range(10)]), {"job": 1})
    outcomes = [superseded(1, "1:70:-1:-1"), superseded(1, "1:70:-1:-1", "b")]
    tables.append("outcomes", rows("outcomes", outcomes), {"job": 1})

    with mock.patch("checkpoint_from_tables.rebuild.rebuild.write_missing_deliveries", return_value=0):
        rebuild(made, tables, tmp_path / "checkpoint", now=NOW)

    found = PreparedState(tmp_path / "checkpoint")
    assert found.offset is not None
    assert found.offset.keyed == [TOPIC]
    keys, taken_over = {}, []
    for shard, (_, inputs) in enumerate(found.inputs(3)):
        assert inputs[InputKind.REBUILT_CANCELLED].num_rows == 2  # in every shard: a message may be in any
        for row in inputs[InputKind.REBUILT_KEYS].to_pylist():
            assert key_hash(TOPIC, row["schedule_key"])[1] % 3 == shard
            one = row["ledger_id"], row["entry_id"], row["since"], row["deliver_at"]
            if row["comes_again"]:
                taken_over.append((row["schedule_key"], one[:3]))
            else:
                keys[row["schedule_key"]] = one
    # Each has the time with which its message came, by which the index is looked up.
    assert taken_over == [("goes on", (1, 70, NOW - 77))]
    assert keys == {
        "waits": (1, 0, NOW, NOW + HOUR),
        "held": (1, 4, NOW - 4, NOW - HOUR),
        "imported": (1, 5, NOW + HOUR, NOW + HOUR),
        "retried": (-5, 7, NOW + HOUR, NOW + HOUR),
        "for one": (1, 6, NOW - 6, NOW + 2 * HOUR),
        "for both": (1, 8, NOW - 8, NOW + 3 * HOUR),
    }


SHARDS = 3
DUE = NOW + HOUR  # of what comes again


def of_another_shard(entry: int, ledger: int = 2, **columns: Any) -> pa.Table:
    """A message whose schedule key puts it into another shard than the home of its entry."""
    home = int(shard_of(np.array([ledger]), np.array([entry]), SHARDS)[0])
    keys = (f"{ledger} {entry} {n}" for n in range(50))
    key = next(key for key in keys if key_hash(TOPIC, key)[1] % SHARDS != home)
    columns = {"properties": [("scheduleKey", key)], **columns}
    return batches([(ledger, entry, -1, 1, DUE)], topic=TOPIC, schedule_key=key, **columns)


def first_ticks(found: PreparedState, rows: pa.Table) -> list[Effects]:
    """Begins all shards with a prepared state, and gives each the messages that are its own."""
    effects = []
    for number, (values, tables) in enumerate(found.inputs(SHARDS)):
        rebuilt: Rebuilt = InputKind.REBUILT.body.read(InputKind.REBUILT.body.pack(values))
        own = {kind: dict(kind.routing(rows, SHARDS)) for kind in (InputKind.MESSAGES, InputKind.NOTES)}
        tick_input = TickInput(
            rebuilt=replace(rebuilt, **fields_of(Rebuilt, tables)),
            messages=own[InputKind.MESSAGES].get(number, MESSAGES.empty_table()),
            elsewhere=own[InputKind.NOTES].get(number, MESSAGES.empty_table()).select(ENTRY_LOG_ROWS.names),
        )
        shard = Shard(MemoryStore(), {TOPIC: ["a", "b"]}, 1_000_000, shard_id=ShardId(number, SHARDS))
        effects.append(shard.apply(tick_at(1, DUE), tick_input))
    return effects


@pytest.mark.slow
def test_what_comes_again_with_the_first_keys_of_a_topic_is_known_in_their_shards(tmp_path: Path) -> None:
    made, tables = make(tmp_path)
    made = made.model_copy(update={"tracker": made.tracker.model_copy(update={"shards": SHARDS})})

    def for_both(entry: int, ledger: int = 2, **row: Any) -> list[dict[str, object]]:
        at = {"ledger_id": ledger, "entry_id": entry}
        return [{**at, "subscription": name, "deliver_at": DUE, **row} for name in "ab"]

    def answered(entry: int, result: str, **row: Any) -> list[dict[str, object]]:
        return for_both(entry, result=result, request_id=f"r{entry}", sequence=1 << 32, **row)

    recurs: dict[str, Any] = {"properties": [("scheduleKey", "k"), ("repeat", "@every 1h")], "occurrence": 1}
    again = concat(
        [
            of_another_shard(10),
            of_another_shard(11),
            of_another_shard(12),
            of_another_shard(13),
            of_another_shard(14, **recurs),
            of_another_shard(15, reason="replicated from west"),
            of_another_shard(0, ledger=3),
        ]
    )
    new = of_another_shard(16)
    durable = [{"ledger_id": ledger, "entry_id": entry} for ledger in (1, 2) for entry in range(10)]
    delivered = [*for_both(10), *for_both(0, ledger=3), *for_both(14, occurrence=1, occurrence_at=DUE, sent_at=DUE)]
    skips = [*answered(11, "APPLIED", operation="SKIP"), *answered(3, "APPLIED", operation="SKIP", ledger=1)]
    moves = answered(12, "APPLIED", operation="RESCHEDULE") + answered(13, "WAITING", operation="SKIP")
    moves = [{**row, "deliver_at": DUE + HOUR} for row in moves]
    waits = {"ledger_id": 1, "entry_id": 3, "operation": "DELAY", "deliver_at": DUE}
    rejected = [{"ledger_id": 2, "entry_id": 15, "position": "2:15:-1:-1", "reason": "replicated from west"}]
    tables.append("entries", rows("entries", durable), {"job": 1})
    tables.append("delayed_index", rows("delayed_index", [waits]), {"job": 1})
    tables.append("deliveries", rows("deliveries", delivered), {"job": 1})
    tables.append("outcomes", rows("outcomes", skips + moves), {"job": 1})
    tables.append("rejects", rows("rejects", rejected), {"job": 1})
    with without_destinations():
        rebuild(made, tables, tmp_path / "checkpoint", now=NOW)

    found = PreparedState(tmp_path / "checkpoint")
    assert found.offset is not None
    assert found.offset.keyed == []
    effects = first_ticks(found, concat([again, new]))
    assert [row for one in effects for row in handed_out(one)] == [(16, 3)]
    assert [one.rejects.num_rows for one in effects] == [0] * SHARDS
    applied = [row for one in effects for row in one.outcomes.to_pylist() if row["operation"] == "SKIP"]
    assert [(row["entry_id"], row["result"]) for row in applied] == [(13, Result.APPLIED)] * 2
    # What is durable has no key: the home of its entry alone knows it.
    skipped = [tables[InputKind.REBUILT_CANCELLED]["entry_id"].to_pylist() for _, tables in found.inputs(SHARDS)]
    home = int(shard_of(np.array([1]), np.array([3]), SHARDS)[0])
    assert [3 in entries for entries in skipped] == [number == home for number in range(SHARDS)]
    assert all(11 in entries for entries in skipped)


def keyed(entry: int, due: int, published: int, key: str = "k", **properties: str) -> pa.Table:
    of_message = {"scheduleKey": key, **properties}
    return batches(
        [(1, entry, -1, 1, due)],
        publish_time=published,
        properties=list(of_message.items()),
        schedule_key=key,
        occurrence=1 if "repeat" in properties else None,
    )


def run(service: Service, seconds: int) -> None:
    for n in range(seconds):
        service.step(seals=n % 4 == 0)
        service.arrive([True], True)


def entries(service: Service, name: str) -> list[int]:
    return [entry for entry, _ in service.arrived[name]]


@pytest.mark.slow
@pytest.mark.parametrize("idle_seconds", [4, 13])
@pytest.mark.parametrize("bits", [(0, 1), (0,)])
def test_a_moved_message_is_replaced_after_a_lost_checkpoint_and_a_rest(
    tmp_path: Path, bits: tuple[int, ...], idle_seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_keys, "GROUP_MILLIS", 700)
    service = Service(tmp_path, 0)
    service.step(concat([keyed(0, START + 90 * SECOND, START, "far"), keyed(1, START + 20 * SECOND, START, "near")]))
    run(service, 5)
    for entry in (0, 1):
        assert service.order(RESCHEDULE, entry, bits, START + 80 * SECOND) == [Result.APPLIED] * len(bits)
    run(service, 5)
    service.lose_checkpoint()
    run(service, idle_seconds)
    newer = [keyed(n, service.now + 20 * SECOND, service.now, key) for n, key in ((2, "far"), (3, "near"))]
    service.step(concat(newer))
    run(service, 100)
    # What was due for one before the newer one came has been delivered.
    had_it = {name: idle_seconds == 13 and bit not in bits for bit, name in enumerate("ab")}
    for name in "ab":
        assert entries(service, name) == [1, 2, 3] if had_it[name] else [2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("is_held", [True, False])
def test_a_held_or_a_recurring_message_is_replaced_after_a_lost_checkpoint_and_a_rest(
    tmp_path: Path, is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_keys, "GROUP_MILLIS", 700)
    service = Service(tmp_path, 0)
    service.step()
    if is_held:
        service.pause(3, True)
        service.step(keyed(0, START + 10 * SECOND, START))
    else:
        service.step(keyed(0, START + 10 * SECOND, START, repeat="@every 30s", deliverAt=str(START + 10 * SECOND)))
    run(service, 15)
    service.lose_checkpoint()
    run(service, 13)
    service.step(keyed(1, service.now + 20 * SECOND, service.now))
    if is_held:
        service.pause(3, False)
    run(service, 60)
    for name in "ab":
        assert entries(service, name) == ([1] if is_held else [0, 1])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["replace", "keep", "debounce"])
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_message_that_comes_again_does_not_take_its_own_place(tmp_path: Path, mode: str, is_replaced: bool) -> None:
    service = Service(tmp_path, 0)
    rule = {"scheduleMode": mode, "debounceMax": "20s"}
    service.step(keyed(0, START + 20 * SECOND, START, **rule))
    assert service.order(RESCHEDULE, 0, (0,), START + 30 * SECOND) == [Result.APPLIED]
    service.step(seals=True)
    assert service.source
    service.lose_checkpoint()
    run(service, 6)
    if is_replaced:
        service.step(keyed(1, service.now + 20 * SECOND, service.now))
    run(service, 40)
    for name in "ab":
        assert entries(service, name) == [int(is_replaced)]


@pytest.mark.slow
def test_an_older_message_that_comes_again_does_not_take_the_place_of_a_newer_one(tmp_path: Path) -> None:
    service = Service(tmp_path, 0)
    service.step(keyed(0, START - SECOND, START - 2 * SECOND))  # on its way when the job ends
    service.step(keyed(1, START + 40 * SECOND, START))
    assert service.order(RESCHEDULE, 1, (0,), START + 30 * SECOND) == [Result.APPLIED]
    service.step(seals=True)
    assert len(service.source) == 2
    service.lose_checkpoint()
    run(service, 60)
    for name in "ab":
        assert entries(service, name) == [0, 1]


@pytest.mark.slow
def test_a_debounced_key_goes_on_over_several_batches_after_a_lost_checkpoint(tmp_path: Path) -> None:
    service = Service(tmp_path)
    for entry in range(3):
        published = START + (entry - 2) * 10 * SECOND
        service.step(keyed(entry, published + 60 * SECOND, published, scheduleMode="debounce", debounceMax="30s"))
    last = service.source.pop()
    service.lose_checkpoint()
    service.step()
    service.step(last)
    run(service, 15)
    # At the latest 30 s after the first one was published.
    assert service.now < START + 25 * SECOND
    for name in "ab":
        assert entries(service, name) == [2]


@pytest.mark.slow
@pytest.mark.parametrize("is_durable", [True, False])
@pytest.mark.parametrize("key_idle_millis", [0, 600_000])
def test_what_is_paused_by_its_key_stays_so_after_a_lost_checkpoint_until_its_key_resumes_it(
    tmp_path: Path, is_durable: bool, key_idle_millis: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_keys, "GROUP_MILLIS", 700)
    service = Service(tmp_path, key_idle_millis)

    def told(request: str, kind: str) -> list[int]:
        order = command(request, -1, -1, (0, 1), kind=kind) | {"schedule_key": "k"}
        results: list[int] = service.step(order=order).outcomes["result"].to_pylist()
        return results

    start = START + 3 * SECOND
    service.step(keyed(0, start, START, repeat="@every 20s", deliverAt=str(start), misfire="all"))
    for _ in range(6):
        service.step(seals=is_durable)
        service.arrive([True], True)
    assert told("p", PAUSE_SCHEDULE) == [Result.APPLIED] * 2
    for n in range(2):
        service.lose_checkpoint()
        run(service, 13)
        assert told(f"p{n}", PAUSE_SCHEDULE) == [Result.ALREADY_APPLIED] * 2
    assert entries(service, "a") == entries(service, "b") == [0]
    assert told("r", RESUME_SCHEDULE) == [Result.APPLIED] * 2
    service.lose_checkpoint()
    run(service, 20)
    for name in "ab":
        assert service.numbers(name, 0) == [1, 2, 3, 4]
