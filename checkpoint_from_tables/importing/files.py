"""Imports messages from Parquet files, or from tables with the same columns."""

from __future__ import annotations

import filecmp
import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from checkpoint_from_tables.importing.columns import COLUMNS, IN_SECONDS, are_seconds, check_columns, own_columns
from checkpoint_from_tables.importing.importer import Importer, ImportFailedError, sendable
from checkpoint_from_tables.importing.meaning import with_meaning
from conf.errors import one_line
from conf.message_size import FIELD_BYTES
from streaming.source.receiving.row_builder import MAX_PRODUCER_NAME_BYTES
from tracker.due_time import MAX_TIME_MILLIS, TOO_FAR
from tracker.messages import FIRST_IMPORTED_LEDGER, MESSAGES, BoolArray, typed
from warehouse.schemas import IMPORT

_ROWS_AT_ONCE = 1_000_000
_FILE_BYTES_AT_ONCE = 256 << 20

# The first ledger id for files. Ledger ids from FIRST_IMPORTED_LEDGER up to here are for messages of other topics.
FIRST_LEDGER_OF_FILES = FIRST_IMPORTED_LEDGER + (1 << 51)


def check_files(files: Iterable[Path]) -> None:
    """Checks that files can be imported, before any of them is.

    Raises:
        ImportFailedError: a file can't be read, has other columns, or can't be told from another one.
    """
    known: dict[int, Path] = {}
    for path in files:
        name = str(path).encode(errors="backslashreplace").decode()
        if name != str(path):
            raise ImportFailedError(f"{name}: its name is no UTF-8: rename it")
        if path.exists() and not (path.is_file() or path.is_dir()):  # to read a pipe would wait for ever
            raise ImportFailedError(f"{path}: it is no regular file")
        with _errors_of(path):
            schema = pq.read_schema(path)
            check_columns(schema)
        others = [field.name for field in schema if field.type != COLUMNS[field.name]]
        times = seconds = 0
        for rows in _batches(path, _ROWS_AT_ONCE, sorted({"deliver_at", *others})):
            with _errors_of(path):
                own_columns(rows)
                times += rows.num_rows - rows["deliver_at"].null_count
                seconds += int(are_seconds(rows["deliver_at"]).sum())
        if seconds and seconds == times:
            raise ImportFailedError(f"{path}: {IN_SECONDS.format('values')}")
        with _errors_of(path):
            other = known.setdefault(_digest("", path), path)
            if other != path and not filecmp.cmp(path, other, shallow=False):
                raise ImportFailedError(f"it has the name, size and footer of {other}, and other rows: rename it")


def import_file(importer: Importer, path: Path) -> None:
    """Imports a Parquet file with the columns of COLUMNS. To import it again does nothing.

    The ledger id is a hash of the source topic and the file's name, size and footer; the entry id is the number of the
    row.

    Raises:
        ImportFailedError: the file can't be read.
        FencedError: another job has taken the warehouse over.
    """
    with _errors_of(path):
        ledger = FIRST_LEDGER_OF_FILES + _digest(importer.source_topic, path)
        metadata = pq.read_metadata(path)
    size = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    # The same each time, because writes are recognized by the numbers of the file's parts.
    rows_at_once = min(_ROWS_AT_ONCE, max(1, metadata.num_rows * _FILE_BYTES_AT_ONCE // max(size, 1)))
    first = 0
    for number, rows in enumerate(_batches(path, rows_at_once), 1):
        rows = rows.append_column("reason", _in_seconds(rows["deliver_at"]))
        importer.append(messages_of(importer, rows, ledger, first), f"{IMPORT}{ledger}", number)
        first += rows.num_rows


def import_rows(importer: Importer, rows: pa.Table, ledger: int) -> None:
    """Imports rows as the messages of a ledger, unless an earlier import has.

    Args:
        importer: appends the messages.
        rows: all messages of the ledger, with columns of COLUMNS, and `reason`, string: why a row is rejected; null:
            no reason is known yet.
        ledger: the ledger id, from FIRST_LEDGER_OF_FILES on.

    Raises:
        FencedError: another job has taken the warehouse over.
    """
    importer.append(messages_of(importer, rows, ledger), f"{IMPORT}{ledger}", 1)


def messages_of(importer: Importer, rows: pa.Table, ledger: int, first: int = 0) -> pa.Table:
    """Returns rows as MESSAGES of a ledger, with entry ids from `first` on; rejected ones have a `reason`."""
    n, now = rows.num_rows, time.time_ns() // 1_000_000
    own = own_columns(rows)
    if "producer_name" in own:
        is_long = pc.greater(pc.binary_length(own["producer_name"]), MAX_PRODUCER_NAME_BYTES)
        own["producer_name"] = pc.if_else(is_long, None, own["producer_name"])
    due = pc.fill_null(own["deliver_at"], now)
    reasons = _reasons(importer, due, own, now)
    columns = {
        **own,
        "topic": pa.repeat(importer.source_topic, n),
        "partition": pa.repeat(-1, n),
        "ledger_id": pa.repeat(ledger, n),
        "entry_id": pa.array(np.arange(first, first + n)),
        "batch_index": pa.repeat(-1, n),
        "batch_size": pa.repeat(1, n),
        "deliver_at": due,
        "publish_time": pa.repeat(now, n),
        "event_time": pc.fill_null(own["event_time"], 0) if "event_time" in own else pa.repeat(0, n),
        "reason": pc.coalesce(rows["reason"], reasons) if "reason" in rows.column_names else reasons,
    }
    messages = sendable(typed(columns, MESSAGES))
    has_time = pc.is_valid(own["deliver_at"])
    return importer.decided(with_meaning(messages, has_time, importer.settings.tracker.max_delay_millis))


def _in_seconds(column: pa.ChunkedArray) -> pa.Array:
    """Returns the reason of each row whose `deliver_at` is in seconds, string, (rows,); null: it is not."""
    reasons = np.full(len(column), None, dtype=object)
    for row in np.flatnonzero(are_seconds(column)).tolist():
        reasons[row] = IN_SECONDS.format(column[row].as_py())
    return pa.array(reasons, pa.string())


def _reasons(importer: Importer, due: pa.ChunkedArray, own: dict[str, pa.ChunkedArray], now: int) -> pa.Array:
    """Returns why each row is rejected, string, shape (rows,); null: it is not."""
    times = due.to_numpy()
    delay = importer.settings.tracker.max_delay_millis
    cases: list[tuple[BoolArray, str]] = [
        (times < 0, "deliver_at is negative"),
        (times > MAX_TIME_MILLIS, "deliver_at is beyond the year 9999"),
        (
            _sizes(own, len(times)) > importer.max_size,
            "too many bytes to be delivered with their delaylake properties",
        ),
    ]
    if delay:
        cases.append((times - now > delay, TOO_FAR.format(delay)))
    reasons = np.full(len(times), None, dtype=object)
    for is_wrong, reason in reversed(cases):
        reasons[is_wrong] = reason
    return pa.array(reasons, pa.string())


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Turns errors of reading a file into an ImportFailedError of one line, and names the file."""
    try:
        yield
    except (OSError, pa.ArrowException, ImportFailedError) as error:
        raise ImportFailedError(f"{path}: {one_line(error)}") from None


def _batches(path: Path, rows_at_once: int, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Yields a file's rows in parts; only some columns if `columns` names them.

    Raises:
        ImportFailedError: the file can't be read.
    """
    # Times of the type INT96, as Spark writes them, go round after 2262 if they are read as ns.
    with _errors_of(path), pq.ParquetFile(path, coerce_int96_timestamp_unit="us") as file:
        for batch in file.iter_batches(rows_at_once, columns=columns):
            yield pa.Table.from_batches([batch])


def _digest(topic: str, path: Path) -> int:
    """Returns a hash of 48 bits of a topic and of a file's name, size and footer."""
    with path.open("rb") as file:
        end = file.seek(-8, os.SEEK_END)
        length = int.from_bytes(file.read(4), "little")
        file.seek(max(0, end - length))
        footer = file.read(length)
    return hash48(f"{topic} {path.name} {end} ".encode() + footer)


def hash48(content: bytes) -> int:
    """Returns a hash of 48 bits, for the ledger id of imported messages."""
    return int.from_bytes(hashlib.sha256(content).digest()[:6], "big")


def _sizes(own: dict[str, pa.ChunkedArray], n: int) -> np.ndarray:
    """Returns the number of bytes of each row's payload, keys and properties, int64, shape (n,)."""
    sizes = np.zeros(n, np.int64)
    for name in ("payload", "key", "ordering_key"):
        if name in own:
            sizes += pc.fill_null(pc.binary_length(own[name]), 0).to_numpy()
    if "properties" in own:
        properties = own["properties"].combine_chunks()
        lengths = sum(
            pc.fill_null(pc.binary_length(part), 0).to_numpy(zero_copy_only=False).astype(np.int64)
            for part in (properties.keys, properties.items)
        )
        offsets = properties.offsets.to_numpy()
        total = np.concatenate([[0], np.cumsum(lengths + FIELD_BYTES)])
        sizes += total[offsets[1:]] - total[offsets[:-1]]
    return sizes
