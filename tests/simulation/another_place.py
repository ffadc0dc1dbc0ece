"""The whole place of a job is lost, its broker, too, and the job goes on elsewhere: by docs/another-place.md alone.

The source topics are replicated both ways. In the tables of a backup that is restored there, messages have other ids:
those of the other broker, or their own with a number added. The accounts go on with the ids that messages had first.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pyarrow as pa

import checkpoint_from_tables.restore.another_broker
import warehouse.maintenance.retention
from broker.position import Position
from broker.protocol.entries import SOURCE_POSITION, open_envelope
from broker.protocol.session import DisconnectedError
from tests.simulation.broker import Admin, Cluster
from tests.simulation.expected import entry_of

if TYPE_CHECKING:
    from tests.simulation.world import World

_AS_USUAL = ("backup", "warehouse lost", "replicator connects again", "replication stands still")
_FEWER = 0.2  # so many of the other faults fall before the place is lost
_BEGINS = 0.4  # of the time for which users publish there: not before the place is lost
_FIRST_ELSEWHERE = 1_000_000  # the accounts add it to ledger ids of what the first broker never had
_LAST_ENTRIES_MILLIS = 5_000  # retention leaves those that were published so long before the last one
_CHUNKS_MILLIS = (2_000, 15_000)  # from the end of a backup what was published so long before it is read again


class AnotherPlace:
    """What becomes of a job whose place is lost.

    Attributes:
        is_made: whether that may happen in this simulation.
        is_there: it has happened.
        is_restored: and the job goes on.
        added: the number that the restore has added to ledger ids, as it says; 0: none was restored.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._chance = random.Random(f"another place {world.plan.seed}")
        self.is_made: bool = self._chance.random() < world.plan.rates.get("seeds with another broker", 0.0)
        self.is_there: bool = False
        self.is_restored: bool = False
        self.added: int = 0
        self._rates = world.faults.rates
        if self.is_made:  # little is durable where faults fall often
            world.faults.rates = {
                kind: rate * (1.0 if kind in _AS_USUAL else _FEWER) for kind, rate in self._rates.items()
            }
        self._first: dict[Position, Position] = {}  # by entry of the other broker: what the first one called it

    @property
    def may_be_lost(self) -> bool:
        return not self.is_made or self._world.scheduler.now > _BEGINS * self._world.plan.seconds

    def lose(self) -> None:
        """The broker is lost, and all who use it. What it had and did not replicate is gone."""
        world, first, other = self._world, self._world.cluster, self._world.replication.other
        for route in world.settings.routes:
            self._first |= {there: here for here, there in _replicated(first, route.source)}
            self._first |= dict(_replicated(other, route.source))
        self.is_there = True
        world.faults.rates = self._rates
        world.replication.end()
        for link in [*first.links]:
            link.cut(DisconnectedError("the broker is lost"))
        first.is_up = False
        other.on_stored, other.on_acknowledged = first.on_stored, first.on_acknowledged
        world.cluster = other

    def restored(self, tables: dict[str, pa.Table]) -> None:
        """The backup is the warehouse now, and has these rows."""
        oracle, sent_there = self._world.oracle, self._world.replication.sent_there
        for entry, messages in sent_there.items():
            if Position.parse(entry) not in self._first:
                for position, message in messages:
                    oracle.sent(self.known(position), message)
        self.is_restored = True
        topics = [self._world.cluster.topic(route.source) for route in self._world.settings.routes]
        published_there = {str(self._first[at]) for at in map(Position.parse, sent_there) if at in self._first}
        comes = {self.known(str(entry.position)) for topic in topics for entry in topic.entries}
        oracle.restored_elsewhere(
            {name: self.known_rows(rows) for name, rows in tables.items()}, comes, published_there
        )

    def known(self, position: str) -> str:
        """Returns the id by which the accounts know a message, or an entry."""
        if not self.is_there:
            return position
        at, rest = Position.parse(entry_of(position)), position.split(":")[2:]
        if self.added and at.ledger_id >= self.added:
            at = Position(at.ledger_id - self.added, at.entry_id)
        elif at.ledger_id >= 0:
            at = self._first.get(at, Position(at.ledger_id + _FIRST_ELSEWHERE, at.entry_id))
        return ":".join([str(at), *rest])

    def known_row(self, row: dict[str, Any]) -> dict[str, Any]:
        """Returns a row with the ids by which the accounts know its message."""
        if not self.is_there or "ledger_id" not in row:
            return row
        at = Position.parse(self.known(f"{row['ledger_id']}:{row['entry_id']}"))
        changed = {"ledger_id": at.ledger_id, "entry_id": at.entry_id}
        return {
            **row,
            **changed,
            **{name: self.known(row[name]) for name in ("position", "superseded_by", "retry_of") if row.get(name)},
        }

    def known_rows(self, rows: pa.Table) -> pa.Table:
        """As `known_row`, of a table."""
        if not self.is_there:
            return rows
        return pa.Table.from_pylist([self.known_row(row) for row in rows.to_pylist()], schema=rows.schema)

    def names(self) -> dict[Any, dict[str, Any]]:
        """What stands in for what such a restore has around it."""
        world = self._world
        # Elsewhere rows go sooner, so that any do.
        kept = {} if self.is_made else {"LAST_ENTRIES_MILLIS": _LAST_ENTRIES_MILLIS}
        return {
            warehouse.maintenance.retention: kept,
            checkpoint_from_tables.restore.another_broker: {
                "Brokers": lambda *_: world.new_brokers(),
                "AdminClient": lambda *_: Admin(world.cluster, world.point),
                "CHUNKS_MILLIS": self._chance.choice(_CHUNKS_MILLIS),
            },
        }


def _replicated(cluster: Cluster, topic: str) -> list[tuple[Position, Position]]:
    """Returns the entries of a topic that were replicated to it: (position there, position where it comes from)."""
    return [
        (entry.position, Position.parse(one.value.decode()))
        for entry in cluster.topic(topic).entries
        for one in open_envelope(entry.data).metadata.properties
        if one.key == SOURCE_POSITION.encode()
    ]
