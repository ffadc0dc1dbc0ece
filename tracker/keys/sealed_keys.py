"""Finds the last messages of cold schedule keys in the delayed index."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import pyarrow as pa

from tracker.commands.schema import KNOWN
from tracker.keys.packed_bucket import LastMessage
from tracker.messages import FIRST_IMPORTED_LEDGER, MESSAGES, empty_table

KEYED = pa.schema([*KNOWN, MESSAGES.field("key_since"), MESSAGES.field("publish_time")])

# Reads from the delayed index the rows with which messages came, as KEYED: those with some keys, as pairs of topic and
# key, that are due in some groups (see `tracker.keys.cold_keys.GROUP_MILLIS`), ascending. It may return more rows.
FindKeyed = Callable[[Collection[tuple[str, str]], Sequence[int]], pa.Table]


def none_sealed(names: Collection[tuple[str, str]], groups: Sequence[int]) -> pa.Table:
    """Returns no rows: the FindKeyed of an empty delayed index."""
    return empty_table(KEYED)


def last_of_keys(rows: pa.Table) -> dict[tuple[str, str], LastMessage]:
    """Returns the last message of each topic and key.

    A key has several rows only if messages were imported, or restored by a command. Then the message that was published
    last counts; an imported one counts only if all are imported.

    Args:
        rows: as KEYED.
    """
    found: dict[tuple[str, str], LastMessage] = {}
    for row in sorted(
        rows.to_pylist(),
        key=lambda row: (
            row["ledger_id"] < FIRST_IMPORTED_LEDGER,
            row["publish_time"] or 0,
            *(row[name] for name in ("ledger_id", "entry_id", "batch_index")),
        ),
    ):
        since = row["deliver_at"] if row["key_since"] is None else row["key_since"]  # not known of imported messages
        values = [*(row[name] for name in LastMessage._fields[:6]), since]
        found[row["topic"], row["schedule_key"]] = LastMessage._make(values)
    return found
