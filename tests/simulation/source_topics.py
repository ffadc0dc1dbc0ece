"""A source topic that admins terminate, truncate, trim, and delete in a simulation, and the account of its messages.

By docs/guarantees.md what the job has read is delivered, whatever becomes of the topic: "Never lost". What is skipped
or gone before the job has read it is named in `rejects`, once: "Nothing is skipped in silence". With a topic that is
deleted what the job had not read is gone; nobody names that.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from broker.protocol.building import OutgoingMessage, batch_entry, encoded_property, single_entry
from conf.settings import Route
from tests.simulation.accounts import BrokenGuaranteeError, require
from tests.simulation.broker import Topic
from tests.simulation.expected import Arrival, entry_of
from tests.simulation.scheduler import EPOCH_SECONDS

if TYPE_CHECKING:
    from tests.simulation.world import World

TOPIC = "persistent://public/default/parcels"
SUBSCRIPTION = "p"

_PER_SECOND = 1.5  # entries
_MOST_IN_LEDGER = 4
_DUE_MILLIS = (-2_000, 0, 900, 4_000, 9_000, 20_000, 45_000)  # from when it is published on
_CHANGES = ("expired", "expired", "cleared", "truncated", "trimmed", "deleted", "terminated")
_MADE_AGAIN_SECONDS = (0.0, 2.0, 15.0)  # after it was terminated it is deleted, and made again by whoever publishes
_COUNTED = re.compile(r"not seen: ([\d,]+) messages by their indexes")


@dataclass
class Parcel:
    """A message of the topic.

    Attributes:
        due: ms since the epoch.
        lost_by: what has taken its entry before any table had it for good, as `_CHANGES` says; empty: nothing.
        is_nameless: its topic was deleted, or the job had not connected to it.
    """

    due: int
    payload: bytes
    lost_by: str = ""
    is_nameless: bool = False
    came: int = 0


class Parcels:
    """The account of the topic's messages, by position.

    Args:
        are_durable: whether an entry is in `entries` for good.
        ahead_millis: returns by how much any machine's clock was ahead.
    """

    def __init__(self, are_durable: Callable[[str], bool], ahead_millis: Callable[[], int]) -> None:
        self._is_durable, self._ahead_millis = are_durable, ahead_millis
        self._all: dict[str, Parcel] = {}
        self._named: dict[str, str] = {}  # reasons by entry
        self.n_rebuilds = 0
        self.n_lost: Counter[str] = Counter()

    def sent(self, position: str, due: int, payload: bytes) -> None:
        """A message is in the topic."""
        self._all[position] = Parcel(due, payload)

    def arrived(self, arrival: Arrival, now: int) -> None:
        """A message has come to its destination: never early, once, and as it was sent."""
        parcel = self._all.get(arrival.position)
        what = f"{arrival.subscription} has got {arrival.position}"
        if parcel is None:
            raise BrokenGuaranteeError(f"{what}, which nobody has sent")
        require(arrival.payload == parcel.payload, f"{what} with another payload")
        early = parcel.due - now - self._ahead_millis()
        require(early <= 0, f"{what} {early} ms early")
        parcel.came += 1
        require(parcel.came == 1, f"{what} twice")

    def taken(self, entries: Iterable[str], by: str, is_nameless: bool) -> None:
        """Entries are gone, or are not sent any more: the job has them already, or they are lost."""
        gone = {entry for entry in entries if not self._is_durable(entry)}
        for position, parcel in self._all.items():
            if entry_of(position) in gone:
                parcel.lost_by = parcel.lost_by or by
                parcel.is_nameless |= is_nameless

    def deleted(self, entries: Iterable[str], n_acknowledged: int) -> None:
        """A topic with these entries is deleted: nobody can name any more what is not named of it."""
        entries = list(entries)
        self.taken(entries[n_acknowledged:], "deleted", is_nameless=True)
        self._forget({*entries})

    def rebuilt(self) -> None:
        """The checkpoint was rebuilt: of the topic the job knows what the tables have, and goes on after that."""
        self.n_rebuilds += 1
        known = [one for one in map(entry_of, self._all) if self._is_durable(one)]
        first = min(map(_numbers, known), default=None)
        self._forget({one for one in map(entry_of, self._all) if first is None or _numbers(one) < first})

    def _forget(self, entries: Collection[str]) -> None:
        """Nobody names any more what is lost of these entries."""
        for position, parcel in self._all.items():
            parcel.is_nameless |= bool(parcel.lost_by) and entry_of(position) in entries

    def may_be_lost(self, position: str) -> bool:
        """Whether a message may not come."""
        parcel = self._all.get(position)
        return parcel is not None and bool(parcel.lost_by) and not self._is_durable(entry_of(position))

    def recorded(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows of `rejects` are in the table for good: each names an entry that the job has not seen."""
        for row in rows:
            entry, reason = entry_of(row["position"]), row["reason"]
            require(reason.startswith("not seen"), f"{entry} is rejected: {reason}")
            require(entry not in self._named, f"{entry} is in `rejects` twice")
            self._named[entry] = reason
            if _COUNTED.match(reason):
                continue
            positions = [position for position in self._all if entry_of(position) == entry]
            are_lost = [bool(self._all[position].lost_by) for position in positions]
            require(bool(are_lost) and all(are_lost), f"{entry} is named, and nobody has skipped it: {reason}")

    def replaced(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """A rebuild has written `rejects` anew: it has these rows."""
        self._named = {entry_of(row["position"]): row["reason"] for row in rows}

    def check_end(self) -> None:
        """Each message has come, or was taken before the job had it, and is named."""
        self.n_lost.clear()
        n_not_named = 0
        for position, parcel in self._all.items():
            is_named = entry_of(position) in self._named
            if parcel.came:
                # After a rebuild what was not durable is read again, and may be gone meanwhile.
                is_right = not is_named or self.n_rebuilds or self._is_counted(position)
                require(bool(is_right), f"{position} has come, and is named as not seen")
                continue
            require(self.may_be_lost(position), f"{SUBSCRIPTION} has not got {position}")
            self.n_lost[parcel.lost_by] += 1
            n_not_named += not is_named and not parcel.is_nameless
        n_counted = sum(
            int(found[1].replace(",", "")) for reason in self._named.values() if (found := _COUNTED.match(reason))
        )
        require(n_not_named <= n_counted, f"{n_not_named} messages are lost, and {n_counted} of them named")

    def _is_counted(self, position: str) -> bool:
        return bool(_COUNTED.match(self._named[entry_of(position)]))


def _numbers(entry: str) -> list[int]:
    return [int(number) for number in entry.split(":")]


@dataclass
class SourceTopics:
    """Users who publish to the topic, and admins who change it.

    Attributes:
        are_made: whether there is such a topic in this simulation.
    """

    world: World
    are_made: bool = field(init=False)

    def __post_init__(self) -> None:
        world = self.world
        self._random = random.Random(f"source topics {world.plan.seed}")
        is_chosen = self._random.random() < world.plan.rates.get("seeds with a changed source", 0.0)
        # What a restored backup lacks is read again from the source: it must still be there.
        others = world.backups.are_made or world.other_system.are_made or world.long_pause.is_made
        # Nor is the topic one that another cluster has, too.
        self.are_made = is_chosen and not others and not world.replication.is_made
        self._n = 0

    def begin(self) -> None:
        """Adds the topic's route to the settings; users begin to publish."""
        world = self.world
        route = Route(source=TOPIC, subscriptions=[{"name": SUBSCRIPTION}])  # type: ignore[arg-type]
        world.settings = world.settings.model_copy(update={"routes": (*world.settings.routes, route)})
        [subscription] = route.subscriptions
        world.destinations[subscription.destination] = TOPIC, SUBSCRIPTION
        world.cluster.most_in_ledger[TOPIC] = _MOST_IN_LEDGER
        world.scheduler.after(1.0, self._publish)

    def each_second(self) -> None:
        """An admin may change the topic."""
        if self.world.faults.is_now("source changed"):
            self._change(self._random.choice(_CHANGES))

    def check_end(self) -> None:
        """Nothing of the topic waits at the broker."""
        topic = self._topic()
        left = len(topic.entries) - topic.n_acknowledged
        require(not left, f"{left} entries of {TOPIC} are not acknowledged")

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
        messages = []
        for i in range(n):
            self._n += 1
            payload, at = b"parcel %d" % self._n, max(0, now + due)
            world.oracle.parcels.sent(f"{position}:-1:{i if n > 1 else -1}", at, payload)
            messages.append(OutgoingMessage(self._n, payload, [encoded_property("deliverAt", str(at))], None))
        entry = batch_entry(messages, b"user", now) if n > 1 else single_entry(messages[0], b"user", now)
        world.trace(f"published {position} to parcels: {n} messages, deliverAt {now + due}")
        world.cluster.publish(TOPIC, entry.data, n)

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
