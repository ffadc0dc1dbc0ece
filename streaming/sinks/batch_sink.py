"""Writes a batch's output: rows to the Delta tables, outcomes to their topic, releases to the releaser."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame

from status.batch_status import BatchStatus
from streaming.checkpoint.checkpoint import Checkpoint
from streaming.free_memory import giving_back_memory
from streaming.operator.processor import RELEASES, OutputKind
from streaming.release.driver.releaser import Releaser
from streaming.sinks.outcomes import OutcomePublisher
from tracker.entry_log import ENTRIES
from tracker.messages import MESSAGES, concat, in_order
from tracker.packing import unpack
from tracker.schemas import CANCEL_ROWS, OUTCOME_ROWS
from warehouse.delta.tables import Tables
from warehouse.queries.index_rows import cancels_to_index, outcomes_to_rows, to_index, to_rejects
from warehouse.routes.membership import write_changes
from warehouse.schemas import DELAYED_INDEX


class BatchSink:
    """The function for Spark's `foreachBatch`: takes the operator's output rows of a batch.

    A replayed batch changes nothing that it has written before, because a table takes the rows of a tick once.

    Args:
        tables: of the warehouse.
        releaser: gets the releases.
        outcomes: publishes the outcomes.
        checkpoint: of the job; the sink syncs its files.
        run_id: of this run; releases of a tick that another run has made are not submitted.
        on_batch: called with the figures of the batch when it has been written.
    """

    def __init__(
        self,
        tables: Tables,
        releaser: Releaser,
        outcomes: OutcomePublisher,
        checkpoint: Checkpoint,
        run_id: str,
        on_batch: Callable[[BatchStatus], None],
    ) -> None:
        self._tables = tables
        self._releaser = releaser
        self._outcomes = outcomes
        self._checkpoint = checkpoint
        self._app_id = checkpoint.app_id
        self._run_id = run_id
        self._on_batch = on_batch

    @giving_back_memory
    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        outputs = batch.toArrow().to_pylist()
        self._tables.check_epoch()  # only now: `toArrow` runs the operator, which takes a while
        bodies: dict[str, list[Any]] = {}
        for output in outputs:
            bodies.setdefault(output["kind"], []).append(output)
        of_shards = sorted(bodies.get(OutputKind.STATUS, []), key=lambda output: output["shard"])
        statuses = [json.loads(output["body"]) for output in of_shards]
        if not statuses:
            return
        tick, now, cutoff = (statuses[0][name] for name in ("tick", "now", "cutoff"))

        self._checkpoint.sync_begun(batch_id)
        write_changes(self._tables, statuses[0]["changed"], tick, now, self._app_id)
        # Due messages first: the tables can wait some milliseconds.
        releases = [
            (o["shard"], o["tick"], kind, o["body"])
            for kind, output in enumerate(RELEASES)
            for o in bodies.get(output, [])
        ]
        # A replayed tick of an earlier run sends and confirms nothing: the first tick of this run hands out again all
        # messages in flight, those of that tick, too, in the order in which the broker must get them.
        if statuses[0]["run"] == self._run_id:
            next_due = min(s["next_due"] for s in statuses)
            large_bytes = sum(s.get("large_bytes", 0) for s in statuses)
            unwritable, drained, waiting = statuses[0]["unwritable"], _drained(statuses), _waiting(statuses)
            self._releaser.submit(tick, now, cutoff, next_due, releases, unwritable, waiting, drained, large_bytes)
        outcomes = concat((unpack(o["body"]) for o in bodies.get(OutputKind.OUTCOMES, [])), OUTCOME_ROWS)
        if outcomes.num_rows:
            # The table gets outcomes before they are published: a published outcome holds, whatever happens afterwards.
            applied_at = time.time_ns() // 1_000_000
            self._append("outcomes", outcomes_to_rows(outcomes, tick, applied_at), tick)
            self._outcomes.publish(outcomes, tick, applied_at)
        bucket = in_order(concat(unpack(o["body"]) for o in bodies.get(OutputKind.BUCKET, [])))
        cancels = concat((unpack(o["body"]) for o in bodies.get(OutputKind.CANCELS, [])), CANCEL_ROWS)
        index = [to_index(bucket, tick), cancels_to_index(cancels, tick)]
        self._append("delayed_index", concat(index, DELAYED_INDEX), tick)
        entries = concat((unpack(o["body"]) for o in bodies.get(OutputKind.ENTRIES, [])), ENTRIES)
        if entries.num_rows:
            self._checkpoint.sync_done()  # entries are acknowledged next, and then Pulsar may delete them
        self._append("entries", entries, tick)
        rejects = concat((unpack(o["body"]) for o in bodies.get(OutputKind.REJECTS, [])), MESSAGES)
        self._append("rejects", to_rejects(rejects, tick), tick)

        self._checkpoint.sync_soon()
        totals = {
            name: sum(s[name] for s in statuses)
            for name in statuses[0]
            if isinstance(statuses[0][name], int) and name not in ("tick", "now", "cutoff", "next_due")
        }
        totals["sink_millis"] = time.time_ns() // 1_000_000 - now
        shaped_until = _latest(s.get("shaped_until", {}) for s in statuses)
        paused = statuses[0]["paused"]  # all shards know of each pause
        releaser = self._releaser
        done = BatchStatus(tick, now, releaser.lookahead_millis, releaser.sending, totals, shaped_until, paused)
        failures = [tuple(one) for s in statuses for one in s.get("failures", [])]
        self._on_batch(replace(done, failures=failures, outcome_producer=self._outcomes.name))

    def _append(self, table: str, rows: pa.Table, tick: int) -> None:
        if rows.num_rows:
            self._tables.append(table, rows, {self._app_id: tick})


def _latest(of_shards: Iterable[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    """Merges the times of shards, by topic and subscription; the latest time counts."""
    found: dict[str, dict[str, int]] = {}
    for one in of_shards:
        for topic, names in one.items():
            for name, last in names.items():
                of_topic = found.setdefault(topic, {})
                of_topic[name] = max(last, of_topic.get(name, last))
    return found


def _drained(statuses: list[dict[str, Any]]) -> dict[tuple[str, str], tuple[int, bool]]:
    """Returns by target how many messages all shards let go to a slow destination, and whether others wait for it."""
    found: dict[tuple[str, str], tuple[int, bool]] = {}
    for status in statuses:
        for topic, names in status.get("drained", {}).items():
            for name, (n, others_wait) in names.items():
                before = found.get((topic, name), (0, False))
                found[topic, name] = before[0] + n, before[1] or others_wait
    return found


def _waiting(statuses: list[dict[str, Any]]) -> dict[str, dict[str, list[list[int]]]]:
    """Merges the shards' counts of messages that wait for places, as `Feedback.waiting` has them.

    Args:
        statuses: of the shards, by shard number.
    """
    of_shards = [status.get("waiting", {}) for status in statuses]
    targets = {(topic, name) for one in of_shards for topic, names in one.items() for name in names}
    found: dict[str, dict[str, list[list[int]]]] = {}
    for topic, name in sorted(targets):
        found.setdefault(topic, {})[name] = [one.get(topic, {}).get(name, [0, 0]) for one in of_shards]
    return found
