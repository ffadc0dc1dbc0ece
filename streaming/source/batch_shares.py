"""Shares a batch's room among the topic partitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from broker.position import START, Position
from conf.settings import Settings
from streaming.release.feedback import Feedback
from streaming.source.receivers import MAX_COMMAND_BYTES
from tracker.schemas import MAX_ANSWERS

# About how many bytes are loaded, or dispatched and not recorded, before batches take in less; and by how much
# less at most: so that a topic with little goes on. With so many times as much they take nothing.
MAX_DISPATCHED_BYTES = 128 << 20
_LEAST_PART = 16
_MOST_DISPATCHED = 2


class Source(Protocol):
    """As much of a receiver as is needed here."""

    @property
    def waiting_bytes(self) -> int:
        """About the bytes of the messages that are in no batch yet."""

    def take_into_batch(
        self, max_messages: int, max_bytes: int, up_to: Position | None = None
    ) -> tuple[Position, int, int]:
        """Takes messages into a batch: see `Receiver.take_into_batch`."""


class Waiting(NamedTuple):
    """A topic partition with messages for a batch."""

    name: str
    receiver: Source
    is_control: bool


def is_too_much(feedback: Feedback) -> bool:
    """Whether so many bytes are on their way to the senders that batches take in nothing."""
    return feedback.in_flight_bytes > _MOST_DISPATCHED * MAX_DISPATCHED_BYTES


class BatchShares:
    """Takes messages into a batch, up to its size.

    Commands come first, and then the topic partitions with little: these get all of it, and what they leave is shared
    among the others. Of these, those that got nothing in earlier batches, because a batch was full, come first.

    Args:
        settings: of the job.
    """

    def __init__(self, settings: Settings) -> None:
        self._limits = settings.ingest
        self._subscriptions = max((len(route.subscriptions) for route in settings.routes), default=1)
        self._last_taken: dict[str, int] = {}  # by topic partition the last batch that took messages of it

    def take(
        self,
        tick: int,
        receivers: list[Waiting],
        commands: Mapping[str, Position],
        command_partitions: int,
        feedback: Feedback,
    ) -> dict[str, Position]:
        """Takes messages into a batch.

        Args:
            tick: of the batch.
            receivers: those of which the batch takes messages.
            commands: the last entry to take of each partition of the control topic.
            command_partitions: the number of partitions of the control topic.
            feedback: of the driver.

        Returns:
            by topic partition the last entry that is in a batch now.
        """
        messages, n_bytes = self._limits.max_messages_per_batch, self._max_bytes(feedback)
        share = n_bytes // max(1, len(receivers))

        def turn(one: Waiting) -> tuple[bool, bool, int, int]:
            n = one.receiver.waiting_bytes
            return not one.is_control, n > share, self._last_taken.get(one.name, 0), n

        ends: dict[str, Position] = {}
        for left, one in zip(range(len(receivers), 0, -1), sorted(receivers, key=turn), strict=True):
            most = self._max_command_bytes(command_partitions) if one.is_control else n_bytes
            room = (max(1, messages // left), max(1, min(n_bytes // left, most))) if messages > 0 < n_bytes else (0, 0)
            end, n, size = one.receiver.take_into_batch(*room, commands.get(one.name))
            messages, n_bytes = messages - n, n_bytes - size
            if n:
                self._last_taken[one.name] = tick
            if end != START:
                ends[one.name] = end
        return ends

    def _max_bytes(self, feedback: Feedback) -> int:
        """Returns about how many bytes a batch takes in: less where many are on their way to the senders."""
        most = self._limits.max_bytes_per_batch
        on_their_way = feedback.in_flight_bytes + feedback.large_bytes
        return max(most // _LEAST_PART, min(most, MAX_DISPATCHED_BYTES - on_their_way))

    def _max_command_bytes(self, partitions: int) -> int:
        """Returns the most bytes that a batch takes of each partition of the control topic.

        A byte can name a message. So entries of the control topic that do not fit together come in several batches.
        """
        return min(MAX_COMMAND_BYTES, MAX_ANSWERS // (max(1, partitions) * max(1, self._subscriptions)))
