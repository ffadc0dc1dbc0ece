"""The demo's check finds what is wrong: each fault that it is there for is reported, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from jobs.demo.plan import BATCHED, Fate, Message, Received, Stored, plan, verify, verify_stored

NOW = 1_900_000_000_000
SECONDS = 20


def produced() -> list[Message]:
    """Messages as they are after they were sent."""
    messages = plan(600, SECONDS)
    for message in messages:
        message.schedule(NOW)
        message.position = f"3:{message.number}:-1:-1"
    return messages


def copy_of(message: Message, subscription: str | None) -> Received:
    """What comes of a message where all is well."""
    due = message.deliver_at or NOW
    own = {"delaylake.source": message.topic, "delaylake.messageId": message.position}
    own |= {"delaylake.deliverAt": str(due)} if subscription else {"delaylake.reason": "deliverAt is negative: -5"}
    return Received(
        message.number,
        message.topic,
        subscription,
        message.payload,
        message.key,
        message.sent_properties | own,
        due,
        due + 12,
    )


def all_copies(messages: list[Message]) -> list[Received]:
    copies = [copy_of(m, s) for m in messages for s in sorted(m.wanted)]
    return copies + [copy_of(m, None) for m in messages if m.fate is Fate.REJECTED]


def stored_of(messages: list[Message]) -> Stored:
    return Stored(
        {m.position for m in messages if m.fate is Fate.PENDING},
        Counter((m.position, s) for m in messages for s in m.wanted),
        {m.position for m in messages if m.fate is Fate.REJECTED},
        {m.position: m.deliver_at for m in messages if m.fate is not Fate.REJECTED},
        {m.position.rpartition(":")[0]: NOW for m in messages},
    )


@pytest.fixture
def messages() -> list[Message]:
    return produced()


def first(messages: list[Message], wanted: Callable[[Message], bool]) -> Message:
    return next(m for m in messages if wanted(m))


def is_delayed(message: Message) -> bool:
    return message.fate is Fate.DELIVERED and message.delay > 1 and not message.uses_deliver_after


def after_change(messages: list[Message], message: Message, change: Callable[[Received], list[Received]]) -> list[str]:
    """The problems where one subscription's copy of a message is changed."""
    subscription = None if message.fate is Fate.REJECTED else message.subscriptions[0]
    received = []
    for copy in all_copies(messages):
        is_it = (copy.number, copy.subscription) == (message.number, subscription)
        received += change(copy) if is_it else [copy]
    problems = verify(messages, received)
    assert all(f"message {message.number} " in problem for problem in problems)
    return [problem.split(": ", 1)[1] for problem in problems]


def test_the_plan_has_every_fate_and_kind(messages: list[Message]) -> None:
    assert {m.fate for m in messages} == set(Fate)
    assert any(m.uses_deliver_after and m.topic == BATCHED for m in messages)
    assert any(not m.delay for m in messages if m.fate is Fate.DELIVERED)
    assert all(m.delay <= SECONDS for m in messages if m.fate is Fate.DELIVERED)
    assert all(m.delay >= 3600 for m in messages if m.fate is Fate.PENDING)
    assert [m.payload for m in plan(600, SECONDS)] == [m.payload for m in messages]


def test_all_as_planned_is_no_problem(messages: list[Message]) -> None:
    assert verify(messages, all_copies(messages)) == []
    assert verify_stored(messages, stored_of(messages)) == []


def test_a_missing_message_is_lost(messages: list[Message]) -> None:
    assert after_change(messages, first(messages, is_delayed), lambda copy: []) == ["lost"]


def test_a_missing_reject_is_lost(messages: list[Message]) -> None:
    rejected = first(messages, lambda m: m.fate is Fate.REJECTED)
    assert after_change(messages, rejected, lambda copy: []) == ["lost"]


def test_two_of_a_message_are_doubled(messages: list[Message]) -> None:
    found = after_change(messages, first(messages, is_delayed), lambda copy: [copy, copy])
    assert found == ["doubled, came 2 times"]


@pytest.mark.parametrize("clock", ["published_at", "received_at"])
def test_before_its_time_is_early_by_either_clock(messages: list[Message], clock: str) -> None:
    message = first(messages, is_delayed)
    at: dict[str, Any] = {clock: message.deliver_at - 1}
    assert after_change(messages, message, lambda copy: [replace(copy, **at)]) == ["early by 1 ms"]


def test_a_wrong_due_time_does_not_hide_an_early_message(messages: list[Message]) -> None:
    message = first(messages, is_delayed)
    due = message.deliver_at - 5_000

    def change(copy: Received) -> list[Received]:
        properties = {**copy.properties, "delaylake.deliverAt": str(due)}
        return [replace(copy, properties=properties, published_at=due, received_at=due)]

    assert after_change(messages, message, change) == ["due -5000 ms from its time", "early by 5000 ms"]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda c: replace(c, payload=c.payload + b"x"), "altered payload"),
        (lambda c: replace(c, key="other"), "altered key 'other' instead of "),
        (lambda c: replace(c, properties={**c.properties, "größe": "-1"}), "altered properties"),
        (lambda c: replace(c, properties={**c.properties, "more": "x"}), "altered properties"),
        (lambda c: replace(c, properties={k: v for k, v in c.properties.items() if k != "deliverAt"}), "altered prop"),
        (lambda c: replace(c, properties={**c.properties, "delaylake.source": "other"}), "another source topic"),
        (lambda c: replace(c, properties={**c.properties, "delaylake.messageId": "9:9:-1:-1"}), "another message id"),
    ],
)
def test_an_altered_message_is_reported(
    messages: list[Message], change: Callable[[Received], Received], found: str
) -> None:
    problems = after_change(messages, first(messages, is_delayed), lambda copy: [change(copy)])
    assert len(problems) == 1
    assert problems[0].startswith(found)


def test_a_reject_needs_a_reason(messages: list[Message]) -> None:
    def without_reason(copy: Received) -> list[Received]:
        return [replace(copy, properties={k: v for k, v in copy.properties.items() if k != "delaylake.reason"})]

    rejected = first(messages, lambda m: m.fate is Fate.REJECTED)
    assert after_change(messages, rejected, without_reason) == ["rejected without a reason"]


@pytest.mark.parametrize("fate", [Fate.PENDING, Fate.REJECTED])
def test_what_was_not_to_be_delivered_must_not_come(messages: list[Message], fate: Fate) -> None:
    message = first(messages, lambda m: m.fate is fate)
    problems = verify(messages, [*all_copies(messages), copy_of(message, message.subscriptions[0])])
    assert [p.split(": ", 1)[1] for p in problems] == ["came, and should not have"]


def test_what_was_cancelled_must_not_come_to_that_subscription(messages: list[Message]) -> None:
    received = all_copies(messages)
    message = first(messages, lambda m: is_delayed(m) and len(m.subscriptions) == 2)
    message.cancelled = {message.subscriptions[0]}
    problems = verify(messages, received)
    assert problems == [
        f"message {message.number} of {message.topic} for {message.subscriptions[0]}: came, and should not have"
    ]


def test_a_message_that_nobody_sent_is_reported(messages: list[Message]) -> None:
    stray = replace(copy_of(messages[0], "billing"), number=-1)
    assert verify(messages, [*all_copies(messages), stray]) == ["message -1 came to billing from nowhere"]


def test_deliver_after_counts_from_the_publish_time(messages: list[Message]) -> None:
    def later(millis: int) -> Callable[[Received], list[Received]]:
        def change(copy: Received) -> list[Received]:
            due = int(copy.properties["delaylake.deliverAt"]) + millis
            properties = {**copy.properties, "delaylake.deliverAt": str(due)}
            return [replace(copy, properties=properties, published_at=due, received_at=due)]

        return change

    def is_after(message: Message) -> bool:
        return message.fate is Fate.DELIVERED and message.uses_deliver_after and message.delay > 1

    single = first(messages, lambda m: is_after(m) and m.topic != BATCHED)
    batched = first(messages, lambda m: is_after(m) and m.topic == BATCHED)
    assert after_change(messages, single, later(30)) == []
    assert after_change(messages, single, later(-1)) == ["due -1 ms from its time", "early by 1 ms"]
    assert after_change(messages, batched, later(-300)) == []
    assert after_change(messages, batched, later(-1_200)) == ["due -1200 ms from its time", "early by 200 ms"]

    stored = stored_of(messages)
    due = dict(stored.due) | {batched.position: batched.deliver_at - 30}
    problems = verify_stored(messages, replace(stored, due=due))
    assert len(problems) == 1
    assert problems[0].endswith(f"due at {batched.deliver_at - 30} instead of {batched.deliver_at}")


def test_the_tables_must_tell_the_same(messages: list[Message]) -> None:
    stored = stored_of(messages)
    delayed = first(messages, is_delayed)
    pending = first(messages, lambda m: m.fate is Fate.PENDING)
    rejected = first(messages, lambda m: m.fate is Fate.REJECTED)
    subscription = delayed.subscriptions[0]
    copy = (delayed.position, subscription)

    def found(**changed: object) -> list[str]:
        return [p.split(": ", 1)[-1] for p in verify_stored(messages, replace(stored, **changed))]  # type: ignore[arg-type]

    missing = stored.delivered - Counter([copy])
    assert found(delivered=missing) == [f"in deliveries 0 times for {subscription} instead of 1"]
    doubled = stored.delivered + Counter([copy])
    assert found(delivered=doubled) == [f"in deliveries 2 times for {subscription} instead of 1"]
    too_soon = stored.delivered + Counter([(pending.position, pending.subscriptions[0])])
    assert found(delivered=too_soon) == [f"in deliveries 1 times for {pending.subscriptions[0]} instead of 0"]
    stray = stored.delivered + Counter([("9:9:-1:-1", "billing")])
    assert found(delivered=stray) == ["9:9:-1:-1 in deliveries for billing from nowhere"]
    assert found(indexed=stored.indexed - {pending.position}) == ["pending, but not in delayed_index"]
    assert found(rejected=stored.rejected - {rejected.position}) == ["not in rejects"]
    assert found(rejected=stored.rejected | {pending.position}) == ["in rejects"]
    assert found(indexed=stored.indexed | {rejected.position}) == ["rejected, but in delayed_index"]
