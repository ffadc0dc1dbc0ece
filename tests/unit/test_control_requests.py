"""A request is answered when each of its messages has its last outcome for each subscription, and not before."""

from __future__ import annotations

from admin.control_requests import Cancel, ControlRequest, cancel_request, skip_requests
from admin.message_ids import MessageRef
from conf.settings import Settings
from proto.delaylake_pb2 import ControlOutcome, Result

TOPIC = "persistent://public/default/orders"
SETTINGS = Settings(routes=[{"source": TOPIC, "subscriptions": [{"name": "a"}, {"name": "b"}]}])  # type: ignore[list-item]


def told(
    result: int, subscription: str = "a", entry_id: int = 2, batch_index: int = -1, has_more: bool = False
) -> ControlOutcome:
    return ControlOutcome(
        subscription=subscription,
        ledger_id=1,
        entry_id=entry_id,
        batch_index=batch_index,
        result=result,
        has_more=has_more,
    )


def skip(*messages: MessageRef, subscriptions: tuple[str, ...] = ("a",)) -> ControlRequest:
    return next(skip_requests(SETTINGS, "tester", TOPIC, messages, subscriptions))


def results(request: ControlRequest, *outcomes: ControlOutcome) -> list[str | None]:
    taken = [request.take(outcome) for outcome in outcomes]
    return [outcome and outcome.result for outcome in taken]


def test_without_names_all_subscriptions_of_the_topic_or_its_partition_answer() -> None:
    for topic in (TOPIC, f"{TOPIC}-partition-3"):
        request = cancel_request(SETTINGS, "tester", topic, Cancel(MessageRef(1, 2), 5), [])
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
    cancel = cancel_request(SETTINGS, "tester", TOPIC, Cancel(MessageRef(1, 2), 5), ["a"])
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
    requests = list(skip_requests(SETTINGS, "tester", TOPIC, [MessageRef(1, i) for i in range(2_500)], []))
    assert [len(r.command.skip.entries) for r in requests] == [1_000, 1_000, 500]
    assert len({r.request_id for r in requests}) == 3
    assert {r.command.issued_by for r in requests} == {"tester"}
