"""Control commands: from the bytes on the control topic to rows that the shards apply."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf.message import DecodeError

from proto.delaylake_pb2 import ControlCommand, Result
from tracker.index_bits import MAX_ENTRY_ID
from tracker.messages import MESSAGES

CANCEL = "cancel"
SKIP = "skip"
ANSWER = "answer"  # nothing to apply: only to be answered, with the row's result

MAX_BATCH_INDEX = 2**20 - 1

# A row is one message, or one whole entry, that a command names.
COMMANDS = pa.schema(
    [
        ("request_id", pa.string()),
        ("kind", pa.string()),
        ("topic", pa.string()),  # of the route
        ("partition", pa.int32()),  # -1: any
        ("subscriptions", pa.int64()),  # bit i: the i-th subscription of the topic's route
        ("ledger_id", pa.int64()),
        ("entry_id", pa.int64()),
        ("batch_index", pa.int32()),  # -1: the whole entry
        ("deliver_at", pa.int64()),  # of a cancel, as the command has it; 0 for a skip
        ("issued_by", pa.string()),
        ("issued_at", pa.int64()),
        ("subscription", pa.string()),  # of an answer; null: of the topic as a whole
        ("result", pa.int32()),  # of an answer
        ("reason", pa.string()),  # of an answer
    ]
)

# What a command did to one message of one subscription; result is a number of the enum Result.
OUTCOMES = pa.schema(
    [
        ("request_id", pa.string()),
        ("topic", pa.string()),
        ("subscription", pa.string()),
        ("partition", pa.int32()),
        ("ledger_id", pa.int64()),
        ("entry_id", pa.int64()),
        ("batch_index", pa.int32()),
        ("result", pa.int32()),
        ("reason", pa.string()),
        ("issued_by", pa.string()),
        ("issued_at", pa.int64()),
    ]
)


@dataclass(frozen=True)
class SubscriptionRule:
    """A subscription, as far as commands are concerned."""

    name: str
    is_cumulative: bool  # its consumers acknowledge cumulatively, so that no single message can be skipped


Routes = Mapping[str, Sequence[SubscriptionRule]]


@dataclass(frozen=True)
class Decoded:
    """Commands as rows, and the messages of the control topic that are none."""

    commands: pa.Table  # COMMANDS
    request_ids: list[str]  # of all commands, in the control topic's order
    rejects: pa.Table  # MESSAGES with a reason


class InvalidCommand(ValueError):
    """A command that can't be applied. The message is the reason, one line."""


def decode(messages: pa.Table, routes: Routes) -> Decoded:
    """Reads the control topic's messages.

    Bytes that are no command, and commands without a request id, are rejected; a command that can be read but not
    applied is rejected and answered INVALID. A request id that comes twice here counts once.
    """
    rows: list[tuple[object, ...]] = []
    seen: dict[str, None] = {}
    reasons: list[str | None] = []
    for payload in messages["payload"].to_pylist():
        command = ControlCommand()
        reason = None
        try:
            command.ParseFromString(payload or b"")
            if not command.request_id:
                raise InvalidCommand("no command with a request id")
            if command.request_id in seen:
                rows += _answers(command, [None], Result.ALREADY_APPLIED, "the request id has been applied before")
            else:
                seen[command.request_id] = None
                rows += _rows(command, routes)
        except DecodeError:
            reason = "the bytes are no command"
        except InvalidCommand as error:
            reason = str(error)
            if command.request_id:
                rows += _answers(command, [None], Result.INVALID, reason)
        reasons.append(reason)
    rejected = np.array([reason is not None for reason in reasons], dtype=np.bool_)
    with_reason = messages.set_column(
        MESSAGES.get_field_index("reason"), MESSAGES.field("reason"), pa.array(reasons, pa.string())
    )
    columns: list[Sequence[object]] = list(zip(*rows, strict=True)) if rows else [()] * len(COMMANDS)
    table = pa.table([pa.array(c, f.type) for c, f in zip(columns, COMMANDS, strict=True)], schema=COMMANDS)
    return Decoded(table, list(seen), with_reason.filter(pa.array(rejected)))


def _rows(command: ControlCommand, routes: Routes) -> Iterable[tuple[object, ...]]:
    operation = command.WhichOneof("operation")
    if operation is None:
        raise InvalidCommand("no operation, or one that is not known here")
    positions = list(_positions(command))
    topic, partition = _topic(command.topic, routes)
    if topic is None:
        return _answers(command, [None], Result.NOT_FOUND, f"no route has the topic {command.topic!r}")
    subscriptions = routes[topic]
    rows: list[tuple[object, ...]] = []
    unknown = [name for name in command.subscriptions if name not in {s.name for s in subscriptions}]
    rows += _answers(command, unknown, Result.NOT_FOUND, "the topic has no such subscription")
    chosen = {i: s for i, s in enumerate(subscriptions) if not command.subscriptions or s.name in command.subscriptions}
    if operation == "skip":
        refused = [s.name for s in chosen.values() if s.is_cumulative]
        rows += _answers(
            command, refused, Result.NOT_ALLOWED, "the subscription acknowledges cumulatively: no single message"
        )
        chosen = {i: s for i, s in chosen.items() if not s.is_cumulative}
    mask = sum(1 << i for i in chosen)
    kind, deliver_at = (CANCEL, command.cancel.deliver_at) if operation == "cancel" else (SKIP, 0)
    if mask:
        for entry_partition, ledger_id, entry_id, batch_index in positions:
            if partition >= 0 and entry_partition not in (-1, partition):
                reason = f"partition {entry_partition} is not {command.topic}"
                rows += _answers(command, [None], Result.INVALID, reason, (ledger_id, entry_id, batch_index))
                continue
            rows.append(
                (
                    command.request_id,
                    kind,
                    topic,
                    max(partition, entry_partition),
                    mask,
                    ledger_id,
                    entry_id,
                    batch_index,
                    deliver_at,
                    command.issued_by,
                    command.issued_at,
                    None,
                    None,
                    None,
                )
            )
    return rows


def _positions(command: ControlCommand) -> Iterable[tuple[int, int, int, int]]:
    """(partition, ledger, entry, batch index) of each message or entry that the command names."""
    if command.HasField("cancel"):
        cancel = command.cancel
        _check(cancel.ledger_id, cancel.entry_id)
        if cancel.deliver_at <= 0:
            raise InvalidCommand(f"deliver_at must be positive: {cancel.deliver_at}")
        yield -1, cancel.ledger_id, cancel.entry_id, -1
        return
    if not command.skip.entries:
        raise InvalidCommand("a skip of no entries")
    for entry in command.skip.entries:
        _check(entry.ledger_id, entry.entry_id)
        partition = entry.partition if entry.HasField("partition") else -1
        for batch_index in dict.fromkeys(entry.batch_indexes) or [-1]:
            if batch_index > MAX_BATCH_INDEX or (batch_index < 0 and entry.batch_indexes):
                raise InvalidCommand(f"batch index {batch_index} is out of range")
            yield max(partition, -1), entry.ledger_id, entry.entry_id, batch_index


def _check(ledger_id: int, entry_id: int) -> None:
    if ledger_id < 0 or not 0 <= entry_id <= MAX_ENTRY_ID:
        raise InvalidCommand(f"no such position can be: {ledger_id}:{entry_id}")


def _topic(name: str, routes: Routes) -> tuple[str | None, int]:
    """The route's topic that a name means, and the partition, -1 for the whole."""
    if "://" not in name:
        name = f"persistent://{name if name.count('/') == 2 else f'public/default/{name}'}"
    if name in routes:
        return name, -1
    topic, separator, partition = name.rpartition("-partition-")
    if separator and topic in routes and partition.isdigit():
        return topic, int(partition)
    return None, -1


def _answers(
    command: ControlCommand,
    subscriptions: Iterable[str | None],
    result: int,
    reason: str,
    position: tuple[int, int, int] = (-1, -1, -1),
) -> list[tuple[object, ...]]:
    head = (command.request_id, ANSWER, command.topic, -1, 0, *position, 0, command.issued_by, command.issued_at)
    return [(*head, subscription, result, reason) for subscription in subscriptions]


def command_positions(commands: pa.Table) -> pa.Table:
    """The distinct (ledger_id, entry_id) that commands are to be applied to."""
    applied = commands.filter(pc.not_equal(commands["kind"], ANSWER))
    return applied.select(["ledger_id", "entry_id"]).group_by(["ledger_id", "entry_id"]).aggregate([])
