"""Rows of a release that can't become a message: each is reported alone, the others arrive once, also in a replay."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from broker.protocol.building import OutgoingMessage
from conf.settings import Settings
from streaming.checkpoint.payload_files import ASIDE_BYTES, PayloadFiles, PayloadUnreadableError
from streaming.release import outgoing
from streaming.release.attempt import Assignment, Attempt
from streaming.release.task import process_clients
from streaming.release.task.sender import send_releases
from tests.support.servers.fake_destinations import FakeBrokers
from tests.support.tracker.messages import TOPIC, messages, release_rows
from tracker.commands.outcomes import NOT_DELIVERED, NOT_TAKEN
from tracker.messages import Int64Array, with_columns
from tracker.packing import pack, payload_sizes, unpack
from tracker.store import StateLostError

N = 6
NO_VALUE = [("region", None)]
WHYS = {
    "properties": "the property 'region' has no value",
    "event_time": "the event time -1 is negative or beyond 2^63",
}


class Broker(FakeBrokers):
    """What has arrived, by topic the positions of messages."""

    def positions(self, topic: str) -> list[str]:
        return [one.properties["delaylake.messageId"] for one in self.arrived(topic)]


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    broker = Broker()
    monkeypatch.setattr(process_clients, "brokers", lambda settings, number=0: broker)
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
        assert broker.positions(f"{TOPIC}-{name}") == [f"1:{i}:-1:-1" for i in good]
    rejects = [one for one in broker.arrived(f"{TOPIC}-rejects") if "delaylake.reason" in one.properties]
    assert len(rejects) == 2 * len(wrong), "once each"


def in_a_file(folder: Path, n: int = N) -> tuple[Assignment, list[bytes]]:
    """A release of large payloads, and the payloads."""
    payloads = [os.urandom(ASIDE_BYTES + i) for i in range(n)]
    rows = messages([(1, i, 1_000 + i) for i in range(n)])
    rows = PayloadFiles.of(settings(folder)).put_aside(with_columns(rows, payload=pa.array(payloads, pa.binary())), 1)
    return Assignment("app", 0, 1, True, pack(release_rows(rows, 1, '{"lanes": 1, "batch_millis": 1}'))), payloads


def test_payloads_in_files_arrive_also_at_the_rejects_topic_and_in_the_report(broker: Broker, tmp_path: Path) -> None:
    what, payloads = in_a_file(tmp_path)
    assert len(what.body) < ASIDE_BYTES
    [sent] = send_releases(settings(tmp_path).model_dump_json(), Attempt(), [what])
    assert unpack(sent.deliveries).num_rows == N
    assert [one.message.payload for one in broker.arrived(f"{TOPIC}-a")] == payloads

    rows = with_columns(what.rows(), event_time=pa.array([-1] * N, pa.int64()))
    wrong = Assignment("app", 0, 2, True, pack(rows))
    [sent] = send_releases(settings(tmp_path).model_dump_json(), Attempt(), [wrong])
    refused = unpack(sent.refused[2, True])
    assert refused["payload"].to_pylist() == payloads
    assert refused["payload_at"].null_count == N


@pytest.mark.parametrize("is_rejected", [False, True])
def test_a_payload_that_is_lost_fails_the_release_and_rejects_no_message(
    broker: Broker, tmp_path: Path, is_rejected: bool
) -> None:
    what, _ = in_a_file(tmp_path, 1)
    [file] = PayloadFiles.of(settings(tmp_path))._folder.iterdir()
    file.write_bytes(bytes(file.stat().st_size))
    if is_rejected:
        what = Assignment("app", 0, 1, True, pack(with_columns(what.rows(), reason=pa.array(["no"]))))
    with pytest.raises(StateLostError, match="is damaged: run `delaylake rebuild"):
        list(send_releases(settings(tmp_path).model_dump_json(), Attempt(), [what]))
    assert not any(broker.positions(topic) for topic in (f"{TOPIC}-a", f"{TOPIC}-rejects"))


@pytest.mark.parametrize("is_rejected", [False, True])
def test_a_payload_that_the_disk_does_not_give_now_fails_the_release_and_rejects_no_message(
    broker: Broker, tmp_path: Path, is_rejected: bool
) -> None:
    """As a message that is refused it was left out. Sent again with the others there, it counted as delivered."""
    what, payloads = in_a_file(tmp_path)
    if is_rejected:
        what = Assignment("app", 0, 1, True, pack(with_columns(what.rows(), reason=pa.array(["no"] * N))))
    folder = PayloadFiles.of(settings(tmp_path))._folder
    folder.rename(tmp_path / "away")
    folder.touch()
    with pytest.raises(PayloadUnreadableError, match="Not a directory"):
        list(send_releases(settings(tmp_path).model_dump_json(), Attempt(), [what]))
    assert not any(broker.positions(topic) for topic in (f"{TOPIC}-a", f"{TOPIC}-rejects"))
    folder.unlink()
    (tmp_path / "away").rename(folder)
    list(send_releases(settings(tmp_path).model_dump_json(), Attempt(is_first=False), [what]))
    topic = f"{TOPIC}-rejects" if is_rejected else f"{TOPIC}-a"
    assert [one.message.payload for one in broker.arrived(topic)] == payloads


@pytest.mark.parametrize("step", ["delivered", "planned"])
@pytest.mark.parametrize("error", [IndexError("x"), KeyError("x"), RecursionError(), AssertionError(), OSError("x")])
def test_whatever_is_raised_for_a_row_the_others_arrive(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: Exception
) -> None:
    build = outgoing.delivered

    def delivered(columns: Any, row: int, *rest: Any) -> OutgoingMessage:
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
    assert broker.positions(f"{TOPIC}-a") == [f"1:{i}:-1:-1" for i in range(N) if i != 3]
    [refused] = unpack(sent.refused[1, True]).to_pylist()
    assert (refused["entry_id"], type(error).__name__ in refused["reason"]) == (3, True)


def test_text_that_is_not_utf_8_is_refused_alone(broker: Broker, tmp_path: Path) -> None:
    rows = messages([(1, i, 1_000 + i) for i in range(3)])
    keys = pa.StringArray.from_buffers(3, pa.py_buffer(bytes([0] * 8 + [1, 0, 0, 0] * 2)), pa.py_buffer(b"\xff"))
    what = Assignment("app", 0, 1, True, pack(release_rows(with_columns(rows, key=keys), 1, '{"lanes": 1}')))
    [sent] = send_releases(settings(tmp_path).model_dump_json(), Attempt(), [what])
    assert broker.positions(f"{TOPIC}-a") == ["1:0:-1:-1", "1:2:-1:-1"]
    [refused] = unpack(sent.refused[1, True]).to_pylist()
    assert "not UTF-8 can't be read: key" in refused["reason"]
