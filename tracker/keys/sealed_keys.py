"""Messages with schedule keys that the delayed index has: where a key that is not in state any more is looked up."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import pyarrow as pa

from tracker.commands.schema import KNOWN
from tracker.keys.packed_bucket import Live
from tracker.messages import FIRST_IMPORTED_LEDGER, MESSAGES, empty_table

KEYED = pa.schema([*KNOWN, MESSAGES.field("key_since"), MESSAGES.field("publish_time")])

# Reads, as KEYED, the rows with which messages of some keys, each given with its topic, have come, of those due in some
# groups (see `tracker.keys.cold_keys.GROUP_MILLIS`), which ascend. It may read more.
FindKeyed = Callable[[Collection[tuple[str, str]], Sequence[int]], pa.Table]


def none_sealed(names: Collection[tuple[str, str]], groups: Sequence[int]) -> pa.Table:
    """Returns no rows: the FindKeyed where nothing is sealed."""
    return empty_table(KEYED)


def last_of_keys(rows: pa.Table) -> dict[tuple[str, str], Live]:
    """Returns the last message of each topic and key of KEYED.

    Of a key several wait only where they were imported, or restored by a command: the one that was published last
    counts, and imported ones less than others.
    """
    found: dict[tuple[str, str], Live] = {}
    for row in sorted(
        rows.to_pylist(),
        key=lambda row: (
            row["ledger_id"] < FIRST_IMPORTED_LEDGER,
            row["publish_time"] or 0,
            *(row[name] for name in ("ledger_id", "entry_id", "batch_index")),
        ),
    ):
        since = row["deliver_at"] if row["key_since"] is None else row["key_since"]  # of imported ones it is not known
        found[row["topic"], row["schedule_key"]] = Live._make([*(row[name] for name in Live._fields[:6]), since])
    return found
