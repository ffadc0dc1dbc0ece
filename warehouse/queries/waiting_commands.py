"""Finds the commands that wait for their messages, by their outcomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.repeats import OTHER_BODY
from tracker.messages import subscription_numbers, typed, where
from tracker.schemas import COMMAND_ROWS
from tracker.subscriptions import ALSO_LATER
from warehouse.delta.tables import Tables
from warehouse.named_queries import NamedQueries, Sql, columns

_COMMAND = [
    *("request_id", "topic", "partition", "ledger_id", "entry_id", "batch_index"),
    *("operation", "deliver_at", "issued_by", "issued_at"),
]

_OF_ALL = Sql("outcomes")

_SQL = NamedQueries(__file__, command=columns(_COMMAND), other_body=OTHER_BODY)

# SQL for the rows of `outcomes` about commands that still wait.
WAITING = _SQL("waiting", outcomes=_OF_ALL)


def find_waiting(
    tables: Tables,
    names: Mapping[str, Sequence[str]],
    topics: Sequence[str] | None = None,
    version: int | None = None,
) -> pa.Table:
    """Finds the commands that still wait for their messages, in the order in which they came.

    Args:
        tables: of the warehouse.
        names: the names of each source topic's subscriptions, in the order of their numbers.
        topics: the source topics to look at, at least one; None: all.
        version: of `outcomes`; None: the newest.

    Returns:
        the commands as COMMAND_ROWS, for the subscriptions in `names`, and for later ones.
    """
    outcomes = _OF_ALL if topics is None else _SQL("outcomes_of", topics=topics)
    rows = tables.query("outcomes", _SQL("waiting_commands", outcomes=outcomes), version)
    numbers = subscription_numbers(rows, names)
    is_later = pc.equal(rows["subscription"], ALSO_LATER).to_numpy(zero_copy_only=False)
    is_later &= pc.is_in(rows["topic"], pa.array(list(names), pa.string())).to_numpy(zero_copy_only=False)
    bits = np.where(numbers < 0, 0, 1 << np.maximum(numbers, 0))
    added = {"bits": bits, "also_later": is_later, "place": np.arange(len(bits))}
    for name, values in added.items():
        rows = rows.append_column(name, pa.array(values))
    of_commands = where(rows, (numbers >= 0) | is_later).group_by(_COMMAND, use_threads=False)
    found = of_commands.aggregate([("bits", "sum"), ("also_later", "any"), ("place", "min")]).sort_by("place_min")
    values = {
        **{name: found[name] for name in _COMMAND},
        "kind": pc.utf8_lower(found["operation"]),
        "deliver_at": pc.fill_null(found["deliver_at"], 0),
        "subscriptions": found["bits_sum"],
        "also_later": found["also_later_any"],
    }
    return typed(values, COMMAND_ROWS)
