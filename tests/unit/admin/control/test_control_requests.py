"""A request is answered when each of its messages has its last outcome for each subscription, and not before."""

from __future__ import annotations

from typing import Any

from admin.control.requests import Cancel, ControlRequest, RequestFactory, Window
from broker.message_ids import MessageRef
from conf.settings import Settings
from tracker.wire.delaylake_pb2 import ControlOutcome, Result

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
    return RequestFactory(SETTINGS, "tester", topic, subscriptions, sum_up)


def skip(*messages: MessageRef, subscriptions: tuple[str, ...] = ("a",)) -> ControlRequest:
    return next(requests(*subscriptions).skip(messages))


def results(request: ControlRequest, *outcomes: ControlOutcome) -> list[Any]:
    taken = [request.take(outcome) for outcome in outcomes]
    return [outcome and outcome.result for outcome in taken]


def test_without_names_all_subscriptions_of_the_topic_or_its_partition_answer() -> None:
    for topic in (TOPIC, f"{TOPIC}-partition-3"):
        request = requests(topic=topic).cancel(Cancel(MessageRef(1, 2), 5))
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
    cancel = requests("a").cancel(Cancel(MessageRef(1, 2), 5))
    outcome = cancel.take(told(Result.WAITING))
    assert outcome is not None
    assert outcome.is_done
    assert cancel.is_answered
    request = skip(MessageRef(1, 2))
    assert results(request, told(Result.WAITING), told(Result.NOT_FOUND)) == [None, "NOT_FOUND"]
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
    made = list(requests().skip([MessageRef(1, i) for i in range(2_500)]))
    assert [len(r.command.skip.entries) for r in made] == [1_000, 1_000, 500]
    assert len({r.request_id for r in made}) == 3
    assert {r.command.issued_by for r in made} == {"tester"}


def summed(result: Result, n: int, subscription: str = "a") -> ControlOutcome:
    return ControlOutcome(
        subscription=subscription, ledger_id=-1, entry_id=-1, batch_index=-1, result=result, n_named=n
    )


def test_what_is_summed_up_is_answered_by_numbers_for_each_subscription() -> None:
    [request] = requests("a", "b", sum_up=True).skip([MessageRef(1, i) for i in range(5)])
    assert request.command.sum_up
    outcomes = [
        request.take(summed(Result.WAITING, 5)),
        request.take(summed(Result.APPLIED, 3)),
        request.take(summed(Result.APPLIED, 5, "b")),
        request.take(summed(Result.TOO_LATE, 1)),
    ]
    assert [o and (o.subscription, o.result, o.n_messages, o.is_done) for o in outcomes] == [
        None,
        ("a", "APPLIED", 3, True),
        ("b", "APPLIED", 5, True),
        ("a", "TOO_LATE", 1, False),
    ]
    assert not request.is_answered
    assert results(request, told(Result.NOT_FOUND)) == ["NOT_FOUND"]
    assert request.is_answered


def test_one_outcome_of_all_answers_a_request_that_is_summed_up() -> None:
    [request] = requests("a", "b", sum_up=True).skip([MessageRef(1, i) for i in range(5)])
    whole = request.take(ControlOutcome(ledger_id=-1, entry_id=-1, batch_index=-1, result=Result.INVALID))
    assert whole is not None
    assert (whole.n_messages, request.is_answered) == (10, True)


def test_cancelled_entries_count_as_their_messages() -> None:
    cancels = [Cancel(MessageRef(1, i), 7) for i in range(1_200)]
    first, second = requests("a", sum_up=True).cancel_entries(cancels, batch_size=3)
    assert [(c.entry_id, c.deliver_at) for c in second.command.cancels.messages[:1]] == [(1_000, 7)]
    outcome = first.take(summed(Result.WAITING, 1_000))
    assert outcome is not None
    assert (outcome.n_messages, outcome.is_done, first.is_answered, second.n_messages) == (3_000, True, True, 600)


def test_of_an_entry_whose_messages_share_no_result_each_message_counts() -> None:
    cancels = [Cancel(MessageRef(1, i), 7) for i in range(3)]
    [request] = requests("a", sum_up=True).cancel_entries(cancels, batch_size=2)
    outcomes = [
        request.take(summed(Result.APPLIED, 2)),
        request.take(told(Result.TOO_LATE, batch_index=0, has_more=True)),
        request.take(told(Result.APPLIED, batch_index=1)),
    ]
    assert [o and (o.result, o.n_messages) for o in outcomes] == [("APPLIED", 4), ("TOO_LATE", 1), ("APPLIED", 1)]
    assert request.is_answered


def test_a_repeated_command_is_not_counted_beyond_what_it_names() -> None:
    [request] = requests("a", sum_up=True).skip([MessageRef(1, i) for i in range(10)])
    numbers = [request.take(summed(result, n)) for result, n in ((Result.APPLIED, 6), (Result.ALREADY_APPLIED, 10))]
    assert [o and o.n_messages for o in numbers] == [6, 4]
    assert request.is_answered


def test_a_window_has_so_many_messages_under_way() -> None:
    window = Window(requests("a", sum_up=True).skip([MessageRef(1, i) for i in range(3_500)]), 2_000)
    sent = [window.next(), window.next()]
    assert window.next() is None
    assert [request and request.n_messages for request in sent] == [1_000, 1_000]
    assert window.take(summed(Result.APPLIED, 1_000)) is None  # of nobody's request here
    for request_id in list(window.waiting):
        answer = summed(Result.APPLIED, 1_000)
        answer.request_id = request_id
        assert window.take(answer) is not None
    last = [window.next(), window.next(), window.next()]
    assert [request and request.n_messages for request in last] == [1_000, 500, None]


def test_commands_under_a_chosen_id_have_the_same_ids_again() -> None:
    factory = RequestFactory(SETTINGS, "tester", TOPIC, ["a"], request_id="mine")
    messages = [MessageRef(1, i) for i in range(2_001)]
    for again in range(2):
        assert [r.request_id for r in factory.skip(messages)] == ["mine", "mine.1", "mine.2"], again
    assert next(factory.restore(messages[:1])).request_id == "mine"
    assert factory.pause(True).request_id == "mine"
