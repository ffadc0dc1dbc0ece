"""Imports items of other systems: into the table `imported` first, and from there into the job's tables.

So each item is imported once, however often an import is repeated or interrupted. The next import moves items that are
in `imported` alone to the job's tables, and leaves out items whose id is in `imported`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from checkpoint_from_tables.importing.files import FIRST_LEDGER_OF_FILES, hash48, import_rows, messages_of
from checkpoint_from_tables.importing.importer import Imported, Importer
from checkpoint_from_tables.other_systems.item import Item, Source
from tracker.messages import int64, is_rejected, where
from warehouse.delta.tables import Tables, exists
from warehouse.named_queries import NamedQueries
from warehouse.schemas import IMPORT, IMPORTED

TABLE = "imported"
_SQL = NamedQueries(__file__)

_ITEMS_AT_ONCE = 100_000
_BYTES_AT_ONCE = 64 << 20
_MOST_EXAMPLES = 5

# In `Source.left`: items that differ from one that was read before, and have its id.
OF_SAME_ID = "others of an id that was read already"

# The first ledger id of items, after those of files. Each part of an import has a ledger of its own.
_FIRST_LEDGER = FIRST_LEDGER_OF_FILES + (1 << 49)

_IDS = ("topic", "item", "ledger_id", "entry_id")


@dataclass
class ImportPreview:
    """The result that an import would have.

    Attributes:
        items: the number of items that it would write to the tables, as `Imported.messages`.
        rejected: the number of those that can't be taken and would go to `rejects`.
        reasons: the number of rejected items, by reason.
        examples: ids of some rejected items, with the reason.
        already_there: the number of items that an earlier import has written.
        overdue: the number of accepted items that would be delivered at once.
        first_due: when the first accepted item after these is due, ms since the epoch; None: there is none.
        last_due: when the last accepted item is due, ms since the epoch; None: as `first_due`.
        payload_bytes: the number of bytes of the accepted items' payloads.
    """

    items: int = 0
    rejected: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    already_there: int = 0
    overdue: int = 0
    first_due: int | None = None
    last_due: int | None = None
    payload_bytes: int = 0

    def add(self, rows: pa.Table, messages: pa.Table, now: int) -> None:
        """Adds rows of IMPORTED that would be written.

        Args:
            rows: as IMPORTED.
            messages: the same items as MESSAGES.
            now: ms since the epoch.
        """
        rejected = is_rejected(messages)
        self.items += rows.num_rows
        self.rejected += int(rejected.sum())
        for id, reason in zip(where(rows, rejected)["item"], where(messages, rejected)["reason"], strict=True):
            self.reasons[reason.as_py()] = self.reasons.get(reason.as_py(), 0) + 1
            if len(self.examples) < _MOST_EXAMPLES:
                self.examples.append(f"{id}: {reason}")
        taken = where(messages, ~rejected)
        self.payload_bytes += pc.sum(pc.binary_length(taken["payload"])).as_py() or 0
        due = int64(taken, "deliver_at")
        later = due[due > now]
        self.overdue += len(due) - len(later)
        if len(later):
            first, last = int(later.min()), int(later.max())
            self.first_due = first if self.first_due is None else min(self.first_due, first)
            self.last_due = last if self.last_due is None else max(self.last_due, last)


def preview_import(importer: Importer, source: Source) -> ImportPreview:
    """Returns the result that `import_items` would have, and changes nothing. The job may run.

    Raises:
        SourceError: the other system can't be read.
    """
    tables, topic = importer.tables, importer.source_topic
    preview, left_out = ImportPreview(), Imported()
    known: set[str] = set()
    read: dict[str, int | None] = {}

    def add(rows: pa.Table) -> None:
        messages = messages_of(importer, rows.drop_columns([*_IDS, "imported_at"]), _FIRST_LEDGER, preview.items)
        preview.add(rows, messages, time.time_ns() // 1_000_000)

    if exists(tables.warehouse, TABLE):
        known = _known(tables, topic)
        for rows in _unfinished(tables, topic):
            read.update(dict.fromkeys(rows["item"].to_pylist()))
            if tables.written("entries", f"{IMPORT}{rows['ledger_id'][0]}") < 0:
                add(rows)
            else:
                left_out.already_there += rows.num_rows
    for items in _in_parts(source, known, read, left_out):
        add(_rows(topic, _FIRST_LEDGER, items))
    preview.already_there = left_out.already_there
    return preview


def import_items(importer: Importer, source: Source) -> None:
    """Imports the items that no earlier import has; counts them in `importer.done`. A rebuild has to follow.

    Raises:
        SourceError: the other system can't be read; the items that were read before are imported.
        FencedError: another job has taken the warehouse over.
    """
    tables, topic = importer.tables, importer.source_topic
    known = _known(tables, topic)
    read: dict[str, int | None] = {}
    for rows in _unfinished(tables, topic):
        read.update(dict.fromkeys(rows["item"].to_pylist()))
        _finish(importer, rows)
    for items in _in_parts(source, known, read, importer.done):
        rows = _rows(topic, _ledger_of(topic, items), items)
        tables.append(TABLE, rows, {f"{IMPORT}{rows['ledger_id'][0]}": 1})
        _finish(importer, rows)
    tables.forget_replaced(TABLE)


def _in_parts(source: Source, known: set[str], read: dict[str, int | None], done: Imported) -> Iterator[list[Item]]:
    """Yields the items that are neither known nor read yet, in parts of limited size.

    Args:
        source: has the items.
        known: ids of the items that earlier imports have written.
        read: ids of the items that were read before, each with a hash of the item, or None if only its id is known;
            gets those of all items. One of another hash is counted as left.
        done: counts the known items.
    """
    part: list[Item] = []
    n_bytes = 0
    for item in source.items():
        content = hash((item.due, item.payload))
        if item.id in read:
            if read[item.id] not in (None, content):
                source.left[OF_SAME_ID] += 1
            continue
        read[item.id] = content
        if item.id in known:
            done.already_there += 1
            continue
        part.append(item)
        n_bytes += len(item.payload or b"")
        if len(part) >= _ITEMS_AT_ONCE or n_bytes >= _BYTES_AT_ONCE:
            yield part
            part, n_bytes = [], 0
    if part:
        yield part


def _ledger_of(topic: str, items: list[Item]) -> int:
    """Returns the ledger id of a part: of other items it is another one, also in a restored warehouse that lacks them.

    There a rebuild takes what the destinations have for delivered, by its id.
    """
    return _FIRST_LEDGER + hash48(json.dumps([topic, *(item.id for item in items)]).encode())


def _rows(topic: str, ledger: int, items: list[Item]) -> pa.Table:
    """Returns items as rows of IMPORTED, for items that are not in the job's tables yet."""
    n = len(items)
    columns = {
        "topic": [topic] * n,
        "item": [item.id for item in items],
        "ledger_id": [ledger] * n,
        "entry_id": range(n),
        "imported_at": [None] * n,
        "deliver_at": [item.due for item in items],
        "payload": [item.payload for item in items],
        "key": [item.key for item in items],
        "properties": [list(item.properties.items()) for item in items],
        "reason": [item.reason for item in items],
    }
    return pa.table([pa.array(columns[f.name], f.type) for f in IMPORTED], schema=IMPORTED)


def _finish(importer: Importer, rows: pa.Table) -> None:
    """Moves the rows of a part, in the order of their entry ids, to the job's tables; then keeps only their ids."""
    ledger = int(int64(rows, "ledger_id")[0])
    import_rows(importer, rows.drop_columns([*_IDS, "imported_at"]), ledger)
    now = pa.repeat(time.time_ns() // 1_000_000, rows.num_rows)
    done = [
        rows[f.name] if f.name in _IDS else now if f.name == "imported_at" else pa.nulls(rows.num_rows, f.type)
        for f in IMPORTED
    ]
    importer.tables.replace(TABLE, pa.table(done, schema=IMPORTED), f"ledger_id = {ledger}")


def _unfinished(tables: Tables, topic: str) -> Iterator[pa.Table]:
    """Yields the parts of an interrupted import, as IMPORTED."""
    for ledger in tables.query(TABLE, _SQL("unfinished_ledgers", topic=topic))["ledger_id"].to_pylist():
        yield tables.query(TABLE, _SQL("part", topic=topic, ledger=ledger))


def _known(tables: Tables, topic: str) -> set[str]:
    """Returns the ids of the items that were imported for a source topic."""
    return set(tables.query(TABLE, _SQL("items", topic=topic))["item"].to_pylist())
