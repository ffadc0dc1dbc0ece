"""The columns of a Parquet file, as its footer tells of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow.parquet as pq


def column_statistics(footer: pq.FileMetaData, columns: Iterable[str]) -> dict[str, list[Any]]:
    """Returns for each of the columns that a file has the statistics of its row groups; None: a group has none."""
    places = {footer.schema.column(i).path: i for i in range(footer.num_columns)}
    groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
    return {name: [group.column(places[name]).statistics for group in groups] for name in columns if name in places}
