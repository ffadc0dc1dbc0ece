"""The operator as Spark has it."""

from __future__ import annotations

import gc
import socket
from contextlib import closing
from unittest import mock

import pytest
from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle
from pyspark.sql.streaming.stateful_processor_api_client import StatefulProcessorApiClient, StatefulProcessorHandleState
from pyspark.sql.types import IntegerType, StructField, StructType

from streaming import entry_points
from streaming.entry_points import DelayedDeliveryProcessor


@pytest.mark.slow
def test_a_state_that_does_not_answer_fails_the_task_instead_of_holding_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_points, "_STATE_SECONDS", 0.2)
    with socket.create_server(("localhost", 0)) as silent:
        key = StructType([StructField("shard", IntegerType())])
        client = StatefulProcessorApiClient(silent.getsockname()[1], key)
        with closing(client._client_socket), client.sockfile, pytest.raises(TimeoutError):
            DelayedDeliveryProcessor([0], "{}", "").init(StatefulProcessorHandle(client))
        entry_points._close_last()


@pytest.mark.slow
def test_spark_ends_a_tasks_connection_to_the_state_and_not_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StatefulProcessorHandle, "getMapState", mock.Mock())
    told = mock.Mock()
    monkeypatch.setattr(StatefulProcessorApiClient, "set_handle_state", told)
    with socket.create_server(("localhost", 0)) as server:

        def begin() -> socket.socket:
            """Begins a task as Spark does, which lets go of all of it at the end; returns Spark's end."""
            client = StatefulProcessorApiClient(server.getsockname()[1], StructType([]))
            accepted, _ = server.accept()
            DelayedDeliveryProcessor([0], "{}", "").init(StatefulProcessorHandle(client))
            client.set_handle_state(StatefulProcessorHandleState.INITIALIZED)
            client.set_handle_state(StatefulProcessorHandleState.CLOSED)
            return accepted

        try:
            with begin() as first:
                gc.collect()
                first.setblocking(False)
                with pytest.raises(BlockingIOError):
                    first.recv(1)
                with begin():
                    gc.collect()
                    assert first.recv(1) == b"", "the next task's takes its place"
        finally:
            entry_points._close_last()
    assert [call.args for call in told.mock_calls] == [(StatefulProcessorHandleState.INITIALIZED,)] * 2
