"""Forks Spark's Python workers from a process that has imported what they need.

A dozen workers run as soon as releases overlap. Each would otherwise import Arrow and the Pulsar client itself, which
takes longer than the lookahead. No Pulsar client is made here: a client that is made before a fork hangs.
"""

import faulthandler
import gc
import signal

import pyspark.sql.streaming.stateful_processor_api_client
import pyspark.worker  # noqa: F401
from pyspark.daemon import manager

import streaming.entry_points
import streaming.operator.processor
import streaming.release.task.can_write
import streaming.release.task.sender
import streaming.source.reader  # noqa: F401
from streaming.spark_imports import forget_jars, import_without_pandas

import_without_pandas()
forget_jars()

if __name__ == "__main__":
    # A worker collects garbage after each task: to look through imported modules, too, would take longer than the task.
    gc.collect()
    gc.freeze()
    faulthandler.register(signal.SIGUSR1, 2)
    manager()
