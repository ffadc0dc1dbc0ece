"""Settings that are edited between runs: who gets what is decided by names, and a route may be away for a while."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pulsar
import pytest
import yaml

from broker.standalone import EmbeddedBroker
from tests.integration.commands.test_moves import Desk
from tests.support.service.harness import Collector, Job, wait_until
from warehouse.audit.accounts import run_audit

N = 100


def edit(job: Job, routes: list[dict[str, Any]]) -> None:
    changed = yaml.safe_load(job.file.read_text())
    job.file.write_text(yaml.safe_dump({**changed, "routes": routes}))


@pytest.mark.chaos  # tests/simulation has such crashes in each run
def test_commands_stay_with_their_subscription_and_messages_wait_for_their_route(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path, collector: Collector
) -> None:
    other, goes = f"{topic}_other", f"{topic}_goes"
    a, b = {"name": "a"}, {"name": "b"}
    stays = {"source": other, "subscriptions": [{"name": "x"}]}
    leaves = {"source": goes, "subscriptions": [a, b]}
    job = Job(
        tmp_path,
        broker.settings,
        [{"source": topic, "subscriptions": [a, b]}, stays, leaves],
        tracker={"max_seal_interval_millis": 1500, "load_ahead_millis": 9000},
    )
    for destination in (f"{topic}-a", f"{topic}-b", f"{topic}-new", f"{other}-x"):
        collector.collect(destination)

    def arrived(destination: str) -> Counter[str]:
        return Counter(m.payload.decode() for m in collector.received[destination])

    def changes() -> set[str]:
        found = {event["text"] for event in job.progress if event["event"] == "changed"}
        job.progress.clear()
        return found

    try:
        job.start()
        desk = Desk(pulsar_client, job, topic)
        refs = [desk.send(f"skip {i}", 36) for i in range(N)]
        for i in range(N):
            desk.send(f"keep {i}", 36)
        late = [desk.send(f"late {i}", 66) for i in range(N)]
        far = Desk(pulsar_client, job, goes)
        purged = [far.send(f"far {i}", 3600) for i in range(N)]
        assert desk.skip("a", *refs) == {"APPLIED"}
        early = Counter(f"early {i}" for i in range(N))
        for text in early:
            desk.send(text, 0)
        wait_until(lambda: (arrived(f"{topic}-a"), arrived(f"{topic}-b")) == (early, early), 20, "what is due at once")
        wait_until(lambda: run_audit(job.settings).taken_in >= len(early), 20, "it is durable")
        assert desk.skip("*", *(desk.send(f"for nobody {i}", 36) for i in range(N))) == {"APPLIED"}
        assert not changes()

        # The two are swapped, and another one comes in front of them.
        job.kill9()
        edit(job, [{"source": topic, "subscriptions": [{"name": "new"}, b, a]}, stays, leaves])
        job.start()
        assert changes() == {f"{topic}: subscription new was added"}
        keep, skip = (Counter(f"{what} {i}" for i in range(N)) for what in ("keep", "skip"))
        expected = {"a": early + keep, "b": early + keep + skip, "new": keep + skip}
        for name, all_of_it in expected.items():
            wait_until(lambda n=name, m=all_of_it: arrived(f"{topic}-{n}") == m, 60, f"all of {name}\n{job.log}")  # type: ignore[misc]
        # What went out before the new one was there is neither lost to it nor sent to it, also after a rebuild.
        assert job.terminate() == 0
        assert run_audit(job.settings).findings == {}
        job.rebuild()

        # Two routes are taken out while messages wait: they come due, and nothing happens.
        edit(job, [stays])
        job.start()
        assert changes() == {
            f"{name}: the route was taken out: it is not read, and what waits is held back" for name in (topic, goes)
        }
        desk.send("unread", 0)
        x = pulsar_client.create_producer(other)
        x.send(b"meanwhile")
        held = lambda: [  # noqa: E731
            row for row in job.rows("delayed_index") if row["operation"] == "DELAY" and row["subscription"] == "a"
        ]
        wait_until(lambda: len(held()) >= N, 60, f"what is held back\n{job.log}")
        wait_until(lambda: arrived(f"{other}-x") == Counter({"meanwhile"}), 20, "the other route's message")
        assert {name: arrived(f"{topic}-{name}") for name in expected} == expected
        # A command cancels what is held back, too.
        assert desk.skip("b", late[0]) == {"APPLIED"}
        listed = job.command("pending", topic, "--output", "json", "--limit", "1000")
        pending = json.loads(listed.stdout)
        assert pending["isWithoutRoute"]
        assert len(pending["messages"]) >= N
        assert "without a route" in job.command("pending", topic).stdout
        status = wait_until(lambda: "without a route" in (s := job.command("status")).stdout and s, 60, "a trouble")
        assert (status.returncode, topic in status.stdout) == (1, True)
        audit = job.command("audit")
        assert (audit.returncode, "without route" in audit.stdout) == (1, True), audit.stdout

        # One of them goes for good.
        dry = job.command("topics", "purge", goes, "--dry-run")
        assert f"{len(purged)} messages match" in dry.stdout, dry.stderr
        done = job.command("topics", "purge", goes, "--yes", "--output", "json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["applied"] == 2 * N
        wait_until(lambda: not json.loads(job.command("pending", goes, "--output", "json").stdout)["messages"], 30, "0")

        # The other is back: what was held back comes late, once, and what was not read.
        assert job.terminate() == 0
        edit(job, [stays, {"source": topic, "subscriptions": [b, a]}])
        job.start()
        assert changes() == {
            f"{topic}: the route is back",
            f"{topic}: subscription new was taken out: it gets nothing more",
        }
        soon = Counter([*(f"late {i}" for i in range(N)), "unread"])
        expected["a"] += soon
        expected["b"] += soon - Counter(["late 0"])
        wait_until(lambda: len(arrived(f"{topic}-a")) >= expected["a"].total(), 60, f"what was held back\n{job.log}")
        wait_until(lambda: len(arrived(f"{topic}-b")) >= expected["b"].total(), 20, "what was held back for b")
        time.sleep(2)
        assert {name: arrived(f"{topic}-{name}") for name in expected} == expected
        assert job.command("topics", "purge", topic, "--yes").returncode == 1, "it has a route"

        def taken_back(of: str) -> list[int]:
            counts = {(row["topic"], row["subscription"]): row["taken_back"] for row in run_audit(job.settings).counts}
            return [counts[of, name] for name in ("a", "b")]

        wait_until(lambda: run_audit(job.settings).is_clean, 30, "a clean audit")
        # Where these were not durable when the checkpoint was rebuilt, they are read again only now, and no table has
        # them until they are durable.
        wait_until(lambda: taken_back(topic) == [2 * N, N + 1], 30, "those for nobody, too, are taken back")
        assert taken_back(goes) == [N, N]
        wait_until(lambda: job.command("status").returncode == 0, 60, "no trouble")
        assert job.terminate() == 0
    finally:
        job.stop()
