"""The releaser while a destination can't be written: the others go on, and it gets its own in order later."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from conf.settings import Settings
from conf.times import Moment
from streaming.release.driver import lane_release, unwritable_destinations
from streaming.release.driver.transitions import DestinationState, RemainderState
from streaming.release.driver.unwritable_destinations import UnwritableDestination
from streaming.release.feedback import Feedback
from streaming.release.sequence_ids import last_sequence_id, tick_of
from tests.support.service.fake_releaser import NAMES, PASSED, SENDING, Job, batch
from tests.support.service.harness import now, wait_until
from tests.support.tracker.messages import TOPIC, messages, release_rows
from tracker.packing import pack
from warehouse.routes.known_routes import known_routes

pytestmark = pytest.mark.slow


def test_one_that_refuses_leaves_the_others_alone_and_gets_its_own_in_order_later(make: Callable[..., Job]) -> None:
    job = make()
    job.broken["a"] = "TopicTerminated"
    for tick in range(1, 6):
        job.submit(tick, [tick])
    wait_until(lambda: job.open("a") == [1, 2, 3, 4, 5], 5, "all are open")
    job.submit(6)
    job.has_confirmed(6)
    assert sorted(job.tables.delivered) == [(tick, "b", tick) for tick in range(1, 6)]
    assert [(t.kind, t.name) for t in job.troubles.current()] == [("unwritable", f"{TOPIC}-a")]
    assert "TopicTerminated" in job.troubles.current()[0].text

    job.broken.clear()
    wait_until(lambda: job.open("a") is None, 10, "it can be written")
    assert [tick for tick, name, _ in job.tables.delivered if name == "a"] == [1, 2, 3, 4, 5]
    assert job.troubles.current() == []
    job.submit(7, [7])
    job.has_confirmed(7)
    assert sorted(name for tick, name, _ in job.tables.delivered if tick == 7) == NAMES


def test_dead_letters_that_can_not_be_written_wait_alone_also_for_another_run(make: Callable[..., Job]) -> None:
    job = make(unwritable="reject", unwritable_after_millis=1)
    job.broken["a dlq"] = "TopicTerminated"
    job.submit(1, [1], attempt=6)
    wait_until(lambda: job.open("a dlq") == [1], 5, "it is open")
    for tick in (2, 3):
        job.submit(tick, [tick], attempt=None if tick == 2 else 6)
    wait_until(lambda: job.open("a dlq") == [1, 3], 5, "they are open")
    job.submit(4)
    job.has_confirmed(4)
    assert sorted(job.tables.delivered) == [(1, "b", 1), (2, "a", 2), (2, "b", 2), (3, "b", 3)]
    assert [(t.kind, t.name) for t in job.troubles.current()] == [("unwritable", f"{TOPIC}-a-dlq")]
    recorded = job.feedback.last.unwritable
    assert recorded is not None
    assert recorded[TOPIC].keys() == {"a dlq"}
    wait_until(lambda: job.known.count(-1) > 3, 10, "it is tried again")
    assert "rejects" not in (job.feedback.last.unwritable or {})[TOPIC]["a dlq"]
    job.releaser.stop()

    again = make(job.tables)
    again.submit(5, [1, 3], unwritable=recorded, masks={1: 1, 3: 1}, attempt=6)
    wait_until(lambda: again.open("a dlq") is None, 10, "it can be written")
    again.has_confirmed(5)
    rows = [(1, "b", 1), (2, "a", 2), (2, "b", 2), (3, "b", 3), (1, "a", 1), (3, "a", 3)]
    assert sorted(again.tables.delivered) == sorted(rows)
    assert again.troubles.current() == []


def test_what_is_open_is_sent_by_when_it_is_due_and_of_each_producer_by_sequence_id(make: Callable[..., Job]) -> None:
    """A tick's short notice is due before, among and after its planned rows, and those of the ticks around."""
    job = make()
    job.broken["a"] = "TopicTerminated"
    chance = random.Random(7)
    for tick in range(1, 7):
        bodies = []
        for is_planned, times in ((False, range(200)), (True, range(50, 150))):
            due = sorted(100 * tick + chance.choice(times) for _ in range(20))
            rows = messages([(tick, 20 * is_planned + i, at) for i, at in enumerate(due)], **PASSED)
            bodies.append((0, tick, is_planned, pack(release_rows(rows, 3, SENDING))))
        job.releaser.submit(batch(tick, bodies, job.feedback.last.unwritable or {}))
    wait_until(lambda: len(job.open("a") or []) == 12, 5, "all are open")
    job.submit(7)
    job.broken.clear()
    wait_until(lambda: job.open("a") is None, 10, "it can be written")
    delivered = [tick for tick, name, _ in job.tables.delivered if name == "a"]
    assert sorted(delivered) == [tick for tick in range(1, 7) for _ in range(40)]
    assert len(job.sent) == 240
    due = [at for at, *_ in job.sent]
    assert due == sorted(due)
    for producer in {producer for _, producer, _ in job.sent}:
        ids = [sequence_id for _, of, sequence_id in job.sent if of == producer]
        assert ids == sorted(ids)


def test_of_very_much_the_oldest_ticks_are_sent_first_and_each_as_a_whole(
    make: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_release, "_ROWS_AT_ONCE", 5)
    job = make()
    job.broken["a"] = "TopicTerminated"
    body = pack(release_rows(messages([(1, i, 1) for i in range(2)], **PASSED), 3, SENDING))
    for tick in range(1, 4):
        both = [(0, tick, is_planned, body) for is_planned in (False, True)]
        job.releaser.submit(batch(tick, both, job.feedback.last.unwritable or {}))
    wait_until(lambda: len(job.open("a") or []) == 6, 5, "all are open")
    job.submit(4)
    job.broken.clear()
    wait_until(lambda: job.open("a") is None, 10, "it can be written")
    assert [tick_of(sequence_id) for *_, sequence_id in job.sent] == [1] * 4 + [2] * 4 + [3] * 4
    written = [rows["subscription"].to_pylist() for name, rows in job.tables.appended if name == "deliveries"]
    assert [len(names) for names in written if "a" in names] == [4, 4, 4]


def test_what_is_sent_together_is_written_down_together_and_what_has_arrived_of_it_is_known(
    make: Callable[..., Job],
) -> None:
    """Else it would come again where the destination's topic is made anew before the rest arrives."""
    job = make()
    job.broken["a"] = "TopicTerminated"
    rows = [release_rows(messages([(1, i, 1)], **PASSED), 3, SENDING) for i in range(2)]
    job.releaser.submit(batch(1, [(0, 1, bool(i), pack(rows[i])) for i in range(2)]))
    wait_until(lambda: len(job.open("a") or []) == 2, 5, "both are open")
    job.is_short_well, job.arrived_to = True, 7
    job.submit(2)
    short, planned = (f"{TOPIC}-a", "short1"), (f"{TOPIC}-a", "planned1")
    wait_until(lambda: job.told[-1] == {short: last_sequence_id(1), planned: 7}, 10, "it is told what has arrived")
    job.has_confirmed(2)
    assert sorted(job.tables.delivered) == [(1, "b", 0), (1, "b", 1)]
    assert job.open("a") == [1, 1]
    job.broken.clear()
    wait_until(lambda: job.open("a") is None, 10, "it can be written")
    assert sorted(job.tables.delivered) == [(1, name, i) for name in NAMES for i in range(2)]
    assert {f"app:{lane}:{TOPIC}:a" for lane in ("short1", "planned1")} <= job.tables.versions.keys()


def test_what_has_arrived_of_a_release_is_told_to_each_further_attempt(make: Callable[..., Job]) -> None:
    job = make()
    job.broken["a"], job.arrived_to = "TopicTerminated", 7
    job.submit(1, [1])
    wait_until(lambda: job.open("a") == [1], 5, "it is open")
    job.submit(2)
    wait_until(lambda: len(job.known) == 2, 5, "it was tried again")
    job.arrived_to = 3  # a producer that is not opened knows of nothing
    wait_until(lambda: len(job.known) == 4, 10, "and again")
    assert job.known == [-1, 7, 7, 7]


def test_one_is_not_there_again_before_all_has_arrived_that_was_handed_out_before_it_was_held_back(
    make: Callable[..., Job],
) -> None:
    """Else what was held back since would overtake it."""
    job = make()
    job.broken["a"] = "TopicTerminated"
    job.submit(1, [1])
    job.submit(2, [2], unwritable={}, due=now() + 4_000)  # nobody sends it for a while
    wait_until(lambda: job.open("a") == [1], 5, "it is open")
    job.submit(3)
    job.broken.clear()
    wait_until(lambda: (1, "a", 1) in job.tables.delivered, 10, "the first has arrived")
    wait_until(lambda: job.open("a") != [], 10, "the second is open, or has arrived")
    job.submit(4)
    wait_until(lambda: job.open("a") is None, 10, "it can be written")
    assert [tick for tick, name, _ in job.tables.delivered if name == "a"] == [1, 2]


def test_a_release_is_confirmed_only_when_an_offset_says_what_is_open_of_it(make: Callable[..., Job]) -> None:
    """Else a crash in between would take the whole of it for delivered."""
    job = make()
    job.broken["a"] = "TopicTerminated"
    job.submit(1, [1])
    wait_until(lambda: job.open("a") == [1], 5, "it is open")
    job.submit(2, [2], unwritable={})
    job.submit(3, [3], unwritable={})
    assert job.feedback.last.confirmed == 0
    assert job.tables.delivered == []
    wait_until(lambda: job.open("a") == [1, 2, 3], 5, "all are open")
    job.submit(4)
    job.has_confirmed(4)


def test_while_the_broker_is_away_all_wait_and_nothing_is_left_open(make: Callable[..., Job]) -> None:
    job = make()
    job.is_silent, job.is_broker_there = True, False
    job.broken |= {"a": "ConnectError", "b": "ConnectError"}
    job.submit(1, [1])
    wait_until(lambda: len(job.attempts) >= 2, 5, "it is tried again")
    assert job.open("a") is None
    del job.broken["b"]
    n = len(job.attempts)
    wait_until(lambda: len(job.attempts) >= n + 2, 10, "the last attempt is over for which it was broken, too")
    job.is_broker_there = True
    wait_until(lambda: job.open("a") == [1], 5, "the broker is there, and the destination is not")
    job.submit(2)
    job.has_confirmed(2)
    assert job.tables.delivered == [(1, "b", 1)]


def test_a_subscription_that_was_taken_out_while_it_could_not_be_written_is_let_go_when_nothing_is_open(
    make: Callable[..., Job],
) -> None:
    """Its destination's name is not the source topic's."""
    both = known_routes(Settings(routes=[{"source": TOPIC, "subscriptions": [{"name": name} for name in NAMES]}]))  # type: ignore[arg-type]
    job = make(names=["b"], routes=both)
    job.broken["a"] = "TopicTerminated"
    recorded = {TOPIC: {"a": {"since": 1, "open": [[1, 1]]}}}
    job.submit(2, [1], unwritable=recorded)
    wait_until(lambda: job.troubles.current(), 5, "it is tried")
    assert {t.name for t in job.troubles.current()} == {f"{TOPIC}-a"}
    job.submit(3, unwritable=recorded)
    job.broken.clear()  # what is open goes nowhere, or where it was to go
    wait_until(lambda: job.open("a") is None, 10, "it is let go")
    assert (job.troubles.current(), job.probed) == ([], [])


def test_what_is_open_for_too_long_is_left_to_the_shards_to_reject_once_an_offset_says_so(
    make: Callable[..., Job],
) -> None:
    job = make(unwritable="reject", unwritable_after_millis=2_500)
    job.broken["a"] = "TopicTerminated"
    job.submit(1, [1])
    wait_until(lambda: job.open("a") == [1], 5, "it is open")
    job.submit(2)

    def rejects() -> str:
        text: str = (job.feedback.last.unwritable or {})[TOPIC]["a"].get("rejects", "")
        return text

    assert not rejects()
    wait_until(rejects, 10, "it is rejected")
    assert rejects() == f"{TOPIC}-a can't be written: TopicTerminated"
    assert "rejected" in job.troubles.current()[0].text
    # The destination is there again, but what is open is on its way to be rejected, as soon as an offset says so.
    recorded = job.feedback.last.unwritable
    job.broken.clear()
    assert job.open("a") == [1]
    job.submit(3, unwritable=recorded)
    wait_until(lambda: job.open("a") is None, 10, "it can be written")
    job.submit(4, [4])
    job.has_confirmed(4)
    assert sorted(job.tables.delivered) == [(1, "b", 1), (4, "a", 4), (4, "b", 4)]


def test_of_what_nothing_was_sent_the_shards_take_back_and_it_is_not_sent_before(make: Callable[..., Job]) -> None:
    job = make()
    job.is_passed = False
    job.broken["a"] = "TopicTerminated"
    job.submit(1, [1])  # somebody may have got some of it
    wait_until(lambda: job.open("a") == [1], 5, "it is open")
    job.submit(2, [2])
    recalled = {"since", "open", "recalled"}
    wait_until(lambda: recalled == (job.feedback.last.unwritable or {})[TOPIC]["a"].keys(), 5, "the next is recalled")
    recorded = job.feedback.last.unwritable
    assert recorded is not None
    assert (recorded[TOPIC]["a"]["open"], recorded[TOPIC]["a"]["recalled"]) == ([[1, 1]], [[2, 1]])
    job.broken.clear()
    wait_until(lambda: (1, "a", 1) in job.tables.delivered, 10, "the first has arrived")
    wait_until(lambda: job.open("a") == [], 5, "and is not open any more")
    job.submit(3, unwritable=recorded)
    wait_until(lambda: job.open("a") is None, 10, "it can be written")
    job.has_confirmed(3)
    assert sorted(job.tables.delivered) == [(1, "a", 1), (1, "b", 1), (2, "b", 2)]


def test_one_that_is_slow_is_found_among_those_that_share_its_connection_and_gets_what_waits_in_rounds(
    make: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unwritable_destinations, "_KEEPS_UP_SECONDS", 0)
    job = make()
    job.throttled.add("a")
    job.submit(1, [1])
    wait_until(lambda: [(t.kind, t.name) for t in job.troubles.current()] == [("slow", f"{TOPIC}-a")], 5, "it is named")
    assert job.apart[:2] == [frozenset(), frozenset("ab")]
    job.submit(2, [2])
    wait_until(lambda: 2 in (job.open("a") or []), 5, "the next one is open, too")
    job.submit(3)
    job.has_confirmed(3)

    def asked() -> int:
        number: int = (job.feedback.last.unwritable or {}).get(TOPIC, {}).get("a", {}).get("round", 0)
        return number

    wait_until(lambda: asked() == 1, 5, "it is asked for more")
    both = [(t, name, t) for t in (1, 2) for name in NAMES]
    wait_until(lambda: sorted(job.tables.delivered) == both, 5, "deliveries are recorded after what follows from them")
    job.is_passed = False  # what was held back before is not held back again
    # As many go out as it took, and others wait: it goes on being slow, and is asked for more.
    job.submit(4, [4], masks={4: 1}, drained={(TOPIC, "a"): (1, True)})
    wait_until(lambda: 4 in (job.open("a") or []), 5, "it is open")
    job.submit(5)
    wait_until(lambda: asked() == 2, 10, "and for more")
    assert {t.kind for t in job.troubles.current()} == {"slow"}
    job.submit(6, [6], masks={6: 1}, drained={(TOPIC, "a"): (1, False)})
    wait_until(lambda: 6 in (job.open("a") or []), 5, "it is open")
    job.submit(7)
    wait_until(lambda: job.open("a") is None, 10, "it keeps up")
    assert [tick for tick, name, _ in job.tables.delivered if name == "a"] == [1, 2, 4, 6]
    assert job.troubles.current() == []
    # Lately slow, it does not share its connection, and has to keep up for longer.
    assert job.releaser._destinations._keeps_up_seconds == {(TOPIC, "a"): 0}
    job.releaser._destinations._keeps_up_seconds[TOPIC, "a"] = 20
    job.submit(8, [8])
    wait_until(lambda: job.troubles.current(), 5, "it is slow again")
    assert job.apart[-1] == frozenset("a")
    assert job.releaser._destinations.lately_slow(Moment.now()) == {(TOPIC, "a")}
    assert job.releaser._destinations._destinations[TOPIC, "a"].keeps_up_seconds == 40


def test_one_with_a_connection_of_its_own_is_found_slow_at_once_where_others_are_answered(
    make: Callable[..., Job],
) -> None:
    job = make()
    job.have_own = True
    job.throttled.add("a")
    job.submit(1, [1])
    wait_until(lambda: [(t.kind, t.name) for t in job.troubles.current()] == [("slow", f"{TOPIC}-a")], 5, "it is named")
    assert job.apart[0] == frozenset()
    assert frozenset("ab") not in job.apart
    job.submit(2)  # the offset says so
    wait_until(lambda: (1, "a", 1) in job.tables.delivered, 10, "it has arrived, sent by itself")
    assert [tick for tick, *_ in job.attempts] == [1, 1]
    job.releaser.stop()

    # Where nothing is answered it may be the broker: it is tried again.
    other = make()
    other.have_own = True
    other.throttled |= {"a", "b"}
    other.submit(1, [1])
    wait_until(lambda: len(other.troubles.current()) == 2, 5, "both are named")
    assert other.apart[:2] == [frozenset(), frozenset("ab")]


def test_one_that_is_slow_and_does_not_answer_for_a_while_is_slow_again_and_not_given_all_that_waits(
    make: Callable[..., Job],
) -> None:
    job = make()
    job.throttled.add("a")
    job.submit(1, [1])
    wait_until(lambda: [t.kind for t in job.troubles.current()] == ["slow"], 5, "it is named")
    job.broken["a"] = "the broker has not answered"
    wait_until(lambda: 1 in (job.open("a") or []), 5, "it is open")
    job.submit(2)
    wait_until(lambda: [t.kind for t in job.troubles.current()] == ["unwritable"], 5, "it does not answer")
    job.broken.clear()
    wait_until(lambda: [t.kind for t in job.troubles.current()] == ["slow"], 10, "it is slow again")
    wait_until(lambda: (job.feedback.last.unwritable or {})[TOPIC]["a"].get("round"), 10, "it is asked for more")


def test_what_is_rejected_is_not_held_back_as_well() -> None:
    """Nobody would let it go: a destination that rejects has nothing that waits."""

    class Untouched:
        state = RemainderState.RECALLED

    remainder: Any = Untouched()
    destination = UnwritableDestination(
        "destination", DestinationState.UNWRITABLE, 1, "away", remainders={(1, 1): remainder}
    )
    assert destination.has_recalled
    destination.state = DestinationState.REJECTING
    assert not destination.has_recalled


def test_a_disk_that_is_full_for_a_moment_ends_neither_lanes_nor_retries_and_the_feedback_comes_later(
    make: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make()
    is_full, write = threading.Event(), job.feedback.write

    def write_if_not_full(feedback: Feedback) -> None:
        if is_full.is_set():
            raise OSError(errno.ENOSPC, "no space left on device")
        write(feedback)

    monkeypatch.setattr(job.feedback, "write", write_if_not_full)
    job.broken["a"] = "TopicTerminated"
    job.is_stuck.set()
    job.submit(1, [1])
    is_full.set()
    job.is_stuck.clear()
    wait_until(lambda: job.troubles.current() or job.releaser.failure, 5, "a lane has found out")
    assert job.releaser.failure is None
    is_full.clear()
    wait_until(lambda: job.open("a") == [1], 5, "the feedback says so")

    job.submit(2)  # so does the offset
    is_full.set()
    job.broken.clear()
    wait_until(lambda: not job.troubles.current(), 10, "it can be written")
    assert job.open("a") == [1]
    is_full.clear()
    wait_until(lambda: job.open("a") is None, 10, "the feedback says so")
    job.has_confirmed(2)
    assert sorted(job.tables.delivered) == [(1, "a", 1), (1, "b", 1)]


def test_whatever_fails_while_one_is_tried_again_it_is_tried_on(
    make: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make()
    job.broken["a"] = "TopicTerminated"
    job.submit(1, [1])
    wait_until(lambda: job.open("a") == [1], 5, "it is open")
    begin, failed = job.troubles.begin, threading.Event()

    def fail_once(*args: Any) -> None:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.ENOSPC, "no space left on device")
        begin(*args)

    monkeypatch.setattr(job.troubles, "begin", fail_once)
    job.broken["a"] = "NotAuthorized"
    job.submit(2)
    assert failed.wait(20)
    job.broken.clear()
    wait_until(lambda: job.open("a") is None, 10, "it can be written")
    assert sorted(job.tables.delivered) == [(1, "a", 1), (1, "b", 1)]
