"""Gives the rows of a warehouse other ids when its job goes on with another broker, whose ids begin again.

A message in the tables keeps its entry id; its ledger id is moved up, beyond those of any cluster, like that of an
imported message. An entry that the other broker has, too, gets its id there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake.transaction import AddAction

from broker.position import ENTRY_BITS, Position
from tracker.messages import FIRST_IMPORTED_LEDGER, PLACE_LEDGERS, BoolArray, Int64Array, int64, position_texts, where
from warehouse.delta.tables import OnProgress, Tables, exists
from warehouse.maintenance.table_files import DataFile, TableFiles, new_run
from warehouse.message_schemas import version_bytes, version_number
from warehouse.schemas import MESSAGE_SCHEMAS, MOVED_AT, PLACES, SCHEMAS

# Columns of `outcomes` with a position as text.
_TEXTS = ("superseded_by", "retry_of")

# Ledger and entry ids of the same entries with the old broker and with the new one.
PAIRS = pa.schema([(name, pa.int64()) for name in ("old_ledger", "old_entry", "ledger_id", "entry_id")])


@dataclass(frozen=True)
class Renumbering:
    """The new ids of entries of an earlier broker.

    Args:
        place: the number of the place that the warehouse leaves, from 1.
        pairs: the entries that get the other broker's ids, as PAIRS; the ledger ids of others are moved up.
        read_after: the last entry, by its new id, that is not read again, by topic partition.
    """

    place: int
    pairs: pa.Table = field(default_factory=PAIRS.empty_table)
    read_after: dict[str, Position] = field(default_factory=dict)

    @property
    def offset(self) -> int:
        """The number that is added to a ledger id."""
        return FIRST_IMPORTED_LEDGER + self.place * PLACE_LEDGERS

    def ids(self, ledgers: Int64Array, entries: Int64Array) -> tuple[Int64Array, Int64Array, BoolArray]:
        """Returns the new ids of entries.

        Args:
            ledgers: ledger ids, int64, (n,); those of imported messages, and negative ones (no entry), stay.
            entries: entry ids, int64, (n,).

        Returns:
            the new ledger and entry ids, int64, (n,), and a mask of those that are the other broker's, bool, (n,).
        """
        is_old = (ledgers >= 0) & (ledgers < FIRST_IMPORTED_LEDGER)
        new_ledgers, new_entries = np.where(is_old, ledgers + self.offset, ledgers), entries.copy()
        if not self.pairs.num_rows:
            return new_ledgers, new_entries, np.zeros(len(ledgers), np.bool_)
        known, codes = np.unique(int64(self.pairs, "old_ledger"), return_inverse=True)
        keys = (codes << ENTRY_BITS) + int64(self.pairs, "old_entry")
        order = np.argsort(keys)
        code = np.searchsorted(known, ledgers).clip(0, len(known) - 1)
        wanted = (code << ENTRY_BITS) + entries
        at = order[np.searchsorted(keys, wanted, sorter=order).clip(0, len(keys) - 1)]
        is_paired: BoolArray = is_old & (known[code] == ledgers) & (keys[at] == wanted)
        new_ledgers[is_paired] = int64(self.pairs, "ledger_id")[at[is_paired]]
        new_entries[is_paired] = int64(self.pairs, "entry_id")[at[is_paired]]
        return new_ledgers, new_entries, is_paired

    def apply(self, rows: pa.Table) -> tuple[pa.Table, BoolArray]:
        """Renumbers rows of a table with ledger_id and entry_id.

        Returns:
            the new rows, and a mask of those with the other broker's ids, bool, (rows,).
        """
        ledgers, entries = int64(rows, "ledger_id"), int64(rows, "entry_id")
        new_ledgers, new_entries, is_paired = self.ids(ledgers, entries)
        is_changed = pa.array((new_ledgers != ledgers) | (new_entries != entries))
        new = {"ledger_id": pa.array(new_ledgers), "entry_id": pa.array(new_entries)}
        if "first_index" in rows.column_names:
            new["first_index"] = pa.nulls(rows.num_rows, pa.int64())  # the old broker's indexes mean nothing now
        if "schema_version" in rows.column_names:
            new["schema_version"] = self.schema_versions(rows["schema_version"])
        rows = _with(rows, new)
        if "position" in rows.column_names:
            rows = _with(rows, {"position": pc.if_else(is_changed, position_texts(rows), rows["position"])})
        texts = [name for name in _TEXTS if name in rows.column_names and rows[name].null_count < rows.num_rows]
        return _with(rows, {name: self._texts(rows[name]) for name in texts}), is_paired

    def schema_versions(self, versions: pa.ChunkedArray) -> pa.Array:
        """Returns versions of schemas beyond those of the other broker, which counts from 0, too."""
        found = versions.combine_chunks().dictionary_encode()
        moved = [version_bytes(version_number(v) + self.place * PLACE_LEDGERS) for v in found.dictionary.to_pylist()]
        return pa.array(moved, pa.binary()).take(found.indices)

    def position(self, text: str) -> str:
        """Returns the new text of a position: of `ledger:entry` and anything that follows."""
        ledger, entry, *rest = text.split(":")
        ledgers, entries, _ = self.ids(np.array([int(ledger)]), np.array([int(entry)]))
        return ":".join([str(ledgers[0]), str(entries[0]), *rest])

    def _texts(self, texts: pa.ChunkedArray) -> pa.Array:
        found = texts.combine_chunks().dictionary_encode()
        return pa.array([self.position(text) for text in found.dictionary.to_pylist()], pa.string()).take(found.indices)


def next_place(tables: Tables) -> int:
    """Returns the number, from 1, of the place that the warehouse leaves now."""
    return max(tables.written("entries", PLACES), 0) + 1


def renumber(
    tables: Tables,
    renumbering: Renumbering,
    moved_at: int,
    row_group_rows: int = 5_000,
    on_progress: OnProgress = lambda table, step, rows: None,
) -> None:
    """Renumbers all tables, each in one commit.

    An entry that will be read again is left out of `entries`: it is not durable any more.

    Args:
        tables: the warehouse, which nobody else may read or write meanwhile.
        renumbering: the new ids.
        moved_at: when the warehouse gets another broker, ms since the epoch.
        row_group_rows: the number of rows in a row group of written files.
        on_progress: called as files are written.

    Raises:
        FencedError: somebody else has taken the warehouse over.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name in SCHEMAS:
            files = TableFiles(tables, name, row_group_rows)
            old, new, n = files.all(), [], 0
            for action, rows in pool.map(lambda file, files=files: _rewritten(files, file, renumbering), old):
                new += action
                n += rows
                on_progress(name, "rows with other ids", n)
            if old:
                files.replace(old, new, changes_data=True)
    _renumber_changes(tables, renumbering)
    warehouse = tables.warehouse
    if exists(warehouse, "expired"):  # it has indexes of the earlier broker
        tables.delete("expired", "true")
    if exists(warehouse, MESSAGE_SCHEMAS):
        rows = tables.query(MESSAGE_SCHEMAS, "SELECT * FROM schemas")
        versions = renumbering.schema_versions(rows["schema_version"])
        tables.replace(MESSAGE_SCHEMAS, _with(rows, {"schema_version": versions}), "true")
    tables.note("entries", {PLACES: renumbering.place, MOVED_AT: moved_at})


def _rewritten(files: TableFiles, file: DataFile, renumbering: Renumbering) -> tuple[list[AddAction], int]:
    """Writes a file with the new ids, if any rows are left; returns the action that adds it, and the number of rows."""
    folder = files.folder
    rows, is_paired = renumbering.apply(folder.complete(folder.read(file.path)))
    if files.name == "entries":
        rows = where(rows, ~is_paired | _are(rows, renumbering.read_after.values()))
    if not rows.num_rows:
        return [], 0
    return [folder.write(rows, file.run if file.is_part else new_run(), changes_data=True)], rows.num_rows


def _are(rows: pa.Table, entries: Iterable[Position]) -> BoolArray:
    """Returns a mask, bool, (rows,), of the rows of a few entries."""
    ledgers, numbers = int64(rows, "ledger_id"), int64(rows, "entry_id")
    are = np.zeros(rows.num_rows, np.bool_)
    for entry in entries:
        are |= (ledgers == entry.ledger_id) & (numbers == entry.entry_id)
    return are


def _renumber_changes(tables: Tables, renumbering: Renumbering) -> None:
    name = "subscription_changes"
    rows = tables.query(name, "SELECT * FROM subscription_changes")
    texts = [
        json.dumps({number: renumbering.position(at) for number, at in json.loads(text).items()}, sort_keys=True)
        for text in rows["positions"].to_pylist()
    ]
    if rows.num_rows:
        tables.replace(name, _with(rows, {"positions": pa.array(texts, pa.string())}), "true")


def _with(rows: pa.Table, columns: dict[str, pa.Array]) -> pa.Table:
    for name, values in columns.items():
        rows = rows.set_column(rows.column_names.index(name), rows.schema.field(name), values)
    return rows
