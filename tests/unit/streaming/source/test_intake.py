"""Which topics are read, and what an offset says of the routes."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import streaming.source.barriers
import streaming.source.intake
import streaming.source.receivers
from broker.client import NoAnswerError
from broker.clusters.new_cluster import NewClusterError
from broker.position import Position
from broker.protocol.consumer import ReceivedEntry
from broker.protocol.session import DisconnectedError
from broker.pulsar_admin.answers import TopicLedgers
from conf.settings import local_path
from status.alerts import INTERNAL_ERROR, STANDING, Alert, Alerts
from streaming.batch_schema import InputKind
from streaming.checkpoint.batch_input import BatchInput, Received
from streaming.checkpoint.checkpoint import Checkpoint
from streaming.checkpoint.offset import UNKNOWN, Offset
from streaming.checkpoint.payload_files import ASIDE_BYTES, PayloadFiles
from streaming.release.feedback import Feedback, FeedbackFile
from streaming.source.receiving.receiver import Receiver
from tests.support.servers.fake_pulsar import batch, one
from tests.support.service.harness import wait_until
from tests.support.service.intake import ORDERS, OTHER, POSITIONS, Client, Consumer, offset, settings
from tests.support.tracker.messages import messages
from tracker.message_state.changes import HELD_DELIVER_AT
from tracker.packing import unpack
from tracker.payload_refs import files_of
from warehouse.delta.fencing import FencedError, PauseWatch
from warehouse.routes.known_routes import known_routes


def test_a_topic_without_a_route_is_not_read_and_keeps_its_position(start: Any, client: Client) -> None:
    before = settings(orders=["a"], other=["b"])
    intake = start(settings(other=["b"]), "now")
    last = offset(before, barriers=[[3, {ORDERS: "1:9", OTHER: "2:7"}]])
    new = intake.next_offset(last)
    wait_until(lambda: OTHER in client.consumers, 5, "the other topic is read")
    assert ORDERS not in client.consumers
    assert new.positions == POSITIONS
    assert list(new.known_routes.missing) == [ORDERS]
    # Commands don't wait for the end of a topic that is not read: the shards keep those for it.
    assert (new.barriers, new.ingested_through) == ([], 3)
    intake.commit(new)
    assert ORDERS not in client.consumers


@pytest.mark.slow
def test_a_route_that_is_back_is_read_from_where_it_was(start: Any, client: Client) -> None:
    both = settings(orders=["a"], other=["b"])
    away = known_routes(both).updated_to(settings(other=["b"]))
    last = Offset(tick=9, run_id="before", positions=POSITIONS, routes=away.to_json())
    intake = start(settings(orders=["new", "a"], other=["b"]), "now")
    new = intake.next_offset(last)
    wait_until(lambda: ORDERS in client.consumers, 5, "the topic is read again")
    assert sorted(new.reinstated) == [[ORDERS, "a"], [ORDERS, "new"]]
    assert new.known_routes.subscriptions.names[ORDERS] == ["a", "new"]
    assert intake._receivers.open[ORDERS]._last_received == Position(1, 5)
    again = intake.next_offset(new)
    assert (again.reinstated, again.routes) == ([], new.routes)


@pytest.mark.slow
def test_what_came_in_many_chunks_is_one_record_batch(start: Any, client: Client) -> None:
    """One each costs Arrow more than the messages do: ten topics with 100 messages a second took batches of 6 s."""
    client.consumers[ORDERS] = Consumer()
    intake, last = start(settings(orders=["a"]), "now"), offset(settings(orders=["a"]))
    intake.next_offset(last)
    for entry in range(6, 10):
        client.consumers[ORDERS].publish(one(entry, ledger=1))
        wait_until(lambda e=entry: intake._receivers.open[ORDERS].last_received == Position(1, e), 5, "it came")  # type: ignore[misc]
    new = intake.next_offset(last)
    [body] = [body for _, kind, body in intake.parts(last, new) if kind == InputKind.MESSAGES]
    assert unpack(body).num_rows == 4
    assert unpack(body)["payload"].num_chunks == 1


@pytest.mark.slow
def test_the_batch_that_is_replayed_has_the_messages_of_a_route_taken_out_since(start: Any, client: Client) -> None:
    before = settings(orders=["a"], other=["b"])
    first = offset(before)
    last = Offset(tick=5, run_id="before", positions={**POSITIONS, ORDERS: "1:6"}, routes=first.routes)
    intake = start(settings(other=["b"]), "now")

    def read() -> None:
        with contextlib.suppress(TimeoutError):  # the topic has nothing
            intake.parts(first, last)

    threading.Thread(target=read, daemon=True).start()
    wait_until(lambda: ORDERS in client.consumers, 5, "the topic is read for the replayed batch")
    assert ORDERS not in intake._receivers.open
    assert intake._receivers._replayed[ORDERS].source.topic == ORDERS
    intake.commit(last)
    assert not intake._receivers._replayed


def test_a_batch_that_is_run_again_has_the_messages_it_had_whatever_broker_and_settings_say_now(
    start: Any, client: Client
) -> None:
    # Where messages were published nobody has to be asked.
    orders = settings(orders=["a"]).model_copy(update={"replicated": "all"})
    came = [*one(6, 1, payload=b"a"), *batch(7, 2, 1), *one(8, 1, props={"deliverAfter": "5000"})]
    client.consumers[ORDERS] = Consumer(came)
    intake = start(orders, "one")
    first = last = offset(orders)
    taken = 0
    while last.positions[ORDERS] != "1:8":
        first, last = last, intake.next_offset(last)
        had = intake.parts(first, last)
        taken += sum(unpack(body).num_rows for _, kind, body in had if kind == InputKind.MESSAGES)
    assert taken == 4
    intake.stop()

    client.consumers.clear()  # a broker that has let go of them
    limited = orders.model_copy(update={"tracker": orders.tracker.model_copy(update={"max_delay_millis": 1})})
    again = start(limited, "two")
    assert again.parts(first, last) == had
    assert again.parts(first, last) == had
    assert again._receivers.open[ORDERS].last_received == Position(1, 8)
    later = again.next_offset(last)
    assert [kind for _, kind, _ in again.parts(last, later)] == [InputKind.TICK], "nothing of it comes in again"
    again.commit(later)
    [kept] = Checkpoint(Path(local_path(limited.checkpoint))).input_folder.iterdir()
    assert kept.name.startswith(f"{later.tick}-"), "it names the offset with which the next batch begins"


def test_a_large_payload_is_in_a_file_before_its_batch_runs_and_the_same_when_it_runs_again(
    start: Any, client: Client
) -> None:
    orders = settings(orders=["a"]).model_copy(update={"replicated": "all"})
    payload = os.urandom(ASIDE_BYTES)
    client.consumers[ORDERS] = Consumer([*one(6, 1, payload=payload), *one(7, 1, payload=b"small")])
    intake = start(orders, "one")
    first = last = offset(orders)
    came: list[bytes] = []
    while last.positions[ORDERS] != "1:7":
        first, last = last, intake.next_offset(last)
        had = intake.parts(first, last)
        for body in (body for _, kind, body in had if kind == InputKind.MESSAGES):
            rows = unpack(body)
            assert len(body) < ASIDE_BYTES
            assert {file.partition("-")[0] for file in files_of(rows)} <= {str(last.tick)}
            came += PayloadFiles.of(orders).bring_back(rows)["payload"].to_pylist()
    assert came == [payload, b"small"]
    intake.stop()
    client.consumers.clear()
    again = start(orders, "two")
    assert again.parts(first, last) == had
    again.commit(last)
    assert PayloadFiles.of(orders)._folder.is_dir(), "the state refers to it"


def test_a_batch_has_the_time_zones_that_its_offset_names_where_the_program_has_others(start: Any) -> None:
    orders = settings(orders=["a"])
    folder = Checkpoint(Path(local_path(orders.checkpoint))).time_zones_folder
    first = offset(orders, time_zone_data="2001a")
    folder.mkdir(parents=True)
    (folder / "2001a").write_bytes(b"older")
    (folder / "2000z").write_bytes(b"oldest")
    intake = start(orders, "one")
    of_older = intake.parts(first, replace(first, tick=5))
    assert [(kind, body) for _, kind, body in of_older if kind != InputKind.TICK] == [(InputKind.TIME_ZONES, b"older")]
    following = intake.next_offset(first)
    assert {file.name for file in folder.iterdir()} == {"2001a", following.time_zone_data}
    assert [kind for _, kind, _ in intake.parts(first, following)] == [InputKind.TICK]


def test_an_input_that_is_not_whole_is_read_from_the_broker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = BatchInput(tmp_path / "input")
    received = Received(messages([(1, 1, 5)]), messages([(2, 2, 0)]))
    end, other = Offset(tick=7), Offset(tick=7, now=1)
    kept.write(end, received)
    assert kept.read(end) == received
    assert kept.read(other) is None
    [file] = (tmp_path / "input").iterdir()
    for length in (0, 5, len(file.read_bytes()) - 30):
        whole = file.read_bytes()
        file.write_bytes(whole[:length])
        assert kept.read(end) is None
        file.write_bytes(whole)
    kept.forget(end)
    assert kept.read(end) is not None
    kept.forget(Offset(tick=8))
    assert kept.read(end) is None


def test_a_driver_that_hung_in_the_write_of_an_offset_and_was_overtaken_makes_no_batch_of_it(
    start: Any, client: Client, tmp_path: Path
) -> None:
    class TablesOfOther:
        is_overtaken = False

        def version(self, name: str) -> int:
            return 0

        def query(self, *_: object) -> object:
            return messages([])

        def check_epoch(self) -> None:
            if self.is_overtaken:
                raise FencedError("warehouse", 1, 2)

    orders = settings(orders=["a"])
    client.consumers[ORDERS] = Consumer()
    intake = start(orders, "one")
    tables = TablesOfOther()
    times = [0.0]
    intake._pauses = PauseWatch(tables.check_epoch, clocks=(lambda: times[0],))
    first = offset(orders)
    last = intake.next_offset(first)
    intake.parts(first, last)
    following = intake.next_offset(last)
    times[0], tables.is_overtaken = 60.0, True
    with pytest.raises(FencedError):
        intake.parts(last, following)
    assert not list(Checkpoint(Path(local_path(orders.checkpoint))).input_folder.glob(f"{following.tick}-*"))


@pytest.mark.slow
def test_a_topic_that_is_made_anew_in_a_new_cluster_ends_the_intake(
    start: Any, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming.source.receivers, "_DISCOVERY_SECONDS", 0.05)
    routes = settings(orders=["a"], other=["b"])
    intake = start(routes, "now")
    intake._receivers._admin = SimpleNamespace(internal_stats=lambda name: TopicLedgers({1: 3}, {}, {}, (1, 2)))
    last = offset(routes)
    intake.next_offset(last)
    client.consumers[OTHER].end = Position(1, 2)
    error = wait_until(lambda: intake._receivers._new_cluster, 10, "a look at the ends of the topics")
    assert str(error).startswith(f"{OTHER} was read up to entry 2:7, and ends with 1:2: the topic is of a new cluster")
    with pytest.raises(NewClusterError):
        intake.next_offset(last)


@pytest.mark.slow
def test_a_destination_that_can_not_be_looked_up_keeps_the_partitions_it_had_and_holds_up_nothing(
    start: Any, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(streaming.source.receivers, "_DISCOVERY_SECONDS", 0.05)
    before, now = settings(orders=["a", "b"]), settings(orders=["a", "b", "new", "well"])
    client.forbidden = {f"{ORDERS}-{name}" for name in ("a", "b", "new")}
    client.partitions = {f"{ORDERS}-well": 2}
    intake = start(now, "now")
    first = intake.next_offset(offset(before, destinations={f"{ORDERS}-a": 3}))
    assert first.destinations == {f"{ORDERS}-a": 3, f"{ORDERS}-new": UNKNOWN, f"{ORDERS}-well": 2}
    # So it is while the job runs, and the look at the ends of the topics comes, too.
    ends = threading.Event()
    monkeypatch.setattr(intake._receivers, "_check_ends", ends.set)
    client.partitions[f"{ORDERS}-well"] = 4
    wait_until(lambda: intake.next_offset(first).destinations[f"{ORDERS}-well"] == 4, 5, "new partitions")
    assert ends.wait(60)
    assert sorted(r.getMessage() for r in caplog.records if "can't be looked up" in r.getMessage()) == [
        f"{ORDERS}-{name} can't be looked up, and is tried again: AuthorizationError: no rights on {ORDERS}-{name}"
        for name in ("a", "b", "new")
    ]
    client.forbidden.clear()
    wait_until(lambda: intake.next_offset(first).destinations == {f"{ORDERS}-well": 4}, 5, "all are known")


@pytest.mark.slow
def test_a_source_topic_that_can_not_be_looked_up_is_told_of_and_the_others_are_read(
    start: Any, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming.source.receivers, "_DISCOVERY_SECONDS", 0.05)
    both, alerts = settings(orders=["a"], other=["b"]), Alerts()
    client.forbidden = {ORDERS}
    intake = start(both, "now", alerts)
    last = intake.next_offset(Offset(routes=known_routes(both).to_json()))
    wait_until(lambda: OTHER in client.consumers, 5, "the other topic is read")
    [trouble] = alerts.current()
    assert (trouble.kind, trouble.name) == (STANDING, ORDERS)
    assert trouble.text == f"it is not read, for it can't be looked up: AuthorizationError: no rights on {ORDERS}"
    client.forbidden.clear()
    wait_until(lambda: ORDERS in client.consumers, 5, "it is read")
    wait_until(lambda: not alerts.current(), 5, "nothing is wrong any more")
    # Of one that is read the watch tells.
    client.forbidden = {ORDERS}
    wait_until(lambda: intake._receivers._discovery._why_not, 5, "a look")
    assert not alerts.current()
    assert intake.next_offset(last).tick == last.tick + 1


@pytest.mark.slow
def test_what_an_offset_says_of_destinations_that_can_not_be_written_and_when_they_can_again(
    start: Any, tmp_path: Path
) -> None:
    orders = settings(orders=["a"])
    release = orders.release.model_copy(update={"unwritable": "reject"})
    intake = start(orders.model_copy(update={"release": release}), "now")
    waits: dict[str, Any] = {"since": 1, "open": []}

    def after(last: Offset, unwritable: dict[str, Any]) -> Offset:
        FeedbackFile(tmp_path / "feedback").write(Feedback(unwritable={ORDERS: unwritable} if unwritable else {}))
        new: Offset = intake.next_offset(last)
        return new

    first = after(offset(settings(orders=["a"])), {"": waits, "a": waits})
    assert (first.reinstated, first.rejects_since) == ([], {ORDERS: first.tick})
    second = after(first, {"": waits, "a": {**waits, "open": [[3, 1]]}})
    assert (second.reinstated, second.rejects_since) == ([], {ORDERS: first.tick})
    # One can be written again, and for the other it is rejected from now on: what was held back of both goes out.
    third = after(second, {"a": {**waits, "rejects": "gone"}})
    assert (third.reinstated, third.rejects_since) == ([[ORDERS, ""], [ORDERS, "a"]], {})
    fourth = after(third, {})
    assert fourth.reinstated == []


@pytest.mark.slow
def test_an_offset_names_the_next_rounds_of_what_was_held_back_at_once_and_each_once(
    start: Any, tmp_path: Path
) -> None:
    orders = settings(orders=["a", "b"])
    intake = start(orders, "now")
    last = intake.next_offset(offset(orders))
    assert (last.drains, last.drained_before) == ({}, {})
    waits: dict[str, Any] = {"since": 1, "open": []}
    resuming = (last.tick, {ORDERS: {"a": 5, "b": 7}})
    FeedbackFile(tmp_path / "feedback").write(Feedback(resuming=resuming, unwritable={ORDERS: {"b": waits}}))
    last = intake.next_offset(last)
    assert (last.drains, last.drained_before) == ({ORDERS: {"a": 10_000}}, {ORDERS: {"a": 5}})
    last = intake.next_offset(last)
    assert (last.drains, last.drained_before) == ({}, {})


@pytest.mark.parametrize(("largest", "millis"), [(399_999, 0), (400_000, 5)])
def test_where_brokers_may_refuse_producer_batches_for_their_size_there_are_none(
    start: Any, largest: int, millis: int
) -> None:
    """A batch has up to 100,000 characters, each of up to 4 bytes; messages of one that is refused are rejected."""
    before = settings(orders=["a"])
    pulsar = before.pulsar.model_copy(update={"max_message_size_bytes": largest})
    intake = start(before.model_copy(update={"pulsar": pulsar}), "now")
    assert intake.next_offset(offset(before)).batch_millis == millis


def test_a_job_that_is_told_to_wait_rejects_nothing_from_its_first_batch_on(start: Any) -> None:
    """What came due while it was down is held back, and goes out when the destination is there again."""
    orders = settings(orders=["a", "b"])
    waits: dict[str, Any] = {"since": 1, "open": [[2, 0]]}
    unwritable = {ORDERS: {"a": {"since": 1, "open": [[3, 1]], "rejects": "gone"}, "b": waits}}
    intake = start(orders, "now")
    first = intake.next_offset(offset(orders, unwritable=unwritable))
    assert first.unwritable == {ORDERS: {"a": {"since": 1, "open": []}, "b": waits}}
    assert first.reinstated == []


def test_with_all_settled_and_nothing_due_soon_there_is_no_batch(
    start: Any, client: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows, calls = [(0, 1)], []

    def rows_due(tables: Any, version: int, start: int, end: int) -> list[tuple[int, int]]:
        calls.append((version, start))
        return rows

    monkeypatch.setattr(streaming.source.intake, "rows_due", rows_due)
    intake = start(settings(orders=["a"]), "run")
    last = intake.next_offset(offset(settings(orders=["a"])))
    now, idle = time.time_ns() // 1_000_000, Feedback(next_due=HELD_DELIVER_AT)

    def has_nothing_to_do(last: Offset = last, feedback: Feedback = idle) -> bool:
        return intake._has_nothing_to_do(last, now, feedback)

    assert not has_nothing_to_do(), "what has come in is not known to be written down"
    intake.commit(replace(last, durable_through=last.seal_epoch))
    assert not has_nothing_to_do(), "something is due soon in the delayed index"
    rows.clear()
    assert has_nothing_to_do()
    asked = len(calls)
    assert has_nothing_to_do()
    assert len(calls) == asked, "of one version it is asked once a minute"
    assert not has_nothing_to_do(replace(last, positions=last.positions | {ORDERS: "1:6"}))
    assert not has_nothing_to_do(replace(last, barriers=[[1, {}]]))
    assert not has_nothing_to_do(feedback=replace(idle, in_flight=1))
    assert not has_nothing_to_do(feedback=replace(idle, next_due=now))
    assert not has_nothing_to_do(feedback=replace(idle, next_due=None))
    assert not intake._goes_on(last, idle), "it looks at the feedback less often"
    assert intake._goes_on(last, replace(idle, in_flight=1))
    assert intake._goes_on(last, replace(idle, resuming=(last.tick, {ORDERS: {"a": now}})))


class Failing(Consumer):
    """Raises what it is told to when it is asked for an entry, and then goes on."""

    def __init__(self, errors: list[Exception], messages: Sequence[ReceivedEntry]) -> None:
        super().__init__(messages)
        self.errors = errors

    def receive(self, timeout_seconds: float) -> ReceivedEntry | None:
        if self.errors:
            raise self.errors.pop(0)
        return super().receive(timeout_seconds)


@pytest.mark.slow
def test_an_error_that_nobody_expected_in_receiving_is_an_alert_until_the_topic_is_read_again(
    start: Any, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, alerts, told = settings(orders=["a"]), Alerts(), list[Alert]()
    begin = alerts.begin

    def noted(*arguments: Any, **named: Any) -> None:
        begin(*arguments, **named)
        told.extend(alerts.current())

    monkeypatch.setattr(alerts, "begin", noted)
    usual: list[Exception] = [DisconnectedError("gone"), OSError("no route to host"), NoAnswerError("silent")]
    client.consumers[ORDERS] = Failing([*usual, TypeError("a bug"), TypeError("a\nbug")], one(6, 1))
    intake = start(orders, "now", alerts)
    intake.next_offset(offset(orders))
    [alert] = wait_until(lambda: [a for a in told if a.count == 2], 30, "both errors")
    assert (alert.kind, alert.name) == (INTERNAL_ERROR, ORDERS)
    assert alert.text == "TypeError: a bug (2 times); it is tried again"
    wait_until(lambda: intake._receivers.open[ORDERS].last_received == Position(1, 6), 30, "the message")
    wait_until(lambda: not alerts.current(), 30, "it is over")


@pytest.mark.slow
@pytest.mark.parametrize("doing", ["_discover", "_check_ends"])
def test_an_error_that_nobody_expected_in_looking_for_partitions_is_an_alert(
    start: Any, monkeypatch: pytest.MonkeyPatch, doing: str
) -> None:
    monkeypatch.setattr(streaming.source.receivers, "_DISCOVERY_SECONDS", 0.01)
    orders, alerts = settings(orders=["a"]), Alerts()
    intake = start(orders, "now", alerts)
    last = intake.next_offset(offset(orders))
    assert not alerts.current()

    def fails() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(intake._receivers, doing, fails)
    [alert] = wait_until(alerts.current, 30, "the alert")
    assert (alert.kind, alert.name) == (INTERNAL_ERROR, "looking for new partitions")
    assert "ZeroDivisionError" in alert.text
    assert intake.next_offset(last)


@pytest.mark.slow
def test_an_error_that_nobody_expected_in_acknowledging_is_an_alert_and_other_topics_are_acknowledged(
    start: Any, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.consumers[ORDERS], client.consumers[OTHER] = Consumer(one(6, 1)), Consumer(one(8, 2))
    both, alerts = settings(orders=["a"], other=["b"]), Alerts()
    intake = start(both, "now", alerts)
    intake.next_offset(offset(both))
    receivers = intake._receivers
    wait_until(lambda: receivers.open[OTHER].last_received == Position(2, 8), 30, "the messages")

    def fails(last: Position) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr(client.consumers[ORDERS], "acknowledge", fails)
    receivers.acknowledge({ORDERS: "1:6", OTHER: "2:8"})
    wait_until(lambda: client.consumers[OTHER].acknowledged == [Position(2, 8)], 30, "an acknowledgement")
    assert [(alert.kind, alert.name) for alert in alerts.current()] == [(INTERNAL_ERROR, f"acknowledging {ORDERS}")]


@pytest.mark.slow
def test_a_batch_passes_over_topics_with_nothing_that_waits(
    start: Any, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = settings(orders=["a"], other=["b"])
    intake, last = start(both, "now"), offset(both)
    asked: set[str] = set()
    take_into_batch = Receiver.take_into_batch

    def noted(receiver: Receiver, *arguments: Any) -> tuple[Position, int, int]:
        asked.add(receiver.source.name)
        return take_into_batch(receiver, *arguments)

    monkeypatch.setattr(Receiver, "take_into_batch", noted)
    client.consumers[ORDERS] = Consumer(one(6, 1))

    def is_taken() -> bool:
        nonlocal last
        last = intake.next_offset(last)
        return last.positions == POSITIONS | {ORDERS: "1:6"}

    wait_until(is_taken, 30, "the message")
    assert asked == {ORDERS}
