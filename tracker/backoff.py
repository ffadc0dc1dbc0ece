"""How long a message that a consumer failed on waits before it is delivered again."""

from __future__ import annotations

import hashlib
from typing import NamedTuple


class Backoff(NamedTuple):
    """How a subscription's messages are retried.

    Attributes:
        first_millis: how long the first retry waits.
        factor: how many times longer each further one waits than the one before.
        max_millis: the longest wait.
        jitter: the part of a wait, 0 to 1, by which it may be longer or shorter.
        attempts: how many retries a message gets; the next one goes to the dead letters.
    """

    first_millis: int = 10_000
    factor: float = 2.0
    max_millis: int = 3_600_000
    jitter: float = 0.1
    attempts: int = 5

    def wait_millis(self, attempt: int, message: str) -> int:
        """Returns how long a retry waits, ms.

        Args:
            attempt: its number, from 1.
            message: names message and subscription: with the number it decides the jitter, so that a batch which is
                replayed decides the same.
        """
        wait = float(self.first_millis)
        for _ in range(attempt - 1):
            wait = min(wait * self.factor, float(self.max_millis))
            if wait == self.max_millis:
                break
        digest = hashlib.blake2b(f"{message} {attempt}".encode(), digest_size=8).digest()
        spread = int.from_bytes(digest, "little") / 2**63 - 1
        return min(round(wait * (1 + self.jitter * spread)), self.max_millis)


DEFAULT_BACKOFF = Backoff()
