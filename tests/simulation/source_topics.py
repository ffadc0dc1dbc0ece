"""A source topic that admins terminate, truncate, trim, and delete in a simulation: `parcels.py` has the account."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from broker.protocol.building import batch_entry, single_entry
from conf.settings import Route
from streaming.batch_schema import InputKind
from tests.simulation.accounts import require
from tests.simulation.broker import Topic
from tests.simulation.commands import Operators
from tests.simulation.expected import Expected
from tests.simulation.load import outgoing, set_schedule_key
from tests.simulation.parcels import SUBSCRIPTION, TOPIC
from tests.simulation.scheduler import EPOCH_SECONDS

if TYPE_CHECKING:
    from tests.simulation.world import World

_PER_SECOND = 1.5  # entries
_MOST_IN_LEDGER = 4
_DUE_MILLIS = (-2_000, 0, 900, 4_000, 9_000, 20_000, 45_000)  # from when it is published on
_CHANGES = ("expired", "expired", "cleared", "truncated", "trimmed", "deleted", "terminated")
_MADE_AGAIN_SECONDS = (0.0, 2.0, 15.0)  # after it was terminated it is deleted, and made again by whoever publishes
_KEYED = 0.6  # of the messages, where there are commands
_COMMANDS_PER_SECOND = 0.6


@dataclass
class SourceTopics:
    """Users who publish to the topic, and admins who change it.

    Attributes:
        are_made: whether there is such a topic in this simulation.
        have_commands: whether there are commands for its messages, of which some have schedule keys.
    """

    world: World
    are_made: bool = field(init=False)
    have_commands: bool = field(init=False)
    operators: Operators | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        world = self.world
        self._random = random.Random(f"source topics {world.plan.seed}")
        is_chosen = self._random.random() < world.plan.rates.get("seeds with a changed source", 0.0)
        # What a restored backup lacks is read again from the source: it must still be there.
        others = world.backups.are_made or world.other_system.are_made or world.long_pause.is_made
        # Nor is the topic one that another cluster has, too.
        self.are_made = is_chosen and not others and not world.replication.is_made
        self._of_commands = random.Random(f"commands of source topics {world.plan.seed}")
        rate = world.plan.rates.get("seeds with commands on a changed source", 0.0)
        self.have_commands = self.are_made and self._of_commands.random() < rate
        self._n = 0

    def begin(self) -> None:
        """Adds the topic's route to the settings; users begin to publish, and to command."""
        world = self.world
        route = Route(source=TOPIC, subscriptions=[{"name": SUBSCRIPTION}])  # type: ignore[arg-type]
        world.settings = world.settings.model_copy(update={"routes": (*world.settings.routes, route)})
        [subscription] = route.subscriptions
        world.destinations[subscription.destination] = TOPIC, SUBSCRIPTION
        world.cluster.most_in_ledger[TOPIC] = _MOST_IN_LEDGER
        world.scheduler.after(1.0, self._publish)
        if self.have_commands:
            settings = world.settings.model_copy(update={"routes": (route,)})
            seconds, per_second = world.plan.seconds, _COMMANDS_PER_SECOND
            self.operators = Operators(
                world.scheduler, world.cluster, world.oracle, settings, seconds, per_second, world.trace
            )

    @property
    def last_due(self) -> int:
        """When the last message that a command has moved is due at the latest, ms since the epoch."""
        return 0 if self.operators is None else self.operators.last_due

    def each_second(self) -> None:
        """An admin may change the topic."""
        if self.world.faults.is_now("source changed"):
            self._change(self._random.choice(_CHANGES))

    def check_end(self) -> None:
        """Nothing of the topic waits at the broker."""
        topic = self._topic()
        left = len(topic.entries) - topic.n_acknowledged
        require(not left, f"{left} entries of {TOPIC} are not acknowledged")

    def has_read(self, rows: Mapping[int, list[Any]]) -> None:
        """The checkpoint has a batch of this input, by shard."""
        bodies = [row.body for of_shard in rows.values() for row in of_shard if row.kind == InputKind.MESSAGES]
        messages = InputKind.MESSAGES.body.read(bodies)
        of_topic = messages.filter(pc.equal(messages["topic"], TOPIC))
        ids = zip(of_topic["ledger_id"].to_pylist(), of_topic["entry_id"].to_pylist(), strict=True)
        self.world.oracle.parcels.read(f"{ledger}:{entry}" for ledger, entry in ids)

    def _topic(self) -> Topic:
        return self.world.cluster.topic(TOPIC)

    def _publish(self) -> None:
        world, chance = self.world, self._random
        if world.scheduler.now > world.plan.seconds:
            return
        world.scheduler.after(chance.expovariate(_PER_SECOND), self._publish)
        n, due = chance.choice([1, 1, 3]), chance.choice(_DUE_MILLIS) + chance.randrange(200)
        topic = self._topic()
        if topic.is_terminated or not world.faults.is_done("publish to a changed source"):
            return
        now, position = self._now(), topic.next
        messages, keys = [], ""
        for i in range(n):
            self._n += 1
            payload, at = b"parcel %d" % self._n, max(0, now + due)
            message = Expected(TOPIC, at, frozenset({SUBSCRIPTION}), {"deliverAt": str(at)}, payload)
            if self.have_commands and self._of_commands.random() < _KEYED:
                set_schedule_key(message, self._of_commands, now)
            last = f"{position}:-1:{i if n > 1 else -1}"
            world.oracle.sent(last, message)
            messages.append(outgoing(self._n, message))
            keys += f" {message.schedule_key.name}" if message.schedule_key else ""
        entry = batch_entry(messages, b"user", now) if n > 1 else single_entry(messages[0], b"user", now)
        world.trace(f"published {position} to parcels: {n} messages, deliverAt {now + due}{keys}")
        world.cluster.publish(TOPIC, entry.data, n)
        if self.operators is not None:
            self.operators.published(TOPIC, last)

    def _now(self) -> int:
        return round((EPOCH_SECONDS + self.world.scheduler.now) * 1000)

    def _change(self, change: str) -> None:
        world, chance, topic = self.world, self._random, self._topic()
        waiting = [str(entry.position) for entry in topic.entries[topic.n_acknowledged :]]
        match change:
            case "terminated":
                if topic.is_terminated:
                    return
                world.cluster.terminate(topic)
                world.scheduler.after(chance.choice(_MADE_AGAIN_SECONDS), partial(self._change, "deleted"))
            case "deleted":
                entries = [str(entry.position) for entry in topic.entries]
                world.oracle.parcels.deleted(entries, topic.n_acknowledged)
                world.cluster.delete(topic)
            case "trimmed":
                world.cluster.trim(topic)
            case "expired" if waiting and topic.is_subscribed:
                n = chance.randint(1, len(waiting))
                world.oracle.parcels.taken(waiting[:n], change, is_nameless=False)
                world.cluster.skip(topic, topic.n_acknowledged + n)
                if chance.random() < 0.5:
                    world.cluster.trim(topic)
            case "cleared" | "truncated" if waiting:
                world.oracle.parcels.taken(waiting, change, is_nameless=not topic.is_subscribed)
                if change == "cleared":
                    world.cluster.skip(topic, len(topic.entries))
                else:
                    world.cluster.truncate(topic)
            case _:
                return
        world.trace(f"parcels is {change}, with {len(waiting)} entries that are not acknowledged")
