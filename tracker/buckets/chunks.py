"""Rows that pile up until they are taken all at once: one packed value an addition."""

from __future__ import annotations

import pyarrow as pa

from tracker.messages import concat, pack, unpack
from tracker.store import Store, get_present


class Chunks:
    """Tables of one schema in the order they came.

    `n_chunks` and `n_rows` have to be kept beside the store.
    """

    def __init__(self, store: Store, table: str, schema: pa.Schema, n_chunks: int = 0, n_rows: int = 0) -> None:
        self._store = store
        self._table = table
        self._schema = schema
        self.n_chunks = n_chunks
        self.n_rows = n_rows

    def add(self, rows: pa.Table) -> None:
        if rows.num_rows:
            self._store.put(self._table, (self.n_chunks, 0), pack(rows))
            self.n_chunks += 1
            self.n_rows += rows.num_rows

    def all(self) -> pa.Table:
        """All rows; they stay."""
        chunks = (unpack(get_present(self._store, self._table, (chunk, 0))) for chunk in range(self.n_chunks))
        return concat(chunks, self._schema)

    def take_all(self) -> pa.Table:
        """All rows; there are none left then."""
        rows = self.all()
        for chunk in range(self.n_chunks):
            self._store.remove(self._table, (chunk, 0))
        self.n_chunks = self.n_rows = 0
        return rows
