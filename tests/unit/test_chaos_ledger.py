"""The checker of the long runs: that it finds what it is there for."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from tests.chaos.faults import ALL
from tests.chaos.ledger import Asked, Commands, Ledger, payload
from tests.chaos.test_faults import drawn
from tracker.wire.delaylake_pb2 import ControlOutcome, Result

DUE = 1_900_000_000_000


@dataclass(frozen=True)
class Came:
    """A delivery, as the client shows it."""

    number: int
    id: str
    published_at: int = DUE + 1
    due: int = DUE

    def data(self) -> bytes:
        return payload(self.number, self.due)

    def message_id(self) -> str:
        return self.id

    def topic_name(self) -> str:
        return "t"

    def publish_timestamp(self) -> int:
        return self.published_at


def told(*came: Came, received_at: int = DUE + 5) -> dict[str, int]:
    """What the ledger says of three messages for `a`, of which the last one's acknowledgement did not come."""
    ledger = Ledger(["a", "b"], 3)
    for number in range(3):
        ledger.send(number, DUE, ["a"])
        if number < 2:
            ledger.acknowledge(number)
    for one in came:
        ledger.receive("a", one, received_at)
    report = ledger.report(3)
    return {kind: report[kind] for kind in ("lost", "doubled", "early", "wrong") if report[kind]}


BOTH = Came(0, "1:0"), Came(1, "1:1")


def test_what_came_once_in_time_is_fine() -> None:
    assert told(*BOTH) == {}
    assert told(*BOTH, Came(2, "1:2")) == {}  # it was sent after all
    assert told(*BOTH, Came(0, "1:0")) == {}  # the broker gave it out again


@pytest.mark.parametrize(
    ("came", "wrong"),
    [
        ([Came(0, "1:0")], {"lost": 1}),
        ([*BOTH, Came(0, "1:2")], {"doubled": 1}),
        ([*BOTH, Came(2, "1:2"), Came(2, "1:3")], {"doubled": 1}),
        ([Came(0, "1:0", published_at=DUE - 1), Came(1, "1:1")], {"early": 1}),
        ([Came(0, "1:0", due=DUE - 1), Came(1, "1:1")], {"wrong": 1}),
    ],
)
def test_what_is_wrong_is_found(came: list[Came], wrong: dict[str, int]) -> None:
    assert told(*came) == wrong


def test_early_is_also_what_is_received_early() -> None:
    assert told(*BOTH, received_at=DUE - 1) == {"early": 2}


def test_a_message_of_another_route_is_wrong() -> None:
    ledger = Ledger(["a", "b"], 1)
    ledger.send(0, DUE, ["a"])
    ledger.receive("b", Came(0, "1:0"), DUE)
    assert ledger.report(1)["wrong"] == 1


@pytest.mark.parametrize(
    ("result", "comes", "wrong"),
    [
        (Result.APPLIED, True, "wrong"),
        (Result.APPLIED, False, None),
        (Result.TOO_LATE, True, None),
        (Result.TOO_LATE, False, "lost"),
        (Result.WAITING, True, None),  # not the last word: it may come or not
        (None, False, None),
    ],
)
def test_an_answer_says_whether_the_message_may_come(result: Result | None, comes: bool, wrong: str | None) -> None:
    ledger, commands = Ledger(["a"], 1), Commands()
    ledger.send(0, DUE, ["a"])
    ledger.acknowledge(0)
    commands.asked["r"] = Asked(0, "a")
    if result is not None:
        commands.take(ControlOutcome(request_id="r", subscription="a", result=result).SerializeToString())
    commands.take(ControlOutcome(request_id="other", subscription="a", result=Result.APPLIED).SerializeToString())
    if comes:
        ledger.receive("a", Came(0, "1:0"), DUE)
    commands.settle(ledger)
    assert commands.unanswered() == ({"r"} if result in (None, Result.WAITING) else set())
    report = ledger.report(1)
    assert [kind for kind in ("lost", "doubled", "early", "wrong") if report[kind]] == ([wrong] if wrong else [])


@pytest.mark.parametrize(
    ("result", "came_at", "wrong"),
    [
        (Result.APPLIED, DUE + 50, {}),
        (Result.APPLIED, DUE + 49, {"early": 1}),
        (Result.APPLIED, None, {"lost": 1}),
        (Result.TOO_LATE, DUE, {}),
    ],
)
def test_what_is_rescheduled_comes_at_its_new_time(result: Result, came_at: int | None, wrong: dict[str, int]) -> None:
    ledger, commands = Ledger(["a"], 1), Commands()
    ledger.send(0, DUE, ["a"])
    ledger.acknowledge(0)
    ledger.watch("a", 0)
    commands.asked["r"] = Asked(0, "a", DUE + 50)
    commands.take(ControlOutcome(request_id="r", subscription="a", result=result).SerializeToString())
    if came_at is not None:
        ledger.receive("a", Came(0, "1:0", published_at=came_at), DUE + 99)
    commands.settle(ledger)
    report = ledger.report(1)
    assert {kind: report[kind] for kind in ("lost", "doubled", "early", "wrong") if report[kind]} == wrong


def test_what_nobody_is_to_get_may_come_or_not_but_once() -> None:
    ledger = Ledger(["a"], 3)
    for number, due in enumerate([DUE, DUE, DUE + 10]):
        ledger.send(number, due, ["a"])
        ledger.acknowledge(number)
    ledger.may_miss("a", DUE + 9)
    ledger.receive("a", Came(1, "1:1"), DUE)
    ledger.receive("a", Came(1, "1:2"), DUE)
    report = ledger.report(3)
    assert (report["lost"], report["doubled"], report["wrong"]) == (1, 1, 0)


def test_an_answer_that_another_one_follows_is_found_and_one_for_no_subscription_is_one() -> None:
    commands = Commands()
    commands.asked |= {name: Asked(0, "a") for name in ("twice", "both", "invalid", "of another")}
    for name, subscription, result in (
        ("twice", "a", Result.WAITING),
        ("twice", "a", Result.APPLIED),
        ("twice", "a", Result.APPLIED),
        ("both", "a", Result.APPLIED),
        ("both", "a", Result.TOO_LATE),
        ("invalid", "", Result.INVALID),
        ("of another", "b", Result.APPLIED),
    ):
        commands.take(ControlOutcome(request_id=name, subscription=subscription, result=result).SerializeToString())
    assert commands.unanswered() == {"of another"}
    assert commands.contradicted() == {"both": ["APPLIED", "TOO_LATE"]}


def test_a_seed_draws_the_same_faults_and_only_those_that_are_survived() -> None:
    first, again = (drawn(random.Random(7), 500, []) for _ in range(2))
    assert [fault.name for fault in first] == [fault.name for fault in again]
    assert {fault.name for fault in first} <= {fault.name for fault in ALL if fault.is_survivable}
    assert {fault.name for fault in drawn(random.Random(7), 50, ["swap subscriptions"])} == {"swap subscriptions"}
    with pytest.raises(ValueError, match="no such faults"):
        drawn(random.Random(7), 1, ["nonsense"])
