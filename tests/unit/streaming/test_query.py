"""How the job learns that its query has ended."""

from __future__ import annotations

import threading
from typing import cast

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery

from streaming.query import _end_of


class Query:
    """A query that runs until its event is set, and then fails with an error, if it has one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.ends = threading.Event()
        self._error = error

    def awaitTermination(self) -> None:
        self.ends.wait()
        if self._error is not None:
            raise self._error


def test_a_query_that_was_stopped_has_ended_without_an_error() -> None:
    query = Query()
    end = _end_of(cast(StreamingQuery, query))
    assert not end.done()
    query.ends.set()
    assert end.result(60) is None


def test_the_error_that_ended_a_query_is_raised_where_its_end_is_awaited() -> None:
    query = Query(StreamingQueryException("a task failed"))
    end = _end_of(cast(StreamingQuery, query))
    query.ends.set()
    with pytest.raises(StreamingQueryException, match="a task failed"):
        end.result(60)
