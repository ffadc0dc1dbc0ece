"""What Sidekiq and BullMQ themselves have written is imported, each job at its time. `make programs` installs them."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import redis

from broker.standalone import EmbeddedBroker
from tests.conftest import RUN_SECONDS, run_here
from tests.support.servers.redis_server import redis_server, url_of
from tests.support.service.harness import Job, wait_until

PROGRAMS = Path(__file__).parents[2] / "other_systems"
BULLMQ = Path(sys.prefix) / "bullmq"  # apart from all else that is installed: it wants an old croniter
HOUR = 3_600_000

# What they write is also among the unit tests, as it was seen: so a test is only skipped where they can't be had.
need_sidekiq = pytest.mark.skipif(not shutil.which("sidekiq"), reason="needs Sidekiq: apt-get install ruby-sidekiq")
need_bullmq = pytest.mark.skipif(not BULLMQ.is_dir(), reason=f"needs BullMQ: pip install --target {BULLMQ} bullmq")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[redis.Redis]:
    with redis_server(tmp_path) as server:
        yield server


@pytest.fixture
def job(tmp_path: Path, broker: EmbeddedBroker, topic: str) -> Job:
    return Job(tmp_path, broker.settings, [{"source": topic, "subscriptions": [{"name": "a"}]}])


def run(command: list[str], **variables: str) -> Any:
    """Runs a program; returns the JSON that it has printed."""
    environment = {**os.environ, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def imported(job: Job, *arguments: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Imports twice; returns the first one's counts, and when each payload is due, ms since the epoch."""

    def run_import() -> dict[str, Any]:
        words = ["import", job.settings.routes[0].source, *arguments, "--discard-checkpoint", "--output", "json"]
        done = run_here("--config", str(job.file), *words)
        assert done.returncode == 0, done.stderr
        counts: dict[str, Any] = json.loads(done.stdout)
        return counts

    first, again = run_import(), run_import()
    assert (again["messages"], again["already_there"]) == (0, first["messages"])
    rows = job.rows("delayed_index", "SELECT payload, deliver_at FROM {table}")
    return first, {row["payload"].decode(): row["deliver_at"] for row in rows}


@need_sidekiq
def test_jobs_of_sidekiq_that_are_scheduled_or_retried(server: redis.Redis, job: Job) -> None:
    url, mail = url_of(server), str(PROGRAMS / "mail.rb")
    asked = run(["ruby", mail], REDIS_URL=url)
    with (job.folder / "sidekiq.log").open("wb") as log:
        worker = subprocess.Popen(
            ["sidekiq", "-r", mail, "-q", "mail", "-c", "1"],
            env={**os.environ, "REDIS_URL": url},
            stdout=log,
            stderr=log,
        )
        try:
            wait_until(lambda: server.zcard("retry") == 1, 60, "the job has failed, and waits for another try")
        finally:
            worker.kill()
            worker.wait()
    counts, due = imported(job, "--from", "sidekiq", "--url", url, "--queue", "mail")
    assert (counts["messages"], counts["rejected"], counts["left"]) == (3, 0, {"of other queues": 1})
    by_name = {json.loads(payload)["args"][0]: at for payload, at in due.items()}
    [seconds] = [score for _, score in server.zscan_iter("retry")]
    for name, (least, most) in (asked | {"fails": (seconds, seconds)}).items():
        first, last = (math.ceil(round(seconds * 1000, 3)) for seconds in (least, most))
        assert first <= by_name.pop(name) <= last, name
    assert not by_name
    assert {(one["class"], one["queue"]) for one in map(json.loads, due)} == {("Mail", "mail")}


@need_bullmq
def test_jobs_of_bullmq_that_are_delayed_or_retried(server: redis.Redis, job: Job) -> None:
    url = url_of(server)
    added = run([sys.executable, str(PROGRAMS / "encode.py"), url], PYTHONPATH=str(BULLMQ))
    counts, due = imported(job, "--from", "bullmq", "--url", url)
    assert (counts["messages"], counts["rejected"], counts["left"]) == (4, 0, {})
    delayed, first, _ = (at + delay for at, delay in added.values())
    tried = list(added)[-1]
    score = server.zscore("bull:video:delayed", tried)
    assert score is not None
    next_year = datetime(datetime.now(UTC).year + 1, 1, 1, tzinfo=UTC).timestamp() * 1_000
    assert due.pop('{"n":4}') == next_year, "of the job scheduler"
    assert due == {'{"name":"J\\u00fcrgen"}': delayed, '{"n":2}': first, '{"n":5}': score // 4096}
    rows = job.rows("delayed_index", "SELECT properties, occurrence FROM {table}")
    found = [dict(row["properties"]) for row in rows if row["occurrence"] is None]
    assert {one["jobId"]: one.get("attemptsMade") for one in found} == dict.fromkeys(added) | {tried: "1"}
    assert {(one["queue"], one["name"]) for one in found} == {("video", "encode")}
    [recurring] = [dict(row["properties"]) for row in rows if row["occurrence"] == 1]
    assert (recurring["repeat"], recurring["timeZone"], recurring["name"]) == ("0 0 1 1 *", "UTC", "report")
    assert job.rows("rejects") == []
