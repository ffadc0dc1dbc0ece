"""Rows of Postgres tables, as Oban, pg-boss, River and db-scheduler have them, read from a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from checkpoint_from_tables.importing.columns import IN_SECONDS
from checkpoint_from_tables.other_systems.item import Item, SourceError
from checkpoint_from_tables.other_systems.mapping import TableMapping, read_mapping, shipped
from checkpoint_from_tables.other_systems.postgres import PostgresTable, message
from checkpoint_from_tables.other_systems.sources import OpenSource
from tests.support.servers.postgres_server import postgres_server

pytestmark = pytest.mark.slow

DUE = 1_800_000_000_250

# As the systems' own migrations make them, as far as a mapping or its rows need it.
TABLES = """
CREATE TYPE oban_job_state AS ENUM
  ('available', 'scheduled', 'executing', 'retryable', 'completed', 'discarded', 'cancelled');
CREATE TABLE oban_jobs (
  id bigserial PRIMARY KEY, state oban_job_state NOT NULL DEFAULT 'available', queue text NOT NULL DEFAULT 'default',
  worker text NOT NULL, args jsonb NOT NULL DEFAULT '{}', attempt integer NOT NULL DEFAULT 0,
  scheduled_at timestamp NOT NULL DEFAULT timezone('UTC', now()), meta jsonb DEFAULT '{}');
CREATE SCHEMA pgboss;
CREATE TYPE pgboss.job_state AS ENUM ('created', 'retry', 'active', 'completed', 'cancelled', 'failed');
CREATE TABLE pgboss.job (
  id uuid NOT NULL DEFAULT gen_random_uuid(), name text NOT NULL, data jsonb,
  state pgboss.job_state NOT NULL DEFAULT 'created', retry_count integer NOT NULL DEFAULT 0,
  start_after timestamptz NOT NULL DEFAULT now(), singleton_key text, created_on timestamptz NOT NULL DEFAULT now()
) PARTITION BY LIST (name);
CREATE TABLE pgboss.mail PARTITION OF pgboss.job FOR VALUES IN ('mail');
CREATE TYPE river_job_state AS ENUM
  ('available', 'cancelled', 'completed', 'discarded', 'retryable', 'running', 'scheduled');
CREATE TABLE river_job (
  id bigserial PRIMARY KEY, state river_job_state NOT NULL DEFAULT 'available', attempt smallint NOT NULL DEFAULT 0,
  scheduled_at timestamptz NOT NULL DEFAULT now(), args jsonb, kind text NOT NULL,
  metadata jsonb NOT NULL DEFAULT '{}', queue text NOT NULL DEFAULT 'default');
CREATE TABLE scheduled_tasks (
  task_name text NOT NULL, task_instance text NOT NULL, task_data bytea, execution_time timestamptz,
  picked boolean NOT NULL, version bigint NOT NULL, PRIMARY KEY (task_name, task_instance));
"""
ROWS = """
SET TIME ZONE 'America/New_York';
INSERT INTO oban_jobs (state, queue, worker, args, attempt, scheduled_at, meta) VALUES
  ('scheduled', 'mail', 'Welcome', '{"to": "Jürgen"}', 0, '2027-01-15 08:00:00.25', '{}'),
  ('retryable', 'mail', 'Welcome', '{}', 2, '2027-01-15 08:00:00.25', '{"tries": 2}'),
  ('available', 'mail', 'Ready', '{}', 0, '2027-01-15 08:00:00.25', '{}'),
  ('scheduled', 'other', 'Other', '{}', 0, '2027-01-15 08:00:00.25', '{}'),
  ('scheduled', 'mail', 'Never', '{}', 0, 'infinity', '{}');
INSERT INTO pgboss.job (name, data, state, start_after, singleton_key, retry_count) VALUES
  ('mail', '{"n":1}', 'created', '2027-01-15 09:00:00.25+01', 'one', 0),
  ('mail', NULL, 'retry', '2027-01-15 09:00:00.25+01', NULL, 3);
INSERT INTO pgboss.job (name) VALUES ('mail');
INSERT INTO river_job (state, scheduled_at, args, kind) VALUES
  ('scheduled', '2027-01-15 08:00:00.25Z', '{"n":1}', 'sort'), ('running', '2027-01-15 08:00:00Z', '{}', 'sort');
INSERT INTO scheduled_tasks VALUES
  ('mail', 'a:1', '\\x00ff', '2027-01-15 08:00:00.25Z', false, 1), ('mail', 'b', NULL, NULL, false, 1),
  ('mail', 'c', NULL, '2027-01-15 08:00:00Z', true, 1), ('daily', 'recurring', NULL, '2027-01-15 08:00:00Z', false, 1);
"""

# Of db-scheduler's persistent recurring tasks: as Jackson, Gson and Java write their data, and what comes of it.
RECURRING: dict[str, tuple[bytes, str | None]] = {
    "cron": (b'{"schedule":{"type":"cron","pattern":"0 0 9 * * ?","zoneId":"Europe/Berlin"},"data":5}', "0 0 9 * * *"),
    "delay": (b'{"schedule":{"type":"fixedDelay","duration":90.0},"data":null}', "@every 90000ms"),
    "gson": (b'{"schedule":{"type":"fixedDelay","duration":"PT1M30S"},"data":null}', "@every 90000ms"),
    "daily": (b'{"schedule":{"times":[[8,0]],"zone":"UTC","type":"daily"},"data":null}', "0 0 8 * * *"),
    "daily text": (b'{"schedule":{"type":"daily","times":["08:00"],"zone":"UTC"}}', "0 0 8 * * *"),
    "twice a day": (b'{"schedule":{"type":"daily","times":["08:00","09:00"],"zone":"UTC"}}', None),
    "another zone": (b'{"schedule":{"type":"cron","pattern":"0 0 9 * * ?","zoneId":"UTC"}}', None),
    "disabled": (b'{"schedule":{"type":"cron","pattern":"-","zoneId":"UTC"}}', None),
    "odd": (b'{"schedule":{"type":"daily","times":[{}],"zone":null}}', None),
    "java": (b"\xac\xed\0\5sr\0?com.github.kagkarlsson.scheduler.task.schedule.FixedDelay", None),
    "none": (b'{"schedule":"monthly","type":"cron"}', ""),
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with postgres_server(tmp_path_factory.mktemp("postgres")) as url:
        with psycopg.connect(url) as connection:
            connection.execute(TABLES)
            connection.execute(ROWS)
        yield url


def read(url: str, system: str, *queues: str) -> tuple[list[Item], dict[str, int]]:
    source = OpenSource(system, url, queues)
    return sorted(source.items(), key=lambda found: found.id), dict(source.left)


def told(found: Item) -> tuple[Any, ...]:
    return found.due, found.payload, found.key, dict(found.properties), found.reason


def test_the_jobs_of_oban(url: str) -> None:
    (first, again, never), left = read(url, "oban", "mail")
    about = {"worker": "Welcome", "queue": "mail"}
    assert told(first) == (DUE, '{"to": "Jürgen"}'.encode(), None, {"jobId": "1", **about}, None)
    more = {"jobId": "2", **about, "attempt": "2", "meta": '{"tries": 2}'}
    assert told(again) == (DUE, b"{}", None, more, None)
    assert (never.reason, never.payload) == ("inf is no time", b"{}")
    assert left == {"of other queues": 1}
    assert first.id.endswith(":postgres:public:oban_jobs:1")
    assert len({first.id, again.id, never.id}) == 3


def test_who_may_only_read_the_table_reads_the_same(url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("CREATE ROLE reader LOGIN; GRANT SELECT ON oban_jobs TO reader")
    assert read(url.replace("postgres@", "reader@"), "oban") == read(url, "oban")


def test_what_is_due_too_soon_is_left(url: str) -> None:
    source = OpenSource("oban", url, due_after=DUE)
    assert [found.reason for found in source.items()] == ["inf is no time"]
    assert source.left == {"due too soon": 3}
    assert len(list(OpenSource("oban", url, due_after=DUE - 1).items())) == 4


def test_the_jobs_of_pg_boss(url: str) -> None:
    found = sorted((told(one) for one in read(url, "pg-boss")[0]), key=lambda one: one[1] is None)
    assert [(due, payload) for due, payload, *_ in found] == [(DUE, b'{"n": 1}'), (DUE, None)]
    assert found[0][3] == {"jobId": found[0][3]["jobId"], "name": "mail", "singletonKey": "one"}
    assert found[1][3]["retryCount"] == "3"


def test_the_jobs_of_river(url: str) -> None:
    (found,), _ = read(url, "river")
    about = {"jobId": "1", "kind": "sort", "queue": "default"}
    assert told(found) == (DUE, b'{"n": 1}', None, about, None)


def test_the_executions_of_db_scheduler(url: str) -> None:
    (found,), left = read(url, "db-scheduler")
    assert told(found) == (DUE, b"\0\xff", "a:1", {"taskName": "mail", "taskInstance": "a:1"}, None)
    assert left == {"repeats, left": 1}


def test_a_persistent_recurring_task_of_db_scheduler_recurs_where_its_schedule_can_be_read(url: str) -> None:
    with psycopg.connect(url) as connection:
        for name, (data, _) in RECURRING.items():
            row = "('recurs', %s, %s, '2027-01-15 08:00:00Z', false, 1)"
            connection.execute(f"INSERT INTO scheduled_tasks VALUES {row}", (name, data))
    found, left = read(url, "db-scheduler", "recurs")
    with psycopg.connect(url) as connection:
        connection.execute("DELETE FROM scheduled_tasks WHERE task_name = 'recurs'")
    rules = {one.key: one.properties.get("repeat", "") for one in found}
    assert rules == {name: rule for name, (_, rule) in RECURRING.items() if rule is not None}
    assert {one.due for one in found} == {DUE - 250}
    assert left == {"of other queues": 2, "repeats, left": 5}


def test_a_table_of_ones_own(url: str, tmp_path: Path) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("CREATE SCHEMA own; CREATE TABLE own.later (n int, at bigint, say text)")
        connection.execute("INSERT INTO own.later VALUES (1, 1800000000250, 'a % b'), (2, NULL, NULL)")
    file = tmp_path / "later.yaml"
    mapping = "{table: later, id: n, deliver_at: at, payload: say, properties: {id: n, due: \"'x'\"}}"
    file.write_text(mapping)
    (first, second), _ = read(f"{url}&options=-csearch_path%3Down", str(file))
    assert told(first) == (DUE, b"a % b", None, {"id": "1", "due": "x"}, None)
    assert told(second) == (None, None, None, {"id": "2", "due": "x"}, None)
    with pytest.raises(SourceError, match="there is no table later in the database's search path"):
        read(url, str(file))
    with pytest.raises(SourceError, match="--queue: the mapping does not say"):
        read(url, str(file), "mail")
    file.write_text(mapping.replace("payload: say", "payload: sah").replace("later,", "own.later,"))
    with pytest.raises(SourceError, match='column "sah" does not exist'):
        read(url, str(file))


@pytest.mark.parametrize(
    ("payload", "content"),
    [
        ("ARRAY['a', 'b c']", b'{a,"b c"}'),
        ("true", b"t"),
        ("1.50", b"1.50"),
        ("'2030-01-01 00:00Z'::timestamptz", b"2030-01-01 00:00:00+00"),
        ("'infinity'::timestamptz", b"infinity"),
        ("interval '1 day'", b"1 day"),
        ("ARRAY['{\"a\": 1}'::jsonb]", b'{"{\\"a\\": 1}"}'),
        ("row(1, 'x')", b"(1,x)"),
        ("'\\x00ff'::bytea", b"\0\xff"),
        ("'{\"a\":1}'::json", b'{"a":1}'),
    ],
)
def test_a_payload_of_any_type_is_as_postgres_writes_it(url: str, payload: str, content: bytes) -> None:
    mapping = TableMapping(table="river_job", where="id = 1", id="id", deliver_at="NULL", payload=payload)
    assert [found.payload for found in PostgresTable(url, mapping).items()] == [content]


def test_rows_without_an_id_of_their_own_are_an_error_and_none_is_left_out(url: str, tmp_path: Path) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE named (name text, at bigint)")
        connection.execute("INSERT INTO named VALUES ('a', 1), ('b', 2), ('b', 3)")
    file = tmp_path / "named.yaml"
    file.write_text("{table: named, id: name, deliver_at: at, payload: name}")
    with pytest.raises(SourceError, match=r"named: the mapping's id \(name\) has to be another one .* 2 rows have b"):
        read(url, str(file))
    with psycopg.connect(url) as connection:
        connection.execute("UPDATE named SET name = NULL WHERE at = 3")
    with pytest.raises(SourceError, match="1 rows have none"):
        read(url, str(file))
    file.write_text("{table: named, id: name, deliver_at: at, payload: name, where: name IS NOT NULL}")
    assert len(read(url, str(file))[0]) == 2


def test_nothing_is_changed_there_even_if_a_mapping_would(url: str) -> None:
    mapping = TableMapping(table="river_job", id="nextval('river_job_id_seq')", deliver_at="1", payload="NULL")
    with pytest.raises(SourceError, match="read-only transaction"):
        list(PostgresTable(url, mapping).items())


def test_a_server_that_does_not_answer_is_one_line_without_the_password(tmp_path: Path) -> None:
    for url in (f"postgresql://a:secret@/b?host={tmp_path}", "postgres//a:secret@b/c", "postgresql://a:secret@[b/c"):
        with pytest.raises(SourceError) as error:
            read(url, "oban")
        assert "secret" not in str(error.value)
        assert "\n" not in str(error.value)


def test_the_shipped_mappings_are_read_and_wrong_ones_are_named(tmp_path: Path) -> None:
    assert shipped() == ("db-scheduler", "oban", "pg-boss", "river")
    for name in shipped():
        assert read_mapping(name).queue
    file = tmp_path / "wrong.yaml"
    for text, said in {
        "{table: t}": "id: Field required",
        "[": "while parsing",
        "{table: t, id: i, deliver_at: a, payload: p, colour: red}": "colour: Extra inputs are not permitted",
        "{table: t, id: i, deliver_at: a, payload: p, properties: {delaylake.x: y}}": "begin with delaylake",
        "5": "the file: Input should be a valid dictionary",
    }.items():
        file.write_text(text)
        with pytest.raises(SourceError, match=said):
            read_mapping(str(file))
    with pytest.raises(SourceError, match="No such file"):
        read_mapping(str(tmp_path / "none.yaml"))
    with pytest.raises(SourceError, match="neither a YAML file nor one of"):
        OpenSource("resque", "redis://x")


@pytest.mark.parametrize(
    ("due", "millis", "reason"),
    [
        ("2027-01-15 08:00:00.25+00", DUE, None),
        ("1800000000250", DUE, None),
        ("1800000000249.6", DUE, None),
        (None, None, None),
        ("0044-03-15 12:00:00+00 BC", None, "0044-03-15 12:00:00+00 BC is no time"),
        ("10000-01-01 00:00:00+00", None, "10000-01-01 00:00:00+00 is no time"),
        ("NaN", None, "nan is no time"),
        ("1800000000.250000", None, IN_SECONDS.format("values")),
        ("1970-06-01 00:00:00+00", 13_046_400_000, None),
        ("2030-01-01", None, "2030-01-01 is no time"),
        ("2027-01-15 08:00:00.2491+00", DUE, None),
    ],
)
def test_times_as_postgres_writes_them(due: str | None, millis: int | None, reason: str | None) -> None:
    found = message("id", due, b"", None, {})
    assert (found.due, found.reason) == (millis, reason)
