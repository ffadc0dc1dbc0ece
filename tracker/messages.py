"""The table of messages, MESSAGES, that all parts of the service pass on, and functions on its columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from conf.arrow import leave_pandas_out
from tracker.properties import MessagePosition

leave_pandas_out()  # whatever gives Arrow a list imports this module first

Int64Array = npt.NDArray[np.int64]

BoolArray = npt.NDArray[np.bool_]

# Imported messages have ledger ids from here on. Pulsar counts its own from 0; JavaScript is exact up to twice this.
FIRST_IMPORTED_LEDGER = 1 << 52

# When a warehouse gets another broker, its earlier messages are renumbered: their ledger ids rise by
# FIRST_IMPORTED_LEDGER the first time, and by this each time. A cluster has far fewer ledgers.
PLACE_LEDGERS = 1 << 44

# One row a message. Times are ms since the epoch, UTC; 0 in event_time means unset.
MESSAGES = pa.schema(
    [
        ("topic", pa.string()),  # as the route names it, without a partition
        ("partition", pa.int32()),  # -1: the topic is not partitioned
        ("ledger_id", pa.int64()),
        ("entry_id", pa.int64()),
        ("batch_index", pa.int32()),  # -1: the entry is one message
        ("batch_size", pa.int32()),  # messages in the entry
        ("first_index", pa.int64()),  # broker entry index of the entry's first message; null: not known
        ("deliver_at", pa.int64()),
        ("publish_time", pa.int64()),
        ("event_time", pa.int64()),
        ("producer_name", pa.string()),
        ("key", pa.string()),  # null: none
        ("ordering_key", pa.string()),  # null: none, or not UTF-8
        ("properties", pa.map_(pa.string(), pa.string())),
        ("payload", pa.binary()),
        ("reason", pa.string()),  # why the message is rejected; null: it is not
        ("subscription", pa.string()),  # the only subscription that the row is for; null: all of its topic's
        ("sequence", pa.int64()),  # of the move that made this row; null: the row with which the message came
        ("ordering_key_bytes", pa.binary()),  # an ordering key that is not UTF-8
        ("key_encoding", pa.string()),  # base64: the key is bytes, and `key` has their base64; null: it is text
        ("schema_version", pa.binary()),  # of the source topic's schema, as Pulsar numbers it; null: none
        ("was_due", pa.int64()),  # when a message that is or was parked was due; null: deliver_at
        ("schedule_key", pa.string()),  # one of a topic's messages with the same key is delivered; null: no key
        ("key_since", pa.int64()),  # publish time of the first message since the key began again; null: not known
        ("attempt", pa.int32()),  # number of the retry, from 1; null: the first delivery
        ("retry_reasons", pa.string()),  # JSON list: the reasons for this retry and the earlier ones
        ("shaped_from", pa.int64()),  # when the message was due before shaping moved it; null: not moved by shaping
        ("occurrence", pa.int64()),  # number of the recurring message's occurrence, from 1; null: it does not recur
        ("occurrence_at", pa.int64()),  # when the occurrence is due by the message's rule; null: deliver_at
        ("payload_at", pa.string()),  # where a large payload is, as `PayloadRef`; null: `payload` has it
        # Of a topic's messages with the same request id the first counts. null: no id, or the shard has decided whether
        # the message is the first; so tables and state have none.
        ("request_id", pa.string()),
        ("expires_at", pa.int64()),  # the message itself is not sent from then on; null: it has no end, or it recurs
    ]
)

ORDER = [
    ("deliver_at", "ascending"),
    ("ledger_id", "ascending"),
    ("entry_id", "ascending"),
    ("batch_index", "ascending"),
]

# By the schema's id(), which is unique as long as the schema is kept here. Some callers pass schemas that they make.
_EMPTY_TABLES: dict[int, tuple[pa.Schema, pa.Table]] = {}

_MOST_EMPTY_TABLES = 100


def concat(tables: Iterable[pa.Table], schema: pa.Schema = MESSAGES) -> pa.Table:
    """Concatenates tables. A table that lacks a column, because an earlier version wrote it, has nulls there.

    Args:
        tables: with the columns of the schema, or fewer.
        schema: the columns; without rows an empty table of this schema is returned.
    """
    tables = [_completed(table, schema) for table in tables if table.num_rows]
    if len(tables) == 1:
        return tables[0]
    return pa.concat_tables(tables) if tables else empty_table(schema)


def empty_table(schema: pa.Schema) -> pa.Table:
    """Returns a schema's table without rows, the same object each time: to make one takes half a millisecond."""
    kept = _EMPTY_TABLES.get(id(schema))
    if kept is None:
        if len(_EMPTY_TABLES) >= _MOST_EMPTY_TABLES:
            _EMPTY_TABLES.clear()
        kept = _EMPTY_TABLES[id(schema)] = schema, schema.empty_table()
    return kept[1]


def _completed(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    if rows.schema == schema:
        return rows
    known = rows.column_names
    missing = [field for field in schema if field.name not in known]
    if not missing:
        return rows
    for field in missing:
        rows = rows.append_column(field, pa.nulls(rows.num_rows, field.type))
    return rows.select([*schema.names, *(name for name in known if name not in schema.names)])


def in_order_of_dues(rows: pa.Table) -> pa.Table:
    """Sorts rows that are parked by when they were due; MESSAGES, or the columns that it sorts by."""
    names = ("was_due", "sequence", "ledger_id", "entry_id", "batch_index")
    return rows.sort_by([(name, "ascending") for name in names]) if rows.num_rows else rows


def int64(rows: pa.Table, column: str) -> Int64Array:
    """Returns a column of integers without nulls as an int64 array, (rows,)."""
    values: Int64Array = rows[column].to_numpy().astype(np.int64, copy=False)
    return values


def has_keys(rows: pa.Table) -> bool:
    """Whether any of the rows has a schedule key."""
    return "schedule_key" in rows.column_names and rows["schedule_key"].null_count < rows.num_rows


def has_requests(rows: pa.Table) -> bool:
    """Whether any of the rows has a request id."""
    return "request_id" in rows.column_names and rows["request_id"].null_count < rows.num_rows


def has_occurrences(rows: pa.Table) -> bool:
    """Whether any of the rows is of a recurring message."""
    return "occurrence" in rows.column_names and rows["occurrence"].null_count < rows.num_rows


def are_recurring(rows: pa.Table) -> BoolArray:
    """Tells which rows are of recurring messages: bool, (rows,)."""
    if not has_occurrences(rows):
        return np.zeros(rows.num_rows, np.bool_)
    are: BoolArray = pc.is_valid(rows["occurrence"]).to_numpy(zero_copy_only=False)
    return are


def in_order(rows: pa.Table) -> pa.Table:
    """Sorts rows in the order of delivery.

    The order is by deliver_at, then was_due (where null, deliver_at), then sequence (where null, 0), then ledger_id,
    entry_id and batch_index.

    Args:
        rows: as MESSAGES; `was_due` may be missing.

    Returns:
        the same rows; of two or more each column is one contiguous chunk.
    """
    if rows.num_rows < 2:
        return rows
    keys = [int64(rows, column) for column, _ in ORDER]
    if rows["sequence"].null_count < rows.num_rows:
        keys.insert(1, pc.fill_null(rows["sequence"], 0).to_numpy())
        if "was_due" in rows.column_names:
            keys.insert(1, pc.coalesce(rows["was_due"], rows["deliver_at"]).to_numpy())
    # Rows of a bucket are in order already. The check takes a tenth of the time that sorting would.
    if _is_ascending(keys):
        return rows.combine_chunks()
    return rows.take(pa.array(np.lexsort(keys[::-1]))).combine_chunks()


def _is_ascending(keys: list[Int64Array]) -> bool:
    """Tells whether rows are sorted by the first key, rows equal in it by the second key, and so on."""
    first, *others = keys
    if (first[1:] < first[:-1]).any():
        return False
    ties = np.flatnonzero(first[1:] == first[:-1])
    for key in others:
        one, next_one = key[ties], key[ties + 1]
        if (next_one < one).any():
            return False
        ties = ties[next_one == one]
    return True


def where(rows: pa.Table, mask: BoolArray) -> pa.Table:
    """Filters rows.

    Args:
        rows: of any schema.
        mask: bool, (rows,): which rows to return.

    Returns:
        these rows, in their order; `rows` itself if the mask is true everywhere.
    """
    if mask.all():
        return rows
    return rows.filter(pa.array(mask))


def of_entries(rows: pa.Table, entries: pa.Table) -> pa.Table:
    """Returns the rows of some entries, in their order.

    Args:
        rows: with the columns ledger_id and entry_id.
        entries: with the columns ledger_id and entry_id.
    """
    return where(rows, is_among(rows, entries, ["ledger_id", "entry_id"]))


def typed(rows: pa.Table | Mapping[str, pa.Array], schema: pa.Schema) -> pa.Table:
    """Casts columns to a schema: missing columns are null, columns that the schema lacks are dropped.

    Args:
        rows: a table, or columns by name. `ledger_id` is among them: its length is the number of rows.
        schema: columns and types of the result.
    """
    n = len(rows["ledger_id"])
    columns = rows.column_names if isinstance(rows, pa.Table) else rows
    return pa.table(
        [rows[f.name].cast(f.type) if f.name in columns else pa.nulls(n, f.type) for f in schema], schema=schema
    )


class MessageIds(NamedTuple):
    """The ids of n messages in columns, int64, (n,). Batch indexes of -1 and 0 are the same: the first of the entry."""

    ledger_ids: Int64Array
    entry_ids: Int64Array
    batch_indexes: Int64Array


def message_ids(rows: pa.Table) -> MessageIds:
    """Returns the columns ledger_id, entry_id and batch_index, each an int64 array, (rows,)."""
    return MessageIds(int64(rows, "ledger_id"), int64(rows, "entry_id"), int64(rows, "batch_index"))


def position_texts(rows: pa.Table) -> pa.Array:
    """Returns each row's position as the text of a `MessagePosition`.

    Args:
        rows: with the columns of `MessagePosition`, without nulls.

    Returns:
        string, (rows,).
    """
    parts = [rows[name].cast(pa.string()) for name in MessagePosition._fields]
    return pc.binary_join_element_wise(*parts, ":").combine_chunks()


def attempts_of(rows: pa.Table) -> Int64Array:
    """Returns the number of each row's retry, int64, (rows,); 0: no retry, or the column `attempt` is missing."""
    if "attempt" not in rows.column_names or rows["attempt"].null_count == rows.num_rows:
        return np.zeros(rows.num_rows, np.int64)
    attempts: Int64Array = pc.fill_null(rows["attempt"], 0).to_numpy().astype(np.int64)
    return attempts


def is_among(rows: pa.Table, others: pa.Table, keys: Sequence[str]) -> BoolArray:
    """Tells which rows have the same keys as one of the other rows: bool, (rows,).

    Args:
        rows: with the columns `keys`.
        others: with the columns `keys`.
        keys: names of integer columns without nulls.
    """
    return are_equal_to_any(as_int64(rows, keys), as_int64(others, keys))


def are_equal_to_any(rows: pa.Table, others: pa.Table) -> BoolArray:
    """Tells which rows are equal to one of the other rows, which have the same columns: bool, (rows,).

    A row with a null is equal to none.
    """
    found = np.zeros(rows.num_rows, np.bool_)
    if rows.num_rows and others.num_rows:
        numbered = rows.append_column("row", pa.array(np.arange(rows.num_rows)))
        matched = numbered.join(others, rows.column_names, join_type="left semi", use_threads=False)
        found[int64(matched, "row")] = True
    return found


def as_int64(rows: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Selects columns of integers and casts them to int64.

    Args:
        rows: with these columns.
        columns: their names.

    Returns:
        a table of these columns alone, (rows, columns); nulls stay null.

    Raises:
        pa.ArrowInvalid: a value of an unsigned column is above the largest int64.
    """
    return pa.table({column: rows[column].cast(pa.int64()) for column in columns})


def subscription_numbers(rows: pa.Table, names: Mapping[str, Sequence[str]]) -> Int64Array:
    """Returns the number of each row's subscription among the subscriptions of its topic.

    Args:
        rows: with the columns topic and subscription.
        names: by source topic: the names of its subscriptions, by number.

    Returns:
        int64, (rows,); -1: the row names no subscription, or one that the topic does not have.
    """
    if not rows.num_rows:
        return np.zeros(0, np.int64)
    topics, subscriptions = (
        rows[column].combine_chunks().dictionary_encode("encode") for column in ("topic", "subscription")
    )
    known = {(topic, name): i for topic, topic_names in names.items() for i, name in enumerate(topic_names)}
    numbers = [
        [known.get((topic, name), -1) for name in subscriptions.dictionary.to_pylist()]
        for topic in topics.dictionary.to_pylist()
    ]
    row_numbers: Int64Array = np.array(numbers, np.int64)[topics.indices.to_numpy(), subscriptions.indices.to_numpy()]
    return row_numbers


def with_columns(rows: pa.Table, **columns: pa.Array) -> pa.Table:
    """Replaces the values of some columns.

    Args:
        rows: of any schema.
        columns: by column name: the new values, (rows,), of the column's type.

    Returns:
        a table with the same schema; the other columns are not copied.

    Raises:
        pa.ArrowInvalid: values are of another type or number.
    """
    for name, values in columns.items():
        i = rows.schema.get_field_index(name)
        rows = rows.set_column(i, rows.schema.field(i), values)
    return rows


# The reason of a message that is left out begins with this: the cluster in which it was published delivers it.
LEFT_OUT = "replicated from "


def is_left_out(rows: pa.Table) -> BoolArray:
    """Tells which messages are left out, because another cluster's job delivers them: bool, (rows,)."""
    if rows["reason"].null_count == rows.num_rows:
        return np.zeros(rows.num_rows, np.bool_)
    return np.asarray(pc.fill_null(pc.starts_with(rows["reason"], LEFT_OUT), False))


def is_rejected(rows: pa.Table) -> BoolArray:
    """Tells which messages have a reason, so that they are rejected or left out: bool, (rows,)."""
    return np.asarray(pc.is_valid(rows["reason"]))


def readable(rows: pa.Table) -> tuple[pa.Table, dict[int, str]]:
    """Replaces values that can't be read by nulls.

    Args:
        rows: of any schema.

    Returns:
        the rows; and by index of those with a replaced value which column it is in, one line.
    """
    try:
        rows.validate(full=True)
    except pa.ArrowInvalid:
        return _replaced(rows)
    return rows, {}


def _replaced(rows: pa.Table) -> tuple[pa.Table, dict[int, str]]:
    found: dict[int, str] = {}
    for field in rows.schema:
        values = []
        for row, value in enumerate(rows[field.name]):
            read = _read(value)
            if read is None and value.is_valid:
                found.setdefault(row, f"what is not UTF-8 can't be read: {field.name}")
            values.append(read)
        rows = with_columns(rows, **{field.name: pa.array(values, field.type)})
    return rows, found


def _read(value: pa.Scalar) -> Any:
    """Returns a value; None: it can't be read, or is null."""
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return None


def order_keys(rows: pa.Table) -> pa.ChunkedArray:
    """Returns each message's order key: its ordering key, else its partition key.

    Args:
        rows: as MESSAGES.

    Returns:
        binary, (rows,); null: the message has no key, and comes in any order.
    """
    keys = [rows[name].cast(pa.binary()) for name in ("ordering_key", "ordering_key_bytes", "key")]
    return pc.coalesce(*keys)
