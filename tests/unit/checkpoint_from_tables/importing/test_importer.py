"""What an import makes of a file's rows, and that an interrupted one can be repeated."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from broker.position import START, Position
from broker.protocol.chunks import ChunkAssembler
from broker.pulsar_admin.answers import BrokerEntry, TopicLedgers
from checkpoint_from_tables.importing import files, topics
from checkpoint_from_tables.importing.files import check_files, import_file
from checkpoint_from_tables.importing.importer import Importer, ImportFailedError, number_of
from checkpoint_from_tables.importing.topics import check_topic
from conf.settings import Settings
from tests.support.servers.fake_pulsar import FakeConsumer, one
from tests.support.tracker.messages import TOPIC, messages
from tracker.messages import FIRST_IMPORTED_LEDGER
from warehouse.delta.tables import Tables
from warehouse.queries.index_rows import to_index

NOW = 1_800_000_000_000


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = Settings(
        warehouse=str(tmp_path / "warehouse"),
        routes=({"source": TOPIC, "subscriptions": [{"name": "a"}]},),  # type: ignore[arg-type]
        tracker={"max_delay_millis": 10**12},  # type: ignore[arg-type]
        pulsar={"max_message_size_bytes": 65_536, "max_chunked_message_bytes": 0},  # type: ignore[arg-type]
    )
    Tables(settings.warehouse).create()
    return settings


def write(file: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), file)
    return file


def rows(settings: Settings, table: str, columns: str = "*") -> list[dict[str, Any]]:
    return Tables(settings.warehouse).query(table, f"SELECT {columns} FROM {table} ORDER BY entry_id").to_pylist()


def test_a_row_without_a_time_is_due_at_once_and_the_rest_has_defaults(settings: Settings, tmp_path: Path) -> None:
    importer = Importer(settings, TOPIC)
    import_file(
        importer, write(tmp_path / "a.parquet", deliver_at=pa.array([None, NOW], pa.int64()), payload=[b"x", None])
    )
    first, second = rows(settings, "delayed_index")
    assert first["deliver_at"] == first["publish_time"] > NOW - 10**12
    assert (second["deliver_at"], second["payload"], second["key"], second["event_time"]) == (NOW, None, None, 0)
    assert second["ledger_id"] == first["ledger_id"] > FIRST_IMPORTED_LEDGER
    assert second["ledger_id"] < 2 * FIRST_IMPORTED_LEDGER
    assert [row["entry_id"] for row in rows(settings, "entries")] == [0, 1]


def test_only_what_the_sender_can_build_is_taken(settings: Settings, tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.string())
    keys = pa.StringArray.from_buffers(6, pa.py_buffer(bytes([0] * 16 + [1, 0, 0, 0] * 3)), pa.py_buffer(b"\xff"))
    file = write(
        tmp_path / "a.parquet",
        deliver_at=[NOW] * 6,
        payload=[b"0", b"1", b"2", b"3", b"4", b"5"],
        event_time=pa.array([0, 9, -157_766_400_000, None, 0, 0], pa.int64()),
        properties=pa.array([None, [("region", None), ("a", "b")], None, [("a", "")], None, None], kind),
        key=keys,
    )
    importer = Importer(settings, TOPIC)
    import_file(importer, file)
    assert (importer.done.messages, importer.done.rejected) == (6, 3)
    assert [(row["payload"], row["reason"]) for row in rows(settings, "rejects", "payload, reason, entry_id")] == [
        (b"1", "the property 'region' has no value"),
        (b"2", "the event time -157766400000 is negative or beyond 2^63"),
        (b"3", "what is not UTF-8 can't be read: key"),
    ]
    assert [row["payload"] for row in rows(settings, "delayed_index")] == [b"0", b"4", b"5"]


def test_what_cannot_be_delivered_is_rejected_with_the_reason(settings: Settings, tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.string())
    file = write(
        tmp_path / "a.parquet",
        deliver_at=[NOW, -1, 253_402_300_800_000, 3 * 10**12, NOW, NOW, NOW, NOW, NOW],
        payload=[b"", b"", b"", b"", b"x" * 65_000, b"x" * 32_000, b"x" * 32_000, b"x" * 32_000, b""],
        key=[*[None] * 6, "k" * 40_000, None, None],
        ordering_key=[*[None] * 7, "ü" * 20_000, None],
        properties=pa.array([*[None] * 5, [("k", "v" * 40_000)], None, None, [("", "")] * 6_000], kind),
    )
    importer = Importer(settings, TOPIC)
    import_file(importer, file)
    assert (importer.done.messages, importer.done.rejected) == (9, 8)
    size = "too many bytes to be delivered with their delaylake properties"
    assert [(row["entry_id"], row["reason"]) for row in rows(settings, "rejects")] == [
        (1, "deliver_at is negative"),
        (2, "deliver_at is beyond the year 9999"),
        (3, "Exceeds max allowed delivery delay of 1000000000000 milliseconds"),
        *((i, size) for i in range(4, 9)),
    ]
    assert [row["entry_id"] for row in rows(settings, "delayed_index")] == [0]


def test_a_file_that_is_none_or_has_other_columns_is_one_clear_line(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("no")
    for file, message in (
        (tmp_path / "none.parquet", "none.parquet"),
        (tmp_path / "text.parquet", "text.parquet"),
        (
            write(tmp_path / "b.parquet", deliver_at=[1], colour=["red"]),
            "unknown column colour; there may be deliver_at",
        ),
        (write(tmp_path / "c.parquet", payload=[b"x"]), "no column deliver_at"),
        (write(tmp_path / "d.parquet", deliver_at=["tomorrow"]), "d.parquet: .*tomorrow"),
    ):
        with pytest.raises(ImportFailedError, match=message) as raised:
            check_files([file])
        assert "\n" not in str(raised.value)
    with pytest.raises(ImportFailedError, match="is the source of a route"):
        check_topic(settings, f"{TOPIC.rpartition('/')[2]}-partition-3")
    with pytest.raises(ImportFailedError, match="no route with the source"):
        Importer(settings, "persistent://public/default/other")


@pytest.mark.slow
def test_an_interrupted_import_goes_on_where_it_was(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_ROWS_AT_ONCE", 10)
    file = write(tmp_path / "a.parquet", deliver_at=list(range(NOW, NOW + 35)))
    append = Tables.append
    calls = []

    def fail_in_the_middle(self: Tables, name: str, *arguments: Any) -> bool:
        calls.append(name)
        if len(calls) == 4:  # the second part is in delayed_index, not in entries
            raise OSError("no space left")
        return append(self, name, *arguments)

    monkeypatch.setattr(Tables, "append", fail_in_the_middle)
    with pytest.raises(OSError, match="no space"):
        import_file(Importer(settings, TOPIC), file)
    again = Importer(settings, TOPIC)
    import_file(again, file)
    assert (again.done.messages, again.done.already_there) == (25, 10)
    for table in ("delayed_index", "entries"):
        assert [row["entry_id"] for row in rows(settings, table)] == list(range(35))


def test_an_interrupted_import_of_a_topic_may_go_on_with_other_parts(settings: Settings) -> None:
    def imported(last: int) -> pa.Table:
        return topics._as_imported(messages([(5, entry, NOW + entry) for entry in range(last + 1)]))

    importer = Importer(settings, TOPIC)
    importer.tables.append("delayed_index", to_index(imported(3), 0), {"x": number_of(Position(5, 3))})
    importer.append(imported(7), "x", number_of(Position(5, 7)), is_by_position=True)
    for table in ("delayed_index", "entries"):
        assert [row["entry_id"] for row in rows(settings, table)] == list(range(8))


@pytest.mark.slow
def test_a_file_is_known_by_what_is_in_it_and_large_ones_are_taken_in_parts(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_FILE_BYTES_AT_ONCE", 40_000)
    paths = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        payload = [random.Random(100 * number + i).randbytes(1_000) for i in range(100)]
        paths.append(write(folder / "a.parquet", deliver_at=[NOW + number] * 100, payload=payload))
    assert paths[0].stat().st_size == paths[1].stat().st_size
    importer = Importer(settings, TOPIC)
    parts = []
    monkeypatch.setattr(importer, "_on_progress", lambda table, step, n: parts.append(n))
    for file in (*paths, paths[0]):
        import_file(importer, file)
    assert (importer.done.messages, importer.done.already_there) == (200, 100)
    assert len(parts) >= 6


OTHER = "persistent://public/default/other"


@dataclass
class FakeAdmin:
    """A broker whose topic has the entries 5:0 to 5:9, of which these are no messages, and those not acknowledged."""

    no_messages: set[int]
    backlog_of: int
    acknowledged: Position = START

    def __enter__(self) -> FakeAdmin:
        return self

    def __exit__(self, *_: object) -> None: ...

    def backlog(self, topic: str, subscription: str) -> int:
        return self.backlog_of

    def internal_stats(self, topic: str) -> TopicLedgers:
        return TopicLedgers({5: 10}, {"delaylake-import": self.acknowledged}, {}, Position(5, 9))

    def entry_metadata(self, topic: str, ledger_id: int, entry_id: int) -> BrokerEntry:
        return BrokerEntry(1, 1, None, None, {}, False, is_no_message=entry_id in self.no_messages)


def chunks(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, admin: FakeAdmin, script: list[Any], written: Position = START
) -> list[tuple[list[int], Position]]:
    """The entries of what is imported of a topic that ends with 5:9, in parts, each with up to which entry it is."""
    monkeypatch.setattr(topics, "AdminClient", lambda _: admin)
    consumer: Any = FakeConsumer(script, Position(5, 9))
    details: Any = None
    incomplete = ChunkAssembler(1 << 20, 1 << 20)
    partition = topics._Partition(OTHER, topics.SUBSCRIPTION, consumer, written)
    parts = topics._read_messages(Importer(settings, TOPIC), partition, details, incomplete)
    return [(messages["entry_id"].to_pylist(), last) for messages, last in parts]


def test_a_topic_that_ends_with_parts_of_a_chunked_message_is_imported_up_to_them(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = FakeAdmin({8, 9}, backlog_of=2)
    assert chunks(settings, monkeypatch, admin, one(7)) == [([7], Position(5, 7))]
    admin.acknowledged = Position(5, 7)
    assert chunks(settings, monkeypatch, admin, one(6)) == [([6], Position(5, 6)), ([], Position(5, 7))], "5:7 expired"
    assert chunks(settings, monkeypatch, admin, [], Position(5, 7)) == []
    assert chunks(settings, monkeypatch, FakeAdmin({8, 9}, backlog_of=2), [], Position(5, 7)) == []
    with pytest.raises(ImportFailedError, match="no message after 5:6 comes, though there are"):
        chunks(settings, monkeypatch, FakeAdmin({8, 9}, backlog_of=3), one(6))
