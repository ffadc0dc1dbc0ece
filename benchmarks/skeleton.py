"""Measures what a batch costs with each layer of the job added: its time, and CPU time by kind of process.

usage: skeleton.py [SECONDS [BYTES]]

Each stage is a Structured Streaming query of its own, one shard, one row of BYTES (96,000) a batch, as quick as batches
follow one another for SECONDS (30) after a warm-up:

  source  a data source in Python, and a `foreachBatch` that brings the rows to the driver
  state   the same through a `transformWithState` that reads and writes one value of a map
  sink    the same, with the rows appended to a Delta table

`job` is the whole program, with 1,000 messages a second in and out: what is beyond the stages is receiving, the
tracker, and the releases with their producers. Prints one JSON object.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
from deltalake import write_deltalake
from pyspark.sql import DataFrame, Row
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructField, StructType

from benchmarks.on_time import NAMESPACE, produce
from benchmarks.start import cpu_seconds
from broker.standalone import EmbeddedBroker
from conf.settings import PulsarSettings, Settings
from streaming.operator.schemas import INPUT_SCHEMA
from streaming.session import SparkSession, create_session
from tests.support.service.harness import Job

WARM_UP_SECONDS = 30
RATE = 1_000

_KEY = StructType([StructField("name", StringType())])
_VALUE = StructType([StructField("value", BinaryType())])
_OUTPUT = StructType([StructField("shard", IntegerType()), StructField("body", BinaryType())])


class BareSource(DataSource):
    """A source with a row of the option `bytes` bytes in each batch."""

    @classmethod
    def name(cls) -> str:
        return "bare"

    def schema(self) -> StructType:
        return INPUT_SCHEMA

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return BareReader(int(self.options["bytes"]))


class BareReader(DataSourceStreamReader):
    def __init__(self, size: int) -> None:
        self._size = size

    def initialOffset(self) -> dict[str, Any]:
        return {"batch": 0}

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        return {"batch": start["batch"] + 1}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return [InputPartition(end["batch"])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        columns = [pa.array([0], pa.int32()), pa.array(["bare"]), pa.array([b"x" * self._size])]
        yield pa.RecordBatch.from_arrays(columns, schema=to_arrow_schema(INPUT_SCHEMA))


class BareProcessor(StatefulProcessor):
    def init(self, handle: StatefulProcessorHandle) -> None:
        self._state = handle.getMapState("bare", _KEY, _VALUE)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        bodies = [bytes(row.body) for row in rows]
        if self._state.containsKey(("last",)):
            self._state.getValue(("last",))
        self._state.updateValue(("last",), (bodies[-1],))
        for body in bodies:
            yield Row(*_OUTPUT.names)(key[0], body)


class ThisProcess:
    """This process and its children, in place of a job."""

    process = psutil.Process()

    def children(self) -> list[psutil.Process]:
        return self.process.children(recursive=True)


def used(job: Job | ThisProcess) -> dict[str, float]:
    return cpu_seconds(job)  # type: ignore[arg-type]


def a_batch(before: dict[str, float], after: dict[str, float], batches: int, seconds: float) -> dict[str, Any]:
    spent = {name: (value - before.get(name, 0.0)) / batches * 1e3 for name, value in after.items()}
    return {
        "batches": batches,
        "millis": round(seconds / batches * 1e3, 1),
        "cpu_millis": round(sum(spent.values()), 1),
        "cpu_millis_by_process": {name: round(value, 1) for name, value in spent.items() if value >= 0.1},
    }


def stage(
    spark: SparkSession, name: str, folder: Path, seconds: float, size: int, sink: Callable[[DataFrame, int], None]
) -> dict[str, Any]:
    """Runs the query of a stage; returns what a batch of it costs."""
    n = 0

    def count(batch: DataFrame, number: int) -> None:
        nonlocal n
        sink(batch, number)
        n += 1

    rows = spark.readStream.format("bare").option("bytes", size).load()
    if name != "source":
        rows = rows.groupBy("shard").transformWithState(BareProcessor(), _OUTPUT, "Append", "None")
    query = (
        rows.writeStream.foreachBatch(count)
        .option("checkpointLocation", str(folder / name))
        .trigger(processingTime="0 seconds")
        .start()
    )
    try:
        time.sleep(WARM_UP_SECONDS)
        before, began, first = used(ThisProcess()), time.monotonic(), n
        time.sleep(seconds)
        return a_batch(before, used(ThisProcess()), n - first, time.monotonic() - began)
    finally:
        query.stop()


def drop(batch: DataFrame, number: int) -> None:
    """Brings the batch to the driver, and keeps nothing of it."""
    batch.toArrow()


def whole_job(folder: Path, broker: PulsarSettings, seconds: float) -> dict[str, Any]:
    """Returns what a batch of the job costs."""
    source = f"{NAMESPACE}/skeleton"
    job = Job(folder, broker, [{"source": source, "subscriptions": [{"name": "a"}]}], tracker={"shards": 1})
    try:
        job.start()
        length = WARM_UP_SECONDS + seconds + 5
        producer = multiprocessing.Process(target=produce, args=(broker, source, RATE, length, False))
        producer.start()
        time.sleep(WARM_UP_SECONDS)
        before, began, reports = used(job), time.monotonic(), len(job.progress)
        time.sleep(seconds)
        took, since = time.monotonic() - began, job.progress[reports:]
        batches = round(sum(report["batches_per_second"] for report in since) / len(since) * took)
        found = a_batch(before, used(job), batches, took)
        producer.join()
        return found
    finally:
        job.stop()


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 30
    size = int(sys.argv[2]) if len(sys.argv) > 2 else 96_000
    found: dict[str, Any] = {"benchmark": "skeleton", "seconds": seconds, "bytes": size}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        broker = EmbeddedBroker(folder / "broker")
        broker.start(port=0, http_port=0)
        try:
            found["job"] = whole_job(folder, broker.settings, seconds)
        finally:
            broker.kill()
        settings = Settings.model_validate({"tracker": {"shards": 1}, "routes": []})
        spark = create_session(settings, "skeleton")
        spark.dataSource.register(BareSource)

        def write(batch: DataFrame, number: int) -> None:
            write_deltalake(folder / "table", batch.toArrow(), mode="append")

        for one, sink in (("source", drop), ("state", drop), ("sink", write)):
            found[one] = stage(spark, one, folder, seconds, size, sink)
        spark.stop()
    job = found["job"]["cpu_millis"]
    found["share_of_the_job"] = {one: round(found[one]["cpu_millis"] / job, 2) for one in ("source", "state", "sink")}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
