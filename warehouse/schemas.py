"""The tables' columns, and those among them by which rows are filtered and age."""

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
        ("payload_bytes", pa.int64()),  # of the payload; null: an earlier version wrote the row, or it has none
        MESSAGES.field("expires_at"),
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
        # The name of an operation in tracker/commands/kinds.py, in capitals; for a message that was sent back SENT_BACK
        # or REDRIVE.
        ("operation", pa.string()),
        # The new time of what moves a message, of a RETRY or RESUME_SCHEDULE; what a command that waits says of a time;
        # when a message that was sent back is due; for a SUPERSEDED message when the first message of its key was
        # published.
        ("deliver_at", pa.int64()),
        ("sequence", pa.int64()),  # rises with each command that is applied, or waits
        ("issued_by", pa.string()),
        ("issued_at", pa.int64()),
        ("applied_at", pa.int64()),
        ("batch_id", pa.int64()),
        ("schedule_key", pa.string()),  # the key by which the command named the message, or that superseded it
        ("superseded_by", pa.string()),  # for a SUPERSEDED message the position of the one that counts instead
        ("attempt", pa.int32()),  # for an applied RETRY, or SENT_BACK, the retry's number, from 1
        # For a recurring message the occurrence that was rescheduled, skipped, paused, resumed or given up.
        ("occurrence", pa.int64()),
        ("retry_of", pa.string()),  # for a message that was sent back the position of the one that a consumer failed on
        ("command_hash", pa.int64()),  # hash of the command's body, to find another command under its request id
        # What the row did to what is pending: CANCEL, RESTORE, MOVE, HOLD or RESUME, of its `occurrence` where that is
        # set; null: nothing, or an earlier version wrote the row.
        ("effect", pa.string()),
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
        ("attempt", pa.int32()),  # number of the retry, from 1; null: the first delivery
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
        ("payload_bytes", pa.int64()),  # of the payload; null: an earlier version wrote the row, or it has none
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
        ("calls", pa.int64()),  # the number of such calls, the first at refused_at; null: 1
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

# Since when a subscription is in the settings; see warehouse/routes/membership.py.
SUBSCRIPTION_CHANGES = pa.schema(
    [
        ("topic", pa.string()),
        ("subscription", pa.string()),
        ("change", pa.string()),  # ADDED, REMOVED, or KEPT: only another subscription of the topic changed
        ("changed_at", pa.int64()),
        ("handed_out", pa.int64()),  # the time by which everything due that had come in had been dispatched
        ("positions", pa.string()),  # JSON: the last entry that had been ingested, by partition (-1: not partitioned)
        ("batch_id", pa.int64()),
    ]
)

# Items of other systems that were imported; see checkpoint_from_tables/other_systems/importing.py.
IMPORTED = pa.schema(
    [
        ("topic", pa.string()),
        ("item", pa.string()),  # the item's id, unique among all systems
        ("ledger_id", pa.int64()),  # with entry_id the position of the imported message
        ("entry_id", pa.int64()),
        ("imported_at", pa.int64()),  # null: it may not be in the other tables yet; its content is here
        MESSAGES.field("deliver_at"),
        ("payload", pa.binary()),
        ("key", pa.string()),
        ("properties", pa.map_(pa.string(), pa.string())),
        ("reason", pa.string()),  # why the item can't be taken
    ]
)

# The tables that are there once the job has run.
SCHEMAS = {
    "delayed_index": DELAYED_INDEX,
    "outcomes": OUTCOMES,
    "deliveries": DELIVERIES,
    "entries": ENTRIES,
    "rejects": REJECTS,
}

# The tables in which a fenced process can't commit. The rows of others are right whoever writes them.
FENCED = {**SCHEMAS, "subscription_changes": SUBSCRIPTION_CHANGES, "imported": IMPORTED}

# The tables that are there once something needs them; MESSAGE_SCHEMAS is another.
LATER = {"expired": EXPIRED, "subscription_changes": SUBSCRIPTION_CHANGES, "imported": IMPORTED, "refusals": REFUSALS}

# The columns with statistics, by which a reader skips files and row groups: those that are filtered by range.
STATISTICS = {
    "delayed_index": "deliver_at,topic,partition,ledger_id,entry_id,operation,subscription,sequence,occurrence",
    "outcomes": "request_id,applied_at,ledger_id,entry_id",
    "deliveries": "topic,ledger_id,entry_id,deliver_at,sent_at",
    "entries": "topic,partition,ledger_id,entry_id,first_index,publish_time",
    "rejects": "topic,ledger_id,entry_id,publish_time,batch_id",
    "refusals": "refused_at,role,topic",
    "expired": "topic,partition,first_index,end_index",
    "schemas": "topic",
    "subscription_changes": "topic",
    "imported": "topic,ledger_id,entry_id",
}

# Columns that are searched for one text: Bloom filters let a reader skip row groups that do not have it.
LOOKED_FOR = {"delayed_index": ["key", "schedule_key"]}

# The table of source topics' schemas, which is there once a message has had a schema. Its few rows never expire.
MESSAGE_SCHEMAS = "schemas"

# The column by which a table's rows age, and by which its files are sorted.
TIME = {
    "delayed_index": "deliver_at",
    "outcomes": "applied_at",
    "deliveries": "sent_at",
    "entries": "publish_time",
    "rejects": "publish_time",
}

# The version of the tables' format. It rises when they have to be read or written in another way, but not for a new
# column. Each table has it as the number of a transaction with the app id VERSION_OF; without one it is 1.
VERSION = 2
VERSION_OF = "delaylake-version"

# The beginning of the app ids of imports' transactions.
IMPORT = "import-"

# App ids of transactions of the table `entries`: how often the warehouse has got another broker, and when it last did,
# ms since the epoch. See warehouse/renumber_message_ids.py.
PLACES = "delaylake-places"
MOVED_AT = "delaylake-moved-at"
