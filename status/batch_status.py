"""What the job tells of a batch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class BatchStatus:
    """A batch, as the shards tell it: their counts added up."""

    tick: int
    now: int
    lookahead_millis: int = 0
    sending: int = 0  # releases that are being sent
    counts: dict[str, int] = field(default_factory=dict)
