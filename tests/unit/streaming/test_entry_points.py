"""The operator as Spark has it."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest
from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle
from pyspark.sql.streaming.stateful_processor_api_client import StatefulProcessorApiClient
from pyspark.sql.types import IntegerType, StructField, StructType

from streaming import entry_points
from streaming.entry_points import DelayedDeliveryProcessor


def test_a_state_that_does_not_answer_fails_the_task_instead_of_holding_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_points, "_STATE_SECONDS", 0.2)
    with socket.create_server(("localhost", 0)) as silent:
        key = StructType([StructField("shard", IntegerType())])
        client = StatefulProcessorApiClient(silent.getsockname()[1], key)
        with closing(client._client_socket), client.sockfile, pytest.raises(TimeoutError):
            DelayedDeliveryProcessor([0], "{}", "").init(StatefulProcessorHandle(client))
