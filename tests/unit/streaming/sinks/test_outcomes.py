"""What of a batch's outcomes is published: one each, or one for all that share a result."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest

from conf.settings import Settings
from streaming.checkpoint.offset import Offset
from streaming.release.sequence_ids import sequence_id_of
from streaming.sinks import outcomes as module
from streaming.sinks.outcomes import OutcomePublisher, last_published, to_publish
from tests.unit.streaming.release.test_last_sent import Destination
from tracker.requests import OPERATION
from tracker.schemas import OUTCOME_ROWS
from tracker.wire.delaylake_pb2 import ControlOutcome, Result
from warehouse.delta.fencing import FencedError


def outcome(entry_id: int, **given: object) -> Mapping[str, object]:
    values = {"request_id": "r", "topic": "t", "subscription": "a", "ledger_id": 1, "batch_index": -1}
    result = {"result": int(Result.APPLIED), "reason": "", "operation": "SKIP", "sum_up": True}
    return values | result | {"entry_id": entry_id} | given


def told(*outcomes: Mapping[str, object]) -> list[tuple[object, ...]]:
    """What is published of single outcomes and sums: by whom it is asked for, and the number."""
    rows = to_publish(pa.Table.from_pylist(list(outcomes), schema=OUTCOME_ROWS)).to_pylist()
    return [(row["is_repeat"], row["batch_index"], row["result"], row["has_more"], row["n_named"]) for row in rows]


def published(*outcomes: Mapping[str, object]) -> list[tuple[object, ...]]:
    rows = to_publish(pa.Table.from_pylist(list(outcomes), schema=OUTCOME_ROWS)).to_pylist()
    names = ("request_id", "subscription", "ledger_id", "entry_id", "batch_index", "result", "has_more", "n_named")
    return [tuple(row[name] for name in names) for row in rows]


def test_without_being_asked_to_sum_up_each_outcome_is_told() -> None:
    rows = [outcome(entry, sum_up=asked) for entry, asked in enumerate([False, None])]
    assert published(*rows) == [("r", "a", 1, 0, -1, 1, False, 0), ("r", "a", 1, 1, -1, 1, False, 0)]


def test_those_of_a_request_that_share_a_result_are_one() -> None:
    rows = [outcome(0), outcome(1, request_id="s"), outcome(2), outcome(3, result=3, reason="released")]
    rows += [outcome(4, subscription="b"), outcome(0, request_id="single", sum_up=False), outcome(5)]
    assert published(*rows) == [
        ("single", "a", 1, 0, -1, 1, False, 0),
        ("r", "a", -1, -1, -1, 1, False, 3),
        ("s", "a", -1, -1, -1, 1, False, 1),
        ("r", "a", -1, -1, -1, 3, False, 1),
        ("r", "b", -1, -1, -1, 1, False, 1),
    ]


def test_single_messages_of_an_entry_are_summed_up_unless_the_entry_was_named() -> None:
    rows = [outcome(0, batch_index=0), outcome(0, batch_index=1)]
    rows += [outcome(1, batch_index=i, result=1 + 2 * i, sum_up=False) for i in range(2)] + [outcome(2)]
    assert published(*rows) == [
        ("r", "a", 1, 1, 0, 1, True, 0),
        ("r", "a", 1, 1, 1, 3, False, 0),
        ("r", "a", -1, -1, -1, 1, False, 3),
    ]


def test_the_answer_to_a_message_with_a_request_id_has_the_time_of_the_first() -> None:
    fields = {"subscription": None, "operation": OPERATION, "deliver_at": 5_000, "superseded_by": "1:7:-1:-1"}
    rows = [outcome(0, sum_up=None, **fields), outcome(1, operation="RESCHEDULE", deliver_at=6_000, sum_up=False)]
    table = to_publish(pa.Table.from_pylist(rows, schema=OUTCOME_ROWS))
    published = [
        ControlOutcome.FromString(body) for _, body in module._readable_outcomes(table.to_pylist(), 9).values()
    ]
    assert [(one.superseded_by, one.deliver_at) for one in published] == [("1:7:-1:-1", 5_000), ("", 0)]


def test_an_outcome_for_the_command_as_a_whole_has_no_number() -> None:
    whole = {"subscription": None, "ledger_id": -1, "result": int(Result.INVALID)}
    assert published(outcome(-1, **whole)) == [("r", None, -1, -1, -1, int(Result.INVALID), False, 0)]


def test_what_a_repeated_command_is_told_in_the_tick_of_the_first_is_an_answer_of_its_own() -> None:
    """Added to the first one, the client would take 12 of 10 for done, and never look at those that came too late."""
    first = [
        outcome(entry, result=1 if entry < 6 else 3, reason="" if entry < 6 else "released") for entry in range(10)
    ]
    first += [outcome(10, batch_index=i, result=1 + 2 * i, sum_up=False) for i in range(2)]
    rows = [{**one, "is_repeat": again} for again in (None, True) for one in first]
    singles = [(again, i, 1 + 2 * i, i == 0, 0) for again in (False, True) for i in range(2)]
    sums = [(again, -1, result, False, n) for again in (False, True) for result, n in ((1, 6), (3, 4))]
    assert told(*rows) == [*singles, *sums]


def test_what_a_repeated_command_is_told_is_not_summed_up_with_what_is_new() -> None:
    """Of 10 messages 6 were told in an earlier tick, one is new in this one, and 3 wait."""
    new = outcome(6)
    again = [outcome(entry, is_repeat=True, result=1 if entry < 7 else int(Result.WAITING)) for entry in range(10)]
    whole = outcome(-1, subscription=None, ledger_id=-1, is_repeat=True)
    other = [outcome(0, result=int(Result.INVALID), reason="another command")]
    assert [(row[5], row[7]) for row in published(new, *again, whole, *other)] == [
        (1, 0),
        (1, 1),
        (1, 7),
        (int(Result.WAITING), 3),
        (int(Result.INVALID), 1),
    ]


OUTCOME: dict[str, Any] = {"payload": ControlOutcome(request_id="r").SerializeToString(), "key": "r"}


@pytest.mark.parametrize(
    ("content", "tick"),
    [
        (OUTCOME, 9),
        (OUTCOME | {"key": "s"}, -1),
        ({"payload": b"", "key": ""}, -1),
        ({"payload": b"x"}, -1),
    ],
    ids=["outcome", "another key", "empty", "no outcome"],
)
def test_a_later_tick_counts_unless_the_message_is_no_outcome(
    content: dict[str, Any], tick: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = Destination()
    topic.send(6, "app-outcomes-batched", {}, **OUTCOME)
    topic.send(9, "app-outcomes-batched", {}, **content)
    monkeypatch.setattr(module, "Brokers", lambda settings: topic)
    monkeypatch.setattr(module, "AdminClient", lambda settings: contextlib.nullcontext(topic))
    assert last_published(Settings(), "app", Offset(tick=6, now=1)) == tick, "of the next name there is nothing"


MOST = 5 << 20  # bytes that the client takes


def is_current() -> None:
    """No other job has taken the warehouse over."""


def is_fenced() -> None:
    raise FencedError("warehouse", 1, 2)


class Client:
    """A client and a producer: it refuses a message that is too large, and does not tell; as Pulsar's does."""

    def __init__(self) -> None:
        self.last = -1
        self.batch: list[tuple[int, bytes]] = []
        self.batches: list[list[bytes]] = []
        self._producer = self

    def create_producer(self, topic: str, **options: Any) -> Client:
        return self

    def last_sequence_id(self) -> int:
        return self.last

    def send_async(self, body: bytes, callback: Any, partition_key: str, sequence_id: int) -> None:
        if len(body) + len(partition_key) <= MOST:
            self.batch.append((sequence_id, body))

    def close(self) -> None:
        pass

    def flush_async(self, callback: Any) -> None:
        self.flush()

    def flush(self) -> None:
        if self.batch:
            assert sum(len(body) for _, body in self.batch) <= MOST
            if self.batch[0][0] > self.last:
                self.last = self.batch[0][0]
                self.batches.append([body for _, body in self.batch])
            self.batch = []


HUGE = "x" * (3 << 20)


@pytest.mark.parametrize(
    "wrong",
    [
        {"request_id": HUGE},
        {"reason": "\u00fc" * len(HUGE), "operation": "REDRIVE"},
        {"topic": HUGE, "schedule_key": HUGE},
        {"occurrence": -1, "result": 1 << 30},
        {"request_id": "", "result": None, "operation": None},
    ],
    ids=["request id", "reason", "topic", "result", "nothing"],
)
@pytest.mark.parametrize("at", [0, 2], ids=["first", "last"])
def test_an_outcome_that_the_client_does_not_take_as_it_is_stops_no_other(
    wrong: dict[str, Any], at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [outcome(entry, sum_up=False) for entry in range(2)]
    rows.insert(at, outcome(9, sum_up=False, **wrong))
    client = Client()
    monkeypatch.setattr(module, "connect", lambda settings: client)
    for _ in range(2):  # as in a replay
        OutcomePublisher(Settings(), "app", is_current).publish(pa.Table.from_pylist(rows, schema=OUTCOME_ROWS), 3, 1)
    entries = [ControlOutcome.FromString(body).entry_id for batch in client.batches for body in batch]
    expected = [0, 1]
    expected.insert(at, 9)
    assert entries == expected


def test_an_outcome_that_can_not_be_built_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    client, build = Client(), module._outcome

    def raises(row: dict[str, Any], now: int) -> ControlOutcome:
        if row["entry_id"] == 1:
            raise RecursionError
        return build(row, now)

    monkeypatch.setattr(module, "connect", lambda settings: client)
    monkeypatch.setattr(module, "_outcome", raises)
    rows = [outcome(entry, sum_up=False) for entry in range(3)]
    OutcomePublisher(Settings(), "app", is_current).publish(pa.Table.from_pylist(rows, schema=OUTCOME_ROWS), 3, 1)
    OutcomePublisher(Settings(), "app", is_current).publish(pa.Table.from_pylist(rows[1:2], schema=OUTCOME_ROWS), 4, 1)
    assert [ControlOutcome.FromString(body).entry_id for batch in client.batches for body in batch] == [0, 2]


def test_a_job_whose_successor_has_told_later_answers_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()
    monkeypatch.setattr(module, "connect", lambda settings: client)
    rows = pa.Table.from_pylist([outcome(0, sum_up=False)], schema=OUTCOME_ROWS)
    client.last = sequence_id_of(4, 0)
    with pytest.raises(FencedError):
        OutcomePublisher(Settings(), "app", is_fenced).publish(rows, 3, 1)
    assert client.batches == []
    OutcomePublisher(Settings(), "app", is_fenced).publish(rows, 5, 1)
    assert len(client.batches) == 1  # under its own name, for which nobody is asked


def test_batches_of_long_outcomes_are_cut_before_the_client_cuts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()
    monkeypatch.setattr(module, "connect", lambda settings: client)
    rows = [outcome(entry, sum_up=False, reason="x" * 4_000) for entry in range(1_000)]
    for _ in range(2):
        OutcomePublisher(Settings(), "app", is_current).publish(pa.Table.from_pylist(rows, schema=OUTCOME_ROWS), 3, 1)
    assert sum(map(len, client.batches)) == 1_000
    assert max(sum(map(len, batch)) for batch in client.batches) <= 1 << 20
