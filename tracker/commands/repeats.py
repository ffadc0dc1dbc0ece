"""Commands that come again under their request id: which ids have come, and the answers to repeats."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.kinds import REPEAT
from tracker.messages import BoolArray, Int64Array, empty_table, int64, typed, where, with_columns
from tracker.schemas import OUTCOME_ROWS
from tracker.store import Store
from tracker.wire.delaylake_pb2 import Result

KEPT_MILLIS = 24 * 3600 * 1000  # how long an id is remembered, unless there are more than KEPT_REQUESTS

KEPT_REQUESTS = 1_000_000  # at least this many ids, the newest, are remembered for KEPT_MILLIS

# The log is written, and forgotten, in chunks: of this many ids, or of the ids of this time, ms.
_CHUNK_REQUESTS = 8_192

_CHUNK_MILLIS = 3600 * 1000

# How long the table `outcomes` has to keep the answers to a request id, ms.
ANSWERS_KEPT_MILLIS = KEPT_MILLIS + 2 * _CHUNK_MILLIS

_TABLE = "requests"

_BODIES = "request_bodies"

_LIST = "requests_list"


class RequestLog:
    """Remembers the newest million request ids for a day, each with a hash of its command's body.

    The log has ids as 64-bit hashes, too, so a hit may be another id with the same hash: the table `outcomes` has the
    ids themselves. A body of 0 is not known.

    Args:
        store: where the log is kept.
        name: begins the names of its tables in the store; one name's logs differ in their scopes.
        scope: 64 bits.
    """

    def __init__(self, store: Store, name: str = "", scope: int = 0) -> None:
        self._store = store
        self._scope = scope
        self._table, self._body_table, self._list = f"{name}{_TABLE}", f"{name}{_BODIES}", f"{name}{_LIST}"
        saved = store.get(self._list, (0, scope))
        # [number, count of ids, when the last id was added, when the first was]; earlier versions lack the last value.
        self._chunks: list[list[int]] = json.loads(saved) if saved else []

    def find_ids(self, request_ids: Iterable[str], now: int) -> dict[str, set[int]]:
        """Finds ids that are remembered.

        Args:
            request_ids: the ids to look for.
            now: ms since the epoch.

        Returns:
            by id that is remembered: the body hashes of the commands that had it.
        """
        ids = list(dict.fromkeys(request_ids))
        if not self._chunks or not ids:
            return {}
        hashes = _hashes(ids)
        wanted = np.sort(hashes)
        bodies: dict[int, set[int]] = {}
        for number, n, last, *_ in self._chunks:
            if last < now - KEPT_MILLIS:
                continue
            known = np.frombuffer(self._store.get(self._table, (number, self._scope)) or b"", np.int64)
            is_found = wanted[np.minimum(np.searchsorted(wanted, known), len(wanted) - 1)] == known
            if is_found.any():
                chunk_bodies = np.frombuffer(self._bodies(number, n), np.int64)
                for found, body in zip(known[is_found].tolist(), chunk_bodies[is_found].tolist(), strict=True):
                    bodies.setdefault(found, set()).add(body)
        return {i: bodies[h] for i, h in zip(ids, hashes.tolist(), strict=True) if h in bodies}

    def add_ids(self, bodies: Mapping[str, int], now: int) -> None:
        """Remembers ids, and forgets the oldest beyond the limits.

        Args:
            bodies: by id: the hash of its command's body, 64 bits.
            now: ms since the epoch.
        """
        if not bodies:
            return
        number, before, first = -1, _CHUNK_REQUESTS, now
        if self._chunks:
            number, before, last, *begun = self._chunks[-1]
            first = begun[0] if begun else last
        data = bodies_before = b""
        if before < _CHUNK_REQUESTS and now - first < _CHUNK_MILLIS:
            data = self._store.get(self._table, (number, self._scope)) or b""
            bodies_before = self._bodies(number, before)
            self._chunks.pop()
        else:
            number, before, first = number + 1, 0, now
        self._store.put(self._table, (number, self._scope), data + _hashes(bodies).tobytes())
        bodies_after = bodies_before + np.array(list(bodies.values()), np.int64).tobytes()
        self._store.put(self._body_table, (number, self._scope), bodies_after)
        self._chunks.append([number, before + len(bodies), now, first])
        total = sum(chunk[1] for chunk in self._chunks)
        while total - self._chunks[0][1] >= KEPT_REQUESTS or self._chunks[0][2] < now - KEPT_MILLIS:
            oldest, n, *_ = self._chunks.pop(0)
            self._store.remove(self._table, (oldest, self._scope))
            self._store.remove(self._body_table, (oldest, self._scope))
            total -= n
        self._store.put(self._list, (0, self._scope), json.dumps(self._chunks, separators=(",", ":")).encode())

    def _bodies(self, number: int, n: int) -> bytes:
        """Returns the body hashes of a chunk of n ids; 0 for ids of earlier versions, which kept no bodies."""
        return (self._store.get(self._body_table, (number, self._scope)) or b"").rjust(8 * n, b"\0")


def _hashes(request_ids: Iterable[str]) -> Int64Array:
    digests = b"".join(hashlib.blake2b(r.encode(), digest_size=8).digest() for r in request_ids)
    return np.frombuffer(digests, dtype=np.int64)


# The reason of a command that has the request id of another one.
OTHER_BODY = "another command has had this request id"

# Outcomes that answered a command, and the tick in which they did.
ANSWERS = OUTCOME_ROWS.append(pa.field("tick", pa.int64()))

# Reads the answers to request ids of earlier ticks, as ANSWERS. An id without a row was never applied.
FirstAnswers = Callable[[Collection[str]], pa.Table]

_ENTRY = ["request_id", "subscription", "ledger_id", "entry_id"]


def no_answers(request_ids: Collection[str]) -> pa.Table:
    """Returns no rows: the FirstAnswers if no command has been answered yet."""
    return empty_table(ANSWERS)


class Repeats:
    """Recognises the repeated commands of a tick, and answers them.

    Args:
        remembered: by request id of this tick: the body hashes that the request log has for it. An id without answers
            is not remembered: another one has the same hash.
        first: by request id: the body hash of this tick's first command with it.
        answers: as ANSWERS: the answers to the remembered ids.

    Attributes:
        known: by request id of earlier ticks: the body hashes of its commands.
    """

    def __init__(self, remembered: Mapping[str, set[int]], first: Mapping[str, int], answers: pa.Table) -> None:
        self._answers = answers
        answered = set(pc.unique(answers["request_id"]).to_pylist())
        self.known = {request_id: bodies for request_id, bodies in remembered.items() if request_id in answered}
        self._first, self._first_bodies = first.keys(), first
        self._bodies = {request_id: {body} for request_id, body in first.items()} | self.known

    def of_this_tick(self) -> Repeats:
        """Returns the same without the answers of earlier ticks, which one shard alone gives again."""
        return Repeats({}, self._first_bodies, self._answers.slice(0, 0))

    def are_repeats(self, commands: pa.Table) -> BoolArray:
        """Tells which rows of COMMAND_ROWS are repeats: bool, (rows,).

        A row without a body is no repeat: its command is INVALID, or an earlier one, for a subscription added since.
        """
        is_repeat = pc.equal(commands["kind"], REPEAT)
        if self.known:
            is_known = pc.is_in(commands["request_id"], pa.array(list(self.known)))
            is_repeat = pc.or_(is_repeat, pc.and_(is_known, pc.not_equal(pc.fill_null(commands["body"], 0), 0)))
        repeats: BoolArray = is_repeat.to_numpy(zero_copy_only=False)
        return repeats

    def answer_again(
        self, commands: pa.Table, named: Int64Array, outcomes: pa.Table, tick: int
    ) -> tuple[pa.Table, pa.Table]:
        """Answers repeats.

        Args:
            commands: as COMMAND_ROWS: the repeats, a row for each subscription (by name) that a command is for now.
            named: int64, (rows,): the same number for rows that differ only in the subscription.
            outcomes: as OUTCOME_ROWS: those of this tick so far.
            tick: the tick's number.

        Returns:
            two tables, as OUTCOME_ROWS: the first answers once more; and INVALID for commands whose body differs from
            that of the first command with their id.
        """
        tick_outcomes = where(outcomes, ~pc.fill_null(outcomes["is_repeat"], False).to_numpy(zero_copy_only=False))
        own = pc.is_in(tick_outcomes["request_id"], pc.unique(commands["request_id"]))
        tick_outcomes = tick_outcomes.filter(own)
        published = _last(
            pa.concat_tables(
                [self._answers, tick_outcomes.append_column("tick", pa.repeat(tick, tick_outcomes.num_rows))]
            )
        )
        bodies = list(zip(commands["request_id"].to_pylist(), commands["body"].to_pylist(), strict=True))
        is_same = np.array([body in self._bodies.get(request_id, ()) for request_id, body in bodies], np.bool_)
        may_be = np.array([0 in self._bodies.get(request_id, ()) for request_id, _ in bodies], np.bool_)
        command, row = _pairs(commands, published)
        # A command with the same body is answered for the subscriptions of its first answer, whatever it is for now.
        is_published = is_same[command] | (may_be[command] & _have_one_subscription(commands, command, published, row))
        command, row = self._with_unnamed(commands, is_same, published, command[is_published], row[is_published])
        is_other = ~is_same & ~np.isin(named, named[command])
        again, first = np.unique(row, return_index=True)
        # If a command named an entry whole, and its messages were answered one by one, their answers are not summed up.
        is_named = (int64(published, "batch_index")[again] < 0) | (int64(commands, "batch_index")[command[first]] >= 0)
        sum_up = pc.fill_null(commands["sum_up"], False).to_numpy(zero_copy_only=False)[command[first]] & is_named
        n = len(again)
        repeated = with_columns(
            typed(published.take(pa.array(again)), OUTCOME_ROWS),
            sum_up=pa.array(sum_up),
            is_repeat=pa.array(np.ones(n, np.bool_)),
            sequence=pa.nulls(n, pa.int64()),
        )
        others = where(commands, is_other)
        n = others.num_rows
        values = {name: others[name] for name in OUTCOME_ROWS.names if name in others.column_names}
        values |= {
            "deliver_at": pa.nulls(n, pa.int64()),
            "result": pa.repeat(int(Result.INVALID), n),
            "reason": pa.repeat(OTHER_BODY, n),
        }
        return repeated, typed(values, OUTCOME_ROWS)

    def _with_unnamed(
        self, commands: pa.Table, is_same: BoolArray, published: pa.Table, command: Int64Array, row: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        """Adds pairs with all answers for commands that have nothing to apply now, as their subscriptions are gone."""
        ids = commands["request_id"].to_pylist()
        empty = {ids[i]: i for i in np.flatnonzero(is_same).tolist() if ids[i] not in self._first}
        pairs = [
            (empty[published_id], i)
            for i, published_id in enumerate(published["request_id"].to_pylist())
            if published_id in empty
        ]
        more = np.array(pairs, np.int64).reshape(-1, 2)
        return np.concatenate([command, more[:, 0]]), np.concatenate([row, more[:, 1]])


def _last(answers: pa.Table) -> pa.Table:
    """Returns, for each request id, entry and subscription, the last answers: a command that waited has two."""
    if not answers.num_rows:
        return answers
    answers = answers.set_column(
        answers.schema.get_field_index("subscription"), "subscription", pc.fill_null(answers["subscription"], "")
    )
    numbered = answers.select([*_ENTRY, "tick"]).append_column("row", pa.array(np.arange(answers.num_rows)))
    last = numbered.group_by(_ENTRY).aggregate([("tick", "max")])
    joined = numbered.join(last, _ENTRY, join_type="inner", use_threads=False)
    rows = int64(joined, "row")[int64(joined, "tick") == int64(joined, "tick_max")]
    return answers.take(pa.array(np.sort(rows)))


def _pairs(commands: pa.Table, published: pa.Table) -> tuple[Int64Array, Int64Array]:
    """Pairs each command row with the answers for the message, or entry, that it names; returns the indexes of both."""
    entry = ["request_id", "ledger_id", "entry_id"]
    numbered = commands.select(entry).append_column("command", pa.array(np.arange(commands.num_rows)))
    answers = published.select(entry).append_column("row", pa.array(np.arange(published.num_rows)))
    is_by_key = pc.is_valid(commands["schedule_key"]).to_numpy(zero_copy_only=False)
    joined = where(numbered, ~is_by_key).join(answers, entry, join_type="inner", use_threads=False)
    command, row = int64(joined, "command"), int64(joined, "row")
    named, answered = int64(commands, "batch_index")[command], int64(published, "batch_index")[row]
    matches = (named < 0) | (answered < 0) | (named == answered)
    command, row = command[matches], row[matches]
    if is_by_key.any():
        # The key may stand for another message now, so these are paired by key.
        key = ["request_id", "schedule_key"]
        numbered = commands.select(key).append_column("command", numbered["command"])
        answers = published.select(key).append_column("row", answers["row"])
        joined = where(numbered, is_by_key).join(answers, key, join_type="inner", use_threads=False)
        command = np.concatenate([command, int64(joined, "command")])
        row = np.concatenate([row, int64(joined, "row")])
    return command, row


def _have_one_subscription(commands: pa.Table, command: Int64Array, published: pa.Table, row: Int64Array) -> BoolArray:
    """Tells which pairs of command and answer have the same subscription: bool, (pairs,)."""
    own = pc.fill_null(commands["subscription"], "").take(pa.array(command))
    other = pc.fill_null(published["subscription"], "").take(pa.array(row))
    is_same: BoolArray = pc.equal(own, other).to_numpy(zero_copy_only=False)
    return is_same
