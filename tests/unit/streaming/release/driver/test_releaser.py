"""The releaser: what another run takes over, what the client refuses, and in which order jobs are sent."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from status.alerts import INTERNAL_ERROR
from tests.support.service.fake_releaser import SENDING, Job, Tables, batch
from tests.support.service.harness import now, wait_until
from tests.support.tracker.messages import TOPIC, messages, release_rows
from tracker.commands.outcomes import NOT_DELIVERED, NOT_TAKEN
from tracker.in_flight import IN_ORDER, PLANNED
from tracker.messages import concat, with_columns
from tracker.packing import pack
from warehouse.delta import tables as warehouse
from warehouse.schemas import DELIVERIES

pytestmark = pytest.mark.slow


def test_another_run_goes_on_with_what_was_open_and_sends_nothing_twice(make: Callable[..., Job]) -> None:
    job = make()
    job.broken["a"] = "TopicTerminated"
    job.submit(1, [1])
    job.submit(2, [2])
    wait_until(lambda: job.open("a") == [1, 2], 5, "they are open")
    job.submit(3)
    job.has_confirmed(3)
    recorded = job.feedback.last.unwritable
    job.releaser.stop()

    again = make(job.tables)
    assert again.feedback.last.unwritable is None
    again.broken["a"] = "TopicTerminated"
    # Of release 1 only what is open is left; of 2 nothing was forgotten yet.
    again.submit(4, [1, 2], unwritable=recorded, masks={1: 1})
    assert again.open("a") == [1, 2]
    rows = [(1, "b", 1), (2, "b", 2)]
    assert sorted(again.tables.delivered) == rows
    again.broken.clear()
    wait_until(lambda: again.open("a") is None, 10, "it can be written")
    rows += [(1, "a", 1), (2, "a", 2)]
    assert sorted(again.tables.delivered) == sorted(rows)
    again.has_confirmed(4)

    # Written down, but no offset says so yet.
    third = make(job.tables)
    third.submit(5, [1, 2], unwritable=recorded, masks={1: 1})
    wait_until(lambda: third.open("a") is None, 10, "it can be written")
    third.has_confirmed(5)
    assert sorted(third.tables.delivered) == sorted(rows)


def test_what_had_arrived_of_an_open_release_before_a_crash_is_not_written_down_again(make: Callable[..., Job]) -> None:
    tables = Tables()
    arrived = [{"topic": TOPIC, "subscription": "a", "ledger_id": 1, "entry_id": 1, "batch_index": -1, "batch_id": 1}]
    tables.append("deliveries", pa.Table.from_pylist(arrived, schema=DELIVERIES), {"app:lane": 1})
    job = make(tables)
    open_releases = {TOPIC: {"a": {"since": 1, "open": [[1, 1], [2, 1]]}}}
    job.submit(3, [1, 2], unwritable=open_releases, masks={1: 1, 2: 1})
    wait_until(lambda: job.open("a") is None, 10, "it can be written")
    assert sorted(tables.delivered) == [(1, "a", 1), (2, "a", 2)]


@pytest.mark.parametrize("names", [["rejects"], ["rejects", "outcomes"]])
def test_what_was_refused_of_an_open_release_before_a_crash_is_not_written_down_again(
    make: Callable[..., Job], tmp_path: Path, names: list[str]
) -> None:
    """The run before was killed when it had written down what the client refused, with or without the outcomes."""
    made = [warehouse.Tables(str(tmp_path / name)) for name in ("before", "after")]
    for tables in made:
        tables.create()
        tables.take_over(1)
    job = make(made[0])
    job.refused["a"] = f"{NOT_DELIVERED}a{NOT_TAKEN}MessageTooBig"
    job.submit(1, [1], masks={1: 1})
    job.has_confirmed(1)
    job.releaser.stop()
    for name in names:
        made[1].append(name, made[0].query(name, f"SELECT * FROM {name}"), {})

    again = make(made[1])
    again.refused |= job.refused
    open_releases = {TOPIC: {"a": {"since": 1, "open": [[1, 1], [2, 1]]}}}
    again.submit(3, [1, 2], unwritable=open_releases, masks={1: 1, 2: 1})
    wait_until(lambda: again.open("a") is None, 10, "it can be written")
    for name in ("rejects", "outcomes"):
        written = made[1].query(name, f"SELECT batch_id, entry_id FROM {name} ORDER BY batch_id").to_pylist()
        assert [(row["batch_id"], row["entry_id"]) for row in written] == [(1, 1), (2, 2)], name


def test_an_older_release_that_is_open_only_later_is_not_taken_for_the_newer_one_that_was_written_down(
    make: Callable[..., Job],
) -> None:
    """The run before was killed when the older one of a lane had arrived, and was not written down yet."""
    job = make()
    job.slow.add(1)
    job.submit(4, [1, 3], unwritable={TOPIC: {"a": {"since": 1, "open": [[3, 1]]}}})
    wait_until(lambda: job.open("a") == [1, 3], 10, "the older one is open, too")
    job.submit(5)
    wait_until(lambda: job.open("a") is None, 10, "it can be written")
    job.has_confirmed(5)
    assert [tick for tick, name, _ in job.tables.delivered if name == "a"] == [1, 3]
    assert sorted(tick for tick, name, _ in job.tables.delivered if name == "b") == [1, 3]


def test_what_the_client_does_not_take_is_rejected_and_cancelled_before_the_rest_counts_as_delivered(
    make: Callable[..., Job],
) -> None:
    """Else a crash in between would leave it pending for ever."""
    job = make()
    job.refused["a"] = "not delivered to a: MessageTooBig"
    job.submit(1, [1])
    job.has_confirmed(1)
    assert [name for name, _ in job.tables.appended] == ["rejects", "outcomes", "deliveries"]
    rejects, outcomes = (rows.to_pylist()[0] for _, rows in job.tables.appended[:2])
    assert (rejects["position"], rejects["reason"]) == ("1:1:-1:-1", "not delivered to a: MessageTooBig")
    told = {name: outcomes[name] for name in ("subscription", "position", "operation", "result", "issued_by")}
    assert told == {
        "subscription": "a",
        "position": "1:1:-1:-1",
        "operation": "CANCEL",
        "result": "APPLIED",
        "issued_by": "delaylake",
    }
    assert job.tables.delivered == [(1, "b", 1)]

    # The same where it is sent only when its destination is there again.
    job.broken["a"] = "TopicTerminated"
    job.submit(2, [2])
    wait_until(lambda: job.open("a") == [2], 5, "it is open")
    job.submit(3)
    job.broken.clear()
    wait_until(lambda: job.open("a") is None, 10, "it can be written")
    assert [name for name, _ in job.tables.appended[3:]] == ["deliveries", "rejects", "outcomes"]


def test_another_run_goes_on_rejecting(make: Callable[..., Job]) -> None:
    job = make(unwritable="reject", unwritable_after_millis=3_600_000)
    job.broken["a"] = "TopicTerminated"
    recorded = {TOPIC: {"a": {"since": 1, "open": [[1, 1]], "rejects": "gone"}}}
    job.submit(7, [1], unwritable=recorded, masks={1: 2})
    wait_until(lambda: job.open("a") == [], 5, "nothing is open any more")
    assert job.feedback.last.unwritable == {TOPIC: {"a": {"since": 1, "open": [], "rejects": "gone"}}}


def test_another_run_that_is_told_to_wait_rejects_no_longer(make: Callable[..., Job]) -> None:
    job = make(unwritable="wait")
    job.broken["a"] = "TopicTerminated"
    job.submit(7, unwritable={TOPIC: {"a": {"since": 1, "open": [], "rejects": "gone"}}})
    assert job.feedback.last.unwritable == {TOPIC: {"a": {"since": 1, "open": []}}}


def test_what_waits_in_a_lane_since_the_clock_was_ahead_is_in_flight_when_it_comes_near(
    make: Callable[..., Job],
) -> None:
    """Else nothing would be taken in until it is sent, for as long as the clock was set back."""
    job = make(lookahead_millis=600, max_lookahead_millis=2_000)
    step, n = 200, 3_600
    rows = release_rows(messages([(1, i, 0) for i in range(n)]), 3, SENDING)  # takes its time on a slow machine
    began = now() + 4_000
    body = pack(with_columns(rows, deliver_at=pa.array([began + i * step for i in range(n)])))
    job.releaser.submit(batch(1, [(0, 1, True, body)]))
    assert job.feedback.last.in_flight == 0
    job.submit(2, [2])
    wait_until(lambda: 2 in {tick for tick, *_ in job.tables.delivered}, 5, "another lane's release")
    # Without another batch, and no more of it than comes near.
    job.is_stuck.set()
    wait_until(lambda: job.feedback.last.in_flight, 10, "it comes near")
    assert job.feedback.last.in_flight <= 1 + (now() + 2_000 - began) / step
    assert job.feedback.last.confirmed == 0


@pytest.mark.parametrize(("key", "due", "order"), [("k", 5, [1, 2]), ("k", 4, [2, 1]), ("other", 5, [2, 1])])
def test_what_comes_in_order_begins_when_what_comes_before_it_of_its_keys_has_arrived(
    make: Callable[..., Job], key: str, due: int, order: list[int]
) -> None:
    """What is due before that, or has other keys, need not wait."""
    job = make()
    job.slow = {1}
    for tick, of_tick, at in ((1, "k", 5), (2, key, due)):
        rows = concat([messages([(1, 10 * tick + i, at)], key=name) for i, name in enumerate((of_tick, f"k{tick}"))])
        job.releaser.submit(batch(tick, [(0, tick, IN_ORDER | PLANNED, pack(release_rows(rows, 3, SENDING)))]))
    job.has_confirmed(2)
    assert [tick for tick, _ in job.attempts] == order


@pytest.mark.parametrize(("was_due", "tasks"), [(None, 2), (7, 1)])
def test_what_was_held_back_is_sent_by_one_task_for_all_shards_however_much_it_is(
    make: Callable[..., Job], was_due: int | None, tasks: int
) -> None:
    """Tasks side by side, or one after the other, would mix up the order in which it was due."""
    job = make()
    rows = with_columns(messages([(1, i, 1) for i in range(3_000)]), was_due=pa.array([was_due] * 3_000, pa.int64()))
    body = pack(release_rows(rows, 3, SENDING))
    job.releaser.submit(batch(1, [(shard, 1, False, body) for shard in range(2)]))
    job.has_confirmed(1)
    assert job.spark.tasks == [tasks]


def test_nobody_keeps_a_release_that_is_written_because_its_files_stay_as_long_as_it_does(
    make: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make()
    made: list[weakref.ref[Any]] = []
    make_release = job.releaser._files.lane_release

    def noted(*arguments: Any) -> Any:
        release = make_release(*arguments)
        made.append(weakref.ref(release))
        return release

    monkeypatch.setattr(job.releaser._files, "lane_release", noted)
    job.submit(1, [1])
    job.submit(2, [2])
    job.has_confirmed(2)

    def are_gone() -> bool:
        gc.collect()
        return len(made) == 2 and not any(one() for one in made)

    wait_until(are_gone, 10, "they are gone")


def test_what_fails_in_spark_is_told_of_until_it_is_sent(
    make: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, works = make(), threading.Event()
    parallelize = job.spark.parallelize

    def fails(items: Any, tasks: int) -> Any:
        if not works.is_set():
            raise RuntimeError("Py4JJavaError: ...\nTypeError: a bug\n\tat org.apache.spark")
        return parallelize(items, tasks)

    monkeypatch.setattr(job.spark, "parallelize", fails)
    job.submit(1, [1])
    [alert] = wait_until(lambda: [one for one in job.troubles.current() if one.count > 1], 10, "it is told of")
    assert (alert.kind, alert.name) == (INTERNAL_ERROR, "sending what comes due in lane planned1")
    assert alert.text.startswith("TypeError: a bug (2 times)")
    works.set()
    wait_until(lambda: not job.troubles.current(), 10, "it is over")
    job.has_confirmed(1)


def test_what_fails_when_a_destination_is_looked_after_is_told_of_until_it_is_writable(
    make: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, works = make(), threading.Event()
    next_step = job.releaser._destinations.next_step

    def fails(recipient: Any, now: Any) -> Any:
        if not works.is_set():
            raise TypeError("a bug")
        return next_step(recipient, now)

    monkeypatch.setattr(job.releaser._destinations, "next_step", fails)
    job.broken["a"] = "TopicTerminated"
    job.submit(1, [1])
    told = INTERNAL_ERROR, f"looking after the destination of a of {TOPIC}"

    def is_told() -> bool:
        return told in [(alert.kind, alert.name) for alert in job.troubles.current()]

    wait_until(is_told, 10, "it is told of")
    works.set()
    job.broken.clear()
    wait_until(lambda: not is_told(), 10, "it is over")
    job.submit(2)
    wait_until(lambda: job.open("a") is None, 10, "it can be written")
    job.has_confirmed(2)
