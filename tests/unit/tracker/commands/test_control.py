"""What cancels and skips come to: each outcome, batches, repeated requests, and what is forgotten when."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import pytest

from tests.support.tracker.messages import TOPIC, Answers, batches, command, commands, messages, tick_at
from tracker.commands.control import Control
from tracker.commands.match import with_released
from tracker.commands.message_state.cancelled import Compression
from tracker.commands.message_state.rebuilt import NOT_TO_DELIVER, Rebuilt
from tracker.commands.moment import Moment
from tracker.commands.requests.repeats import OTHER_BODY
from tracker.commands.schema import ANSWER, KNOWN, OUTCOME_ROWS, REPEAT, RESCHEDULE, RESTORE, SKIP, PauseChange
from tracker.messages import MESSAGES, concat
from tracker.shard import Shard
from tracker.store import MemoryStore
from tracker.subscriptions import Subscriptions
from tracker.tick import TickInput
from tracker.wire.delaylake_pb2 import Result

SUBSCRIPTIONS = {TOPIC: ["a", "b"]}
TICK_MILLIS = 1_000
MARGIN = 2 * TICK_MILLIS

NOTHING = KNOWN.empty_table()


class Desk:
    """A control on a store, and the moment, which passes on by `at`."""

    def __init__(self, compression: Compression | None = None) -> None:
        self.store = MemoryStore()
        self.compression = compression
        self.control = Control(self.store, SUBSCRIPTIONS, TICK_MILLIS, compression)
        self.moment = Moment(tick=1, now=1_000, released=1_000, ingested_through=1)
        self.answers = Answers()

    def at(self, tick: int, released: int, ingested_through: int | None = None) -> Desk:
        """`ingested_through`: up to which tick's commands what was published before them is in; else this tick's."""
        self.moment = Moment(tick, released, released, tick if ingested_through is None else ingested_through)
        return self

    def restart(self) -> None:
        self.control.save()
        self.control = Control(self.store, SUBSCRIPTIONS, TICK_MILLIS, self.compression)

    def apply(self, *rows: dict[str, object], known: pa.Table = NOTHING, is_new: bool = False) -> list[tuple[str, int]]:
        """(subscription, result) of each outcome."""
        return results(self.outcomes(*rows, known=known, is_new=is_new))

    def outcomes(
        self,
        *rows: dict[str, object],
        known: pa.Table = NOTHING,
        is_new: bool = False,
        pause_changes: Sequence[PauseChange] = (),
        arrived: pa.Table = OUTCOME_ROWS.empty_table(),  # noqa: B008
    ) -> pa.Table:
        ids = {str(row["request_id"]): int(str(row["body"])) for row in reversed(rows)}
        new = np.full(known.num_rows, is_new)
        published = self.control.apply(
            commands(rows),
            ids,
            known.select(KNOWN.names),
            new,
            self.moment,
            pause_changes=pause_changes,
            first_answers=self.answers,
            arrived=arrived,
        )
        self.answers.keep(published, self.moment.tick)
        return published

    def arrive(self, rows: pa.Table) -> list[tuple[str, int]]:
        published = self.control.arrive(rows, self.moment)
        self.answers.keep(published, self.moment.tick)
        return results(published)

    def expire(self) -> list[tuple[str, int]]:
        published = self.control.expire(self.moment)
        self.answers.keep(published, self.moment.tick)
        return results(published)

    def subscription_mask(self, rows: pa.Table) -> list[int]:
        masks: list[int] = self.control.subscription_mask(rows).tolist()
        return masks


def results(outcomes: pa.Table) -> list[tuple[str, int]]:
    return list(zip(outcomes["subscription"].to_pylist(), outcomes["result"].to_pylist(), strict=True))


@pytest.fixture
def desk() -> Desk:
    return Desk()


# One message alone in its entry, due at 50,000, and a batch of three.
ALONE = messages([(1, 7, 50_000)])
BATCH = batches([(1, 8, i, 3, 50_000 + i) for i in range(3)])


def test_a_known_message_is_cancelled_for_the_subscriptions_named(desk: Desk) -> None:
    assert desk.subscription_mask(ALONE) == [0b11]
    assert desk.apply(command("r", 1, 7, [1]), known=ALONE) == [("b", Result.APPLIED)]
    assert desk.subscription_mask(ALONE) == [0b01]
    assert desk.control.unwanted == 0
    assert desk.apply(command("s", 1, 7, [0]), known=ALONE) == [("a", Result.APPLIED)]
    assert desk.subscription_mask(ALONE) == [0]
    assert desk.control.unwanted == 1


def test_a_cancel_need_not_name_the_right_time(desk: Desk) -> None:
    assert desk.apply(command("r", 1, 7, [0, 1], cancel_at=3), known=ALONE) == [
        ("a", Result.APPLIED),
        ("b", Result.APPLIED),
    ]
    cancels = desk.control.take_cancels()
    assert cancels["subscription"].to_pylist() == ["a", "b"]
    assert cancels["deliver_at"].to_pylist() == [50_000, 50_000]
    assert desk.control.take_cancels().num_rows == 0


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
    desk.control.save()
    desk.control = Control(desk.store, {TOPIC: ["a", "b", "c"]}, TICK_MILLIS)
    desk.at(2, 1_100)
    assert desk.arrive(ALONE) == [(name, Result.APPLIED) for name in ("a", "b", "c", "*")]
    assert {name for name, _ in desk.arrive(BATCH)} == {"a", "b"}


def test_what_was_cancelled_before_is_already_applied(desk: Desk) -> None:
    desk.apply(command("r", 1, 7, [0]), known=ALONE)
    assert desk.apply(command("s", 1, 7, [0, 1]), known=ALONE) == [("a", Result.ALREADY_APPLIED), ("b", Result.APPLIED)]


def test_two_commands_of_one_tick_take_a_message_back_once(desk: Desk) -> None:
    rows = [command("r", 1, 7, [0]), command("s", 1, 7, [0])]
    assert desk.apply(*rows, known=ALONE) == [("a", Result.APPLIED), ("a", Result.ALREADY_APPLIED)]
    desk.control.save()
    assert desk.control.cancelled.count == 1


@pytest.mark.parametrize("kind", [SKIP, RESTORE, RESCHEDULE])
def test_what_was_delivered_before_a_rebuild_can_be_neither_skipped_moved_nor_restored(desk: Desk, kind: str) -> None:
    """Its row is loaded again where another message due then waits."""
    done = {"ledger_id": 1, "entry_id": 7, "batch_index": -1, "until": 90_000}
    cancelled, delivered = (pa.Table.from_pylist([done | {"subscription": s}], schema=NOT_TO_DELIVER) for s in (1, 0))
    desk.control.rebuild(Rebuilt(cancelled=cancelled, delivered=delivered), 1_000)
    desk.restart()
    expected = Result.ALREADY_APPLIED if kind == RESTORE else Result.TOO_LATE
    assert desk.subscription_mask(ALONE) == [0]
    assert desk.apply(command("r", 1, 7, [0], kind=kind), known=ALONE) == [("a", expected)]
    assert desk.subscription_mask(ALONE) == [0]
    assert desk.apply(command("s", 1, 7, [1]), known=ALONE) == [("b", Result.ALREADY_APPLIED)]
    desk.control.drop_expired(90_000)
    assert not desk.control.has_exceptions


def test_what_was_handed_out_is_too_late(desk: Desk) -> None:
    desk.at(9, released=50_000)
    assert desk.apply(command("r", 1, 7, [0]), known=ALONE) == [("a", Result.TOO_LATE)]
    assert desk.subscription_mask(ALONE) == [0b11]


def test_what_came_only_now_is_not_handed_out_yet_though_it_is_due(desk: Desk) -> None:
    desk.at(9, released=60_000)
    assert desk.apply(command("r", 1, 7, [0]), known=ALONE, is_new=True) == [("a", Result.APPLIED)]


def test_a_repeated_request_is_answered_as_the_first_time(desk: Desk) -> None:
    desk.apply(command("r", 1, 7, [0]), known=ALONE)
    desk.at(2, 50_000)
    desk.restart()
    # By now it would be too late.
    published = desk.outcomes(command("r", 1, 7, [0]), known=ALONE)
    assert results(published) == [("a", Result.APPLIED)]
    assert published["is_repeat"].to_pylist() == [True]
    assert published["sequence"].to_pylist() == [None]
    assert desk.subscription_mask(ALONE) == [0b10]


def test_a_repeat_of_what_was_refused_is_refused_again(desk: Desk) -> None:
    desk.at(2, 50_000)
    assert desk.apply(command("late", 1, 7, [0]), known=ALONE) == [("a", Result.TOO_LATE)]
    assert desk.apply(command("nowhere", 1, 9, [1])) == [("b", Result.NOT_FOUND)]
    desk.at(3, 51_000)
    assert desk.apply(command("late", 1, 7, [0]), known=ALONE) == [("a", Result.TOO_LATE)]
    # Its message has come since, and stays.
    come = messages([(1, 9, 70_000)])
    assert desk.apply(command("nowhere", 1, 9, [1]), known=come) == [("b", Result.NOT_FOUND)]
    assert desk.subscription_mask(come) == [0b11]


def test_another_command_under_a_request_id_is_invalid_and_changes_nothing(desk: Desk) -> None:
    desk.apply(command("r", 1, 7, [0]), known=ALONE)
    desk.at(2, 1_100)
    desk.restart()
    published = desk.outcomes(command("r", 1, 7, [1], body=2), known=ALONE)
    assert results(published) == [("b", Result.INVALID)]
    assert published["reason"].to_pylist() == [OTHER_BODY]
    assert desk.subscription_mask(ALONE) == [0b10]
    desk.at(3, 1_200)
    # The first one stays the first one.
    assert desk.apply(command("r", 1, 7, [0]), known=ALONE) == [("a", Result.APPLIED)]
    assert desk.apply(command("r", 1, 7, [1], body=2), known=ALONE) == [("b", Result.INVALID)]


def test_a_request_id_that_comes_twice_in_a_tick_is_applied_once(desk: Desk) -> None:
    twice = command("r", 1, 7, [0]), command("r", 1, 7, [0]) | {"kind": REPEAT}
    published = desk.outcomes(*twice, command("r", 1, 8, [0], body=2) | {"kind": REPEAT}, known=concat([ALONE, BATCH]))
    assert [(row["entry_id"], row["result"], bool(row["is_repeat"])) for row in published.to_pylist()] == [
        (7, Result.APPLIED, False),
        (7, Result.APPLIED, True),
        (8, Result.INVALID, False),
    ]
    assert desk.subscription_mask(BATCH) == [0b11] * 3


def test_a_repeat_tells_what_became_of_a_command_that_waited(desk: Desk) -> None:
    waited = command("r", 1, 7, [0], cancel_at=50_000)
    desk.at(1, 1_000, ingested_through=0)
    assert desk.apply(waited) == [("a", Result.WAITING)]
    desk.at(2, 1_100, ingested_through=0)
    assert desk.apply(waited) == [("a", Result.WAITING)]
    # Also when it has come in the very tick in which the repeat does.
    desk.at(3, 1_200)
    arrived = desk.control.arrive(ALONE, desk.moment)
    assert results(arrived) == [("a", Result.APPLIED)]
    assert results(desk.outcomes(waited, known=ALONE, arrived=arrived)) == [("a", Result.APPLIED)]
    desk.answers.keep(arrived, 3)
    desk.at(4, 1_300)
    assert desk.apply(waited, known=ALONE) == [("a", Result.APPLIED)]


def test_of_a_batch_each_message_is_answered_again(desk: Desk) -> None:
    late = batches([(1, 8, i, 3, 900 + 200 * i) for i in range(3)])
    whole = command("r", 1, 8, [0])
    first = [Result.TOO_LATE, Result.APPLIED, Result.APPLIED]
    for tick in (1, 2):
        desk.at(tick, 1_000)
        published = desk.outcomes(whole | {"sum_up": True}, known=late).to_pylist()
        assert [(row["batch_index"], row["result"], row["sum_up"]) for row in published] == [
            (i, result, False) for i, result in enumerate(first)
        ]


def test_a_repeated_pause_does_not_pause_again(desk: Desk) -> None:
    def pause(request: str, is_paused: bool) -> list[tuple[str, int]]:
        answer = command(request, -1, -1, [], kind=ANSWER) | {"subscription": "a", "result": Result.APPLIED}
        return results(desk.outcomes(answer, pause_changes=[PauseChange(request, TOPIC, 0b01, is_paused)]))

    for tick, (request, is_paused) in enumerate([("r", True), ("s", False), ("r", True)], 1):
        desk.at(tick, 1_000)
        assert pause(request, is_paused) == [("a", Result.APPLIED)]
    assert desk.control.hand_out(ALONE, desk.moment).tolist() == [0b11]


def test_request_ids_of_other_shards_are_remembered_too(desk: Desk) -> None:
    """A request may name messages of several shards, and come again for some of them only."""
    other = desk.outcomes(command("r", 1, 9, [0]))
    assert results(other) == [("a", Result.NOT_FOUND)]
    desk.control = Control(desk.store, SUBSCRIPTIONS, TICK_MILLIS)
    desk.at(2, 1_000)
    published = desk.outcomes(command("r", 1, 7, [0], body=2), known=ALONE)
    assert results(published) == [("a", Result.INVALID)]


def test_an_id_whose_hash_is_that_of_another_is_a_request_of_its_own(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracker.commands.requests.request_log._hashes", lambda ids: np.full(len(list(ids)), 7))
    desk.apply(command("r", 1, 7, [0]), known=ALONE)
    desk.at(2, 1_000)
    assert desk.apply(command("s", 1, 7, [1]), known=ALONE) == [("b", Result.APPLIED)]
    desk.at(3, 1_000)
    for request, name in (("r", "a"), ("s", "b")):
        again = command(request, 1, 7, ["ab".index(name)])
        assert desk.apply(again, known=ALONE) == [(name, Result.APPLIED)]


def test_after_a_rebuild_another_command_under_a_request_id_is_told_from_the_first(desk: Desk) -> None:
    published = desk.outcomes(command("r", 1, 7, [0], body=7), known=ALONE)
    assert published["body"].to_pylist() == [7]
    desk.at(2, 1_100)
    desk.control = Control(MemoryStore(), SUBSCRIPTIONS, TICK_MILLIS)
    desk.control.rebuild(Rebuilt(request_ids={"r": 7}), 1_000)
    assert desk.apply(command("r", 1, 7, [0], body=8), known=ALONE) == [("a", Result.INVALID)]
    assert desk.apply(command("r", 1, 7, [0], body=7), known=ALONE) == [("a", Result.APPLIED)]


def test_after_a_rebuild_a_request_is_known_by_its_answers(desk: Desk) -> None:
    desk.apply(command("r", 1, 7, [0]), known=ALONE)
    desk.store.values.clear()
    desk.control = Control(desk.store, SUBSCRIPTIONS, TICK_MILLIS)
    desk.control.rebuild(Rebuilt(request_ids={"r": 0}), 1_000)
    desk.at(2, 1_000)
    assert desk.apply(command("r", 1, 7, [0]), known=ALONE) == [("a", Result.APPLIED)]
    assert desk.apply(command("r", 1, 8, [0]), known=BATCH) == [("a", Result.INVALID)]
    assert desk.subscription_mask(BATCH) == [0b11] * 3


@pytest.mark.parametrize("is_rebuilt", [False, True])
@pytest.mark.parametrize("now", [["a", "b", "c"], ["b", "c"]])
def test_a_repeat_is_answered_for_the_subscriptions_of_the_first_time(
    desk: Desk, now: list[str], is_rebuilt: bool
) -> None:
    both = [("a", Result.APPLIED), ("b", Result.APPLIED)]
    pause = [command("p", -1, -1, [], kind=ANSWER) | {"subscription": s, "result": Result.APPLIED} for s in "abc"]
    assert sorted(desk.apply(command("r", 1, 7, [0, 1]), known=ALONE)) == both
    assert desk.apply(*pause[:2]) == both
    desk.control.save()
    names = Subscriptions({TOPIC: ["a", "b", "c"]}, removed={} if "a" in now else {TOPIC: 0b001})
    if is_rebuilt:
        desk.store.values.clear()
    desk.control = Control(desk.store, names, TICK_MILLIS)
    if is_rebuilt:
        desk.control.rebuild(Rebuilt(request_ids={"r": 0, "p": 0}), 1_000)
    desk.at(2, 1_000)
    known = both if not is_rebuilt else [pair for pair in both if pair[0] in now]  # what it said is not known any more
    assert sorted(desk.apply(command("r", 1, 7, ["abc".index(s) for s in now]), known=ALONE)) == known
    if not is_rebuilt:
        assert sorted(desk.apply(*[p for p in pause if p["subscription"] in now])) == both


def test_a_repeat_for_subscriptions_that_are_all_gone_is_answered_as_the_first_time(desk: Desk) -> None:
    desk.apply(command("r", 1, 7, [0, 1]), known=ALONE)
    desk.control.save()
    desk.control = Control(desk.store, Subscriptions(SUBSCRIPTIONS, removed={TOPIC: 0b11}), TICK_MILLIS)
    desk.at(2, 1_000)
    gone = [command("r", -1, -1, [], kind=ANSWER) | {"subscription": s, "result": Result.NOT_FOUND} for s in "ab"]
    published = desk.control.apply(
        commands(gone), {}, NOTHING, np.zeros(0, np.bool_), desk.moment, first_answers=desk.answers
    )
    assert sorted(results(published)) == [("a", Result.APPLIED), ("b", Result.APPLIED)]


def test_a_request_id_is_forgotten_only_after_a_day(desk: Desk) -> None:
    for tick, (hours, results_then) in enumerate(
        [(0, [("b", Result.APPLIED)]), (24, [("b", Result.APPLIED)]), (26, [("b", Result.ALREADY_APPLIED)])], 1
    ):
        desk.moment = Moment(tick, 1_000 + hours * 3_600_000, 1_000, tick)
        assert desk.apply(command("r", 1, 7, [1]), known=ALONE) == results_then
        desk.apply(command(f"{hours}", 1, 9, [1]))


# Commands before their message.


@pytest.mark.parametrize("cancel_at", [None, 50_000])
def test_a_command_that_is_ahead_of_its_message_waits_and_is_applied(desk: Desk, cancel_at: int | None) -> None:
    desk.at(5, 10_000, ingested_through=4)
    assert desk.apply(command("r", 1, 7, [0, 1], cancel_at=cancel_at)) == [("a", Result.WAITING), ("b", Result.WAITING)]
    assert desk.control.waiting == 1
    desk.restart()
    desk.at(6, 10_100, ingested_through=4)
    assert desk.arrive(messages([(1, 6, 50_000), (2, 7, 50_000)])) == []
    assert desk.arrive(ALONE) == [("a", Result.APPLIED), ("b", Result.APPLIED)]
    assert desk.subscription_mask(ALONE) == [0]
    assert desk.control.waiting == 0
    assert desk.expire() == []


def test_a_message_that_was_cancelled_before_it_came_is_counted_as_unwanted(desk: Desk) -> None:
    """It is tracked all the same, so that it can be restored."""
    desk.at(5, 10_000, ingested_through=4)
    desk.apply(command("r", 1, 7, [0, 1]))
    desk.arrive(ALONE)
    assert desk.control.unwanted == 1


def test_a_message_that_came_late_is_cancelled_though_its_time_is_past(desk: Desk) -> None:
    desk.at(5, 10_000, ingested_through=4)
    desk.apply(command("r", 1, 7, [0]))
    desk.at(6, 60_000, ingested_through=4)
    assert desk.arrive(ALONE) == [("a", Result.APPLIED)]


def test_a_skip_waits_until_what_was_published_before_it_has_come(desk: Desk) -> None:
    desk.at(5, 10_000, ingested_through=4)
    assert desk.apply(command("r", 1, 7, [1])) == [("b", Result.WAITING)]
    assert desk.at(6, 99_000, ingested_through=4).expire() == []
    assert desk.at(7, 99_000, ingested_through=5).expire() == [("b", Result.NOT_FOUND)]
    assert desk.control.waiting == 0
    assert desk.arrive(ALONE) == []


def test_a_skip_of_what_is_not_there_is_not_found(desk: Desk) -> None:
    assert desk.at(5, 10_000).apply(command("r", 1, 7, [0])) == [("a", Result.NOT_FOUND)]
    assert desk.control.waiting == 0


def test_a_cancel_in_advance_waits_until_two_ticks_after_its_time(desk: Desk) -> None:
    desk.at(5, 10_000)
    assert desk.apply(command("r", 1, 7, [0], cancel_at=50_000)) == [("a", Result.WAITING)]
    cancels = desk.control.take_cancels()
    assert cancels["deliver_at"].to_pylist() == [50_000 - MARGIN]
    assert desk.at(6, 50_000 + MARGIN - 1).expire() == []
    assert desk.at(7, 50_000 + MARGIN).expire() == [("a", Result.NOT_FOUND)]


def test_a_cancel_in_advance_is_due_now_at_the_earliest(desk: Desk) -> None:
    desk.at(5, 10_000)
    desk.apply(command("r", 1, 7, [0], cancel_at=10_500))
    assert desk.control.take_cancels()["deliver_at"].to_pylist() == [10_000]


def test_a_cancel_in_advance_outlasts_its_time_where_messages_may_still_come(desk: Desk) -> None:
    desk.at(5, 10_000, ingested_through=4)
    assert desk.apply(command("r", 1, 7, [0], cancel_at=9_000)) == [("a", Result.WAITING)]
    assert desk.at(6, 90_000, ingested_through=4).expire() == []
    assert desk.arrive(ALONE) == [("a", Result.APPLIED)]


def test_a_cancel_of_a_past_time_is_too_late_where_no_message_can_come(desk: Desk) -> None:
    assert desk.at(5, 10_000).apply(command("r", 1, 7, [0], cancel_at=10_000)) == [("a", Result.TOO_LATE)]
    assert desk.control.waiting == 0


def test_a_command_waits_only_for_its_topic_and_partition(desk: Desk) -> None:
    desk.at(5, 10_000, ingested_through=4)
    desk.apply(command("r", 1, 7, [0], partition=2))
    assert desk.arrive(messages([(1, 7, 50_000)], partition=3)) == [("a", Result.NOT_FOUND)]
    desk.apply(command("s", 1, 7, [0], partition=2))
    assert desk.arrive(messages([(1, 7, 50_000)], partition=2)) == [("a", Result.APPLIED)]


def test_an_answer_is_passed_on(desk: Desk) -> None:
    """NOT_ALLOWED and INVALID come with the command's row."""
    rows = [
        {**command("r", -1, -1, []), "kind": ANSWER, "subscription": name, "result": result, "reason": "why"}
        for name, result in (("a", Result.NOT_ALLOWED), (None, Result.INVALID))
    ]
    outcomes = desk.control.apply(commands(rows), {"r": 1}, NOTHING, np.zeros(0, np.bool_), desk.moment)
    assert results(outcomes) == [("a", Result.NOT_ALLOWED), (None, Result.INVALID)]
    assert outcomes["reason"].to_pylist() == ["why", "why"]
    assert desk.control.waiting == 0


# Batches.


def indexes(outcomes: pa.Table) -> list[tuple[int, int]]:
    return list(zip(outcomes["batch_index"].to_pylist(), outcomes["result"].to_pylist(), strict=True))


def apply_to_batch(desk: Desk, rows: Iterable[dict[str, object]], known: pa.Table = BATCH) -> list[tuple[int, int]]:
    rows = list(rows)
    ids = {str(row["request_id"]): 1 for row in rows}
    is_new = np.zeros(known.num_rows, np.bool_)
    return indexes(desk.control.apply(commands(rows), ids, known.select(KNOWN.names), is_new, desk.moment))


def test_one_message_of_a_batch_is_cancelled_alone(desk: Desk) -> None:
    assert apply_to_batch(desk, [command("r", 1, 8, batch_index=1)]) == [(1, Result.APPLIED)]
    assert desk.subscription_mask(BATCH) == [0b11, 0b10, 0b11]


def test_an_entry_whole_has_one_outcome(desk: Desk) -> None:
    assert apply_to_batch(desk, [command("r", 1, 8)]) == [(-1, Result.APPLIED)]
    assert desk.subscription_mask(BATCH) == [0b10] * 3


def test_all_messages_of_a_batch_one_by_one_are_the_entry_whole(desk: Desk) -> None:
    for i in (2, 0, 1):
        apply_to_batch(desk, [command(f"r{i}", 1, 8, batch_index=i)])
    whole = Desk()
    apply_to_batch(whole, [command("r", 1, 8)])
    for each in (desk, whole):
        each.control.save()
    assert desk.store.get("taken_back", (1, 0)) == whole.store.get("taken_back", (1, 0))
    assert desk.control.cancelled.count == 1
    assert apply_to_batch(desk, [command("s", 1, 8)]) == [(-1, Result.ALREADY_APPLIED)]


def test_the_rest_of_an_entry_is_applied_where_part_of_it_was_before(desk: Desk) -> None:
    apply_to_batch(desk, [command("r", 1, 8, batch_index=1)])
    assert apply_to_batch(desk, [command("s", 1, 8)]) == [(-1, Result.APPLIED)]
    assert desk.subscription_mask(BATCH) == [0b10] * 3
    desk.control.save()
    assert desk.control.cancelled.count == 1


def test_an_entry_of_which_part_is_handed_out_has_an_outcome_for_each_message(desk: Desk) -> None:
    desk.at(5, released=50_001)
    assert apply_to_batch(desk, [command("r", 1, 8)]) == [
        (0, Result.TOO_LATE),
        (1, Result.TOO_LATE),
        (2, Result.APPLIED),
    ]
    assert desk.subscription_mask(BATCH) == [0b11, 0b11, 0b10]
    desk.at(6, released=50_002)
    assert apply_to_batch(Desk().at(6, 50_002), [command("r", 1, 8)]) == [(-1, Result.TOO_LATE)]


def test_messages_moved_to_many_times_in_one_tick_are_where_the_last_command_says(desk: Desk) -> None:
    named = [(7, -1, 60_000), (8, 1, 61_000), (8, 2, 62_000), (7, 0, 63_000), (8, -1, 64_000), (8, 0, 65_000)]
    rows = [
        command(f"r{i}", 1, entry, [0], index, time, kind=RESCHEDULE) for i, (entry, index, time) in enumerate(named)
    ]
    payload_rows = pa.concat_tables([ALONE, BATCH])
    known, new = payload_rows.select(KNOWN.names), np.zeros(payload_rows.num_rows, np.bool_)
    published = desk.control.apply(
        commands(rows), {f"r{i}": 1 for i in range(6)}, known, new, desk.moment, payload_rows=payload_rows
    )
    assert set(published["result"].to_pylist()) == {Result.APPLIED}
    moves = desk.control.take_moves()
    wanted = moves.filter(pa.array([masks & 1 > 0 for masks in desk.subscription_mask(moves)])).to_pylist()
    assert {(m["entry_id"], m["batch_index"], m["deliver_at"]) for m in wanted} == {
        (7, -1, 63_000),
        (8, 0, 65_000),
        (8, 1, 64_000),
        (8, 2, 64_000),
    }


def test_only_what_a_command_names_one_by_one_is_summed_up(desk: Desk) -> None:
    desk.at(5, released=50_001)
    rows = [command("whole", 1, 8), *(command("single", 1, 8, batch_index=i) for i in range(3))]
    rows = [row | {"sum_up": True} for row in [*rows, command("alone", 1, 7)]]
    known = pa.concat_tables([BATCH, ALONE]).select(KNOWN.names)
    new = np.zeros(known.num_rows, np.bool_)
    published = desk.control.apply(
        commands(rows), dict.fromkeys(["whole", "single", "alone"], 1), known, new, desk.moment
    ).to_pylist()
    assert {(o["request_id"], o["batch_index"], o["sum_up"]) for o in published} == {
        *(("whole", i, False) for i in range(3)),
        *(("single", i, True) for i in range(3)),
        ("alone", -1, True),
    }


def test_a_batch_index_that_the_entry_does_not_have_is_invalid(desk: Desk) -> None:
    assert apply_to_batch(desk, [command("r", 1, 8, batch_index=3)]) == [(3, Result.INVALID)]
    assert apply_to_batch(desk, [command("s", 1, 7, batch_index=1)], ALONE) == [(1, Result.INVALID)]
    assert apply_to_batch(desk, [command("t", 1, 7, batch_index=0)], ALONE) == [(-1, Result.APPLIED)]


def test_what_of_an_entry_is_in_no_bucket_was_handed_out_before() -> None:
    found = batches([(1, 8, 1, 3, 50_001), (1, 9, -1, 2, 0), (1, 7, -1, 1, 50_000)]).select(KNOWN.names)
    rows = with_released(found)
    assert sorted(
        zip(rows["entry_id"].to_pylist(), rows["batch_index"].to_pylist(), rows["deliver_at"].to_pylist(), strict=True)
    ) == [(7, -1, 50_000), (8, 0, 0), (8, 1, 50_001), (8, 2, 0), (9, 0, 0), (9, 1, 0)]
    assert with_released(NOTHING).num_rows == 0


# What is kept, and how long.


@pytest.mark.parametrize("codec", ["NONE", "LZ4", "ZLIB", "ZSTD", "SNAPPY"])
def test_what_was_cancelled_outlasts_a_restart_whatever_the_codec(codec: str) -> None:
    desk = Desk(Compression(codec, threshold_bytes=0))
    many = messages([(1, i * i, 50_000) for i in range(500)])
    desk.apply(*(command(f"r{i}", 1, i * i, [i % 2]) for i in range(500)), known=many)
    apply_to_batch(desk, [command("s", 1, 8, batch_index=2)])
    masks = desk.subscription_mask(many)
    desk.restart()
    assert desk.subscription_mask(many) == masks == [0b10 if i % 2 == 0 else 0b01 for i in range(500)]
    assert desk.subscription_mask(BATCH) == [0b11, 0b11, 0b10]
    assert desk.control.cancelled.count == 501
    # Another codec reads what this one wrote.
    desk.compression = Compression("NONE")
    desk.restart()
    assert desk.subscription_mask(many) == masks


def test_small_bitmaps_are_not_compressed() -> None:
    sizes = []
    for codec in ("NONE", "ZSTD"):
        desk = Desk(Compression(codec, threshold_bytes=1_000_000))
        desk.apply(command("r", 1, 7), known=ALONE)
        desk.control.save()
        sizes.append(desk.control.cancelled.n_bytes)
    assert sizes[0] == sizes[1]


def test_what_was_cancelled_is_forgotten_two_ticks_after_its_time(desk: Desk) -> None:
    later = messages([(1, 9, 60_000)])
    desk.apply(command("r", 1, 7), known=ALONE)
    desk.apply(command("s", 1, 9), known=later)
    desk.control.save()
    desk.control.cancelled.drop_expired(60_000 + MARGIN - 1)
    assert desk.subscription_mask(ALONE) == [0b10]
    desk.control.cancelled.drop_expired(60_000 + MARGIN)
    assert desk.subscription_mask(ALONE) == [0b11]
    assert not desk.control.cancelled
    desk.restart()
    assert desk.control.cancelled.n_bytes == 0
    assert not [key for key in desk.store.values if key[0] == "taken_back"]


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
    desk.control.save()
    desk.control = Control(desk.store, away, TICK_MILLIS)
    desk.at(2, 60_000)
    assert desk.expire() == []
    assert desk.apply(command("s", 1, 8, [1])) == [("b", Result.WAITING)], "all before has come, but of this topic"
    assert desk.control.hand_out(messages([(1, 9, 50_000)]), desk.moment).tolist() == [0]
    desk.control.save()

    desk.control = Control(desk.store, SUBSCRIPTIONS, TICK_MILLIS)
    desk.at(3, 61_000, ingested_through=2)
    desk.control.reinstate([TOPIC], MESSAGES.empty_table(), desk.moment)
    assert desk.expire() == []
    late = messages([(1, 7, 3_000)])
    assert desk.arrive(late) == [("a", Result.APPLIED)]
    assert desk.subscription_mask(late) == [0b10]
    desk.at(4, 62_000, ingested_through=3)
    assert desk.expire() == [("b", Result.NOT_FOUND)]


def test_a_subscription_that_is_added_wants_what_was_cancelled_for_all_before(desk: Desk) -> None:
    desk.apply(command("r", 1, 7, [0, 1]), known=ALONE)
    assert (desk.subscription_mask(ALONE), desk.control.unwanted) == ([0], 1)
    desk.control.save()
    desk.control = Control(desk.store, {TOPIC: ["a", "b", "c"]}, TICK_MILLIS)
    assert (desk.subscription_mask(ALONE), desk.control.unwanted) == ([0b100], 0)


def test_one_that_was_taken_out_gets_nothing_and_its_skips_hold_when_it_is_back(desk: Desk) -> None:
    desk.apply(command("r", 1, 7, [1]), known=ALONE)
    desk.control.save()
    desk.control = Control(desk.store, Subscriptions(SUBSCRIPTIONS, removed={TOPIC: 0b10}), TICK_MILLIS)
    assert (desk.subscription_mask(ALONE), desk.subscription_mask(BATCH)) == ([0b01], [0b01] * 3)
    desk.control.save()
    desk.control = Control(desk.store, SUBSCRIPTIONS, TICK_MILLIS)
    assert (desk.subscription_mask(ALONE), desk.subscription_mask(BATCH)) == ([0b01], [0b11] * 3)


def test_what_was_delivered_before_a_rebuild_is_forgotten_for_good_when_it_is_past(desk: Desk) -> None:
    done = {"subscription": 0, "ledger_id": 1, "entry_id": 7, "batch_index": -1, "until": 5_000}
    desk.control.rebuild(Rebuilt(delivered=pa.Table.from_pylist([done], schema=NOT_TO_DELIVER)), 1_000)
    desk.control.save()
    again = Control(desk.store, SUBSCRIPTIONS, TICK_MILLIS)
    assert again.has_exceptions
    again.drop_expired(5_000)
    again.save()
    assert not Control(desk.store, SUBSCRIPTIONS, TICK_MILLIS).has_exceptions
    assert not [key for key in desk.store.values if key[0] == "delivered"]
