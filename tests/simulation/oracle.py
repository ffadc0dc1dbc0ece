"""What must become of each message, by docs/guarantees.md alone: an account of its own, without code of the job.

What commands change is in `accounts.py`; `rejected.py`, `schedule_keys.py`, `recurring.py` and `ordered.py` have what
their names say.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tests.simulation.accounts import Accounts, BrokenGuaranteeError, Pair, require
from tests.simulation.added import ADDED, Added
from tests.simulation.expected import Arrival, Chunked, Expected, entry_of
from tests.simulation.importing import ImportedItems, is_imported
from tests.simulation.kept import KeptCancels
from tests.simulation.long_pause import Doubles
from tests.simulation.ordered import Order
from tests.simulation.parcels import TOPIC, Parcels
from tests.simulation.recurring import Schedules
from tests.simulation.rejected import Rejected
from tests.simulation.schedule_keys import ScheduleKeys
from tests.simulation.shaped import Rates, Windows
from tests.simulation.told_losses import ToldLosses
from tracker.message_state.changes import HELD_DELIVER_AT
from tracker.messages import position_texts
from tracker.wire.delaylake_pb2 import Result

_CONFIRMED_MILLIS = 30_000  # after which what was put aside is not sent again; a second where nothing is slow
_GIVEN_UP_MILLIS = 90_000  # after which a message whose chunks have not come is none


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
    taken_at: dict[str, int] = field(default_factory=dict)  # by entry: since when a table has it, ms since the epoch
    last_delivery: int = 0  # when the last message that `deliveries` has was sent, ms since the epoch
    acknowledged: int = 0
    lost_for: Counter[str] = field(default_factory=Counter)  # by subscription: others still have the message
    parked: set[Pair] = field(default_factory=set)  # now or earlier: it is due when its subscription goes on
    chunks: dict[str, Chunked] = field(default_factory=dict)  # by entry

    def __post_init__(self) -> None:
        self._deleted: dict[str, set[str]] = defaultdict(set)  # by table: entries whose rows nobody needed any more
        self._deleted_unrecorded: set[Pair] = set()  # their destinations were deleted before `deliveries` had them
        self._may_come_again: set[Pair] = set()  # delivered before the backup that was restored elsewhere
        # By table and position: which subscriptions have a row for good; None: all.
        self._kept_for: dict[str, dict[str, set[str | None]]] = defaultdict(lambda: defaultdict(set))
        self._positions: dict[str, list[str]] = defaultdict(list)  # by entry
        self.rejected = Rejected(self.expected)
        self.keys = ScheduleKeys(self.accounts, self.taken_at)
        self.rates = Rates()
        self.windows = Windows()
        self.imports = ImportedItems(frozenset(), lambda: self.accounts.ahead_millis)
        self._published_at: dict[str, int] = {}  # by position, ms since the epoch
        self.schedules = Schedules(self.accounts)
        self.added = Added(self.accounts, self.expected)
        self.doubles = Doubles()
        self.parcels = Parcels(lambda entry: entry in self.durable["entries"], self.accounts)
        self.accounts.may_be_lost = self.parcels.may_be_lost
        self.told_losses = ToldLosses(TOPIC)
        self.kept = KeptCancels(self.accounts, self.expected, self.taken_at)
        self.order = Order(self.accounts, self.expected, self.taken_at)

    def sent(self, position: str, expected: Expected) -> None:
        """A message is in a source topic."""
        self.expected[position] = expected
        self._positions[entry_of(position)].append(position)
        self._published_at[position] = self.now()
        if expected.rejected_for:
            self.accounts.add_rejected(position)
            return
        if expected.repeat is not None:
            self.accounts.add_recurring(position)
            self.schedules.sent(position, expected.repeat, expected.subscriptions)
            return
        if expected.topic == TOPIC:
            self.parcels.sent(position)
        self.accounts.add_message(position, expected, self.now())
        self.kept.sent(position, expected)
        if expected.schedule_key is not None:
            asked = int(expected.properties["deliverAt"])
            self.keys.sent(position, expected.topic, expected.schedule_key, asked, self.now())

    def arrived(self, arrival: Arrival) -> None:
        """A message of a source topic has come to a destination: never early, and once."""
        position, subscription = arrival.position, arrival.subscription
        # The other account tells what a subscription gets again that was taken out after `deliveries` had it.
        came, recorded = self.came[position, subscription], self.recorded[position, subscription]
        is_told = subscription == ADDED and 0 < came <= recorded
        if not is_told and self.doubles.is_one(arrival):
            return
        sender_now = self.now() + arrival.ahead_millis
        if is_imported(position):
            self.came[position, subscription] += 1
            self.rates.arrived(subscription, arrival.sent_at)
            self.imports.arrived(arrival, sender_now)
            return
        if (message := self.expected.get(position)) is None:
            raise BrokenGuaranteeError(f"{subscription} has got {position}, which nobody has sent")
        if subscription != ADDED and subscription not in message.subscriptions:
            raise BrokenGuaranteeError(f"{subscription} has got {position}, which is not for it")
        if message.rejected_for:
            raise BrokenGuaranteeError(f"{subscription} has got {position}, and not: {message.rejected_for}")
        if arrival.payload != message.payload:
            raise BrokenGuaranteeError(f"{subscription} has got {position} with another payload")
        self.came[position, subscription] += 1
        if (position, subscription) in self._may_come_again:
            self._may_come_again.remove((position, subscription))
            return
        if subscription == ADDED:
            self.added.arrived(arrival, sender_now)
            return
        self.added.arrived_elsewhere(position, self.now())
        if not self.accounts.skew_millis and not self.accounts.n_rebuilds:
            self.rates.arrived(subscription, arrival.sent_at)
        if not self.accounts.skew_millis:
            self.windows.arrived(subscription, arrival.deliver_at, arrival.sent_at, self._published_at[position])
        if message.repeat is not None:
            self.schedules.arrived(arrival, sender_now)
            return
        self.order.arrived(arrival)
        self.kept.arrived(arrival)
        self.accounts.arrived(arrival, sender_now)
        self.keys.arrived(arrival)

    def told(self, row: Mapping[str, Any]) -> None:
        """An outcome is on the outcome topic."""
        self.accounts.told({**row, "result": Result.Name(row["result"])})

    def replaced(self, table: str, rows: pa.Table) -> None:
        """A rebuild has written a table anew: it has these rows alone."""
        self.durable[table] = set(self._deleted[table])
        self._kept_for[table].clear()
        self._note_durable(table, rows)
        if table == "rejects":
            of_topic = pc.equal(rows["topic"], TOPIC)
            self.rejected.replaced(rows.filter(pc.invert(of_topic))["position"].to_pylist())
            self.parcels.replaced(rows.filter(of_topic).to_pylist())
            self.imports.replaced([row for row in rows.to_pylist() if is_imported(row["position"])])

    def deleted(self, table: str, rows: pa.Table) -> None:
        """Retention has deleted rows of a table."""
        entries = {
            f"{ledger}:{entry}"
            for ledger, entry in zip(rows["ledger_id"].to_pylist(), rows["entry_id"].to_pylist(), strict=True)
        }
        self._deleted[table] |= entries
        self.accounts.forgotten |= entries

    def wanted(self, topic: str) -> set[tuple[str, str]]:
        """The plain messages of a topic that no command names, each with the subscriptions that get it once."""
        return {
            (position, name)
            for position, message in self.expected.items()
            if message.topic == topic
            and not message.rejected_for
            and message.repeat is None
            and message.schedule_key is None
            and not message.ends_at
            and not self.accounts.is_named(position)
            for name in message.subscriptions
        }

    def is_sealed(self, position: str, subscription: str) -> bool:
        """Whether `delayed_index` has a message for a subscription, or had it until nobody needed it."""
        return not {None, subscription}.isdisjoint(self._kept_for["delayed_index"][position])

    def may_come_again(self, position: str, subscription: str) -> bool:
        """Whether what a subscription has got may wait there, too: it recurs, or commands name it."""
        return subscription == ADDED or self.schedules.has(position) or self.accounts.is_named(position)

    def rebuilt(self) -> None:
        """The checkpoint was rebuilt."""
        self.accounts.rebuilt()
        self.parcels.rebuilt()
        self.rejected.rebuilt()
        # What is not durable comes again, and is not known until then. Its times are those of the first rows.
        for entry in self.taken_at.keys() - self.durable["entries"]:
            del self.taken_at[entry]

    def restored(self, tables: Mapping[str, pa.Table]) -> None:
        """A backup is the warehouse now, and has these rows: answers since then are given again."""
        outcomes = tables["outcomes"].to_pylist()
        for name, rows in tables.items():
            self.replaced(name, rows)
        self.durable["outcomes"] |= {
            f"{row['ledger_id']}:{row['entry_id']}" for row in outcomes if row["result"] == "SUPERSEDED"
        }
        lost, new = self.accounts.restored(outcomes)
        self.schedules.restored([*lost, *new])
        self.added.restored(self.now())
        self.imports.restored({*tables["imported"]["item"].to_pylist()})
        self._answered(new)
        self.recorded = Counter()
        self._record_deliveries(tables["deliveries"])
        self.rebuilt()

    def restored_elsewhere(self, tables: Mapping[str, pa.Table], comes: set[str], published_there: set[str]) -> None:
        """A backup is the warehouse now, with another broker, and has these rows.

        What has not come to the other broker is lost, but for what the backup has: a message alone, not its entry, or
        for one subscription alone.

        Args:
            tables: by name.
            comes: the entries that the other broker has.
            published_there: those that were published there, and had come to the first broker.
        """
        entries = tables["entries"]
        ids = (entries[column].to_pylist() for column in ("ledger_id", "entry_id"))
        kept = comes | {f"{ledger}:{entry}" for ledger, entry in zip(*ids, strict=True)}
        index = tables["delayed_index"]
        has = _subscriptions_of(index.filter(pc.equal(index["operation"], "DELAY")))
        for position, message in [*self.expected.items()]:
            if entry_of(position) in kept or None in has[position]:
                continue
            left = message.subscriptions & has[position]
            self.accounts.forget(position, message.subscriptions - left)
            if left:
                self.expected[position] = replace(message, subscriptions=left)
                self.lost_for.update(message.subscriptions - left)
            else:
                del self.expected[position]
        self.restored(tables)
        rows = tables["deliveries"]
        attempts: dict[Pair, set[int]] = defaultdict(set)
        for *pair, attempt in zip(*(rows[n].to_pylist() for n in ("position", "subscription", "attempt")), strict=True):
            attempts[pair[0], pair[1]].add(attempt or 0)
        self.came = Counter(self.recorded)
        self._may_come_again = {pair for pair in self.recorded if entry_of(pair[0]) in published_there}
        self.accounts.restored_elsewhere(self.came, attempts, published_there)
        self.rejected.restored_elsewhere()

    def _record_deliveries(self, rows: pa.Table) -> None:
        self.last_delivery = max([self.last_delivery, *rows["sent_at"].to_pylist()])
        for position, name in zip(rows["position"].to_pylist(), rows["subscription"].to_pylist(), strict=True):
            self.recorded[position, name] += 1
            n, came = self.recorded[position, name], self.came[position, name]
            if n > came:
                raise BrokenGuaranteeError(f"`deliveries` has {position} of {name} {n} times, it came {came} times")

    def producers_forgotten(self, since: int) -> None:
        """The broker has forgotten the job's producers.

        Args:
            since: no job has run since then, ms since the epoch.
        """
        self.doubles.may_come(self.came - self.recorded)
        self.rejected.producers_forgotten(since - _CONFIRMED_MILLIS)
        self.accounts.producers_forgotten()

    def destination_deleted(self, subscription: str) -> None:
        """With a destination of which not all is recorded the broker has forgotten the job's producers there."""
        gone = Counter({key: n for key, n in (self.came - self.recorded).items() if key[1] == subscription})
        self._deleted_unrecorded |= gone.keys()
        # A rebuild can't know that these came: they may expire, or be cancelled, after that.
        for account in (self.accounts.accounts[key] for key in gone.keys() & self.accounts.accounts.keys()):
            account.is_unsure = True
        self.schedules.are_unsure(gone.keys())
        self.doubles.may_come(gone)

    def is_behind(self, subscription: str) -> bool:
        """Whether a subscription has got messages that `deliveries` does not have for good."""
        return any(n > self.recorded[key] for key, n in self.came.items() if key[1] == subscription)

    def _note_durable(self, table: str, rows: pa.Table) -> None:
        if table in ("delayed_index", "entries", "rejects", "deliveries"):
            if table == "delayed_index":  # a cancel, restore or move may be there before its message was read
                rows = rows.filter(pc.equal(rows["operation"], "DELAY"))
            names = ("ledger_id", "entry_id")
            for ledger, entry in zip(*(rows[name].to_pylist() for name in names), strict=True):
                self.durable[table].add(f"{ledger}:{entry}")
                if table != "rejects" or not self.parcels.may_be_lost(f"{ledger}:{entry}"):
                    self.taken_at.setdefault(f"{ledger}:{entry}", self.now())
        if table in ("delayed_index", "rejects", "deliveries"):
            for position, subscriptions in _subscriptions_of(rows).items():
                self._kept_for[table][position] |= subscriptions
            if table == "delayed_index":
                held = rows.filter(pc.equal(rows["deliver_at"], HELD_DELIVER_AT))
                self.parked |= {*zip(position_texts(held).to_pylist(), held["subscription"].to_pylist(), strict=True)}

    def stored(self, table: str, rows: pa.Table) -> None:
        """Rows are in a table, and no loss of power takes them."""
        self._note_durable(table, rows)
        if table == "rejects":
            of_topic = pc.equal(rows["topic"], TOPIC)
            self.parcels.recorded(rows.filter(of_topic).to_pylist())
            rows = rows.filter(pc.invert(of_topic))
            self.imports.stored([row for row in rows.to_pylist() if is_imported(row["position"])])
            columns = (rows[name].to_pylist() for name in ("position", "reason", "payload"))
            for position, reason, payload in zip(*columns, strict=True):
                if not is_imported(position) and not self.added.is_given_up(position, reason):
                    self.rejected.recorded(position, reason, payload)
        if table == "outcomes":
            self._answered(rows.to_pylist())
        if table == "deliveries":
            self._record_deliveries(rows)

    def _answered(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            self.accounts.recorded(row)
            if row["subscription"] in ("*", ADDED):  # for subscriptions that come later
                continue
            if self.schedules.has(row["position"]):
                self.schedules.answered(row)
            elif row["operation"] == "SCHEDULE":
                self.rejected.answered(row)
            elif row["result"] == "SUPERSEDED":
                self.keys.superseded(row)
                self.durable["outcomes"].add(f"{row['ledger_id']}:{row['entry_id']}")  # often no other table has it
            elif row["result"] == "NOT_FOUND" and (command := self.accounts.commands.get(row["request_id"])):
                self.keys.not_found(command, row["subscription"], row["applied_at"])

    def acknowledged_to(self, entries: Iterable[str]) -> None:
        """Entries of a source topic are acknowledged: the broker may delete them."""
        for entry in entries:
            self.acknowledged += 1
            if (message := self.chunks.get(entry)) is not None:
                entry = message.last  # with which the message is whole
                if not entry and self.now() - message.since >= _GIVEN_UP_MILLIS:
                    continue
            tables = ("delayed_index", "rejects", "deliveries", "outcomes")
            is_there, is_over = any(entry in self.durable[table] for table in tables), self.schedules.are_over(entry)
            if not is_there and not is_over and not self.accounts.is_gone(entry):
                raise BrokenGuaranteeError(f"{entry} is acknowledged, and no table has it for good")
            for position in self._positions[entry]:
                for name in sorted(self.expected[position].subscriptions):
                    kept = is_over or self._is_kept(position, name)
                    require(kept, f"{entry} is acknowledged, and no table has {position} of {name} for good")
            if entry not in self.durable["entries"]:
                raise BrokenGuaranteeError(f"{entry} is acknowledged, and `entries` does not have it for good")

    def _is_kept(self, position: str, name: str) -> bool:
        """Whether a table has a message for a subscription for good, or had it, or nobody gets it any more."""
        account = self.accounts.accounts.get((position, name))
        return (
            (account is not None and (account.is_gone or account.is_unsure))
            or entry_of(position) in self._deleted["delayed_index"]
            or any(not {None, name}.isdisjoint(kept[position]) for kept in self._kept_for.values())
        )

    def check_end(self, n_acknowledged: int) -> None:
        """Some time after the last fault, and after all was due: nothing waits any more."""
        self.accounts.check_end()
        self.rejected.check_end()
        self.schedules.check_end()
        self.added.check_end()
        self.imports.check_end()
        self.parcels.check_end()
        self.told_losses.check_end()
        # What a subscription got that was taken out then may never be recorded.
        left = [key for key in self.came if key[1] != ADDED and self.recorded[key] < self.came[key]]
        # Nor what was taken from a source topic before it was durable, where a rebuild has followed.
        left = [key for key in left if not (self.parcels.n_rebuilds and self.parcels.may_be_lost(entry_of(key[0])))]
        # Nor what a destination had when it was deleted, of which a rebuild then knows nothing.
        left = [key for key in left if not (self.accounts.n_rebuilds and key in self._deleted_unrecorded)]
        # Nor what an import brought in that a restored backup lacks.
        if left := [key for key in left if not is_imported(key[0]) or entry_of(key[0]) in self.durable["entries"]]:
            raise BrokenGuaranteeError(f"{len(left)} have come and are not in `deliveries`, as {left[0]}")
        # Of a topic that admins change `source_topics.py` asks for what waits.
        entries = {
            entry_of(one) for one, message in self.expected.items() if message.topic != TOPIC
        } | self.chunks.keys()
        if n_acknowledged < len(entries):
            raise BrokenGuaranteeError(f"only {n_acknowledged} entries are acknowledged")


def _subscriptions_of(rows: pa.Table) -> Mapping[str, set[str | None]]:
    """Returns for whom a table has each message, by position; None: for all, as `rejects` has each."""
    names = rows["subscription"].to_pylist() if "subscription" in rows.column_names else [None] * rows.num_rows
    found: dict[str, set[str | None]] = defaultdict(set)
    for position, name in zip(position_texts(rows).to_pylist(), names, strict=True):
        found[position].add(name)
    return found
