"""Named queries in a file of SQL beside the module that runs them, and the SQL that only code can make.

A file has a section for each query, fragment or view, as Procrastinate's `sql/queries.sql`: a line `-- name --`,
comments, and the SQL. `:name` stands for a value, or for a fragment. The engines here have no parameters in common:
DataFusion takes only positional ones of prepared statements, and no lists. So values are written into the text as
literals, by which files are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import TypeAlias
from zipimport import zipimporter

_SECTION = re.compile(r"^-- (\w+) --\n", re.MULTILINE)
_COMMENT = re.compile(r"^ *--.*\n?", re.MULTILINE)
_TOKEN = re.compile(r"('(?:[^']|'')*')|:([a-z]\w*)")
_PLAIN = re.compile(r"[a-z_][a-z0-9_]*")


class Sql(str):
    """A text that is SQL, and no value: made by `NamedQueries`, or by the functions here."""

    __slots__ = ()


TRUE, FALSE, ALL = Sql("true"), Sql("false"), Sql("*")

Value: TypeAlias = "str | int | bool | Sequence[str] | Sequence[int] | None"


class NamedQueries:
    """The named queries of one file.

    Args:
        module: the path of a module, `__file__`; the queries are in the file of the same name that ends with `.sql`.
        shared: values and fragments that all queries of the file may name.
    """

    def __init__(self, module: str, **shared: Value) -> None:
        _, *parts = _SECTION.split(_text(Path(module).with_suffix(".sql")))
        sections = zip(parts[::2], parts[1::2], strict=True)
        self._queries = {name: _TOKEN.split(_COMMENT.sub("", sql).strip()) for name, sql in sections}
        self._shared: Mapping[str, Value] = shared

    @property
    def names(self) -> list[str]:
        """The names of the file's sections, in their order."""
        return list(self._queries)

    def __call__(self, name: str, /, **values: Value) -> Sql:
        """Returns the SQL of a section.

        Args:
            name: of the section.
            values: what its `:name`s stand for. Others are looked up among `shared`, then among the file's sections,
                which get the same values.

        Raises:
            KeyError: there is no such section, or no value for a name.
            ValueError: a list is empty, for which SQL has no literal.
        """
        tokens = self._queries[name]
        # Of three tokens the first is text, the second a literal of the file, the third the name of a value.
        parts = []
        for text, literal_text, value in zip(tokens[::3], [*tokens[1::3], None], [*tokens[2::3], None], strict=True):
            parts += [text, literal_text or ("" if value is None else self._find(value, values))]
        return Sql("".join(parts))

    def _find(self, name: str, values: Mapping[str, Value]) -> str:
        for known in (values, self._shared):
            if name in known:
                return literal(known[name])
        return self(name, **values)


def _text(file: Path) -> str:
    for folder in file.parents:
        if folder.is_file():  # the executors of a cluster have the program as an archive
            return zipimporter(str(folder)).get_data(str(file)).decode()
    return file.read_text(encoding="utf-8")


def literal(value: Value) -> Sql:
    """Returns a value as SQL: a text in quotes, a list without brackets, SQL as it is.

    Raises:
        ValueError: a list is empty.
    """
    if isinstance(value, Sql):
        return value
    if isinstance(value, str):
        return Sql("'" + value.replace("'", "''") + "'")
    if value is None or isinstance(value, bool):
        return Sql({None: "NULL", True: "true", False: "false"}[value])
    if isinstance(value, (int, Integral)):  # also one of numpy's
        return Sql(int(value))
    if not value:
        raise ValueError("SQL has no empty list")
    return Sql(", ".join(map(literal, value)))


def identifier(name: str) -> Sql:
    """Returns the name of a column or table as SQL, quoted unless it is a plain one."""
    return Sql(name if _PLAIN.fullmatch(name) else '"' + name.replace('"', '""') + '"')


def columns(names: Iterable[str]) -> Sql:
    """Returns a list of columns as SQL."""
    return Sql(", ".join(map(identifier, names)))


def listed(parts: Iterable[Sql]) -> Sql:
    """Returns expressions as a list of SQL."""
    return Sql(", ".join(parts))


def rows_of_values(rows: Iterable[Sequence[str | bool]]) -> Sql:
    """Returns rows as SQL has them after VALUES."""
    return Sql(", ".join(f"({', '.join(map(literal, row))})" for row in rows))


def all_of(conditions: Iterable[Sql]) -> Sql:
    """Returns the SQL condition that all of some conditions hold; true for none."""
    return Sql(" AND ".join(conditions) or "true")


def some_of(conditions: Iterable[Sql]) -> Sql:
    """Returns the SQL condition, in brackets, that one of some conditions holds; false for none."""
    return Sql(f"({' OR '.join(conditions) or 'false'})")


def none_of(conditions: Iterable[Sql]) -> Sql:
    """Returns the SQL condition that none of some conditions holds."""
    return Sql(f"NOT {some_of(conditions)}")


def is_in(column: str, values: Sequence[str] | Sequence[int]) -> Sql:
    """Returns the SQL condition that a column has one of the values; false for none."""
    return Sql(f"{identifier(column)} IN ({literal(values)})") if values else FALSE


def in_ranges(column: str, ranges: Iterable[tuple[int, int]]) -> Sql:
    """Returns the SQL condition that a column is in one of the ranges, (first, last) inclusive; false for none."""
    return some_of(Sql(f"{identifier(column)} BETWEEN {first:d} AND {last:d}") for first, last in ranges)
