"""What is sent to cancel messages matching a filter, and how the answers are counted."""

from __future__ import annotations

import pyarrow as pa
import pytest
from delaylake.message_ids import MessageId, Outcome

from admin.control.bulk import NAMED, Call, Change, Plan, Tally, plan, requests
from conf.settings import Settings, Subscription, SubscriptionType
from tracker.commands.kinds import CANCEL, RESCHEDULE, RESTORE, SKIP
from tracker.due_time import MAX_TIME_MILLIS
from tracker.message_state.changes import HELD_DELIVER_AT

CANCELS = Change(CANCEL)
DESTINATION = "persistent://public/default/d"
SHARED = Subscription(name="shared", destination=DESTINATION)
EXCLUSIVE = Subscription(name="exclusive", type=SubscriptionType.EXCLUSIVE, destination=DESTINATION)

Row = dict[str, int]


def message(entry: int, waits: int = 1, index: int = -1, size: int = 1, due: int = 100) -> Row:
    position = {"ledger_id": 1, "entry_id": entry, "partition": -1, "batch_index": index}
    return position | {"batch_size": size, "deliver_at": due, "waits": waits}


def found(*rows: Row) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=NAMED.append(pa.field("waits", pa.int64())))


def named(*rows: Row) -> pa.Table:
    return found(*rows).select(NAMED.names)


def outcome(subscription: str, result: str, n: int = 1) -> Outcome:
    return Outcome(subscription, MessageId(-1, -1), result, "", result != "TOO_LATE", n)


def test_messages_are_skipped_and_where_that_is_not_allowed_their_entries_cancelled() -> None:
    both, one = message(0, 0b11), message(1, 0b01)
    assert plan([SHARED, EXCLUSIVE], found(both, one), CANCELS) == Plan(
        calls=[
            Call("shared", SKIP, named(both, one)),
            Call("exclusive", CANCEL, named(both)),
        ],
        total=3,
        impossible=0,
    )


def test_an_entry_is_cancelled_only_where_all_its_messages_are_meant() -> None:
    whole = [message(0, index=i, size=3, due=100 + i) for i in range(3)]
    part = [message(1, index=i, size=3) for i in range(2)]
    made = plan([EXCLUSIVE], found(*whole, *part, message(2)), CANCELS)
    assert made.calls == [
        Call("exclusive", CANCEL, named(message(2)), batch_size=1),
        Call("exclusive", CANCEL, named(message(0, size=3, due=102)), batch_size=3),
    ]
    assert (made.total, made.impossible) == (6, 2)
    tally = Tally(made)
    tally.add(outcome("exclusive", "APPLIED", 3))
    assert tally.to_json() == {"applied": 3, "tooLate": 0, "notAllowed": 2}
    assert tally.done == 3


def test_what_is_held_back_is_cancelled_with_the_others() -> None:
    rows = found(message(0), message(1, due=HELD_DELIVER_AT))
    [call] = plan([EXCLUSIVE], rows, CANCELS).calls
    assert call.rows["deliver_at"].to_pylist() == [100, MAX_TIME_MILLIS]


def test_nothing_found_is_nothing_to_do() -> None:
    for change in (CANCELS, Change(RESTORE), Change(RESCHEDULE, shift_millis=5)):
        assert plan([SHARED, EXCLUSIVE], found(), change) == Plan([], 0, 0)


@pytest.mark.parametrize(
    ("results", "counts", "done"),
    [
        (["APPLIED", "ALREADY_APPLIED"], {"applied": 1, "tooLate": 0, "alreadyApplied": 1}, 2),
        (["APPLIED", "TOO_LATE"], {"applied": 1, "tooLate": 1}, 1),
        (["APPLIED"], {"applied": 1, "tooLate": 0}, 1),
    ],
)
def test_results_are_counted(results: list[str], counts: dict[str, int], done: int) -> None:
    tally = Tally(plan([SHARED], found(message(0), message(1)), CANCELS))
    for result in results:
        tally.add(outcome("shared", result))
    assert (tally.to_json(), tally.done) == (counts, done)


def test_messages_are_shifted_to_a_time_each_and_what_is_held_back_comes_at_once() -> None:
    rows = found(message(0), message(1, due=250), message(2), message(3, due=HELD_DELIVER_AT), message(4, due=10))
    made = plan([EXCLUSIVE], rows, Change(RESCHEDULE, shift_millis=-50))
    assert [(call.fields["deliver_at"], call.rows["entry_id"].to_pylist()) for call in made.calls] == [
        (0, [3, 4]),
        (50, [0, 2]),
        (200, [1]),
    ]
    made = plan([EXCLUSIVE], rows, Change(RESCHEDULE, {"deliver_at": 7}))
    assert [(call.fields["deliver_at"], call.rows.num_rows) for call in made.calls] == [(7, 5)]


def test_the_commands_of_a_plan_say_when_its_messages_wait_and_are_summed_up() -> None:
    rows = found(*(message(i, 0b11, index=i % 2, size=1 + i % 2, due=100 + i) for i in range(1_500)))
    made = plan([SHARED, EXCLUSIVE], rows, CANCELS)
    sent = [*requests(Settings(), "tester", "t", made.calls)]
    ids = [r.request_id.split(".") for r in sent]
    assert len({change for change, _ in ids}) == 1, "in the control log it is one change"
    assert [int(number) for _, number in ids] == [*range(len(sent))]
    commands = [r.command for r in sent]
    assert all(c.sum_up for c in commands)
    assert [(list(c.subscriptions), len(c.skip.entries), len(c.cancels.messages)) for c in commands] == [
        (["shared"], 1_000, 0),
        (["shared"], 500, 0),
        (["exclusive"], 0, 750),
    ]
    last = commands[1].skip.entries[-1]
    assert (last.entry_id, list(last.batch_indexes), last.deliver_at) == (1_499, [1], 1_599)
    assert sum(r.n_messages for r in sent) == made.total - made.impossible
