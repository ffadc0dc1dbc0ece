"""What Spark imports where it is first used, imported before and without pandas."""

from __future__ import annotations

from conf.arrow import without_pandas


def import_without_pandas() -> None:
    """Imports the module that Spark asks whether numpy is there.

    A driver asks at its first call to the JVM, and a worker when it writes its first value to the state. The module is
    one for tests, and looks for pandas, too: 0.4 CPU seconds and 26 MiB, after the fork and so for each worker.
    """
    with without_pandas():
        import pyspark.sql.streaming.proto.StateMessage_pb2
        import pyspark.testing.utils  # noqa: F401
