"""The mutable bucket: what came in since the last seal and is not due soon."""

from __future__ import annotations

import pyarrow as pa

from tracker.buckets.chunks import Chunks
from tracker.messages import MESSAGES, int64
from tracker.store import Store


class MutableBucket:
    """Rows in the order they came, read again only to be sealed.

    `meta` is what has to be kept beside the store.
    """

    def __init__(self, store: Store, meta: dict[str, int] | None = None) -> None:
        meta = meta or {"chunks": 0, "rows": 0, "earliest": 0}
        self._chunks = Chunks(store, "mutable", MESSAGES, meta["chunks"], meta["rows"])
        self._earliest = meta["earliest"]

    def __len__(self) -> int:
        return self._chunks.n_rows

    @property
    def meta(self) -> dict[str, int]:
        return {"chunks": self._chunks.n_chunks, "rows": self._chunks.n_rows, "earliest": self._earliest}

    @property
    def earliest(self) -> int | None:
        """The earliest time of delivery, or None where the bucket is empty."""
        return self._earliest if len(self) else None

    def add(self, rows: pa.Table) -> None:
        if rows.num_rows:
            earliest = int(int64(rows, "deliver_at").min())
            self._earliest = min(earliest, self._earliest) if len(self) else earliest
            self._chunks.add(rows)

    def all(self) -> pa.Table:
        """All rows; they stay."""
        return self._chunks.all()

    def take_all(self) -> pa.Table:
        """All rows; the bucket is empty then."""
        return self._chunks.take_all()
