"""Writes a batch's output: rows to the Delta tables, outcomes to their topic, releases to the releaser."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from status.batch_status import BatchStatus
from streaming.batch_schema import BatchOutput, OutputKind, ShardStatus
from streaming.checkpoint.checkpoint import Checkpoint
from streaming.checkpoint.payload_files import PayloadFiles, PayloadSweep
from streaming.free_memory import giving_back_memory
from streaming.release.driver.releaser import Releaser
from streaming.release.driver.run_context import DispatchedBatch
from streaming.sinks.outcomes import OutcomePublisher
from tracker.messages import concat, in_order
from tracker.packing import parts_of_sizes, row_sizes
from tracker.requests import OPERATION
from warehouse.delta.tables import Tables
from warehouse.queries.index_rows import cancels_to_index, outcomes_to_rows, to_index, to_rejects
from warehouse.routes.membership import write_changes
from warehouse.schemas import SCHEMAS

_PART_BYTES = 32 << 20  # of rows whose payloads are in memory at a time


class BatchSink:
    """The function for Spark's `foreachBatch`: takes the operator's output rows of a batch.

    A replayed batch changes nothing that it has written before, because a table takes the rows of a tick once.

    Args:
        releaser: gets the releases.
        outcomes: publishes the outcomes.
        checkpoint: of the job; the sink syncs its files.
        run_id: of this run; releases of a tick that another run has made are not submitted.
        on_batch: called with the figures of the batch when it has been written.
        sweep: removes files with payloads that nobody needs any more; None: they stay.
    """

    def __init__(
        self,
        tables: Tables,
        releaser: Releaser,
        outcomes: OutcomePublisher,
        checkpoint: Checkpoint,
        run_id: str,
        on_batch: Callable[[BatchStatus], None],
        sweep: PayloadSweep | None = None,
    ) -> None:
        self._tables = tables
        self._releaser = releaser
        self._outcomes = outcomes
        self._checkpoint = checkpoint
        self._app_id = checkpoint.app_id
        self._run_id = run_id
        self._on_batch = on_batch
        self._payloads = PayloadFiles(checkpoint.payload_folder)
        self._sweep = sweep

    @giving_back_memory
    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        output = BatchOutput(batch.toArrow())
        self._tables.check_epoch()  # only now: `toArrow` runs the operator, which takes a while
        statuses = output.statuses()
        if not statuses:
            return
        first = statuses[0]
        tick, now = first.tick, first.now

        self._checkpoint.sync_begun(batch_id)
        write_changes(self._tables, dict(first.changed), tick, now, self._app_id)
        outcomes = output.rows(OutputKind.OUTCOMES)
        applied_at = time.time_ns() // 1_000_000
        # What has a request id is sent after its answer is in the table: a rebuild knows the first message by it.
        has_first = pc.any(pc.equal(outcomes["operation"], OPERATION)).as_py() or False
        if has_first:
            self._append("outcomes", outcomes_to_rows(outcomes, tick, applied_at), tick)
        # Due messages first: the tables can wait some milliseconds.
        # A replayed tick of an earlier run sends and confirms nothing: the first tick of this run dispatches again all
        # messages in flight, those of that tick, too, in the order in which the broker must get them.
        if first.run_id == self._run_id:
            next_due = min(status.next_due for status in statuses)
            large_bytes = sum(status.counts["large_bytes"] for status in statuses)
            self._releaser.submit(
                DispatchedBatch(
                    tick=tick,
                    now=now,
                    cutoff=first.cutoff,
                    next_due=next_due,
                    bodies=output.releases(),
                    unwritable=first.unwritable,
                    waiting=_waiting([status.waiting for status in statuses]),
                    drained=_drained(statuses),
                    resuming=_resuming(statuses),
                    large_bytes=large_bytes,
                )
            )
        if outcomes.num_rows:
            # The table gets outcomes before they are published: a published outcome holds, whatever happens afterwards.
            if not has_first:
                self._append("outcomes", outcomes_to_rows(outcomes, tick, applied_at), tick)
            self._outcomes.publish(outcomes, tick, applied_at)
        bucket, cancels = in_order(output.rows(OutputKind.BUCKET)), output.rows(OutputKind.CANCELS)
        self._append_messages("delayed_index", bucket, to_index, tick, cancels_to_index(cancels, tick))
        entries = output.rows(OutputKind.ENTRIES)
        if entries.num_rows:
            self._checkpoint.sync_done()  # entries are acknowledged next, and then Pulsar may delete them
        self._append("entries", entries, tick)
        self._append_messages("rejects", output.rows(OutputKind.REJECTS), to_rejects, tick)
        if self._sweep is not None:
            self._sweep.sweep(tick, {file for status in statuses for file in status.payload_files})

        self._checkpoint.sync_soon()
        totals = {name: sum(status.counts[name] for status in statuses) for name in first.counts}
        totals["sink_millis"] = time.time_ns() // 1_000_000 - now
        shaped_until = _latest(status.shaped_until for status in statuses)
        releaser = self._releaser
        done = BatchStatus(
            tick,
            now,
            releaser.lookahead_millis,
            releaser.sending,
            totals,
            shaped_until,
            paused=dict(first.paused),  # all shards know of each pause
            resuming={
                topic: {name: (messages, n_bytes) for name, (messages, n_bytes, _) in names.items()}
                for topic, names in first.resuming.items()  # and of each round
            },
            failures=[(topic, name, why) for status in statuses for topic, name, why in status.failures],
            outcome_producer=self._outcomes.name,
        )
        self._on_batch(done)

    def _append_messages(
        self,
        table: str,
        messages: pa.Table,
        to_rows: Callable[[pa.Table, int], pa.Table],
        tick: int,
        *others: pa.Table,
    ) -> None:
        """Appends messages, and other rows, to a table in one commit. Payloads are read as delta-rs takes them.

        Args:
            table: the table's name.
            messages: as MESSAGES.
            to_rows: makes the table's rows of messages and tick.
            tick: of the batch.
            others: in the table's columns.
        """

        def rows_of(part: pa.Table) -> pa.Table:
            return to_rows(self._payloads.bring_back(part), tick)

        # Payloads in files count.
        parts = list(parts_of_sizes(messages, row_sizes(messages), _PART_BYTES))
        if len(parts) > 1:
            makers = [*(partial(rows_of, part) for part in parts), partial(concat, others, SCHEMAS[table])]
            self._tables.append_parts(table, makers, messages.num_rows, {self._app_id: tick})
        else:
            self._append(table, concat([*map(rows_of, parts), *others], SCHEMAS[table]), tick)

    def _append(self, table: str, rows: pa.Table, tick: int) -> None:
        if rows.num_rows:
            self._tables.append(table, rows, {self._app_id: tick})


def _latest(of_shards: Iterable[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    """Merges the times of shards, by topic and subscription; the latest time counts."""
    found: dict[str, dict[str, int]] = {}
    for one in of_shards:
        for topic, names in one.items():
            for name, last in names.items():
                of_topic = found.setdefault(topic, {})
                of_topic[name] = max(last, of_topic.get(name, last))
    return found


def _drained(statuses: Sequence[ShardStatus]) -> dict[tuple[str, str], tuple[int, bool]]:
    """Returns by recipient how many messages all shards let go to a slow destination, and whether others wait."""
    found: dict[tuple[str, str], tuple[int, bool]] = {}
    for status in statuses:
        for topic, names in status.drained.items():
            for name, (n, others_wait) in names.items():
                before = found.get((topic, name), (0, False))
                found[topic, name] = before[0] + n, before[1] or others_wait
    return found


def _resuming(statuses: Sequence[ShardStatus]) -> dict[str, dict[str, int]]:
    """Returns when what is parked for resumed subscriptions was due at the earliest, as `Feedback.resuming` has it."""
    found: dict[str, dict[str, int]] = {}
    for status in statuses:
        for topic, names in status.resuming.items():
            for name, (_, _, since) in names.items():
                of_topic = found.setdefault(topic, {})
                of_topic[name] = min(since, of_topic.get(name, since))
    return found


def _waiting(of_shards: Sequence[Mapping[str, Mapping[str, list[int]]]]) -> dict[str, dict[str, list[list[int]]]]:
    """Merges the shards' counts of messages that wait for places, as `Feedback.waiting` has them.

    Args:
        of_shards: as `ShardStatus.waiting`, by shard number.
    """
    recipients = {(topic, name) for one in of_shards for topic, names in one.items() for name in names}
    found: dict[str, dict[str, list[list[int]]]] = {}
    for topic, name in sorted(recipients):
        found.setdefault(topic, {})[name] = [one.get(topic, {}).get(name, [0, 0]) for one in of_shards]
    return found
