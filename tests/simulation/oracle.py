"""What must become of each message, by docs/guarantees.md alone: an account of its own, without code of the job.

What commands change is in `accounts.py`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pyarrow as pa

from tests.simulation.accounts import Accounts, BrokenGuaranteeError
from tracker.wire.delaylake_pb2 import ControlOutcome, Result


@dataclass
class Expected:
    """A message that a source topic has.

    Attributes:
        due: when it is due by its sender, ms since the epoch.
        subscriptions: who gets it.
        ends_at: from then on it is not sent; 0: it has no end.
    """

    due: int
    subscriptions: frozenset[str]
    ends_at: int = 0


@dataclass
class Oracle:
    """The accounts of all messages, by position as the property `delaylake.messageId` has it.

    Attributes:
        now: returns the time by the clock of the world, ms since the epoch.
        accounts: what commands, ends and keys have made of them.
    """

    now: Callable[[], int]
    accounts: Accounts = field(default_factory=Accounts)
    expected: dict[str, Expected] = field(default_factory=dict)
    came: Counter[tuple[str, str]] = field(default_factory=Counter)  # (position, subscription)
    durable: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # by table; what no crash takes
    recorded: Counter[tuple[str, str]] = field(default_factory=Counter)  # rows of `deliveries`
    acknowledged: int = 0

    def sent(self, position: str, expected: Expected) -> None:
        """A message is in a source topic."""
        self.expected[position] = expected
        self.accounts.add_message(position, expected.due, expected.subscriptions, self.now(), expected.ends_at)

    def arrived(self, position: str, subscription: str, topic: str) -> None:
        """A message of a source topic has come to a destination: never early, and once."""
        if (message := self.expected.get(position)) is None:
            raise BrokenGuaranteeError(f"{subscription} has got {position}, which nobody has sent")
        if subscription not in message.subscriptions:
            raise BrokenGuaranteeError(f"{subscription} has got {position}, which is not for it")
        self.came[position, subscription] += 1
        self.accounts.arrived(position, subscription, self.now(), topic)

    def told(self, outcome: ControlOutcome) -> None:
        """An outcome is on the outcome topic."""
        row = {field.name: getattr(outcome, field.name) for field in outcome.DESCRIPTOR.fields}
        self.accounts.told(row | {"result": Result.Name(outcome.result)})

    def replaced(self, table: str, rows: pa.Table) -> None:
        """A rebuild has written a table anew: it has these rows alone."""
        self.durable[table] = set()
        self._note_durable(table, rows)

    def _note_durable(self, table: str, rows: pa.Table) -> None:
        if table in ("delayed_index", "entries", "rejects", "deliveries"):
            names = ("ledger_id", "entry_id")
            for ledger, entry in zip(*(rows[name].to_pylist() for name in names), strict=True):
                self.durable[table].add(f"{ledger}:{entry}")

    def stored(self, table: str, rows: pa.Table) -> None:
        """Rows are in a table, and no loss of power takes them."""
        self._note_durable(table, rows)
        if table == "rejects" and rows.num_rows:
            raise BrokenGuaranteeError(f"{rows['position'][0]} is rejected: {rows['reason'][0]}")
        if table == "outcomes":
            self.accounts.recorded(rows.to_pylist())
        if table == "deliveries":
            for position, name in zip(rows["position"].to_pylist(), rows["subscription"].to_pylist(), strict=True):
                self.recorded[position, name] += 1
                n, came = self.recorded[position, name], self.came[position, name]
                if n > came:
                    raise BrokenGuaranteeError(f"`deliveries` has {position} of {name} {n} times, it came {came} times")

    def acknowledged_to(self, entries: Iterable[str]) -> None:
        """Entries of a source topic are acknowledged: the broker may delete them."""
        for entry in entries:
            self.acknowledged += 1
            kept = self.durable["delayed_index"] | self.durable["rejects"] | self.durable["deliveries"]
            if entry not in kept and not self.accounts.is_gone(entry):
                raise BrokenGuaranteeError(f"{entry} is acknowledged, and no table has it for good")
            if entry not in self.durable["entries"]:
                raise BrokenGuaranteeError(f"{entry} is acknowledged, and `entries` does not have it for good")

    def check_end(self, n_acknowledged: int) -> None:
        """Some time after the last fault, and after all was due: nothing waits any more."""
        self.accounts.check_end()
        if left := [key for key in self.came if self.recorded[key] < self.came[key]]:
            raise BrokenGuaranteeError(f"{len(left)} have come and are not in `deliveries`, as {left[0]}")
        if n_acknowledged < len({position.rpartition(":")[0] for position in self.expected}):
            raise BrokenGuaranteeError(f"only {n_acknowledged} entries are acknowledged")
