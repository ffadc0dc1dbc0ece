"""Two days of service by a compressed clock: shard, clock, tables and maintenance, without Spark and Pulsar.

What is kept (files, versions, rows, state) stops growing when what is pending and what is retained does.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from conf.settings import Settings
from conf.times import Moment
from streaming.checkpoint.offset import Offset
from streaming.release.feedback import Feedback
from streaming.source.clock import Clock, ClockSettings
from tests.support.tracker.fake_index import FakeIndex
from tests.support.tracker.messages import TOPIC, command, commands, messages
from tracker.messages import concat
from tracker.shard import Shard
from tracker.store import MemoryStore
from tracker.tick import Effects, TickInput
from warehouse.delta.tables import Tables
from warehouse.maintenance.maintain import maintain
from warehouse.queries.index_rows import (
    LOOKED_UP,
    cancels_to_index,
    find_known_messages,
    read_segment,
    rows_due,
    to_index,
)
from warehouse.schemas import DELIVERIES, OUTCOMES, SCHEMAS

START = 1_800_000_000_000
MINUTE, HOUR = 60_000, 3_600_000
MESSAGES_A_MINUTE, CANCELS_A_MINUTE = 60, 3
LONGEST_DELAY = 4 * HOUR
KEPT_SECONDS = 1  # versions of the tables, by the real clock
LEDGER_ENTRIES = 5_000


@dataclass
class Service:
    """A shard with the parts around it, at a time that is told to it."""

    settings: Settings
    kept_seconds: int = KEPT_SECONDS
    store: MemoryStore = field(default_factory=MemoryStore)
    offset: Offset = field(default_factory=Offset)
    sent: dict[tuple[int, int], int] = field(default_factory=dict)  # when each entry is due
    recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=10_000))
    results: Counter[str] = field(default_factory=Counter)
    delivered: Counter[tuple[int, int]] = field(default_factory=Counter)
    cancelled: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.tables = Tables(self.settings.warehouse)
        self.tables.create(keep_versions_millis=self.kept_seconds * 1000)
        self.clock = Clock(ClockSettings("run", 1_000, MINUTE, 3 * MINUTE))
        self.chance = random.Random(1)

    def minute(self, now: int) -> None:
        """Messages and cancels come in, and what is due goes out."""
        first = len(self.sent)
        new = [
            ((number // LEDGER_ENTRIES, number % LEDGER_ENTRIES), now + self.chance.randrange(1_000, LONGEST_DELAY))
            for number in range(first, first + MESSAGES_A_MINUTE)
        ]
        self.sent.update(new)
        self.recent.extend(key for key, _ in new)
        known = self.chance.sample(self.recent, CANCELS_A_MINUTE)
        requests = [f"{now} {i}" for i in range(len(known))]
        asked = commands(command(r, *key, cancel_at=self.sent[key]) for r, key in zip(requests, known, strict=True))

        last = self.offset
        feedback = Feedback(last.tick, last.cutoff)
        version = self.tables.version("delayed_index")
        monotonic = (now - START) / 1000
        index = FakeIndex(lambda *a: rows_due(self.tables, *a), version)
        offset = self.clock.next(last, Moment(now, monotonic), feedback, index)
        self.offset = replace(offset, ingested_through=offset.tick)
        tick_input = TickInput(
            messages=messages([(*key, due) for key, due in new], publish_time=now, payload=b"x" * 50),
            segment=read_segment(self.tables, offset.index_version, last.load_horizon, offset.load_horizon),
            commands=asked,
            request_ids=dict.fromkeys(requests, 1),
            known_messages=find_known_messages(
                self.tables, [self.tables.version(name) for name in LOOKED_UP], asked, []
            ),
        )
        shard = Shard(self.store, {TOPIC: ["a"]}, self.settings.tracker.min_index_count_per_bucket)
        self._write(shard.apply(self.offset.to_tick(), tick_input), now)

    def _write(self, effects: Effects, now: int) -> None:
        tick = self.offset.tick
        rows = concat(
            [to_index(effects.bucket, tick), cancels_to_index(effects.cancels, tick)], SCHEMAS["delayed_index"]
        )
        outcomes = []
        for row in effects.outcomes.to_pylist():
            result = {3: "TOO_LATE", 1: "APPLIED", 2: "ALREADY_APPLIED"}.get(row["result"], str(row["result"]))
            self.results[result] += 1
            if result == "APPLIED":
                self.cancelled.add((row["ledger_id"], row["entry_id"]))
            outcomes.append({**row, "result": result, "applied_at": now, "batch_id": tick})
        deliveries = []
        for row in concat([release.rows for release in effects.releases]).to_pylist():
            self.delivered[row["ledger_id"], row["entry_id"]] += 1
            own = {"subscription": "a", "sent_at": max(now, row["deliver_at"]), "destination": "d", "batch_id": tick}
            deliveries.append({name: (row | own).get(name) for name in DELIVERIES.names})
        for name, table in (
            ("delayed_index", rows),
            ("outcomes", pa.Table.from_pylist([{n: o.get(n) for n in OUTCOMES.names} for o in outcomes], OUTCOMES)),
            ("deliveries", pa.Table.from_pylist(deliveries, DELIVERIES)),
            ("entries", effects.entries),
        ):
            if table.num_rows:
                self.tables.append(name, table, {"simulation": tick})

    def sizes(self) -> Iterator[tuple[str, int]]:
        """How much of everything there is."""
        folder = Path(self.settings.warehouse)
        yield "values of the state", len(self.store.values)
        yield "bytes of the state", sum(map(len, self.store.values.values()))
        for name in SCHEMAS:
            files = [file for file in (folder / name).rglob("*") if file.is_file()]
            yield f"files of {name}", len(files)
            yield f"bytes of {name}", sum(file.stat().st_size for file in files)
            yield f"rows of {name}", self.tables.query(name, f"SELECT count(*) AS n FROM {name}")["n"][0].as_py()


@pytest.mark.chaos
def test_nothing_grows_for_ever(tmp_path: Path) -> None:
    retention = {f"{name}_millis": 2 * HOUR for name in SCHEMAS}
    settings = Settings(
        warehouse=str(tmp_path / "warehouse"),
        checkpoint=str(tmp_path / "checkpoint"),
        routes=({"source": TOPIC, "subscriptions": [{"name": "a"}]},),  # type: ignore[arg-type]
        retention=retention,  # type: ignore[arg-type]
    )
    service = Service(settings)
    history: dict[int, dict[str, int]] = {}
    for minute in range(48 * 60):
        now = START + minute * MINUTE
        service.minute(now)
        if minute % 20 == 19:
            maintain(settings, now=now)
            history[minute // 60] = dict(service.sizes())
            print(f"hour {minute / 60:.1f}: {history[minute // 60]}", flush=True)

    most: list[dict[str, Any]] = [
        {
            name: max(sizes[name] for hour, sizes in history.items() if begin <= hour < begin + 12)
            for name in history[47]
        }
        for begin in (24, 36)
    ]
    grown = {name: (before, most[1][name]) for name, before in most[0].items() if most[1][name] > 1.15 * before + 5}
    assert not grown
    assert service.results["APPLIED"] > 1_000
    due = {key for key, at in service.sent.items() if at < START + 47 * HOUR}
    wrong = [key for key in due if service.delivered[key] != (0 if key in service.cancelled else 1)]
    assert not wrong, (len(wrong), wrong[:5])
