"""The messages that come in in a tick: which of them are new, and which are rejected."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tracker.buckets.delayed_delivery_tracker import DelayedDeliveryTracker
from tracker.commands.control import Control
from tracker.commands.retries import take_sent_back
from tracker.commands.schema import COMMAND_ROWS, PAST
from tracker.entry_log import ENTRY_LOG_ROWS
from tracker.keys.superseding import Superseding
from tracker.messages import BoolArray, are_recurring, concat, has_keys, int64, is_rejected, where, with_columns
from tracker.stages.tick_in_progress import TickInProgress
from tracker.subscriptions import Subscriptions


class Accepted(NamedTuple):
    """The messages that came in in a tick, after the decisions about them."""

    new: pa.Table  # as MESSAGES: those to be added to the tracker
    logged: pa.Table  # as ENTRY_LOG_ROWS: all of them, and those that other shards have of this shard's entries
    outcomes: pa.Table  # as OUTCOME_ROWS: of the commands that waited for them


class NewMessages:
    """Decides which of the messages that came in are new, and applies the commands that waited for them.

    Args:
        subscriptions: the subscriptions of each source topic.
        tracker: knows the messages that were added before.
        control: has the commands that wait.
        keys: decides which message of a schedule key waits.
    """

    def __init__(
        self, subscriptions: Subscriptions, tracker: DelayedDeliveryTracker, control: Control, keys: Superseding
    ) -> None:
        self._subscriptions = subscriptions
        self._tracker = tracker
        self._control = control
        self._keys = keys

    def accept(self, step: TickInProgress) -> Accepted:
        """Sorts a tick's messages; adds rejects, outcomes, and the commands of messages sent back, to the tick.

        Args:
            step: the tick. Its messages are not added to the tracker yet.
        """
        sent_back = take_sent_back(step.input.messages, self._subscriptions, step.tick.now)
        messages = sent_back.messages
        if sent_back.commands.num_rows:
            # These commands came with their messages, so they precede the commands of the control topic.
            step.commands = concat([sent_back.commands, step.commands], COMMAND_ROWS)
        rejected = is_rejected(messages)
        # After a rebuild, messages that are done with may come again.
        is_done = self._control.are_done(messages) if self._control.has_exceptions else np.zeros_like(rejected)
        is_new = ~rejected & ~is_done
        if sent_back.outcomes.num_rows:
            is_first = is_new & ~self._tracker.knows(messages)
            step.outcomes.append(where(sent_back.outcomes, is_first[sent_back.row]))
        if has_keys(messages):
            decided = self._keys.take(messages, is_new & ~self._tracker.knows(messages), step.moment)
            messages, is_new = decided.messages, is_new & ~decided.dropped
            step.outcomes.append(decided.outcomes)
        new = where(messages, is_new)
        self._control.count_unwanted(new)
        done = where(messages, ~is_rejected(messages) & is_done)
        self._tracker.keep_to_seal(where(done, ~are_recurring(done)))
        outcomes = self._control.apply_waiting(messages, step.moment, new, step.input.elsewhere, done)
        step.outcomes.append(outcomes)
        step.n_taken = messages.num_rows
        step.effects.rejects = where(messages, rejected)
        logged = _with_rejects_past(rejected, messages).select(ENTRY_LOG_ROWS.names)
        return Accepted(new, concat([logged, step.input.elsewhere], ENTRY_LOG_ROWS), outcomes)


def _with_rejects_past(rejected: BoolArray, messages: pa.Table) -> pa.Table:
    """Returns the messages with the rejected ones due at PAST: as if handed out, so that no command applies to them."""
    if not rejected.any():
        return messages
    return with_columns(messages, deliver_at=pa.array(np.where(rejected, PAST, int64(messages, "deliver_at"))))
