"""Reads the statistics of columns from the footer of a Parquet file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow.parquet as pq


def column_statistics(footer: pq.FileMetaData, columns: Iterable[str]) -> dict[str, list[Any]]:
    """Returns the statistics of each row group (None: it has none), by column, for those of the columns that exist."""
    places = {footer.schema.column(i).path: i for i in range(footer.num_columns)}
    groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
    return {name: [group.column(places[name]).statistics for group in groups] for name in columns if name in places}
