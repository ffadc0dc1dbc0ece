"""The schemas of the stateful operator's input and output."""

from __future__ import annotations

from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructField, StructType

# A row is a part of a shard's input, see `streaming.operator_input.InputKind`. `shard` is Spark's key of the shard.
INPUT_SCHEMA = StructType(
    [
        StructField("shard", IntegerType(), False),
        StructField("kind", StringType(), False),
        StructField("body", BinaryType(), False),
    ]
)

# A row is a part of a shard's output, see `streaming.operator.processor.OutputKind`. `shard` is its number, from 0 on.
OUTPUT_SCHEMA = StructType(
    [
        StructField("shard", IntegerType(), False),
        StructField("kind", StringType(), False),
        StructField("tick", LongType(), False),
        StructField("body", BinaryType(), False),
    ]
)
