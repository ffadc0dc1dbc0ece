"""A small query, the same on Spark and on what stands in for it. It notes what it is asked, and ends where it is told.

As a program, `python -m tests.simulation.spark_script FOLDER N WHAT NUMBER`, it runs on Spark until it is killed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, Row
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import to_arrow_schema

from conf.settings import Settings
from streaming.batch_schema import shard_keys
from streaming.entry_points import DelayedDeliveryProcessor, DelayedDeliveryReader, DelayedDeliverySource
from streaming.operator.schemas import INPUT_SCHEMA, OUTPUT_SCHEMA
from streaming.query import source_rows
from streaming.session import create_session

KEYS = shard_keys(2)
POINTS = ("next", "read", "apply", "sink begins", "sink ends", "commit")
_output = Row(*OUTPUT_SCHEMA.names)
_KEPT = ("n", 0, 0)


@dataclass
class Part(InputPartition):
    """The input of a batch."""

    number: int


class Script:
    """Notes what the query does.

    Args:
        folder: gets the file `told`, with a line for each of the events that are compared.
        n: the number of batches.
        crash: the point at which the query ends, and in which batch.
        stand_still: called there.
    """

    def __init__(self, folder: Path, n: int, crash: tuple[str, int], stand_still: Callable[[], None]) -> None:
        self._folder, self.n, self._crash, self._stand_still = folder, n, crash, stand_still

    def tell(self, what: str) -> None:
        with (self._folder / "told").open("a") as file:
            file.write(what + "\n")

    def reach(self, point: str, number: int) -> None:
        if (point, number) == self._crash:
            (self._folder / "stands").touch()
            self._stand_still()


class ScriptReader:
    """A source of which each batch has a row for each shard."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def initial_offset(self) -> dict[str, Any]:
        return {"n": 0}

    def next_offset(self, start: dict[str, Any]) -> dict[str, Any]:
        number = start["n"]
        if number == self._script.n:
            time.sleep(0.05)
            return start
        self._script.reach("next", number)
        self._script.tell(f"next after {number}")
        return {"n": number + 1}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return [Part(end["n"] - 1)] if start != end else []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Part)
        self._script.reach("read", partition.number)
        columns = [KEYS, ["row"] * len(KEYS), [b"%d" % partition.number] * len(KEYS)]
        schema = to_arrow_schema(INPUT_SCHEMA)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    def commit(self, end: dict[str, Any]) -> None:
        self._script.reach("commit", end["n"])
        self._script.tell(f"commit {end['n']}")

    def stop(self) -> None:
        pass


class ScriptOperator:
    """Adds the numbers of batches up, in the state, and tells the sum before and after."""

    def __init__(self, script: Script, state: Any) -> None:
        self._script, self._state = script, state

    def apply(self, key: int, rows: Iterator[Any]) -> Iterator[Any]:
        numbers = [int(bytes(row.body)) for row in rows]
        found = self._state.getValue(_KEPT)
        before = 0 if found is None else int(bytes(found[0]))
        after = before + sum(numbers) + key
        self._state.updateValue(_KEPT, (b"%d" % after,))
        if key == KEYS[-1]:
            self._script.reach("apply", numbers[0])
        if numbers[0] % 5 == 4:
            self._state.removeKey(_KEPT)
        yield _output(key, "sum", numbers[0], b"%d to %d" % (before, after))


def sink_of(script: Script) -> Callable[[Any, int], None]:
    """Returns the function for `foreachBatch`."""

    def sink(batch: DataFrame, number: int) -> None:
        script.reach("sink begins", number)
        found = sorted(batch.toArrow().to_pylist(), key=lambda row: int(row["shard"]))
        script.tell(f"sink {number}: {[(row['shard'], row['tick'], row['body'].decode()) for row in found]}")
        script.reach("sink ends", number)

    return sink


def _script_from(options: list[str]) -> Script:
    def stand_still() -> None:
        time.sleep(3_600)  # it is killed

    return Script(Path(options[0]), int(options[1]), (options[2], int(options[3])), stand_still)


class _Reader(DelayedDeliveryReader):
    @cached_property
    def _reader(self) -> Any:
        return ScriptReader(_script_from(json.loads(self._options["script"])))


class _Source(DelayedDeliverySource):
    def streamReader(self, schema: Any) -> DelayedDeliveryReader:
        return _Reader(self.options)


class _Processor(DelayedDeliveryProcessor):
    def __init__(self, options: list[str]) -> None:
        self._script_options = options

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        yield from ScriptOperator(_script_from(self._script_options), self._state).apply(key[0], rows)


def main(options: list[str]) -> None:
    settings = Settings(
        tracker={"shards": len(KEYS)},  # type: ignore[arg-type]
        spark={  # type: ignore[arg-type]
            "master": "local[2]",
            "conf": {
                "spark.sql.streaming.stateStore.maintenanceInterval": "1s",
                "spark.sql.streaming.stateStore.minDeltasForSnapshot": "4",
            },
        },
    )
    spark = create_session(settings, "script")
    query = (
        source_rows(spark, _Source, {"script": json.dumps(options)})
        .groupBy("shard")
        .transformWithState(_Processor(options), OUTPUT_SCHEMA, "Append", "None")
        .writeStream.foreachBatch(sink_of(_script_from(options)))
        .option("checkpointLocation", str(Path(options[0]) / "query"))
        .trigger(processingTime="0 seconds")
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    # Not the functions of this `__main__`: Spark's processes import the classes by the name of their module.
    from tests.simulation import spark_script

    spark_script.main(sys.argv[1:])
