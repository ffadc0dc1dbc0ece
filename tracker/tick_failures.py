"""Contains failures in a tick: what fails for a message or a command is rejected, and the rest of the tick goes on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.errors import DelayLakeError, one_line
from tracker.commands.kinds import ANSWER
from tracker.context import SequencesExhaustedError
from tracker.messages import MESSAGES, concat, empty_table, int64, message_ids, position_texts, where, with_columns
from tracker.shard import Shard
from tracker.store import Key, StateLostError, Store
from tracker.tick import Effects, Tick, TickInput
from tracker.wire.delaylake_pb2 import Result

# The most times that a tick is applied to find out for which rows it fails; then all that may be the cause is rejected.
MOST_TRIES = 200

_MAX_REASON = 300  # characters

# The columns that a rejected message keeps: where it is from, and its payload.
_KEPT = frozenset(
    [
        *("topic", "partition", "ledger_id", "entry_id", "batch_index", "batch_size", "first_index"),
        *("publish_time", "event_time", "producer_name", "payload", "payload_at", "request_id"),
    ]
)

# Errors of which no row is the cause.
_OF_NO_ROW = (MemoryError, StateLostError, SequencesExhaustedError)


class TickFailedError(DelayLakeError):
    """A tick fails, and no message or command in it is the cause."""


class BufferedStore:
    """Keeps the changes to a store until `flush`: before that the store is as it was."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._changed: dict[tuple[str, Key], bytes | None] = {}
        self._files: dict[tuple[str, Key], Collection[str]] = {}
        self._put: set[tuple[str, Key]] = set()  # keys that the store may lack
        self.error: Exception | None = None  # that the store has raised

    def get(self, table: str, key: Key) -> bytes | None:
        """Returns the value of a key; None: the table lacks it."""
        if (table, key) in self._changed:
            return self._changed[table, key]
        try:
            return self._store.get(table, key)
        except Exception as error:
            self.error = error
            raise

    def put(self, table: str, key: Key, value: bytes, files: Collection[str] = ()) -> None:
        """Sets the value of a key."""
        self._put.add((table, key))
        self._changed[table, key], self._files[table, key] = value, files

    def remove(self, table: str, key: Key) -> None:
        """Removes a key, if the table has it."""
        self._changed[table, key] = None

    def flush(self) -> None:
        """Makes the changes in the store."""
        for (table, key), value in self._changed.items():
            if value is not None:
                self._store.put(table, key, value, self._files[table, key])
            elif (table, key) not in self._put or self._store.get(table, key) is not None:
                self._store.remove(table, key)
        self._changed = {}


class Row(NamedTuple):
    """A row that may be the cause of a failure."""

    kind: str  # a field of TickInput, or DUE
    place: int  # in that field's table; of DUE rows in the table of rows that were due


DUE = "due"

# The input that may be the cause, in the order in which a tick uses it.
_KINDS = ("messages", "commands", "payload_rows", "segment")


def apply_without_failing_rows(
    store: Store, shard_on: Callable[[Store], Shard], tick: Tick, tick_input: TickInput
) -> Effects:
    """Applies a tick to a shard. Where that fails, it rejects the rows for which it does, and applies the rest.

    The same state, tick and input give the same effects and state.

    Args:
        store: the shard's state.
        shard_on: makes the shard on a store.
        tick: as of `Shard.apply`.
        tick_input: as of `Shard.apply`.

    Raises:
        TickFailedError: no message or command in the tick is the cause.
        StateLostError, SequencesExhaustedError: as of `Shard.apply`.
        Exception: what the store, or a look-up in the tables, has raised.
    """
    contained = _Contained(store, shard_on, tick, tick_input)
    left_out: list[Row] = []
    while True:
        attempt = contained.attempt(left_out)
        if attempt.effects is not None:
            attempt.store.flush()
            attempt.effects.failures += [contained.named(row) for row in left_out]
            return attempt.effects
        left_out += contained.causes(attempt, left_out)


@dataclass
class _Attempt:
    store: BufferedStore
    effects: Effects | None = None  # None: it failed
    error: Exception | None = None
    due: pa.Table = field(default_factory=partial(empty_table, MESSAGES))  # the rows that were due, if it came so far


class _Contained:
    """Finds the rows for which a tick fails; arguments are those of `apply_without_failing_rows`."""

    def __init__(self, store: Store, shard_on: Callable[[Store], Shard], tick: Tick, tick_input: TickInput) -> None:
        self._store = store
        self._shard_on = shard_on
        self._tick = tick
        self._input = tick_input
        self._why = ""  # one line, a sentence without its subject
        self._whys: dict[Row, str] = {}  # likewise, of the rows that have been found
        self._due = empty_table(MESSAGES)
        self._tries = 0

    def attempt(self, left_out: Sequence[Row]) -> _Attempt:
        """Applies the tick to a buffered store without some rows, which are rejected.

        Raises:
            Exception: an error of which no row is the cause.
        """
        attempt = _Attempt(BufferedStore(self._store))
        outside: list[Exception] = []
        tick_input = self._without(left_out) if left_out else self._input
        tick_input = replace(
            tick_input,
            first_answers=partial(_noted, tick_input.first_answers, outside),
            find_keyed=partial(_noted, tick_input.find_keyed, outside),
        )
        shard = None
        try:
            shard = self._shard_on(attempt.store)
            attempt.effects = shard.apply(self._tick, tick_input)
        except _OF_NO_ROW:
            raise
        except Exception as error:
            if outside or attempt.store.error is not None:
                raise
            attempt.error = error
            if shard is not None:
                attempt.due = shard.due
        return attempt

    def causes(self, failed: _Attempt, left_out: Sequence[Row]) -> list[Row]:
        """Returns the rows for which the tick fails, beside those that are left out already.

        Raises:
            TickFailedError: it fails without any rows, too.
        """
        error = failed.error
        self._why = _why(error)
        self._note_due(failed.due)
        rows = self._candidates(left_out)
        # What fails early in the tick hides which rows are due later in it, and may be a cause, too.
        while (attempt := self._try([*left_out, *rows])).effects is None and self._note_due(attempt.due):
            rows = self._candidates(left_out)
        if not rows or attempt.effects is None:
            what = f"tick {self._tick.tick} of a shard {self._why}"
            raise TickFailedError(
                f"{what}, and no message or command in it is the cause: `delaylake rebuild` makes the state anew"
            ) from error
        return self._search(rows, list(left_out))

    def named(self, row: Row) -> tuple[str, str, str]:
        """Returns the source topic, the message or command, and why it is rejected, for a row that was left out."""
        rows = (self._due if row.kind == DUE else getattr(self._input, row.kind)).slice(row.place, 1)
        name = f"the command {rows['request_id'][0]}" if row.kind == "commands" else str(position_texts(rows)[0])
        return str(rows["topic"][0]), name, f"it {self._whys.get(row, self._why)}"

    def _candidates(self, left_out: Sequence[Row]) -> list[Row]:
        """Returns the rows that may be the cause, beside those that are left out."""
        without = set(left_out)
        rows = [Row(kind, i) for kind in _KINDS for i in range(getattr(self._input, kind).num_rows)]
        rows += [Row(DUE, i) for i in range(self._due.num_rows)]
        return [row for row in rows if row not in without]

    def _note_due(self, due: pa.Table) -> bool:
        """Notes rows that are due in the tick; the places of those noted before stay. Whether there are new ones."""
        noted = set(_ids(self._due))
        is_new = np.array([one not in noted for one in _ids(due)], np.bool_)
        if is_new.any():
            self._due = concat([self._due, where(due, is_new)])
        return bool(is_new.any())

    def _try(self, left_out: Sequence[Row]) -> _Attempt:
        self._tries += 1
        return self.attempt(left_out)

    def _search(self, rows: list[Row], left_out: list[Row]) -> list[Row]:
        """Returns those of some rows that have to be left out. Without all of them and `left_out` the tick passes."""
        attempt = self._try(left_out)
        if attempt.effects is not None:
            return []
        if len(rows) == 1 or self._tries >= MOST_TRIES:
            self._whys |= dict.fromkeys(rows, _why(attempt.error))
            return rows
        first, second = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        first_causes = self._search(first, [*left_out, *second])
        return first_causes + self._search(second, [*left_out, *first_causes])

    def _without(self, left_out: Sequence[Row]) -> TickInput:
        """Returns the input with some rows rejected."""
        tick_input = self._input
        by_kind: dict[str, list[int]] = {}
        for row in left_out:
            by_kind.setdefault(row.kind, []).append(row.place)
        whys = {kind: [self._whys.get(Row(kind, i), self._why) for i in indexes] for kind, indexes in by_kind.items()}
        changes: dict[str, Any] = {}
        for kind, indexes in by_kind.items():
            if kind == "messages":
                changes[kind] = _rejected(tick_input.messages, indexes, whys[kind], self._tick.now)
            elif kind == "commands":
                changes[kind] = _invalid(tick_input.commands, indexes, whys[kind])
            elif kind == "payload_rows":
                changes[kind] = _others(tick_input.payload_rows, indexes)
            elif kind == "segment":
                changes[kind] = _others(tick_input.segment, indexes)
        segment = tick_input.segment.take(pa.array(by_kind.get("segment", []), pa.int64()))
        due = self._due.take(pa.array(by_kind.get(DUE, []), pa.int64()))
        changes["failed"], changes["fails"] = concat([segment]), frozenset(_ids(due))
        ids = [*_ids(segment), *_ids(due)]
        changes["why_failed"] = dict(zip(ids, [*whys.get("segment", []), *whys.get(DUE, [])], strict=True))
        return replace(tick_input, **changes)


def _why(error: Exception | None) -> str:
    return f"fails with {type(error).__name__}: {one_line(error)}"[:_MAX_REASON]


def _ids(rows: pa.Table) -> list[tuple[int, int, int]]:
    return list(zip(*(ids.tolist() for ids in message_ids(rows)), strict=True))


def _noted(look_up: Callable[..., pa.Table], outside: list[Exception], *args: Any) -> pa.Table:
    try:
        return look_up(*args)
    except Exception as error:
        outside.append(error)
        raise


def _others(rows: pa.Table, indexes: list[int]) -> pa.Table:
    is_left = np.ones(rows.num_rows, np.bool_)
    is_left[indexes] = False
    return where(rows, is_left)


def _rejected(messages: pa.Table, indexes: list[int], whys: list[str], now: int) -> pa.Table:
    """Returns messages of which some are rejected, without what may be the cause."""
    chosen = np.zeros(messages.num_rows, np.bool_)
    chosen[indexes] = True
    is_chosen = pa.array(chosen)
    due = np.where(chosen, np.minimum(int64(messages, "publish_time"), now), int64(messages, "deliver_at"))
    changed: dict[str, Any] = {
        name: pc.if_else(is_chosen, pa.scalar(None, messages.schema.field(name).type), messages[name])
        for name in messages.column_names
        if name not in _KEPT and name not in ("properties", "deliver_at", "reason")
    }
    reasons, properties = messages["reason"].to_pylist(), messages["properties"].to_pylist()
    for i, why in zip(indexes, whys, strict=True):
        reasons[i], properties[i] = f"it {why}", []
    changed |= {
        "deliver_at": pa.array(due),
        "reason": pa.array(reasons, pa.string()),
        "properties": pa.array(properties, messages.schema.field("properties").type),
    }
    return with_columns(messages, **changed)


def _invalid(commands: pa.Table, indexes: list[int], whys: list[str]) -> pa.Table:
    """Returns commands of which some are only answered, with INVALID."""
    rows = commands.to_pylist()
    for i, why in zip(indexes, whys, strict=True):
        answer = {"kind": ANSWER, "subscriptions": 0, "result": int(Result.INVALID), "reason": f"it {why}"}
        rows[i] |= answer | {"schedule_key": None, "subscription": None, "also_later": None}
    return pa.Table.from_pylist(rows, schema=commands.schema)
