"""Reads a shard's input of a batch from the rows that Spark passes to the operator."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from conf.errors import DelayLakeError
from conf.time_zones import TimeZones
from streaming.checkpoint.offset import Offset
from streaming.operator_input import InputKind
from tracker.message_state.parking import Pace
from tracker.messages import concat
from tracker.packing import unpack
from tracker.rebuilt import LIVE_KEYS, MOVED, NOT_TO_DELIVER, OCCURRENCES_DONE, Rebuilt
from tracker.schemas import COMMAND_ROWS, PauseChange

_TABLES = (
    InputKind.MESSAGES,
    InputKind.NOTES,
    InputKind.SEGMENT,
    InputKind.COMMANDS,
    InputKind.KNOWN_MESSAGES,
    InputKind.PAYLOAD_ROWS,
    InputKind.DRAINED,
    InputKind.REJECTED_COMMANDS,
    InputKind.REJECTED,
    InputKind.REBUILT_CANCELLED,
    InputKind.REBUILT_DELIVERED,
    InputKind.REBUILT_MOVED,
    InputKind.REBUILT_WAITING,
    InputKind.REBUILT_KEYS,
    InputKind.REBUILT_OCCURRENCES,
    InputKind.REBUILT_OUTCOMES,
)


class NoTickError(DelayLakeError):
    """The input of a batch has no tick for a shard."""


@dataclass(kw_only=True)
class ShardInput:
    """The input of a batch for a shard.

    Attributes:
        offset: the end of the batch.
        tables: the tables of each kind of rows (`InputKind`), several parts each.
        request_ids: of the batch's commands, each with the hash of its body.
        pause_changes: pauses and their ends.
        pace: when messages that were held back go out.
        drained_until: as `TickInput.drained_until`.
        rebuilt: the shard's state in the first batch after a rebuild; else None.
        time_zones: of the batch; None: those of this program.
    """

    offset: Offset
    tables: dict[str, list[pa.Table]]
    request_ids: dict[str, int] = field(default_factory=dict)
    pause_changes: list[PauseChange] = field(default_factory=list)
    pace: Pace = field(default_factory=dict)
    drained_until: dict[str, dict[str, int | None]] = field(default_factory=dict)
    rebuilt: Rebuilt | None = None
    time_zones: TimeZones | None = None


def read_input(key: int, rows: Iterable[Any]) -> ShardInput:
    """Reads a shard's rows of a batch.

    Args:
        key: Spark's key of the shard.
        rows: all rows of the shard, of INPUT_SCHEMA; one of them is the tick.

    Raises:
        NoTickError: no row is the tick.
    """
    found: dict[str, Any] = {}
    tables: dict[str, list[pa.Table]] = {kind: [] for kind in _TABLES}
    for row in rows:
        if row.kind == InputKind.TICK:
            found["offset"] = Offset.from_json(json.loads(row.body))
        elif row.kind == InputKind.REQUEST_IDS:
            found["request_ids"] = json.loads(row.body)
        elif row.kind == InputKind.PAUSE_CHANGES:
            found["pause_changes"] = [PauseChange(**change) for change in json.loads(row.body)]
        elif row.kind == InputKind.PACE:
            found["pace"] = json.loads(row.body)
        elif row.kind == InputKind.DRAINED_UNTIL:
            found["drained_until"] = json.loads(row.body)
        elif row.kind == InputKind.REBUILT:
            found["rebuilt"] = json.loads(row.body)
        elif row.kind == InputKind.TIME_ZONES:
            found["time_zones"] = TimeZones.unpack(bytes(row.body))
        else:
            tables[row.kind].append(unpack(bytes(row.body)))
    if "offset" not in found:
        raise NoTickError(f"a batch without a tick for the shard of key {key}")
    if "rebuilt" in found:
        found["rebuilt"] = _rebuilt(found["rebuilt"], tables)
    return ShardInput(tables=tables, **found)


def _rebuilt(metadata: dict[str, Any], tables: dict[str, list[pa.Table]]) -> Rebuilt:
    bodies = metadata["request_ids"]
    return Rebuilt(
        sealed=metadata["sealed"],
        unwanted=metadata["unwanted"],
        request_ids=bodies if isinstance(bodies, dict) else dict.fromkeys(bodies, 0),  # an earlier version's
        paused=metadata["paused"],
        shaped_until=metadata.get("shaped_until", {}),  # an earlier version prepared none
        released=metadata["released"],
        cancelled=concat(tables[InputKind.REBUILT_CANCELLED], NOT_TO_DELIVER),
        delivered=concat(tables[InputKind.REBUILT_DELIVERED], NOT_TO_DELIVER),
        moved=concat(tables[InputKind.REBUILT_MOVED], MOVED),
        waiting=concat(tables[InputKind.REBUILT_WAITING], COMMAND_ROWS),
        keys=concat(tables[InputKind.REBUILT_KEYS], LIVE_KEYS),
        occurrences=concat(tables[InputKind.REBUILT_OCCURRENCES], OCCURRENCES_DONE),
    )
