"""What a schedule key costs a shard: a million live keys, compared with as many messages without one.

    .venv/bin/python benchmarks/keyed.py [KEYS]

Prints one JSON object. All messages are due in a day, so their rows are sealed, and what is counted is what the shard
keeps of them: bytes of state, and CPU microseconds and calls of the state store for a message; of these again when a
further message of random keys supersedes the first. Then no key is named until all have left the state: bytes of state
a cold key, and again CPU for a message that supersedes one (of all keys at random: each tick reads the index). A key
that is sent 10,000 times a second, for a second, makes so many deliveries; and how long is the tick that supersedes one
message of the million, in state or not.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Collection, Sequence

import numpy as np
import pyarrow as pa

from tracker.keys.live_keys import LiveKeys
from tracker.messages import MESSAGES, concat, with_columns
from tracker.shard import Shard, StateOptions
from tracker.store import Key, MemoryStore
from tracker.tick import Effects, Tick, TickInput
from warehouse.delta.tables import Tables
from warehouse.queries.index_rows import find_keyed_messages, to_index

TOPIC = "persistent://public/default/t"
TICK_MILLIS, DAY_MILLIS = 333, 86_400_000
START = 1_790_000_000_000
ROWS_A_TICK = 3_333
TICKS_A_SEAL = 15


class CountingStore(MemoryStore):
    """A store that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def get(self, table: str, key: Key) -> bytes | None:
        self.calls += 1
        return super().get(table, key)

    def put(self, table: str, key: Key, value: bytes, files: Collection[str] = ()) -> None:
        self.calls += 1
        super().put(table, key, value, files)


class Job:
    """A shard of its own."""

    def __init__(self) -> None:
        self.store = CountingStore()
        self.tick = self.seal_epoch = self.entry = 0
        self.cpu_seconds = 0.0
        self.handed_out = 0
        self.idle_millis = 1 << 60
        self.sealed: list[pa.Table] = []
        self.tables: Tables | None = None

    def write_index(self, folder: str) -> None:
        """Writes what has been sealed so far to a delayed index, where keys are looked up from now on."""
        self.tables = Tables(folder)
        self.tables.create()
        self.tables.append("delayed_index", to_index(concat(self.sealed), 1), {})
        self.sealed.clear()

    def cool(self) -> None:
        """Until no key is in state that has not been named."""
        self.idle_millis = 0
        while len(LiveKeys(self.store)) > LiveKeys(self.store).n_cold:
            self.step(None, seals=True)
        self.idle_millis = 1 << 60

    def _find_keyed(self, names: Collection[tuple[str, str]], groups: Sequence[int]) -> pa.Table:
        assert self.tables is not None
        return find_keyed_messages(self.tables, self.tables.version("delayed_index"), names, groups)

    def step(self, keys: list[str] | None, due_in: int = DAY_MILLIS, n: int = 0, seals: bool = False) -> Effects:
        """A tick; takes a message of each key, or n without one."""
        self.tick += 1
        now = START + self.tick * TICK_MILLIS
        self.seal_epoch += seals or self.tick % TICKS_A_SEAL == 1
        rows = self._messages(n if keys is None else len(keys), keys, now, now + due_in)
        tick = Tick(
            tick=self.tick,
            now=now,
            cutoff=now + 1_000,
            seal_epoch=self.seal_epoch,
            load_horizon=now + 30_000,
            near_until=now + 6_500,
            run_id="r",
            confirmed=self.tick - 1,
            durable_through=self.seal_epoch - 1,
            ingested_through=self.tick,
        )
        begin = time.process_time()
        shard = Shard(self.store, {TOPIC: ["a"]}, 1_000_000, options=StateOptions(key_idle_millis=self.idle_millis))
        effects = shard.apply(tick, TickInput(messages=rows, find_keyed=self._find_keyed))
        self.cpu_seconds += time.process_time() - begin
        self.sealed.append(effects.bucket)
        self.handed_out += sum(release.rows.num_rows for release in effects.releases)
        return effects

    def settle(self) -> None:
        """Until all has been sealed and is durable."""
        for _ in range(3 * TICKS_A_SEAL):
            self.step(None)

    def n_bytes(self, prefix: str = "") -> int:
        return sum(len(value) for (table, _), value in self.store.values.items() if table.startswith(prefix))

    def measured(self, of: int) -> dict[str, float]:
        """CPU and calls for each of so many messages since the last time."""
        found = {"cpu_micros": round(self.cpu_seconds / of * 1e6, 1), "state_calls": round(self.store.calls / of, 2)}
        self.cpu_seconds, self.store.calls = 0.0, 0
        return found

    def _messages(self, n: int, keys: list[str] | None, now: int, due: int) -> pa.Table:
        constants = {"topic": TOPIC, "partition": -1, "ledger_id": 1, "batch_index": -1, "batch_size": 1}
        constants |= {"publish_time": now, "event_time": 0, "producer_name": "p", "payload": b"x" * 86}
        columns = {name: pa.repeat(value, n) for name, value in constants.items()}
        columns |= {"entry_id": pa.array(np.arange(self.entry, self.entry + n)), "deliver_at": pa.repeat(due, n)}
        columns["first_index"] = columns["entry_id"]
        properties = [[("scheduleKey", key)] for key in keys] if keys is not None else [[]] * n
        columns["properties"] = pa.array(properties, MESSAGES.field("properties").type)
        if keys is not None:
            columns["schedule_key"] = pa.array(keys, pa.string())
        self.entry += n
        arrays = [columns[f.name].cast(f.type) if f.name in columns else pa.nulls(n, f.type) for f in MESSAGES]
        rows = pa.table(arrays, schema=MESSAGES)
        # Times differ, as those of messages do.
        spread = np.random.default_rng(self.entry).integers(0, 60_000, n) if due > now + 60_000 else np.zeros(n, int)
        return with_columns(rows, deliver_at=pa.array(due + spread)) if n else rows


def main() -> None:
    """Runs it."""
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    random = np.random.default_rng(1)
    plain, keyed = Job(), Job()
    for first in range(0, n, ROWS_A_TICK):
        rows = min(ROWS_A_TICK, n - first)
        plain.step(None, n=rows)
        keyed.step([f"order-{i}" for i in range(first, first + rows)])
    found: dict[str, object] = {"keys": n, "message": plain.measured(n), "keyed_message": keyed.measured(n)}
    plain.settle()
    keyed.settle()
    found |= {"state_bytes": plain.n_bytes(), "keyed_state_bytes": keyed.n_bytes()}
    found["bytes_a_key"] = round((keyed.n_bytes() - plain.n_bytes()) / n, 1)
    keyed.measured(1)
    ticks = 20
    for _ in range(ticks):
        keyed.step([f"order-{i}" for i in random.integers(0, n, ROWS_A_TICK).tolist()])
    found["superseding_message"] = keyed.measured(ticks * ROWS_A_TICK)
    keyed.settle()
    begin = time.perf_counter()
    effects = keyed.step(["order-1"])
    found["superseding_one_millis"] = round((time.perf_counter() - begin) * 1_000, 1)
    assert effects.outcomes.num_rows == 2, "for its subscription, and for later ones"
    with tempfile.TemporaryDirectory() as folder:
        found |= cold(keyed, folder, n)
    hot = Job()
    for _ in range(3):
        hot.step(["hot"] * ROWS_A_TICK, due_in=5_000)
    for _ in range(30):
        hot.step(None)
    found |= {"sent_of_one_key": 3 * ROWS_A_TICK, "deliveries": hot.handed_out}
    print(json.dumps(found))


def cold(job: Job, folder: str, n: int) -> dict[str, object]:
    """Measures a shard of which all keys have left the state."""
    bits = job.n_bytes() - job.n_bytes("schedule_keys")
    job.write_index(folder)
    job.cool()
    found: dict[str, object] = {"bytes_a_cold_key": round((job.n_bytes() - bits) / n, 1)}
    times = []
    for i in range(2, 12):
        begin = time.perf_counter()
        effects = job.step([f"order-{i}"])
        times.append((time.perf_counter() - begin) * 1_000)
        assert effects.outcomes.num_rows == 2, "for its subscription, and for later ones"
    found["superseding_a_cold_one_millis"] = round(sorted(times)[5], 1)
    job.measured(1)
    ticks = 5
    random = np.random.default_rng(2)
    for _ in range(ticks):
        job.step([f"order-{i}" for i in random.integers(0, n, ROWS_A_TICK).tolist()])
    return found | {"superseding_cold_message": job.measured(ticks * ROWS_A_TICK)}


if __name__ == "__main__":
    main()
