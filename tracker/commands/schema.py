"""The tables of control commands and their outcomes, and the limits of what a command may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

# Kinds of commands, as the fields of ControlCommand.
CANCEL = "cancel"
SKIP = "skip"
RESCHEDULE = "reschedule"
RESTORE = "restore"
RETRY = "retry"
SKIP_NEXT = "skip_next"
PAUSE_SCHEDULE = "pause_schedule"
RESUME_SCHEDULE = "resume_schedule"
PAUSE = "pause"
RESUME = "resume"
ANSWER = "answer"  # has nothing to apply, and is only answered, with the row's result
REPEAT = "repeat"  # its request id came before in the same batch: it is only answered

# Kinds that are for the next occurrence of recurring messages, and those that need the rows of the messages they name.
OF_SCHEDULES = (SKIP_NEXT, PAUSE_SCHEDULE, RESUME_SCHEDULE)
OF_ROWS = (RESCHEDULE, RESTORE, RETRY, *OF_SCHEDULES)

MAX_BATCH_INDEX = 2**20 - 1

# A command beyond these could not be answered, or would fill the tables. No client sends one.
MAX_REQUEST_ID_BYTES = 256
MAX_NAME_BYTES = 1_024
MAX_NAMES = 1_000
MAX_MESSAGES = 100_000  # messages that one command may name

# A row is one message, or one whole entry, that a command names.
COMMAND_ROWS = pa.schema(
    [
        ("request_id", pa.string()),
        ("kind", pa.string()),
        ("topic", pa.string()),  # of the route
        ("partition", pa.int32()),  # -1: any
        ("subscriptions", pa.int64()),  # bit i: the topic's subscription of number i
        ("ledger_id", pa.int64()),
        ("entry_id", pa.int64()),
        ("batch_index", pa.int32()),  # -1: the whole entry
        # Of a cancel, the time that it names; of a skip, the message's time, 0 where the client does not know it; of a
        # reschedule, the new time; of a retry that a rebuild found, its time; else 0.
        ("deliver_at", pa.int64()),
        ("issued_by", pa.string()),
        ("issued_at", pa.int64()),
        ("sum_up", pa.bool_()),  # whether its outcomes may be published as counts; null: no
        ("body", pa.int64()),  # a hash of the command's content; 0 or null: the row is never a repeat
        ("operation", pa.string()),  # the kind in capitals, of an answer that of its command
        ("subscription", pa.string()),  # of an answer; null: of the topic as a whole
        ("result", pa.int32()),  # of an answer
        ("reason", pa.string()),  # of an answer, and of a retry
        ("also_later", pa.bool_()),  # also for subscriptions that are added later; null: no
        # The message that waits under this schedule key is meant: then the position is -1, until the key's shard has
        # put that message's in its place. null: the position says it.
        ("schedule_key", pa.string()),
        ("after_millis", pa.int64()),  # of a retry how long it waits; 0 or null: by the subscription's backoff
        ("attempt", pa.int32()),  # of a retry that a rebuild found its number; null: the next one
    ]
)

# A row is the outcome of a command for one message, or entry, and subscription; result is a number of the enum Result.
OUTCOME_ROWS = pa.schema(
    [
        ("request_id", pa.string()),
        ("topic", pa.string()),
        ("subscription", pa.string()),
        ("partition", pa.int32()),
        ("ledger_id", pa.int64()),
        ("entry_id", pa.int64()),
        ("batch_index", pa.int32()),
        ("result", pa.int32()),
        ("reason", pa.string()),
        ("operation", pa.string()),
        # Of a reschedule or retry that is applied or waits, or of a schedule that is resumed, the new time; of a cancel
        # that waits, the time that it names; of what is superseded, when the first message of its key was published.
        ("deliver_at", pa.int64()),
        # Rises from command to command. Null where it was neither applied nor waits, unless its kind is ANSWER.
        ("sequence", pa.int64()),
        ("issued_by", pa.string()),
        ("issued_at", pa.int64()),
        ("sum_up", pa.bool_()),  # whether it may be published as a count, with others; null: no
        ("is_repeat", pa.bool_()),  # whether it is only published again, and in the table already; null: no
        ("schedule_key", pa.string()),  # by which the command named the message, or by which it was superseded
        ("superseded_by", pa.string()),  # the position of the message that it yields to; null: not superseded
        ("attempt", pa.int32()),  # of a retry that is applied its number, from 1
        # Of a recurring message, the occurrence that was rescheduled, skipped, paused, resumed or given up; null: the
        # whole message.
        ("occurrence", pa.int64()),
        ("retry_of", pa.string()),  # of a message that was sent back, the id of the one that a consumer failed on
        ("body", pa.int64()),  # of its command, as COMMAND_ROWS; null: no command asked for it
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
    """The properties of a subscription that decide which commands it can have."""

    name: str
    is_cumulative: bool  # its consumers acknowledge cumulatively, so that no single message can be skipped
    is_removed: bool = False  # not in the settings any more; it keeps its number


# By source topic its subscriptions, by number.
Routes = Mapping[str, Sequence[SubscriptionRule]]


def command_positions(commands: pa.Table) -> pa.Table:
    """Returns the distinct entries that COMMAND_ROWS name and are applied to; answers and repeats are applied to none.

    Returns:
        a table of ledger_id and entry_id, int64.
    """
    is_applied = pc.invert(pc.is_in(commands["kind"], pa.array([ANSWER, REPEAT])))
    applied = commands.filter(pc.and_(is_applied, pc.greater_equal(commands["ledger_id"], 0)))
    return applied.select(["ledger_id", "entry_id"]).group_by(["ledger_id", "entry_id"]).aggregate([])


# A row is a known message: one of an entry that a command names.
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

# Stands for the time of delivery of a known message that was handed out long ago, or rejected.
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
        ("attempt", pa.int32()),  # of a MOVE that of the message's new row
        ("occurrence", pa.int64()),  # of a MOVE of a recurring message, the one that is pending now; null: none
    ]
)

# A sequence, by which commands and moves of one message are in order, rises within a tick and from tick to tick:
#
#     bit    63   62 ............ 20   19 ............. 0
#          |  0 |        tick        |  number in the tick  |
#
# The number counts from 0, in each shard on its own.
SEQUENCE_BITS = 20
