"""A job that is away for seven hours in a simulation, and what may come twice then, by docs/guarantees.md alone.

Brokers go on meanwhile, and forget the job's producers. Messages that were sent and not recorded when the job ended may
come twice: "A long pause after a crash".
"""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from tests.simulation.expected import Arrival

if TYPE_CHECKING:
    from tests.simulation.world import World

HOURS = 7  # a broker forgets a producer after six
_BEGINS_SECONDS = (15.0, 50.0)
_TRIES = 100
_MORE_SECONDS = 20.0  # for which faults fall when the job is back


class LongPause:
    """Everybody who runs the job goes home, and is back seven hours later. The users and the brokers are elsewhere.

    Attributes:
        is_made: whether there is one in this simulation.
        ends_at: when the job is back, seconds; 0: it has not begun.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        chance = random.Random(f"long pause {world.plan.seed}")
        is_seed = chance.random() < world.plan.rates.get("seeds with a long pause", 0.0)
        self.is_made: bool = is_seed and not world.another_place.is_made
        self.ends_at = 0.0
        if self.is_made:
            begins_at = chance.uniform(*_BEGINS_SECONDS) * min(1.0, world.plan.seconds / 60)
            world.scheduler.at(begins_at, partial(self._begin, _TRIES))

    @property
    def is_now(self) -> bool:
        return self._world.scheduler.now < self.ends_at

    @property
    def faults_end_at(self) -> float:
        """Until when faults go on, at least, seconds."""
        return self.ends_at + _MORE_SECONDS if self.ends_at else 0.0

    def _begin(self, tries: int) -> None:
        """Begins as soon as something is sent and not recorded, or nothing has been for a while."""
        world = self._world
        if tries and not any(world.oracle.is_behind(name) for _, name in world.destinations.values()):
            world.scheduler.after(0.05, partial(self._begin, tries - 1))
            return
        world.trace(f"the job is away for {HOURS} hours")
        self.ends_at = world.scheduler.now + HOURS * 3600
        world.faults.are_over = True
        world.end_all()
        world.scheduler.at(self.ends_at, self._end)

    def _end(self) -> None:
        world = self._world
        world.trace("the job is back")
        world.faults.are_over = False
        world.oracle.producers_forgotten(world.oracle.now() - HOURS * 3_600_000)
        world.start()


class Doubles:
    """Deliveries that may come once more, because the broker has forgotten their producers.

    Attributes:
        n: those that have.
    """

    def __init__(self) -> None:
        self._came: set[tuple[str, str, int, int]] = set()
        self._left: Counter[tuple[str, str]] = Counter()
        self._may_come: set[tuple[str, str, int, int]] = set()
        self.n = 0

    def may_come(self, not_recorded: Counter[tuple[str, str]]) -> None:
        """The broker has forgotten the job's producers.

        Args:
            not_recorded: by (position, subscription) how many deliveries have come that `deliveries` does not have.
        """
        self._left |= not_recorded
        self._may_come |= {one for one in self._came if one[:2] in not_recorded}

    def is_one(self, arrival: Arrival) -> bool:
        """Whether a delivery is another one of what has come, and may be."""
        name = arrival.position, arrival.subscription
        delivery = (*name, arrival.occurrence, arrival.attempt)
        if delivery in self._may_come and self._left[name]:
            self._may_come.remove(delivery)
            self._left[name] -= 1
            self.n += 1
            return True
        self._came.add(delivery)
        return False
