"""Imports modules before Spark does at their first use, and without pandas."""

from __future__ import annotations

from conf.arrow import without_pandas


def import_without_pandas() -> None:
    """Imports, with pandas hidden, the module that tells Spark whether numpy is installed.

    A driver imports this module at its first call to the JVM, a worker when it writes its first value to the state. The
    module is for tests and imports pandas, too: 0.4 CPU seconds and 26 MiB for each worker, because it is after the
    fork.
    """
    with without_pandas():
        import pyspark.sql.streaming.proto.StateMessage_pb2
        import pyspark.testing.utils  # noqa: F401
