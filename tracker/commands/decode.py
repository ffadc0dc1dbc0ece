"""Decodes control commands: makes rows, which the shards apply, of the bytes on the control topic."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError

from conf.errors import DelayLakeError, one_line
from conf.partitions import split_partition
from tracker.buckets.index_bits import MAX_ENTRY_ID
from tracker.commands.kinds import ANSWER, CANCEL, OPERATIONS, REPEAT, Effect, Field, Operation
from tracker.due_time import MAX_TIME_MILLIS, BadScheduleError
from tracker.messages import FIRST_IMPORTED_LEDGER, MESSAGES, Int64Array, typed
from tracker.properties import check_key
from tracker.schemas import (
    COMMAND_ROWS,
    MAX_ANSWERS,
    MAX_BATCH_INDEX,
    MAX_MESSAGES,
    MAX_NAME_BYTES,
    MAX_NAMES,
    MAX_REQUEST_ID_BYTES,
    PauseChange,
    Routes,
    is_reserved,
)
from tracker.subscriptions import ALSO_LATER
from tracker.wire.delaylake_pb2 import CancelDelayedMessage, ControlCommand, Result, SkipEntry

_CANCELS = "cancels"  # the field of ControlCommand with several cancels


@dataclass(frozen=True)
class Decoded:
    """The commands of a batch, and the rejected messages of the control topic."""

    commands: pa.Table  # as COMMAND_ROWS
    # By request id of the commands that have something to apply, in the control topic's order: a hash of the body.
    request_ids: dict[str, int]
    rejects: pa.Table  # as MESSAGES, with a reason
    pause_changes: list[PauseChange]


class InvalidCommandError(DelayLakeError):
    """A command that can't be applied. The error's message is the reason, one line."""


class _NoRequestIdError(InvalidCommandError):
    """A command that can't be answered, because it has no request id, or one that is too long."""


# A ledger that is so far beyond the newest one of its topic can't be that of a message. The ledgers of all topics of a
# cluster are counted together, so a topic's next one may be far from its last one.
_LEDGERS_AHEAD = 1_000_000

_CLOCKS_MILLIS = 60_000  # how much the clocks of a message's and a command's producers may differ

# The columns in which the rows of a command may differ. All rows have the same values in the other ones.
_POSITION = ("partition", "ledger_id", "entry_id", "batch_index", "deliver_at")

_SHARED = pa.schema([field for field in COMMAND_ROWS if field.name not in _POSITION])

_Position = tuple[int, int, int, int, int]

_NO_POSITION = np.array([[-1, -1, -1, -1, 0]])


@dataclass(frozen=True)
class _Part:
    """Rows of one command that differ only in the columns _POSITION."""

    shared: dict[str, object]  # the values of the other columns; a missing one is null
    positions: Int64Array  # (rows, 5): the columns _POSITION

    @property
    def answers(self) -> int:
        """The number of its outcomes, if each row names one message."""
        subscriptions = int(str(self.shared.get("subscriptions", 0))).bit_count() + bool(self.shared.get("also_later"))
        return len(self.positions) * max(1, subscriptions)


class _Request:
    """A command, and what its operation's description says."""

    def __init__(self, command: ControlCommand) -> None:
        name = command.WhichOneof("operation") or ""
        self.command = command
        self.kind = CANCEL if name == _CANCELS else name
        self.content: Any = getattr(command, name) if name else None  # the message of its operation

    @property
    def operation(self) -> Operation:
        """The description of its operation; it has one."""
        return OPERATIONS[self.kind]

    @property
    def entries(self) -> Sequence[Any]:
        """What it names, each as CancelDelayedMessage or SkipEntry."""
        if self.kind == CANCEL:
            return [self.content] if isinstance(self.content, CancelDelayedMessage) else self.content.messages
        return [self.content.entry] if self.operation.names_one else self.content.entries

    @property
    def fields(self) -> list[tuple[Field, Any]]:
        """The fields that COMMAND_ROWS has beside _POSITION, and their values."""
        return [(one, getattr(self.content, one.name)) for one in self.operation.other_fields]

    @property
    def time(self) -> int:
        """What it says of when its messages are due then, as COMMAND_ROWS.deliver_at has it; 0: nothing."""
        time_field = self.operation.time_field
        return 0 if time_field is None else int(getattr(self.content, time_field.name))


@dataclass(frozen=True)
class Limits:
    """What the messages can be that commands name.

    Attributes:
        max_delay_millis: the longest delay of a message, ms; 0: any.
        newest_ledgers: by source topic the newest ledger that any of its partitions has; a topic without one: unknown.
    """

    max_delay_millis: int = 0
    newest_ledgers: Mapping[str, int] = field(default_factory=dict)


_NO_LIMITS = Limits()


def decode(messages: pa.Table, routes: Routes, limits: Limits = _NO_LIMITS) -> Decoded:
    """Decodes the control topic's messages.

    Bytes that are no command, and commands without a valid request id, are rejected. A command that can be read but not
    applied is rejected, and answered INVALID; so is one that has more than MAX_ANSWERS answers, those of the commands
    before it included. Of several commands with the same request id the first counts, the others have the kind REPEAT.
    A command that has nothing to apply does not count, so that it may come again, corrected.

    Args:
        messages: as MESSAGES; the payload is a ControlCommand.
        routes: the subscriptions of all source topics.
        limits: commands that name a time beyond them are INVALID, those that name a ledger beyond them NOT_FOUND.

    Returns:
        the commands, rejects and pause changes. No payload raises an error.
    """
    rows: list[_Part] = []
    seen: dict[str, int] = {}
    reasons: list[str | None] = []
    pause_changes: list[PauseChange] = []
    room = MAX_ANSWERS
    for payload, published in zip(messages["payload"].to_pylist(), messages["publish_time"].to_pylist(), strict=True):
        command = ControlCommand()
        request = _Request(command)
        reason = None
        try:
            command.ParseFromString(payload or b"")
            request = _Request(command)
            _check_request_id(command.request_id)
            keys = _keys(request)
            positions = _positions(request)
            _check_times(request, positions, published, limits.max_delay_millis)
            command_parts, change = _rows(request, positions, keys, routes, limits.newest_ledgers)
            answers = sum(part.answers for part in command_parts)
            _check_answers(answers, room)
            room -= answers
            body = _body(request, positions, keys)
            shared: dict[str, object] = {"body": body}
            if command.request_id in seen:
                shared["kind"] = REPEAT
            elif change is not None or any(part.shared["kind"] != ANSWER for part in command_parts):
                seen[command.request_id] = body
                pause_changes += [change] if change is not None else []
            rows += [replace(part, shared=part.shared | shared) for part in command_parts]
        except DecodeError:
            reason = "the bytes are no command"
        except _NoRequestIdError as error:
            reason = str(error)
        except InvalidCommandError as error:
            reason = str(error)
            rows += _answers(request, command.topic, [None], Result.INVALID, reason)
        except Exception as error:  # nothing that is wrong with one command may stop the others
            reason = f"it can't be applied: {type(error).__name__}: {one_line(error)[:200]}"
            rows += _answers(request, command.topic, [None], Result.INVALID, reason)
        reasons.append(reason)
    rejected = np.array([reason is not None for reason in reasons], dtype=np.bool_)
    with_reason = messages.set_column(
        MESSAGES.get_field_index("reason"), MESSAGES.field("reason"), pa.array(reasons, pa.string())
    )
    return Decoded(_table(rows), seen, with_reason.filter(pa.array(rejected)), pause_changes)


def _table(parts: Sequence[_Part]) -> pa.Table:
    """Returns the rows of all parts, as COMMAND_ROWS."""
    shared = pa.Table.from_pylist([part.shared for part in parts], schema=_SHARED)
    shared = shared.take(pa.array(np.repeat(np.arange(len(parts)), [len(part.positions) for part in parts])))
    positions = np.concatenate([np.zeros((0, len(_POSITION)), np.int64), *(part.positions for part in parts)])
    named = {name: pa.array(positions[:, i]) for i, name in enumerate(_POSITION)}
    return typed({name: named[name] if name in named else shared[name] for name in COMMAND_ROWS.names}, COMMAND_ROWS)


def _check_answers(answers: int, room: int) -> None:
    if answers > MAX_ANSWERS:
        raise InvalidCommandError(
            f"it names {answers:,} messages, once for each subscription: more than {MAX_ANSWERS:,}, name fewer"
        )
    if answers > room:
        raise InvalidCommandError(
            f"commands that came with it name more than {MAX_ANSWERS:,} messages together, once for each subscription: "
            "send it again later, under another request id"
        )


def _check_request_id(request_id: str) -> None:
    if not request_id:
        raise _NoRequestIdError("no command with a request id")
    if len(request_id.encode()) > MAX_REQUEST_ID_BYTES:
        raise _NoRequestIdError(f"the request id has more than {MAX_REQUEST_ID_BYTES} bytes")
    if is_reserved(request_id):
        raise _NoRequestIdError(f"the request id {request_id!r} is reserved for what the job does itself")


def _rows(
    request: _Request,
    positions: Int64Array,
    keys: Sequence[str],
    routes: Routes,
    newest_ledgers: Mapping[str, int],
) -> tuple[list[_Part], PauseChange | None]:
    command, operation = request.command, request.operation
    topic, partition = resolve_topic(command.topic, routes)
    if topic is None:
        reason = f"no route has the topic {command.topic!r}"
        return _answers(request, command.topic, [None], Result.NOT_FOUND, reason), None
    subscriptions = {i: s for i, s in enumerate(routes[topic]) if not s.is_removed}
    rows: list[_Part] = []
    known = {s.name for s in subscriptions.values()}
    is_for_all = ALSO_LATER in command.subscriptions or not command.subscriptions
    # A later subscription has no next occurrence.
    also_later = ALSO_LATER in command.subscriptions and not operation.is_of_schedule
    unknown = [name for name in dict.fromkeys(command.subscriptions) if name not in {*known, ALSO_LATER}]
    rows += _answers(request, topic, unknown, Result.NOT_FOUND, "the topic has no such subscription")
    chosen = {i: s for i, s in subscriptions.items() if is_for_all or s.name in command.subscriptions}
    if operation.needs_single_acks:
        refused = [s.name for s in chosen.values() if s.is_cumulative]
        reason = "the subscription acknowledges cumulatively: no single message"
        rows += _answers(request, topic, refused, Result.NOT_ALLOWED, reason)
        chosen = {i: s for i, s in chosen.items() if not s.is_cumulative}
    mask = sum(1 << i for i in chosen)
    if operation.is_of_subscription:
        names = [s.name for s in chosen.values()] + [ALSO_LATER] * also_later
        rows += _answers(request, topic, names, Result.APPLIED, "")
        return rows, PauseChange(command.request_id, topic, mask, operation.effect is Effect.HOLD) if mask else None
    if not mask and not also_later:
        return rows, None
    if partition >= 0:
        is_other = ~np.isin(positions[:, 0], (-1, partition))
        for other in np.unique(positions[is_other, 0]).tolist():
            other_positions = positions[positions[:, 0] == other]
            other_positions[:, _POSITION.index("partition")] = -1
            other_positions[:, _POSITION.index("deliver_at")] = 0
            reason = f"partition {other} is not {command.topic}"
            rows += _answers(request, topic, [None], Result.INVALID, reason, other_positions)
        positions = positions[~is_other]
        positions[:, 0] = partition
    newest = newest_ledgers.get(topic, FIRST_IMPORTED_LEDGER)
    ledgers = positions[:, _POSITION.index("ledger_id")]
    is_beyond = (ledgers > newest + _LEDGERS_AHEAD) & (ledgers < FIRST_IMPORTED_LEDGER)
    if is_beyond.any():
        reason = "the topic has no such message"
        beyond = positions[is_beyond].copy()
        beyond[:, _POSITION.index("deliver_at")] = 0
        names = [s.name for s in chosen.values()] + [ALSO_LATER] * also_later
        rows += _answers(request, topic, names, Result.NOT_FOUND, reason, beyond)
        positions = positions[~is_beyond]
    shared = _shared(request, operation.kind, topic, mask)
    shared = shared | {"also_later": True} if also_later else shared
    if len(positions):
        rows.append(_Part(shared, positions))
    # A key is the topic's, whichever of its partitions the command names.
    nowhere = _NO_POSITION.copy()
    nowhere[:, _POSITION.index("deliver_at")] = request.time
    rows += [_Part(shared | {"schedule_key": key}, nowhere) for key in keys]
    return rows, None


def _shared(request: _Request, kind: str, topic: str, subscriptions: int) -> dict[str, object]:
    command = request.command
    shared: dict[str, object] = {
        "request_id": command.request_id,
        "kind": kind,
        "topic": topic,
        "subscriptions": subscriptions,
        "issued_by": command.issued_by,
        "issued_at": command.issued_at,
        "sum_up": command.sum_up,
        "operation": request.kind.upper(),
    }
    if kind != ANSWER:
        shared |= {
            one.column or one.name: value[: one.most] if isinstance(value, str) else value
            for one, value in request.fields
        }
    return shared


def _check_names(command: ControlCommand) -> None:
    names = [command.topic, command.issued_by, *command.subscriptions]
    if len(names) > MAX_NAMES:
        raise InvalidCommandError(f"more than {MAX_NAMES:,} subscriptions")
    if any(len(name.encode()) > MAX_NAME_BYTES for name in names):
        raise InvalidCommandError(f"a name has more than {MAX_NAME_BYTES:,} bytes")


def _body(request: _Request, positions: Int64Array, keys: Sequence[str]) -> int:
    """Returns a 64-bit hash, not 0, of a command's content. Issuer, time, order and `sum_up` do not matter."""
    command = request.command
    content: list[object] = [request.kind, full_name(command.topic), sorted(set(command.subscriptions))]
    if keys:
        content += [sorted(keys), request.time]
    content += [value for _, value in request.fields]
    named = positions.copy()
    if not request.operation.names_time:
        named[:, _POSITION.index("deliver_at")] = 0
    named = named[np.lexsort(named.T)]
    digest = hashlib.blake2b(json.dumps(content).encode() + named.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1


def _keys(request: _Request) -> list[str]:
    """Returns the schedule keys by which a command names messages, each once.

    Raises:
        InvalidCommandError: one is no valid key, or names a message by id, too.
    """
    kind = request.kind
    if not kind or request.operation.is_of_subscription:
        return []
    keys: dict[str, None] = {}
    for entry in request.entries:
        if entry.schedule_key:
            if request.operation.names_one:
                raise InvalidCommandError(
                    f"a {kind} names its message by its id: a schedule key is that of one that waits"
                )
            if entry.ledger_id or entry.entry_id or (isinstance(entry, SkipEntry) and _names_a_place(entry)):
                raise InvalidCommandError("a message is named by its id or by its schedule_key, not by both")
            try:
                check_key(entry.schedule_key)
            except BadScheduleError as error:
                raise InvalidCommandError(str(error)) from None
            keys[entry.schedule_key] = None
    _check_number(max(len(keys), 1), kind)
    return list(keys)


def _names_a_place(entry: SkipEntry) -> bool:
    return bool(entry.batch_indexes) or (entry.HasField("partition") and entry.partition >= 0)


def _positions(request: _Request) -> Int64Array:
    """Returns the columns _POSITION of each message or entry that a command names by its id: int64, (rows, 5).

    Raises:
        InvalidCommandError: the command is not valid with any routes.
    """
    if not request.kind:
        raise InvalidCommandError("no operation, or one that is not known here")
    _check_names(request.command)
    return np.array(_named(request), np.int64).reshape(-1, len(_POSITION))


def _named(request: _Request) -> list[_Position]:
    operation = request.operation
    if operation.is_of_subscription:
        return []
    entries = request.entries
    if operation.kind == CANCEL:
        _check_number(len(entries), CANCEL)
        return [_cancelled(cancel) for cancel in entries if not cancel.schedule_key]
    _check_fields(request)
    _check_number(len(entries), operation.kind)
    positions: list[_Position] = []
    new_time = request.time
    for entry in entries:
        if entry.schedule_key:
            continue
        ledger_id, entry_id, indexes = entry.ledger_id, entry.entry_id, entry.batch_indexes
        _check(ledger_id, entry_id)
        _check_number(len(positions) + max(len(indexes), 1), operation.kind)
        partition = max(entry.partition, -1) if entry.HasField("partition") else -1
        time = entry.deliver_at if operation.cancels_message else new_time
        if not indexes:
            positions.append((partition, ledger_id, entry_id, -1, time))
        for batch_index in dict.fromkeys(indexes):
            if not 0 <= batch_index <= MAX_BATCH_INDEX:
                raise InvalidCommandError(f"batch index {batch_index} is out of range")
            positions.append((partition, ledger_id, entry_id, batch_index, time))
    return positions


def _check_times(request: _Request, positions: Int64Array, published: int, max_delay_millis: int) -> None:
    """Checks that no time is later than that of a message which was published when the command was.

    Args:
        request: it may have a time for messages that are named by key.
        positions: as `_positions` returns them.
        published: when the command was published, ms since the epoch.
        max_delay_millis: the longest delay of a message, ms; 0: any.
    """
    if not max_delay_millis:
        return
    time_field = request.operation.time_field
    if time_field is not None and time_field.unit not in ("moment", "shift"):
        return
    times = positions[:, _POSITION.index("deliver_at")]
    last = max(int(times.max(initial=0)), request.time)
    last += published if time_field is not None and time_field.unit == "shift" else 0
    if last > published + max_delay_millis + _CLOCKS_MILLIS:
        raise InvalidCommandError(f"deliver_at is beyond the longest delay of a message, {max_delay_millis} ms: {last}")


def _check_fields(request: _Request) -> None:
    command, operation = request.command, request.operation
    if operation.names_one and (len(set(command.subscriptions)) != 1 or ALSO_LATER in command.subscriptions):
        raise InvalidCommandError(f"a {operation.kind} names one subscription: the one whose consumer failed")
    for one in operation.fields:
        value = getattr(request.content, one.name)
        if not one.is_text and not one.allows(value):
            raise InvalidCommandError(f"{one.name} must {_limits(one)}: {value}")


def _limits(number: Field) -> str:
    if not number.may_be_0:
        return f"not be 0, and less than {number.most + 1:,}"
    most = "the year 9999" if number.most == MAX_TIME_MILLIS - 1 else f"{number.most:,}"
    return f"be from {number.least:,} to {most}"


def _cancelled(cancel: CancelDelayedMessage) -> _Position:
    _check(cancel.ledger_id, cancel.entry_id)
    if cancel.deliver_at <= 0:
        raise InvalidCommandError(f"deliver_at must be positive: {cancel.deliver_at}")
    if cancel.deliver_at > MAX_TIME_MILLIS:
        raise InvalidCommandError(f"deliver_at is beyond the year 9999: {cancel.deliver_at}")
    return -1, cancel.ledger_id, cancel.entry_id, -1, cancel.deliver_at


def _check_number(n: int, operation: str) -> None:
    if not n:
        raise InvalidCommandError(f"a {operation} of no entries")
    if n > MAX_MESSAGES:
        raise InvalidCommandError(f"a {operation} of more than {MAX_MESSAGES:,} messages")


def _check(ledger_id: int, entry_id: int) -> None:
    if ledger_id < 0 or not 0 <= entry_id <= MAX_ENTRY_ID:
        raise InvalidCommandError(f"no such position can be: {ledger_id}:{entry_id}")


def full_name(topic: str) -> str:
    """Completes a topic's name: `orders` and `public/default/orders` are `persistent://public/default/orders`."""
    if "://" in topic:
        return topic
    return f"persistent://{topic if topic.count('/') == 2 else f'public/default/{topic}'}"


def resolve_topic(name: str, routes: Container[str]) -> tuple[str | None, int]:
    """Finds the source topic that a name stands for.

    Args:
        name: of a topic or of one of its partitions, complete or not.
        routes: the names of the source topics, complete.

    Returns:
        the source topic's complete name, None if no route has it; and the partition's number, -1: the whole topic.
    """
    name = full_name(name)
    if name in routes:
        return name, -1
    topic, partition = split_partition(name)
    return (topic, partition) if topic in routes else (None, -1)


def _answers(
    request: _Request,
    topic: str,
    subscriptions: Iterable[str | None],
    result: int,
    reason: str,
    positions: Int64Array = _NO_POSITION,
) -> list[_Part]:
    shared = _shared(request, ANSWER, topic, 0) | {"result": result, "reason": reason}
    for column in ("topic", "issued_by"):
        if len(str(shared[column]).encode()) > MAX_NAME_BYTES:
            shared[column] = ""
    return [_Part(shared | {"subscription": subscription}, positions) for subscription in subscriptions]
