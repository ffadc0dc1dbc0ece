"""Spark's schemas of the stateful operator's input and output: `streaming.batch_schema` says what is in them.

Planning processes import this module, so it imports no more than Spark's types.
"""

from __future__ import annotations

from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructField, StructType

# A row of a shard's input, see `streaming.batch_schema.InputKind`. `shard` is Spark's key of the shard.
INPUT_SCHEMA = StructType(
    [
        StructField("shard", IntegerType(), False),
        StructField("kind", StringType(), False),
        StructField("body", BinaryType(), False),
    ]
)

# A row of a shard's output, see `streaming.batch_schema.OutputKind`. `shard` is its number, from 0 on.
OUTPUT_SCHEMA = StructType(
    [
        StructField("shard", IntegerType(), False),
        StructField("kind", StringType(), False),
        StructField("tick", LongType(), False),
        StructField("body", BinaryType(), False),
    ]
)
