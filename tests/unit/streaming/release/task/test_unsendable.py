"""Rows of a release that can't become a message: each is reported alone, the others arrive once, also in a replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _pulsar
import pulsar
import pyarrow as pa
import pytest

from conf.settings import Settings
from streaming.release import outgoing
from streaming.release.attempt import Assignment, Attempt
from streaming.release.task import process_clients
from streaming.release.task.sender import send_releases
from tests.support.tracker.messages import TOPIC, messages, release_rows
from tracker.commands.holding.giving_up import NOT_DELIVERED, NOT_TAKEN
from tracker.messages import Int64Array, with_columns
from tracker.packing import pack, unpack
from tracker.row_sizes import payload_sizes

N = 6
NO_VALUE = [("region", None)]
WHYS = {
    "properties": "the property 'region' has no value",
    "event_time": "the event time -1 is negative or beyond 2^63",
}


@dataclass
class Result:
    name: str = "Ok"


@dataclass
class Broker:
    """A client, and a broker with deduplication that remembers the first sequence id of a batch."""

    last: dict[tuple[str, str], int] = field(default_factory=dict)
    arrived: dict[str, list[str]] = field(default_factory=dict)  # by topic the positions of messages
    reasons: list[str] = field(default_factory=list)  # of messages that came to rejects topics

    def get_topic_partitions(self, topic: str) -> list[str]:
        return [topic]

    def create_producer(self, topic: str, producer_name: str, batching_enabled: bool, **_: Any) -> Producer:
        return Producer(self, (topic, producer_name), batching_enabled, self.last.get((topic, producer_name), -1))

    def close(self) -> None:
        pass


@dataclass
class Producer:
    broker: Broker
    key: tuple[str, str]
    is_batching: bool
    last: int
    batch: list[tuple[_pulsar.Message, Any]] = field(default_factory=list)

    @property
    def _producer(self) -> Producer:
        return self

    def last_sequence_id(self) -> int:
        return self.last

    def send_async(self, message: _pulsar.Message, callback: Callable[[Any, Any], None] | None) -> None:
        self.batch.append((message, callback))
        if not self.is_batching:
            self._cut()

    def _cut(self) -> None:
        if not self.batch:
            return
        batch, self.batch = self.batch, []
        first = _ids[id(batch[0][0])]
        is_new = first > self.broker.last.get(self.key, -1)
        if is_new:
            self.broker.last[self.key] = first
            for message, _ in batch:
                properties = message.properties()
                self.broker.arrived.setdefault(self.key[0], []).append(properties["delaylake.messageId"])
                if "delaylake.reason" in properties:
                    self.broker.reasons.append(properties["delaylake.reason"])
        self.last = max(self.last, first)
        for _, callback in batch:
            if callback is not None:
                callback(Result(), pulsar.MessageId(-1, 1 if is_new else -1, 1 if is_new else -1, -1))

    def flush(self) -> None:
        self._cut()

    def flush_async(self, callback: Callable[[Any], None]) -> None:
        self._cut()
        callback(Result())

    def close(self) -> None:
        pass


_ids: dict[int, int] = {}


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    broker = Broker()
    built = outgoing._finished

    def finished(builder: Any, sequence_id: int) -> _pulsar.Message:
        message = built(builder, sequence_id)
        _ids[id(message)] = sequence_id  # a message does not tell its own
        return message

    monkeypatch.setattr(outgoing, "_finished", finished)
    monkeypatch.setattr(process_clients, "pulsar_client", lambda settings, number=0: broker)
    return broker


def settings(folder: Path) -> Settings:
    return Settings(
        checkpoint=f"file:{folder}",
        routes=[{"source": TOPIC, "subscriptions": [{"name": name} for name in "ab"]}],  # type: ignore[arg-type]
    )


def release(wrong: set[int], column: str, batch_millis: int, masks: int = 0b11) -> Assignment:
    rows = messages([(1, i, 1_000 + i) for i in range(N)])
    bad = NO_VALUE if column == "properties" else -1
    good = [("a", "b")] if column == "properties" else 5
    values = [bad if i in wrong else good for i in range(N)]
    rows = with_columns(rows, **{column: pa.array(values, rows.schema.field(column).type)})
    sending = f'{{"lanes": 1, "batch_millis": {batch_millis}}}'
    return Assignment("app", 0, 1, True, pack(release_rows(rows, masks, sending)))


@pytest.mark.parametrize("batch_millis", [0, 1, 1_000], ids=["alone", "batches of one", "one batch"])
@pytest.mark.parametrize("wrong", [{0}, {2, 3}, {N - 1}, set(range(N))], ids=str)
@pytest.mark.parametrize("column", WHYS)
def test_a_row_that_can_not_be_built_is_refused_alone_and_the_same_again(
    broker: Broker, tmp_path: Path, column: str, wrong: set[int], batch_millis: int
) -> None:
    what = release(wrong, column, batch_millis)
    for _ in range(2):  # as after a crash before anything was written down
        [sent] = send_releases(settings(tmp_path).model_dump_json(), Attempt(), [what])
        assert sent.failed == ()
        rows = unpack(sent.deliveries).to_pylist()
        good = [i for i in range(N) if i not in wrong]
        assert sorted((row["subscription"], row["entry_id"]) for row in rows) == [(s, i) for s in "ab" for i in good]
        refused = unpack(sent.refused[1, True]).to_pylist()
        assert sorted((row["subscription"], row["entry_id"]) for row in refused) == [
            (s, i) for s in "ab" for i in sorted(wrong)
        ]
        assert {row["reason"] for row in refused} == {f"{NOT_DELIVERED}{s}{NOT_TAKEN}{WHYS[column]}" for s in "ab"}
    for name in "ab":
        assert broker.arrived.get(f"{TOPIC}-{name}", []) == [f"1:{i}:-1:-1" for i in good]
    assert len(broker.reasons) == len(broker.arrived[f"{TOPIC}-rejects"]) == 2 * len(wrong), "once each"


@pytest.mark.parametrize("step", ["delivered", "planned"])
@pytest.mark.parametrize("error", [IndexError("x"), KeyError("x"), RecursionError(), AssertionError(), OSError("x")])
def test_whatever_is_raised_for_a_row_the_others_arrive(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: Exception
) -> None:
    build = outgoing.delivered

    def delivered(columns: Any, row: int, *rest: Any) -> _pulsar.Message:
        if columns["entry_id"][row] == 3:
            raise error
        return build(columns, row, *rest)

    def sizes(rows: pa.Table) -> Int64Array:
        if "payload" in rows.column_names and 3 in rows["entry_id"].to_pylist():
            raise error
        return payload_sizes(rows)

    if step == "delivered":
        monkeypatch.setattr(outgoing, "delivered", delivered)
    else:
        monkeypatch.setattr("streaming.release.task.planning.contents.payload_sizes", sizes)
    [sent] = send_releases(settings(tmp_path).model_dump_json(), Attempt(), [release(set(), "event_time", 0, 1)])
    assert sent.failed == ()
    assert broker.arrived[f"{TOPIC}-a"] == [f"1:{i}:-1:-1" for i in range(N) if i != 3]
    [refused] = unpack(sent.refused[1, True]).to_pylist()
    assert (refused["entry_id"], type(error).__name__ in refused["reason"]) == (3, True)


def test_text_that_is_not_utf_8_is_refused_alone(broker: Broker, tmp_path: Path) -> None:
    rows = messages([(1, i, 1_000 + i) for i in range(3)])
    keys = pa.StringArray.from_buffers(3, pa.py_buffer(bytes([0] * 8 + [1, 0, 0, 0] * 2)), pa.py_buffer(b"\xff"))
    what = Assignment("app", 0, 1, True, pack(release_rows(with_columns(rows, key=keys), 1, '{"lanes": 1}')))
    [sent] = send_releases(settings(tmp_path).model_dump_json(), Attempt(), [what])
    assert broker.arrived[f"{TOPIC}-a"] == ["1:0:-1:-1", "1:2:-1:-1"]
    [refused] = unpack(sent.refused[1, True]).to_pylist()
    assert "not UTF-8 can't be read: key" in refused["reason"]
