"""Stands for the producer of messages whose schema the destination refuses: each of them is rejected alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from broker.client import PulsarError
from broker.protocol.sending import Outgoing, RefusedEntry


class NotTakenError(PulsarError):
    """A destination does not take a message."""


class RefusingProducer:
    """Takes no message. It has what a `Line` needs of `EntryProducer`.

    Args:
        why: why the destination refuses, one line; names destination and schema.
    """

    name = b""
    schema_version = b""
    is_open = True
    error: PulsarError | None = None
    last_sequence_id = -1  # the broker was not asked
    repeated_to = -1
    n_pending = 0
    n_answers = 0
    is_in_chunks = False
    max_message_bytes = 0
    has_arrived = True

    def __init__(self, why: str) -> None:
        self._why = why

    def send(self, entry: Outgoing, is_more: bool = False) -> NoReturn:
        """Refuses an entry.

        Raises:
            NotTakenError: always.
        """
        raise NotTakenError(f"IncompatibleSchema: {self._why}")

    def flush(self) -> None:
        """Does nothing."""

    def take_refused(self) -> list[RefusedEntry]:
        """Returns nothing: no entry was sent."""
        return []

    def close(self) -> Callable[[float], None]:
        """Does nothing."""
        return lambda seconds: None
