"""What users do in a simulation: they publish messages, alone and in batches, due at once, soon and later."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from broker.protocol.building import OutgoingMessage, batch_entry, encoded_property, single_entry
from conf.settings import Settings
from tests.simulation.broker import Cluster
from tests.simulation.oracle import Expected, Oracle
from tests.simulation.scheduler import EPOCH_SECONDS, Scheduler

_ENDS_MILLIS = (200, 2_000, 20_000)  # from when a message is due on
_DUE_MILLIS = (-2_000, 0, 300, 900, 2_500, 4_000, 8_000, 20_000, 45_000)  # from when it is published on


class Producers:
    """Publish to all source topics until a time.

    Args:
        until: seconds.
        per_second: the number of entries.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cluster: Cluster,
        oracle: Oracle,
        settings: Settings,
        until: float,
        per_second: float,
        trace: Callable[[str], None],
    ) -> None:
        self._scheduler, self._cluster, self._oracle = scheduler, cluster, oracle
        self._routes = {r.source: frozenset(s.name for s in r.subscriptions) for r in settings.routes}
        self._until, self._per_second, self._trace = until, per_second, trace
        self._random = random.Random(f"load {scheduler.random.random()}")
        self._n = 0
        self.last_due = 0
        scheduler.after(1.0, self._publish)

    def _publish(self) -> None:
        if self._scheduler.now > self._until:
            return
        source = self._random.choice(sorted(self._routes))
        now = round((EPOCH_SECONDS + self._scheduler.now) * 1000)
        n = self._random.choice([1, 1, 1, 3])
        due = [max(0, now + self._random.choice(_DUE_MILLIS) + self._random.randrange(200)) for _ in range(n)]
        ends = [at + self._random.choice(_ENDS_MILLIS) if self._random.random() < 0.1 else 0 for at in due]
        messages = [self._message(at, end) for at, end in zip(due, ends, strict=True)]
        entry = batch_entry(messages, b"user", now) if n > 1 else single_entry(messages[0], b"user", now)
        topic = self._cluster.topic(source)
        following = topic.end.next
        for i, at in enumerate(due):
            index = i if n > 1 else -1
            position = f"{following.ledger_id}:{following.entry_id}:-1:{index}"
            self._oracle.sent(position, Expected(at, self._routes[source], ends[i]))
            self.last_due = max(self.last_due, at)
        self._trace(f"published {following} to {source.rpartition('/')[2]}, due in {[at - now for at in due]} ms")
        self._cluster.publish(source, entry.data, n)
        self._scheduler.after(self._random.expovariate(self._per_second), partial(self._publish))

    def _message(self, due: int, ends_at: int) -> OutgoingMessage:
        self._n += 1
        properties = [encoded_property("deliverAt", str(due))]
        if ends_at:
            properties.append(encoded_property("expireAt", str(ends_at)))
        return OutgoingMessage(self._n, b"%d" % self._n, properties)
