"""A shard's state as a rebuild makes it from the tables, when a new checkpoint begins on a warehouse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from tracker.messages import MESSAGES
from tracker.schemas import COMMAND_ROWS

# How long messages that are done with are remembered at least, ms: longer than it takes to read the source topics again
# up to where they had been read.
REBUILT_KEPT_MILLIS = 24 * 3600 * 1000

# The tick since which commands wait that waited before a rebuild: earlier than any tick of the new checkpoint.
REBUILT_TICK = 0

# Messages that are not delivered (again) to a subscription; batch_index -1: the whole entry. They are remembered until
# `until`, ms since the epoch.
NOT_TO_DELIVER = pa.schema(
    [
        ("subscription", pa.int32()),  # its number in its route
        ("ledger_id", pa.int64()),
        ("entry_id", pa.int64()),
        ("batch_index", pa.int32()),
        ("until", pa.int64()),
    ]
)

# The last moves of messages, as `tracker.message_state.changes.Moved.put` takes them.
MOVED = pa.schema(
    [
        ("subscription", pa.int32()),  # its number in its route
        ("ledger_id", pa.int64()),
        ("entry_id", pa.int64()),
        ("batch_index", pa.int32()),
        ("sequence", pa.int64()),
        ("deliver_at", pa.int64()),
        ("until", pa.int64()),
        ("attempt", pa.int32()),  # retry number; null or 0: no retry
    ]
)

# Rows of messages that are parked for a subscription, and when they expire there. Payload and properties are null,
# except of recurring messages, whose next occurrence needs them.
PARKED_ENDS = MESSAGES.append(pa.field("ends_at", pa.int64()))  # ms since the epoch

# The last messages of schedule keys, for `tracker.keys.live_keys`. Rows with `comes_again` are for
# `tracker.keys.superseding`: messages that superseded another one and come in again, remembered until `deliver_at`.
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
        ("comes_again", pa.bool_()),  # null: the message waits
    ]
)

# Occurrences that follow, or are, the one with which the rebuilt state of a recurring message begins: those that are
# done (delivered or skipped, so that they are not delivered again), and those that were rescheduled.
OCCURRENCES_DONE = pa.schema(
    [
        ("subscription", pa.int64()),  # its number in its route
        ("ledger_id", pa.int64()),
        ("entry_id", pa.int64()),
        ("batch_index", pa.int64()),
        ("occurrence", pa.int64()),
        ("at", pa.int64()),  # ms since the epoch: the following occurrence is later than this
        ("due", pa.int64()),  # ms since the epoch: the time to which it was rescheduled; null: it is done
        ("sent_at", pa.int64()),  # ms since the epoch: occurrences due by then were missed; null: not known
    ]
)


@dataclass(frozen=True, kw_only=True)
class Rebuilt:
    """A shard's part of a rebuilt state. Bit i of a mask is the topic's subscription of number i."""

    sealed: int = 0  # number of messages in immutable buckets, due at the load horizon or later
    unwanted: int = 0  # how many of these go to no subscription, because of commands
    cancelled: pa.Table = field(default_factory=NOT_TO_DELIVER.empty_table)  # cancelled or skipped messages
    delivered: pa.Table = field(default_factory=NOT_TO_DELIVER.empty_table)  # messages that were delivered or given up
    rejected: pa.Table = field(default_factory=NOT_TO_DELIVER.empty_table)  # messages that are not rejected again
    # By request id of answered commands: the hash of the command's body; 0: not known.
    request_ids: Mapping[str, int] = field(default_factory=dict)
    # By source topic and request id, in the order in which they came: the hash of the message's content.
    message_requests: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    moved: pa.Table = field(default_factory=MOVED.empty_table)  # the last moves of messages
    paused: Mapping[str, int] = field(default_factory=dict)  # by topic: a mask of its paused subscriptions
    waiting: pa.Table = field(default_factory=COMMAND_ROWS.empty_table)  # commands that wait for their messages
    occurrences: pa.Table = field(default_factory=OCCURRENCES_DONE.empty_table)  # occurrences done or rescheduled
    ends: pa.Table = field(default_factory=PARKED_ENDS.empty_table)  # when messages expire that are parked
    keys: pa.Table = field(default_factory=LIVE_KEYS.empty_table)  # the last messages of schedule keys
    # By source topic and subscription name: the last time that shaping has given a message, ms since the epoch.
    shaped_until: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    released: int = 0  # ms since the epoch: messages due then or before are done with, unless they come in again
