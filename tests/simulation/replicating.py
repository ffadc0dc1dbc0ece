"""Another cluster in a simulation, whose entries Pulsar replicates to the source topics here.

The job here takes what was published elsewhere, or it leaves that to a job of the other cluster (docs/guarantees.md,
"Replicated topics").
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from broker.position import Position
from tests.simulation.broker import Cluster
from tests.simulation.expected import Chunked, Expected, entry_of
from tests.simulation.load import IN_CHUNKS, KINDS, Producers

if TYPE_CHECKING:
    from tests.simulation.world import World

ELSEWHERE = "elsewhere"  # the name of the other cluster

_FIRST = 100_000  # the number of the first message that is published there
_SHARE = 0.4  # of the entries, so many are
_COMMANDS = 0.3  # of the commands, so many are sent there
_STEP_SECONDS = (0.005, 0.2)  # from one entry to the next
_STANDS_STILL_SECONDS = (1.0, 5.0, 20.0)
_MOST_UNACKNOWLEDGED = 8  # entries
# What is taken: other kinds depend on which messages came before in the topic.
TAKEN_KINDS = {"plain": 0.9, "bad": 0.1}


class Replicator:
    """Brings what a topic of a cluster gets to the topic of that name in another one, entry by entry, in their order.

    It promises what Pulsar's `PersistentReplicator` does: it has a cursor in the topic, and when it has connected
    again it goes on after what the other cluster has acknowledged. So entries come again that were on their way;
    `Cluster.replicate` has what becomes of them.

    Args:
        on_replicated: called with the positions of an entry, there and here.
    """

    def __init__(
        self,
        source: Cluster,
        target: Cluster,
        topic: str,
        deduplicates: bool,
        on_replicated: Callable[[Position, Position], None],
    ) -> None:
        self._source, self._target, self._topic, self._deduplicates = source, target, topic, deduplicates
        self._on_replicated = on_replicated
        self._chance = random.Random(f"replicator of {topic} {source.faults.seed}")
        self._next = 0  # the index of the entry that is sent next
        self.is_ended = False
        self._go_on()

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to be replicated."""
        return self.is_ended or self._next >= len(self._source.topic(self._topic).entries)

    def _go_on(self, seconds: float = 0.0) -> None:
        self._source.scheduler.after(seconds + self._chance.uniform(*_STEP_SECONDS), self._step)

    def _step(self) -> None:
        faults, seconds = self._source.faults, 0.0
        if faults.is_now("replication stands still"):
            seconds = self._chance.choice(_STANDS_STILL_SECONDS)
        elif not self.is_done and self._target.has(self._topic):
            if faults.is_now("replicator connects again"):
                self._next = max(0, self._next - self._chance.randint(1, _MOST_UNACKNOWLEDGED))
            entry = self._source.topic(self._topic).entries[self._next]
            self._next += 1
            position = self._target.replicate(self._topic, entry, self._source.name, self._deduplicates)
            if position is not None:
                self._on_replicated(entry.position, position)
        self._go_on(seconds)


class Replication:
    """What is published in the other cluster, and comes here.

    Attributes:
        is_made: whether there is another cluster in this simulation.
        is_taken: whether the job here takes what comes from there.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        chance = random.Random(f"replication {world.plan.seed}")
        is_both_ways = world.another_place.is_made
        self.is_made: bool = chance.random() < world.plan.rates.get("seeds with replication", 0.0) or is_both_ways
        self.is_taken: bool = chance.random() < 0.5 or not self.is_made or is_both_ways
        self._deduplicates = chance.random() < 0.7 or is_both_ways
        self.other = Cluster(world.scheduler, world.faults, ELSEWHERE)
        self._replicators: list[Replicator] = []
        self._producers: Producers | None = None
        self.sent_there: dict[str, list[tuple[str, Expected]]] = defaultdict(list)  # by entry there
        self.chunks: dict[str, Chunked] = {}  # likewise
        self._chunks_here: dict[int, Chunked] = {}  # by the identity of those there

    @property
    def share(self) -> float:
        """How many of the entries are published there."""
        return _SHARE if self.is_made else 0.0

    @property
    def share_of_commands(self) -> float:
        return _COMMANDS if self.is_made else 0.0

    @property
    def last_due(self) -> int:
        return 0 if self._producers is None else self._producers.last_due

    @property
    def is_done(self) -> bool:
        return all(one.is_done for one in self._replicators)

    def begin(self) -> None:
        """Users publish elsewhere."""
        world = self._world
        if not self.is_made:
            return
        self._producers = Producers(
            world.scheduler,
            self.other,
            self,
            world.settings,
            world.plan.seconds,
            world.plan.per_second * _SHARE,
            lambda what: world.trace(f"{ELSEWHERE}: {what}"),
            first=_FIRST,
            kinds=TAKEN_KINDS if self.is_taken else KINDS,
            # Of chunks that come again the accounts don't know which ones make the message.
            in_chunks=IN_CHUNKS if self._deduplicates and not world.another_place.is_made else 0.0,
        )
        for route in world.settings.routes:

            def came(there: Position, here: Position, topic: str = route.source) -> None:
                self._came(topic, there, here)

            self._replicators.append(Replicator(self.other, world.cluster, route.source, self._deduplicates, came))
            if world.another_place.is_made:
                back = Replicator(world.cluster, self.other, route.source, self._deduplicates, lambda there, here: None)
                self._replicators.append(back)

    def end(self) -> None:
        """Nothing is replicated any more."""
        for one in self._replicators:
            one.is_ended = True

    def sent(self, position: str, expected: Expected) -> None:
        """A message is in a source topic elsewhere."""
        self.sent_there[entry_of(position)].append((position, expected))
        if self._world.another_place.is_restored:
            self._world.oracle.sent(self._world.another_place.known(position), expected)

    def _came(self, topic: str, there: Position, here: Position) -> None:
        """An entry has been replicated."""
        oracle = self._world.oracle
        self._world.trace(f"{topic.rpartition('/')[2]} gets {here}, {there} {ELSEWHERE}")
        if (chunked := self.chunks.get(str(there))) is not None:
            own = self._chunks_here.setdefault(id(chunked), Chunked(oracle.now()))
            oracle.chunks[str(here)] = own
            if chunked.last == str(there):
                own.last = str(here)
        for position, message in self.sent_there[str(there)]:
            own_position = position.replace(str(there), str(here), 1)
            own_message = replace(message) if self.is_taken else _left_out(message)
            oracle.sent(own_position, own_message)


def _left_out(message: Expected) -> Expected:
    """A message that is for the job elsewhere: here `rejects` has its position alone."""
    reason = f"replicated from {ELSEWHERE}"
    return replace(message, rejected_for=reason, is_left_out=True, properties={}, schedule_key=None, repeat=None)
