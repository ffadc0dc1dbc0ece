"""What a start decides: whether checkpoint, tables and topics go together.

Nothing is asked here. Facts are arguments, and what is against a start is an error with a line that says what to do.
`crash_recovery.py` asks for the facts, in its order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from conf.errors import DelayLakeError
from streaming.checkpoint.checkpoint import OLDEST_VERSION, REPAIR, VERSION, CheckpointError


class StartError(DelayLakeError):
    """The job can't start. The message is one line, and says what to do."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFacts:
    """What a checkpoint says of itself.

    Attributes:
        folder: of the checkpoint.
        version: of its format; None: it does not say.
        has_query: whether a query has run on it.
        shards: the number of shards of its state; None: it has none.
        prepared_shards: that of a prepared state; None: there is no prepared state.
        epoch: the last one in which a job ran on it; 0: none.
    """

    folder: str
    version: int | None = None
    has_query: bool = False
    shards: int | None = None
    prepared_shards: int | None = None
    epoch: int = 0

    @property
    def is_new(self) -> bool:
        """Whether neither a query nor a rebuild has been there."""
        return not self.has_query and self.prepared_shards is None


@dataclass(frozen=True, kw_only=True)
class WarehouseFacts:
    """What the tables say.

    Attributes:
        has_messages: whether a message is in them; not asked where the checkpoint is not new.
        epoch: the newest one in which a job has taken them over; 0: none.
        last_ticks: by table the last tick whose rows the checkpoint's job has written; -1: none.
    """

    has_messages: bool = False
    epoch: int = 0
    last_ticks: Mapping[str, int] = field(default_factory=dict)


def check_program(checkpoint: CheckpointFacts, shards: int) -> None:
    """Checks that this program, with these settings, can continue from a checkpoint.

    Args:
        checkpoint: read before anything of it that depends on its version.
        shards: as the settings have them.

    Raises:
        CheckpointError: another version of the program has written it.
        StartError: it is of another number of shards, so shards would not find their messages in its state.
    """
    version = checkpoint.version or (1 if checkpoint.has_query else VERSION)
    if version > VERSION:
        raise CheckpointError(
            f"a newer delaylake has written the checkpoint {checkpoint.folder} (version {version}, this one knows "
            f"{VERSION}): start that one, or {REPAIR}"
        )
    if version < OLDEST_VERSION:
        raise CheckpointError(
            f"an older delaylake has written the checkpoint {checkpoint.folder} (version {version}, this one goes on "
            f"from {OLDEST_VERSION}): {REPAIR}"
        )
    known = checkpoint.shards or checkpoint.prepared_shards or shards
    if known != shards:
        raise StartError(
            f"the checkpoint is of {known} shards, and tracker.shards is {shards}: set it back, or change it with "
            "`delaylake rebuild --discard-checkpoint`"
        )


def check_no_backup(warehouse: str, is_backup: bool) -> None:
    """Checks that a warehouse is none that was copied, before anything in it is made.

    Raises:
        StartError: it is a backup, whose tables need not go together.
    """
    if is_backup:
        raise StartError(f"the warehouse {warehouse} is a backup: run `delaylake rebuild --discard-checkpoint` first")


def check_tables(checkpoint: CheckpointFacts, newest_tick: int | None, warehouse: WarehouseFacts) -> int:
    """Checks that checkpoint and tables go together; returns the epoch in which the job takes the tables over.

    Args:
        checkpoint: before the start.
        newest_tick: of the checkpoint's last batch that was begun; None: there is none.
        warehouse: before the start.

    Raises:
        StartError: a new query would deliver messages again that the tables have.
        CheckpointError: the checkpoint is an old copy, or another job has run on the tables since.
    """
    if checkpoint.is_new and warehouse.has_messages:
        raise StartError("the warehouse has messages, but there is no checkpoint: run `delaylake rebuild` first")
    if warehouse.epoch > checkpoint.epoch:
        raise CheckpointError(
            f"the checkpoint {checkpoint.folder} is older than the last start of a job, or rebuild, on the warehouse "
            f"(epoch {checkpoint.epoch}, the warehouse has {warehouse.epoch}): it was put back, or is another job's; "
            f"{REPAIR}"
        )
    check_not_behind(checkpoint.folder, newest_tick, warehouse.last_ticks)
    return max(warehouse.epoch, checkpoint.epoch) + 1


def check_not_behind(checkpoint: str, newest_tick: int | None, last_ticks: Mapping[str, int]) -> None:
    """Checks that a checkpoint is no old copy: tables and topics have nothing of later ticks.

    A job that continued from an old copy would give other messages the ticks and sequence ids that tables and broker
    already have; they would drop these messages as repetitions.

    Args:
        checkpoint: its folder.
        newest_tick: of its last batch that was begun; None: there is none.
        last_ticks: by table or topic the last tick whose rows or messages the checkpoint's job has written; -1: none.

    Raises:
        CheckpointError: the checkpoint is an old copy.
    """
    tick = -1 if newest_tick is None else newest_tick
    where, last = max(last_ticks.items(), key=lambda item: item[1], default=("", -1))
    if last > tick:
        raise CheckpointError(
            f"the checkpoint {checkpoint} went back: it ends with tick {tick}, {where} with {last}; {REPAIR}"
        )
