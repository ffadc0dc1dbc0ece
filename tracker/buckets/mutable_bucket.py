"""A list of rows in the store, which is added to in chunks, and read or removed as a whole."""

from __future__ import annotations

import pyarrow as pa

from tracker.messages import MESSAGES, concat, int64
from tracker.packing import payload_sizes
from tracker.store import Store, get_rows, put_rows


class Chunks:
    """Rows of one schema, in the order in which they were added; each addition is one packed value.

    Args:
        table: name of the store's table.
        schema: of the rows.
        n_chunks: number of additions so far. The caller saves the attribute of that name.
        n_rows: number of rows so far. The caller saves the attribute of that name.
    """

    def __init__(self, store: Store, table: str, schema: pa.Schema, n_chunks: int = 0, n_rows: int = 0) -> None:
        self._store = store
        self._table = table
        self._schema = schema
        self.n_chunks = n_chunks
        self.n_rows = n_rows

    def add_rows(self, rows: pa.Table) -> None:
        """Adds rows as one value; does nothing if there are none."""
        if rows.num_rows:
            put_rows(self._store, self._table, (self.n_chunks, 0), rows)
            self.n_chunks += 1
            self.n_rows += rows.num_rows

    def all_rows(self) -> pa.Table:
        """Returns all rows, and keeps them."""
        chunks = (get_rows(self._store, self._table, (chunk, 0)) for chunk in range(self.n_chunks))
        return concat(chunks, self._schema)

    def take_all(self) -> pa.Table:
        """Removes and returns all rows."""
        rows = self.all_rows()
        for chunk in range(self.n_chunks):
            self._store.remove(self._table, (chunk, 0))
        self.n_chunks = self.n_rows = 0
        return rows


class MutableBucket:
    """Rows in the order in which they came; each addition is one packed value.

    Args:
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

    def add_rows(self, rows: pa.Table) -> None:
        """Adds rows of MESSAGES."""
        if rows.num_rows:
            earliest = int(int64(rows, "deliver_at").min())
            self._earliest = min(earliest, self._earliest) if len(self) else earliest
            self.n_bytes += int(payload_sizes(rows).sum())
            self._chunks.add_rows(rows)

    def all_rows(self) -> pa.Table:
        """Returns all rows, and keeps them."""
        return self._chunks.all_rows()

    def take_all(self) -> pa.Table:
        """Removes and returns all rows."""
        self.n_bytes = 0
        return self._chunks.take_all()
