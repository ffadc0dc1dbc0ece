"""What fails for one message or command, with whatever error, fails for it alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from tests.support.tracker.messages import TOPIC, command, commands, handed_out, messages, tick_at
from tracker import tick_failures
from tracker.commands.apply import Executor
from tracker.commands.outcomes import NOT_DELIVERED
from tracker.dispatching import Dispatcher
from tracker.expiry import Expiring
from tracker.keys.superseding import Superseding
from tracker.message_state.parking import Parking
from tracker.message_state.state import MessageState
from tracker.schemas import KNOWN, PauseChange
from tracker.shard import Shard
from tracker.store import MemoryStore, StateLostError, Store
from tracker.tick import Effects, TickInput
from tracker.tick_failures import BufferedStore, TickFailedError, apply_without_failing_rows
from tracker.wire.delaylake_pb2 import Result

NAMES = {TOPIC: ["a", "b"]}
BAD = 3
ERRORS = [IndexError("x"), KeyError("x"), RecursionError(), AssertionError("two\nlines"), ZeroDivisionError()]


def shard_on(store: Store) -> Shard:
    return Shard(store, NAMES, 1_000_000, 1_000)


class Job:
    """A shard whose ticks are contained; each is applied a second time to the same state, as in a replay."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.tick = 0

    def step(self, cutoff: int, **given: Any) -> Effects:
        self.tick += 1
        tick = tick_at(self.tick, cutoff, load_horizon=cutoff + 100_000, near_until=cutoff + 50_000)
        copy = MemoryStore()
        copy.values = dict(self.store.values)
        effects = apply_without_failing_rows(self.store, shard_on, tick, TickInput(**given))
        again = apply_without_failing_rows(copy, shard_on, tick, TickInput(**given))
        assert copy.values == self.store.values
        assert again.rejects.equals(effects.rejects)
        for one, other in zip(again.releases, effects.releases, strict=True):
            assert one.rows.equals(other.rows)
        return effects


def plant(
    monkeypatch: pytest.MonkeyPatch, where: type, name: str, fails: Callable[..., bool], error: Exception
) -> None:
    work = getattr(where, name)

    def raises(self: Any, *args: Any, **named: Any) -> Any:
        if fails(*args, **named):
            raise error
        return work(self, *args, **named)

    monkeypatch.setattr(where, name, raises)


def has_bad(rows: pa.Table, *_: Any, **__: Any) -> bool:
    """Whether the message is among rows that are not rejected."""
    return any(row["entry_id"] == BAD and row.get("reason") is None for row in rows.to_pylist())


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("n", [1, 2, 9])
def test_a_message_that_fails_as_it_comes_in_is_rejected_and_the_others_are_taken(
    n: int, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, MessageState, "count_unwanted_new", has_bad, error)
    job, first = Job(), max(0, BAD - n // 2)
    came = messages([(1, first + i, 20) for i in range(n)], payload=b"x", payload_at="1-a:0:70000:1")
    effects = job.step(10, messages=came)
    [reject] = effects.rejects.to_pylist()
    assert (reject["entry_id"], reject["payload"], reject["payload_at"]) == (BAD, b"x", "1-a:0:70000:1")
    assert reject["reason"].startswith(f"it fails with {type(error).__name__}: ")
    assert "\n" not in reject["reason"]
    assert effects.failures == [(TOPIC, f"1:{BAD}:-1:-1", reject["reason"])]
    assert handed_out(effects) == [(BAD, 0)], "to the rejects topic"
    others = [(first + i, 0b11) for i in range(n) if first + i != BAD]
    assert handed_out(job.step(20)) == others
    assert job.step(30).rejects.num_rows == 0


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_message_that_fails_as_it_comes_due_is_rejected_and_its_neighbours_go_out(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job()
    job.step(10, messages=messages([(1, i, 20) for i in range(6)]))
    plant(monkeypatch, Parking, "choose_subscriptions", has_bad, error)
    effects = job.step(20, messages=messages([(1, 9, 15)]))
    assert [one for one in handed_out(effects) if one[1]] == [(9, 3), *((i, 0b11) for i in range(6) if i != BAD)]
    reasons = [row["reason"] for row in effects.rejects.to_pylist()]
    assert [reason.split(" it fails")[0] for reason in reasons] == [f"{NOT_DELIVERED}{name}:" for name in "ab"]
    cancelled = effects.outcomes.to_pylist()
    assert [(row["entry_id"], row["subscription"], row["operation"]) for row in cancelled] == [
        (BAD, name, "CANCEL") for name in "ab"
    ]
    assert effects.failures[0][:2] == (TOPIC, f"1:{BAD}:-1:-1")
    assert handed_out(job.step(30)) == []


def test_a_row_of_the_tables_that_fails_is_rejected_and_the_others_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, Parking, "choose_subscriptions", has_bad, IndexError())
    job = Job()
    job.step(10)
    effects = job.step(20, segment=messages([(1, i, 20) for i in range(6)]))
    assert [one for one in handed_out(effects) if one[1]] == [(i, 0b11) for i in range(6) if i != BAD]
    assert effects.rejects["entry_id"].to_pylist() == [BAD, BAD]


def test_a_parked_message_that_fails_as_it_expires_stays_parked_and_the_others_expire(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job()
    paused = {"pause_changes": [PauseChange("p", TOPIC, 0b11, True)], "request_ids": {"p": 1}}
    job.step(10, messages=messages([(1, i, 20) for i in range(6)], expires_at=50), **paused)
    job.step(20)
    plant(monkeypatch, Expiring, "expire_parked", has_bad, IndexError())
    effects = job.step(60)
    gone = [(row["entry_id"], row["subscription"]) for row in effects.outcomes.to_pylist()]
    assert sorted(gone) == [(i, name) for i in range(6) if i != BAD for name in "ab"]
    assert [name for _, name, _ in effects.failures] == [f"1:{BAD}:-1:-1"]
    assert job.step(70).outcomes.num_rows == 0


def has_entry(number: int) -> Callable[..., bool]:
    return lambda rows, *_, **__: any(
        row["entry_id"] == number and row.get("reason") is None for row in rows.to_pylist()
    )


def test_rows_that_fail_before_and_after_the_due_rows_are_taken_are_both_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job()
    job.step(10, messages=messages([(1, i, 20) for i in range(6)]))
    plant(monkeypatch, MessageState, "count_unwanted_new", has_entry(11), KeyError("as it comes in"))
    plant(monkeypatch, Parking, "choose_subscriptions", has_entry(BAD), IndexError("as it comes due"))
    effects = job.step(20, messages=messages([(1, i, 30) for i in range(10, 14)]))
    assert set(effects.rejects["entry_id"].to_pylist()) == {BAD, 11}
    whys = {failed[1]: failed[2] for failed in effects.failures}
    as_it_comes_in, as_it_comes_due = (
        "it fails with KeyError: 'as it comes in'",
        "it fails with IndexError: as it comes due",
    )
    assert whys == {f"1:{BAD}:-1:-1": as_it_comes_due, "1:11:-1:-1": as_it_comes_in}
    reasons = {row["entry_id"]: row["reason"] for row in effects.rejects.to_pylist()}
    assert reasons == {BAD: f"{NOT_DELIVERED}b: {as_it_comes_due}", 11: as_it_comes_in}
    assert [one for one in handed_out(effects) if one[1]] == [(i, 0b11) for i in range(6) if i != BAD]
    assert handed_out(job.step(30)) == [(i, 0b11) for i in range(10, 14) if i != 11]


def test_due_rows_that_fail_at_two_stages_are_both_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    job.step(10, messages=messages([(1, i, 20) for i in range(6)]))
    plant(monkeypatch, Parking, "choose_subscriptions", has_entry(BAD), IndexError())
    # What comes in due already is looked at before what was planned.
    plant(
        monkeypatch, Dispatcher, "dispatch_due", lambda step, kind, rows: kind == 0 and has_entry(11)(rows), KeyError()
    )
    effects = job.step(20, messages=messages([(1, i, 15) for i in range(10, 13)]))
    assert set(effects.rejects["entry_id"].to_pylist()) == {BAD, 11}
    others = [*((i, 3) for i in (10, 12)), *((i, 3) for i in range(6) if i != BAD)]
    assert [one for one in handed_out(effects) if one[1]] == others


def test_a_command_that_fails_is_invalid_and_the_others_are_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    rows = messages([(1, i, 50) for i in range(6)])
    job.step(10, messages=rows)
    plant(
        monkeypatch,
        Executor,
        "apply_commands",
        lambda commands, *_, **__: (
            "bad" in commands["request_id"].to_pylist()
            and any(row["request_id"] == "bad" and row["kind"] != "answer" for row in commands.to_pylist())
        ),
        KeyError(),
    )
    given = commands([command("bad" if i == BAD else f"r{i}", 1, i) for i in range(6)])
    ids = dict.fromkeys(given["request_id"].to_pylist(), 1)
    effects = job.step(20, commands=given, request_ids=ids, known_messages=rows.select(KNOWN.names))
    results = {row["request_id"]: row["result"] for row in effects.outcomes.to_pylist()}
    expected = {f"r{i}": int(Result.APPLIED) for i in range(6) if i != BAD}
    assert results == expected | {"bad": int(Result.INVALID)}
    assert handed_out(job.step(50)) == [(i, 0b11 if i == BAD else 0b10) for i in range(6)]


def test_after_many_tries_all_that_may_be_the_cause_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, MessageState, "count_unwanted_new", lambda rows, *_: rows.num_rows > 0, IndexError())
    monkeypatch.setattr(tick_failures, "MOST_TRIES", 10)
    effects = Job().step(10, messages=messages([(1, i, 20) for i in range(1_000)]))
    assert effects.rejects.num_rows == 1_000


def test_a_state_that_is_damaged_is_told_with_the_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, Superseding, "begin_tick", lambda *_, **__: True, IndexError("no\nsuch"))
    with pytest.raises(TickFailedError) as error:
        Job().step(10, messages=messages([(1, 1, 20)]))
    assert str(error.value) == (
        "tick 1 of a shard fails with IndexError: no such, and no message or command in it is the cause: "
        "`delaylake rebuild` makes the state anew"
    )


def test_a_state_that_can_not_be_read_is_told_with_the_repair() -> None:
    store = MemoryStore()
    store.values["in_flight_list", (0, 0)] = b"{"
    with pytest.raises(TickFailedError, match=r"JSONDecodeError.*delaylake rebuild"):
        apply_without_failing_rows(store, shard_on, tick_at(1, 10), TickInput(messages=messages([(1, 1, 20)])))


class StrictStore(MemoryStore):
    def remove(self, table: str, key: tuple[int, int]) -> None:
        del self.values[table, key]


def test_a_buffered_store_changes_the_store_as_if_it_were_not_there() -> None:
    store = StrictStore()
    store.put("t", (0, 1), b"there")
    store.put("t", (0, 2), b"there")
    buffered = BufferedStore(store)
    buffered.put("t", (0, 0), b"new")
    buffered.remove("t", (0, 0))
    buffered.put("t", (0, 1), b"changed")
    buffered.remove("t", (0, 1))
    buffered.remove("t", (0, 2))
    buffered.put("t", (0, 3), b"new")
    assert [buffered.get("t", (0, i)) for i in range(4)] == [None, None, None, b"new"]
    assert len(store.values) == 2
    buffered.flush()
    assert store.values == {("t", (0, 3)): b"new"}


class LostStore(MemoryStore):
    error: Exception = OSError("the connection is lost")

    def get(self, table: str, key: tuple[int, int]) -> bytes | None:
        if table == "in_flight_list":
            raise self.error
        return super().get(table, key)


@pytest.mark.parametrize("error", [OSError("x"), StateLostError("x"), KeyError("of the store")], ids=repr)
def test_what_the_store_raises_is_no_row_s_fault(error: Exception) -> None:
    store = LostStore()
    store.error = error
    with pytest.raises(type(error)):
        apply_without_failing_rows(store, shard_on, tick_at(1, 10), TickInput(messages=messages([(1, 1, 20)])))
    assert store.values == {}


def test_what_a_look_up_in_the_tables_raises_is_no_row_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> pa.Table:
        raise KeyError("a table")

    given = TickInput(
        messages=messages([(1, 1, 20)], schedule_key="k", properties=[("scheduleKey", "k")]), find_keyed=fails
    )
    plant(monkeypatch, Superseding, "begin_tick", lambda find, *_: bool(find([], [])), AssertionError())
    with pytest.raises(KeyError, match="a table"):
        apply_without_failing_rows(MemoryStore(), shard_on, tick_at(1, 10), given)
