"""A request that comes again is answered as the first time; another one under its id is refused."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.tracker.control_desk import ALONE, BATCH, SUBSCRIPTIONS, Desk, results
from tests.support.tracker.messages import TOPIC, batches, command, commands, messages
from tracker.commands.kinds import ANSWER, REPEAT
from tracker.commands.repeats import OTHER_BODY
from tracker.messages import concat
from tracker.rebuilt import Rebuilt
from tracker.schemas import PauseChange
from tracker.store import MemoryStore
from tracker.subscriptions import Subscriptions
from tracker.wire.delaylake_pb2 import Result


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
    arrived = desk.control.apply_waiting(ALONE)
    assert results(arrived) == [("a", Result.APPLIED)]
    assert results(desk.outcomes(waited, known=ALONE, waiting_outcomes=arrived)) == [("a", Result.APPLIED)]
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
    assert desk.choose_subscriptions(ALONE).tolist() == [0b11]


def test_request_ids_of_other_shards_are_remembered_too(desk: Desk) -> None:
    """A request may name messages of several shards, and come again for some of them only."""
    other = desk.outcomes(command("r", 1, 9, [0]))
    assert results(other) == [("a", Result.NOT_FOUND)]
    desk.open()
    desk.at(2, 1_000)
    published = desk.outcomes(command("r", 1, 7, [0], body=2), known=ALONE)
    assert results(published) == [("a", Result.INVALID)]


def test_an_id_whose_hash_is_that_of_another_is_a_request_of_its_own(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracker.commands.repeats._hashes", lambda ids: np.full(len(list(ids)), 7))
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
    desk.open(store=MemoryStore())
    desk.rebuild(Rebuilt(request_ids={"r": 7}))
    assert desk.apply(command("r", 1, 7, [0], body=8), known=ALONE) == [("a", Result.INVALID)]
    assert desk.apply(command("r", 1, 7, [0], body=7), known=ALONE) == [("a", Result.APPLIED)]


def test_after_a_rebuild_a_request_is_known_by_its_answers(desk: Desk) -> None:
    desk.apply(command("r", 1, 7, [0]), known=ALONE)
    desk.store.values.clear()
    desk.open()
    desk.rebuild(Rebuilt(request_ids={"r": 0}))
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
    desk.save()
    names = Subscriptions({TOPIC: ["a", "b", "c"]}, removed={} if "a" in now else {TOPIC: 0b001})
    if is_rebuilt:
        desk.store.values.clear()
    desk.open(names)
    if is_rebuilt:
        desk.rebuild(Rebuilt(request_ids={"r": 0, "p": 0}))
    desk.at(2, 1_000)
    known = both if not is_rebuilt else [pair for pair in both if pair[0] in now]  # what it said is not known any more
    assert sorted(desk.apply(command("r", 1, 7, ["abc".index(s) for s in now]), known=ALONE)) == known
    if not is_rebuilt:
        assert sorted(desk.apply(*[p for p in pause if p["subscription"] in now])) == both


def test_a_repeat_for_subscriptions_that_are_all_gone_is_answered_as_the_first_time(desk: Desk) -> None:
    desk.apply(command("r", 1, 7, [0, 1]), known=ALONE)
    desk.save()
    desk.open(Subscriptions(SUBSCRIPTIONS, removed={TOPIC: 0b11}))
    desk.at(2, 1_000)
    gone = [command("r", -1, -1, [], kind=ANSWER) | {"subscription": s, "result": Result.NOT_FOUND} for s in "ab"]
    published = desk.publish(commands(gone), {})
    assert sorted(results(published)) == [("a", Result.APPLIED), ("b", Result.APPLIED)]


def test_a_request_id_is_forgotten_only_after_a_day(desk: Desk) -> None:
    for tick, (hours, results_then) in enumerate(
        [(0, [("b", Result.APPLIED)]), (24, [("b", Result.APPLIED)]), (26, [("b", Result.ALREADY_APPLIED)])], 1
    ):
        desk.at(tick, 1_000, now=1_000 + hours * 3_600_000)
        assert desk.apply(command("r", 1, 7, [1]), known=ALONE) == results_then
        desk.apply(command(f"{hours}", 1, 9, [1]))
