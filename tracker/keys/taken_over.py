"""Since when a message has its schedule key that had taken the key over before a rebuild, and comes in again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from tracker.keys.live_keys import KeyHash, LiveKeys, lives
from tracker.messages import BoolArray, int64
from tracker.properties.message_position import MessagePosition
from tracker.properties.schedule_key import key_hash
from tracker.store import Store


class TakenOver:
    """Messages to which another one of their key has yielded, with the time since which the key goes on.

    When such a message comes in again it does not find the other one: without this, its key would begin anew with it.

    Args:
        store: where they are kept.
    """

    def __init__(self, store: Store) -> None:
        self._rows = LiveKeys(store, "schedule_keys_taken_over")

    def add(self, rows: pa.Table) -> None:
        """Adds messages that come in again: of LIVE_KEYS those with `comes_again`."""
        named = zip(rows["topic"].to_pylist(), lives(rows), strict=True)
        self._rows.update({_hash_of(topic, live.position): live for topic, live in named})

    def take(self, topics: Iterable[str], positions: Sequence[MessagePosition]) -> dict[MessagePosition, int]:
        """Returns since when the keys go on of those of some messages that are here, ms since the epoch; forgets them.

        Args:
            topics: of each message.
            positions: of the messages.
        """
        if not len(self._rows):
            return {}
        hashes = [_hash_of(topic, position) for topic, position in zip(topics, positions, strict=True)]
        found = self._rows.find(hashes)
        self._rows.update(dict.fromkeys(found))
        return {position: found[one].since for one, position in zip(hashes, positions, strict=True) if one in found}

    def sweep(self, now: int) -> None:
        """Forgets what has been kept long enough, in a part of all.

        Args:
            now: ms since the epoch.
        """

        def judge(rows: pa.Table) -> tuple[BoolArray, BoolArray]:
            return int64(rows, "deliver_at") <= now, np.zeros(rows.num_rows, np.bool_)

        self._rows.sweep(judge, now, now, 0)

    def save(self) -> None:
        """Writes what is not in the store yet."""
        self._rows.save()


def _hash_of(topic: str, position: MessagePosition) -> KeyHash:
    return key_hash(topic, str(position))
