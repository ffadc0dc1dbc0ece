"""The rows that Spark passes to the stateful operator, and gets from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructField, StructType

if TYPE_CHECKING:
    pass

# A row is a part of a shard's input: the clock's tick as JSON, or messages packed.
INPUT_SCHEMA = StructType(
    [
        StructField("shard", IntegerType(), False),
        StructField("kind", StringType(), False),
        StructField("body", BinaryType(), False),
    ]
)

# A row is a part of what a shard does.
OUTPUT_SCHEMA = StructType(
    [
        StructField("shard", IntegerType(), False),
        StructField("kind", StringType(), False),
        StructField("tick", LongType(), False),
        StructField("body", BinaryType(), False),
    ]
)
