"""Finds the commands that wait for their messages, by their outcomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.kinds import CANCEL, RESCHEDULE
from tracker.messages import subscription_numbers, typed, where
from tracker.schemas import COMMAND_ROWS
from tracker.subscriptions import ALSO_LATER
from warehouse.delta.tables import Tables

# The rows of `outcomes` with the result WAITING and no later outcome. A skip of a whole entry may have a later outcome
# for each of its messages; a message that is an entry is named by the batch index 0, too. Cancels and reschedules
# without a time, which earlier versions of the program wrote, are left out: `delayed_index` has the time of a cancel.
WAITING = f"""
SELECT * FROM outcomes AS w LEFT ANTI JOIN (SELECT * FROM outcomes WHERE result <> 'WAITING') AS a
    ON a.request_id = w.request_id AND a.subscription = w.subscription AND a.ledger_id = w.ledger_id
    AND a.entry_id = w.entry_id AND (a.batch_index = w.batch_index OR w.batch_index <= 0)
WHERE w.result = 'WAITING'
    AND (w.deliver_at IS NOT NULL OR w.operation NOT IN ('{CANCEL.upper()}', '{RESCHEDULE.upper()}'))
"""  # noqa: S608

_COMMAND = [
    *("request_id", "topic", "partition", "ledger_id", "entry_id", "batch_index"),
    *("operation", "deliver_at", "issued_by", "issued_at"),
]

# The waiting commands, with a row for each subscription, in the order in which they came.
_COMMANDS = f"""
SELECT {", ".join(_COMMAND)}, subscription FROM ({WAITING}) AS w GROUP BY {", ".join(_COMMAND)}, subscription
ORDER BY min(batch_id), min(sequence), request_id, ledger_id, entry_id, batch_index, subscription
"""  # noqa: S608


def find_waiting(tables: Tables, names: Mapping[str, Sequence[str]]) -> pa.Table:
    """Finds the commands that still wait for their messages, in the order in which they came.

    Args:
        tables: of the warehouse.
        names: the names of each source topic's subscriptions, in the order of their numbers.

    Returns:
        the commands as COMMAND_ROWS, for the subscriptions in `names`, and for later ones.
    """
    rows = tables.sql(_COMMANDS)
    numbers = subscription_numbers(rows, names)
    is_later = pc.equal(rows["subscription"], ALSO_LATER).to_numpy(zero_copy_only=False)
    is_later &= pc.is_in(rows["topic"], pa.array(list(names), pa.string())).to_numpy(zero_copy_only=False)
    bits = np.where(numbers < 0, 0, 1 << np.maximum(numbers, 0))
    columns = {"bits": bits, "also_later": is_later, "place": np.arange(len(bits))}
    for name, values in columns.items():
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
