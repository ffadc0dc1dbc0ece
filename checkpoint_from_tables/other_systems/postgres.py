"""Reads a Postgres table by a mapping: one snapshot of it, row by row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from datetime import date
from typing import TYPE_CHECKING, Any

from checkpoint_from_tables.importing.columns import IN_SECONDS, SECONDS_BELOW, SECONDS_FROM
from checkpoint_from_tables.other_systems.db_scheduler import has_schedule, rule_of
from checkpoint_from_tables.other_systems.item import Item, SourceError, iso_millis, item, rejected_item
from checkpoint_from_tables.other_systems.mapping import TableMapping
from checkpoint_from_tables.other_systems.repeats import LEFT, recurring
from conf.errors import one_line

if TYPE_CHECKING:
    import psycopg

_ROWS_AT_ONCE = 1_000
_CONNECT_SECONDS = 30

_DATABASE = """
SELECT c.system_identifier::text, current_database(), n.nspname, t.relname
FROM pg_control_system() c, pg_class t JOIN pg_namespace n ON n.oid = t.relnamespace
WHERE t.oid = to_regclass(%s)
"""


class PostgresTable:
    """The rows of a table.

    Args:
        url: as libpq takes it, such as postgresql://user:password@host/database.
        queues: only rows of these queues; empty: of all.

    Raises:
        SourceError: psycopg is not installed, or the mapping has no queues.
    """

    def __init__(self, url: str, mapping: TableMapping, queues: Collection[str] = ()) -> None:
        try:
            import psycopg  # noqa: F401
        except ImportError:
            raise SourceError("psycopg is not installed: pip install -e '.[postgres]'") from None
        if queues and mapping.queue is None:
            raise SourceError("--queue: the mapping does not say what a row's queue is")
        self._url = url
        self._mapping = mapping
        self._queues = queues
        self.left: Counter[str] = Counter()

    def items(self) -> Iterator[Item]:
        """Yields the rows of one snapshot of the table.

        Raises:
            SourceError: the table can't be read, an expression of the mapping fails, or ids are not unique.
        """
        import psycopg
        from psycopg.types.json import set_json_loads

        try:
            with psycopg.connect(self._url, connect_timeout=_CONNECT_SECONDS, client_encoding="utf8") as connection:
                set_json_loads(_as_it_is, connection)
                connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
                connection.read_only = True
                connection.execute("SET LOCAL TIME ZONE 'UTC'; SET LOCAL datestyle = 'ISO'")
                table = self._name(connection)
                self._check_ids(connection)
                with connection.cursor(name="delaylake") as cursor:
                    cursor.itersize = _ROWS_AT_ONCE
                    _keep_text(cursor)
                    cursor.execute(self._sql().encode())
                    for row in cursor:
                        yield from self._item(table, row)
        except (psycopg.Error, UnicodeError) as error:
            reason = one_line(error).replace(self._url, "the URL")  # the URL may contain a password
            raise SourceError(f"Postgres can't be read: {reason}") from None

    def _name(self, connection: psycopg.Connection) -> str:
        """Returns a name of the table that no other database has, and no copy that was restored from a dump."""
        found = connection.execute(_DATABASE, [self._mapping.table]).fetchone()
        if found is None:
            raise SourceError(f"there is no table {self._mapping.table} in the database's search path")
        return ":".join(found)

    def _check_ids(self, connection: psycopg.Connection) -> None:
        """Checks that ids are unique: of rows with the same id only the first would be imported."""
        mapping = self._mapping
        sql = (
            f"SELECT ({mapping.id})::text, count(*) FROM {mapping.table} WHERE {mapping.where} "  # noqa: S608
            f"GROUP BY 1 HAVING count(*) > 1 OR ({mapping.id})::text IS NULL ORDER BY 2 DESC LIMIT 1"
        )
        found = connection.execute(sql.encode()).fetchone()
        if found is not None:
            id, rows = found
            what = f"{rows} rows have none" if id is None else f"{rows} rows have {id[:80]}"
            raise SourceError(
                f"{mapping.table}: the mapping's id ({mapping.id}) has to be another one in each row: {what}"
            )

    def _sql(self) -> str:
        mapping = self._mapping
        texts = [
            mapping.id,
            mapping.deliver_at,
            mapping.key,
            mapping.queue,
            mapping.repeats,
            *mapping.properties.values(),
        ]
        columns = ", ".join(f"({expression or 'NULL'})::text" for expression in texts)
        return f"SELECT ({mapping.payload}), {columns} FROM {mapping.table} WHERE {mapping.where}"  # noqa: S608

    def _item(self, table: str, row: tuple[Any, ...]) -> Iterator[Item]:
        payload, id, due, key, queue, repeats, *values = row
        if self._queues and queue not in self._queues:
            self.left["of other queues"] += 1
            return
        properties = dict(zip(self._mapping.properties, values, strict=True))
        found: Item | None = message(f"postgres:{table}:{id}", due, payload, key, properties)
        if repeats == "true":
            found = None
        elif found is not None and self._mapping.has_schedules and has_schedule(found.payload):
            found = recurring(found, rule_of(found.payload or b""))
        if found is None:
            self.left[LEFT] += 1
        else:
            yield found


def message(id: str, due: str | None, payload: object, key: str | None, properties: dict[str, str | None]) -> Item:
    """Returns a row as an item.

    Args:
        id: as of `Item`.
        due: a timestamp as Postgres writes it, or a number of ms since the epoch; None: at once.
        payload: the value of the column.
        key: as of `Item`.
        properties: as of `Item`.
    """
    content = payload if isinstance(payload, bytes | None) else str(payload).encode()
    if due is None:
        return item(id, None, content, properties, key)
    millis = _millis(due)
    if millis is None:
        return rejected_item(id, f"{due} is no time", content)
    if SECONDS_FROM <= millis < SECONDS_BELOW and _is_number(due):
        return rejected_item(id, IN_SECONDS.format("values"), content)
    return item(id, millis, content, properties, key)


def _millis(text: str) -> float | None:
    """Reads a time as ms since the epoch; None: the text is none, or a date, whose midnight is at no known place."""
    if _is_number(text):
        return float(text)
    try:
        date.fromisoformat(text)
    except ValueError:
        return iso_millis(text)
    return None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _keep_text(cursor: psycopg.ServerCursor) -> None:
    """Makes values of a cursor the text that Postgres writes, but for bytes and JSON."""
    from psycopg.types.string import TextLoader

    for kind in cursor.adapters.types:
        for oid in (kind.array_oid, 0 if kind.name in ("bytea", "json", "jsonb") else kind.oid):
            if oid:
                cursor.adapters.register_loader(oid, TextLoader)


def _as_it_is(data: str | bytes) -> bytes:
    """Keeps JSON as the text that Postgres writes."""
    return data.encode() if isinstance(data, str) else bytes(data)
