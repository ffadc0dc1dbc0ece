"""The table `expired`: the broker entry indexes of the entries that retention has deleted from `entries`.

It distinguishes holes in the indexes of `entries` that retention has made from those of the broker's own markers. A row
is the range of deleted indexes between two entries that are left, with any markers in it.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import write_deltalake
from deltalake.exceptions import TableNotFoundError

from tracker.messages import BoolArray, Int64Array, int64
from warehouse.delta.log_cleanup import shorten_log
from warehouse.delta.opening import open_newest
from warehouse.delta.tables import Tables
from warehouse.named_queries import NamedQueries
from warehouse.schemas import EXPIRED

TABLE = "expired"
_SQL = NamedQueries(__file__)


def record(tables: Tables, removed: pa.Table) -> None:
    """Adds entries before they are deleted from `entries`, so that readers find them in at least one of both tables.

    Args:
        removed: rows of `entries`, with topic, partition, first_index and batch_size; those without index are ignored.
    """
    removed = removed.filter(removed["first_index"].is_valid())
    if not removed.num_rows:
        return
    tables.create({TABLE: EXPIRED})
    ranges = tables.query(TABLE, _SQL("all_ranges"))
    ends = pa.array(int64(removed, "first_index") + int64(removed, "batch_size"))
    new = removed.select(["topic", "partition", "first_index"]).append_column("end_index", ends)
    ranges = pa.concat_tables([ranges.cast(EXPIRED), new.cast(EXPIRED)])
    places = ranges.group_by(["topic", "partition"]).aggregate([]).to_pylist()
    merged = [_merged(tables, ranges, place["topic"], place["partition"]) for place in places]
    table = open_newest(tables.path(TABLE))
    tables.commit(
        table,
        lambda properties: write_deltalake(
            table, pa.concat_tables(merged), mode="overwrite", commit_properties=properties
        ),
    )
    table.vacuum(dry_run=False)
    shorten_log(table)


def expired_around(tables: Tables, topic: str, partition: int, index: int) -> tuple[int | None, int | None]:
    """Looks up the deleted entries of a topic partition.

    Returns:
        the least deleted index, and the least end (exclusive) of a range that is greater than `index`; None: there is
        none.
    """
    try:
        found = tables.query(TABLE, _SQL("around", topic=topic, partition=partition, index=index))
    except TableNotFoundError:
        return None, None  # nothing has been removed yet
    return found["first"][0].as_py(), found["end"][0].as_py()


def _merged(tables: Tables, ranges: pa.Table, topic: str, partition: int) -> pa.Table:
    """Merges the ranges of a topic partition between which no entry is left."""
    own = pc.and_(pc.equal(ranges["topic"], topic), pc.equal(ranges["partition"], partition)).to_numpy()
    firsts, ends = (int64(ranges, name)[own] for name in ("first_index", "end_index"))
    order = np.argsort(firsts, kind="stable")
    firsts, ends = firsts[order], np.maximum.accumulate(ends[order])
    firsts, ends = _runs(firsts, ends, firsts[1:] > ends[:-1])
    is_left_between = np.zeros(len(firsts) + 1, np.bool_)
    sql = _SQL("left_between", topic=topic, partition=partition, first=int(firsts[0]), last=int(ends[-1]))
    for left in tables.stream(sql):
        index = int64(left, "first_index")
        following = np.searchsorted(firsts, index, side="right")
        is_left_between[following[index >= ends[following - 1]]] = True
    firsts, ends = _runs(firsts, ends, is_left_between[1:-1])
    n = len(firsts)
    return pa.table([pa.repeat(topic, n), pa.array([partition] * n, pa.int32()), firsts, ends], schema=EXPIRED)


def _runs(firsts: Int64Array, ends: Int64Array, begins: BoolArray) -> tuple[Int64Array, Int64Array]:
    """Joins each range to the one before it, unless it `begins` a new one.

    Args:
        firsts, ends: first index and exclusive end of each range, int64, (ranges,).
        begins: mask of the ranges from the second on, bool, (ranges - 1,).
    """
    return firsts[np.append(True, begins)], ends[np.append(begins, True)]
