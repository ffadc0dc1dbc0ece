"""What is rejected, by docs/guarantees.md, messages.md and scheduling-over-http.md alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from tests.simulation.accounts import BrokenGuaranteeError, require
from tests.simulation.expected import Expected

# What becomes of a message with a request id: whether it is rejected, and how the reason begins.
_SCHEDULED = {"APPLIED": "", "ALREADY_APPLIED": "a repetition of", "INVALID": "another message,"}


class Rejected:
    """The accounts of rejected messages: each is in the table once, and in its source's topic of rejects once.

    Args:
        expected: all messages, by position.
    """

    def __init__(self, expected: Mapping[str, Expected]) -> None:
        self._expected = expected
        self._recorded: Counter[str] = Counter()
        self._put_aside: Counter[str] = Counter()
        self._put_aside_at: dict[str, int] = {}  # the last time, ms since the epoch
        self._answers: dict[str, str] = {}  # by position of a message with a request id
        self._may_be_again: set[str] = set()  # positions that the table of a restored backup had
        self._are_twice: set[str] = set()  # those of them that are rejected again
        self._may_repeat: set[str] = set()  # positions that the topic had at a rebuild, and the table did not
        self.n_rebuilds = 0
        self.n_repeated = 0  # positions that the topic has twice, as it may

    def recorded(self, position: str, reason: str, payload: bytes | None) -> None:
        """A row of `rejects` is in the table for good."""
        message = self._expected.get(position)
        if message is None or not message.rejected_for:
            raise BrokenGuaranteeError(f"{position} is rejected: {reason}")
        require(message.rejected_for in reason, f"{position} is rejected for {reason}, not {message.rejected_for}")
        require(payload is None or not message.is_left_out, f"{position} is left out, and `rejects` has its payload")
        self._recorded[position] += 1
        if self._recorded[position] > 1 and position in self._may_be_again:
            self._may_be_again.remove(position)
            self._are_twice.add(position)
            self._recorded[position] = 1
        require(self._recorded[position] == 1, f"{position} is in `rejects` twice")

    def put_aside(self, position: str, now: int) -> None:
        """A message is in a topic of rejects, since now, ms since the epoch."""
        self._put_aside_at[position] = now
        message = self._expected.get(position)
        is_rejected = message is not None and bool(message.rejected_for) and not message.is_left_out
        require(is_rejected, f"{position} is in the topic of rejects")
        self._put_aside[position] += 1
        if self._put_aside[position] > 1 and position in self._may_repeat:
            self._may_repeat.remove(position)
            self._put_aside[position] = 1
            self.n_repeated += 1
        require(self._put_aside[position] == 1, f"{position} is in the topic of rejects twice")

    def replaced(self, positions: list[str]) -> None:
        """A rebuild has written the table anew, with the rows of these positions."""
        self._recorded = Counter(positions)
        self._recorded -= Counter(self._are_twice & self._recorded.keys())

    def rebuilt(self) -> None:
        """The checkpoint was rebuilt: what comes again, and only the topic has, is put aside again."""
        self.n_rebuilds += 1
        self._may_repeat |= {position for position in self._put_aside if not self._recorded[position]}

    def restored_elsewhere(self) -> None:
        """A backup is the warehouse now, with another broker: what came in its last minutes is rejected again."""
        self._may_repeat |= self._put_aside.keys()
        self._may_be_again = {*self._recorded}

    def producers_forgotten(self, since: int) -> None:
        """The broker has forgotten the job's producers: what they have sent since a time may be put aside again."""
        self._may_repeat |= {position for position, at in self._put_aside_at.items() if at >= since}

    def answered(self, row: Mapping[str, Any]) -> None:
        """A message with a request id is answered in `outcomes`."""
        position, result = row["position"], row["result"]
        message = self._expected.get(position)
        what = f"SCHEDULE {position}: {result}"
        if message is None or "requestId" not in message.properties:
            raise BrokenGuaranteeError(what)
        # After a rebuild what is not durable comes again, and is answered alike.
        is_again = position in self._answers and not (self.n_rebuilds and self._answers[position] == result)
        require(not is_again, f"{what}, and {self._answers.get(position)} before")
        is_right = result in _SCHEDULED and message.rejected_for.startswith(_SCHEDULED[result] or " ")
        require(is_right or (result == "APPLIED" and not message.rejected_for), f"{what}, not {message.rejected_for}")
        if result == "ALREADY_APPLIED":
            require(f" {row['superseded_by']}:" in message.rejected_for, f"{what} of {row['superseded_by']}")
        self._answers[position] = result

    def check_end(self) -> None:
        """Nothing waits any more."""
        for position, message in self._expected.items():
            if message.rejected_for:
                require(self._recorded[position] == 1, f"{position} is not in the table of rejects")
                is_put_aside = message.is_left_out or self._put_aside[position] == 1
                require(is_put_aside, f"{position} is not in the topic of rejects")
            if message.properties.get("requestId"):
                require(position in self._answers, f"{position} has a request id, and no answer")
