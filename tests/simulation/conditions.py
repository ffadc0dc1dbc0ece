"""Answers the plain questions among those that the service asks in SQL: rows of one table that a condition selects.

A database takes milliseconds to understand a question; here it takes a fraction of one. `test_fakes.py` compares with
delta-rs. What is not understood is left to the caller.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

_QUERY = re.compile(r"\s*SELECT\s+(.*?)\s+FROM\s+\w+\s+WHERE\s+(.*?)\s*", re.DOTALL)
_TOKEN = re.compile(r"\s*(?:('(?:[^']|'')*')|(-?\d+)\b|([A-Za-z_]\w*)|(<=|>=|<>|[=<>(),]))")
_COLUMN = re.compile(r"[a-z_]+")
_OPERATORS: dict[str, Callable[..., Any]] = {
    "=": pc.equal,
    "<>": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}


class _NotPlainError(Exception):
    """The question has something that is not understood here."""


def answer(rows: pa.Table, sql: str) -> pa.Table | None:
    """Answers a question about a table; None: it is not a plain one."""
    found = _QUERY.fullmatch(sql)
    if found is None:
        return None
    columns = [name.strip() for name in found[1].split(",")]
    is_count = columns == ["count(*) AS n"]
    if not is_count and columns != ["*"] and not all(_COLUMN.fullmatch(name) for name in columns):
        return None
    try:
        selected = _Condition(rows, found[2]).evaluate()
    except _NotPlainError:
        return None
    if isinstance(selected, pa.Scalar):
        chosen = rows if selected.as_py() else rows.slice(0, 0)
    else:
        chosen = rows.filter(selected)
    if is_count:
        return pa.table({"n": pa.array([chosen.num_rows], pa.int64())})
    return chosen if columns == ["*"] else chosen.select(columns)


class _Condition:
    """A condition of SQL's three-valued logic, evaluated while it is read."""

    def __init__(self, rows: pa.Table, text: str) -> None:
        self._rows = rows
        self._tokens: list[str] = []
        end = 0
        while end < len(text):
            found = _TOKEN.match(text, end)
            if found is None:
                raise _NotPlainError(text[end:])
            self._tokens.append(found[0].strip())
            end = found.end()
        self._next = 0

    def evaluate(self) -> Any:
        result = self._either()
        if self._next != len(self._tokens):
            raise _NotPlainError(self._tokens[self._next])
        return result

    def _take(self, *expected: str) -> bool:
        """Whether the next tokens are some; goes on after them then."""
        is_next = [token.upper() for token in self._tokens[self._next : self._next + len(expected)]] == [*expected]
        self._next += len(expected) * is_next
        return is_next

    def _need(self, expected: str) -> None:
        if not self._take(expected):
            raise _NotPlainError(expected)

    def _either(self) -> Any:
        result = self._both()
        while self._take("OR"):
            result = pc.or_kleene(result, self._both())
        return result

    def _both(self) -> Any:
        result = self._single()
        while self._take("AND"):
            result = pc.and_kleene(result, self._single())
        return result

    def _single(self) -> Any:
        if self._take("NOT"):
            return pc.invert(self._single())
        if self._take("("):
            result = self._either()
            self._need(")")
            return result
        if self._take("TRUE"):
            return pa.scalar(True)
        if self._take("FALSE"):
            return pa.scalar(False)
        return self._comparison(self._operand())

    def _comparison(self, operand: Any) -> Any:
        if self._take("IS", "NULL"):
            return pc.is_null(operand)
        if self._take("IS", "NOT", "NULL"):
            return pc.is_valid(operand)
        is_not = self._take("NOT")
        if self._take("BETWEEN"):
            first = pc.greater_equal(operand, self._operand())
            self._need("AND")
            result = pc.and_kleene(first, pc.less_equal(operand, self._operand()))
            return pc.invert(result) if is_not else result
        if self._take("IN", "("):
            result = pc.equal(operand, self._operand())
            while self._take(","):
                result = pc.or_kleene(result, pc.equal(operand, self._operand()))
            self._need(")")
            return pc.invert(result) if is_not else result
        for sign, compare in _OPERATORS.items():
            if not is_not and self._take(sign):
                return compare(operand, self._operand())
        raise _NotPlainError("a comparison")

    def _operand(self) -> Any:
        if self._take("COALESCE", "("):
            first = self._operand()
            self._need(",")
            result = pc.coalesce(first, self._operand())
            self._need(")")
            return result
        if self._next == len(self._tokens):
            raise _NotPlainError("the end")
        token = self._tokens[self._next]
        self._next += 1
        if token.startswith("'"):
            return pa.scalar(token[1:-1].replace("''", "'"))
        if token.lstrip("-").isdigit():
            return pa.scalar(int(token), pa.int64())
        if token in self._rows.column_names:
            return self._rows[token]
        raise _NotPlainError(token)
