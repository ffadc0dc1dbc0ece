"""Chooses the partition of a destination for a message."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from conf.partitions import java_string_hash
from tracker.messages import Int64Array


def partitions_of(
    rows: pa.Table, chosen: Int64Array, partitions: int, hashes: Int64Array, keys: Sequence[bytes] | None
) -> Int64Array:
    """Returns the partition of messages: by the key, as Pulsar's Java client does, else by the row's position.

    Args:
        rows: as MESSAGES.
        chosen: int64, (messages,): the index of each message's row.
        partitions: the number of partitions.
        hashes: int64, (rows,): of the rows' keys, as `java_string_hashes` returns them; -1: there is no key.
        keys: the order key of each row, of a release that has to come in order: rows without a partition key that have
            the same order key go to the same partition. None: of another release.

    Returns:
        int64, (messages,).
    """
    found = hashes[chosen] % partitions
    keyless = np.flatnonzero(hashes[chosen] < 0)
    if len(keyless) and keys is not None:
        found[keyless] = [zlib.crc32(keys[row]) % partitions for row in chosen[keyless].tolist()]
    elif len(keyless):
        of_rows = chosen[keyless]
        # Each by itself: their sum may be beyond 64 bits.
        ledger, entry, index = (
            rows[name].to_numpy().astype(np.int64)[of_rows] for name in ("ledger_id", "entry_id", "batch_index")
        )
        found[keyless] = (ledger % partitions + entry % partitions + np.maximum(index, 0) % partitions) % partitions
    return found


def java_string_hashes(texts: pa.Array) -> Int64Array:
    """Returns Java's String.hashCode of texts without its sign, 0 to 2^31 - 1: Pulsar's JavaStringHash.

    Args:
        texts: string, (rows,).

    Returns:
        int64, (rows,); -1 for null.
    """
    hashes = np.full(len(texts), -1, np.int64)
    _, offsets_of, data = texts.buffers()
    if not len(texts) or offsets_of is None:
        return hashes
    offsets = np.frombuffer(offsets_of, np.int32, len(texts) + 1, texts.offset * 4).astype(np.int64)
    lengths = np.diff(offsets)
    units = np.frombuffer(data or b"", np.uint8)[offsets[0] : offsets[-1]]
    # The unit at i has the factor 31^(length - 1 - i); uint32 wraps around as Java's int does.
    powers = np.cumprod(np.full(int(lengths.max(initial=0)) + 1, 31, np.uint32), dtype=np.uint32)
    powers = np.concatenate([np.ones(1, np.uint32), powers])
    left = np.repeat(offsets[1:] - offsets[0], lengths) - np.arange(len(units)) - 1
    sums = np.concatenate([np.zeros(1, np.uint32), np.cumsum(units * powers[left], dtype=np.uint32)])
    ends = offsets - offsets[0]
    valid = texts.is_valid().to_numpy(zero_copy_only=False)
    hashes[valid] = (sums[ends[1:]] - sums[ends[:-1]])[valid] & 0x7FFFFFFF
    # Others than ASCII have another number of units in Java than bytes here.
    beyond = np.concatenate([[0], np.cumsum(units > 127)])
    for row in np.flatnonzero(valid & (beyond[ends[1:]] > beyond[ends[:-1]])).tolist():
        hashes[row] = java_string_hash(texts[row].as_py())
    return hashes
