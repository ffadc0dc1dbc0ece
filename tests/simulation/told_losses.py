"""What the job's status, and its metrics, say of a source topic that lost entries before the job had read them.

By docs/operations.md the trouble `not_seen` has the number of entries that are in `rejects` for it since the job was
started, and a topic is named `standing` or `subscription_reset` for as long as it is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from status.alerts import NOT_SEEN, STANDING, Alert
from status.job_status import JobStatus
from status.metrics import JobCollector
from tests.simulation.accounts import require
from tests.simulation.scheduler import Process

# The thread that has written rows may stand still for 6 s before it tells of them. A status is made each second.
_STATUSES = 15


@dataclass
class _OfJob:
    """What a start of the job has written, and said.

    Attributes:
        n: the rows of `rejects` that name what it has not seen.
        earlier: the number at each of its last statuses.
        told: what its last status said.
    """

    n: int = 0
    earlier: deque[int] = field(default_factory=lambda: deque([0], maxlen=_STATUSES))
    told: int = 0


class ToldLosses:
    """The account of what is told of a source topic.

    Args:
        topic: its name.
    """

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._jobs: dict[Process, _OfJob] = {}
        self._last: JobStatus | None = None

    def recorded(self, job: Process, n: int) -> None:
        """A job has written rows to `rejects` that name what it has not seen."""
        self._jobs.setdefault(job, _OfJob()).n += n

    def told(self, job: Process, status: JobStatus) -> None:
        """A job has made its status: it names what the job has written some time before, and not more than it has."""
        of_job = self._jobs.setdefault(job, _OfJob())
        troubles = [one for one in status.troubles if (one.kind, one.name) == (NOT_SEEN, self._topic)]
        require(len(troubles) <= 1, f"the status of {job.name} has {troubles}")
        told = sum(one.count for one in troubles)
        if told != of_job.told:
            in_metrics = _in_metrics(status, self._topic)
            require(in_metrics == told, f"the metrics of {job.name} have {in_metrics} not seen, its status {told}")
            of_job.told = told
        least, most = of_job.earlier[0], max(of_job.n, any(_is_open(one) for one in troubles))
        require(least <= told <= most, f"the status of {job.name} has {told} not seen, and {least} to {most} are named")
        of_job.earlier.append(of_job.n)
        self._last = status

    def check_end(self) -> None:
        """Nothing waits any more: the last job says so, has told of all it has named, and knows all that is missing."""
        of_job = next(reversed(self._jobs.values()), _OfJob())
        require(of_job.told >= of_job.n, f"{of_job.n} entries are named, and the status has {of_job.told} not seen")
        for one in self._last.troubles if self._last is not None else ():
            is_over = one.name != self._topic or not (one.kind == STANDING or _is_open(one))
            require(is_over, f"the status says of {one.name}: {one.text}")


def _is_open(trouble: Alert) -> bool:
    """Whether nobody knows yet what is missing."""
    return trouble.kind == NOT_SEEN and "did not come, and why" in trouble.text


def _in_metrics(status: JobStatus, topic: str) -> float:
    return sum(
        sample.value
        for metric in JobCollector(lambda: status).collect()
        for sample in metric.samples
        if metric.name == "delaylake_troubles" and sample.labels == {"kind": NOT_SEEN, "name": topic}
    )
