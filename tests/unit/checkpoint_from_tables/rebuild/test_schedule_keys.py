"""A rebuild finds the schedule keys whose message waits, and gives each shard its own."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pyarrow as pa
import pytest

from checkpoint_from_tables.rebuild.rebuild import rebuild
from streaming.batch_schema import InputKind
from streaming.checkpoint.prepared import PreparedState
from tests.support.service.one_shard import NOW as START
from tests.support.service.one_shard import SECOND, Service
from tests.support.tracker.messages import batches, command
from tests.support.warehouse.tables import HOUR, NOW, TOPIC, make, rows
from tracker.commands.kinds import PAUSE_SCHEDULE, RESCHEDULE, RESUME_SCHEDULE
from tracker.due_time import MAX_TIME_MILLIS
from tracker.keys import cold_keys
from tracker.messages import concat
from tracker.properties import key_hash
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
