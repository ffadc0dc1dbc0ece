"""Rows that an earlier version took in and this one can't handle: their neighbours come on time, and they are named.

Such rows are planted by every way in: in the tables, as an import before its checks, and a rebuild, left them; by the
topic; by an import from another system; by commands for them, and by a retry of each by its id.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pulsar
import pyarrow as pa
import pytest

from broker.standalone import EmbeddedBroker
from checkpoint_from_tables.importing.files import FIRST_LEDGER_OF_FILES
from checkpoint_from_tables.importing.importer import Importer
from checkpoint_from_tables.other_systems.importing import import_items
from checkpoint_from_tables.other_systems.item import Item, item
from tests.support.service.harness import PATIENCE, Collector, Job, now, wait_until
from tests.support.tracker.messages import messages
from warehouse.audit.accounts import run_audit
from warehouse.delta.tables import Tables

NAMES = "ab"
NEIGHBOURS = 40
LATE_MILLIS = 3_000 * PATIENCE
LEDGER = FIRST_LEDGER_OF_FILES

# What is wrong with each: columns of MESSAGES.
SENT_LATE_RULE = {"repeat": "FREQ=MONTHLY;BYMONTH=11;BYDAY=1MO,12TU"}
PLANTED: dict[str, dict[str, Any]] = {
    "no value": {"properties": [("region", None)]},
    "no value in a batch": {"properties": [("a", "b"), ("region", None)], "event_time": 5},
    "before 1970": {"event_time": -157_766_400_000},
    "before 1970, with a key": {"event_time": -1, "key": "k"},
    "no rule": {"properties": [("repeat", "FREQ=NONSENSE")], "occurrence": 1},
    "a rule past its year": {"properties": list(SENT_LATE_RULE.items()), "occurrence": 1},
    "no time zone": {"properties": [("repeat", "0 9 * * *"), ("timeZone", "Moon/Base")], "occurrence": 1},
    "no rule at all": {"properties": [], "occurrence": 1},
    "an end that is no number": {"properties": [("repeat", "@every 5s"), ("repeatUntil", "soon")], "occurrence": 1},
    "no mode": {"properties": [("scheduleKey", "p1"), ("scheduleMode", "?")], "schedule_key": "p1"},
    "no duration": {"properties": [("scheduleKey", "p2"), ("debounceMax", "?")], "schedule_key": "p2"},
    "no reasons": {"attempt": 1, "retry_reasons": "[", "subscription": "a", "sequence": 1},
    "no encoding": {"key": "k", "key_encoding": "rot13"},
    "no payload": {"payload": None},
}
# These can't be sent; the others go out as they are.
UNSENDABLE = {name for name in PLANTED if name.startswith(("no value", "before"))}


class OtherSystem:
    """A system whose jobs can be taken by their values, and mean something odd, and one that is as any."""

    left: Counter[str] = Counter()

    def __init__(self, due: int) -> None:
        self._due = due

    def items(self) -> Iterator[Item]:
        for number, properties in enumerate(
            [SENT_LATE_RULE, {"scheduleKey": "\x00"}, {"retryOf": "7:0"}, {"": "x" * 9_000}]
        ):
            yield item(f"odd {number}", self._due, b"odd item", properties)
        yield item("nothing", self._due, None)
        yield item("well", self._due, b"item")


def planted(topic: str, due: int) -> pa.Table:
    """The planted rows, and their neighbours: before, between and after them, with a key and without."""
    rows = []
    for number, (name, columns) in enumerate(PLANTED.items()):
        of_row = {"payload": name.encode(), **columns}
        rows.append(messages([(LEDGER, 2 * number, due)], topic=topic, publish_time=due - 60_000, **of_row))
    for i in range(NEIGHBOURS):
        key = "k" if i % 2 else None
        payload = f"neighbour {i}".encode()
        rows.append(messages([(LEDGER, 2 * i + 1, due)], topic=topic, payload=payload, key=key))
    return pa.concat_tables(rows).sort_by("entry_id")


@pytest.mark.long
def test_rows_that_can_not_be_handled_leave_their_neighbours_alone(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path, collector: Collector
) -> None:
    job = Job(tmp_path, broker.settings, [{"source": topic, "subscriptions": [{"name": name} for name in NAMES]}])
    for name in (*NAMES, "rejects"):
        collector.collect(f"{topic}-{name}")
    Tables(job.settings.warehouse).create()
    well = {f"neighbour {i}" for i in range(NEIGHBOURS)} | {f"beside {i}" for i in range(7)} | {"item"}
    due = now() + 150_000  # after a rebuild, a start and some commands, whose pace is not known yet
    Importer(job.settings, topic).append(planted(topic, due), "import-planted", 1)
    import_items(Importer(job.settings, topic), OtherSystem(due))
    job.rebuild()
    producer = pulsar_client.create_producer(topic, batching_enabled=False)

    def arrived(name: str) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for message in list(collector.received[f"{topic}-{name}"]):
            found.setdefault(message.payload.decode(), []).append(message)
        return found

    def has(name: str, text: str) -> bool:
        return text in arrived(name)

    def has_all(name: str) -> bool:
        return well <= arrived(name).keys()

    def places(of: int) -> list[str]:
        named = [f"{LEDGER}:{2 * number}" for number in range(len(PLANTED)) if number % 3 == of]
        return [text for place in named for text in ("--messageId-triplet", place)]

    def command(*arguments: str) -> str:
        return job.command("topics", *arguments).stdout

    try:
        job.start()
        # By the topic, at the same instant.
        at = {"deliverAt": str(due)}
        for i, properties in enumerate(
            [
                {
                    "retryOf": "7:0",
                    "retrySubscription": "a",
                    "delaylake.reasons": '["\\ud800"]',
                    "retryReason": "x" * 9_000,
                },
                {"retryOf": "7:0", "retrySubscription": "a", "delaylake.attempt": "9999", "retryAfter": "366d"},
                {"retryOf": "7:0", "retrySubscription": "a", "redriveRequest": "r" * 300_000},
                {**SENT_LATE_RULE, **at},
                {"repeat": "\x00", **at},
                {"scheduleKey": "\x00", "scheduleMode": "replace", **at},
                {"delaylake.shapedFrom": "x", "delaylake.keyEncoding": "x", "delaylake.occurrence": "-1", **at},
            ]
        ):
            producer.send(f"odd {i}".encode(), properties=properties)
            producer.send(f"beside {i}".encode(), properties=at)
        # By commands: whatever they answer, they stop nothing.
        command("reschedule", topic, "-s", "b", *places(1), "--deliver-at", str(due + 1_000))
        command("skip-messages", topic, "-s", "b", *places(2))
        command("restore", topic, "-s", "b", *places(2))
        assert now() < due, "the commands came too late to show anything"
        for name in NAMES:
            wait_until(functools.partial(has_all, name), 120, f"all neighbours of {name}\n{job.log}")
            for text in well:
                [message] = arrived(name)[text]
                assert due <= message.published_at <= due + LATE_MILLIS, (text, message.published_at - due)

        def rejected() -> set[str]:
            return {(row["payload"] or b"").decode() for row in job.rows("rejects")}

        wait_until(lambda: rejected() >= UNSENDABLE, 30, f"the planted rows are rejected\n{job.log}")
        again = "neighbour 0"
        command("retry", topic, "-s", "a", *places(0), *places(1), *places(2))
        command("retry", topic, "-s", "a", "--messageId-triplet", f"{LEDGER}:1")
        wait_until(lambda: len(arrived("a")[again]) == 2, 60, f"the retry of {again}\n{job.log}")
        job.kill9()
        job.start()
        later = now() + 3_000
        producer.send(b"last", properties={"deliverAt": str(later)})
        for name in NAMES:
            wait_until(functools.partial(has, name, "last"), 60, f"the last one of {name}\n{job.log}")
            assert [text for text in well if len(arrived(name)[text]) != 1] == [again] * (name == "a")
            assert not UNSENDABLE & arrived(name).keys()
        for text in PLANTED.keys() - UNSENDABLE - {"no payload", "no reasons"}:
            assert text in arrived("a"), text
        assert "the query failed" not in job.log, job.log
        assert "is sent again" not in job.log, job.log
        told = json.loads(job.command("status", "--output", "json").stdout)
        print([trouble["text"] for trouble in told["troubles"]])
        assert job.terminate() == 0
        audit = run_audit(job.settings)
        assert {kind for kind in audit.findings if kind not in ("overdue",)} == set(), audit.findings
    finally:
        job.stop()
