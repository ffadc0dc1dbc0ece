"""What is sent to take back what a filter means, and how the answers are counted."""

from __future__ import annotations

import pytest

from admin.bulk import Action, Call, Change, Plan, Tally, plan
from admin.control_requests import Cancel, Outcome
from admin.message_ids import MessageRef
from admin.pending import PendingMessage
from conf.settings import Subscription, SubscriptionType
from tracker.moved import HELD_MILLIS

CANCEL = Change(Action.CANCEL)
DESTINATION = "persistent://public/default/d"
SHARED = Subscription(name="shared", destination=DESTINATION)
EXCLUSIVE = Subscription(name="exclusive", type=SubscriptionType.EXCLUSIVE, destination=DESTINATION)


def message(entry: int, *subscriptions: str, index: int = -1, size: int = 1, due: int = 100) -> PendingMessage:
    ref = MessageRef(1, entry, -1, index)
    return PendingMessage(ref, due, subscriptions or ("shared", "exclusive"), size, None, None, {}, 0, 0, 0, "p")


def outcome(subscription: str, entry: int, result: str, index: int = -1) -> Outcome:
    return Outcome(subscription, MessageRef(1, entry, -1, index), result, "", result != "TOO_LATE")


def test_messages_are_skipped_and_where_that_is_not_allowed_their_entries_cancelled() -> None:
    both, one = message(0), message(1, "shared")
    assert plan([SHARED, EXCLUSIVE], [both, one], CANCEL) == Plan(
        calls=[
            Call("shared", Action.SKIP, [both.ref, one.ref], [100, 100]),
            Call("exclusive", Action.CANCEL, cancels=[Cancel(MessageRef(1, 0), 100)]),
        ],
        total=3,
        impossible=0,
        batch_sizes={("exclusive", 1, 0): 1},
    )


def test_an_entry_is_cancelled_only_where_all_its_messages_are_meant() -> None:
    whole = [message(0, index=i, size=3, due=100 + i) for i in range(3)]
    part = [message(1, index=i, size=3) for i in range(2)]
    made = plan([EXCLUSIVE], whole + part, CANCEL)
    assert made.calls == [Call("exclusive", Action.CANCEL, cancels=[Cancel(MessageRef(1, 0), 102)])]
    assert (made.total, made.impossible) == (5, 2)
    tally = Tally(made)
    tally.add(outcome("exclusive", 0, "APPLIED"))
    assert tally.to_json() == {"applied": 3, "tooLate": 0, "notAllowed": 2}
    assert not tally.is_complete


@pytest.mark.parametrize(
    ("results", "counts", "complete"),
    [
        (["APPLIED", "ALREADY_APPLIED"], {"applied": 1, "tooLate": 0, "alreadyApplied": 1}, True),
        (["APPLIED", "TOO_LATE"], {"applied": 1, "tooLate": 1}, False),
        (["APPLIED"], {"applied": 1, "tooLate": 0}, False),
    ],
)
def test_all_are_done_when_each_was_taken_back(results: list[str], counts: dict[str, int], complete: bool) -> None:
    tally = Tally(plan([SHARED], [message(0), message(1)], CANCEL))
    for entry, result in enumerate(results):
        tally.add(outcome("shared", entry, result))
    assert (tally.to_json(), tally.is_complete) == (counts, complete)


def test_messages_are_shifted_to_a_time_each_and_what_is_held_back_comes_at_once() -> None:
    rows = [message(0), message(1, due=250), message(2), message(3, due=HELD_MILLIS), message(4, due=10)]
    made = plan([EXCLUSIVE], rows, Change(Action.RESCHEDULE, shift_millis=-50))
    assert [(call.deliver_at, [m.entry_id for m in call.messages]) for call in made.calls] == [
        (50, [0, 2]),
        (200, [1]),
        (0, [3, 4]),
    ]
    made = plan([EXCLUSIVE], rows, Change(Action.RESCHEDULE, deliver_at=7))
    assert [(call.deliver_at, len(call.messages)) for call in made.calls] == [(7, 5)]
