"""The schemas of control commands and their outcomes, the limits of a command, and reserved request ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from tracker.properties import RETRY_OF

MAX_BATCH_INDEX = 2**20 - 1

# Commands beyond these limits could not be answered, or would fill the tables. The project's clients send none.
MAX_REQUEST_ID_BYTES = 256

MAX_NAME_BYTES = 1_024

MAX_NAMES = 1_000

MAX_MESSAGES = 100_000  # messages that one command may name

# Answers, one for each message and subscription, that the commands of one batch may have. They are published one by
# one, and a tick has 2^SEQUENCE_BITS sequences and 2^22 sequence ids of the outcome topic.
MAX_ANSWERS = 500_000

# A row is a message, or a whole entry, that a command names.
COMMAND_ROWS = pa.schema(
    [
        ("request_id", pa.string()),
        ("kind", pa.string()),
        ("topic", pa.string()),  # the source topic, as the route names it
        ("partition", pa.int32()),  # -1: any
        ("subscriptions", pa.int64()),  # bit i: the topic's subscription of number i
        ("ledger_id", pa.int64()),
        ("entry_id", pa.int64()),
        ("batch_index", pa.int32()),  # -1: the whole entry
        # Of an operation with a field for it, that field's value. Else ms since the epoch. Cancel: the time that it
        # names. Skip: the message's time, 0: the client does not know it. Retry that a rebuild found: its time. Else 0.
        ("deliver_at", pa.int64()),
        ("issued_by", pa.string()),
        ("issued_at", pa.int64()),
        ("sum_up", pa.bool_()),  # whether its outcomes may be published as counts; null: no
        ("body", pa.int64()),  # hash of the command's content; 0 or null: the row is never a repeat
        ("operation", pa.string()),  # the kind in capitals; of an answer, that of its command
        ("subscription", pa.string()),  # answers only; null: the topic as a whole
        ("result", pa.int32()),  # answers only: a number of the enum Result
        ("reason", pa.string()),  # answers and retries only
        ("also_later", pa.bool_()),  # also for subscriptions that are added later; null: no
        # Names the message that waits under this key. The position is -1 until the key's shard has looked it up. null:
        # the position names the message.
        ("schedule_key", pa.string()),
        ("after_millis", pa.int64()),  # wait of a retry, ms; 0 or null: the subscription's backoff decides
        ("attempt", pa.int32()),  # number of a retry that a rebuild found; null: the next number
    ]
)

# A row is the outcome of a command for one message, or entry, and subscription.
OUTCOME_ROWS = pa.schema(
    [
        ("request_id", pa.string()),
        ("topic", pa.string()),
        ("subscription", pa.string()),
        ("partition", pa.int32()),
        ("ledger_id", pa.int64()),
        ("entry_id", pa.int64()),
        ("batch_index", pa.int32()),
        ("result", pa.int32()),  # a number of the enum Result
        ("reason", pa.string()),
        ("operation", pa.string()),
        # ms since the epoch. Applied move, retry that is applied or waits, and resumed schedule: the new time. Another
        # command that waits: as in COMMAND_ROWS. Superseded message: publish time of the first message of its key.
        # Message with a request id: when the first one is due.
        ("deliver_at", pa.int64()),
        # Rises from command to command. null: the command was not applied and does not wait, and is no ANSWER.
        ("sequence", pa.int64()),
        ("issued_by", pa.string()),
        ("issued_at", pa.int64()),
        ("sum_up", pa.bool_()),  # whether it may be published as a count, with others; null: no
        ("is_repeat", pa.bool_()),  # whether it is only published again, and is in the table already; null: no
        ("schedule_key", pa.string()),  # the key by which the command named the message, or of a superseded message
        # The position of the message that it yields to, or of which it is a repetition; null: neither.
        ("superseded_by", pa.string()),
        ("attempt", pa.int32()),  # number of a retry that is applied, from 1
        # The occurrence that was rescheduled, skipped, paused, resumed or given up; null: the whole message.
        ("occurrence", pa.int64()),
        ("retry_of", pa.string()),  # of a message that was sent back: the id of the one on which a consumer failed
        ("body", pa.int64()),  # its command's, as in COMMAND_ROWS; null: no command caused it
    ]
)


@dataclass(frozen=True)
class PauseChange:
    """A command that pauses or resumes subscriptions of a topic."""

    request_id: str
    topic: str
    subscriptions: int  # bit i: the topic's subscription of number i
    is_paused: bool


@dataclass(frozen=True)
class SubscriptionRule:
    """The attributes of a subscription that decide which commands it accepts."""

    name: str
    is_cumulative: bool  # its consumers acknowledge cumulatively, so that no single message can be skipped
    is_removed: bool = False  # not in the settings any more; it keeps its number


# By source topic: its subscriptions, by number.
Routes = Mapping[str, Sequence[SubscriptionRule]]

# A row is a known message: one that has come in, of an entry that a command names.
KNOWN = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("ledger_id", pa.int64()),
        ("entry_id", pa.int64()),
        ("batch_index", pa.int32()),
        ("batch_size", pa.int32()),
        ("deliver_at", pa.int64()),
        ("schedule_key", pa.string()),
    ]
)

# The deliver_at of a known message that was dispatched long ago, or rejected.
PAST = 0

# Rows of type CANCEL, RESTORE and MOVE for the delayed index.
CANCEL_ROWS = pa.schema(
    [
        ("operation", pa.string()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("ledger_id", pa.int64()),
        ("entry_id", pa.int64()),
        ("batch_index", pa.int32()),
        ("subscription", pa.string()),
        ("sequence", pa.int64()),
        ("deliver_at", pa.int64()),
        ("attempt", pa.int32()),  # MOVE: that of the message's new row
        ("occurrence", pa.int64()),  # MOVE of a recurring message: the occurrence that is pending now; null: none
    ]
)

# A sequence orders the commands and moves of a message. It rises within a tick and from tick to tick:
#
#     bit    63   62 ............ 20   19 ............. 0
#          |  0 |        tick        |  number in the tick  |
#
# The number counts from 0; each shard counts on its own.
SEQUENCE_BITS = 20

SUPERSEDED_ID = "superseded"  # of all superseded messages

EXPIRED_ID = "expired"  # of all expired messages

REDRIVE_ID = "redrive-"  # begins the request id of REDRIVE outcomes

NOT_DELIVERED_ID = "not-delivered-"  # begins that of messages which their destination does not take

REBUILD_ID = "rebuild-"  # begins that of what a rebuild has made of other rows

SCHEDULED_ID = "scheduled-message-"  # begins that of the answers to messages with a request id

_PREFIXES = (REDRIVE_ID, NOT_DELIVERED_ID, REBUILD_ID, SCHEDULED_ID)


def is_reserved(request_id: str) -> bool:
    """Whether only the job's own outcomes may have a request id."""
    return request_id in (SUPERSEDED_ID, EXPIRED_ID, RETRY_OF) or request_id.startswith(_PREFIXES)
