"""What a producer has sent and the broker has not answered, as a state machine: receipts, errors, and resending.

As Pulsar's clients do it: entries are answered in the order in which they were sent. After a lost connection, or an
error that may pass, all that is not answered is sent again; the broker's deduplication drops what it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from broker.client import PulsarError
from broker.protocol.building import OutgoingEntry, send_frame
from broker.protocol.frames import ProtocolError
from broker.protocol.session import RefusedError
from broker.protocol.wire.pulsar_pb2 import SendError, SendReceipt, ServerError

_NO_LEDGER = (1 << 64) - 1  # -1, as an unsigned number

# Errors with which a broker refuses what is asked of it, so that it is no use to wait and to ask again.
REFUSALS = frozenset(
    {
        ServerError.TopicTerminatedError,
        ServerError.ProducerBlockedQuotaExceededError,
        ServerError.ProducerBlockedQuotaExceededException,
        ServerError.AuthenticationError,
        ServerError.AuthorizationError,
        ServerError.IncompatibleSchema,
        ServerError.TopicNotFound,
        ServerError.InvalidTopicName,
        ServerError.NotAllowedError,
        ServerError.ProducerFenced,
        ServerError.UnsupportedVersionError,
    }
)


def is_refusal(error: Exception) -> bool:
    """Whether a broker has refused, so that it is no use to ask again."""
    return isinstance(error, RefusedError) and error.error in REFUSALS


class RefusedEntry(NamedTuple):
    """An entry that the broker does not take, while it takes those after it."""

    entry: OutgoingEntry
    error: RefusedError


class Sending:
    """The entries of one producer. It makes frames, and takes answers; it has no connection. Not thread-safe.

    Attributes:
        last_sequence_id: the highest sequence id that has arrived, as far as the broker has said; -1: none.
        repeated_to: the highest sequence id of the last entry that the broker took for a repetition; -1: of none.
        refused: entries that the broker does not take; the caller empties it.
        error: why no more can be sent; None: more can be.
    """

    def __init__(self) -> None:
        self.last_sequence_id = -1
        self.repeated_to = -1
        self.refused: list[RefusedEntry] = []
        self.error: PulsarError | None = None
        self._pending: deque[OutgoingEntry] = deque()
        self._producer_id: int | None = None  # on the connection; None: it is not open

    @property
    def is_open(self) -> bool:
        """Whether the broker takes entries of this producer."""
        return self._producer_id is not None

    @property
    def n_pending(self) -> int:
        """The number of entries that are not answered."""
        return len(self._pending)

    @property
    def has_arrived(self) -> bool:
        """Whether everything is answered, and nothing waits in `refused`."""
        return not self._pending and not self.refused

    def open(self, producer_id: int, last_sequence_id: int) -> Iterator[bytes]:
        """Notes that the broker has made the producer; yields frames of what has to be sent again.

        Args:
            producer_id: its id on the connection.
            last_sequence_id: as the broker says; -1: it knows none.
        """
        self._producer_id = producer_id
        self.last_sequence_id = max(self.last_sequence_id, last_sequence_id)
        return (send_frame(producer_id, entry) for entry in self._pending)

    def lose(self) -> None:
        """Notes that the broker takes no more entries, until the producer is open again."""
        self._producer_id = None

    def send(self, entry: OutgoingEntry) -> bytes:
        """Returns the frame of an entry; empty: it is sent when the producer is open again.

        Args:
            entry: its sequence ids are above those of the entries before.
        """
        self._pending.append(entry)
        return b"" if self._producer_id is None else send_frame(self._producer_id, entry)

    def receipt(self, receipt: SendReceipt) -> None:
        """Takes the broker's word that an entry has arrived.

        Raises:
            ProtocolError: it is for an entry that was sent after others, of which the broker has said nothing.
        """
        if not self._is_first(receipt.sequence_id):
            return
        entry = self._pending.popleft()
        self.last_sequence_id = max(self.last_sequence_id, entry.highest_sequence_id)
        if receipt.id.ledger_id == _NO_LEDGER:
            self.repeated_to = entry.highest_sequence_id

    def fail(self, answer: SendError) -> bool:
        """Takes the broker's word that it does not take an entry.

        Returns:
            whether the producer has to be opened again, after which all is sent again.

        Raises:
            ProtocolError: as of `receipt`.
        """
        error = RefusedError(answer.error, answer.message)
        if answer.error == ServerError.NotAllowedError:
            # The topic's policies have a smaller largest size. The broker takes what comes after it.
            if self._is_first(answer.sequence_id):
                self.refused.append(RefusedEntry(self._pending[0], error))  # first: see `has_arrived`
                self._pending.popleft()
            return False
        if is_refusal(error):
            self.refuse(error)
            return False
        return True

    def refuse(self, error: PulsarError) -> None:
        """Notes that the broker takes nothing more."""
        self.error = self.error or error
        self._producer_id = None

    def _is_first(self, sequence_id: int) -> bool:
        """Whether an answer is for the first entry that waits for one; False: that entry was answered before.

        Args:
            sequence_id: the entry's first or highest.
        """
        if not self._pending or sequence_id < self._pending[0].sequence_id:
            return False
        if sequence_id not in (self._pending[0].sequence_id, self._pending[0].highest_sequence_id):
            raise ProtocolError(
                f"the broker answers the sequence id {sequence_id}, and not {self._pending[0].sequence_id} before it"
            )
        return True
