"""What recurring messages cost a shard: 100,000 schedules of a minute, compared with 100,000 new messages a minute.

    .venv/bin/python benchmarks/recurring.py [SCHEDULES] [MINUTES]

Prints one JSON object: CPU seconds of the shard for a minute of each, and their ratio. Of new messages it is what they
cost from coming in until they are handed out, without what it costs to receive them; of schedules, what their
occurrences cost, which are not received.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import pyarrow as pa

from tracker.messages import MESSAGES, concat, int64, where
from tracker.shard import Shard
from tracker.store import MemoryStore
from tracker.tick import Tick, TickInput

TOPIC = "persistent://public/default/t"
TICK_MILLIS, SEAL_MILLIS, AHEAD_MILLIS, LOOKAHEAD_MILLIS = 333, 5_000, 30_000, 1_000
MINUTE = 60_000
START = 1_790_000_000_000


class Job:
    """A shard, whose buckets are loaded again when they are needed."""

    def __init__(self) -> None:
        self.shard_store = MemoryStore()
        self.now, self.tick, self.seal_epoch, self.sealed_at = START, 0, 0, 0
        self.load = self.near = 0
        self.sealed = MESSAGES.empty_table()
        self.cpu_seconds = 0.0
        self.handed_out = 0

    def step(self, rows: pa.Table) -> None:
        self.now += TICK_MILLIS
        self.tick += 1
        segment = MESSAGES.empty_table()
        if self.now - self.sealed_at >= SEAL_MILLIS:
            self.seal_epoch, self.sealed_at = self.seal_epoch + 1, self.now
            load = self.now + AHEAD_MILLIS
            self.near = self.now + SEAL_MILLIS + LOOKAHEAD_MILLIS + 400
            due = int64(self.sealed, "deliver_at")
            segment = where(self.sealed, (due >= self.load) & (due < load))
            self.sealed = where(self.sealed, due >= load)
            self.load = load
        tick = Tick(
            tick=self.tick,
            now=self.now,
            cutoff=min(self.now + LOOKAHEAD_MILLIS, self.near - 1),
            seal_epoch=self.seal_epoch,
            load_horizon=self.load,
            near_until=self.near,
            run_id="r",
            confirmed=self.tick - 4,
            durable_through=self.seal_epoch - 1,
        )
        begin = time.process_time()
        effects = Shard(self.shard_store, {TOPIC: ["a"]}, 1_000_000).apply(
            tick, TickInput(messages=rows, segment=segment)
        )
        self.cpu_seconds += time.process_time() - begin
        bucket = effects.bucket
        self.sealed = concat([self.sealed, where(bucket, int64(bucket, "deliver_at") >= self.load)]).combine_chunks()
        self.handed_out += sum(release.rows.num_rows for release in effects.releases)


def messages(n: int, ledger: int, entry: int, due: np.ndarray, published: int, recurs: bool) -> pa.Table:
    """Messages alone in their entries."""
    properties = [("deliverAt", "0"), ("repeat", "@every 60s"), ("misfire", "once")] if recurs else [("deliverAt", "0")]
    constants = {"topic": TOPIC, "partition": -1, "ledger_id": ledger, "batch_index": -1, "batch_size": 1}
    constants |= {"publish_time": published, "event_time": 0, "producer_name": "p", "payload": b"x" * 86}
    columns = {name: pa.repeat(value, n) for name, value in constants.items()}
    of_each = [[*properties[1:], ("deliverAt", str(time))] for time in due.tolist()] if recurs else [properties] * n
    columns |= {"properties": pa.array(of_each, MESSAGES.field("properties").type)}
    columns |= {"entry_id": pa.array(np.arange(entry, entry + n)), "deliver_at": pa.array(due)}
    if recurs:
        columns["occurrence"] = pa.repeat(1, n)
    arrays = [columns[f.name].cast(f.type) if f.name in columns else pa.nulls(n, f.type) for f in MESSAGES]
    return pa.table(arrays, schema=MESSAGES)


def run(n: int, minutes: int, recurs: bool) -> tuple[float, int]:
    """Returns the CPU seconds of a minute, and how many rows were handed out in it."""
    job = Job()
    random = np.random.default_rng(1)
    ticks = MINUTE // TICK_MILLIS
    entry = 0
    for tick in range((minutes + 1) * ticks):
        is_first = tick < ticks
        if tick == ticks:
            job.cpu_seconds, job.handed_out = 0.0, 0
        rows = MESSAGES.empty_table()
        if not recurs or is_first:
            k = n * (tick % ticks + 1) // ticks - n * (tick % ticks) // ticks
            due = job.now + MINUTE + random.integers(0, TICK_MILLIS, k)
            rows = messages(k, 1 + tick // ticks, entry, due, job.now, recurs)
            entry += k
        job.step(rows)
    return job.cpu_seconds / minutes, job.handed_out // minutes


def main() -> None:
    """Runs both, one after the other."""
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    minutes = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    one_time, handed_out = run(n, minutes, False)
    recurring, occurrences = run(n, minutes, True)
    found = {
        "schedules": n,
        "messages_cpu_seconds_a_minute": round(one_time, 2),
        "messages_a_minute": handed_out,
        "occurrences_cpu_seconds_a_minute": round(recurring, 2),
        "occurrences_a_minute": occurrences,
        "ratio": round(recurring / one_time, 2),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
