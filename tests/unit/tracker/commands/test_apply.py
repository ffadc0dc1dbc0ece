"""What cancels and skips come to: each outcome, for each of the subscriptions that there are, were or will be."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tests.support.tracker.control_desk import ALONE, BATCH, SUBSCRIPTIONS, Desk, results
from tests.support.tracker.messages import TOPIC, command, commands, messages, tick_at
from tracker.commands.kinds import ANSWER, RESCHEDULE, RESTORE, SKIP
from tracker.messages import MESSAGES
from tracker.rebuilt import NOT_TO_DELIVER, Rebuilt
from tracker.shard import Shard
from tracker.store import MemoryStore
from tracker.subscriptions import Subscriptions
from tracker.tick import TickInput
from tracker.wire.delaylake_pb2 import Result


def test_a_known_message_is_cancelled_for_the_subscriptions_named(desk: Desk) -> None:
    assert desk.subscription_mask(ALONE) == [0b11]
    assert desk.apply(command("r", 1, 7, [1]), known=ALONE) == [("b", Result.APPLIED)]
    assert desk.subscription_mask(ALONE) == [0b01]
    assert desk.state.unwanted == 0
    assert desk.apply(command("s", 1, 7, [0]), known=ALONE) == [("a", Result.APPLIED)]
    assert desk.subscription_mask(ALONE) == [0]
    assert desk.state.unwanted == 1


def test_a_cancel_need_not_name_the_right_time(desk: Desk) -> None:
    assert desk.apply(command("r", 1, 7, [0, 1], cancel_at=3), known=ALONE) == [
        ("a", Result.APPLIED),
        ("b", Result.APPLIED),
    ]
    cancels = desk.state.take_cancels()
    assert cancels["subscription"].to_pylist() == ["a", "b"]
    assert cancels["deliver_at"].to_pylist() == [50_000, 50_000]
    assert desk.state.take_cancels().num_rows == 0


def test_what_a_command_says_to_later_subscriptions_is_an_outcome_of_its_own(desk: Desk) -> None:
    star = command("r", 1, 7, [0, 1]) | {"also_later": True}
    published = desk.outcomes(star, known=ALONE)
    assert results(published) == [("a", Result.APPLIED), ("b", Result.APPLIED), ("*", Result.APPLIED)]
    assert None not in published["sequence"].to_pylist()
    desk.at(2, 60_000)
    # None that is added later gets what has been handed out: there is nothing to cancel, but nothing to move, either.
    late = desk.outcomes(command("s", 1, 7, [0]) | {"also_later": True}, known=ALONE)
    assert results(late) == [("a", Result.ALREADY_APPLIED), ("*", Result.ALREADY_APPLIED)]
    assert late["sequence"].to_pylist() == [None, None]
    assert late["reason"].to_pylist()[1] == ""
    for kind in (RESCHEDULE, RESTORE):
        asked = command(kind, 1, 7, [], kind=kind, cancel_at=90_000) | {"also_later": True}
        assert desk.apply(asked, known=ALONE) == [("*", Result.TOO_LATE)]
    assert sorted(desk.apply(star, known=ALONE)) == [(name, Result.APPLIED) for name in "*ab"]
    # To another time, and of a batch that was named whole.
    desk.at(3, 1_000)
    moved = command("m", 1, 8, [0], kind=RESCHEDULE, cancel_at=90_000) | {"also_later": True}
    star_rows = [row for row in desk.outcomes(moved, known=BATCH).to_pylist() if row["subscription"] == "*"]
    assert [(row["batch_index"], row["deliver_at"]) for row in star_rows] == [(i, 90_000) for i in range(3)]
    whole = command("w", 1, 8, [0]) | {"also_later": True}
    assert [r["batch_index"] for r in desk.outcomes(whole, known=BATCH).to_pylist()] == [-1, -1]
    # Of a batch of which some messages have been handed out, each is answered, as for a subscription that there is.
    desk.at(4, 50_001)
    part = command("p", 1, 8, [], kind=SKIP) | {"also_later": True}
    told = [(r["batch_index"], r["result"]) for r in desk.outcomes(part, known=BATCH).to_pylist()]
    assert told == [(0, Result.ALREADY_APPLIED), (1, Result.ALREADY_APPLIED), (2, Result.APPLIED)]
    desk.at(5, 60_000)
    assert desk.apply(part | {"request_id": "q"}, known=BATCH) == [("*", Result.ALREADY_APPLIED)]


def test_a_command_for_later_subscriptions_that_waits_is_for_those_that_were_added_meanwhile(desk: Desk) -> None:
    desk.at(1, 1_000, ingested_through=0)
    waits = command("r", 1, 7, [0, 1], cancel_at=50_000) | {"also_later": True}
    assert desk.apply(waits) == [("a", Result.WAITING), ("b", Result.WAITING), ("*", Result.WAITING)]
    assert len(desk.apply(command("s", 1, 8, [0, 1], cancel_at=50_000))) == 2
    desk.save()
    desk.open({TOPIC: ["a", "b", "c"]})
    desk.at(2, 1_100)
    assert desk.arrive(ALONE) == [(name, Result.APPLIED) for name in ("a", "b", "c", "*")]
    assert {name for name, _ in desk.arrive(BATCH)} == {"a", "b"}


def test_a_waiting_skip_for_later_subscriptions_leaves_out_those_that_it_is_refused_for(desk: Desk) -> None:
    desk.open(Subscriptions(SUBSCRIPTIONS, cumulative={TOPIC: 0b10}))
    desk.at(1, 1_000, ingested_through=0)
    skip = command("r", 1, 7, [0], kind=SKIP) | {"also_later": True}  # b has been told NOT_ALLOWED
    assert desk.apply(skip) == [("a", Result.WAITING), ("*", Result.WAITING)]
    desk.at(2, 1_100)
    assert desk.arrive(ALONE) == [("a", Result.APPLIED), ("*", Result.APPLIED)]
    assert desk.subscription_mask(ALONE) == [0b10]
    # A cancel is for all.
    desk.at(3, 1_200, ingested_through=2)
    cancel = command("s", 1, 8, [0], cancel_at=50_000) | {"also_later": True}
    assert desk.apply(cancel) == [("a", Result.WAITING), ("*", Result.WAITING)]
    assert {name for name, _ in desk.arrive(BATCH)} == {"a", "b", "*"}


def test_what_was_cancelled_before_is_already_applied(desk: Desk) -> None:
    desk.apply(command("r", 1, 7, [0]), known=ALONE)
    assert desk.apply(command("s", 1, 7, [0, 1]), known=ALONE) == [("a", Result.ALREADY_APPLIED), ("b", Result.APPLIED)]


def test_two_commands_of_one_tick_take_a_message_back_once(desk: Desk) -> None:
    rows = [command("r", 1, 7, [0]), command("s", 1, 7, [0])]
    assert desk.apply(*rows, known=ALONE) == [("a", Result.APPLIED), ("a", Result.ALREADY_APPLIED)]
    desk.save()
    assert desk.state.cancelled.count == 1


@pytest.mark.parametrize("kind", [SKIP, RESTORE, RESCHEDULE])
def test_what_was_delivered_before_a_rebuild_can_be_neither_skipped_moved_nor_restored(desk: Desk, kind: str) -> None:
    """Its row is loaded again where another message due then waits."""
    done = {"ledger_id": 1, "entry_id": 7, "batch_index": -1, "until": 90_000}
    cancelled, delivered = (pa.Table.from_pylist([done | {"subscription": s}], schema=NOT_TO_DELIVER) for s in (1, 0))
    desk.rebuild(Rebuilt(cancelled=cancelled, delivered=delivered))
    desk.restart()
    expected = Result.ALREADY_APPLIED if kind == RESTORE else Result.TOO_LATE
    assert desk.subscription_mask(ALONE) == [0]
    assert desk.apply(command("r", 1, 7, [0], kind=kind), known=ALONE) == [("a", expected)]
    assert desk.subscription_mask(ALONE) == [0]
    assert desk.apply(command("s", 1, 7, [1]), known=ALONE) == [("b", Result.ALREADY_APPLIED)]
    desk.state.drop_expired(90_000)
    assert not desk.state.has_exceptions


def test_what_was_handed_out_is_too_late(desk: Desk) -> None:
    desk.at(9, released=50_000)
    assert desk.apply(command("r", 1, 7, [0]), known=ALONE) == [("a", Result.TOO_LATE)]
    assert desk.subscription_mask(ALONE) == [0b11]


def test_what_came_only_now_is_not_handed_out_yet_though_it_is_due(desk: Desk) -> None:
    desk.at(9, released=60_000)
    assert desk.apply(command("r", 1, 7, [0]), known=ALONE, is_new=True) == [("a", Result.APPLIED)]


def test_an_answer_is_passed_on(desk: Desk) -> None:
    """NOT_ALLOWED and INVALID come with the command's row."""
    rows = [
        {**command("r", -1, -1, []), "kind": ANSWER, "subscription": name, "result": result, "reason": "why"}
        for name, result in (("a", Result.NOT_ALLOWED), (None, Result.INVALID))
    ]
    outcomes = desk.publish(commands(rows), {"r": 1})
    assert results(outcomes) == [("a", Result.NOT_ALLOWED), (None, Result.INVALID)]
    assert outcomes["reason"].to_pylist() == ["why", "why"]
    assert desk.control.n_waiting == 0


# What is rejected.


REJECTED = messages([(1, 7, 90_000)], reason="too large")


def test_a_rejected_message_is_handed_out_at_once_and_so_too_late(desk: Desk) -> None:
    desk.at(5, 10_000, ingested_through=4)
    desk.apply(command("r", 1, 7, [0]))
    assert desk.arrive(REJECTED) == [("a", Result.TOO_LATE)]
    assert desk.subscription_mask(REJECTED) == [0b11]


@pytest.mark.parametrize("ticks_later", [0, 1, 2])
def test_a_command_for_a_rejected_message_changes_no_count(ticks_later: int) -> None:
    store = MemoryStore()
    published = []
    for n in range(1, 5):
        rows = [command("r", 1, 7, [0, 1])] if n == 1 + ticks_later else []
        new = REJECTED if n == 1 else MESSAGES.empty_table()
        tick_input = TickInput(messages=new, commands=commands(rows), request_ids={"r": 1})
        effects = Shard(store, SUBSCRIPTIONS, 1_000_000).apply(tick_at(n, n * 100, ingested_through=n), tick_input)
        assert effects.status["delayed"] == 0
        assert [r.rows["subscription_mask"].to_pylist() for r in effects.releases] == ([[0]] if n == 1 else [])
        published += results(effects.outcomes)
    assert published == [("a", Result.TOO_LATE), ("b", Result.TOO_LATE)]


def test_a_command_for_a_topic_without_a_route_waits_until_it_has_been_read_again(desk: Desk) -> None:
    away = Subscriptions(SUBSCRIPTIONS, without_route={TOPIC})
    assert desk.apply(command("r", 1, 7, cancel_at=3_000)) == [("a", Result.WAITING)]
    desk.save()
    desk.open(away)
    desk.at(2, 60_000)
    assert desk.expire() == []
    assert desk.apply(command("s", 1, 8, [1])) == [("b", Result.WAITING)], "all before has come, but of this topic"
    assert desk.choose_subscriptions(messages([(1, 9, 50_000)])).tolist() == [0]
    desk.save()

    desk.open()
    desk.at(3, 61_000, ingested_through=2)
    desk.control.wait_again([TOPIC])
    assert desk.expire() == []
    late = messages([(1, 7, 3_000)])
    assert desk.arrive(late) == [("a", Result.APPLIED)]
    assert desk.subscription_mask(late) == [0b10]
    desk.at(4, 62_000, ingested_through=3)
    assert desk.expire() == [("b", Result.NOT_FOUND)]


def test_a_subscription_that_is_added_wants_what_was_cancelled_for_all_before(desk: Desk) -> None:
    desk.apply(command("r", 1, 7, [0, 1]), known=ALONE)
    assert (desk.subscription_mask(ALONE), desk.state.unwanted) == ([0], 1)
    desk.save()
    desk.open({TOPIC: ["a", "b", "c"]})
    assert (desk.subscription_mask(ALONE), desk.state.unwanted) == ([0b100], 0)


def test_one_that_was_taken_out_gets_nothing_and_its_skips_hold_when_it_is_back(desk: Desk) -> None:
    desk.apply(command("r", 1, 7, [1]), known=ALONE)
    desk.save()
    desk.open(Subscriptions(SUBSCRIPTIONS, removed={TOPIC: 0b10}))
    assert (desk.subscription_mask(ALONE), desk.subscription_mask(BATCH)) == ([0b01], [0b01] * 3)
    desk.save()
    desk.open()
    assert (desk.subscription_mask(ALONE), desk.subscription_mask(BATCH)) == ([0b01], [0b11] * 3)
