"""How the tables' Parquet files are written: with Bloom filters of the columns in which one text is looked for."""

from __future__ import annotations

from typing import TypedDict

from deltalake import BloomFilterProperties, ColumnProperties, WriterProperties

from warehouse.schemas import LOOKED_FOR

# The part of the row groups without a text that its filter lets pass. A filter's size is a power of 2: of 5,000 texts
# 4 KiB, so 0.8 bytes a row. Were fewer to pass, it would be twice that.
_FALSE_POSITIVES = 0.07


class BloomFilter(TypedDict):
    """A Bloom filter of a row group's column, as pyarrow calls it."""

    ndv: int  # how many texts it is made for
    fpp: float  # the part of other texts that pass


def bloom_filters(table: str, rows: int, row_group_rows: int) -> dict[str, BloomFilter]:
    """Returns the filters of a file that has so many rows, by column."""
    texts = max(1, min(rows, row_group_rows))
    return {column: {"ndv": texts, "fpp": _FALSE_POSITIVES} for column in LOOKED_FOR.get(table, ())}


def appended(table: str, rows: int, row_group_rows: int) -> WriterProperties:
    """Returns how delta-rs writes a file of an append."""
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
