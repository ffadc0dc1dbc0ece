"""Messages that superseded another one of their schedule key before a rebuild, and come in again after it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from tracker.keys.live_keys import KeyHash, LiveKeys, last_messages
from tracker.messages import BoolArray, int64
from tracker.properties.message_position import MessagePosition
from tracker.properties.schedule_key import key_hash
from tracker.store import Store


class TakenOver:
    """Remembers, for messages that superseded another one of their key before a rebuild, when the key began.

    Such a message comes in again after the rebuild, but the superseded one does not wait any more. Without this the key
    would begin anew with the message, and `debounceMax` would count from it.

    Args:
        store: where they are kept.
    """

    def __init__(self, store: Store) -> None:
        self._rows = LiveKeys(store, "schedule_keys_taken_over")

    def add(self, rows: pa.Table) -> None:
        """Adds the rows of LIVE_KEYS that have `comes_again`."""
        named = zip(rows["topic"].to_pylist(), last_messages(rows), strict=True)
        self._rows.update({_hash_of(topic, message.position): message for topic, message in named})

    def take(self, topics: Iterable[str], positions: Sequence[MessagePosition]) -> dict[MessagePosition, int]:
        """Looks messages up, forgets the ones found, and returns when their keys began.

        Args:
            topics: the topic of each message.
            positions: the position of each message.

        Returns:
            by position: publish time of the first message since the key began anew, ms since the epoch.
        """
        if not len(self._rows):
            return {}
        hashes = [_hash_of(topic, position) for topic, position in zip(topics, positions, strict=True)]
        found = self._rows.find(hashes)
        self._rows.update(dict.fromkeys(found))
        return {position: found[one].since for one, position in zip(hashes, positions, strict=True) if one in found}

    def sweep(self, now: int) -> None:
        """Forgets messages that have been remembered long enough, in a part of the map.

        Args:
            now: ms since the epoch.
        """

        def judge(rows: pa.Table) -> tuple[BoolArray, BoolArray]:
            return int64(rows, "deliver_at") <= now, np.zeros(rows.num_rows, np.bool_)

        self._rows.sweep(judge, now, now, 0)

    def save(self) -> None:
        """Writes the changes to the store."""
        self._rows.save()


def _hash_of(topic: str, position: MessagePosition) -> KeyHash:
    return key_hash(topic, str(position))
