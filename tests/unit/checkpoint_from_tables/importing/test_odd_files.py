"""Odd Parquet files: each is refused by its name, or imported with each odd row rejected alone, with its reason."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from checkpoint_from_tables.importing.files import check_files, import_file
from checkpoint_from_tables.importing.importer import Importer, ImportFailedError
from conf.settings import Settings
from tests.support.tracker.messages import TOPIC
from warehouse.delta.tables import Tables

pytestmark = pytest.mark.slow

NOW = 1_900_000_000_000
MAP = pa.map_(pa.string(), pa.string())
TEXT = pa.string()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = Settings(
        warehouse=str(tmp_path / "warehouse"),
        routes=({"source": TOPIC, "subscriptions": [{"name": "a"}]},),  # type: ignore[arg-type]
        pulsar={"max_message_size_bytes": 65_536, "max_chunked_message_bytes": 0},  # type: ignore[arg-type]
    )
    Tables(settings.warehouse).create()
    return settings


def no_text(*texts: bytes) -> pa.Array:
    """Text that is no UTF-8, which Arrow does not check when a file is read."""
    return pa.array(texts, pa.binary()).view(TEXT)


def maps(*rows: Any) -> pa.Array:
    return pa.array(rows, MAP)


def nested(depth: int) -> pa.Array:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return pa.array([value])


# Files that are refused, and the reason.
REFUSED: dict[str, tuple[dict[str, pa.Array], str]] = {
    "a list of properties": ({"properties": pa.array([["a", "b"]])}, "properties|list"),
    "properties of a struct": ({"properties": pa.array([{"a": "1"}])}, "struct"),
    "properties nested deep": ({"properties": nested(20)}, "list"),
    "a payload of a struct": ({"payload": pa.array([{"a": 1}])}, "struct"),
    "a payload of numbers": ({"payload": pa.array([5])}, "int64"),
    "a key of a list": ({"key": pa.array([["k"]])}, "list"),
    "event times that are bools": ({"event_time": pa.array([True])}, "event_time is of the type bool"),
    "event times of a duration": (
        {"event_time": pa.array([5], pa.duration("s"))},
        "event_time is of the type duration",
    ),
    "fractions of single precision": (
        {"deliver_at": pa.array([1.9e12], pa.float32())},
        "deliver_at is of the type float, no time",
    ),
    "a date": ({"deliver_at": pa.array([1], pa.date64())}, "deliver_at is of the type date"),
    "text that is no number": ({"deliver_at": pa.array(["2030-01-01"])}, "2030-01-01"),
    "a number with a fraction": ({"deliver_at": pa.array(["1.5"])}, "1.5"),
    "infinite": ({"deliver_at": pa.array([float("inf")])}, "inf"),
    "only in seconds": ({"deliver_at": pa.array([1_800_000_000])}, "seconds"),
    "a payload of times": ({"payload": pa.array([5], pa.timestamp("ms"))}, "payload is of the type timestamp"),
    "a key of times": ({"key": pa.array([5], pa.timestamp("us", "UTC"))}, "key is of the type timestamp"),
    "a payload of fractions": ({"payload": pa.array([1.5])}, "payload, of the type double"),
    "properties of JSON": ({"properties": pa.array(['{"a": "1"}'])}, "properties, of the type string"),
    "properties of a list of structs": (
        {"properties": pa.array([[{"key": "a", "value": "1"}]])},
        "properties, of the type list",
    ),
    "not a number": ({"deliver_at": pa.array([float("nan")])}, "deliver_at, of the type double: .*nan"),
    "beyond 2^63": ({"event_time": pa.array([2**64 - 1], pa.uint64())}, "event_time, of the type uint64"),
    "a column of another name": ({"Deliver_At": pa.array([1])}, "unknown column Deliver_At"),
}

# Files that are imported: columns, a part of each row's reason (None: it is taken), and a check of what is taken.
Check = Callable[[list[dict[str, Any]]], Any]
TAKEN: dict[str, tuple[dict[str, pa.Array], list[str | None], Check]] = {
    "nothing but nulls": ({"deliver_at": pa.nulls(2), "payload": pa.nulls(2), "key": pa.nulls(2)}, [None, None], len),
    "no rows": ({"deliver_at": pa.array([], pa.int64())}, [], lambda rows: rows == []),
    "null values in properties": ({"properties": maps([("a", None)], [("a", "1")])}, ["'a' has no value", None], len),
    "null values of a name with a meaning": (
        {"properties": maps([("scheduleKey", None)], [("repeat", None)])},
        ["'scheduleKey' has no value", "'repeat' has no value"],
        lambda rows: rows == [],
    ),
    "the same name twice in properties": (
        {"properties": maps([("a", "1"), ("a", "2")])},
        [None],
        lambda rows: dict(rows[0]["properties"])["a"] == "2",
    ),
    "a name with a meaning twice": (
        {"properties": maps([("scheduleKey", "k"), ("scheduleKey", "l")])},
        [None],
        lambda rows: rows[0]["schedule_key"] == "l",
    ),
    "empty names and texts": (
        {"properties": maps([("", "")]), "key": pa.array([""]), "payload": pa.array([b""])},
        [None],
        len,
    ),
    "a key that is no UTF-8": ({"key": no_text(b"\xff", b"k")}, ["key", None], lambda rows: rows[0]["key"] == "k"),
    "a key of bytes that are no text": ({"key": pa.array([b"\xff", b"k"])}, ["key", None], len),
    "a payload that is no UTF-8": ({"payload": no_text(b"\xff")}, [None], lambda rows: rows[0]["payload"] == b"\xff"),
    "properties that are no UTF-8": (
        {"properties": pa.MapArray.from_arrays([0, 1, 2], no_text(b"\xff", b"a"), pa.array(["1", "2"]))},
        ["properties", None],
        lambda rows: dict(rows[0]["properties"]) == {"a": "2"},
    ),
    "properties of bytes that are no text": (
        {"properties": pa.array([[(b"a", b"\xff")], [(b"a", b"1")]], pa.map_(pa.binary(), pa.binary()))},
        ["properties", None],
        lambda rows: dict(rows[0]["properties"]) == {"a": "1"},
    ),
    "a producer with a long name": (
        {"producer_name": pa.array(["p" * 70_000, "p", None])},
        [None, None, None],
        lambda rows: [row["producer_name"] for row in rows] == [None, "p", None],
    ),
    "views": (
        {"key": pa.array(["k"], pa.string_view()), "payload": pa.array([b"x"], pa.binary_view())},
        [None],
        lambda rows: (rows[0]["key"], rows[0]["payload"]) == ("k", b"x"),
    ),
    "keys of other types": (
        {"key": pa.array([b"x" * 16], pa.uuid()), "payload": pa.array(["{}"], pa.json_())},
        [None],
        lambda rows: (rows[0]["key"], rows[0]["payload"]) == ("x" * 16, b"{}"),
    ),
    "a producer that is no UTF-8": ({"producer_name": no_text(b"\xff", b"p")}, ["producer_name", None], len),
    "NUL and surrogates of JSON": ({"key": pa.array(["\0", "\\ud800"])}, [None, None], len),
    "event times before 1970": ({"event_time": pa.array([-1, 5])}, ["event time -1", None], len),
    "a huge event time": ({"event_time": pa.array([2**63 - 1])}, [None], len),
    "large texts": (
        {"key": pa.array(["k" * 70_000, "k"]), "ordering_key": pa.array(["k", "k"])},
        ["too many bytes", None],
        len,
    ),
    "large types and dictionaries": (
        {
            "key": pa.array(["k"]).dictionary_encode(),
            "payload": pa.array([b"x"], pa.large_binary()),
            "ordering_key": pa.array(["o"], pa.large_string()),
            "properties": pa.array([[("a", "1")]], pa.map_(pa.large_string(), pa.large_string())),
        },
        [None],
        lambda rows: (rows[0]["key"], rows[0]["payload"], rows[0]["properties"]) == ("k", b"x", [("a", "1")]),
    ),
    "properties of numbers": (
        {"properties": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))},
        [None],
        lambda rows: dict(rows[0]["properties"]) == {"a": "1"},
    ),
    "rows that are all the same": ({"payload": pa.array([b"x"] * 5)}, [None] * 5, lambda rows: len(rows) == 5),
    "a rule that costs or fails": (
        {"properties": maps([("repeat", "FREQ=MONTHLY;BYMONTH=11;BYDAY=1MO,60TU")], [("repeat", "* * * * * *")])},
        ["repeat", None],
        lambda rows: rows[0]["occurrence"] == 1,
    ),
    "a recurring row that is over": (
        {"properties": maps([("repeat", "@every 1h"), ("repeatUntil", "5")])},
        ["repeatUntil is before the first occurrence"],
        lambda rows: rows == [],
    ),
}


def write(folder: Path, columns: dict[str, pa.Array]) -> Path:
    n = len(next(iter(columns.values())))
    columns = columns if "deliver_at" in columns else {"deliver_at": pa.array([NOW] * n), **columns}
    pq.write_table(pa.table(columns), file := folder / "odd.parquet")
    return file


@pytest.mark.parametrize(("columns", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_file_that_can_not_be_imported_is_refused_in_one_line(
    tmp_path: Path, columns: dict[str, pa.Array], reason: str
) -> None:
    file = write(tmp_path, columns)
    with pytest.raises(ImportFailedError, match=reason) as raised:
        check_files([file])
    assert str(raised.value).startswith(f"{file}: ")
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(("columns", "reasons", "check"), TAKEN.values(), ids=TAKEN)
def test_an_odd_row_is_rejected_alone(
    tmp_path: Path, settings: Settings, columns: dict[str, pa.Array], reasons: list[str | None], check: Check
) -> None:
    file = write(tmp_path, columns)
    importer = Importer(settings, TOPIC)
    for _ in range(2):  # the second time it does nothing
        check_files([file])
        import_file(importer, file)
    n_rejected = sum(reason is not None for reason in reasons)
    assert (importer.done.messages, importer.done.rejected) == (len(reasons), n_rejected)
    assert importer.done.already_there == len(reasons)
    tables = Tables(settings.warehouse)
    rejects = tables.query("rejects", "SELECT entry_id, reason FROM rejects ORDER BY entry_id").to_pylist()
    assert [row["entry_id"] for row in rejects] == [i for i, reason in enumerate(reasons) if reason is not None]
    for row in rejects:
        assert str(reasons[row["entry_id"]]) in row["reason"]
        assert len(row["reason"].splitlines()) == 1
    taken = tables.query("delayed_index", "SELECT * FROM delayed_index ORDER BY entry_id").to_pylist()
    assert [row["entry_id"] for row in taken] == [i for i, reason in enumerate(reasons) if reason is None]
    assert tables.query("entries", "SELECT count(*) AS n FROM entries")["n"][0].as_py() == len(reasons)
    assert check(taken) or not reasons


def damaged(whole: bytes) -> dict[str, bytes]:
    return {
        "empty": b"",
        "only the magic": b"PAR1",
        "cut off": whole[: len(whole) // 2],
        "without its end": whole[:-1],
        "nulls": bytes(len(whole)),
        "a damaged footer": whole[:-100] + bytes(60) + whole[-40:],
        "an encrypted footer": whole[:-4] + b"PARE",
        "JSON": b'{"deliver_at": 1}\n',
    }


@pytest.mark.parametrize("how", damaged(bytes(200)))
def test_a_damaged_file_is_refused_before_anything_is_written(tmp_path: Path, how: str) -> None:
    file = write(tmp_path, {"payload": pa.array([b"x"] * 1_000)})
    file.write_bytes(damaged(file.read_bytes())[how])
    with pytest.raises(ImportFailedError) as raised:
        check_files([file])
    assert str(raised.value).startswith(f"{file}: ")
    assert len(str(raised.value).splitlines()) == 1


def test_a_damaged_page_ends_the_import_with_the_file_s_name(tmp_path: Path, settings: Settings) -> None:
    table = pa.table({"deliver_at": pa.array([NOW] * 50_000), "payload": [b"%d" % i * 9 for i in range(50_000)]})
    pq.write_table(table, file := tmp_path / "odd.parquet", compression="snappy", use_dictionary=False)
    content = bytearray(file.read_bytes())
    place = len(content) - 20_000
    content[place : place + 4_000] = b"\xff" * 4_000
    file.write_bytes(content)
    check_files([file])
    with pytest.raises(ImportFailedError, match=re.escape("odd.parquet: ")):
        import_file(Importer(settings, TOPIC), file)


def test_a_folder_and_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    columns = [pa.array([1]), pa.array(["a"]), pa.array(["b"])]
    pq.write_table(pa.table(columns, names=["deliver_at", "key", "key"]), twice := tmp_path / "twice.parquet")
    with pytest.raises(ImportFailedError, match="the column key is there twice"):
        check_files([twice])
    with pytest.raises(ImportFailedError, match=str(tmp_path)):
        check_files([tmp_path])


@pytest.mark.parametrize("year", [2030, 2400, 2600, 9999])
def test_a_time_that_spark_writes_as_int96_is_the_same_in_any_year(
    tmp_path: Path, settings: Settings, year: int
) -> None:
    time = datetime(year, 1, 1, tzinfo=UTC)
    table = pa.table({"deliver_at": pa.array([time], pa.timestamp("us", "UTC"))})
    pq.write_table(table, file := tmp_path / "odd.parquet", use_deprecated_int96_timestamps=True)
    check_files([file])
    import_file(Importer(settings, TOPIC), file)
    found = Tables(settings.warehouse).query("delayed_index", "SELECT deliver_at FROM delayed_index")
    assert found["deliver_at"].to_pylist() == [time.timestamp() * 1000]


def test_a_name_that_is_no_utf_8_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, {"payload": pa.array([b"x"])}).rename(tmp_path / os.fsdecode(b"caf\xe9.parquet"))
    with pytest.raises(ImportFailedError, match=r"caf\\udce9.parquet: its name is no UTF-8: rename it"):
        check_files([file])


def test_files_of_several_folders_that_only_their_rows_tell_apart_are_refused(tmp_path: Path) -> None:
    files = []
    for day, payload in (("1", b"x"), ("2", b"y"), ("3", b"x")):
        files.append(tmp_path / f"day={day}" / "part-0.parquet")
        files[-1].parent.mkdir()
        table = pa.table({"deliver_at": pa.array([NOW]), "payload": pa.array([payload])})
        pq.write_table(table, files[-1], write_statistics=False)
    one, other, same = files
    check_files([one, one, same])
    with pytest.raises(ImportFailedError, match=f"day=2/part-0.parquet: it has the name, .* of {one}, and other rows"):
        check_files([one, other])


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe.parquet")
    with pytest.raises(ImportFailedError, match=rf"{re.escape(str(pipe))}: it is no regular file"):
        check_files([pipe])
