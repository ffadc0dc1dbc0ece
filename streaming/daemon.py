"""Forks Spark's Python workers from a process that has imported what they need.

There are a dozen of them as soon as releases overlap; each would import Arrow and the Pulsar client anew, which takes
longer than a message has time. No client is made here: one that is made before a fork hangs.
"""

import gc

import pyspark.sql.streaming.stateful_processor_api_client
import pyspark.worker  # noqa: F401
from pyspark.daemon import manager

import streaming.entry_points
import streaming.operator.processor
import streaming.release.task.can_write
import streaming.release.task.sender
import streaming.source.reader  # noqa: F401
from streaming.spark_imports import import_without_pandas

import_without_pandas()

if __name__ == "__main__":
    # After each task a worker collects garbage: not in what has been imported, which takes longer than the task itself.
    gc.collect()
    gc.freeze()
    manager()
