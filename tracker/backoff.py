"""The backoff of retries: how long a message on which a consumer failed waits until it is delivered again."""

from __future__ import annotations

import hashlib
from typing import NamedTuple


class Backoff(NamedTuple):
    """How a subscription's messages are retried.

    Attributes:
        first_millis: wait before the first retry, ms.
        factor: each further retry waits this many times longer than the previous one.
        max_millis: the longest wait, ms.
        jitter: fraction of a wait, 0 to 1, by which it may be longer or shorter.
        attempts: how many retries a message gets; a further one goes to the dead letters.
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
            message: any text that names message and subscription. It seeds the jitter, so that a replayed batch gets
                the same wait.
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
