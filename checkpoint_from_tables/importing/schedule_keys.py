"""Decides which of the imported messages with the same schedule key waits; one that waits already stays."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.settings import Settings
from tracker.messages import are_recurring, int64, with_columns
from tracker.properties import SCHEDULE_KEY, MessagePosition, Mode, key_rule, position_of
from warehouse.delta.tables import exists
from warehouse.named_queries import NamedQueries, columns
from warehouse.schemas import SCHEMAS
from warehouse.views import Warehouse

_SQL = NamedQueries(__file__, position=columns(MessagePosition._fields))

# Reasons of rejected messages. They name no message, because a preview counts messages by reason.
_WAITS = f"{SCHEDULE_KEY}: a message of its key waits already"
_REPLACED = f"{SCHEDULE_KEY}: a later message of its key is imported, too"

_ALWAYS = np.iinfo(np.int64).max


@dataclass
class _Waiting:
    """The message of a key that waits."""

    position: MessagePosition
    until: int = _ALWAYS  # a message that was published after this time, ms since the epoch, begins the key again
    since: int = 0  # when the first message of the key was published, ms since the epoch
    row: int | None = None  # its place among the messages that are decided on now; None: it is in the tables


class ImportedKeys:
    """Knows which message of each schedule key waits, in the tables or among the messages imported so far.

    Of several messages of one part the mode says which one waits. One that waits in the tables stays: the job alone can
    supersede it.

    Args:
        topic: the source topic.
    """

    def __init__(self, settings: Settings, topic: str) -> None:
        self._settings = settings
        self._topic = topic
        self._waiting: dict[str, _Waiting] | None = None

    def decide(self, messages: pa.Table) -> pa.Table:
        """Gives those messages a reason that do not wait because another one of their key does.

        Args:
            messages: as MESSAGES, with their positions in the tables, in the order in which they came.

        Returns:
            the same messages; of those that are put off by the mode `debounce` another `deliver_at`.
        """
        is_keyed = pc.and_(pc.is_valid(messages["schedule_key"]), pc.is_null(messages["reason"]))
        rows = np.flatnonzero(is_keyed.to_numpy(zero_copy_only=False)).tolist()
        if not rows:
            return messages
        waiting = self._known()
        now = time.time_ns() // 1_000_000
        columns = {
            name: messages[name].to_pylist() for name in (*MessagePosition._fields, "schedule_key", "publish_time")
        }
        due, reasons, recurs = (
            int64(messages, "deliver_at").copy(),
            messages["reason"].to_pylist(),
            are_recurring(messages),
        )
        for i in rows:
            key, published, position = columns["schedule_key"][i], columns["publish_time"][i], position_of(columns, i)
            rule = key_rule(dict(messages["properties"][i].as_py()))
            before = waiting.get(key)
            if before is not None and (before.position == position or before.until <= published):
                before = None
            if before is not None and (rule.mode is Mode.KEEP or before.row is None):
                reasons[i] = _WAITS
                continue
            if before is not None and before.row is not None:
                reasons[before.row] = _REPLACED
            since = published if before is None else before.since
            if rule.mode is Mode.DEBOUNCE and rule.debounce_max_millis is not None:
                due[i] = min(int(due[i]), since + rule.debounce_max_millis)
            until = _ALWAYS if recurs[i] or due[i] > now else int(due[i])
            waiting[key] = _Waiting(position, until, since, i)
        for i in rows:
            waiting[columns["schedule_key"][i]].row = None
        return with_columns(messages, deliver_at=pa.array(due), reason=pa.array(reasons, pa.string()))

    def _known(self) -> dict[str, _Waiting]:
        if self._waiting is None:
            self._waiting = {}
            if all(exists(self._settings.warehouse, name) for name in SCHEMAS):
                found = Warehouse(self._settings).sql(_SQL("first_waiting", topic=self._topic))
                for key, *position in zip(*(found[name].to_pylist() for name in found.column_names), strict=True):
                    self._waiting[key] = _Waiting(MessagePosition(*position))
        return self._waiting
