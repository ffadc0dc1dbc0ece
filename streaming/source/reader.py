"""The streaming source. One offset covers new messages, commands, segments of the delayed index, and the tick.

There is one source rather than several: each would cost a process beside the driver and a task for each batch, and one
offset decides, and replays, all parts of a batch together.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import to_arrow_schema

from conf.settings import Settings, local_path, settings_from_json
from status.alerts import Alerts
from streaming.batch_schema import InputKind, InputRow, Rows, command_copies, input_rows
from streaming.checkpoint.offset import Offset
from streaming.checkpoint.payload_files import ASIDE_BYTES, ASIDE_BYTES_OF_MANY, PayloadFiles
from streaming.checkpoint.prepared import PreparedState
from streaming.free_memory import give_back_memory
from streaming.operator.schemas import INPUT_SCHEMA
from streaming.release.feedback import FeedbackFile
from streaming.source.intake import Intake
from streaming.source.later_commands import later_commands
from streaming.source.rejects_rounds import spans_of_round
from tracker.buckets.large_rows import NONE_LARGE, LargeKey, LargeRows, LargeRule
from tracker.commands.decode import Limits, decode
from tracker.message_state.parking import Rounds
from tracker.messages import MESSAGES, concat
from tracker.packing import pack, unpack
from tracker.schemas import COMMAND_ROWS
from warehouse.delta.tables import Tables
from warehouse.queries.drained_rows import first_rounds, next_rounds
from warehouse.queries.held_rejects import Span, find_rejects
from warehouse.queries.index_rows import (
    LOOKED_UP,
    PART_BYTES,
    find_known_messages,
    find_places,
    read_large,
    read_light_segment,
    read_places,
)
from warehouse.queries.waiting_commands import find_waiting
from warehouse.routes.known_routes import KnownRoutes

# The most bytes of input that go with a task, but for a single message: Spark refuses more than
# spark.rpc.message.maxSize, 128 MiB.
_TASK_BYTES = 32 << 20


class Part(InputPartition):
    """A part of a batch's input.

    Attributes:
        tick: of the batch.
    """

    tick = 0


@dataclass
class TickPart(Part):
    """Input that is in the source process: ticks and new messages."""

    rows: list[InputRow]


@dataclass
class CommandsPart(Part):
    """Messages of the control topic, and the versions of the tables in which to find the messages that they name."""

    messages: bytes  # MESSAGES, packed
    versions: list[int]  # of the tables LOOKED_UP
    routes: dict[str, Any]  # as `Offset.routes`
    changed: dict[str, Any]  # as `Offset.changed`: commands for later subscriptions apply to the added ones
    keyed: list[str]  # as `Offset.keyed`
    newly_keyed: list[str]  # as `Offset.newly_keyed`
    limits: Limits  # of what they may name


@dataclass
class RebuiltPart(Part):
    """The first batch after a rebuild: the state that it has prepared, and the first of what was parked."""

    version: int  # of delayed_index
    routes: dict[str, Any]  # as `Offset.routes`


@dataclass
class HeldPart(Part):
    """The first of the messages that are parked for subscriptions to which messages go out again."""

    version: int  # of delayed_index
    subscriptions: list[list[str]]  # [topic, subscription]


@dataclass
class DrainPart(Part):
    """The first of the messages that are still parked for resumed subscriptions, and for slow destinations."""

    version: int  # of delayed_index
    drains: dict[str, dict[str, int]]  # as `Offset.drains`
    since: dict[str, dict[str, int]]  # as `Offset.drained_before`


@dataclass
class RejectsPart(Part):
    """Rejected messages that rejects topics lack, because they could not be written: those of a round."""

    version: int  # of the table rejects
    spans: list[Span]


@dataclass
class SegmentPart(Part):
    """A segment: the rows of delayed_index that are due from `start` to before `end`, ms since the epoch."""

    version: int  # of delayed_index
    start: int
    end: int
    rule: LargeRule = NONE_LARGE  # rows that are large by it are in a `LargePart`


@dataclass
class LargePart(Part):
    """The large rows of delayed_index for which there is room now."""

    version: int  # of delayed_index
    large: dict[str, Any]  # as `Offset.large`
    after: LargeKey
    to: LargeKey


_ARROW_SCHEMA = to_arrow_schema(INPUT_SCHEMA)


def to_batches(rows: Iterable[InputRow]) -> Iterator[pa.RecordBatch]:
    """Yields input rows, each as a record batch with the columns of INPUT_SCHEMA."""
    for row in rows:
        columns = [pa.array([value], field.type) for value, field in zip(row, _ARROW_SCHEMA, strict=True)]
        yield pa.RecordBatch.from_arrays(columns, schema=_ARROW_SCHEMA)


def _for_tasks(rows: list[InputRow]) -> Iterator[list[InputRow]]:
    """Yields rows of the input, as many for each task as Spark may send with it; mostly all for one task."""
    of_task: list[InputRow] = []
    n_bytes = 0
    for row in rows:
        if of_task and n_bytes + len(row[2]) > _TASK_BYTES:
            yield of_task
            of_task, n_bytes = [], 0
        of_task.append(row)
        n_bytes += len(row[2])
    yield of_task


def _given_back(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches
    del batches
    give_back_memory()


class SourceReader:
    """Does the work of the source.

    One process beside the driver runs all methods but `read` as long as the query runs; tasks run `read`, on copies.
    Offsets are dicts as `Offset.to_json` makes them.

    Args:
        options: see `streaming.entry_points.DelayedDeliverySource`.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = options
        self._tick = 0  # of the part that is read

    def initial_offset(self) -> dict[str, Any]:
        """Returns the offset before the first batch: of a rebuild, or an empty one."""
        return (self._rebuilt.offset or Offset()).to_json()

    def next_offset(self, start: dict[str, Any]) -> dict[str, Any]:
        """Waits for the batch after an offset, and returns its end; `start` itself where the job is to stop."""
        give_back_memory()  # of the batch before
        return self._intake.next_offset(Offset.from_json(start)).to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Returns the parts of the batch between two offsets, one for each task."""
        first, last = Offset.from_json(start), Offset.from_json(end)
        if first.tick == last.tick:
            return []
        rows = self._intake.parts(first, last)
        parts: list[Part] = [TickPart(of_task) for of_task in _for_tasks(rows)]
        if self._intake.has_segment(first, last):
            rule = last.large_rows.rule
            parts.append(SegmentPart(last.index_version, first.load_horizon, last.load_horizon, rule))
        if last.large and first.large_to < last.large_to:
            parts.append(LargePart(last.index_version, last.large, first.large_to, last.large_to))
        rebuilt = self._rebuilt.offset
        if rebuilt is not None and first.tick == rebuilt.tick:
            parts.append(RebuiltPart(last.index_version, last.routes))
        elif last.reinstated:
            parts.append(HeldPart(last.held_version or last.index_version, last.reinstated))
        if last.drains:
            parts.append(DrainPart(last.held_version or last.index_version, last.drains, last.drained_before))
        if spans := spans_of_round(first, last):
            parts.append(RejectsPart(last.rejects_version, spans))
        if last.lookup_versions:
            messages = pack(self._intake.control_messages(first, last))
            limits = Limits(last.max_delay_millis, last.newest_ledgers)
            keyed = (last.keyed, last.newly_keyed)
            parts.append(CommandsPart(messages, last.lookup_versions, last.routes, last.changed, *keyed, limits))
        for part in parts:
            part.tick = last.tick
        return list(parts)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Returns the rows of a part, each as a record batch with the columns of INPUT_SCHEMA.

        Raises:
            TypeError: the part is of another source.
        """
        if not isinstance(partition, Part):
            raise TypeError(f"a part of another source: {type(partition).__name__}")
        self._tick = partition.tick
        if isinstance(partition, SegmentPart):
            rows = read_light_segment(self._tables, partition.version, partition.start, partition.end, partition.rule)
            parts = self._rows(InputKind.SEGMENT, rows)
        elif isinstance(partition, LargePart):
            rule = LargeRows.from_json(partition.large).rule
            rows = read_large(self._tables, partition.version, rule, partition.after, partition.to)
            parts = self._rows(InputKind.SEGMENT, rows)
        elif isinstance(partition, CommandsPart):
            parts = self._read_commands(partition)
        elif isinstance(partition, RebuiltPart):
            parts = self._read_rebuilt(partition)
        elif isinstance(partition, HeldPart):
            chosen = [(topic, name) for topic, name in partition.subscriptions if name]
            parts = self._rounds(*first_rounds(self._tables, partition.version, chosen))
        elif isinstance(partition, DrainPart):
            rows_and_rounds = next_rounds(self._tables, partition.version, partition.drains, partition.since)
            parts = self._rounds(*rows_and_rounds)
        elif isinstance(partition, RejectsPart):
            rows = concat(find_rejects(self._tables, partition.version, span) for span in partition.spans)
            parts = self._rows(InputKind.REJECTED, rows)
        else:
            parts = cast(TickPart, partition).rows
        return _given_back(to_batches(parts))

    def _read_rebuilt(self, partition: RebuiltPart) -> list[InputRow]:
        routes = KnownRoutes.from_json(partition.routes)
        read = routes.routes.keys() - routes.missing.keys()
        going_on = {topic: ~self._rebuilt.paused.get(topic, 0) for topic in read}
        parts = self._first_rounds(partition.version, routes, going_on)
        for shard, (values, tables) in enumerate(self._rebuilt.inputs(len(self._shard_keys))):
            for kind, content in {InputKind.REBUILT: values, **tables}.items():
                parts += self._rows(kind, {shard: content})
        return parts

    def _read_commands(self, partition: CommandsPart) -> list[InputRow]:
        routes = KnownRoutes.from_json(partition.routes)
        decoded = decode(unpack(partition.messages), routes.command_routes, partition.limits)
        later, pause_changes = later_commands(self._tables, partition.versions, partition.changed, routes)
        commands, pause_changes = concat([later, decoded.commands], COMMAND_ROWS), pause_changes + decoded.pause_changes
        known_messages = find_known_messages(self._tables, partition.versions, commands, partition.keyed)
        resumed: dict[str, int] = defaultdict(int)
        for change in decoded.pause_changes:
            resumed[change.topic] |= 0 if change.is_paused else change.subscriptions
        resumes: list[InputRow] = []
        if any(resumed.values()):
            resumes = self._first_rounds(partition.versions[0], routes, resumed)
        return [
            *self._rows(InputKind.REQUEST_IDS, decoded.request_ids),
            *(self._rows(InputKind.PAUSE_CHANGES, pause_changes) if pause_changes else ()),
            *self._payload_rows(partition, commands),
            *resumes,
            *self._rows(InputKind.COMMANDS, commands),
            *command_copies(commands, known_messages, partition.keyed, self._shard_keys),
            *self._handed_over(partition, routes),
            *self._rows(InputKind.KNOWN_MESSAGES, known_messages),
            *self._rows(InputKind.REJECTED_COMMANDS, decoded.rejects),
        ]

    def _handed_over(self, partition: CommandsPart, routes: KnownRoutes) -> list[InputRow]:
        """Packs the waiting commands of topics whose messages may be in other shards than their entries from now on."""
        if not partition.newly_keyed:
            return []
        version = partition.versions[LOOKED_UP.index("outcomes")]
        waiting = find_waiting(self._tables, routes.subscriptions.names, partition.newly_keyed, version)
        return self._rows(InputKind.HANDED_OVER, waiting)

    def _payload_rows(self, partition: CommandsPart, commands: pa.Table) -> Iterator[InputRow]:
        """Packs the rows of the messages that commands move or restore: of many bytes references alone."""
        places = find_places(self._tables, partition.versions, commands, partition.keyed)
        are_many = (pc.sum(places["payload_bytes"]).as_py() or 0) > PART_BYTES
        for rows in read_places(self._tables, partition.versions[0], places):
            least_bytes = ASIDE_BYTES_OF_MANY if are_many else ASIDE_BYTES
            rows = self._payloads.put_aside(rows, self._tick, least_bytes=least_bytes)
            yield from input_rows(InputKind.PAYLOAD_ROWS, rows, self._shard_keys)
            del rows
            give_back_memory()

    def _rows(self, kind: InputKind, content: Any) -> list[InputRow]:
        """Packs content; large payloads of messages go to a file."""
        if isinstance(kind.body, Rows) and kind.body.schema is MESSAGES:
            content = self._payloads.put_aside(content, self._tick)
        return input_rows(kind, content, self._shard_keys)

    def _first_rounds(self, version: int, routes: KnownRoutes, subscriptions: Mapping[str, int]) -> list[InputRow]:
        """Packs the first of the messages that are parked for subscriptions.

        Args:
            version: of delayed_index.
            routes: with the subscriptions' numbers.
            subscriptions: by source topic a mask of subscriptions.
        """
        chosen = [
            (topic, subscription.name)
            for topic, route in routes.routes.items()
            for number, subscription in enumerate(route.subscriptions)
            if subscriptions.get(topic, 0) >> number & 1 and not subscription.is_removed
        ]
        return self._rounds(*first_rounds(self._tables, version, chosen))

    def _rounds(self, rows: pa.Table, rounds: Rounds) -> list[InputRow]:
        """Packs rounds of messages that were parked."""
        return [*self._rows(InputKind.ROUNDS, rounds), *self._rows(InputKind.DRAINED, rows)]

    def commit(self, end: dict[str, Any]) -> None:
        """Notes that Spark has committed the batches up to an offset."""
        self._intake.commit(Offset.from_json(end))

    def stop(self) -> None:
        """Stops reading the topics."""
        if "_intake" in self.__dict__:
            self._intake.stop()

    @cached_property
    def _settings(self) -> Settings:
        return settings_from_json(self._options["settings"])

    @cached_property
    def _payloads(self) -> PayloadFiles:
        return PayloadFiles.of(self._settings)

    @cached_property
    def _rebuilt(self) -> PreparedState:
        return PreparedState(Path(local_path(self._settings.checkpoint)))

    @cached_property
    def _shard_keys(self) -> list[int]:
        keys: list[int] = json.loads(self._options["shard_keys"])
        return keys

    @cached_property
    def _tables(self) -> Tables:
        tables = Tables(self._settings.warehouse)
        tables.join(int(self._options["epoch"]))
        return tables

    @cached_property
    def _intake(self) -> Intake:
        return Intake(
            self._settings,
            self._options["run"],
            FeedbackFile(Path(self._options["feedback"])),
            self._shard_keys,
            self._tables,
            Alerts(Path(self._options["troubles"])),
        )
