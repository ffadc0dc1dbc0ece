"""What an import makes of a row's properties and times: the same as of a message that comes to the source topic."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.position import SourceTopic
from broker.protocol.unpacking import unpack
from checkpoint_from_tables.importing.files import check_files, import_file, messages_of
from checkpoint_from_tables.importing.importer import Importer, ImportFailedError
from conf.settings import Settings
from streaming.source.receiving.row_builder import RowBuilder
from streaming.source.receiving.unreadable_messages import Acceptance
from tests.support.servers.fake_pulsar import one
from tests.support.tracker.messages import TOPIC
from warehouse.delta.tables import Tables
from warehouse.schemas import FENCED

NOW = 1_900_000_000_000
MAP = pa.map_(pa.string(), pa.string())


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_in(tmp_path)


def settings_in(folder: Path) -> Settings:
    return Settings(
        warehouse=str(folder / "warehouse"),
        routes=({"source": TOPIC, "subscriptions": [{"name": "a"}]},),  # type: ignore[arg-type]
    )


def row_of(properties: dict[str, Any], due: int | None = None) -> dict[str, Any]:
    table = pa.table(
        {"deliver_at": pa.array([due], pa.int64()), "properties": pa.array([list(properties.items())], MAP)}
    )
    [row] = messages_of(Importer(SETTINGS, TOPIC), table, 1 << 52).to_pylist()
    return dict(row)


SETTINGS = settings_in(Path("/nonexistent/delaylake"))


def test_properties_of_a_row_mean_what_they_mean_on_a_topic() -> None:
    keyed = row_of({"scheduleKey": "k", "colour": "red"}, NOW)
    assert (keyed["schedule_key"], keyed["deliver_at"], keyed["reason"]) == ("k", NOW, None)
    recurs = row_of({"repeat": "@every 1h", "timeZone": "UTC"}, NOW)
    assert (recurs["occurrence"], recurs["deliver_at"]) == (1, NOW)
    assert dict(recurs["properties"])["deliverAt"] == str(NOW), "who reads the rule finds its first time"
    by_property = row_of({"deliverAt": str(NOW)})
    assert by_property["deliver_at"] == NOW
    assert row_of({"deliverAt": "soon"}, NOW)["reason"] is None, "the column counts"
    sent_again = row_of({"repeat": "@every 1h", "delaylake.messageId": "1:2:-1:-1", "delaylake.occurrence": "3"}, NOW)
    assert (sent_again["occurrence"], sent_again["properties"]) == (None, [("repeat", "@every 1h")])


@pytest.mark.parametrize(
    ("properties", "reason"),
    [
        ({"scheduleKey": ""}, "scheduleKey is empty"),
        ({"scheduleKey": "k" * 513}, "scheduleKey has more than 512 bytes"),
        ({"scheduleKey": "k", "scheduleMode": "x"}, "scheduleMode is none of replace, keep, debounce: 'x'"),
        ({"repeat": "no rule"}, "repeat"),
        ({"deliverAt": "soon"}, "deliverAt is no whole number of milliseconds: 'soon'"),
        ({"deliverAfter": "-1"}, "deliverAfter is negative: -1"),
        ({"retryOf": "1:2:-1:-1", "retrySubscription": "a"}, "retryOf: what was sent back for a retry is taken in by"),
        ({"retryOf": "1:2:-1:-1"}, "retrySubscription is missing"),
    ],
)
def test_properties_that_can_not_be_taken_are_a_reason_of_their_row(properties: dict[str, str], reason: str) -> None:
    assert row_of(properties)["reason"].startswith(reason)


def test_properties_that_only_the_job_gives_are_dropped() -> None:
    given = {"delaylake.source": "x", "a": "1", "delaylake.deliverAt": "7", "__MSG_PROP_REPL_SOURCE_POSITION": "1:2"}
    assert row_of(given, NOW)["properties"] == [("a", "1")]


VALUES = st.one_of(
    st.sampled_from(
        ["", "k", "soon", "-1", "0", str(NOW), "60000", "@every 1h", "0 9 * * *", "FREQ=DAILY", "keep", "a"]
    ),
    st.text(max_size=3),
)
NAMES = ["deliverAt", "deliverAfter", "scheduleKey", "scheduleMode", "debounceMax", "repeat", "timeZone", "repeatTimes",
         "repeatUntil", "misfire", "delaylake.occurrence", "delaylake.messageId", "colour"]  # fmt: skip


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5))
def test_a_row_and_a_message_of_a_topic_with_the_same_properties_are_taken_alike(properties: dict[str, str]) -> None:
    row = row_of(properties)
    published = row["publish_time"]
    builder = RowBuilder(SourceTopic(TOPIC, TOPIC, -1), Acceptance(0, 10**6))
    [entry] = one(0, ledger=1, payload=b"", props=properties, published=published)
    unpacked = unpack(entry, None, lambda *_: None, 1 << 20)
    assert unpacked is not None
    builder.add(unpacked, None)
    [message] = builder.build().to_pylist()
    for name in ("schedule_key", "occurrence", "properties", "reason"):
        assert row[name] == message[name], name
    if row["reason"] is None:
        assert row["deliver_at"] == message["deliver_at"]


# Files: what is no time is refused before anything is written.


def file_with(folder: Path, name: str = "deliver_at", **columns: Any) -> Path:
    columns.setdefault("deliver_at", pa.array([NOW]))
    pq.write_table(pa.table(columns), file := folder / f"{name}.parquet")
    return file


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (pa.array([True]), "deliver_at is of the type bool, no time"),
        (pa.array([timedelta(hours=1)]), r"deliver_at is of the type duration\[us\], no time"),
        (pa.array([datetime(2030, 1, 1, 9).time()]), r"deliver_at is of the type time64\[us\], no time"),
        (pa.array([date(2030, 1, 1)]), r"deliver_at is of the type date32\[day\], no time"),
        (pa.array([1_800_000_000, None]), "can only be seconds since the epoch: give milliseconds"),
        (pa.array([1_800_000_000.0]), "can only be seconds since the epoch: give milliseconds"),
        (pa.array(["1800000000"]), "can only be seconds since the epoch: give milliseconds"),
        (pa.array([1.5]), "1.5"),
        (pa.array([float("nan")]), "nan"),
        (pa.array([2**63], pa.uint64()), "not in range"),
        (pa.array([[1]]), "list"),
        (pa.array([{"t": 1}]), "struct"),
        (pa.array([b"\xff"]), "deliver_at"),
    ],
)
def test_what_is_no_time_is_refused_by_its_type(tmp_path: Path, values: pa.Array, message: str) -> None:
    with pytest.raises(ImportFailedError, match=message) as raised:
        check_files([file_with(tmp_path, deliver_at=values)])
    assert str(raised.value).count("deliver_at.parquet: ") == 1
    assert len(raised.value.lines) == 1


@pytest.mark.parametrize(
    ("values", "due"),
    [
        (pa.array([NOW], pa.timestamp("ms")), NOW),
        (pa.array([NOW // 1000], pa.timestamp("s", "Europe/Berlin")), NOW),
        (pa.array([NOW * 1000 + 1], pa.timestamp("us")), NOW + 1),
        (pa.array([NOW * 10**6 + 1], pa.timestamp("ns")), NOW + 1),
        (pa.array([NOW * 10**6], pa.timestamp("ns")), NOW),
        (pa.array([str(NOW)]), NOW),
        (pa.array([float(NOW)]), NOW),
        (pa.array([Decimal(NOW)]), NOW),
        (pa.array([NOW], pa.uint64()), NOW),
        (pa.array([str(NOW)]).dictionary_encode(), NOW),
    ],
)
def test_a_time_of_any_type_is_never_early(tmp_path: Path, settings: Settings, values: pa.Array, due: int) -> None:
    file = file_with(tmp_path, deliver_at=values)
    check_files([file])
    rows = pq.read_table(file)
    assert messages_of(Importer(settings, TOPIC), rows, 1 << 52)["deliver_at"].to_pylist() == [due]


@pytest.mark.slow
def test_a_time_beyond_all_and_one_in_seconds_among_others_fail_alone(tmp_path: Path, settings: Settings) -> None:
    Tables(settings.warehouse).create(FENCED)
    far = file_with(tmp_path, "far", deliver_at=pa.array([2**62, NOW, -(2**62)], pa.timestamp("ms")))
    mixed = file_with(tmp_path, "mixed", deliver_at=[NOW, 1_800_000_000, 0])
    importer = Importer(settings, TOPIC)
    check_files([far, mixed])
    for file in (far, mixed):
        import_file(importer, file)
    assert (importer.done.messages, importer.done.rejected) == (6, 3)
    rows = Tables(settings.warehouse).query("rejects", "SELECT entry_id, reason FROM rejects ORDER BY ledger_id")
    assert sorted(rows["reason"].to_pylist()) == [
        "deliver_at 1800000000 can only be seconds since the epoch: give milliseconds, or a timestamp",
        "deliver_at is beyond the year 9999",
        "deliver_at is negative",
    ]


# Schedule keys.


@pytest.mark.slow
def test_of_messages_with_the_same_key_one_waits_and_the_others_are_told_of(tmp_path: Path, settings: Settings) -> None:
    Tables(settings.warehouse).create(FENCED)

    def keyed(*rows: tuple[int, str, str]) -> dict[str, Any]:
        maps = [[("scheduleKey", key), ("scheduleMode", mode)] for _, key, mode in rows]
        return {"deliver_at": [due for due, _, _ in rows], "properties": pa.array(maps, MAP)}

    first = file_with(
        tmp_path,
        "first",
        **keyed(
            *((NOW, "replaced", "replace"), (NOW + 1, "kept", "keep"), (NOW + 2, "replaced", "replace")),
            *((NOW + 3, "kept", "keep"), (1, "past", "replace"), (NOW + 4, "past", "replace")),
        ),
    )
    later = file_with(tmp_path, "later", **keyed((NOW + 5, "replaced", "replace"), (NOW + 6, "new", "replace")))

    def run() -> Importer:
        importer = Importer(settings, TOPIC)
        for file in (first, later):
            import_file(importer, file)
        return importer

    def found(table: str, column: str) -> list[Any]:
        rows = Tables(settings.warehouse).query(
            table, f"SELECT {column} AS c FROM {table} ORDER BY deliver_at, entry_id"
        )
        return list(rows["c"].to_pylist())

    assert run().done.rejected == 3
    assert found("delayed_index", "deliver_at") == [1, NOW + 1, NOW + 2, NOW + 4, NOW + 6]
    reasons = Tables(settings.warehouse).query("rejects", "SELECT reason FROM rejects")["reason"].to_pylist()
    assert all(reason.startswith("scheduleKey: ") for reason in reasons)
    assert sum("waits already" in reason for reason in reasons) == 2
    again = run().done
    assert (again.messages, again.already_there) == (0, 8)
    assert Importer(settings, TOPIC)._keys._known().keys() == {"replaced", "kept", "past", "new"}
