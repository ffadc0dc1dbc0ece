"""What must become of each message, by docs/guarantees.md alone: an account of its own, without code of the job."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pyarrow as pa


class BrokenGuaranteeError(AssertionError):
    """Something is not as docs/guarantees.md says."""


@dataclass
class Expected:
    """A message that a source topic has.

    Attributes:
        due: when it is due at the earliest, ms since the epoch.
        subscriptions: who gets it.
    """

    due: int
    subscriptions: frozenset[str]
    is_rejected: bool = False


@dataclass
class Oracle:
    """The accounts of all messages, by position as the property `delaylake.messageId` has it.

    Attributes:
        now: returns the time by the clock of the world, ms since the epoch.
    """

    now: Callable[[], int]
    expected: dict[str, Expected] = field(default_factory=dict)
    came: Counter[tuple[str, str]] = field(default_factory=Counter)  # (position, subscription)
    durable: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # by table; what no crash takes
    recorded: Counter[tuple[str, str]] = field(default_factory=Counter)  # rows of `deliveries`
    acknowledged: int = 0
    latest: int = 0  # by how many ms a message came late

    def sent(self, position: str, expected: Expected) -> None:
        """A message is in a source topic."""
        self.expected[position] = expected

    def arrived(self, position: str, subscription: str) -> None:
        """A message has come to a destination: never early, and once."""
        if (message := self.expected.get(position)) is None:
            raise BrokenGuaranteeError(f"{subscription} has got {position}, which nobody has sent")
        if subscription not in message.subscriptions or message.is_rejected:
            raise BrokenGuaranteeError(f"{subscription} has got {position}, which is not for it")
        if self.now() < message.due:
            raise BrokenGuaranteeError(f"{subscription} has got {position} {message.due - self.now()} ms early")
        self.latest = max(self.latest, self.now() - message.due)
        self.came[position, subscription] += 1
        if self.came[position, subscription] > 1:
            raise BrokenGuaranteeError(f"{subscription} has got {position} twice")

    def stored(self, table: str, rows: pa.Table) -> None:
        """Rows are in a table, and no loss of power takes them."""
        if table in ("delayed_index", "entries", "rejects", "deliveries"):
            names = ("ledger_id", "entry_id")
            for ledger, entry in zip(*(rows[name].to_pylist() for name in names), strict=True):
                self.durable[table].add(f"{ledger}:{entry}")
        if table == "rejects" and rows.num_rows:
            raise BrokenGuaranteeError(f"{rows['position'][0]} is rejected: {rows['reason'][0]}")
        if table == "deliveries":
            for position, name in zip(rows["position"].to_pylist(), rows["subscription"].to_pylist(), strict=True):
                self.recorded[position, name] += 1
                if not self.came[position, name]:
                    raise BrokenGuaranteeError(f"`deliveries` says of {position} that {name} has it")
                if self.recorded[position, name] > 1:
                    raise BrokenGuaranteeError(f"`deliveries` has {position} of {name} twice")

    def acknowledged_to(self, entries: Iterable[str]) -> None:
        """Entries of a source topic are acknowledged: the broker may delete them."""
        for entry in entries:
            self.acknowledged += 1
            kept = self.durable["delayed_index"] | self.durable["rejects"] | self.durable["deliveries"]
            if entry not in kept:
                raise BrokenGuaranteeError(f"{entry} is acknowledged, and no table has it for good")
            if entry not in self.durable["entries"]:
                raise BrokenGuaranteeError(f"{entry} is acknowledged, and `entries` does not have it for good")

    def missing(self) -> list[tuple[str, str]]:
        """What has not come, as (position, subscription)."""
        return [
            (position, name)
            for position, message in self.expected.items()
            for name in sorted(message.subscriptions)
            if not message.is_rejected and not self.came[position, name]
        ]

    def check_end(self, n_acknowledged: int) -> None:
        """Some time after the last fault, and after all was due: nothing waits any more."""
        if missing := self.missing():
            raise BrokenGuaranteeError(f"{len(missing)} have not come, as {missing[0]}")
        if left := [key for key in self.came if not self.recorded[key]]:
            raise BrokenGuaranteeError(f"{len(left)} have come and are not in `deliveries`, as {left[0]}")
        if n_acknowledged < len({position.rpartition(":")[0] for position in self.expected}):
            raise BrokenGuaranteeError(f"only {n_acknowledged} entries are acknowledged")
