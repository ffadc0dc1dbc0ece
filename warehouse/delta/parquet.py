"""How the tables' Parquet files are written, with Bloom filters, and what their footers say of columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypedDict

import pyarrow.parquet as pq
from deltalake import BloomFilterProperties, ColumnProperties, WriterProperties

from warehouse.schemas import LOOKED_FOR

# The share of row groups without a text that its filter lets pass. A filter's size is a power of 2: 4 KiB for 5,000
# texts, 0.8 bytes a row; a smaller share would take twice that.
_FALSE_POSITIVES = 0.07


class BloomFilter(TypedDict):
    """A Bloom filter of a row group's column, as pyarrow calls it."""

    ndv: int  # the number of distinct texts that it is made for
    fpp: float  # the share of other texts that pass


def bloom_filters(table: str, rows: int, row_group_rows: int) -> dict[str, BloomFilter]:
    """Returns the filters for a file with this many rows, by column."""
    texts = max(1, min(rows, row_group_rows))
    return {column: {"ndv": texts, "fpp": _FALSE_POSITIVES} for column in LOOKED_FOR.get(table, ())}


def appended(table: str, rows: int, row_group_rows: int) -> WriterProperties:
    """Returns the properties with which delta-rs writes an appended file."""
    filters = bloom_filters(table, rows, row_group_rows)
    return WriterProperties(
        compression="ZSTD",
        max_row_group_size=row_group_rows,
        write_batch_size=min(1024, row_group_rows),
        column_properties={
            column: ColumnProperties(bloom_filter_properties=BloomFilterProperties(True, f["fpp"], f["ndv"]))
            for column, f in filters.items()
        },
    )


def column_statistics(footer: pq.FileMetaData, columns: Iterable[str]) -> dict[str, list[Any]]:
    """Returns the statistics of each row group (None: it has none), by column, for those of the columns that exist."""
    places = {footer.schema.column(i).path: i for i in range(footer.num_columns)}
    groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
    return {name: [group.column(places[name]).statistics for group in groups] for name in columns if name in places}
