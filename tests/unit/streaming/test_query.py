"""How the job learns that its query has ended, and when it begins none again."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import cast
from unittest import mock

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery

from conf.settings import Settings
from streaming import query as query_module
from streaming.checkpoint.checkpoint import Checkpoint, CheckpointError
from streaming.query import DelayedDelivery, _end_of
from warehouse.delta.tables import Tables


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


def test_no_query_begins_where_the_checkpoint_was_removed_while_the_job_waited_for_the_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would begin anew, and send once more what no table has yet."""
    settings = Settings(
        warehouse=f"file:{tmp_path / 'warehouse'}",
        checkpoint=f"file:{tmp_path / 'checkpoint'}",
        routes=[{"source": "persistent://public/default/orders", "subscriptions": [{"name": "a"}]}],  # type: ignore[arg-type]
    )

    def begin(_: Settings, tables: Tables, checkpoint: Checkpoint, *others: object) -> None:
        tables.create()
        tables.take_over(1)
        checkpoint.epoch = 1

    monkeypatch.setattr(query_module, "recover", begin)
    monkeypatch.setattr(query_module, "check_broker", lambda *_: shutil.rmtree(tmp_path / "checkpoint" / "query"))
    with pytest.raises(CheckpointError, match="was removed or replaced while the job ran"):
        DelayedDelivery(mock.Mock(), settings, threading.Event()).run()
    assert not Checkpoint(tmp_path / "checkpoint").has_query
