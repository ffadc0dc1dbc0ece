"""Destinations that somebody terminates in a simulation, and deletes some time later: then they are made again.

By docs/operations.md what is due for a terminated destination is parked, and goes out when it takes messages again. By
docs/guarantees.md what was sent and not recorded when a destination is deleted may come twice, and nothing else.
"""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

from tests.simulation.added import ADDED
from tests.simulation.broker import Topic

if TYPE_CHECKING:
    from tests.simulation.world import World

_DELETED_AFTER_SECONDS = (3.0, 15.0, 40.0)
_LOOK_SECONDS = 0.1
_LOOKS = 200  # after which it is deleted though the job is behind for it


class TerminatedDestinations:
    """Somebody terminates destinations, in some of the seeds.

    Attributes:
        are_made: whether somebody does.
        n: how often.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = random.Random(f"terminated {world.plan.seed}")
        is_chosen = self._random.random() < world.plan.rates.get("seeds with terminated destinations", 0.0)
        # What is behind where a backup is restored comes twice for other reasons, too.
        self.are_made = is_chosen and not world.backups.are_made and not world.long_pause.is_made
        self._terminated: Topic | None = None
        self.n = 0

    def each_second(self) -> None:
        """Somebody may terminate a destination, one at a time."""
        world = self._world
        if self._terminated is not None or not world.faults.is_now("destination terminated"):
            return
        names = [name for name in world.destination_topics() if world.subscription_of(name) != ADDED]
        topics = [world.cluster.topics[name] for name in names if name in world.cluster.topics]
        if topics:
            self._terminated = topic = self._random.choice(topics)
            self.n += 1
            world.trace(f"{topic.name.rpartition('/')[2]} is terminated")
            world.cluster.terminate(topic)
            seconds = self._random.choice(_DELETED_AFTER_SECONDS)
            world.scheduler.after(seconds, partial(self._delete, topic, _LOOKS))

    def _delete(self, topic: Topic, looks: int) -> None:
        """Deletes a topic as soon as the job is not behind for it, or after some time, when a broker has it."""
        world = self._world
        if world.cluster.topics.get(topic.name) is not topic:  # somebody else has
            self._terminated = None
            return
        subscription = world.subscription_of(topic.name)
        is_behind = world.oracle.is_behind(subscription)
        if world.cluster.is_offline(topic.name) or (is_behind and looks):
            world.scheduler.after(_LOOK_SECONDS, partial(self._delete, topic, max(0, looks - 1)))
            return
        world.trace(f"{topic.name.rpartition('/')[2]} is deleted{', with what is not recorded' if is_behind else ''}")
        if is_behind:
            world.oracle.destination_deleted(subscription)
        world.cluster.delete(topic)
        self._terminated = None
