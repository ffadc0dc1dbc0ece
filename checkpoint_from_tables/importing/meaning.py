"""Applies to imported messages what their properties mean, by the code that reads those of a source topic."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from broker.protocol.entries import SOURCE_POSITION, is_dropped
from tracker.due_time import DELIVER_AFTER, DELIVER_AT
from tracker.messages import int64, with_columns
from tracker.properties import RESERVED_PREFIX
from tracker.scheduling import MEANINGFUL, scheduling

_NAMES = pa.array(sorted(MEANINGFUL))

_DECIDED = ("schedule_key", "occurrence", "attempt", "reason", "expires_at")


def with_meaning(messages: pa.Table, has_time: pa.ChunkedArray, max_delay_millis: int) -> pa.Table:
    """Sets times, schedule keys and occurrences by the properties, and drops properties that only the job gives.

    Args:
        messages: as MESSAGES, published now.
        has_time: bool, (messages,): the message's own `deliver_at` counts, instead of one in its properties.
        max_delay_millis: the longest delay that is accepted, ms; 0: any.

    Returns:
        the same messages; those whose properties are wrong have a reason, unless they had one.
    """
    rows = _with_special_names(messages["properties"])
    columns = {name: messages[name].to_pylist() for name in _DECIDED}
    due, published = int64(messages, "deliver_at").copy(), messages["publish_time"].to_pylist()
    own_time = has_time.to_numpy()
    properties = {}
    for row in rows:
        try:
            before = messages["properties"][row].as_py() or []
        except UnicodeDecodeError:
            continue  # it is rejected for this
        if columns["reason"][row] is not None or any(value is None for _, value in before):
            continue
        given = {name: value for name, value in before if name not in (DELIVER_AT, DELIVER_AFTER)}
        if own_time[row]:
            given[DELIVER_AT] = str(due[row])
        else:
            given = dict(before)
        found = scheduling(given, published[row], published[row], max_delay_millis)
        due[row] = found.deliver_at
        columns["schedule_key"][row], columns["occurrence"][row] = found.schedule_key, found.occurrence
        columns["attempt"][row] = None if found.retry is None else found.retry.attempt
        columns["reason"][row], columns["expires_at"][row] = found.reason, found.expires_at
        # Whoever reads the rule of a recurring message finds its first time in the properties.
        kept = given if found.occurrence is not None else dict(before)
        properties[row] = [(name, value) for name, value in kept.items() if not is_dropped(name)]
    return with_columns(
        messages,
        deliver_at=pa.array(due),
        properties=_replaced(messages["properties"], properties),
        **{name: pa.array(values, messages[name].type) for name, values in columns.items()},
    )


def _with_special_names(properties: pa.ChunkedArray) -> list[int]:
    """Returns the numbers of the rows with a property that means something, or that is dropped."""
    column = properties.combine_chunks()
    offsets = column.offsets.to_numpy()
    names = column.keys[offsets[0] : offsets[-1]]
    is_special = pc.or_(pc.is_in(names, _NAMES), pc.starts_with(names, RESERVED_PREFIX))
    is_special = pc.or_(is_special, pc.equal(names, SOURCE_POSITION)).to_numpy(zero_copy_only=False)
    rows: list[int] = np.unique(np.repeat(np.arange(len(column)), np.diff(offsets))[is_special]).tolist()
    return rows


def _replaced(properties: pa.ChunkedArray, others: dict[int, list[tuple[str, str]]]) -> pa.Array:
    """Returns a column of maps with other values in some rows, by the rows' numbers."""
    column = properties.combine_chunks()
    if not others:
        return column
    places = np.arange(len(column))
    places[list(others)] = len(column) + np.arange(len(others))
    return pa.concat_arrays([column, pa.array(list(others.values()), column.type)]).take(pa.array(places))
