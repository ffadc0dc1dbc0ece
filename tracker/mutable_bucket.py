"""The mutable bucket: what came in since the last seal and is not due soon."""

from __future__ import annotations

import pyarrow as pa

from tracker.messages import concat, int64, pack, unpack
from tracker.store import Store

_TABLE = "mutable"


class MutableBucket:
    """Rows in the order they came, one packed value an addition, read again only to be sealed.

    `meta` is what has to be kept beside the store: the number of values and rows, and the earliest time of delivery.
    """

    def __init__(self, store: Store, meta: dict[str, int] | None = None) -> None:
        self._store = store
        self.meta = meta or {"chunks": 0, "rows": 0, "earliest": 0}

    def __len__(self) -> int:
        return self.meta["rows"]

    @property
    def earliest(self) -> int | None:
        """The earliest time of delivery, or None where the bucket is empty."""
        return self.meta["earliest"] if self.meta["rows"] else None

    def add(self, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        earliest = int(int64(rows, "deliver_at").min())
        self._store.put(_TABLE, (self.meta["chunks"], 0), pack(rows))
        self.meta = {
            "chunks": self.meta["chunks"] + 1,
            "rows": self.meta["rows"] + rows.num_rows,
            "earliest": min(earliest, self.meta["earliest"]) if self.meta["rows"] else earliest,
        }

    def take_all(self) -> pa.Table:
        """All rows; the bucket is empty then."""
        chunks = []
        for chunk in range(self.meta["chunks"]):
            data = self._store.get(_TABLE, (chunk, 0))
            assert data is not None, f"the mutable bucket has lost its part {chunk}"
            chunks.append(unpack(data))
            self._store.remove(_TABLE, (chunk, 0))
        self.meta = {"chunks": 0, "rows": 0, "earliest": 0}
        return concat(chunks)
