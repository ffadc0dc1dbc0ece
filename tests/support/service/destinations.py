"""Destinations that can't be written for a while, and messages for them."""

from __future__ import annotations

import pulsar

from broker.standalone import EmbeddedBroker
from tests.support.service.harness import Job, http, wait_until


class Destination:
    """A topic to which a job delivers. It is made, with so many partitions, and stays though nobody uses it."""

    def __init__(self, broker: EmbeddedBroker, topic: str, partitions: int = 0) -> None:
        self.topic = topic
        self.url = f"{broker.settings.admin_url}/admin/v2/{topic.replace('://', '/')}"
        if partitions:
            http.put(f"{self.url}/partitions", json=partitions).raise_for_status()
        else:
            http.put(self.url).raise_for_status()
        http.put(f"{self.url}/subscription/keeps-it").raise_for_status()  # else the broker deletes it after a minute

    def terminate(self) -> None:
        http.post(f"{self.url}/terminate").raise_for_status()

    def delete(self) -> None:
        http.delete(self.url, params={"force": "true"}).raise_for_status()


def send_numbered(producer: pulsar.Producer, dues: list[int], first: int = 0) -> dict[str, int]:
    """Sends a message for each due time, ms since the epoch, from `first` on; returns when each is due."""
    sent = {f"{i}": due for i, due in enumerate(dues, first)}
    for payload, due in sent.items():
        producer.send_async(payload.encode(), None, properties={"deliverAt": str(due)})
    producer.flush()
    return sent


def status(job: Job) -> tuple[int, str]:
    """The exit status of `delaylake status`, and all that it says."""
    done = job.command("status")
    return done.returncode, done.stdout + done.stderr


def wait_until_named(job: Job, stuck_to: str, well_to: str) -> None:
    """Waits until the status says that all is not well, and names the one topic and not the other."""

    def is_named() -> bool:
        code, text = status(job)
        return code == 1 and stuck_to in text and well_to not in text

    wait_until(is_named, 10, f"the status names {stuck_to}: {status(job)}")


def wait_until_well(job: Job) -> None:
    wait_until(lambda: status(job)[0] == 0, 10, f"all is well: {status(job)}")


def wait_until_written(job: Job, deliveries: int) -> None:
    """Waits until deliveries are in their table.

    A job that is told to end does not wait for it for long; to an audit what has arrived late would then be overdue.
    """
    wait_until(lambda: len(job.rows("deliveries", "SELECT 1 AS n FROM {table}")) >= deliveries, 20, job.log)
