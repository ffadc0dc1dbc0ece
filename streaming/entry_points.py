"""The source and the stateful operator as the classes that Spark calls.

Spark plans a query in half a dozen Python processes, one after the other, and each imports this module: so it imports
little, and the work is in `streaming.source.reader` and `streaming.operator.processor`, which are imported where it is
done.
"""

from __future__ import annotations

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

# How long Spark may take to answer when it is asked for a value of the state: milliseconds are usual.
_STATE_SECONDS = 30.0


# This process's last connection to Spark's side of the state.
_last_client: list[StatefulProcessorApiClient] = []


def _leave_open(client: StatefulProcessorApiClient) -> None:
    """Keeps the task's end of the state connection open: Spark closes its own end only while it waits on it.

    Else the JVM leaks a descriptor.
    """
    tell = client.set_handle_state

    def tell_unless_closed(state: StatefulProcessorHandleState) -> None:
        if state != StatefulProcessorHandleState.CLOSED:
            tell(state)

    client.set_handle_state = tell_unless_closed  # type: ignore[method-assign]
    _close_last()
    _last_client.append(client)  # else it would be closed when nobody refers to it any more


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
    """Hands Spark's calls to `SourceReader`, in one process beside the driver for the run; `read` in tasks, on copies.

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
        """Returns the parts of the batch between two offsets, for a task each."""
        return self._reader.partitions(start, end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a part."""
        return self._reader.read(partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Is told that the batches up to an offset are done."""
        self._reader.commit(end)

    def stop(self) -> None:
        """Stops reading the topics."""
        if "_reader" in self.__dict__:
            self._reader.stop()

    @cached_property
    def _reader(self) -> SourceReader:
        from streaming.source.reader import SourceReader

        return SourceReader(self._options)


class DelayedDeliveryProcessor(StatefulProcessor):
    """Hands each shard's rows to `Operator`; Spark's key of a row is that of its shard.

    Args:
        shard_keys: for each shard the key of its rows.
        settings: the tracker's settings as JSON.
        warehouse: a folder or URI.
    """

    def __init__(self, shard_keys: list[int], settings: str, warehouse: str) -> None:
        self._options = shard_keys, settings, warehouse

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Gets Spark's map state, which the shards of a task share, each under its key."""
        # Spark's side of the state ends without a word when the disk is full: the task would wait for ever, and with it
        # the query. Failed, it is run again.
        client = handle._statefulProcessorApiClient
        client._client_socket.settimeout(_STATE_SECONDS)
        _leave_open(client)
        self._state = handle.getMapState("tracker", _KEY, _VALUE)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        """Applies a batch's rows to the shard of a key; yields the shard's output rows."""
        return self._operator.apply(key[0], rows)

    @cached_property
    def _operator(self) -> Operator:
        from streaming.operator.processor import Operator

        return Operator(self._state, *self._options)
