"""Messages that come again under their request id: of a topic's messages with one id, the first counts."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.repeats import FirstAnswers, RequestLog
from tracker.context import Context
from tracker.messages import (
    Int64Array,
    empty_table,
    has_requests,
    int64,
    position_texts,
    typed,
    with_columns,
)
from tracker.payload_refs import COLUMN, PayloadRef, has_refs
from tracker.properties import REQUEST_ID, key_hash
from tracker.schemas import OUTCOME_ROWS, SCHEDULED_ID
from tracker.wire.delaylake_pb2 import Result

OPERATION = "SCHEDULE"  # of the outcomes of messages with a request id

_ISSUED_BY = "delaylake"

_LOG = "message_"  # begins the names of the log's tables in the store

# Properties in which a repetition may differ: the id itself, and what tracing libraries add to each message anew.
_NOT_COMPARED = frozenset({REQUEST_ID, "traceparent", "tracestate", "baggage"})

_COMPARED = ("key", "key_encoding", "ordering_key", "ordering_key_bytes")


class FirstMessage(NamedTuple):
    """The first message that came under a request id."""

    position: str
    bodies: Collection[int]  # hashes of its content, as `body_of`; others may be among them
    deliver_at: int  # ms since the epoch


# By source topic and request id, of a tick: position, `body_of` and deliver_at of the first message that is not
# rejected; the position is empty where all are.
FirstOfTick = Mapping[str, Mapping[str, Sequence[Any]]]


def outcome_id(topic: str, request_id: str) -> str:
    """Returns the request id of the outcomes of a source topic's messages that have a request id."""
    return f"{SCHEDULED_ID}{request_id}@{topic}"  # a topic's name has `://` once, so others have other ids


def request_id_of(topic: str, outcome_request_id: str) -> str:
    """Returns the message's request id of what `outcome_id` has returned."""
    return outcome_request_id.removeprefix(SCHEDULED_ID).removesuffix(f"@{topic}")


def body_of(row: Mapping[str, Any]) -> int:
    """Returns a hash of what repetitions of a message have in common, 63 bits and not 0.

    Args:
        row: of MESSAGES, as Python values.
    """
    digest = hashlib.blake2b(digest_size=8)
    values = [_payload_of(row), *(row[name] for name in _COMPARED)]
    for name, value in sorted(row["properties"] or []):
        if name not in _NOT_COMPARED:
            values += [name, value]
    for value in values:
        data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        # With their lengths, so that no two lists of values give the same bytes.
        digest.update(b"-" if data is None else b"%d:%b" % (len(data), data))
    return int.from_bytes(digest.digest(), "little") >> 1 or 1


def _payload_of(row: Mapping[str, Any]) -> str | None:
    """Returns what stands for a row's payload, which may be in a file: its length and checksum."""
    if (at := row.get(COLUMN)) is not None:
        ref = PayloadRef.parse(at)
        return f"{ref.length}:{ref.checksum}"
    payload = row["payload"]
    return None if payload is None else f"{len(payload)}:{zlib.crc32(payload)}"


def first_of_tick(messages: pa.Table) -> dict[str, dict[str, list[Any]]]:
    """Finds the first message under each request id among all messages of a tick, as FirstOfTick.

    Args:
        messages: as MESSAGES, in the order in which they count.
    """
    found: dict[str, dict[str, list[Any]]] = {}
    for _, row in _with_ids(messages):
        ids = found.setdefault(row["topic"], {})
        if row["reason"] is not None:
            ids.setdefault(row["request_id"], ["", 0, 0])
        elif not ids.get(row["request_id"], [""])[0]:
            ids[row["request_id"]] = [row["position"], body_of(row), row["deliver_at"]]
    return found


def _with_ids(messages: pa.Table) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the rows that have a request id: (index, the row as Python values, with its `position` as text)."""
    if not has_requests(messages):
        return
    chosen = np.flatnonzero(pc.is_valid(messages["request_id"]).to_numpy(zero_copy_only=False))
    rows = messages.take(pa.array(chosen))
    names = ("topic", "request_id", "reason", "deliver_at", "publish_time", "properties", "payload", *_COMPARED)
    named = rows.select([*names, COLUMN] if has_refs(rows) else names).append_column("position", position_texts(rows))
    yield from zip(chosen.tolist(), named.to_pylist(maps_as_pydicts=None), strict=True)


@dataclass(frozen=True)
class RequestedMessages:
    """A tick's messages, after the decisions about their request ids.

    Attributes:
        messages: as MESSAGES: the same rows. Repetitions have a reason.
        row: int64, (answers,): the index of each message with a request id.
        answers: as OUTCOME_ROWS: one for each of them, without deliver_at.
        first: for each of them the first message of its id; None: all were rejected for something else.
    """

    messages: pa.Table
    row: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))
    answers: pa.Table = field(default_factory=partial(empty_table, OUTCOME_ROWS))
    first: Sequence[FirstMessage | None] = ()

    def outcomes(self, decided: pa.Table) -> pa.Table:
        """Returns the outcomes of messages with a request id, as OUTCOME_ROWS.

        Args:
            decided: as MESSAGES: the messages, after the decisions about their schedule keys.
        """
        if not len(self.row):
            return self.answers
        rows = decided.take(pa.array(self.row))
        # A repetition has the schedule key of its first message, and so is in the same shard.
        own = dict(zip(position_texts(rows).to_pylist(), int64(rows, "deliver_at").tolist(), strict=True))
        due = [None if first is None else own.get(first.position, first.deliver_at) for first in self.first]
        return with_columns(self.answers, deliver_at=pa.array(due, pa.int64()))


class MessageRequests:
    """Rejects messages that come again under their request id. Each shard remembers the ids of all shards.

    The newest million ids of a source topic are remembered for a day. The table `outcomes` has the first messages.

    Args:
        context: of the shard.
    """

    def __init__(self, context: Context) -> None:
        self._context = context

    def decide_new(self, messages: pa.Table, of_tick: FirstOfTick, first_answers: FirstAnswers) -> RequestedMessages:
        """Decides which of a tick's messages are repetitions, and remembers the others' ids.

        Args:
            messages: as MESSAGES: this shard's.
            of_tick: of all shards.
            first_answers: reads the answers to request ids of earlier ticks.
        """
        if not of_tick and not has_requests(messages):
            return RequestedMessages(messages)
        earlier = self._find_earlier(of_tick, first_answers)
        for topic, ids in of_tick.items():
            new = {one: values[1] for one, values in ids.items() if values[0] and (topic, one) not in earlier}
            self._log(topic).add_ids(new, self._context.now)
        asked = list(_with_ids(messages))
        firsts = [
            earlier.get((row["topic"], row["request_id"])) or _first_of(of_tick[row["topic"]][row["request_id"]])
            for _, row in asked
        ]
        are_earlier = [(row["topic"], row["request_id"]) in earlier for _, row in asked]
        answers = [
            _answer(row, first, is_earlier)
            for (_, row), first, is_earlier in zip(asked, firsts, are_earlier, strict=True)
        ]
        reasons, due = messages["reason"].to_pylist(), int64(messages, "deliver_at").copy()
        for (i, row), answer, is_earlier in zip(asked, answers, are_earlier, strict=True):
            if answer["result"] == Result.APPLIED:
                answer["is_repeat"] = is_earlier
            else:
                reasons[i], due[i] = answer["reason"], min(row["publish_time"], self._context.now)
        decided = with_columns(
            messages,
            reason=pa.array(reasons, pa.string()),
            deliver_at=pa.array(due),
            occurrence=pc.if_else(pa.array(reasons, pa.string()).is_valid(), None, messages["occurrence"]),
            request_id=pa.nulls(messages.num_rows, pa.string()),
        )
        chosen = np.array([i for i, _ in asked], np.int64)
        return RequestedMessages(decided, chosen, _outcomes(messages.take(pa.array(chosen)), answers), firsts)

    def rebuild(self, bodies: Mapping[str, Mapping[str, int]]) -> None:
        """Restores the remembered ids after a rebuild.

        Args:
            bodies: by source topic and request id, in the order in which they came: `body_of` the first message.
        """
        for topic, ids in bodies.items():
            self._log(topic).add_ids(ids, self._context.now)

    def _find_earlier(self, of_tick: FirstOfTick, first_answers: FirstAnswers) -> dict[tuple[str, str], FirstMessage]:
        """Returns the first messages of the tick's ids that came in earlier ticks, by source topic and request id."""
        remembered: dict[str, tuple[str, str, set[int]]] = {}
        for topic, ids in of_tick.items():
            for one, bodies in self._log(topic).find_ids(ids, self._context.now).items():
                remembered[outcome_id(topic, one)] = topic, one, bodies
        if not remembered:
            return {}
        found: dict[tuple[str, str], FirstMessage] = {}
        answers = first_answers(remembered.keys())
        # A batch that runs again may find its own answers in the table.
        is_first = pc.and_(pc.equal(answers["operation"], OPERATION), pc.less(answers["tick"], self._context.tick))
        is_first = pc.and_(is_first, pc.equal(answers["result"], int(Result.APPLIED)))
        # The newest: an id that was forgotten may have been another message's before.
        answers = answers.filter(is_first).sort_by([("tick", "descending")])
        names = ("request_id", "deliver_at")
        columns = (*(answers[name].to_pylist() for name in names), position_texts(answers).to_pylist())
        for outcome, deliver_at, position in zip(*columns, strict=True):
            topic, one, bodies = remembered[outcome]
            found.setdefault((topic, one), FirstMessage(position, bodies, deliver_at))
        return found

    def _log(self, topic: str) -> RequestLog:
        return RequestLog(self._context.store, _LOG, key_hash(topic, "")[0])


def _first_of(values: Sequence[Any]) -> FirstMessage | None:
    position, body, deliver_at = values
    return FirstMessage(position, (body,), deliver_at) if position else None


def _answer(row: Mapping[str, Any], first: FirstMessage | None, is_earlier: bool) -> dict[str, Any]:
    """Returns what is answered to a message; only APPLIED does not reject it.

    Args:
        row: as `_with_ids` yields it.
        first: the first message under its id; None: all of them are rejected for something else.
        is_earlier: whether that one came in an earlier tick.
    """
    position, request_id, body = row["position"], row["request_id"], body_of(row)
    answer = {"request_id": outcome_id(row["topic"], request_id), "body": body, "superseded_by": None, "reason": ""}
    answer |= {"result": int(Result.INVALID), "is_repeat": False}
    if first is not None and first.position == position:
        if row["reason"] is not None and not is_earlier:  # it makes the tick of its shard fail
            return answer | {"reason": row["reason"]}
        return answer | {"result": int(Result.APPLIED)}
    if first is not None and (body in first.bodies or 0 in first.bodies):
        # Also where something is wrong with it by now, as that its last occurrence is past.
        why = f"a repetition of {first.position}: {REQUEST_ID} {request_id}"
        return answer | {"result": int(Result.ALREADY_APPLIED), "superseded_by": first.position, "reason": why}
    if row["reason"] is not None or first is None:
        return answer | {"reason": row["reason"]}
    return answer | {"reason": f"another message, {first.position}, has had the {REQUEST_ID} {request_id}"}


def _outcomes(rows: pa.Table, answers: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Returns outcomes, as OUTCOME_ROWS without deliver_at, for rows of MESSAGES and the answers to them."""
    answered = ("result", "reason", "superseded_by", "is_repeat", "request_id", "body")
    values = {
        **{name: rows[name] for name in ("topic", "partition", "ledger_id", "entry_id", "batch_index")},
        **{name: pa.array([one[name] for one in answers], OUTCOME_ROWS.field(name).type) for name in answered},
        "operation": pa.repeat(OPERATION, rows.num_rows),
        "issued_by": pa.repeat(_ISSUED_BY, rows.num_rows),
        "issued_at": rows["publish_time"],
    }
    return typed(values, OUTCOME_ROWS)
