"""A job that is killed, and started again with newer time zones."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pulsar
import pytest

from broker.standalone import EmbeddedBroker
from conf.time_zones import TIME_ZONE_DATA_VERSION
from tests.conftest import PROGRAM
from tests.support.service.harness import PATIENCE, Collector, Job, wait_until
from tests.support.tracker.time_zones import VERSION, other_version

EVERY_MILLIS = 10_000


@pytest.mark.long
def test_the_batch_that_is_run_again_has_the_occurrences_it_had_and_later_ones_go_by_the_newer(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path, collector: Collector
) -> None:
    job = Job(tmp_path, broker.settings, [{"source": topic, "subscriptions": [{"name": "a"}]}])
    collector.collect(f"{topic}-a")
    # Three seconds more than an hour: each ten seconds of the wall clock are now those from the seventh on.
    package = other_version(tmp_path / "newer", 3_603)
    path = os.pathsep.join([str(package.parent), *filter(None, [os.environ.get("PYTHONPATH")])])

    def occurrences() -> dict[int, int]:
        """By number when the occurrences that have arrived were due."""
        found = list(collector.received[f"{topic}-a"])
        return {int(m.properties["delaylake.occurrence"]): int(m.properties["delaylake.deliverAt"]) for m in found}

    def kill_in_a_batch() -> int | None:
        """Kills the job in the next batch that hands out an occurrence; returns that one's time.

        None: the batch was done before.
        """
        query = tmp_path / "checkpoint" / "query"
        newest = max(int(file.name) for file in (query / "offsets").glob("[0-9]*"))
        first = json.loads((query / "offsets" / str(newest)).read_text().splitlines()[-1])["cutoff"]
        due = (first // EVERY_MILLIS + 1) * EVERY_MILLIS
        deadline = time.monotonic() + 60 * PATIENCE
        while time.monotonic() < deadline:
            offset = query / "offsets" / str(newest + 1)
            if not offset.exists():
                time.sleep(0.002)
                continue
            newest += 1
            if json.loads(offset.read_text().splitlines()[-1])["cutoff"] >= due:
                job.kill9()
                is_begun_only = not (query / "commits" / str(newest)).exists()
                return due if is_begun_only else None
        raise AssertionError(f"no batch hands it out\n{job.log}")

    try:
        job.start()
        producer = pulsar_client.create_producer(topic)
        producer.send(b"tick", properties={"repeat": "*/10 * * * * *", "timeZone": "Europe/Berlin"})
        wait_until(occurrences, 60, f"an occurrence\n{job.log}")
        for _ in range(20):
            at_kill = kill_in_a_batch()
            if at_kill is not None:
                break
            job.start()
        assert at_kill is not None, "every batch was done before the job could be killed"

        job.start(("env", f"PYTHONPATH={path}", str(PROGRAM)))
        wait_until(
            lambda: sum(at > at_kill for at in occurrences().values()) >= 3, 60, f"three occurrences more\n{job.log}"
        )
        found = occurrences()
        planned, *later = [at for _, at in sorted(found.items()) if at > at_kill]
        assert planned % EVERY_MILLIS == 0, "its time is from the batch that was run again"
        assert [at % EVERY_MILLIS for at in later] == [7_000] * len(later)
        assert sorted(found) == list(range(1, len(found) + 1))
        assert at_kill in found.values()
        assert len(collector.received[f"{topic}-a"]) == len(found), "each came once"
        names = [file.name for file in (tmp_path / "checkpoint" / "query" / "time_zones").iterdir()]
        assert set(names) == {TIME_ZONE_DATA_VERSION, VERSION}
    finally:
        job.stop()
