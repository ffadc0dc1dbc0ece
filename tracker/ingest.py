"""What comes in in a tick: which messages are new, which are rejected, and which messages the commands name."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.buckets.delayed_delivery_tracker import DelayedDeliveryTracker
from tracker.commands.apply import Control
from tracker.commands.kinds import KINDS_WITH_PAYLOAD
from tracker.commands.match import Named, with_released
from tracker.commands.retries import take_sent_back
from tracker.context import Context
from tracker.entry_log import ENTRY_LOG_ROWS, EntryLog
from tracker.keys.superseding import Superseding
from tracker.message_state.state import MessageState
from tracker.messages import (
    BoolArray,
    are_recurring,
    concat,
    empty_table,
    has_keys,
    int64,
    is_among,
    is_rejected,
    of_entries,
    where,
    with_columns,
)
from tracker.requests import MessageRequests
from tracker.schemas import COMMAND_ROWS, KNOWN, PAST
from tracker.tick import TickInProgress


class Accepted(NamedTuple):
    """The messages that came in in a tick, after the decisions about them."""

    new: pa.Table  # as MESSAGES: those to be added to the tracker
    logged: pa.Table  # as ENTRY_LOG_ROWS: all of them, and those that other shards have of this shard's entries
    outcomes: pa.Table  # as OUTCOME_ROWS: of the commands that waited for them


class NewMessages:
    """Decides which of the messages that came in are new, and applies the commands that waited for them.

    Args:
        tracker: knows the messages that were added before.
        state: knows which messages are done with.
        control: has the commands that wait.
        keys: decides which message of a schedule key waits.
        requests: knows which messages come again under their request id.
    """

    def __init__(
        self,
        context: Context,
        tracker: DelayedDeliveryTracker,
        state: MessageState,
        control: Control,
        keys: Superseding,
        requests: MessageRequests,
    ) -> None:
        self._context = context
        self._tracker = tracker
        self._state = state
        self._control = control
        self._keys = keys
        self._requests = requests

    def accept_messages(self, step: TickInProgress) -> Accepted:
        """Sorts a tick's messages; adds rejects, outcomes, and the commands of messages sent back, to the tick.

        Args:
            step: the tick. Its messages are not added to the tracker yet.
        """
        sent_back = take_sent_back(step.input.messages, self._context.subscriptions, self._context.now)
        requested = self._requests.decide_new(sent_back.messages, step.input.message_requests, step.input.first_answers)
        messages = requested.messages
        if sent_back.commands.num_rows:
            # These commands came with their messages, so they precede the commands of the control topic.
            step.commands = concat([sent_back.commands, step.commands], COMMAND_ROWS)
        rejected = is_rejected(messages)
        # After a rebuild, messages that are done with may come again.
        is_done = self._state.are_done(messages) if self._state.has_exceptions else np.zeros_like(rejected)
        is_new = ~rejected & ~is_done
        if sent_back.outcomes.num_rows:
            is_first = is_new & ~self._tracker.knows(messages)
            step.outcomes.append(where(sent_back.outcomes, is_first[sent_back.row]))
        if has_keys(messages):
            decided = self._keys.decide_new(messages, is_new & ~self._tracker.knows(messages))
            messages, is_new = decided.messages, is_new & ~decided.dropped
            step.outcomes.append(decided.outcomes)
        step.outcomes.append(requested.outcomes(messages))
        new = where(messages, is_new)
        self._state.count_unwanted_new(new)
        done = where(messages, ~is_rejected(messages) & is_done)
        self._tracker.keep_to_seal(where(done, ~are_recurring(done)))
        find_in_state = partial(_rows_in_state, self._tracker, self._state)
        outcomes = self._control.apply_waiting(messages, new, step.input.elsewhere, done, find_in_state)
        step.outcomes.append(outcomes)
        step.n_taken = messages.num_rows
        step.effects.rejects = where(messages, rejected & ~self._state.were_rejected(messages))
        logged = _with_rejects_past(rejected, messages).select(ENTRY_LOG_ROWS.names)
        return Accepted(new, concat([logged, step.input.elsewhere], ENTRY_LOG_ROWS), outcomes)


def _with_rejects_past(rejected: BoolArray, messages: pa.Table) -> pa.Table:
    """Returns the messages with the rejected ones due at PAST: as if dispatched, so that no command applies to them."""
    if not rejected.any():
        return messages
    return with_columns(messages, deliver_at=pa.array(np.where(rejected, PAST, int64(messages, "deliver_at"))))


_ENTRY = ["ledger_id", "entry_id"]


class NamedMessages:
    """Finds the messages that commands name.

    Args:
        tracker: has the delayed messages in state.
        entries: has the messages that are not durable.
        state: knows the times to which messages were moved.
    """

    def __init__(
        self, context: Context, tracker: DelayedDeliveryTracker, entries: EntryLog, state: MessageState
    ) -> None:
        self._context = context
        self._tracker = tracker
        self._entries = entries
        self._state = state

    def find_named(self, commands: pa.Table, messages: pa.Table, durable: pa.Table, by_key: pa.Table) -> Named:
        """Finds the messages of the entries that commands name. Call it before the entry log has this tick's messages.

        Args:
            commands: as COMMAND_ROWS.
            messages: as ENTRY_LOG_ROWS: messages of this tick.
            durable: as KNOWN: messages that the tables have.
            by_key: as KNOWN: messages of earlier ticks that commands name by their schedule key.
        """
        if not commands.num_rows:
            return Named(empty_table(KNOWN), np.zeros(0, np.bool_))
        wanted = _named_entries(commands)
        new, recent, durable = (
            rows.select(KNOWN.names).join(wanted, _ENTRY, join_type="inner", use_threads=False).select(KNOWN.names)
            for rows in (messages, self._entries.all_messages(), self._with_released(durable))
        )
        # The entry log has all messages of an entry that is not durable yet, the delayed index perhaps some of them.
        durable = durable.join(recent, _ENTRY, join_type="left anti", use_threads=False)
        known = pa.concat_tables([new, recent, durable.select(KNOWN.names)]).cast(KNOWN)
        if by_key.num_rows:
            by_key = where(by_key, ~is_among(by_key, known, [*_ENTRY, "batch_index"]))
            known = pa.concat_tables([known, by_key])
        is_new = np.zeros(known.num_rows, np.bool_)
        is_new[: new.num_rows] = int64(new, "deliver_at") > PAST
        return Named(known, self._context.are_dispatched(known, is_new), n_by_key=by_key.num_rows)

    def add_payload(self, named: Named, commands: pa.Table, messages: pa.Table, sealed: pa.Table) -> Named:
        """Adds the payload rows of the known messages that commands move or restore.

        Args:
            named: the known messages.
            commands: as COMMAND_ROWS.
            messages: as MESSAGES: new messages of this tick.
            sealed: as MESSAGES: rows of these messages that the delayed index has.
        """
        if not commands.num_rows:
            return named
        kinds = pc.is_in(commands["kind"], pa.array(KINDS_WITH_PAYLOAD))
        if not pc.any(kinds).as_py():
            return named
        wanted = _named_entries(commands.filter(kinds))
        known = named.known.join(wanted, _ENTRY, join_type="inner", use_threads=False)
        in_state = _rows_in_state(self._tracker, self._state, known)
        to_seal = of_entries(self._tracker.find_to_seal(), wanted)
        payload_rows = concat([of_entries(messages, wanted), in_state, to_seal, of_entries(sealed, wanted)])
        return named._replace(payload_rows=payload_rows, in_state=in_state)

    def _with_released(self, durable: pa.Table) -> pa.Table:
        """Completes the entries whose home is this shard: see `with_released`."""
        if not has_keys(durable):
            return with_released(durable)
        is_home = self._context.shard_id.is_home(durable)
        return pa.concat_tables([with_released(where(durable, is_home)), where(durable, ~is_home)])


def _rows_in_state(tracker: DelayedDeliveryTracker, state: MessageState, known: pa.Table) -> pa.Table:
    """Returns the rows in state, as MESSAGES, of the entries of messages, as KNOWN."""
    times = {*known["deliver_at"].to_pylist(), *state.times_moved_to(known)}
    return of_entries(tracker.find_rows(times), known)


def _named_entries(commands: pa.Table) -> pa.Table:
    """Returns the entries that commands name, each once."""
    return commands.select(_ENTRY).group_by(_ENTRY).aggregate([])
