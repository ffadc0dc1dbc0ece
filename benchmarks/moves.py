"""What moved messages cost a shard's state: 100,000 of them in one ledger, and 1,000 that move again with each tick.

    .venv/bin/python benchmarks/moves.py [MOVED] [A_TICK]

Prints one JSON object: bytes and calls that a tick reads and writes, and CPU milliseconds, where the messages that move
follow one another, as those of a rate, a pause or a recurring message do, and where they are any; and the bytes of
state a moved message.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection

import numpy as np

from tracker.message_state.changes import Moved
from tracker.messages import MessageIds
from tracker.store import Key, MemoryStore

LEDGER, NOW, DAY_MILLIS = 7, 1_790_000_000_000, 86_400_000
TICKS = 50


class CountingStore(MemoryStore):
    """A store that counts calls and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = {"read_bytes": 0, "read_calls": 0, "written_bytes": 0, "written_calls": 0}

    def get(self, table: str, key: Key) -> bytes | None:
        value = super().get(table, key)
        self.count["read_bytes"] += len(value or b"")
        self.count["read_calls"] += 1
        return value

    def put(self, table: str, key: Key, value: bytes, files: Collection[str] = ()) -> None:
        self.count["written_bytes"] += len(value)
        self.count["written_calls"] += 1
        super().put(table, key, value, files)


def move(store: MemoryStore, entries: np.ndarray, tick: int) -> None:
    """A tick that looks messages up, and moves them."""
    moved, n = Moved(store), len(entries)
    ids = MessageIds(np.full(n, LEDGER), entries, np.full(n, -1))
    moved.find_moves(0, ids)
    due = NOW + entries % DAY_MILLIS + tick * 60_000
    moved.put(0, ids, np.full(n, tick << 20), due, due - 60_000, np.zeros(n, np.int64))
    moved.save()


def run(n: int, a_tick: int, in_order: bool) -> dict[str, float]:
    """Moves them all, and then some with each tick."""
    store, random = CountingStore(), np.random.default_rng(1)
    move(store, np.arange(n), 1)
    found = {"state_bytes_a_message": round(sum(map(len, store.values.values())) / n, 1)}
    store.count = dict.fromkeys(store.count, 0)
    begin = time.process_time()
    for tick in range(TICKS):
        first = tick * a_tick % (n - a_tick + 1)
        entries = np.arange(first, first + a_tick) if in_order else random.choice(n, a_tick, replace=False)
        move(store, entries, 2 + tick)
    found["cpu_millis"] = round((time.process_time() - begin) / TICKS * 1_000, 2)
    return found | {name: count // TICKS for name, count in store.count.items()}


def main() -> None:
    """Runs it."""
    n, a_tick = (int(text) for text in (*sys.argv[1:], *("100000", "1000")[len(sys.argv) - 1 :]))
    print(json.dumps({"moved": n, "a_tick": a_tick, "in_order": run(n, a_tick, True), "any": run(n, a_tick, False)}))


if __name__ == "__main__":
    main()
