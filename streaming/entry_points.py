"""The classes that Spark calls: the streaming source and the stateful operator.

Spark plans a query in half a dozen Python processes, one after the other, and each imports this module. So the module
imports little; `streaming.source.reader` and `streaming.operator.processor` do the work, and are imported at first use.
"""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.streaming.stateful_processor_api_client import StatefulProcessorApiClient, StatefulProcessorHandleState
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from streaming.operator.schemas import INPUT_SCHEMA

if TYPE_CHECKING:
    import pyarrow as pa

    from streaming.operator.processor import Operator
    from streaming.source.reader import SourceReader


_KEY = StructType(
    [StructField("name", StringType()), StructField("first", LongType()), StructField("second", LongType())]
)
_VALUE = StructType([StructField("value", BinaryType())])

# How long Spark may take to answer a question for a value of the state; milliseconds are usual.
_STATE_SECONDS = 30.0


# The last connection of this process to Spark's state.
_last_client: list[StatefulProcessorApiClient] = []


def _leave_open(client: StatefulProcessorApiClient) -> None:
    """Keeps Python's end of the state connection open when a task ends, until the next task begins.

    The JVM closes its own end only while it waits for a message on the connection; else it leaks a file descriptor.
    """
    tell = client.set_handle_state

    def tell_unless_closed(state: StatefulProcessorHandleState) -> None:
        if state != StatefulProcessorHandleState.CLOSED:
            tell(state)

    client.set_handle_state = tell_unless_closed  # type: ignore[method-assign]
    _close_last()
    _last_client.append(client)  # a reference, else Python would close the connection


def _close_last() -> None:
    while _last_client:
        client = _last_client.pop()
        with suppress(OSError):
            client.sockfile.close()
            client._client_socket.close()


class DelayedDeliverySource(DataSource):
    """The job's only source.

    Used as

        spark.dataSource.register(DelayedDeliverySource)
        spark.readStream.format("delaylake").option("settings", settings.model_dump_json()).option(...)

    Options: settings (JSON), run (a new id for each start), feedback and troubles (paths of files), shard_keys (for
    each shard the integer that Spark's hash puts in a partition of its own, JSON), epoch (of the warehouse).
    """

    @classmethod
    def name(cls) -> str:
        """The source's name: the format of `spark.readStream`."""
        return "delaylake"

    def schema(self) -> StructType:
        """The columns of the rows that the source gives."""
        return INPUT_SCHEMA

    def streamReader(self, schema: StructType) -> DelayedDeliveryReader:
        """Makes a reader with the source's options."""
        return DelayedDeliveryReader(self.options)


class DelayedDeliveryReader(DataSourceStreamReader):
    """Passes Spark's calls to `SourceReader`.

    One process beside the driver runs all methods but `read` as long as the query runs; tasks run `read`, on copies.
    Offsets are dicts as `Offset.to_json` makes them.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = dict(options)

    def initialOffset(self) -> dict[str, Any]:
        """Returns the offset before the first batch."""
        return self._reader.initial_offset()

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        """Waits for the next batch, and returns its end; `limit` is not used."""
        return self._reader.next_offset(start)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Returns the parts of the batch between two offsets, one for each task."""
        return self._reader.partitions(start, end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a part of a batch."""
        return self._reader.read(partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Notes that Spark has committed the batches up to an offset."""
        self._reader.commit(end)

    def stop(self) -> None:
        """Stops reading the topics."""
        if "_reader" in self.__dict__:
            self._reader.stop()

    @cached_property
    def _reader(self) -> SourceReader:
        from streaming.source.reader import SourceReader
        from streaming.spark_imports import forget_jars

        forget_jars()
        faulthandler.register(signal.SIGUSR1, 2)
        return SourceReader(self._options)


class DelayedDeliveryProcessor(StatefulProcessor):
    """Passes each shard's rows to `Operator`. Rows of one shard have the same key for Spark.

    Args:
        shard_keys: Spark's key of each shard's rows, by shard number.
        settings: the section `tracker` of the settings, as JSON.
        warehouse: folder or URI of the tables.
    """

    def __init__(self, shard_keys: list[int], settings: str, warehouse: str) -> None:
        self._options = shard_keys, settings, warehouse

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Opens Spark's map state. The shards of a task share it, each under its key."""
        # When the disk is full, Spark's end of the state stops without an error, and the task would wait for ever.
        # After a timeout the task fails, and Spark runs it again.
        client = handle._statefulProcessorApiClient
        client._client_socket.settimeout(_STATE_SECONDS)
        _leave_open(client)
        self._state = handle.getMapState("tracker", _KEY, _VALUE)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        """Applies a batch's rows to the shard of a key; yields the shard's output rows."""
        from streaming.free_memory import give_back_memory

        yield from self._operator.apply(key[0], rows)
        give_back_memory()

    @cached_property
    def _operator(self) -> Operator:
        from streaming.operator.processor import Operator

        return Operator(self._state, *self._options)
