"""Imports modules that Spark imports at their first use: earlier, and without pandas."""

from __future__ import annotations

from conf.arrow import without_pandas


def import_without_pandas() -> None:
    """Imports the module by which Spark finds out whether numpy is installed, with pandas hidden.

    A driver imports it at its first call to the JVM, and a worker when it writes its first value to the state. It is a
    module for tests, and imports pandas, too: 0.4 CPU seconds and 26 MiB, after the fork and so for each worker.
    """
    with without_pandas():
        import pyspark.sql.streaming.proto.StateMessage_pb2
        import pyspark.testing.utils  # noqa: F401
