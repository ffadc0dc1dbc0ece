"""The streaming source: new messages, commands, segments that come due, and the clock, in one offset.

One source rather than several: each would cost a process beside the driver and a task a batch, and what a batch has of
each is decided, and replayed, together.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from conf.settings import Settings, local_path
from status.troubles import Troubles
from streaming.checkpoint.offset import Offset
from streaming.checkpoint.prepared import PreparedState
from streaming.operator_input import InputKind, split, split_copies, split_notes, to_batches
from streaming.release.feedback import FeedbackFile
from streaming.source.intake import Intake
from streaming.source.later_commands import later_commands
from tracker.commands.decode import decode
from tracker.commands.holding.pace import pace
from tracker.commands.message_state.moves import HELD_DELIVER_AT
from tracker.commands.schema import COMMAND_ROWS
from tracker.messages import concat, int64, where
from tracker.packing import pack, unpack
from warehouse.delta.tables import Tables
from warehouse.queries.held_rejects import find_rejects
from warehouse.queries.index_rows import find_held, find_known_messages, find_rows, read_segment
from warehouse.routes.known_routes import KnownRoutes


@dataclass
class Parts(InputPartition):
    """Input that the source process has at hand: ticks and new messages."""

    rows: list[tuple[int, str, bytes]]  # shard key, kind, body


@dataclass
class CommandsPart(InputPartition):
    """Messages of the control topic, packed, and the versions of the tables in which to find what they name."""

    messages: bytes
    versions: list[int]  # of the tables LOOKED_UP
    routes: dict[str, Any]
    changed: dict[str, Any]  # as in `Offset`: commands for later subscriptions apply to the added ones
    keyed: list[str]  # as in `Offset`


@dataclass
class RebuiltPart(InputPartition):
    """State that a rebuild has prepared, for the first batch; and messages held back in a version of delayed_index."""

    version: int
    routes: dict[str, Any]


@dataclass
class HeldPart(InputPartition):
    """Messages held back, in a version of delayed_index, for subscriptions to which messages go out again."""

    version: int
    subscriptions: list[list[str]]  # [topic, subscription]


@dataclass
class RejectsPart(InputPartition):
    """Messages in a version of `rejects` that rejects topics did not get while they could not be written."""

    version: int
    since: dict[str, int]  # by source topic the first tick whose messages its rejects topic does not have


@dataclass
class SegmentPart(InputPartition):
    """A segment: the rows of a version of delayed_index due from `start` to before `end`, ms since the epoch."""

    version: int
    start: int
    end: int


class SourceReader:
    """Does the work of the source: in one process beside the driver for the run; `read` in tasks, on copies.

    Offsets are dicts as `Offset.to_json` makes them.

    Args:
        options: see `streaming.entry_points.DelayedDeliverySource`.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = options

    def initial_offset(self) -> dict[str, Any]:
        """Returns the offset before the first batch: that of a rebuild, or an empty one."""
        return (self._rebuilt.offset or Offset()).to_json()

    def next_offset(self, start: dict[str, Any]) -> dict[str, Any]:
        """Waits for the batch after an offset, and returns its end; the offset itself where the job is to stop."""
        return self._intake.next_offset(Offset.from_json(start)).to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Returns the parts of the batch between two offsets, for a task each."""
        first, last = Offset.from_json(start), Offset.from_json(end)
        if first.tick == last.tick:
            return []
        parts: list[InputPartition] = [Parts(self._intake.parts(first, last))]
        if self._intake.has_segment(first, last):
            parts.append(SegmentPart(last.index_version, first.load_horizon, last.load_horizon))
        rebuilt = self._rebuilt.offset
        if rebuilt is not None and first.tick == rebuilt.tick:
            parts.append(RebuiltPart(last.index_version, last.routes))
        elif last.reinstated:
            parts.append(HeldPart(last.held_version or last.index_version, last.reinstated))
        since = {
            topic: first.rejects_since[topic]
            for topic, name in last.reinstated
            if not name and topic in first.rejects_since
        }
        if since:
            parts.append(RejectsPart(last.rejects_version, since))
        if last.lookup_versions:
            messages = pack(self._intake.control_messages(first, last))
            parts.append(CommandsPart(messages, last.lookup_versions, last.routes, last.changed, last.keyed))
        return parts

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Returns the rows of a part, each as a record batch of ARROW_SCHEMA."""
        if isinstance(partition, SegmentPart):
            rows = read_segment(self._tables, partition.version, partition.start, partition.end)
            parts = split(rows, InputKind.SEGMENT, self._shard_keys)
        elif isinstance(partition, CommandsPart):
            parts = self._read_commands(partition)
        elif isinstance(partition, RebuiltPart):
            parts = self._read_rebuilt(partition)
        elif isinstance(partition, HeldPart):
            chosen = [(topic, name) for topic, name in partition.subscriptions]
            parts = self._held_parts(find_held(self._tables, partition.version, chosen))
        elif isinstance(partition, RejectsPart):
            rows = find_rejects(self._tables, partition.version, partition.since)
            parts = split(rows, InputKind.REJECTED, self._shard_keys)
        elif isinstance(partition, Parts):
            parts = partition.rows
        else:
            raise TypeError(f"a part of another source: {type(partition).__name__}")
        return to_batches(parts)

    def _read_rebuilt(self, partition: RebuiltPart) -> list[tuple[int, str, bytes]]:
        routes = KnownRoutes.from_json(partition.routes)
        # What is held back for paused subscriptions may be much, and stays in the table.
        read = routes.routes.keys() - routes.missing.keys()
        going_on = {topic: ~self._rebuilt.paused.get(topic, 0) for topic in read}
        parts = self._held_parts(self._held(partition.version, routes, going_on))
        for key, (meta, tables) in zip(self._shard_keys, self._rebuilt.inputs(len(self._shard_keys)), strict=True):
            parts.append((key, InputKind.REBUILT, json.dumps(meta).encode()))
            parts += [(key, kind, pack(table)) for kind, table in tables.items()]
        return parts

    def _read_commands(self, partition: CommandsPart) -> list[tuple[int, str, bytes]]:
        routes = KnownRoutes.from_json(partition.routes)
        decoded = decode(unpack(partition.messages), routes.command_routes)
        later, pause_changes = later_commands(self._tables, partition.versions, partition.changed, routes)
        commands, pause_changes = concat([later, decoded.commands], COMMAND_ROWS), pause_changes + decoded.pause_changes
        known_messages = find_known_messages(self._tables, partition.versions, commands, partition.keyed)
        payload_rows = find_rows(self._tables, partition.versions, commands, partition.keyed)
        resumed: dict[str, int] = defaultdict(int)
        for change in decoded.pause_changes:
            resumed[change.topic] |= 0 if change.is_paused else change.subscriptions
        resumes: list[tuple[int, str, bytes]] = []
        if any(resumed.values()):
            payload_rows = where(payload_rows, int64(payload_rows, "deliver_at") != HELD_DELIVER_AT)
            resumes = self._held_parts(self._held(partition.versions[0], routes, resumed))
        request_ids = json.dumps(decoded.request_ids).encode()
        pause_changes_json = json.dumps([asdict(change) for change in pause_changes]).encode()
        return [
            *((key, InputKind.REQUEST_IDS, request_ids) for key in self._shard_keys),
            *((key, InputKind.PAUSE_CHANGES, pause_changes_json) for key in self._shard_keys if pause_changes),
            *split(payload_rows, InputKind.PAYLOAD_ROWS, self._shard_keys),
            *resumes,
            *split(commands, InputKind.COMMANDS, self._shard_keys),
            *split_copies(commands, known_messages, partition.keyed, self._shard_keys),
            *split(known_messages, InputKind.KNOWN_MESSAGES, self._shard_keys),
            *split_notes(known_messages, InputKind.KNOWN_MESSAGES, self._shard_keys),
            *split(decoded.rejects, InputKind.REJECTED_COMMANDS, self._shard_keys),
        ]

    def _held(self, version: int, routes: KnownRoutes, subscriptions: Mapping[str, int]) -> pa.Table:
        """Returns the messages held back for subscriptions, given by source topic as a mask."""
        chosen = [
            (topic, subscription.name)
            for topic, route in routes.routes.items()
            for number, subscription in enumerate(route.subscriptions)
            if subscriptions.get(topic, 0) >> number & 1 and not subscription.is_removed
        ]
        return find_held(self._tables, version, chosen)

    def _held_parts(self, rows: pa.Table) -> list[tuple[int, str, bytes]]:
        """Returns messages that were held back, and for each shard the pace at which all of them go out."""
        steps = json.dumps(pace(rows)).encode()
        parts = [(key, InputKind.PACE, steps) for key in self._shard_keys]
        return [*parts, *split(rows, InputKind.PAYLOAD_ROWS, self._shard_keys)]

    def commit(self, end: dict[str, Any]) -> None:
        """Is told that the batches up to an offset are done."""
        self._intake.commit(Offset.from_json(end))

    def stop(self) -> None:
        """Stops reading the topics."""
        if "_intake" in self.__dict__:
            self._intake.stop()

    @cached_property
    def _settings(self) -> Settings:
        return Settings(**json.loads(self._options["settings"]))

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
            Troubles(Path(self._options["troubles"])),
        )
