"""The figures of a batch, of which the job's status is made."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class BatchStatus:
    """The figures of one batch; counts are summed over the shards."""

    tick: int
    now: int  # ms since the epoch
    lookahead_millis: int = 0  # how long before its time a message is dispatched
    sending: int = 0  # number of releases that are being sent
    counts: dict[str, int] = field(default_factory=dict)  # by name, as `StatusWriter.batch` reads them
    # The latest time that a shaped message has got, ms since the epoch, by source topic and subscription.
    shaped_until: dict[str, dict[str, int]] = field(default_factory=dict)
    paused: dict[str, list[str]] = field(default_factory=dict)  # the paused subscriptions, by source topic
    # By source topic and resumed subscription: how many messages are still parked, and the bytes of their payloads.
    resuming: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    state_memory_bytes: int = 0  # memory that Spark's state store took a few seconds ago, of all shards
    # (source topic, message or command, why) of those that were rejected because something has failed for them.
    failures: list[tuple[str, str, str]] = field(default_factory=list)
    outcome_producer: str = ""  # the name under which the job publishes outcomes
