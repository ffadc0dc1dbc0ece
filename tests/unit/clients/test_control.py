"""A request is answered when each of its messages has its last outcome for each subscription, and not before."""

from __future__ import annotations

import pytest
from delaylake.commands import Ids, Keys, Named
from delaylake.control import ControlRequest, RequestFactory, Window
from delaylake.wire.delaylake_pb2 import ControlOutcome, Result

from admin.control.requests import request_factory
from broker.entries.message_ids import MessageRef
from conf.settings import Settings
from tests.support.tracker.control_desk import Desk
from tests.support.tracker.messages import messages
from tracker.commands.decode import decode
from tracker.commands.kinds import CANCEL, OPERATIONS, PAUSE, RESCHEDULE, RESTORE, RESUME, RETRY, SKIP
from tracker.schemas import KNOWN, SubscriptionRule

SCHEDULE_KINDS = tuple(kind for kind, operation in OPERATIONS.items() if operation.is_of_schedule)
TOPIC = "persistent://public/default/orders"
SETTINGS = Settings(routes=[{"source": TOPIC, "subscriptions": [{"name": "a"}, {"name": "b"}]}])  # type: ignore[arg-type]


def told(
    result: Result, subscription: str = "a", entry_id: int = 2, batch_index: int = -1, has_more: bool = False
) -> ControlOutcome:
    return ControlOutcome(
        subscription=subscription,
        ledger_id=1,
        entry_id=entry_id,
        batch_index=batch_index,
        result=result,
        has_more=has_more,
    )


def requests(*subscriptions: str, topic: str = TOPIC, sum_up: bool = False) -> RequestFactory:
    return request_factory(SETTINGS, "tester", topic, subscriptions, sum_up)


CANCELLED = Ids([MessageRef(1, 2)], [5])


def entries(n: int, due: int | None = None, batch_size: int = 1) -> Ids:
    """The first n entries of a ledger; `due` is their time."""
    return Ids([MessageRef(1, i) for i in range(n)], [] if due is None else [due] * n, batch_size)


def skip(*messages: MessageRef, subscriptions: tuple[str, ...] = ("a",)) -> ControlRequest:
    return next(requests(*subscriptions).make(SKIP, Ids(messages)))


def results(request: ControlRequest, *published: ControlOutcome) -> list[str]:
    return [outcome.result for one in published for outcome in request.take(one)]


def test_without_names_all_subscriptions_of_the_topic_or_its_partition_answer() -> None:
    for topic in (TOPIC, f"{TOPIC}-partition-3"):
        [request] = requests(topic=topic).make(CANCEL, CANCELLED)
        assert results(request, told(Result.APPLIED, "a")) == ["APPLIED"]
        assert not request.is_answered
        assert results(request, told(Result.TOO_LATE, "b")) == ["TOO_LATE"]
        assert request.is_answered


def test_one_outcome_for_the_topic_as_a_whole_answers_everything() -> None:
    request = skip(MessageRef(1, 2), MessageRef(1, 3, -1, 4), subscriptions=("a", "b"))
    whole = ControlOutcome(ledger_id=-1, entry_id=-1, batch_index=-1, result=Result.NOT_FOUND)
    assert results(request, whole) == ["NOT_FOUND"]
    assert request.is_answered


def test_waiting_is_the_last_word_on_a_cancel_and_not_on_a_skip() -> None:
    [cancel] = requests("a").make(CANCEL, CANCELLED)
    [outcome] = cancel.take(told(Result.WAITING))
    assert outcome.is_done
    assert cancel.is_answered
    request = skip(MessageRef(1, 2))
    assert results(request, told(Result.WAITING), told(Result.NOT_FOUND)) == ["NOT_FOUND"]
    assert request.is_answered


def test_an_entry_whose_messages_share_no_result_is_answered_by_the_last_of_them() -> None:
    request = skip(MessageRef(1, 2))
    assert results(request, told(Result.APPLIED, batch_index=0, has_more=True)) == ["APPLIED"]
    assert not request.is_answered
    assert results(request, told(Result.TOO_LATE, batch_index=1)) == ["TOO_LATE"]
    assert request.is_answered


def test_single_messages_of_a_batch_are_answered_one_by_one_or_by_their_entry() -> None:
    request = skip(MessageRef(1, 2, -1, 0), MessageRef(1, 2, -1, 1), MessageRef(1, 3, -1, 0))
    request.take(told(Result.APPLIED, batch_index=1))
    request.take(told(Result.APPLIED, batch_index=7))
    request.take(told(Result.APPLIED, "b", batch_index=0))
    request.take(told(Result.APPLIED, entry_id=3))
    assert not request.is_answered
    request.take(told(Result.APPLIED, batch_index=0))
    assert request.is_answered


def test_many_messages_are_several_commands_with_ids_of_their_own() -> None:
    made = list(requests().make(SKIP, entries(2_500)))
    assert [len(r.command.skip.entries) for r in made] == [1_000, 1_000, 500]
    assert len({r.request_id for r in made}) == 3
    assert {r.command.issued_by for r in made} == {"tester"}


def summed(result: Result, n: int, subscription: str = "a", again_at: int | None = None) -> ControlOutcome:
    return ControlOutcome(
        subscription=subscription,
        ledger_id=-1,
        entry_id=-1,
        batch_index=-1,
        result=result,
        n_named=n,
        is_repeat=again_at is not None,
        applied_at=again_at or 0,
    )


def numbers(request: ControlRequest, *published: ControlOutcome) -> list[tuple[str, int]]:
    return [(outcome.result, outcome.n_messages) for one in published for outcome in request.take(one)]


def test_what_is_summed_up_is_answered_by_numbers_for_each_subscription_once_all_are_there() -> None:
    [request] = requests("a", "b", sum_up=True).make(SKIP, entries(5))
    assert request.command.sum_up
    parts = [summed(Result.WAITING, 5), summed(Result.APPLIED, 3), summed(Result.APPLIED, 5, "b")]
    assert numbers(request, *parts, summed(Result.TOO_LATE, 1)) == []
    assert not request.is_answered
    outcomes = request.take(told(Result.NOT_FOUND))
    assert [(o.subscription, o.result, o.n_messages, o.is_done) for o in outcomes] == [
        ("a", "APPLIED", 3, True),
        ("b", "APPLIED", 5, True),
        ("a", "TOO_LATE", 1, False),
        ("a", "NOT_FOUND", 1, False),
    ]
    assert request.is_answered


def test_one_outcome_of_all_answers_a_request_that_is_summed_up() -> None:
    [request] = requests("a", "b", sum_up=True).make(SKIP, entries(5))
    whole = ControlOutcome(ledger_id=-1, entry_id=-1, batch_index=-1, result=Result.INVALID)
    assert (numbers(request, whole), request.is_answered) == ([("INVALID", 10)], True)


def test_cancelled_entries_count_as_their_messages() -> None:
    first, second = requests("a", sum_up=True).make(CANCEL, entries(1_200, due=7, batch_size=3))
    assert [(c.entry_id, c.deliver_at) for c in second.command.cancels.messages[:1]] == [(1_000, 7)]
    [outcome] = first.take(summed(Result.WAITING, 1_000))
    assert (outcome.n_messages, outcome.is_done, first.is_answered, second.n_messages) == (3_000, True, True, 600)


def test_of_an_entry_whose_messages_share_no_result_each_message_counts() -> None:
    [request] = requests("a", sum_up=True).make(CANCEL, entries(3, due=7, batch_size=2))
    published = [
        summed(Result.APPLIED, 2),
        told(Result.TOO_LATE, batch_index=0, has_more=True),
        told(Result.APPLIED, batch_index=1),
    ]
    assert numbers(request, *published) == [("APPLIED", 4), ("TOO_LATE", 1), ("APPLIED", 1)]
    assert request.is_answered


def test_no_more_is_counted_than_a_command_names() -> None:
    [request] = requests("a", sum_up=True).make(SKIP, entries(10))
    published = [summed(Result.APPLIED, 6), summed(Result.ALREADY_APPLIED, 10)]
    assert numbers(request, *published) == [("APPLIED", 6), ("ALREADY_APPLIED", 4)]
    assert request.is_answered


def test_a_window_has_so_many_messages_under_way() -> None:
    window = Window(requests("a", sum_up=True).make(SKIP, entries(3_500)), 2_000)
    sent = [window.next(), window.next()]
    assert window.next() is None
    assert [request and request.n_messages for request in sent] == [1_000, 1_000]
    assert window.take(summed(Result.APPLIED, 1_000)) == []  # of nobody's request here
    for request_id in list(window.waiting):
        answer = summed(Result.APPLIED, 1_000)
        answer.request_id = request_id
        assert len(window.take(answer)) == 1
    last = [window.next(), window.next(), window.next()]
    assert [request and request.n_messages for request in last] == [1_000, 500, None]


def test_requests_without_an_answer_are_sent_again_once() -> None:
    window = Window(requests("a").make(SKIP, entries(2_500)), 10_000)
    begun, answered, silent = (window.next() for _ in range(3))
    assert begun
    assert answered
    assert silent
    for request, result in ((begun, Result.APPLIED), (answered, Result.NOT_FOUND), (silent, Result.WAITING)):
        one = told(result, entry_id=0 if request is begun else 1_000)
        one.request_id = request.request_id
        if request is answered:
            one.ledger_id = -1
        window.take(one)
    assert window.repeat() == [silent]
    assert window.repeat() == []


def test_a_request_is_repeated_also_where_its_time_comes_just_after_it_was_asked_for() -> None:
    """Else who waits would wait for the rest of the time-out, for an answer that was missed."""
    window = Window(requests("a").make(SKIP, entries(1)), 2_000, timeout_seconds=10)
    [request] = window.to_send(lambda: 100)
    assert list(window.to_send(lambda: 104.9999)) == []
    assert window.wait_until() == 105, "also for who looks at the clock again, after 105"
    assert list(window.to_send(lambda: 105.0001)) == [request]
    assert window.wait_until() == 110


def test_a_window_says_what_is_sent_when_without_a_clock_of_its_own() -> None:
    window = Window(requests("a").make(SKIP, entries(2_500)), 2_000, timeout_seconds=10)
    first, second = window.to_send(lambda: 100)
    assert window.wait_until() == 105
    outcome = told(Result.NOT_FOUND, entry_id=-1)
    outcome.ledger_id, outcome.request_id = -1, first.request_id
    assert [one.result for one in window.take(outcome)] == ["NOT_FOUND"]
    [third] = window.to_send(lambda: 108)  # who took the outcome was busy with it: the time counts from now
    assert list(window.to_send(lambda: 112.9)) == []
    assert list(window.to_send(lambda: 113)) == [second, third]
    assert list(window.to_send(lambda: 114)) == []
    assert window.wait_until() == 118
    assert [window.is_late(now) for now in (117.9, 118)] == [False, True]
    assert window.no_answer().startswith("no answer within 10 s (does the job run?); request id: ")


def test_who_is_long_busy_with_sending_has_the_whole_time_for_an_outcome() -> None:
    times = [100.0]
    window = Window(requests("a").make(SKIP, entries(2_500)), 10_000, timeout_seconds=10)
    for _ in window.to_send(lambda: times[-1]):
        times.append(times[-1] + 20)
    assert times == [100, 120, 140, 160]
    assert (window.wait_until(), window.is_late(160)) == (165, False)


def test_a_window_may_end_at_a_time_whatever_comes() -> None:
    window = Window(requests("a").make(SKIP, entries(1_500)), 10_000, timeout_seconds=10, until=20)
    first, second = window.to_send(lambda: 12)
    assert window.wait_until() == 15
    outcome = told(Result.NOT_FOUND, entry_id=-1)
    outcome.ledger_id, outcome.request_id = -1, first.request_id
    assert window.take(outcome)
    assert list(window.to_send(lambda: 16)) == [second]
    assert window.wait_until() == 20


def test_what_is_told_again_of_a_command_that_was_sent_again_counts_once() -> None:
    """It was told the first time, after all."""
    [request] = requests("a").make(SKIP, entries(3))
    assert request.repeat()

    def take(result: Result, entry_id: int, told_at: int) -> bool:
        one = told(result, entry_id=entry_id)
        one.applied_at, one.is_repeat = told_at, told_at > 5
        return bool(request.take(one))

    assert take(Result.APPLIED, 2, told_at=5)
    assert not take(Result.APPLIED, 2, told_at=9)
    assert not request.is_answered
    assert take(Result.TOO_LATE, 1, told_at=9)


def summed_up() -> ControlRequest:
    """A command that names 1,000 messages, has been answered for 600 of them, and was sent again."""
    window = Window(requests("a", sum_up=True).make(SKIP, entries(1_000)), 10_000)
    request = window.next()
    assert request
    assert numbers(request, summed(Result.APPLIED, 600)) == []
    assert window.repeat() == [request]
    assert window.repeat() == []
    return request


def test_what_a_summed_up_command_is_told_again_is_all_of_its_answer() -> None:
    """The answer for 400 was missed: of 600 and 1,000 nobody can tell what is in both."""
    request = summed_up()
    assert numbers(request, summed(Result.APPLIED, 700, again_at=9)) == []
    assert numbers(request, summed(Result.TOO_LATE, 300, again_at=9)) == [("APPLIED", 700), ("TOO_LATE", 300)]
    assert request.is_answered


def test_the_first_answer_to_a_summed_up_command_counts_where_it_is_whole_first() -> None:
    """It only was slow: the job tells the last 400 in the tick in which it tells the repeat of all."""
    request = summed_up()
    assert numbers(request, summed(Result.TOO_LATE, 400)) == [("APPLIED", 600), ("TOO_LATE", 400)]
    assert request.is_answered


def test_two_answers_to_repeats_of_a_summed_up_command_are_not_added_to_each_other() -> None:
    """Somebody else has sent it again, too."""
    request = summed_up()
    assert numbers(request, *(summed(Result.APPLIED, 600, again_at=at) for at in (7, 9))) == []
    assert not request.is_answered
    last = summed(Result.TOO_LATE, 400, again_at=9)
    assert numbers(request, last) == [("APPLIED", 600), ("TOO_LATE", 400)]


def test_commands_under_a_chosen_id_have_the_same_ids_again() -> None:
    factory = request_factory(SETTINGS, "tester", TOPIC, ["a"], request_id="mine")
    for again in range(2):
        assert [r.request_id for r in factory.make(SKIP, entries(2_001))] == ["mine", "mine.1", "mine.2"], again
    assert next(factory.make(RESTORE, entries(1))).request_id == "mine"
    assert next(factory.make(PAUSE)).request_id == "mine"


def test_many_schedule_keys_are_several_commands_with_ids_of_their_own() -> None:
    factory = request_factory(SETTINGS, "tester", TOPIC, ["a"], request_id="mine")
    keys = Keys([f"k{i}" for i in range(2_001)])
    for kind in (CANCEL, SKIP, RESCHEDULE, *SCHEDULE_KINDS):
        assert [r.request_id for r in factory.make(kind, keys)] == ["mine", "mine.1", "mine.2"]


def outcomes_of(request: ControlRequest) -> list[ControlOutcome]:
    """What a shard that has the message 1:2, of the topic's subscriptions a and b, makes of a command."""
    rules = {TOPIC: [SubscriptionRule("a", False), SubscriptionRule("b", False)]}
    read = decode(messages([(9, 0, 0)], payload=request.command.SerializeToString()), rules)
    desk = Desk(subscriptions={TOPIC: ["a", "b"]})
    known = messages([(1, 2, 50_000)], topic=TOPIC).select(KNOWN.names)
    published = desk.publish(read.commands, read.request_ids, known, pause_changes=read.pause_changes)
    names = ("subscription", "ledger_id", "entry_id", "batch_index", "result", "schedule_key")
    rows = published.select(names).to_pylist()
    return [ControlOutcome(**{name: value for name, value in row.items() if value is not None}) for row in rows]


THERE = Ids([MessageRef(1, 2)])
KEY = Keys(["k"])


@pytest.mark.parametrize(
    ("kind", "named", "fields"),
    [
        (CANCEL, Ids(THERE.messages, [50_000]), {}),
        *((kind, THERE, {}) for kind in (SKIP, RESTORE, RETRY, *SCHEDULE_KINDS)),
        *((RESCHEDULE, named, {"deliver_at": time}) for named in (THERE, KEY) for time in (60_000, 0)),
        *((kind, KEY, {}) for kind in (CANCEL, SKIP, *SCHEDULE_KINDS)),
        *((kind, None, {}) for kind in (PAUSE, RESUME)),
    ],
)
@pytest.mark.parametrize("names", [(), ("*",), ("a", "*")])
def test_each_operation_is_answered_for_those_for_which_it_says_what_became_of_it(
    kind: str, named: Named | None, fields: dict[str, int], names: tuple[str, ...]
) -> None:
    [request] = requests(*names).make(kind, named, **fields)
    published = outcomes_of(request)
    for outcome in published:
        assert not request.is_answered
        request.take(outcome)
    assert request.is_answered
    if "*" in names and published[-1].result != Result.INVALID:
        assert ("*" in {outcome.subscription for outcome in published}) != OPERATIONS[kind].is_of_schedule
