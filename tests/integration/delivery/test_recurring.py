"""Recurring messages on the running job: each occurrence once for each subscription, whatever happens to the job."""

from __future__ import annotations

import time
from pathlib import Path

import pulsar
import pytest

from broker.standalone import EmbeddedBroker
from tests.support.service.harness import Collector, Job, wait_until
from warehouse.audit.accounts import run_audit
from warehouse.views import Warehouse

TIMES = 30


@pytest.mark.chaos  # tests/simulation has such crashes in each run
def test_each_occurrence_arrives_once_whatever_happens(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path, collector: Collector
) -> None:
    routes = [{"source": topic, "subscriptions": [{"name": "a"}, {"name": "b"}]}]
    job = Job(tmp_path, broker.settings, routes, tracker={"max_seal_interval_millis": 1500, "shards": 2})
    for name in ("a", "b", "rejects"):
        collector.collect(f"{topic}-{name}")
    producer = pulsar_client.create_producer(topic)
    ids: dict[str, pulsar.MessageId] = {}

    def send(text: str, repeat: str, **properties: str) -> None:
        ids[text] = producer.send(text.encode(), properties={"repeat": repeat, "misfire": "all", **properties})

    def numbers(text: str, subscription: str) -> list[int]:
        received = list(collector.received[f"{topic}-{subscription}"])
        return [int(m.properties["delaylake.occurrence"]) for m in received if m.payload.decode() == text]

    def pending() -> list[tuple[str, int]]:
        entry = f"ledger_id = {ids['skipped'].ledger_id()} AND entry_id = {ids['skipped'].entry_id()}"
        rows = Warehouse(job.settings).sql(f"SELECT subscription, occurrence FROM pending WHERE {entry} ORDER BY 1")
        return [(row["subscription"], row["occurrence"]) for row in rows.to_pylist()]

    def outcomes(operation: str) -> list[tuple[str, str, int]]:
        rows = job.rows("outcomes", f"SELECT * FROM {{table}} WHERE operation = '{operation}'")
        return [(row["subscription"], row["result"], row["occurrence"]) for row in rows]

    try:
        job.start()
        send("beat", "@every 2s", repeatTimes=str(TIMES), deliverAfter="1000")
        send("cron", "*/4 * * * * *", repeatTimes="15", timeZone="Europe/Berlin")
        send("cancelled", "@every 2s")
        send("paused", "@every 2s", repeatTimes="10")
        send("paused by key", "@every 2s", repeatTimes="8", scheduleKey="k")
        send("skipped", "@every 1h", repeatTimes="2", deliverAfter="3600000")
        send("wrong", "every day")
        send("never", "FREQ=MONTHLY;BYDAY=20MO")
        send("rare", "FREQ=MONTHLY;BYMONTH=11;BYDAY=1MO,12TU", deliverAfter="5000")
        send("forged", "@every 1s", repeatTimes="1", **{"delaylake.occurrence": "77"})
        wait_until(lambda: len(numbers("beat", "b")) >= 3, 60, f"three occurrences\n{job.log}")
        paused = f"{ids['paused'].ledger_id()}:{ids['paused'].entry_id()}"
        pause = job.command("schedules", "pause", topic, paused)
        assert pause.stdout.count("APPLIED") == 2, pause.stdout
        by_key = job.command("schedules", "pause", topic, "--schedule-key", "k")
        assert by_key.stdout.count("APPLIED") == 2, by_key.stdout
        at_pause = {name: len(numbers("paused", name)) for name in "ab"}
        job.kill9()
        job.start()
        before = len(numbers("beat", "a"))
        wait_until(lambda: len(numbers("beat", "a")) >= before + 3, 60, f"three more\n{job.log}")
        job.kill9()
        job.rebuild()
        job.start()

        of_paused = f"SELECT state FROM schedules WHERE entry_id = {ids['paused'].entry_id()}"
        wait_until(
            lambda: [row["state"] for row in Warehouse(job.settings).sql(of_paused).to_pylist()] == ["paused"] * 2,
            30,
            f"it is paused\n{job.log}",
        )
        assert "paused" in job.command("schedules", "list", topic).stdout
        again = job.command("schedules", "pause", topic, paused)
        assert again.stdout.count("ALREADY_APPLIED") == 2, again.stdout
        for name in "ab":  # what had been handed out when the command came arrives
            assert len(numbers("paused", name)) <= at_pause[name] + 3
        by_key = job.command("schedules", "pause", topic, "--schedule-key", "k")
        assert by_key.stdout.count("ALREADY_APPLIED") == 2, by_key.stdout
        told = sorted(result for _, result, _ in outcomes("PAUSE_SCHEDULE"))
        assert told == ["ALREADY_APPLIED"] * 4 + ["APPLIED"] * 4
        resume = job.command("schedules", "resume", topic, paused)
        assert resume.stdout.count("APPLIED") == 2, resume.stdout
        by_key = job.command("schedules", "resume", topic, "--schedule-key", "k")
        assert by_key.stdout.count("APPLIED") == 2, by_key.stdout

        ended_id = f"{ids['cancelled'].ledger_id()}:{ids['cancelled'].entry_id()}"
        sql = f"SELECT state FROM schedules WHERE entry_id = {ids['cancelled'].entry_id()}"
        wait_until(lambda: Warehouse(job.settings).sql(sql).num_rows == 2, 30, f"the schedule is known\n{job.log}")
        end = job.command("schedules", "end", topic, ended_id)
        assert end.stdout.count("APPLIED") == 2, end.stdout
        last = {name: max(numbers("cancelled", name)) for name in "ab"}
        skipped = f"{ids['skipped'].ledger_id()}:{ids['skipped'].entry_id()}"
        skip = job.command("schedules", "skip-next", topic, skipped, "-s", "a")
        assert skip.stdout.count("APPLIED") == 1, skip.stdout
        wait_until(lambda: outcomes("SKIP_NEXT") == [("a", "APPLIED", 1)], 30, f"skipped\n{job.log}")
        wait_until(lambda: pending() == [("a", 2), ("b", 1)], 30, "the next ones")
        for name in "ab":
            moved = job.command("topics", "deliver-now", topic, "-s", name, "--messageId-triplet", skipped)
            assert "APPLIED" in moved.stdout, moved.stdout

        wait_until(lambda: all(len(numbers("beat", s)) >= TIMES for s in "ab"), 120, f"all of them\n{job.log}")
        wait_until(lambda: len(numbers("cron", "b")) == len(numbers("cron", "a")) == 15, 60, "all by cron")
        wait_until(lambda: len(numbers("paused", "b")) == len(numbers("paused", "a")) == 10, 60, "all of the paused")
        of_key = "paused by key"
        wait_until(lambda: len(numbers(of_key, "b")) == len(numbers(of_key, "a")) == 8, 60, "all of the key's")
        wait_until(lambda: numbers("skipped", "b") == [1] and numbers("skipped", "a") == [2], 60, "but the skipped")
        time.sleep(3)
        for name in "ab":
            assert sorted(numbers("beat", name)) == list(range(1, TIMES + 1))
            assert sorted(numbers("cron", name)) == list(range(1, 16))
            assert sorted(numbers("paused", name)) == list(range(1, 11))
            assert sorted(numbers("paused by key", name)) == list(range(1, 9))
            assert numbers("forged", name) == numbers("rare", name) == [1]
            ended = numbers("cancelled", name)
            assert sorted(ended) == list(range(1, len(ended) + 1))
            assert len(ended) <= last[name] + 3  # what was handed out when the command came
        for message in collector.received[f"{topic}-a"]:
            of = ids[message.payload.decode()]
            assert message.properties["delaylake.messageId"].startswith(f"{of.ledger_id()}:{of.entry_id()}:")
        # After a lost checkpoint it is rejected once more.
        reasons = {m.properties["delaylake.reason"] for m in collector.received[f"{topic}-rejects"]}
        assert {reason.split()[0] for reason in reasons} == {"repeat"}
        assert "repeat never occurs: 'FREQ=MONTHLY;BYDAY=20MO'" in reasons
        assert pending() == [("b", 2)]
        wait_until(lambda: run_audit(job.settings).taken_in == 10, 60, "all entries")
        audit = run_audit(job.settings)
        assert audit.is_clean, audit.findings
        assert all(row["occurrences"] >= TIMES + 15 for row in audit.counts)
        sql = "SELECT subscription, state, count(*) AS n FROM schedules GROUP BY 1, 2 ORDER BY 1, 2"
        states = [tuple(row.values()) for row in Warehouse(job.settings).sql(sql).to_pylist()]
        of_b = [("b", "ended", 5), ("b", "takenBack", 1), ("b", "waiting", 2)]
        assert states == [("a", "ended", 6), ("a", "takenBack", 1), ("a", "waiting", 1), *of_b]
        assert job.terminate() == 0
    finally:
        job.stop()
