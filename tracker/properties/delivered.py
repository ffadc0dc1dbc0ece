"""The names of the properties that the job gives to a delivered message; the message's own stay beside them."""

from __future__ import annotations

RESERVED_PREFIX = "delaylake."

SOURCE = "delaylake.source"
MESSAGE_ID = "delaylake.messageId"  # ledger:entry:partition:batchIndex
DELIVER_AT = "delaylake.deliverAt"
SHAPED_FROM = "delaylake.shapedFrom"  # when it was due before its subscription's rate or windows put it off
OCCURRENCE = "delaylake.occurrence"  # of a recurring message
KEY_ENCODING = "delaylake.keyEncoding"  # of a key whose bytes are not text

# Of a retry: its number, and why it and those before it were asked for.
ATTEMPT = "delaylake.attempt"
REASONS = "delaylake.reasons"

DEAD_LETTER_OF = "delaylake.subscription"  # of a dead letter the subscription whose consumers failed
REASON = "delaylake.reason"  # of a rejected message why it is none
