"""Stands for the producer of messages whose schema the destination refuses: each of them is rejected alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import pulsar


class _Result(NamedTuple):
    name: str


class RefusingProducer:
    """Takes no message. It has what a `Line` needs of `pulsar.Producer`.

    Args:
        why: why the destination refuses, one line; names destination and schema.
    """

    def __init__(self, why: str) -> None:
        self._why = why
        self._producer = self

    def send_async(self, message: Any, callback: Any) -> NoReturn:
        """Refuses a message.

        Raises:
            pulsar.IncompatibleSchema: always.
        """
        raise pulsar.IncompatibleSchema(self._why)

    def flush_async(self, callback: Callable[[Any], None]) -> None:
        """Calls back at once: nothing is under way."""
        callback(_Result("Ok"))

    def last_sequence_id(self) -> int:
        """Returns -1: the broker was not asked."""
        return -1

    def close(self) -> None:
        """Does nothing."""
