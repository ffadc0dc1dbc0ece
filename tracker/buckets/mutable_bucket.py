"""The mutable bucket, after Pulsar's MutableBucket: messages that came in since the last seal and are not due soon."""

from __future__ import annotations

import pyarrow as pa

from tracker.buckets.chunks import Chunks
from tracker.messages import MESSAGES, int64
from tracker.row_sizes import payload_sizes
from tracker.store import Store


class MutableBucket:
    """Rows in the order in which they came; each addition is one packed value.

    Args:
        store: where the rows are kept.
        meta: the attribute of that name, which the caller saves; None: the bucket is empty.
    """

    def __init__(self, store: Store, meta: dict[str, int] | None = None) -> None:
        meta = meta or {"chunks": 0, "rows": 0, "earliest": 0}
        self._chunks = Chunks(store, "mutable", MESSAGES, meta["chunks"], meta["rows"])
        self._earliest = meta["earliest"]
        self.n_bytes = meta.get("bytes", 0)  # of the payloads; an earlier version did not count them

    def __len__(self) -> int:
        """The number of rows."""
        return self._chunks.n_rows

    @property
    def meta(self) -> dict[str, int]:
        """The bucket's metadata, as JSON has it, which the caller saves."""
        meta = {"chunks": self._chunks.n_chunks, "rows": self._chunks.n_rows, "earliest": self._earliest}
        return meta | {"bytes": self.n_bytes}

    @property
    def earliest(self) -> int | None:
        """The earliest `deliver_at`, ms since the epoch; None: the bucket is empty."""
        return self._earliest if len(self) else None

    def add(self, rows: pa.Table) -> None:
        """Adds rows of MESSAGES."""
        if rows.num_rows:
            earliest = int(int64(rows, "deliver_at").min())
            self._earliest = min(earliest, self._earliest) if len(self) else earliest
            self.n_bytes += int(payload_sizes(rows).sum())
            self._chunks.add(rows)

    def all(self) -> pa.Table:
        """Returns all rows, and keeps them."""
        return self._chunks.all()

    def take_all(self) -> pa.Table:
        """Removes and returns all rows."""
        self.n_bytes = 0
        return self._chunks.take_all()
