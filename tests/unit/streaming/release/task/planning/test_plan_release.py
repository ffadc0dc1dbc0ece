"""Where the rows of a release go, also after the settings have changed."""

from __future__ import annotations

import json
import logging
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext

from broker.protocol.producer import EntryProducer
from broker.protocol.session import RefusedError
from broker.protocol.wire.pulsar_pb2 import ServerError
from conf.settings import Settings
from streaming.checkpoint.offset import UNKNOWN, Offset
from streaming.release.attempt import Assignment, Attempt, SendReport
from streaming.release.task import process_clients, sender
from streaming.release.task.planning.plan_release import plan_release
from streaming.release.task.planning.sending_order import by_time
from streaming.release.task.sender import send_releases
from tests.support.service.plans import sends_of
from tests.support.tracker.messages import TOPIC, messages, release_rows
from tracker.messages import with_columns
from tracker.packing import pack
from warehouse.routes.known_routes import known_routes

OTHER = "persistent://public/default/other"
ELSEWHERE = "persistent://public/default/elsewhere"


def settings(*subscriptions: dict[str, str], topic: str = TOPIC) -> Settings:
    return Settings(routes=[{"source": topic, "subscriptions": list(subscriptions)}])  # type: ignore[arg-type]


A, B = {"name": "a"}, {"name": "b"}
BEFORE = settings(A, B)
ANOTHER_ROUTE = settings({"name": "x"}, topic=OTHER)


def release(
    masks: list[int], before: Settings | None = BEFORE, reason: str | None = None, **offset_has: Any
) -> Assignment:
    """A release of a job on some settings; None: of one that did not keep their names."""
    rows = messages([(1, i, 1_000 + i) for i in range(len(masks))], reason=reason)
    offset = Offset(routes={} if before is None else known_routes(before).to_json(), **offset_has)
    return Assignment("app", 0, 1, True, pack(release_rows(rows, masks, offset.to_tick().sending)))


def sent(now: Settings, what: Assignment, partitions: int = 0) -> list[tuple[int, str | None, str]]:
    """(row, subscription, destination)."""
    return [
        (s.row, s.subscription, s.topic) for s in sends_of(plan_release(now, what, Attempt(), lambda topic: partitions))
    ]


BOTH = [(0, "a", f"{TOPIC}-a"), (1, "b", f"{TOPIC}-b")]


@pytest.mark.parametrize("now", [(A, B), (B, A), ({"name": "new"}, B, A)], ids=["same", "swapped", "one in front"])
def test_a_row_goes_to_who_wanted_it_wherever_the_settings_have_it(now: tuple[dict[str, str], ...]) -> None:
    assert sent(settings(*now), release([0b01, 0b10])) == BOTH


def test_sequence_ids_and_producers_are_the_same_whatever_the_settings_say() -> None:
    what = release([0b01, 0b11, 0b10])
    first, again = (
        [(s.sequence_id, s.producer) for s in sends_of(plan_release(now, what, Attempt()))]
        for now in (BEFORE, settings(B, A))
    )
    assert first == again


def test_subscriptions_of_the_same_name_and_destination_have_producers_of_their_own() -> None:
    """They fail, wait and are sent again each for itself; so do rejects, whatever a subscription is called."""
    shared = {"name": "rejects", "destination": f"{TOPIC}-rejects"}
    routes: Any = [{"source": topic, "subscriptions": [shared]} for topic in (TOPIC, OTHER)]
    both = Settings(routes=routes)
    of_topic = [
        messages([(1, i, 1_000 + i)], topic=topic, reason=r)
        for topic in (TOPIC, OTHER)
        for i, r in enumerate((None, "bad"))
    ]
    sending = Offset(routes=known_routes(both).to_json()).to_tick().sending
    rows = release_rows(pa.concat_tables(of_topic), 1, sending)
    plan = plan_release(both, Assignment("app", 0, 1, True, pack(rows)), Attempt())
    assert {s.topic for s in sends_of(plan)} == {f"{TOPIC}-rejects", f"{OTHER}-rejects"}
    assert len({s.producer for s in sends_of(plan)}) == 4


def test_what_was_handed_out_to_a_subscription_that_is_gone_is_dropped_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert sent(settings(B), release([0b11, 0b01])) == [(0, "b", f"{TOPIC}-b")]
    assert [record.getMessage() for record in caplog.records] == [
        f"{TOPIC}: 2 messages handed out to a are not sent: the settings no longer have it"
    ]
    what = release([0b11, 0b01])
    dropped = plan_release(settings(B), what, Attempt()).dropped
    assert [(one.row, one.subscription) for one in dropped] == [(0, "a"), (1, "a")]
    told = frozenset((1, one.topic, one.producer) for one in dropped)
    for attempt in (
        Attempt(done=told),
        Attempt(skipped=frozenset({(TOPIC, "a")})),
        Attempt(only=frozenset({(TOPIC, "b")})),
    ):
        assert not plan_release(settings(B), what, attempt).dropped


def test_a_destination_that_was_changed_gets_the_rest_in_its_own_partitions() -> None:
    now = settings({"name": "a", "destination": ELSEWHERE}, B)
    assert sent(now, release([0b01, 0b10])) == [(0, "a", ELSEWHERE), (1, "b", f"{TOPIC}-b")]
    assert Counter(t for _, _, t in sent(now, release([0b01] * 8), 4)) == {
        f"{ELSEWHERE}-partition-{i}": 2 for i in range(4)
    }


class Client:
    """Of a broker that says nothing of one topic's partitions, and has terminated the others."""

    def __init__(self) -> None:
        self.looked_up: list[str] = []
        self.opened: list[str] = []

    def partitions(self, topic: str) -> int:
        self.looked_up.append(topic)
        raise RefusedError(ServerError.AuthorizationError, b"no rights")

    def begin_producing(self, *_: Any) -> None:
        return None

    def produce(self, topic: str, *_: Any) -> EntryProducer:
        self.opened.append(topic)
        raise RefusedError(ServerError.TopicTerminatedError, b"")


@pytest.mark.parametrize("is_changed", [True, False])
def test_a_destination_that_cannot_be_looked_up_fails_alone(monkeypatch: pytest.MonkeyPatch, is_changed: bool) -> None:
    """Be it that the settings have it only now, or that its partitions were never known."""
    client, now = Client(), settings({"name": "a", "destination": ELSEWHERE}, B)
    what = release([0b01, 0b10]) if is_changed else release([0b01, 0b10], now, destinations={ELSEWHERE: UNKNOWN})
    monkeypatch.setattr(process_clients, "brokers", lambda *_: client)
    [sent] = send_releases(now.model_dump_json(), Attempt(), [what, what])
    assert sorted({(one.topic, one.recipient, one.is_refused) for one in sent.failed}) == [
        (ELSEWHERE, (TOPIC, "a"), True),
        (f"{TOPIC}-b", (TOPIC, "b"), True),
    ]
    assert "no rights" in sent.failed[0].reason
    assert client.looked_up == [ELSEWHERE], "once for all shards"
    assert client.opened == [f"{TOPIC}-b"]
    # When it is left to itself the others are not held up by looking it up.
    list(send_releases(now.model_dump_json(), Attempt(skipped=frozenset({(TOPIC, "a")})), [what]))
    assert client.looked_up == [ELSEWHERE]


def test_what_was_handed_out_before_its_route_was_taken_out_goes_where_it_was_to_go() -> None:
    assert sent(ANOTHER_ROUTE, release([0b01, 0b10])) == BOTH
    assert sent(ANOTHER_ROUTE, release([0], reason="bad")) == [(0, None, f"{TOPIC}-rejects")]


def test_a_release_of_before_names_were_kept_goes_by_the_order_of_the_settings() -> None:
    assert sent(BEFORE, release([0b01, 0b10], None)) == BOTH
    assert "routes" in json.loads(Offset().to_tick().sending)


@pytest.mark.parametrize(("repetition", "is_first"), [(0, True), (1, False)])
def test_a_task_that_spark_runs_again_is_no_first_attempt(
    repetition: int, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[Attempt] = []

    def send(settings: Settings, attempt: Attempt, *_: Any) -> SendReport:
        attempts.append(attempt)
        return SendReport(b"", 0)

    monkeypatch.setattr(sender, "_send", send)
    monkeypatch.setattr(TaskContext, "get", lambda: SimpleNamespace(attemptNumber=lambda: repetition))
    list(send_releases(BEFORE.model_dump_json(), Attempt(is_first=True), [release([0b01])]))
    assert [attempt.is_first for attempt in attempts] == [is_first]


@pytest.mark.parametrize("key", [None, "k"])
def test_what_several_shards_held_back_goes_out_in_the_order_in_which_it_was_due(key: str | None) -> None:
    """Also in batches: of each producer the sequence ids rise, and those of different ones take turns."""
    due = [[100, 130, 130, 190, 250], [90, 110, 180, 181, 260]]
    plans = []
    for shard, times in enumerate(due):
        rows = messages([(1, 2 * i + shard, 1_000) for i in range(len(times))], key=key)
        sending = Offset(batch_millis=5, routes=known_routes(BEFORE).to_json()).to_tick().sending
        rows = release_rows(with_columns(rows, was_due=pa.array(times)), 1, sending)
        assignment = Assignment("app", shard, 1, False, pack(rows))
        plans.append(plan_release(BEFORE, assignment, Attempt()))
    pending = by_time(plans)
    sent = [plan.columns["was_due"][send.row] for send, plan in pending]
    assert [time // 5 for time in sent] == [time // 5 for time in sorted(sent)]
    assert all(send.at == 1_000 for send, _ in pending)
    for plan in plans:
        ids = [send.sequence_id for send, of in pending if of is plan]
        assert ids == sorted(ids)


def test_what_several_ticks_have_for_a_producer_goes_in_the_order_of_sequence_ids_and_never_early() -> None:
    """Ticks 1 and 3 share a producer, tick 2 has another."""
    due = {1: [1_000, 1_400], 2: [1_100, 1_300], 3: [1_200, 1_250, 1_500]}
    sending = Offset(lanes=2, batch_millis=5, routes=known_routes(BEFORE).to_json()).to_tick().sending
    plans = []
    for tick, times in reversed(due.items()):
        rows = release_rows(messages([(tick, i, at) for i, at in enumerate(times)]), 1, sending)
        plans.append(plan_release(BEFORE, Assignment("app", 0, tick, False, pack(rows)), Attempt()))
    pending = by_time(plans)
    assert [send.due for send, _ in pending] == [1_000, 1_100, 1_300, 1_400, 1_200, 1_250, 1_500]
    assert [send.at for send, _ in pending] == [1_000, 1_100, 1_300, 1_400, 1_400, 1_400, 1_500]
    for producer in {send.producer for send, _ in pending}:
        ids = [send.sequence_id for send, _ in pending if send.producer == producer]
        assert ids == sorted(ids)


def test_overdue_messages_that_are_put_off_to_one_time_go_in_the_order_of_sequence_ids() -> None:
    """Of which one was parked, and is due again after the other one: the broker drops what has a lower id."""
    rows = messages([(1, 0, 1_400), (1, 1, 1_500)])
    rows = with_columns(rows, was_due=pa.array([None, 1_000]))
    sending = json.loads(Offset(routes=known_routes(BEFORE).to_json()).to_tick().sending)
    body = pack(release_rows(rows, 1, json.dumps(sending | {"shaped": {"now": 2_000}})))
    plan = plan_release(BEFORE, Assignment("app", 0, 1, False, body), Attempt(put_off={(1, 0): {(TOPIC, 0): 300}}))
    pending = by_time([plan])
    assert [(send.sequence_id & 1, send.due) for send, _ in pending] == [(1, 1_400), (0, 1_500)]
    assert all(send.at >= 2_300 for send, _ in pending)


def test_what_was_retried_too_often_goes_to_the_dead_letters() -> None:
    backoff: Any = {"backoff": {"attempts": 1}}
    before = settings(A | backoff, B)
    rows = messages([(1, i, 1_000 + i) for i in range(4)])
    rows = with_columns(rows, attempt=pa.array([None, 1, 2, 6], pa.int32()))
    offset = Offset(routes=known_routes(before).to_json())
    what = Assignment("app", 0, 1, True, pack(release_rows(rows, [0b11] * 4, offset.to_tick().sending)))
    dead = {(2, "a"), (3, "a"), (3, "b")}  # beyond one retry, and beyond the default of five
    expected = [(row, s, f"{TOPIC}-{s}{'-dlq' if (row, s) in dead else ''}") for row in range(4) for s in "ab"]
    assert sent(before, what) == expected
    # As it was decided when they were handed out, also where the settings say something else now.
    assert sent(BEFORE, what) == expected
    partitioned = {topic for _, _, topic in sent(before, what, partitions=1)}
    assert partitioned == {f"{TOPIC}-a", f"{TOPIC}-b", f"{TOPIC}-a-dlq-partition-0", f"{TOPIC}-b-dlq-partition-0"}
    # Each alone, so that they can be acknowledged one by one.
    batched = Offset(batch_millis=5, routes=known_routes(before).to_json()).to_tick().sending
    what = Assignment("app", 0, 1, True, pack(release_rows(rows, [0b11] * 4, batched)))
    planned = sends_of(plan_release(before, what, Attempt()))
    assert {(s.row, s.subscription) for s in planned if not s.is_batched} == dead
    assert {(s.row, s.subscription) for s in planned if s.is_dead} == dead

    # They can be left out, or sent alone: their topic is a destination of its own.
    def chosen(**attempt: Any) -> set[tuple[int, str | None]]:
        return {(s.row, s.subscription) for s in sends_of(plan_release(before, what, Attempt(**attempt)))}

    every = {(row, s) for row in range(4) for s in "ab"}
    of_a = frozenset({(TOPIC, "a dlq")})
    assert chosen(only=of_a) == {(2, "a"), (3, "a")}
    assert chosen(skipped=of_a) == every - {(2, "a"), (3, "a")}
    assert chosen(only=frozenset({(TOPIC, "a")})) == {(0, "a"), (1, "a")}
