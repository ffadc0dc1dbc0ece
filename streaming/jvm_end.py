"""Says why Spark's JVM has ended, and what to do."""

from __future__ import annotations

from pathlib import Path

LOG = "spark.log"  # in the checkpoint's folder

_READ_BYTES = 1 << 20  # of the log's end
_HEAP = "spark.driver.memory"
_DEFAULT_HEAP = "1g"


class JvmLog:
    """The log of Spark's JVM, from now on.

    Args:
        folder: of the checkpoint.
        heap: the setting spark.driver.memory; empty: Spark's default.
    """

    def __init__(self, folder: Path, heap: str = "") -> None:
        self._folder = folder
        self._heap = heap or _DEFAULT_HEAP
        self._begin = self._size()

    def why_ended(self, error: BaseException) -> str:
        """Returns one line that says why the JVM has ended.

        Args:
            error: with which the connection to it was lost.
        """
        if b"java.lang.OutOfMemoryError" in self._written():
            return (
                f"Spark's JVM has run out of memory, with a heap of {self._heap}: give it more, with "
                f"`spark: {{conf: {{{_HEAP}: 4g}}}}` in the settings, and start again; nothing is lost"
            )
        return f"Spark's JVM has ended ({error}): its log is {LOG} in {self._folder}"

    def _size(self) -> int:
        try:
            return (self._folder / LOG).stat().st_size
        except OSError:
            return 0

    def _written(self) -> bytes:
        size = self._size()
        begin = self._begin if self._begin <= size else 0  # else the log has been made again
        try:
            with (self._folder / LOG).open("rb") as log:
                log.seek(max(begin, size - _READ_BYTES))
                return log.read(_READ_BYTES)
        except OSError:
            return b""
