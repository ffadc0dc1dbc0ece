"""Of a topic's messages with one request id the first counts, whichever shard it is in, and whatever comes between."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from tests.support.tracker.messages import TOPIC, Answers, messages, tick_at
from tracker.commands.repeats import KEPT_MILLIS, KEPT_REQUESTS
from tracker.due_time import BadScheduleError
from tracker.messages import MESSAGES, concat, where, with_columns
from tracker.payload_refs import PayloadRef
from tracker.properties import request_id
from tracker.rebuilt import Rebuilt
from tracker.requests import FirstMessage, _answer, body_of, first_of_tick, outcome_id, request_id_of
from tracker.scheduling import scheduling
from tracker.shard import Shard
from tracker.sharding import ShardId, shards_of
from tracker.store import MemoryStore
from tracker.subscriptions import Subscriptions
from tracker.tick import TickInput
from tracker.wire.delaylake_pb2 import Result

NAMES = {TOPIC: ["a"]}
DUE = 60_000


def asked(entry: int, chosen: str | None, **columns: Any) -> pa.Table:
    """A message with a request id; entries 64 apart may be in different shards."""
    properties = [] if chosen is None else [("requestId", chosen)]
    return messages(
        [(1, entry * 64, columns.pop("due", DUE))], **{"request_id": chosen, "properties": properties, **columns}
    )


class Job:
    """Shards with one source, each on its own store. Every tick is applied twice, to the same state."""

    def __init__(self, shards: int = 3) -> None:
        self.stores = [MemoryStore() for _ in range(shards)]
        self.tick = self.now = 0
        self.answers = Answers()
        self.rejects: dict[int, str] = {}
        self.pending = 0

    def step(self, *rows: pa.Table, later: int = 1_000, rebuilt: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Applies a tick; returns its outcomes, sorted by entry."""
        self.tick, self.now = self.tick + 1, self.now + later
        table = concat(rows, MESSAGES)
        tick = tick_at(self.tick, self.now)
        outcomes = []
        self.pending = 0
        for number, store in enumerate(self.stores):
            own = where(table, shards_of(table, len(self.stores)) == number)
            tick_input = TickInput(
                messages=own,
                message_requests=first_of_tick(table),
                first_answers=self.answers,
                rebuilt=Rebuilt(**rebuilt) if rebuilt is not None else None,
            )
            before = dict(store.values)
            effects = self._shard(number, store).apply(tick, tick_input)
            copy = MemoryStore()
            copy.values = before
            again = self._shard(number, copy).apply(tick, tick_input)
            assert (again.outcomes, again.rejects, copy.values) == (effects.outcomes, effects.rejects, store.values)
            outcomes.append(effects.outcomes)
            self.rejects |= {row["entry_id"] // 64: row["reason"] for row in effects.rejects.to_pylist()}
            self.pending += effects.status["delayed"]
        for of_shard in outcomes:
            self.answers.keep(of_shard, self.tick)
        return sorted((row for one in outcomes for row in one.to_pylist()), key=lambda row: row["entry_id"])

    def _shard(self, number: int, store: MemoryStore) -> Shard:
        return Shard(store, Subscriptions(NAMES), 50_000, shard_id=ShardId(number, len(self.stores)))


def told(outcomes: Sequence[dict[str, Any]]) -> list[tuple[int, int, str | None, int | None]]:
    return [(r["entry_id"] // 64, r["result"], r["superseded_by"], r["deliver_at"]) for r in outcomes]


@pytest.mark.parametrize("shards", [1, 3])
def test_a_message_that_comes_again_is_rejected_and_its_outcome_names_the_first(shards: int) -> None:
    job = Job(shards)
    assert told(job.step(asked(1, "r"))) == [(1, Result.APPLIED, None, DUE)]
    for entry in range(2, 8):  # in whichever shard
        [answer] = job.step(asked(entry, "r"))
        assert told([answer]) == [(entry, Result.ALREADY_APPLIED, "1:64:-1:-1", DUE)]
        assert answer["request_id"] == outcome_id(TOPIC, "r")
        assert job.rejects[entry] == "a repetition of 1:64:-1:-1: requestId r" == answer["reason"]
    assert job.pending == 1


@pytest.mark.parametrize("shards", [1, 3])
def test_of_messages_that_come_in_one_tick_the_first_counts_in_all_shards(shards: int) -> None:
    job = Job(shards)
    found = told(job.step(asked(4, "r"), *(asked(entry, "r") for entry in (1, 2, 3, 5)), asked(6, "other")))
    repeated = Result.ALREADY_APPLIED, "1:256:-1:-1", DUE
    assert found == [
        *((entry, *repeated) for entry in (1, 2, 3)),
        (4, Result.APPLIED, None, DUE),
        (5, *repeated),
        (6, Result.APPLIED, None, DUE),
    ]
    assert job.pending == 2


def test_another_message_under_the_id_is_invalid_and_the_first_stays_the_first() -> None:
    job = Job()
    job.step(asked(1, "r", payload=b"one"))
    [other] = job.step(asked(2, "r", payload=b"two"))
    assert other["result"] == Result.INVALID
    assert job.rejects[2] == "another message, 1:64:-1:-1, has had the requestId r" == other["reason"]
    assert told(job.step(asked(3, "r", payload=b"one"))) == [(3, Result.ALREADY_APPLIED, "1:64:-1:-1", DUE)]
    assert [row["result"] for row in job.step(asked(4, "s"), asked(5, "s", key="k"))] == [
        Result.APPLIED,
        Result.INVALID,
    ]


def test_ids_are_those_of_a_topic() -> None:
    other = "persistent://public/default/other"
    job = Job()
    first, second = asked(1, "r"), asked(2, "r", topic=other)
    assert [row["result"] for row in job.step(first, second)] == [Result.APPLIED] * 2
    assert request_id_of(other, outcome_id(other, "a@b")) == "a@b"
    assert outcome_id(TOPIC, f"r@{other}") != outcome_id(other, "r")


def test_what_is_rejected_for_something_else_does_not_use_its_id_up() -> None:
    job = Job()
    [answer] = job.step(asked(1, "r", reason="deliverAt is no number"))
    assert (answer["result"], answer["reason"]) == (Result.INVALID, "deliverAt is no number")
    wrong = asked(2, "r", reason="deliverAt is no number", payload=b"other")
    found = job.step(wrong, asked(3, "r"))
    assert [row["result"] for row in found] == [Result.INVALID, Result.APPLIED]
    assert job.rejects[2] == "deliverAt is no number"
    assert told(job.step(asked(4, "r"))) == [(4, Result.ALREADY_APPLIED, "1:192:-1:-1", DUE)]


@pytest.mark.parametrize("shards", [1, 3])
def test_a_repetition_with_which_something_is_wrong_by_now_is_a_repetition(shards: int) -> None:
    job = Job(shards)
    late = "repeatUntil is before the first occurrence"
    found = job.step(asked(2, "r", reason=late), asked(1, "r"))
    assert told(found) == [(1, Result.APPLIED, None, DUE), (2, Result.ALREADY_APPLIED, "1:64:-1:-1", DUE)]
    assert told(job.step(asked(3, "r", reason=late))) == [(3, Result.ALREADY_APPLIED, "1:64:-1:-1", DUE)]
    assert job.rejects == dict.fromkeys((2, 3), "a repetition of 1:64:-1:-1: requestId r")


def test_the_same_message_that_comes_in_again_after_a_rebuild_is_no_repetition() -> None:
    job = Job()
    job.step(asked(1, "r"), asked(2, "delivered"))
    row = asked(1, "r").to_pylist()[0]
    job.stores = [MemoryStore() for _ in job.stores]
    job.step(rebuilt={"message_requests": {TOPIC: {"r": body_of(row), "delivered": 0}}})
    [again] = job.step(asked(1, "r"))
    assert told([again]) == [(1, Result.APPLIED, None, DUE)]
    assert again["is_repeat"]
    assert told(job.step(asked(3, "r"), asked(4, "delivered"))) == [
        (3, Result.ALREADY_APPLIED, "1:64:-1:-1", DUE),
        (4, Result.ALREADY_APPLIED, "1:128:-1:-1", DUE),
    ]
    assert job.pending == 1


def test_an_id_is_remembered_for_a_day() -> None:
    job = Job()
    job.step(asked(1, "r"))
    assert [row["result"] for row in job.step(asked(2, "r"), later=KEPT_MILLIS - 2_000)] == [Result.ALREADY_APPLIED]
    assert [row["result"] for row in job.step(asked(3, "r"), later=KEPT_MILLIS)] == [Result.APPLIED]


def test_an_id_that_was_forgotten_and_used_again_is_the_later_messages() -> None:
    job = Job()
    job.step(asked(1, "r"))
    assert told(job.step(asked(2, "r"), later=KEPT_MILLIS + 3_600_000))[0][1] == Result.APPLIED
    assert told(job.step(asked(3, "r"))) == [(3, Result.ALREADY_APPLIED, "1:128:-1:-1", DUE)]


def test_a_message_that_is_rejected_after_it_was_the_first_is_answered_so() -> None:
    """As one with which the tick of its shard fails. After a rebuild one that was dispatched comes again."""
    first = FirstMessage("7:0:-1:-1", (1,), DUE)
    row: dict[str, Any] = {"payload": None, "key": None, "key_encoding": None}
    row |= {"ordering_key": None, "ordering_key_bytes": None}
    row |= {"topic": TOPIC, "request_id": "r", "position": "7:0:-1:-1", "properties": [], "reason": "it fails"}
    assert (_answer(row, first, False)["result"], _answer(row, first, False)["reason"]) == (Result.INVALID, "it fails")
    assert _answer(row, first, True)["result"] == Result.APPLIED


def test_a_repetition_under_a_schedule_key_does_not_replace_what_waits() -> None:
    job = Job()
    keyed = {"schedule_key": "k", "properties": [("requestId", "r"), ("scheduleKey", "k")]}
    job.step(asked(1, "r", **keyed))
    assert told(job.step(asked(2, "r", **keyed))) == [(2, Result.ALREADY_APPLIED, "1:64:-1:-1", DUE)]
    assert job.pending == 1
    # A further message replaces it, and its repetition does nothing.
    more = {"schedule_key": "k", "properties": [("requestId", "s"), ("scheduleKey", "k")], "due": DUE + 1}
    found = job.step(asked(3, "s", **more))
    assert {(row["entry_id"] // 64, row["result"]) for row in found} == {(1, Result.SUPERSEDED), (3, Result.APPLIED)}
    assert told(job.step(asked(4, "r", **keyed))) == [(4, Result.ALREADY_APPLIED, "1:64:-1:-1", DUE)]
    assert job.pending == 1


def test_the_answer_has_the_time_that_debouncing_gives_also_to_a_repetition_in_the_same_tick() -> None:
    properties = [("debounceMax", "5000"), ("requestId", "r"), ("scheduleKey", "k"), ("scheduleMode", "debounce")]
    keyed = {"schedule_key": "k", "properties": properties, "publish_time": 1_000}
    job = Job()
    assert told(job.step(asked(1, "r", **keyed), asked(2, "r", **keyed))) == [
        (1, Result.APPLIED, None, 6_000),
        (2, Result.ALREADY_APPLIED, "1:64:-1:-1", 6_000),
    ]


def test_a_recurring_message_that_comes_again_has_no_occurrences() -> None:
    job = Job()
    recurs = {"occurrence": 1, "properties": [("repeat", "@every 90s"), ("requestId", "r")]}
    job.step(asked(1, "r", **recurs))
    job.step(asked(2, "r", **recurs))
    assert job.pending == 1
    assert job.rejects.keys() == {2}


def test_state_and_effects_keep_no_id() -> None:
    job = Job(1)
    job.step(asked(1, "r"))
    tables = {table for table, _ in job.stores[0].values}
    assert {"message_requests", "message_request_bodies", "message_requests_list"} <= tables
    without = Job(1)
    without.step(asked(1, None))
    assert not {table for table, _ in without.stores[0].values if table.startswith("message_request")}


def test_the_million_newest_ids_of_a_topic_are_kept_whatever_other_topics_do() -> None:
    job = Job(1)
    job.step(asked(1, "first"))
    other = "persistent://public/default/other"
    n = 8_192
    for number in range(KEPT_REQUESTS // n + 2):
        ids = {f"{number}-{i}": 1 for i in range(n)}
        job.step(rebuilt={"message_requests": {other: ids}}, later=0)
    size = sum(len(value) for (table, _), value in job.stores[0].values.items() if table.startswith("message_request"))
    assert size < 16 * (KEPT_REQUESTS + 3 * n) + 10_000
    assert [row["result"] for row in job.step(asked(2, "first"))] == [Result.ALREADY_APPLIED]


def test_content_and_not_what_tracing_adds_makes_another_message() -> None:
    row = {"payload": b"p", "key": "k", "key_encoding": None, "ordering_key": None, "ordering_key_bytes": None}
    one = row | {"properties": [("a", "1"), ("requestId", "r"), ("traceparent", "00-1")]}
    assert body_of(one) == body_of(row | {"properties": [("traceparent", "00-2"), ("a", "1")]}) != 0
    others: list[dict[str, Any]] = [
        *({"properties": given} for given in ([("a", "2")], [("a1", "")], [("", "a1")], [])),
        *({"payload": payload} for payload in (b"", None, b"pk")),
        {"key": None},
        {"ordering_key": "k", "key": None},
        {"ordering_key_bytes": b"k", "key": None},
        {"key_encoding": "base64"},
    ]
    assert len({body_of(one | other) for other in others} | {body_of(one)}) == len(others) + 1
    assert all(0 < body_of(one | other) < 2**63 for other in others)


def test_a_payload_in_a_file_counts_as_the_payload_that_it_is() -> None:
    first, other = b"x" * 100_000, b"y" * 100_000

    def in_file(payload: bytes, file: str) -> dict[str, Any]:
        return {"payload": None, "payload_at": str(PayloadRef(file, 7, len(payload), zlib.crc32(payload)))}

    row: dict[str, Any] = {
        "key": "k",
        "key_encoding": None,
        "ordering_key": None,
        "ordering_key_bytes": None,
        "properties": [],
    }
    assert (
        body_of(row | in_file(first, "1-a"))
        == body_of(row | in_file(first, "2-b"))
        == body_of(row | {"payload": first})
    )
    assert body_of(row | in_file(other, "1-a")) != body_of(row | in_file(first, "1-a"))
    assert body_of(row | {"payload": None}) != body_of(row | in_file(first, "1-a"))


@pytest.mark.parametrize("shards", [1, 3])
def test_of_large_messages_under_one_id_another_payload_is_another_message(shards: int) -> None:
    def large(entry: int, payload: bytes) -> pa.Table:
        at = str(PayloadRef(f"1-{entry}", 0, len(payload), zlib.crc32(payload)))
        return with_columns(asked(entry, "r"), payload=pa.nulls(1, pa.binary()), payload_at=pa.array([at]))

    job = Job(shards)
    job.step(large(1, b"x" * 100_000))
    outcomes = job.step(large(2, b"x" * 100_000), large(3, b"y" * 100_000))
    assert [row["result"] for row in outcomes] == [Result.ALREADY_APPLIED, Result.INVALID]


def test_which_messages_have_an_id() -> None:
    assert scheduling({"requestId": "r", "deliverAt": "5000"}, 0, 0).request_id == "r"
    assert request_id({"requestId": "ü" * 128}) == "ü" * 128
    for wrong in ("", "ü" * 129):
        with pytest.raises(BadScheduleError, match="requestId is empty or has more than 256 bytes"):
            request_id({"requestId": wrong})
        found = scheduling({"requestId": wrong}, 0, 0)
        assert (found.request_id, found.reason) == (None, "requestId is empty or has more than 256 bytes")
    # What is wrong with it is answered under its id.
    assert scheduling({"requestId": "r", "deliverAt": "soon"}, 0, 0).request_id == "r"
    # A message that comes back, or goes on to another source topic, has its first one's properties.
    sent_back = {"retryOf": "1:2:-1:-1", "retrySubscription": "a", "requestId": "r"}
    assert scheduling(sent_back, 0, 0) == scheduling(sent_back | {"requestId": ""}, 0, 0)
    assert scheduling({"requestId": "r", "delaylake.messageId": "1:2:-1:-1"}, 0, 0).request_id is None


def test_rows_of_an_earlier_version_have_no_id() -> None:
    rows = asked(1, None).drop_columns(["request_id"])
    assert first_of_tick(rows) == {}
