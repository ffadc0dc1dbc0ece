"""The checker of the long runs: that it finds what it is there for."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pulsar
import pytest

from tests.chaos.commands import Asked, Commands
from tests.chaos.faults import ALL
from tests.chaos.keyed import Keyed
from tests.chaos.ledger import DELIVERED, EITHER, NOT_MEANT, Ledger, Pause, payload
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
    occurrence: int = 0
    attempt: int = 0

    def properties(self) -> dict[str, str]:
        given = {"delaylake.occurrence": self.occurrence, "delaylake.attempt": self.attempt}
        return {name: f"{n}" for name, n in given.items() if n}

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


def wrong_of(ledger: Ledger) -> dict[str, int]:
    report = ledger.report(len(ledger.due))
    return {kind: report[kind] for kind in ("lost", "doubled", "early", "wrong") if report[kind]}


EVERY = 2_000
FIRST, SECOND = (Came(0, f"1:{i}", DUE + i * EVERY + 1, occurrence=i + 1) for i in range(2))


@pytest.mark.parametrize(
    ("came", "wrong"),
    [
        ([FIRST, SECOND], {}),
        ([FIRST, SECOND, FIRST], {}),  # the broker gave it out again
        ([SECOND], {"lost": 1}),
        ([FIRST, SECOND, replace(SECOND, id="1:9")], {"doubled": 1}),
        ([FIRST, replace(SECOND, published_at=DUE + EVERY - 1)], {"early": 1}),
        ([FIRST, SECOND, replace(SECOND, id="1:9", occurrence=3)], {"wrong": 1}),
        ([FIRST, SECOND, replace(FIRST, id="1:9", occurrence=0)], {"wrong": 1}),
        ([FIRST, SECOND, replace(FIRST, id="1:9", attempt=1)], {"wrong": 1}),
        ([FIRST, replace(SECOND, due=DUE + EVERY)], {"wrong": 1}),
    ],
)
def test_each_occurrence_of_a_recurring_message_comes_once_at_its_time(came: list[Came], wrong: dict[str, int]) -> None:
    ledger = Ledger(["a"], 1)
    ledger.send(0, DUE, [])
    for i in range(2):
        ledger.expect_further("a", 0, (i + 1, 0), DUE + i * EVERY, DELIVERED)
    ledger.acknowledge(0)
    for one in came:
        ledger.receive("a", one, one.published_at + 5)
    assert wrong_of(ledger) == wrong
    assert ledger.lost(1) == ({0} if "lost" in wrong else set())
    assert ledger.missing(1) == wrong.get("lost", 0)
    assert ledger.comes_again() == {"occurrences": len({one.occurrence for one in came} & {1, 2}), "retries": 0}


AGAIN = Came(0, "1:1", DUE + 600, attempt=1)


@pytest.mark.parametrize(
    ("result", "came", "wrong"),
    [
        (Result.APPLIED, [AGAIN], {}),
        (Result.APPLIED, [], {"lost": 1}),
        (Result.APPLIED, [AGAIN, replace(AGAIN, id="1:9")], {"doubled": 1}),
        (Result.APPLIED, [replace(AGAIN, published_at=DUE + 499)], {"early": 1}),
        (Result.APPLIED, [replace(AGAIN, attempt=2)], {"lost": 1, "wrong": 1}),
        (Result.NOT_FOUND, [], {}),
        (Result.NOT_FOUND, [AGAIN], {"wrong": 1}),
        (None, [], {}),
        (None, [AGAIN], {}),
        (None, [AGAIN, replace(AGAIN, id="1:9")], {"doubled": 1}),
    ],
)
def test_what_is_retried_comes_once_more_if_it_was_answered_so(
    result: Result | None, came: list[Came], wrong: dict[str, int]
) -> None:
    ledger, commands = Ledger(["a"], 1), Commands()
    ledger.send(0, DUE, ["a"])
    ledger.acknowledge(0)
    assert ledger.receive("a", Came(0, "1:0"), DUE)
    assert not ledger.receive("a", Came(0, "1:0"), DUE), "consumers fail on it once"
    ledger.expect_further("a", 0, (0, 1), DUE + 500, EITHER)
    commands.asked["r"] = Asked(0, "a", DUE + 500, attempt=1)
    if result is not None:
        commands.take(ControlOutcome(request_id="r", subscription="a", result=result).SerializeToString())
    for one in came:
        ledger.receive("a", one, DUE + 700)
    commands.settle(ledger)
    assert wrong_of(ledger) == wrong


@pytest.mark.parametrize(
    ("due", "came_at", "is_wrong"),
    [
        (DUE, DUE, True),
        (DUE, DUE + 99, True),
        (DUE, DUE + 100, False),  # it was resumed
        (DUE - 1, DUE + 50, False),  # it may have been handed out before
        (DUE + 50, DUE + 50, True),
    ],
)
@pytest.mark.parametrize("is_further", [False, True])
def test_what_comes_due_in_a_pause_comes_after_it(due: int, came_at: int, is_wrong: bool, is_further: bool) -> None:
    ledger = Ledger(["a", "b"], 1)
    ledger.send(0, due, [] if is_further else ["a", "b"])
    ledger.acknowledge(0)
    ledger.pauses["a"].append(Pause(DUE, DUE + 100))
    for name in "ab":
        if is_further:
            ledger.expect_further(name, 0, (1, 0), due, DELIVERED)
        ledger.receive(name, Came(0, f"{name}:0", came_at, due, occurrence=int(is_further)), came_at)
    assert wrong_of(ledger) == ({"wrong": 1} if is_wrong else {})
    if is_wrong:
        assert ledger.report(1)["examples"]["other"][0].startswith("a: ")


def test_a_pause_that_was_not_ended_goes_on() -> None:
    ledger = Ledger(["a"], 1)
    ledger.send(0, DUE, ["a"])
    ledger.pauses["a"].append(Pause(DUE))
    ledger.receive("a", Came(0, "1:0", DUE + 10**9), DUE + 10**9)
    assert wrong_of(ledger) == {"wrong": 1}


def test_the_answer_to_a_pause_is_kept() -> None:
    commands = Commands(of_pauses={"p": set()})
    for request_id, result in (("p", Result.APPLIED), ("other", Result.NOT_FOUND)):
        outcome = ControlOutcome(request_id=request_id, subscription="a", result=result)
        commands.take(outcome.SerializeToString())
    assert commands.of_pauses == {"p": {Result.APPLIED}}


def keyed(
    keys: list[str], yields: dict[int, int], came: list[int], name: str = "a"
) -> tuple[dict[str, int], list[str]]:
    """What is wrong where messages of some keys came, and some, by the table, have yielded to others."""
    ledger, messages = Ledger(["a", "b"], len(keys)), Keyed("a")
    for number, key in enumerate(keys):
        ledger.send(number, DUE, ["a"])
        messages.send(number, key)
        messages.stored(number, pulsar.MessageId(-1, 7, number, -1))
        ledger.acknowledge(number)
    for number in came:
        ledger.receive("a", Came(number, f"1:{number}"), DUE)
    rows = [
        {"subscription": name, "position": f"7:{one}:-1:-1", "superseded_by": f"7:{other}:-1:-1"}
        for one, other in yields.items()
    ]
    found = messages.settle(ledger, rows)
    assert messages.superseded == (len(yields) if name == "a" else 0)
    return wrong_of(ledger), found


def test_of_a_key_what_is_superseded_does_not_come_and_all_else_does() -> None:
    keys = ["k", "k", "k", "l"]
    assert keyed(keys, {0: 1, 1: 2}, [2, 3]) == ({}, [])
    assert keyed(keys, {0: 1}, [1, 2, 3]) == ({}, [])
    assert keyed(keys, {0: 1, 1: 2}, [1, 2, 3]) == ({"wrong": 1}, [])
    assert keyed(keys, {0: 1, 1: 2}, [3]) == ({"lost": 1}, [])
    assert keyed(keys, {0: 1}, [1, 2, 3], name="b") == ({"lost": 1}, [])


def test_a_message_yields_to_another_one_of_its_key_alone() -> None:
    keys = ["k", "k", "k", "l"]
    assert keyed(keys, {3: 2}, [0, 1, 2]) == ({}, ["message 3 of l yields to one of k"])
    assert keyed(keys, {0: 0}, [1, 2, 3]) == ({}, ["message 0 yields to itself"])
    assert keyed(keys, {0: 1, 1: 2, 2: 1}, [3])[1] == ["message 1 yields to itself"]


def test_of_a_key_what_the_broker_has_at_an_unknown_place_may_come_or_not_but_once() -> None:
    ledger, messages = Ledger(["a"], 1), Keyed("a")
    ledger.send(0, DUE, ["a"])
    messages.send(0, "k")
    messages.stored(0, pulsar.MessageId(-1, -1, -1, -1))
    ledger.acknowledge(0)
    assert messages.settle(ledger, []) == []
    assert wrong_of(ledger) == {}
    for i in range(2):
        ledger.receive("a", Came(0, f"1:{i}"), DUE)
    assert wrong_of(ledger) == {"doubled": 1}


def test_what_is_to_come_of_the_newest_messages_slows_the_load_down() -> None:
    ledger = Ledger(["a", "b"], 300)
    for number in range(300):
        ledger.send(number, DUE, ["a"])
        ledger.acknowledge(number)
    for number in range(250, 300):
        ledger.receive("a", Came(number, f"1:{number}"), DUE)
    ledger.expect("a", 249, NOT_MEANT)
    assert ledger.outstanding(300, 1) == 100 - 50 - 1


def test_a_seed_draws_the_same_faults_and_only_those_that_are_survived() -> None:
    first, again = (drawn(random.Random(7), 500, []) for _ in range(2))
    assert [fault.name for fault in first] == [fault.name for fault in again]
    assert {fault.name for fault in first} <= {fault.name for fault in ALL if fault.is_survivable}
    assert {fault.name for fault in drawn(random.Random(7), 50, ["swap subscriptions"])} == {"swap subscriptions"}
    with pytest.raises(ValueError, match="no such faults"):
        drawn(random.Random(7), 1, ["nonsense"])
