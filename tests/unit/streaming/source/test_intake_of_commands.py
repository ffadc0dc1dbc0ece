"""When a batch takes commands: after the messages that were published before them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pulsar
import pytest

import streaming.source.barriers
import streaming.source.intake
import streaming.source.receivers
from broker.position import START, Position
from streaming.checkpoint.offset import Offset
from streaming.release.feedback import Feedback, FeedbackFile
from tests.support.servers.fake_pulsar import one
from tests.support.service.harness import wait_until
from tests.support.service.intake import CONTROL, ORDERS, OTHER, POSITIONS, Client, Consumer, offset, settings
from tests.support.tracker.messages import command, commands
from tracker.shard import Shard
from tracker.store import MemoryStore
from tracker.tick import TickInput
from tracker.wire.delaylake_pb2 import Result
from warehouse.routes.known_routes import known_routes


@pytest.mark.slow
@pytest.mark.parametrize("why", ["its route is back", "its destination is there again"])
def test_a_command_that_waits_anew_is_answered_though_no_other_command_comes(
    start: Any, client: Client, tmp_path: Path, why: str
) -> None:
    orders, store = settings(orders=["a"]), MemoryStore()
    unwritable: dict[str, Any] = {}
    before = known_routes(orders)
    if why == "its route is back":
        before = before.updated_to(settings())
    else:
        unwritable = {ORDERS: {"a": {"since": 1, "open": []}}}
    last = Offset(tick=9, run_id="before", positions=POSITIONS, routes=before.to_json(), unwritable=unwritable)
    skip = TickInput(commands=commands([command("r", 1, 9, topic=ORDERS)]), request_ids={"r": 1})
    shard = Shard(store, last.known_routes.subscriptions, 8)
    assert shard.apply(last.to_tick(), skip).outcomes["result"].to_pylist() == [Result.WAITING]

    FeedbackFile(tmp_path / "feedback").write(Feedback(unwritable={}))
    intake = start(orders, "now")
    told: list[int] = []

    def is_answered() -> bool:
        nonlocal last
        last = intake.next_offset(last)
        again = TickInput(reinstated={topic for topic, _ in last.reinstated})
        effects = Shard(store, last.known_routes.subscriptions, 8).apply(last.to_tick(), again)
        told.extend(effects.outcomes["result"].to_pylist())
        return bool(told)

    client.consumers[ORDERS] = Consumer()
    client.consumers[ORDERS].end = Position(1, 6)
    for _ in range(3):
        assert not is_answered(), "what was published while nobody read it may be its message"
    assert (last.barriers, last.lookup_versions) == ([[10, {ORDERS: "1:6"}]], [])
    client.consumers[ORDERS].publish(one(6, 1))
    wait_until(is_answered, 20, "an answer")
    assert told == [Result.NOT_FOUND]


@pytest.mark.slow
def test_a_command_does_not_end_the_consumer_with_which_it_came(start: Any, client: Client) -> None:
    client.consumers[CONTROL] = control = Consumer(one(2, 3))
    orders = settings(orders=["a"])
    intake, last = start(orders, "now"), offset(orders)

    def is_taken() -> bool:
        nonlocal last
        last = intake.next_offset(last)
        return last.positions[CONTROL] == "3:2"

    wait_until(is_taken, 20, "the command")
    assert control.last_entry() == START, "it is not closed"


def test_a_command_for_later_subscriptions_has_what_was_published_before_one_was_added_read(
    start: Any, client: Client
) -> None:
    added = settings(orders=["a", "new"])
    new = start(added, "now").next_offset(offset(settings(orders=["a"])))
    assert new.changed[ORDERS]["subscriptions"]["new"] == "ADDED"
    assert new.barriers == [[new.tick, {ORDERS: None}]]


@pytest.mark.slow
def test_commands_wait_for_a_topic_until_it_has_been_looked_up_of_which_some_partitions_are_read(
    start: Any, client: Client
) -> None:
    client.forbidden = {ORDERS}
    orders = settings(orders=["a"])
    positions = {f"{ORDERS}-partition-0": "1:5", CONTROL: "3:1"}
    last = Offset(
        tick=4,
        run_id="before",
        positions=positions,
        routes=known_routes(orders).to_json(),
        barriers=[[3, {ORDERS: None}]],
    )
    intake = start(orders, "now")
    last = intake.next_offset(last)
    assert list(intake._receivers.open) == [f"{ORDERS}-partition-0", CONTROL]
    assert last.barriers == [[3, {ORDERS: None}]]

    client.forbidden, client.partitions = set(), {ORDERS: 2}
    intake._receivers._discover()
    last = intake.next_offset(last)
    assert (last.barriers, last.ingested_through) == ([], 3)


@pytest.mark.slow
def test_commands_go_on_without_a_topic_that_cannot_be_subscribed_and_pass_it_when_it_can(
    start: Any, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming.source.barriers, "_SILENT_SECONDS", 0.3)
    subscribe = client.subscribe

    def not_orders(name: str, *arguments: Any, **options: Any) -> Consumer:
        if name == ORDERS:
            raise pulsar.AuthorizationError
        return subscribe(name, *arguments, **options)

    monkeypatch.setattr(client, "subscribe", not_orders)
    client.consumers[CONTROL] = Consumer(one(2, 3))
    both = settings(orders=["a"], other=["b"])
    intake = start(both, "now")
    last = offset(both)

    def taken() -> Offset | None:
        nonlocal last
        last = intake.next_offset(last)
        return last if last.positions[CONTROL] == "3:2" else None

    began = time.monotonic()
    new = wait_until(taken, 5, "the command")
    assert time.monotonic() - began >= 0.3
    assert (new.barriers, new.ingested_through) == ([[new.tick, {ORDERS: None, OTHER: "-1:-1"}]], 0)

    # What has been published there by now may be before the command.
    client.consumers[ORDERS] = Consumer(one(6, 1))
    client.consumers[ORDERS].end = Position(1, 6)
    monkeypatch.setattr(client, "subscribe", subscribe)

    def has_passed() -> Offset | None:
        nonlocal last
        last = intake.next_offset(last)
        assert not last.ingested_through or last.positions[ORDERS] == "1:6"
        return last if last.ingested_through else None

    assert wait_until(has_passed, 10, "the messages before the command").ingested_through == new.tick


@pytest.mark.slow
def test_commands_wait_for_what_was_published_before_them_each_for_its_own_and_hold_up_nothing(
    start: Any, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming.source.barriers, "_CATCH_UP_SECONDS", 30)
    slow, other, control = Consumer(), Consumer(), Consumer()
    client.consumers.update({ORDERS: slow, OTHER: other, CONTROL: control})
    slow.end = Position(1, 6)
    both = settings(orders=["a"], other=["b"])
    intake = start(both, "now")
    last = intake.next_offset(offset(both))
    receivers = intake._receivers.open
    wait_until(lambda: all(r._consumer is not None for r in receivers.values()), 5, "all are connected")

    def until(name: str, position: str) -> Offset:
        nonlocal last

        def came() -> bool:
            nonlocal last
            last = intake.next_offset(last)
            return last.positions[name] == position

        wait_until(came, 10, f"{position} of {name}")
        return last

    def command(entry: int) -> None:
        control.publish(one(entry, 3))
        wait_until(lambda: receivers[CONTROL].last_received == Position(3, entry), 5, "the command")

    command(2)
    other.publish(one(8, 2))
    assert until(OTHER, "2:8").positions[CONTROL] == "3:1"
    # A second command for a message behind the end that the first one waits for.
    command(3)
    other.publish(one(9, 2))
    assert until(OTHER, "2:9").positions[CONTROL] == "3:1"

    slow.end = Position(1, 7)
    slow.publish(one(6, 1))
    first = until(CONTROL, "3:2")
    assert (first.positions[ORDERS], first.ingested_through) == ("1:6", first.tick)
    slow.publish(one(7, 1))
    second = until(CONTROL, "3:3")
    assert (second.positions[ORDERS], second.ingested_through) == ("1:7", second.tick)
