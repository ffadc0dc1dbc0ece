"""The key of a delivery to a subscription: message, number of the retry, number of the occurrence.

The message's position alone is not enough: retries, and occurrences of a recurring message, are further deliveries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tracker.messages import Int64Array, attempts_of, message_ids
from tracker.properties import ATTEMPT, MESSAGE_ID, OCCURRENCE, position_of

# The properties of a delivered message that make its key, and the columns of `deliveries` for them.
PROPERTIES = (MESSAGE_ID, ATTEMPT, OCCURRENCE)
COLUMNS = ("position", "attempt", "occurrence")

# A delivery's values of PROPERTIES, empty where it lacks one.
Key = tuple[str, str, str]

_BATCH_BITS = 20  # a batch index is below 2^20


def key_of(properties: Mapping[str, str]) -> Key:
    """Returns the key of a delivered message from its properties."""
    return properties.get(MESSAGE_ID, ""), properties.get(ATTEMPT, ""), properties.get(OCCURRENCE, "")


def key_of_row(columns: Mapping[str, Sequence[Any]], row: int, is_rejected: bool) -> Key:
    """Returns the key that a row of MESSAGES has when it is sent.

    Args:
        columns: the columns of MESSAGES, by name.
        row: the row's index.
        is_rejected: whether it goes to a rejects topic, where messages have neither an attempt nor an occurrence.
    """
    attempt, occurrence = (None if is_rejected else columns[name][row] for name in ("attempt", "occurrence"))
    return (
        str(position_of(columns, row)),
        "" if attempt is None else str(attempt),
        "" if occurrence is None else str(occurrence),
    )


def attempt_ids(rows: pa.Table) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Returns an id of each row's message and attempt, as three columns.

    Args:
        rows: columns ledger_id, entry_id, batch_index, and optionally attempt.

    Returns:
        ledger, entry, and batch index with the attempt in the bits above it; each int64, (rows,).
    """
    ledgers, entries, indexes = message_ids(rows)
    return ledgers, entries, np.maximum(indexes, 0) | attempts_of(rows) << _BATCH_BITS
