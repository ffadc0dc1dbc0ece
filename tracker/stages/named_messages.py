"""Finds the messages that a tick's commands name: new ones, in state, or in the tables."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.buckets.delayed_delivery_tracker import DelayedDeliveryTracker
from tracker.commands.control import Control
from tracker.commands.kinds import KINDS_WITH_PAYLOAD
from tracker.commands.match import with_released
from tracker.commands.message_state.moves import held
from tracker.commands.schema import KNOWN, PAST
from tracker.entry_log import EntryLog
from tracker.messages import MESSAGES, BoolArray, concat, empty_table, has_keys, int64, is_among, of_entries, where
from tracker.sharding import ShardId
from tracker.tick import TickInput

_ENTRY = ["ledger_id", "entry_id"]


class Named(NamedTuple):
    """The messages of the entries that commands name."""

    known: pa.Table  # as KNOWN
    is_new: BoolArray  # (known,): the message came in only in this tick, and is not rejected


class NamedMessages:
    """Finds the messages that commands name.

    Args:
        tracker: has the delayed messages in state.
        entries: has the messages that are not durable.
        control: knows the times to which messages were moved.
        shard_id: which shard this is.
    """

    def __init__(self, tracker: DelayedDeliveryTracker, entries: EntryLog, control: Control, shard_id: ShardId) -> None:
        self._tracker = tracker
        self._entries = entries
        self._control = control
        self._shard_id = shard_id

    def find(self, commands: pa.Table, messages: pa.Table, durable: pa.Table, by_key: pa.Table) -> Named:
        """Finds the messages of the entries that commands name. Call it before the entry log has this tick's messages.

        Args:
            commands: as COMMAND_ROWS.
            messages: as ENTRY_LOG_ROWS: messages of this tick.
            durable: as KNOWN: messages that the tables have.
            by_key: as KNOWN: messages of earlier ticks that commands name by their schedule key.
        """
        if not commands.num_rows:
            return Named(empty_table(KNOWN), np.zeros(0, np.bool_))
        wanted = _entries_of(commands)
        new, recent, durable = (
            rows.select(KNOWN.names).join(wanted, _ENTRY, join_type="inner", use_threads=False).select(KNOWN.names)
            for rows in (messages, self._entries.all(), self._with_released(durable))
        )
        # The entry log has all messages of an entry that is not durable yet, the delayed index perhaps some of them.
        durable = durable.join(recent, _ENTRY, join_type="left anti", use_threads=False)
        known = pa.concat_tables([new, recent, durable.select(KNOWN.names)]).cast(KNOWN)
        if by_key.num_rows:
            is_there = is_among(by_key, known, [*_ENTRY, "batch_index"])
            known = pa.concat_tables([known, where(by_key, ~is_there)])
        is_new = np.zeros(known.num_rows, np.bool_)
        is_new[: new.num_rows] = int64(new, "deliver_at") > PAST
        return Named(known, is_new)

    def payload_rows(
        self, commands: pa.Table, messages: pa.Table, known: pa.Table, sealed: pa.Table
    ) -> tuple[pa.Table, pa.Table]:
        """Returns the payload rows of the known messages that commands move or restore.

        Args:
            commands: as COMMAND_ROWS.
            messages: as MESSAGES: new messages of this tick.
            known: as `Named.known`.
            sealed: as MESSAGES: rows of these messages that the delayed index has.

        Returns:
            two tables, as MESSAGES: all payload rows, and those of them in state that have not been handed out.
        """
        nothing = empty_table(MESSAGES)
        if not commands.num_rows:
            return nothing, nothing
        kinds = pc.is_in(commands["kind"], pa.array(KINDS_WITH_PAYLOAD))
        if not pc.any(kinds).as_py():
            return nothing, nothing
        wanted = _entries_of(commands.filter(kinds))
        known = known.join(wanted, _ENTRY, join_type="inner", use_threads=False)
        times = {*known["deliver_at"].to_pylist(), *self._control.moved_to(known)}
        in_state = of_entries(self._tracker.find(times), wanted)
        to_seal = of_entries(self._tracker.find_to_seal(), wanted)
        return concat([of_entries(messages, wanted), in_state, to_seal, of_entries(sealed, wanted)]), in_state

    def held(self, tick_input: TickInput) -> pa.Table:
        """Returns all rows that are held back, sealed or in state, as MESSAGES."""
        return concat([held(tick_input.payload_rows), held(self._tracker.find(()))])

    def _with_released(self, durable: pa.Table) -> pa.Table:
        """Completes the entries whose home is this shard: see `with_released`."""
        if not has_keys(durable):
            return with_released(durable)
        is_home = self._shard_id.is_home(durable)
        return pa.concat_tables([with_released(where(durable, is_home)), where(durable, ~is_home)])


def _entries_of(commands: pa.Table) -> pa.Table:
    """Returns the entries that commands name, each once."""
    return commands.select(_ENTRY).group_by(_ENTRY).aggregate([])
