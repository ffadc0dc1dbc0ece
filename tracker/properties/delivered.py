"""The names of the properties that the job adds to a delivered message."""

from __future__ import annotations

RESERVED_PREFIX = "delaylake."

SOURCE = "delaylake.source"
MESSAGE_ID = "delaylake.messageId"  # ledger:entry:partition:batchIndex
DELIVER_AT = "delaylake.deliverAt"
SHAPED_FROM = "delaylake.shapedFrom"  # when it was due before its subscription's rate or windows moved it
OCCURRENCE = "delaylake.occurrence"  # of a recurring message
KEY_ENCODING = "delaylake.keyEncoding"  # of a key whose bytes are not text
BASE64 = "base64"  # the value of KEY_ENCODING

# Of a retry: its number; the reasons for it and for earlier ones.
ATTEMPT = "delaylake.attempt"
REASONS = "delaylake.reasons"

DEAD_LETTER_OF = "delaylake.subscription"  # of a dead letter: the subscription whose consumers failed
REASON = "delaylake.reason"  # of a rejected message: why it is rejected
