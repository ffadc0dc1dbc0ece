"""Measures the tracker alone: rows a second taken in, sealed and handed out, commands a second, and bytes of state.

Its peers are a heap, and a set, of tuples. Prints one JSON object.
"""

from __future__ import annotations

import heapq
import json
import sys
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from tracker.buckets.delayed_delivery_tracker import DelayedDeliveryTracker
from tracker.commands.apply import Control
from tracker.commands.match import Named
from tracker.commands.occurrences import Occurrences
from tracker.commands.repeats import no_answers
from tracker.context import Context
from tracker.message_state.changes import CancelledMessages
from tracker.message_state.state import MessageState
from tracker.messages import MESSAGES
from tracker.schemas import COMMAND_ROWS, KNOWN
from tracker.store import MemoryStore
from tracker.subscriptions import Subscriptions

N = 200_000
BATCH = 10_000
SPREAD = 20_000
TOPIC = "persistent://public/default/t"


def rows(n: int, first: int, is_full: bool, chance: np.random.Generator) -> pa.Table:
    constant = {
        "topic": TOPIC if is_full else "",
        "partition": -1,
        "ledger_id": 1,
        "batch_index": -1,
        "batch_size": 1,
        "first_index": 0,
        "publish_time": 0,
        "event_time": 0,
        "producer_name": "producer" if is_full else None,
        "key": "key" if is_full else None,
        "properties": [("deliverAt", "1234567890123")] if is_full else [],
        "payload": b"x" * 100 if is_full else None,
    }
    columns = {
        "entry_id": pa.array(np.arange(first, first + n)),
        "deliver_at": pa.array(1_000_000 + chance.integers(0, SPREAD, n)),
    }
    return pa.table(
        [columns[f.name] if f.name in columns else pa.array([constant.get(f.name)] * n, f.type) for f in MESSAGES],
        schema=MESSAGES,
    )


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def tracker(is_full: bool) -> dict[str, float]:
    chance = np.random.default_rng(1)
    batches = [rows(BATCH, i * BATCH, is_full, chance) for i in range(N // BATCH)]
    store = MemoryStore()
    own = DelayedDeliveryTracker(store)
    taken: list[int] = []
    buckets: list[pa.Table] = []

    def add() -> None:
        for batch in batches:
            own.add_messages(batch, 0)

    def get() -> None:
        taken.extend(own.get_scheduled_messages(t).num_rows for t in range(1_000_199, 1_000_000 + SPREAD + 200, 200))

    times = {
        "add": seconds(add),
        "seal": seconds(lambda: buckets.append(own.seal_bucket(1, 1))),
        "load": seconds(lambda: own.load_segment(buckets[0])),
        "get_due": seconds(get),
    }
    assert sum(taken) == N
    own.save()
    bits = sum(len(v) for (name, _), v in store.values.items() if name == "index_bits")
    per_second = {f"{name}_rows_per_second": round(N / t) for name, t in times.items()}
    return per_second | {
        "added_and_taken_per_second": round(N / (times["add"] + times["seal"] + times["load"] + times["get_due"])),
        "index_bits_bytes_per_row": bits / N,
    }


def heap() -> int:
    """Returns rows added and taken a second by the peer, a heap of (deliver_at, ledger, entry)."""
    due = (1_000_000 + np.random.default_rng(1).integers(0, SPREAD, N)).tolist()
    queue: list[tuple[int, int, int]] = []

    def work() -> None:
        for entry, t in enumerate(due):
            heapq.heappush(queue, (t, 1, entry))
        while queue:
            heapq.heappop(queue)

    return round(N / seconds(work))


def commands_per_second() -> int:
    n = 50_000
    context = Context(MemoryStore(), Subscriptions({TOPIC: ["a"]}))
    context.begin_tick(tick=1, now=1, cutoff=1, released=1, ingested_through=1)
    state = MessageState(context)
    control = Control(context, state, Occurrences(context, state))
    entries = np.random.default_rng(1).choice(10 * n, n, replace=False)
    values = {
        "request_id": [f"request-{i}" for i in range(n)],
        "kind": ["cancel"] * n,
        "topic": [TOPIC] * n,
        "partition": [-1] * n,
        "subscriptions": [1] * n,
        "ledger_id": [1] * n,
        "entry_id": entries,
        "batch_index": [-1] * n,
        "deliver_at": [9_000_000] * n,
        "issued_by": ["bench"] * n,
        "issued_at": [1] * n,
        "body": [1] * n,
    }
    commands = pa.table([pa.array(values.get(f.name, [None] * n), f.type) for f in COMMAND_ROWS], schema=COMMAND_ROWS)
    values |= {"batch_size": [1] * n, "schedule_key": [None] * n}
    known = pa.table([pa.array(values[f.name], f.type) for f in KNOWN], schema=KNOWN)
    ids = dict.fromkeys(commands["request_id"].to_pylist(), 1)

    def work() -> None:
        repeats = control.find_repeats(commands, ids, no_answers)
        assert repeats is not None
        control.apply_commands(commands, Named(known, context.are_dispatched(known)), repeats)

    return round(n / seconds(work))


def bytes_per_cancelled() -> dict[str, float]:
    chosen = np.sort(np.random.default_rng(1).choice(10_000_000, 1_000_000, replace=False))
    store = MemoryStore()
    cancelled = CancelledMessages(store)
    cancelled.add_entries(0, chosen // 50_000, chosen % 50_000, chosen * 0 + 1)
    cancelled.save()
    state = sum(len(value) for value in store.values.values())
    sample = {(int(c) // 50_000, int(c) % 50_000) for c in chosen[:100_000]}
    peer = (sys.getsizeof(sample) + sum(sys.getsizeof(t) + 64 for t in sample)) / len(sample)
    return {"delaylake": state / len(chosen), "set_of_tuples": peer, "ratio": state / len(chosen) / peer}


def main() -> None:
    full, index = tracker(True), tracker(False)
    peer = heap()
    print(
        json.dumps(
            {
                "benchmark": "tracker",
                "rows": N,
                "full_rows": full,
                "index_only": index,
                "heap_added_and_taken_per_second": peer,
                "ratio_full_rows": round(full["added_and_taken_per_second"] / peer, 2),
                "ratio_index_only": round(index["added_and_taken_per_second"] / peer, 2),
                "cancels_per_second": commands_per_second(),
                "bytes_per_cancelled_message": bytes_per_cancelled(),
            }
        )
    )


if __name__ == "__main__":
    main()
