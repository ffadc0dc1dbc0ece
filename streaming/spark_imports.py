"""Imports modules before Spark does at their first use, and without pandas; keeps Spark's JAR out of imports."""

from __future__ import annotations

import sys
import zipimport

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


def forget_jars() -> None:
    """Takes JARs from the path on which Python looks for modules.

    Spark puts one of its own there. Python keeps the list of the 6,000 files in it, which takes 10 MiB, and each worker
    reads it again at its first task.
    """
    sys.path[:] = [path for path in sys.path if not _is_in_jar(path)]
    for path in filter(_is_in_jar, list(sys.path_importer_cache)):  # also of folders in it
        del sys.path_importer_cache[path]
        getattr(zipimport, "_zip_directory_cache", {}).pop(path, None)


def _is_in_jar(path: str) -> bool:
    return path.endswith(".jar") or ".jar/" in path
