"""What a producer has sent and the broker has not answered, as a state machine: receipts, errors, and resending.

As Pulsar's clients do it: entries are answered in the order in which they were sent. After a lost connection, or an
error that may pass, all that is not answered is sent again; the broker's deduplication drops what it has.

A message in chunks is sent when all before it is answered, each chunk when the one before is, and what comes after it
when the last one is. The broker's deduplication looks at the last chunk alone: so it is there only if all others are,
and a later message only if it is. A broker that loads a topic again, though, counts each chunk as the whole message.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from broker.client import PulsarError
from broker.protocol.building import Chunks, LargeMessage, OutgoingEntry, send_frame
from broker.protocol.frames import ProtocolError
from broker.protocol.session import RefusedError
from broker.protocol.wire.pulsar_pb2 import SendError, SendReceipt, ServerError

_NO_LEDGER = (1 << 64) - 1  # -1, as an unsigned number

Outgoing = OutgoingEntry | LargeMessage

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

    entry: Outgoing
    error: RefusedError


class PartlySentError(PulsarError):
    """The broker counts a message as published of which it may have some chunks only."""


_TOO_LARGE = RefusedError(ServerError.NotAllowedError, b"keys and properties are too large for an entry")
_DROPS_CHUNKS = RefusedError(
    ServerError.NotAllowedError, b"the broker's deduplication takes chunks for repetitions: Pulsar 3.0.2 mends it"
)


class Sending:
    """The entries of one producer. It makes frames, and takes answers; it has no connection. Not thread-safe.

    Args:
        producer: the producer's name.

    Attributes:
        last_sequence_id: the highest sequence id that has arrived, as far as the broker has said; -1: none.
        repeated_to: the highest sequence id of the last entry that the broker took for a repetition; -1: of none.
        n_answers: how many entries and chunks have been answered.
        max_bytes: the most bytes of an entry, as the broker has said.
        refused: entries that the broker does not take; the caller empties it.
        error: why no more can be sent; None: more can be.
    """

    def __init__(self, producer: bytes = b"") -> None:
        self.producer = producer
        self.last_sequence_id = -1
        self.repeated_to = -1
        self.n_answers = 0
        self.max_bytes = 0
        self.refused: list[RefusedEntry] = []
        self.error: PulsarError | None = None
        self._sent: deque[Outgoing] = deque()  # since the producer was opened last, and not answered
        self._unsent: deque[Outgoing] = deque()
        self._chunks: Chunks | None = None  # of the message in `_sent`, which is the only one there
        self._waits_for_chunk = False  # the last one that was sent is not answered
        self._partly_sent = -1  # the sequence id of a message of which chunks were sent, and not the last one answered
        self._producer_id: int | None = None  # on the connection; None: it is not open

    @property
    def is_open(self) -> bool:
        """Whether the broker takes entries of this producer."""
        return self._producer_id is not None

    @property
    def is_in_chunks(self) -> bool:
        """Whether a message is being sent in chunks, of which some are not answered."""
        return self._chunks is not None

    @property
    def n_pending(self) -> int:
        """The number of entries that are not answered."""
        return len(self._sent) + len(self._unsent)

    @property
    def has_arrived(self) -> bool:
        """Whether everything is answered, and nothing waits in `refused`. It may be read while entries are moved."""
        return not self._sent and not self._unsent and not self.refused

    def open(self, producer_id: int, last_sequence_id: int, max_bytes: int) -> None:
        """Notes that the broker has made the producer; all that is not answered is to be sent again.

        Args:
            producer_id: its id on the connection.
            last_sequence_id: as the broker says; -1: it knows none.
            max_bytes: the most bytes of an entry.
        """
        self.lose()
        if 0 <= self._partly_sent <= last_sequence_id:
            self.refuse(PartlySentError(f"the connection was lost between the chunks of message {self._partly_sent}"))
            return
        self._producer_id = producer_id
        self.max_bytes = max_bytes
        self.last_sequence_id = max(self.last_sequence_id, last_sequence_id)

    def lose(self) -> None:
        """Notes that the broker takes no more entries, until the producer is open again."""
        self._producer_id = None
        self._chunks = None
        self._unsent.extendleft(reversed(self._sent))
        self._sent.clear()

    def send(self, entry: Outgoing) -> None:
        """Takes an entry, for `next_frame`.

        Args:
            entry: its sequence ids are above those of the entries before.
        """
        self._unsent.append(entry)

    def next_frame(self) -> bytes:
        """Returns the next frame to be sent; empty: there is none until something is answered, or it is open again."""
        producer_id = self._producer_id
        if producer_id is None:
            return b""
        if self._chunks is not None:
            return send_frame(producer_id, self._chunks.next_entry()) if self._is_chunk_answered() else b""
        while self._unsent:
            entry = self._unsent[0]
            if isinstance(entry, OutgoingEntry):
                frame = send_frame(producer_id, entry)
            elif entry.is_one_entry(self.max_bytes):
                frame = send_frame(producer_id, entry.whole())
            elif self._sent:
                return b""
            elif not entry.can_be_sent(self.max_bytes):
                self.refused.append(RefusedEntry(entry, _TOO_LARGE))  # first: see `has_arrived`
                self._unsent.popleft()
                continue
            elif entry.sequence_id <= self.last_sequence_id:
                # The broker has it: no policy refuses chunks. It would store all but the last one once more.
                self.repeated_to = entry.sequence_id
                self._unsent.popleft()
                continue
            else:
                self._chunks, self._partly_sent = Chunks(entry, self.producer, self.max_bytes), entry.sequence_id
                self._waits_for_chunk = True
                frame = send_frame(producer_id, self._chunks.next_entry())
            self._sent.append(entry)  # first: see `has_arrived`
            self._unsent.popleft()
            return frame
        return b""

    def _is_chunk_answered(self) -> bool:
        is_answered, self._waits_for_chunk = not self._waits_for_chunk, True
        return is_answered

    def receipt(self, receipt: SendReceipt) -> None:
        """Takes the broker's word that an entry has arrived.

        Raises:
            ProtocolError: it is for an entry that was sent after others, of which the broker has said nothing.
        """
        if not self._is_first(receipt.sequence_id):
            return
        self.n_answers += 1
        is_repeated = receipt.id.ledger_id == _NO_LEDGER
        if self._chunks is not None and is_repeated:
            self.refuse(_DROPS_CHUNKS)  # also at the last one: nothing says that the message has arrived
            return
        if self._chunks is not None and not self._chunks.is_last_sent:
            self._waits_for_chunk = False
            return
        entry = self._sent.popleft()
        self._chunks, self._partly_sent = None, -1
        self.last_sequence_id = max(self.last_sequence_id, entry.highest_sequence_id)
        if is_repeated:
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
                self.refused.append(RefusedEntry(self._sent[0], error))  # first: see `has_arrived`
                self._sent.popleft()
                self._chunks, self._partly_sent = None, -1
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
        if not self._sent or sequence_id < self._sent[0].sequence_id:
            return False
        if sequence_id not in (self._sent[0].sequence_id, self._sent[0].highest_sequence_id):
            raise ProtocolError(
                f"the broker answers the sequence id {sequence_id}, and not {self._sent[0].sequence_id} before it"
            )
        return True
