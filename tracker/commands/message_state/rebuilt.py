"""The state of a shard that was rebuilt from the tables, when a new checkpoint begins on a warehouse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from tracker.commands.message_state.cancelled import CancelledMessages
from tracker.commands.schema import COMMAND_ROWS
from tracker.messages import int64, where

# How long a message is at least remembered as done with, ms: longer than it takes to read the source topics again up
# to where they had been read.
REBUILT_KEPT_MILLIS = 24 * 3600 * 1000

# Commands that waited before a rebuild count as of this tick: earlier than any of the new checkpoint's.
REBUILT_TICK = 0

# Messages that a subscription is not to get (again); batch_index -1: the whole entry. `until`: ms since the epoch.
NOT_TO_DELIVER = pa.schema(
    [
        ("subscription", pa.int32()),  # its number in its route
        ("ledger_id", pa.int64()),
        ("entry_id", pa.int64()),
        ("batch_index", pa.int32()),
        ("until", pa.int64()),
    ]
)


# Messages that were moved, as `tracker.commands.message_state.moves` keeps them. `until`: ms since the epoch.
MOVED = pa.schema(
    [
        ("subscription", pa.int32()),  # its number in its route
        ("ledger_id", pa.int64()),
        ("entry_id", pa.int64()),
        ("batch_index", pa.int32()),
        ("sequence", pa.int64()),
        ("deliver_at", pa.int64()),
        ("until", pa.int64()),
        ("attempt", pa.int32()),  # of a retry its number; null or 0: it is none
    ]
)


# The last messages of schedule keys, as `tracker.keys.live_keys` keeps them; and with `comes_again` messages that had
# taken a key over and come in again, as `tracker.keys.taken_over` does: `deliver_at` is then until when.
LIVE_KEYS = pa.schema(
    [
        ("topic", pa.string()),
        ("schedule_key", pa.string()),
        ("ledger_id", pa.int64()),
        ("entry_id", pa.int64()),
        ("partition", pa.int32()),
        ("batch_index", pa.int32()),
        ("batch_size", pa.int32()),
        ("deliver_at", pa.int64()),
        ("since", pa.int64()),
        ("comes_again", pa.bool_()),  # null: it waits
    ]
)


# Occurrences of recurring messages that a subscription is not to get again: they were delivered, or skipped, and come
# after the one with which the rebuilt state begins, or are it. And those that were rescheduled, and come after it.
OCCURRENCES_DONE = pa.schema(
    [
        ("subscription", pa.int64()),  # its number in its route
        ("ledger_id", pa.int64()),
        ("entry_id", pa.int64()),
        ("batch_index", pa.int64()),
        ("occurrence", pa.int64()),
        ("at", pa.int64()),  # ms since the epoch: the following occurrence is later than this
        ("due", pa.int64()),  # ms since the epoch, of one that is not done, but was rescheduled; null: it is done
        ("sent_at", pa.int64()),  # ms since the epoch: what was due by then, and late, was missed; null: not known
    ]
)


@dataclass(frozen=True, kw_only=True)
class Rebuilt:
    """A shard's part of a rebuilt state. A mask's bit i is the topic's subscription of number i."""

    sealed: int = 0  # number of messages in immutable buckets, due at the load horizon or later
    unwanted: int = 0  # number of those that go to no subscription, because of commands
    cancelled: pa.Table = field(default_factory=NOT_TO_DELIVER.empty_table)  # cancelled or skipped messages
    delivered: pa.Table = field(default_factory=NOT_TO_DELIVER.empty_table)  # messages that were delivered or given up
    # Of commands that were answered, by request id the hash of the body, as COMMAND_ROWS; 0: not known.
    request_ids: Mapping[str, int] = field(default_factory=dict)
    moved: pa.Table = field(default_factory=MOVED.empty_table)  # messages with another time than they came with
    paused: Mapping[str, int] = field(default_factory=dict)  # by topic the mask of its paused subscriptions
    waiting: pa.Table = field(default_factory=COMMAND_ROWS.empty_table)  # commands for messages that come in again
    occurrences: pa.Table = field(default_factory=OCCURRENCES_DONE.empty_table)  # that have been done
    keys: pa.Table = field(default_factory=LIVE_KEYS.empty_table)  # schedule keys whose message waits
    # By source topic and subscription's name the last time that shaping has given a message, ms since the epoch.
    shaped_until: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    released: int = 0  # ms since the epoch: messages due then or before are done with, unless they come in again


def add_positions(messages: CancelledMessages, rows: pa.Table) -> None:
    """Adds rows, as NOT_TO_DELIVER, to a set of messages."""
    subscriptions = int64(rows, "subscription")
    for subscription in np.unique(subscriptions).tolist():
        own = where(rows, subscriptions == subscription)
        is_whole = int64(own, "batch_index") < 0
        whole, single = where(own, is_whole), where(own, ~is_whole)
        messages.add_entries(subscription, int64(whole, "ledger_id"), int64(whole, "entry_id"), int64(whole, "until"))
        # The sizes of their batches are not known here: with this one they never become a whole entry.
        messages.add_messages(
            subscription,
            int64(single, "ledger_id"),
            int64(single, "entry_id"),
            int64(single, "batch_index"),
            np.full(single.num_rows, np.iinfo(np.int32).max),
            int64(single, "until"),
        )
