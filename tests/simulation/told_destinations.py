"""What the job's status says of destinations that take nothing.

By docs/operations.md it names one as `unwritable`, with the reason of the broker, or as `slow`, until it takes some.
The pages do not say how soon. A job that is refused may lose the task that was, and waits some seconds for others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from broker.protocol.wire.pulsar_pb2 import ServerError
from conf.partitions import without_partition
from status.alerts import SLOW, UNWRITABLE
from status.job_status import JobStatus
from tests.simulation.accounts import require
from tests.simulation.broker import Cluster
from tests.simulation.scheduler import Process

_SAID = (ServerError.TopicTerminatedError, ServerError.ProducerBlockedQuotaExceededException)
# A task is lost up to four times. The job waits 5 s for a destination that does not answer, its tasks reach 4 s ahead,
# and its thread may stand still for 6 s. A status is made each second.
_REFUSED = 4
_STATUSES = 15


class ToldDestinations:
    """The account of what is told of destinations that take nothing.

    Args:
        destinations: their names.
    """

    def __init__(self, destinations: Collection[str]) -> None:
        self._destinations = destinations
        self._job: Process | None = None  # that has made the last status
        self._n = 0  # its statuses
        self._refused: Counter[str] = Counter()  # what each destination had refused at the last status
        self._not_told: dict[str, list[int]] = {}  # the statuses that saw new refusals, and do not name the destination

    def told(self, job: Process, status: JobStatus, cluster: Cluster) -> None:
        """A job has made its status: it names a destination that refuses what the job sends, and none that does not."""
        unwritable = [one for one in status.troubles if one.kind == UNWRITABLE]
        for one in unwritable:
            said = [error for error in _SAID if ServerError.Name(error) in one.text]
            is_so = all(any(cluster.refusals[n, error] for n in cluster.partition_names(one.name)) for error in said)
            require(is_so, f"the status of {job.name} says of {one.name} what the broker has not said: {one.text}")
        if job is not self._job:
            self._job, self._n, self._not_told = job, 0, {}
        self._n += 1
        refused: Counter[str] = Counter()
        for (name, _), n in cluster.refusals.items():
            refused[without_partition(name)] += n
        named = {one.name for one in status.troubles if one.kind in (UNWRITABLE, SLOW)}
        for name in self._destinations:
            if name in named or not any(map(cluster.takes_nothing, cluster.partition_names(name))):
                self._not_told.pop(name, None)
            elif refused[name] > self._refused[name]:
                seen = self._not_told.setdefault(name, [])
                seen.append(self._n)
                is_soon = len(seen) < _REFUSED or seen[-1] - seen[0] < _STATUSES
                require(is_soon, f"{name} takes nothing, and {seen[-1] - seen[0]} statuses of {job.name} do not say so")
        self._refused = refused
