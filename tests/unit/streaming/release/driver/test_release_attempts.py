"""The attempts to send a job: what follows from the reports of its tasks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from streaming.release.attempt import FailedProducer, SendReport
from streaming.release.driver.lane_release import LaneRelease
from streaming.release.driver.release_attempts import Decision, ReleaseAttempts
from streaming.release.driver.transitions import ReleaseEvent, RemainderState
from streaming.release.naming import Recipient
from tests.support.tracker.messages import TOPIC
from tracker.packing import pack
from warehouse.schemas import DELIVERIES

A, B = (TOPIC, "a"), (TOPIC, "b")


def failed(recipient: Recipient = A, **changes: Any) -> FailedProducer:
    of = {"is_refused": True, "foreign_id": None} | changes
    return FailedProducer(recipient[1], "planned0", recipient, "why", **of)


def report(*producers: FailedProducer, delivered: str = "", skipped: frozenset[Recipient] = frozenset()) -> SendReport:
    rows = [{"topic": TOPIC, "subscription": delivered}] if delivered else []
    done = ((7, delivered, "planned0"),) if delivered else ()
    body = pack(pa.Table.from_pylist(rows, schema=DELIVERIES))
    return SendReport(body, 1, done, failed=producers, skipped=skipped)


class Sending:
    def __init__(self, lately_slow: frozenset[Recipient] = frozenset(), **release: Any) -> None:
        of: dict[str, Any] = {
            "tick": 7,
            "kind": 1,
            "lane": "planned0",
            "assignments": (),
            "due": np.array([1]),
        } | release
        self.attempts = ReleaseAttempts(LaneRelease(**of), lately_slow, 2.0, {})
        self.attempt = self.attempts.next(frozenset(), {}, "turn")

    def decide(self, *reports: SendReport, is_broker_there: bool = True) -> Decision:
        """Makes an attempt, and the next one where there is to be one."""
        producers = self.attempts.take(reports)
        others = [one for one in producers if one.foreign_id is None]
        decision = self.attempts.decide(reports, producers, others, is_broker_there)
        if decision.event == ReleaseEvent.INCOMPLETE:
            self.attempt = self.attempts.next(frozenset(), {}, "")
        return decision


def test_it_is_complete_when_each_message_has_arrived() -> None:
    sending = Sending()
    assert (sending.attempt.is_first, sending.attempt.order_signal) == (True, "turn")
    decision = sending.decide(report(delivered="a"), report(delivered="b"))
    assert (decision.event, decision.reasons, decision.remainders) == (ReleaseEvent.COMPLETE, {}, {})
    assert sending.attempts.finished.deliveries.num_rows == 2


def test_what_is_refused_is_left_open_with_what_has_arrived_of_it() -> None:
    decision = Sending().decide(report(failed(arrived_to=9), delivered="b", skipped=frozenset([(TOPIC, "c")])))
    assert decision.event == ReleaseEvent.COMPLETE
    assert decision.reasons == {A: "why", (TOPIC, "c"): ""}
    remainder = decision.remainders[A]
    assert (remainder.arrived_to, remainder.done) == ({("a", "planned0"): 9}, frozenset([(7, "b", "planned0")]))
    assert (remainder.state, decision.remainders[TOPIC, "c"].state) == (RemainderState.OPEN, RemainderState.RECALLED)


@pytest.mark.parametrize(
    ("is_untouched", "is_second", "state"),
    [(True, False, RemainderState.RECALLED), (False, False, RemainderState.OPEN), (True, True, RemainderState.OPEN)],
)
def test_only_what_the_first_attempt_has_not_touched_is_recalled(
    is_untouched: bool, is_second: bool, state: RemainderState
) -> None:
    sending = Sending()
    one = failed(is_untouched=is_untouched)
    if is_second:
        assert sending.decide(report(failed(is_refused=False)), is_broker_there=False).event == ReleaseEvent.INCOMPLETE
    assert sending.decide(report(one)).remainders[A].state == state


def test_while_the_broker_is_away_all_is_sent_again_after_a_pause() -> None:
    sending = Sending()
    decision = sending.decide(report(failed(is_refused=False), failed(B, is_refused=False)), is_broker_there=False)
    assert (decision.event, decision.reasons, decision.waits) == (ReleaseEvent.INCOMPLETE, {}, True)
    assert [one.recipient for one in decision.again] == [A, B]
    assert (sending.attempt.is_first, sending.attempt.order_signal) == (False, "")
    assert sending.decide(report(failed(is_refused=False), delivered="b")).reasons == {A: "why"}


def test_one_that_waited_for_another_producer_is_sent_again() -> None:
    decision = Sending().decide(report(failed(), failed(B, is_behind=True)))
    assert (decision.reasons, [one.recipient for one in decision.again]) == ({A: "why"}, [B])


def test_another_name_for_a_producer_makes_another_attempt_at_once() -> None:
    decision = Sending().decide(report(failed(foreign_id=99)))
    assert (decision.event, decision.reasons, decision.waits) == (ReleaseEvent.INCOMPLETE, {}, False)


def slow(recipient: Recipient, is_alone: bool) -> FailedProducer:
    return failed(recipient, is_refused=False, is_slow=True, is_alone=is_alone)


def test_slow_ones_that_share_a_connection_get_one_each_and_are_left_when_they_are_slow_again() -> None:
    sending = Sending()
    decision = sending.decide(report(slow(A, False), slow(B, False)))
    assert (decision.event, decision.reasons, decision.waits) == (ReleaseEvent.INCOMPLETE, {}, False)
    assert sending.attempt.apart == {A, B}
    decision = sending.decide(report(slow(A, True), delivered="b"))
    assert (decision.event, decision.reasons, decision.slow) == (ReleaseEvent.COMPLETE, {A: "why"}, frozenset([A]))


def test_where_nothing_is_answered_it_may_be_the_broker() -> None:
    sending = Sending()
    assert sending.decide(report(slow(A, True))).reasons == {}
    assert sending.decide(report(slow(A, True))).reasons == {A: "why"}


def test_what_comes_in_order_is_never_left_because_it_is_slow() -> None:
    assert Sending().attempt.slow_after_seconds == 2
    assert Sending(is_in_order=True).attempt.slow_after_seconds == 0
    assert Sending(lately_slow=frozenset([A])).attempt.apart == {A}
