"""`delaylake sql`: the views say what the tables mean, now and earlier."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import yaml

from conf.settings import Settings, load_settings
from status.status_writer import StatusWriter
from tests.conftest import run_here
from tests.support.tracker.messages import TOPIC
from tracker.message_state.changes import HELD_DELIVER_AT
from warehouse.audit.accounts import run_audit
from warehouse.delta.tables import Tables
from warehouse.message_schemas import SchemaKeeper
from warehouse.schemas import FENCED, LATER, SCHEMAS
from warehouse.views import VIEWS, QueryError, Warehouse

pytestmark = pytest.mark.slow

DUE = 1_900_000_000_000

Write = Callable[..., None]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    routes = [{"source": TOPIC, "subscriptions": [{"name": "a"}, {"name": "b"}]}]
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump({"warehouse": f"file:{tmp_path}/warehouse", "routes": routes}))
    settings = load_settings(file)
    Tables(settings.warehouse).create()
    return settings


@pytest.fixture
def write(settings: Settings) -> Write:
    tables = Tables(settings.warehouse)

    def write(table: str, **columns: Any) -> None:
        row = {"topic": TOPIC, "partition": -1, "ledger_id": 1, "batch_index": -1, "batch_size": 1, **columns}
        values = [pa.array([row.get(f.name)], f.type) for f in SCHEMAS[table]]
        tables.append(table, pa.table(values, schema=SCHEMAS[table]), {"test": time.time_ns()})

    return write


def pending(settings: Settings, as_of: int | None = None) -> list[tuple[int, str, int]]:
    rows = Warehouse(settings, as_of).sql("SELECT * FROM pending ORDER BY entry_id, subscription").to_pylist()
    return [(row["entry_id"], row["subscription"], row["deliver_at"]) for row in rows]


def test_what_waits_leaves_out_what_is_done_and_is_where_it_was_moved_to(settings: Settings, write: Write) -> None:
    for entry in range(5):
        write("delayed_index", operation="DELAY", entry_id=entry, deliver_at=DUE + entry)
    write("deliveries", entry_id=0, subscription="a", deliver_at=DUE, sent_at=DUE + 3)
    skip = {"result": "APPLIED", "operation": "SKIP"}
    write("outcomes", entry_id=1, subscription="b", sequence=5, **skip)
    write("outcomes", entry_id=2, subscription="a", sequence=6, **skip)
    write("outcomes", entry_id=2, subscription="a", sequence=7, **(skip | {"operation": "RESTORE"}))
    write("outcomes", entry_id=3, subscription="a", sequence=8, **(skip | {"result": "TOO_LATE"}))
    write("delayed_index", operation="MOVE", entry_id=4, subscription="b", sequence=9, deliver_at=HELD_DELIVER_AT)
    write("delayed_index", operation="DELAY", entry_id=4, subscription="b", sequence=9, deliver_at=HELD_DELIVER_AT)
    assert pending(settings) == [
        (0, "b", DUE),
        (1, "a", DUE + 1),
        *((2, name, DUE + 2) for name in "ab"),
        *((3, name, DUE + 3) for name in "ab"),
        (4, "a", DUE + 4),
        (4, "b", HELD_DELIVER_AT),
    ]
    rows = Warehouse(settings).sql("SELECT subscription, sum(messages) AS n FROM schedule GROUP BY 1 ORDER BY 1")
    assert rows.to_pylist() == [{"subscription": "a", "n": 4}, {"subscription": "b", "n": 3}]


def test_the_funnel_counts_what_became_of_all_messages(settings: Settings, write: Write) -> None:
    for entry in range(3):
        write("entries", entry_id=entry, batch_size=1)
    write("deliveries", entry_id=0, subscription="a", deliver_at=DUE, sent_at=DUE)
    write("delayed_index", operation="DELAY", entry_id=1, deliver_at=DUE)
    write("outcomes", entry_id=1, subscription="b", sequence=1, result="APPLIED", operation="CANCEL")
    write("rejects", entry_id=2, reason="negative")
    write("rejects", entry_id=3, reason="not seen: the broker no longer has it")
    funnel = Warehouse(settings).sql("SELECT * FROM funnel ORDER BY subscription").to_pylist()
    counts = {"taken_in": 3, "rejected": 1, "not_seen": 1}
    assert funnel == [
        {"topic": TOPIC, "subscription": "a", "delivered": 1, "taken_back": 0, "pending": 1, **counts},
        {"topic": TOPIC, "subscription": "b", "delivered": 0, "taken_back": 1, "pending": 0, **counts},
    ]


def test_lateness_is_apart_for_what_was_not_planned(settings: Settings, write: Write) -> None:
    for entry, late in enumerate((0, 10, 700)):
        sent = {"deliver_at": DUE, "sent_at": DUE + late, "short_notice": late > 100}
        write("deliveries", entry_id=entry, subscription="a", **sent)
    rows = Warehouse(settings).sql("SELECT short_notice, messages, max_millis FROM lateness ORDER BY 1").to_pylist()
    assert [tuple(row.values()) for row in rows] == [(False, 2, 10), (True, 1, 700)]


def test_schemas_are_there_once_a_message_has_had_one(settings: Settings) -> None:
    count = "SELECT count(*) AS n FROM schemas"
    with pytest.raises(QueryError, match="schemas"):
        Warehouse(settings).sql(count)
    then = time.time_ns() // 1_000_000
    time.sleep(0.01)
    admin: Any = SimpleNamespace(schema=lambda registry, version: ("JSON", "{}", {}))
    SchemaKeeper(settings.warehouse, admin).keep(TOPIC, b"\0" * 8, TOPIC)
    assert Warehouse(settings).sql(count).to_pylist() == [{"n": 1}]
    assert Warehouse(settings, as_of=then).sql(count).to_pylist() == [{"n": 0}]


def test_further_tables_are_there_once_something_needed_them(settings: Settings) -> None:
    for name in LATER.keys() - FENCED.keys():
        with pytest.raises(QueryError, match=name):
            Warehouse(settings).sql(f"SELECT count(*) AS n FROM {name}")
    Tables(settings.warehouse).create(LATER)
    for name in LATER:
        assert Warehouse(settings).sql(f"SELECT count(*) AS n FROM {name}").to_pylist() == [{"n": 0}]


def test_an_earlier_time_shows_what_was_then(settings: Settings, write: Write) -> None:
    write("delayed_index", operation="DELAY", entry_id=1, deliver_at=DUE)
    time.sleep(0.01)
    then = time.time_ns() // 1_000_000
    time.sleep(0.01)
    write("delayed_index", operation="DELAY", entry_id=2, deliver_at=DUE)
    assert [entry for entry, _, _ in pending(settings, then)] == [1, 1]
    assert [entry for entry, _, _ in pending(settings)] == [1, 1, 2, 2]


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_is_there_for_the_command(settings: Settings, tmp_path: Path, write: Write, view: str) -> None:
    write("delayed_index", operation="DELAY", entry_id=1, deliver_at=DUE, properties=[("k", "v")], payload=b"\xff")
    done = run(tmp_path, f"SELECT * FROM {view}", "--output", "json")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == Warehouse(settings).sql(f"SELECT * FROM {view}").num_rows


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("DROP TABLE x", "a SELECT is needed"),
        ("", "a SELECT is needed"),
        ("SELECTED", "a SELECT is needed"),
        ("SELECT x FROM y", "y"),
        ("SELECT 1; SELECT 2", "a single SQL statement"),
        ("SELECT 1/0", "Divide by zero"),
        ("SELECT column1 % 0 FROM (VALUES (1))", "Divide by zero"),
        ("SELECT -9223372036854775808 / -1", "overflow"),
        ("SELECT abs(-9223372036854775808)", "overflow"),
        ("SELECT CAST('Parquet error: ' AS INT)", "Cannot cast string 'Parquet error: '"),
        ("SELECT CAST(column1 AS INT) FROM (VALUES ('Parquet error: '))", "Cannot cast string 'Parquet error: '"),
        ("SELECT CAST(300 AS TINYINT)", "Can't cast value 300"),
        ("SELECT regexp_replace('a', '(', '')", "unclosed group"),
        ("SELECT (SELECT column1 FROM (VALUES (1), (2)))", "more than one row"),
        ("SELECT to_timestamp('x')", "Error parsing timestamp"),
        ("SELECT to_timestamp_seconds(9999999999999)", "a value that can't be printed"),
        ("SELECT DATE '0000-01-01'", "a value that can't be printed"),
    ],
)
@pytest.mark.parametrize("output", ["text", "json", "csv"])
def test_what_can_not_be_answered_is_one_line(
    settings: Settings, tmp_path: Path, query: str, error: str, output: str
) -> None:
    done = run(tmp_path, query, "--output", output)
    assert (done.returncode, done.stdout) == (1, "")
    assert error in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "unexpected" not in done.stderr


@pytest.mark.parametrize("before", ["", "\n-- the next ones\n", "/* the\nnext * ones */ ", "(", " (("])
def test_comments_and_brackets_may_come_before_a_query(settings: Settings, tmp_path: Path, before: str) -> None:
    done = run(tmp_path, f"{before}select(7) AS n{')' * before.count('(')}", "--output", "csv")
    assert (done.returncode, done.stdout) == (0, "n\n7\n"), done.stderr


@pytest.mark.parametrize(
    ("value", "text", "plain"),
    [
        ("DATE '2030-01-31'", "2030-01-31", "2030-01-31"),
        ("TIME '10:00:00'", "10:00:00", "10:00:00"),
        ("TIMESTAMP '2030-01-31T10:00:00.123456789'", "2030-01-31T10:00:00.123456Z", "2030-01-31T10:00:00.123456Z"),
        ("TIMESTAMP '2030-01-31T10:00:00' AT TIME ZONE '+02:00'", "2030-01-31T08:00:00Z", "2030-01-31T08:00:00Z"),
        ("TIMESTAMP '2030-01-31' - TIMESTAMP '2030-01-30T23:59:59.999999999'", "0:00:00", "0:00:00"),
        ("CAST(1.5 AS DECIMAL(10,2))", "1.50", "1.50"),
        ("1.0 / 0", "inf", None),
        ("make_array(DATE '2030-01-31', NULL)", '["2030-01-31", null]', ["2030-01-31", None]),
        ("make_array(TIMESTAMP '2030-01-31T10:00:00.123456789')", '["2030-01-31T10:00:00.123456Z"]', None),
        ("map(['a'], [CAST(1 AS DECIMAL(5,2))])", '{"a": "1.00"}', {"a": "1.00"}),
        ("X'6162ff'", "ab\ufffd", "ab\ufffd"),
    ],
)
def test_values_of_all_types_are_printed(settings: Settings, tmp_path: Path, value: str, text: str, plain: Any) -> None:
    query = f"SELECT {value} AS value"
    assert run(tmp_path, query).stdout.splitlines()[1].strip() == text
    [row] = run(tmp_path, query, "--output", "json").stdout.splitlines()
    assert json.loads(row, parse_constant=pytest.fail) == {"value": json.loads(text) if text[0] == "[" else plain}


def test_what_looks_like_markup_is_printed_as_it_is(settings: Settings, tmp_path: Path) -> None:
    done = run(tmp_path, "SELECT '7:0:-1:-1' AS position, '[bold]x[/bold] [y]' AS key")
    assert done.returncode == 0
    assert "7:0:-1:-1" in done.stdout
    assert "[bold]x[/bold] [y]" in done.stdout


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_here("--config", str(folder / "settings.yaml"), "sql", *arguments)


def test_the_example_notebook_answers_its_questions(
    settings: Settings, write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DELAYLAKE_CONFIG", str(tmp_path / "settings.yaml"))
    at_nine = datetime.now(UTC).replace(hour=9, minute=30, second=0, microsecond=0) + timedelta(days=1)
    for entry, due in enumerate([int(at_nine.timestamp() * 1000), DUE]):
        write("delayed_index", operation="DELAY", entry_id=entry, deliver_at=due)
    cancel = {"result": "APPLIED", "operation": "CANCEL", "issued_by": "ops", "applied_at": 1, "sequence": 1}
    write("outcomes", entry_id=1, subscription="a", **cancel)
    notebook = json.loads((Path(__file__).parents[3] / "examples/pending.ipynb").read_text())
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert list(names["waiting"]["messages"]) == [1, 2]
    assert list(names["tomorrow_at_nine"]["subscription"]) == ["a", "b"]
    assert names["cancelled"].to_dict("records")[0]["issued_by"] == "ops"
    assert list(names["funnel"]["pending"]) == [1, 2]


def test_of_an_entry_that_was_cancelled_whole_what_was_restored_waits_again(settings: Settings, write: Write) -> None:
    write("entries", entry_id=1, batch_size=3)
    for index in range(3):
        write("delayed_index", operation="DELAY", entry_id=1, batch_index=index, batch_size=3, deliver_at=DUE + index)
    done = {"entry_id": 1, "subscription": "a", "result": "APPLIED"}
    write("outcomes", operation="SKIP", sequence=1, **done)
    for index in (0, 2):
        write("outcomes", operation="RESTORE", batch_index=index, sequence=2, **done)
    of_b = [(1, "b", DUE + i) for i in range(3)]
    assert sorted(pending(settings)) == [(1, "a", DUE), (1, "a", DUE + 2), *of_b]
    sql = Warehouse(settings).sql
    assert sql("SELECT batch_index, messages FROM cancellations").to_pylist() == [{"batch_index": -1, "messages": 1}]
    assert sql("SELECT taken_back, pending FROM funnel ORDER BY subscription").to_pylist() == [
        {"taken_back": 1, "pending": 2},
        {"taken_back": 0, "pending": 3},
    ]
    write("outcomes", operation="SKIP", batch_index=0, sequence=3, **done)
    write("outcomes", operation="RESTORE", batch_index=1, sequence=4, **done)
    assert sorted(pending(settings)) == [(1, "a", DUE + 1), (1, "a", DUE + 2), *of_b]
    left = Warehouse(settings).sql("SELECT batch_index, messages FROM cancellations").to_pylist()
    assert left == [{"batch_index": 0, "messages": 1}]


def test_a_version_from_before_a_column_was_added_has_it_empty(tmp_path: Path) -> None:
    routes = [{"source": TOPIC, "subscriptions": [{"name": "a"}]}]
    settings = Settings.model_validate({"warehouse": f"file:{tmp_path}/warehouse", "routes": routes})
    later = ("schedule_key", "key_since", "superseded_by", "was_due")
    before = {name: pa.schema([f for f in schema if f.name not in later]) for name, schema in SCHEMAS.items()}
    tables = Tables(settings.warehouse)
    tables.create(before)
    old = tables.version("delayed_index")
    wanted = "SELECT schedule_key, key_since FROM delayed_index"
    assert Warehouse(settings).sql("SELECT * FROM pending").num_rows == 0
    tables.create()
    row = {"operation": "DELAY", "topic": TOPIC, "ledger_id": 1, "entry_id": 1, "deliver_at": DUE}
    tables.append("delayed_index", pa.Table.from_pylist([row], SCHEMAS["delayed_index"]), {"job": 1})
    assert tables.query("delayed_index", wanted, old).to_pylist() == []
    assert tables.query("delayed_index", wanted).to_pylist() == [{"schedule_key": None, "key_since": None}]


def test_a_retry_waits_until_it_is_delivered_and_counts_once(settings: Settings, write: Write) -> None:
    at = {"entry_id": 0, "position": "1:0:-1:-1", "subscription": "a"}
    write("entries", entry_id=0)
    write("delayed_index", operation="DELAY", entry_id=0, deliver_at=DUE)
    for name in "ab":
        write("deliveries", **at | {"subscription": name}, deliver_at=DUE, sent_at=DUE)
    asked = {"operation": "RETRY", "result": "APPLIED", "sequence": 5, "attempt": 1, "deliver_at": DUE + 9}
    write("outcomes", **at, **asked, reason="no", applied_at=DUE + 1)
    write("delayed_index", **at, operation="DELAY", deliver_at=DUE + 9, sequence=5, attempt=1)
    write("delayed_index", **at, operation="MOVE", deliver_at=DUE + 9, sequence=5, attempt=1)
    assert pending(settings) == [(0, "a", DUE + 9)]
    sql = "SELECT subscription, attempt, reason, deliver_at, sent_at, destination FROM attempts"
    first = {"subscription": "a", "attempt": 1, "reason": "no", "deliver_at": DUE + 9}
    assert Warehouse(settings).sql(sql).to_pylist() == [first | {"sent_at": None, "destination": None}]
    assert [found["pending"] for found in run_audit(settings, now=DUE).counts] == [1, 0]

    write("deliveries", **at, deliver_at=DUE + 9, sent_at=DUE + 10, attempt=1, destination="a-dlq")
    assert pending(settings) == []
    assert Warehouse(settings).sql(sql).to_pylist() == [first | {"sent_at": DUE + 10, "destination": "a-dlq"}]
    funnel = Warehouse(settings).sql("SELECT subscription, taken_in, delivered FROM funnel ORDER BY subscription")
    assert [tuple(row.values()) for row in funnel.to_pylist()] == [("a", 1, 1), ("b", 1, 1)]
    audit = run_audit(settings, now=DUE)
    assert [found["delivered"] for found in audit.counts] == [1, 1]
    assert audit.is_clean, audit.findings

    # A retry that is cancelled was not delivered, although the message was; one that comes twice is doubled.
    asked |= {"sequence": 7, "attempt": 2, "deliver_at": DUE + 20}
    write("outcomes", **at, **asked, applied_at=DUE + 11)
    write("outcomes", **at, operation="SKIP", result="APPLIED", sequence=8, applied_at=DUE + 12)
    audit = run_audit(settings, now=DUE)
    assert audit.is_clean, audit.findings
    assert [found["taken_back"] for found in audit.counts] == [1, 0]
    write("deliveries", **at, deliver_at=DUE + 20, sent_at=DUE + 20, attempt=1)
    write("deliveries", **at, deliver_at=DUE + 20, sent_at=DUE + 20, attempt=2)
    assert sorted(run_audit(settings, now=DUE).findings) == ["delivered_although_cancelled", "doubled"]


def test_what_was_sent_back_is_an_attempt_also_where_it_was_told_twice(settings: Settings, write: Write) -> None:
    at = {"entry_id": 7, "position": "1:7:-1:-1", "subscription": "a"}
    told = {"operation": "SENT_BACK", "result": "APPLIED", "attempt": 3, "reason": "no", "retry_of": "1:2:-1:-1"}
    for n in range(2):
        write("outcomes", **at, **told, deliver_at=DUE + n, applied_at=DUE + n)
    redriven = at | {"entry_id": 8, "position": "1:8:-1:-1", "operation": "REDRIVE", "retry_of": "1:7:-1:-1"}
    write("outcomes", **redriven, result="APPLIED", issued_by="ops", request_id="redrive-r", applied_at=DUE + 5)
    write("deliveries", **at, sent_at=DUE + 2, attempt=3, destination="d-dlq-partition-1")
    write("deliveries", **at | {"entry_id": 8, "position": "1:8:-1:-1"}, sent_at=DUE + 6, destination="d")
    sql = (
        "SELECT position, retry_of, attempt, reason, deliver_at, sent_at, is_dead_letter, issued_by "
        "FROM attempts ORDER BY position"
    )
    assert [tuple(row.values()) for row in Warehouse(settings).sql(sql).to_pylist()] == [
        ("1:7:-1:-1", "1:2:-1:-1", 3, "no", DUE + 1, DUE + 2, True, None),
        ("1:8:-1:-1", "1:7:-1:-1", 0, None, None, DUE + 6, False, "ops"),
    ]


def test_a_destination_that_is_named_as_a_topic_of_dead_letters_gets_none(settings: Settings, write: Write) -> None:
    known = {TOPIC: {"subscriptions": [["a", "Shared", "x-dlq", False], ["gone", "Shared", "y-dlq", True]]}}
    sent = {"a": ["x-dlq", "x-dlq-partition-3", "x-dlq-dlq", "x-dlq-dlq-partition-0"], "gone": ["y-dlq", "y-dlq-dlq"]}
    sent["b"] = [f"{TOPIC}-b", f"{TOPIC}-b-dlq"]  # the job has not begun with it
    with StatusWriter(settings.warehouse, 1) as job:
        job.routes(known)
    for name, topics in sent.items():
        for i, topic in enumerate(topics):
            at = {"entry_id": i, "subscription": name, "attempt": i + 1}
            write("outcomes", **at, operation="RETRY", result="APPLIED", applied_at=DUE)
            write("deliveries", **at, sent_at=DUE, destination=topic)
    sql = "SELECT destination FROM attempts WHERE is_dead_letter ORDER BY subscription, destination"
    found = Warehouse(settings).sql(sql)["destination"].to_pylist()
    assert found == ["x-dlq-dlq", "x-dlq-dlq-partition-0", f"{TOPIC}-b-dlq", "y-dlq-dlq"]
