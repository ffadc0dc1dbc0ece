"""What `sql`, `pending` and `status` print for people, and what for programs."""

from __future__ import annotations

import csv
import io
import json
import time
from pathlib import Path

import pyarrow as pa
import pytest
import yaml

from status.batch_status import BatchStatus
from status.status_writer import StatusWriter
from tests.conftest import run_here
from tests.support.service.batch_counts import COUNTS
from tests.support.tracker.messages import TOPIC
from tracker.message_state.changes import HELD_DELIVER_AT
from warehouse.delta.tables import Tables
from warehouse.schemas import SCHEMAS

pytestmark = pytest.mark.slow

DUE = int(time.time() + 86_400) // 60 * 60_000
SUMMER = 1_909_130_400_123  # 2030-07-01T10:00:00.123Z


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    routes = [{"source": TOPIC, "subscriptions": [{"name": "a"}, {"name": "b"}]}]
    warehouse = f"file:{tmp_path}/warehouse"
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump({"warehouse": warehouse, "routes": routes}))
    return tmp_path


def said(folder: Path, *arguments: str, code: int = 0) -> str:
    done = run_here("--config", str(folder / "settings.yaml"), *arguments)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def seal(folder: Path, *times: int, key: str = "k") -> None:
    tables = Tables(f"file:{folder}/warehouse")
    tables.create()
    rows = [
        {"topic": TOPIC, "partition": -1, "ledger_id": 7, "entry_id": i, "batch_index": -1, "batch_size": 1}
        | {"operation": "DELAY", "deliver_at": at, "key": key, "publish_time": 1, "producer_name": "p"}
        for i, at in enumerate(times)
    ]
    columns = [pa.array([row.get(f.name) for row in rows], f.type) for f in SCHEMAS["delayed_index"]]
    tables.append("delayed_index", pa.table(columns, schema=SCHEMAS["delayed_index"]), {})


@pytest.mark.parametrize(
    "command", [["sql", "SELECT 1 FROM entries"], ["pending", TOPIC], ["schedules", "list", TOPIC]]
)
def test_without_tables_the_settings_file_is_named(folder: Path, command: list[str]) -> None:
    told = f"no tables in file:{folder}/warehouse: has the job run? (settings: {folder}/settings.yaml)"
    assert said(folder, *command, code=1) == f"error: {told}\n"


def test_times_are_printed_as_people_read_them_and_ms_for_programs(folder: Path) -> None:
    seal(folder, SUMMER, HELD_DELIVER_AT)
    query = "SELECT entry_id, deliver_at, deliver_at - 1 AS before FROM delayed_index ORDER BY entry_id"
    assert said(folder, "sql", query).splitlines() == [
        "entry_id  deliver_at                         before",
        "       0  2030-07-01T10:00:00.123Z    1909130400122",
        f"       1  held back                 {HELD_DELIVER_AT - 1}",
    ]
    zone = ("--time-zone", "Europe/Berlin")
    assert "2030-07-01T12:00:00.123+02:00" in said(folder, "sql", query, *zone)
    minute = "SELECT minute FROM schedule"
    assert "2030-07-01T12:00:00+02:00" in said(folder, "sql", minute, *zone)
    largest = said(folder, "sql", "SELECT min(deliver_at), max(d.deliver_at) FROM delayed_index AS d")
    assert "2030-07-01T10:00:00.123Z" in largest
    assert [json.loads(line) for line in said(folder, "sql", minute, "--output", "json").splitlines()] == [
        {"minute": "2030-07-01T10:00:00Z"}
    ] * 2
    rows = csv.reader(said(folder, "sql", query, *zone, "--output", "csv").splitlines())
    assert [*rows][:2] == [["entry_id", "deliver_at", "before"], ["0", str(SUMMER), str(SUMMER - 1)]]
    assert "2030-07-01T12:00:00.123+02:00" in said(folder, "pending", TOPIC, *zone)
    plan = said(folder, "sql", "EXPLAIN SELECT entry_id FROM delayed_index").splitlines()
    assert (plan[0], any("DataSourceExec" in line for line in plan)) == ("logical_plan:", True)
    assert "no time zone" in said(folder, "pending", TOPIC, "--time-zone", "Mars/Base", code=2)


def test_csv_has_values_as_they_are_and_quotes_them_by_the_rules_of_csv(folder: Path) -> None:
    odd = [
        'say "hi", twice',
        "two\nlines",
        "back\rto the start",
        "a,b",
        "\x1b[2J",
        "=1+1",
        "@SUM(A1)",
        " padded ",
        "'",
        "",
    ]
    for value in odd:
        seal(folder, SUMMER, key=value)
    found = said(folder, "sql", "SELECT key, deliver_at FROM delayed_index", "--output", "csv")
    header, *rows = csv.reader(io.StringIO(found, newline=""))
    assert header == ["key", "deliver_at"]
    assert sorted(rows) == sorted([value, str(SUMMER)] for value in odd)
    assert '"say ""hi"", twice",' in found


def test_what_is_too_wide_is_folded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    seal(folder, SUMMER, key="a key " * 30)
    for arguments in (["sql", "SELECT * FROM delayed_index"], ["pending", TOPIC], ["pending", TOPIC, "--stats"]):
        lines = said(folder, *arguments).splitlines()
        assert [line for line in lines if len(line) > 80 and not line.startswith("key ")] == [], arguments


def test_an_answer_without_rows_has_its_headings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    seal(folder, SUMMER)
    for columns in ("*", "topic, entry_id"):
        query = f"SELECT {columns} FROM delayed_index WHERE entry_id < 0"
        names = SCHEMAS["delayed_index"].names if columns == "*" else columns.split(", ")
        assert said(folder, "sql", query).split() == names
        assert said(folder, "sql", query, "--output", "csv") == ",".join(names) + "\n"
        assert said(folder, "sql", query, "--output", "json") == ""  # an object a line: none


def test_what_waits_is_counted_once_whoever_waits_for_it(folder: Path) -> None:
    seal(folder, DUE, DUE + 1, DUE + 2)
    assert said(folder, "pending", TOPIC, "--count") == "3\n"
    assert json.loads(said(folder, "pending", TOPIC, "--count", "--output", "json")) == {"count": 3}
    assert said(folder, "pending", TOPIC, "--count", "--due-before", str(DUE + 2)) == "2\n"
    assert "not both" in said(folder, "pending", TOPIC, "--count", "--stats", code=2)


def test_what_waits_is_listed_and_changed_by_the_same_filters(folder: Path) -> None:
    seal(folder, DUE, DUE + 1, DUE + 2)
    for options, n in (
        (["--key", "k"], 3),
        (["--key", "other"], 0),
        (["--producer-name", "p", "-s", "a", "--due-after", str(DUE + 1)], 2),
        (["--property", "color=red", "--due-before", str(DUE + 9)], 0),
        (["-l", "7", "-e", "1"], 1),
    ):
        assert said(folder, "pending", TOPIC, "--count", *options) == f"{n}\n", options
        for command in ("skip-by-filter", "cancel-by-filter", "reschedule-by-filter"):
            more = ["--later", "1h"] if command.startswith("reschedule") else []
            found = said(folder, "topics", command, TOPIC, *options, *more, "--dry-run", "--output", "json")
            assert json.loads(found)["matched"] == n, (command, options)
    for asked in (["pending", TOPIC], ["topics", "cancel-by-filter", TOPIC, "--dry-run"]):
        assert "an entry id needs a ledger id" in said(folder, *asked, "-e", "1", code=2)
    for state in ("takenBack", "cancelled"):
        assert said(folder, "pending", TOPIC, "--state", state, "--count") == "0\n"


def test_of_a_job_that_has_done_nothing_no_figures_are_told(folder: Path) -> None:
    assert "no job has run on the warehouse" in said(folder, "status", code=1)
    assert "no tables" in said(folder, "sql", "SELECT 1", code=1)
    with StatusWriter(f"file:{folder}/warehouse", 1) as status:
        status._end_point()
        status._write()
        told = said(folder, "status")
    assert "/s" not in told
    assert told.startswith("starting, started 2")
    assert "it has made no batch since: what waits is not known" in told
    assert "pending" not in told


def test_status_names_paused_subscriptions(folder: Path) -> None:
    with StatusWriter(f"file:{folder}/warehouse", 1) as status:
        status.batch(BatchStatus(1, time.time_ns() // 1_000_000, counts=COUNTS, paused={TOPIC: ["a", "b"]}))
        status._write()
        told = said(folder, "status").splitlines()
    assert [text for text in told if "paused" in text] == [f"paused: {TOPIC}: what is due for a, b is held back"]


def test_status_tells_when_what_a_rate_has_put_off_is_out(folder: Path) -> None:
    now = time.time_ns() // 1_000_000
    with StatusWriter(f"file:{folder}/warehouse", 1) as status:
        shaped = {TOPIC: {"a": SUMMER, "b": now - 1_000}}
        status.batch(BatchStatus(1, now, counts=COUNTS, shaped_until=shaped))
        status._write()
        told = said(folder, "status").splitlines()
    line = f"shaped: {TOPIC}: what the rate or windows of a have put off is out at 2030-07-01T10:00:00.123Z"
    assert [text for text in told if "shaped" in text] == [line]
