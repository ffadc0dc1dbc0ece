"""The tables' columns, and by which of them they are filtered and age."""

from __future__ import annotations

import pyarrow as pa

from tracker.entry_log import ENTRIES
from tracker.messages import MESSAGES

DELAYED_INDEX = pa.schema(
    [
        MESSAGES.field("deliver_at"),
        MESSAGES.field("topic"),
        MESSAGES.field("partition"),
        MESSAGES.field("ledger_id"),
        MESSAGES.field("entry_id"),
        MESSAGES.field("batch_index"),
        MESSAGES.field("batch_size"),
        ("operation", pa.string()),  # DELAY, CANCEL, RESTORE or MOVE
        MESSAGES.field("subscription"),
        MESSAGES.field("sequence"),
        ("bucket_id", pa.int64()),
        MESSAGES.field("key"),
        MESSAGES.field("ordering_key"),
        MESSAGES.field("properties"),
        MESSAGES.field("event_time"),
        MESSAGES.field("publish_time"),
        MESSAGES.field("producer_name"),
        MESSAGES.field("payload"),
        MESSAGES.field("ordering_key_bytes"),
        MESSAGES.field("key_encoding"),
        MESSAGES.field("schema_version"),
        MESSAGES.field("schedule_key"),
        MESSAGES.field("key_since"),
        MESSAGES.field("was_due"),
        MESSAGES.field("attempt"),
        MESSAGES.field("retry_reasons"),
        MESSAGES.field("shaped_from"),
        MESSAGES.field("occurrence"),
        MESSAGES.field("occurrence_at"),
    ]
)

_POSITION = [
    ("partition", pa.int32()),
    ("ledger_id", pa.int64()),
    ("entry_id", pa.int64()),
    ("batch_index", pa.int32()),
    ("position", pa.string()),  # ledger:entry:partition:batchIndex
]

OUTCOMES = pa.schema(
    [
        ("request_id", pa.string()),
        ("topic", pa.string()),
        ("subscription", pa.string()),
        *_POSITION,
        ("result", pa.string()),
        ("reason", pa.string()),
        # CANCEL, SKIP, RESCHEDULE, RESTORE, RETRY, SKIP_NEXT, PAUSE_SCHEDULE, RESUME_SCHEDULE, PAUSE, RESUME; SENT_BACK
        # or REDRIVE of a message that was sent back.
        ("operation", pa.string()),
        # Of a RESCHEDULE, RETRY or RESUME_SCHEDULE the new time; of what was sent back when it is due; of a CANCEL that
        # waits the time that it names; of what is SUPERSEDED when the first message of its key was published.
        ("deliver_at", pa.int64()),
        ("sequence", pa.int64()),  # rises with each command that is applied, or waits
        ("issued_by", pa.string()),
        ("issued_at", pa.int64()),
        ("applied_at", pa.int64()),
        ("batch_id", pa.int64()),
        ("schedule_key", pa.string()),  # by which the command named the message, or by which it was superseded
        ("superseded_by", pa.string()),  # of a SUPERSEDED message the position of the one that it yields to
        ("attempt", pa.int32()),  # of a RETRY that is applied, or SENT_BACK, its number, from 1
        # Of a recurring message, the occurrence that was rescheduled, skipped, paused, resumed or given up.
        ("occurrence", pa.int64()),
        ("retry_of", pa.string()),  # of what was sent back, the position of the message that a consumer failed on
        ("command_hash", pa.int64()),  # of what the command said: another one under its request id has another one
    ]
)

DELIVERIES = pa.schema(
    [
        ("topic", pa.string()),
        ("subscription", pa.string()),
        *_POSITION,
        ("deliver_at", pa.int64()),
        ("sent_at", pa.int64()),
        ("short_notice", pa.bool_()),  # came in too late to be planned
        ("destination", pa.string()),
        ("destination_message_id", pa.string()),  # null where not known
        ("batch_id", pa.int64()),
        ("attempt", pa.int32()),  # of a retry its number, from 1; null: the first delivery
        MESSAGES.field("shaped_from"),
        MESSAGES.field("occurrence"),
        MESSAGES.field("occurrence_at"),
    ]
)

REJECTS = pa.schema(
    [
        ("topic", pa.string()),
        *_POSITION,
        ("reason", pa.string()),
        ("publish_time", pa.int64()),
        ("producer_name", pa.string()),
        ("key", pa.string()),
        ("properties", pa.map_(pa.string(), pa.string())),
        ("payload", pa.binary()),
        ("batch_id", pa.int64()),
    ]
)

REFUSALS = pa.schema(
    [
        ("refused_at", pa.int64()),
        ("role", pa.string()),  # null where not known
        ("address", pa.string()),
        ("method", pa.string()),
        ("path", pa.string()),
        ("topic", pa.string()),  # null: the call names none
        ("operation", pa.string()),
        ("code", pa.int32()),
        ("reason", pa.string()),
    ]
)

# Ranges of broker entry indexes; see warehouse/queries/expired.py.
EXPIRED = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("first_index", pa.int64()),
        ("end_index", pa.int64()),  # exclusive
    ]
)

# Since when a subscription is in the settings; see warehouse/routes/tenure.py.
SUBSCRIPTION_CHANGES = pa.schema(
    [
        ("topic", pa.string()),
        ("subscription", pa.string()),
        ("change", pa.string()),  # ADDED, REMOVED, or KEPT: another one of the topic changed
        ("changed_at", pa.int64()),
        ("handed_out", pa.int64()),  # what was due then or before, and had been taken in, had been handed out
        ("positions", pa.string()),  # by partition (-1: there are none) the last entry that had been taken in, as JSON
        ("batch_id", pa.int64()),
    ]
)

# Items of other systems that were imported; see recovery/other_systems/importing.py.
IMPORTED = pa.schema(
    [
        ("topic", pa.string()),
        ("item", pa.string()),  # the item's id, unique among all systems
        ("ledger_id", pa.int64()),  # with entry_id the position as which it was imported
        ("entry_id", pa.int64()),
        ("imported_at", pa.int64()),  # null: it may not be in the other tables yet, and is here with its content
        MESSAGES.field("deliver_at"),
        ("payload", pa.binary()),
        ("key", pa.string()),
        ("properties", pa.map_(pa.string(), pa.string())),
        ("reason", pa.string()),  # why it can't be taken
    ]
)

# The job's own, which are there once it has run.
SCHEMAS = {
    "delayed_index": DELAYED_INDEX,
    "outcomes": OUTCOMES,
    "deliveries": DELIVERIES,
    "entries": ENTRIES,
    "rejects": REJECTS,
}

# The tables in which an overtaken process can commit nothing. What the others tell is true whoever writes it.
FENCED = {**SCHEMAS, "subscription_changes": SUBSCRIPTION_CHANGES, "imported": IMPORTED}

# There once something needs them, as MESSAGE_SCHEMAS.
LATER = {"expired": EXPIRED, "subscription_changes": SUBSCRIPTION_CHANGES, "imported": IMPORTED, "refusals": REFUSALS}

# Statistics let a reader skip files and row groups; beyond these columns nobody filters by range.
STATISTICS = {
    "delayed_index": "deliver_at,topic,partition,ledger_id,entry_id,operation,subscription,sequence,occurrence",
    "outcomes": "request_id,applied_at,ledger_id,entry_id",
    "deliveries": "topic,ledger_id,entry_id,deliver_at,sent_at",
    "entries": "topic,partition,ledger_id,entry_id,first_index,publish_time",
    "rejects": "topic,ledger_id,entry_id,publish_time",
    "refusals": "refused_at,role,topic",
    "expired": "topic,partition,first_index,end_index",
    "schemas": "topic",
    "subscription_changes": "topic",
    "imported": "topic,ledger_id,entry_id",
}

# Columns of texts of which one is looked for: Bloom filters let a reader skip row groups that do not have it.
LOOKED_FOR = {"delayed_index": ["key", "schedule_key"]}

# Versions of source topics' schemas: there once a message has had one. Few rows, which do not age.
MESSAGE_SCHEMAS = "schemas"

# The column by which a table's rows age, and by which its files are kept sorted.
TIME = {
    "delayed_index": "deliver_at",
    "outcomes": "applied_at",
    "deliveries": "sent_at",
    "entries": "publish_time",
    "rejects": "publish_time",
}

# The version of the tables' format: it rises when they are to be read or written in another way, and not for a further
# column. Each table has it as the number of a transaction with the app id VERSION_OF; without one it is 1.
VERSION = 2
VERSION_OF = "delaylake-version"

# Transactions of the table `entries`: how often the warehouse has got another broker, and when it did last, in ms since
# the epoch. See warehouse/renumbering.py.
PLACES = "delaylake-places"
MOVED_AT = "delaylake-moved-at"
