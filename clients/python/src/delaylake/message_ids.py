"""The ids of messages, and the outcomes of commands about them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from datetime import datetime

from delaylake.arguments import check_position

_ID = re.compile(r"(\d{1,19}):(\d{1,19})(?::(-?\d{1,10}))?(?::(-?\d{1,10}))?", re.ASCII)


@dataclass(frozen=True)
class MessageId:
    """The id of a message of a source topic. Its text is `ledger:entry:partition:batchIndex`.

    `delaylake produce` prints that text, and the delivered message has it as the property `delaylake.messageId`.

    Attributes:
        partition: -1: the topic has no partitions.
        batch_index: -1: the entry is one message, or all of its messages are meant.
        deliver_at: when the message is due, if known; ignored in comparisons.
    """

    ledger_id: int
    entry_id: int
    partition: int = -1
    batch_index: int = -1
    deliver_at: datetime | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.ledger_id}:{self.entry_id}:{self.partition}:{self.batch_index}"

    @classmethod
    def parse(cls, text: str, deliver_at: datetime | None = None) -> MessageId:
        """Reads `ledger:entry`, `ledger:entry:batchIndex` or `ledger:entry:partition:batchIndex`.

        Raises:
            ValueError: the text is none of these.
        """
        found = _ID.fullmatch(text)
        if not found:
            raise ValueError(f"no message id: {text[:80]!r} (ledger:entry[:batchIndex])")
        ledger, entry, third, fourth = found.groups()
        partition, batch_index = ("-1", third or "-1") if fourth is None else (third, fourth)
        return cls(int(ledger), int(entry), max(int(partition), -1), max(int(batch_index), -1), deliver_at)

    @classmethod
    def of(cls, message: MessageId | str, deliver_at: datetime | None = None) -> MessageId:
        """Returns a message id, or a text parsed as one; with `deliver_at` if that is given.

        Raises:
            TypeError: the message is neither an id nor a text.
            ValueError: the text is not an id, or a part of the id is out of range.
        """
        parsed = cls.parse(message) if isinstance(message, str) else message
        if not isinstance(parsed, MessageId):
            raise TypeError(f"message is neither a MessageId nor its text: {message!r}")
        check_position("message", parsed.ledger_id, parsed.entry_id, parsed.partition, parsed.batch_index)
        return parsed if deliver_at is None else replace(parsed, deliver_at=deliver_at)


@dataclass(frozen=True)
class Outcome:
    """What a command did to a message of one subscription.

    Attributes:
        subscription: its name; "*": subscriptions that are added to the topic later.
        message: with -1 throughout: all that the command names, or if outcomes are summed up, several of them.
        result: `APPLIED`, `ALREADY_APPLIED`, `WAITING` (for a cancel that came before its message), or an error.
        reason: of an error, one line.
        is_done: whether the command is done, now or before.
        n_messages: the number of messages, counted for each subscription.
    """

    subscription: str
    message: MessageId
    result: str
    reason: str = ""
    is_done: bool = field(default=True, compare=False, repr=False)
    n_messages: int = field(default=1, compare=False, repr=False)

    def __str__(self) -> str:
        return " ".join(filter(None, (str(self.message), self.subscription, self.result, self.reason)))


@dataclass(frozen=True)
class Redriven:
    """The numbers of dead letters in a re-drive.

    Attributes:
        matched: all that matched; the following are parts of them, but the last.
        redriven: will be delivered once more.
        already_redriven: sent back by an earlier call with the same request id, which was broken off.
        refused: the topic does not take their size or schema, or has no such partition.
        unreadable: entries of the topic of dead letters that can't be read, and stay there.
    """

    matched: int
    redriven: int = 0
    already_redriven: int = 0
    refused: int = 0
    unreadable: int = 0
