"""The position of a message on its source topic, and its text in `delaylake.messageId` and the tables' `position`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class MessagePosition(NamedTuple):
    """The position of a message. As text it is `ledger:entry:partition:batchIndex`."""

    ledger_id: int
    entry_id: int
    partition: int  # -1: the topic is not partitioned
    batch_index: int  # -1: the entry is one message

    def __str__(self) -> str:
        return ":".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> MessagePosition:
        """Reads a position as `str` writes it.

        Raises:
            ValueError: it is not four numbers.
        """
        ledger_id, entry_id, partition, batch_index = map(int, text.split(":"))
        return cls(ledger_id, entry_id, partition, batch_index)


# The SQL expression of a row's position as text.
POSITION_SQL = f"concat_ws(':', {', '.join(MessagePosition._fields)})"

_TEXT = re.compile(r"[0-9]{1,18}:[0-9]{1,18}:(-1|[0-9]{1,9}):(-1|[0-9]{1,9})")


def is_position(text: str) -> bool:
    """Tells whether a text is a position as `str` writes it, with numbers that fit the tables' columns."""
    return _TEXT.fullmatch(text) is not None


def position_of(columns: Mapping[str, Sequence[Any]], row: int) -> MessagePosition:
    """Returns the position of a row.

    Args:
        columns: the columns of MESSAGES, by name.
        row: index of the row.
    """
    return MessagePosition(*(columns[name][row] for name in MessagePosition._fields))
