"""Replaces a lost checkpoint by one that is rebuilt from the tables."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from pathlib import Path

import psutil
from deltalake.exceptions import DeltaError
from filelock import Timeout

from checkpoint_from_tables.rebuild.context import SILENT, DestinationReading, Reports
from checkpoint_from_tables.rebuild.rebuild import last_entries, rebuild
from checkpoint_from_tables.restore.another_broker import change_broker
from checkpoint_from_tables.restore.rewind import check_alone, check_broker, rewind
from conf.errors import DelayLakeError, one_line
from conf.settings import Settings, local_path
from status.job_status import STALE_MILLIS, known_status
from streaming.checkpoint.checkpoint import Checkpoint, CheckpointError, checkpoint_lock
from streaming.checkpoint.prepared import PreparedState
from streaming.checkpoint.shard_count import with_shard_count
from streaming.source.watch.beginnings import Beginning, Beginnings
from streaming.source.watch.undecided_gaps import UndecidedGaps
from warehouse.backup.marker import read_marker, remove_marker
from warehouse.backup.restoring import restore
from warehouse.delta.tables import Tables, exists
from warehouse.maintenance.maintain import lock
from warehouse.schemas import SCHEMAS

# The folders of checkpoints that were moved aside, named by the time, and how many of them stay.
_OLD = "query.[0-9]*"
_OLD_KEPT = 2


class RebuildError(DelayLakeError):
    """The checkpoint can't be rebuilt."""


def rebuild_checkpoint(
    settings: Settings,
    discards_checkpoint: bool,
    reports: Reports = SILENT,
    without: Collection[str] = (),
    is_another_broker: bool = False,
) -> dict[str, int]:
    """Rebuilds the checkpoint of the settings from the tables.

    Args:
        discards_checkpoint: whether to move an existing checkpoint aside; False: a checkpoint is an error.
        reports: as of `rebuild`.
        without: destinations that are not to be read.
        is_another_broker: as of `import_and_rebuild`.

    Returns:
        the counts that `import_and_rebuild` returns.

    Raises:
        RebuildError: the job or maintenance runs, there is a checkpoint that is not to be discarded, a table is
            missing, or `without` names a topic that is no destination.
        UnreadableDestinationError: a destination can't be read.
        PulsarError, pulsar.PulsarException: the source topics can't be read.
    """
    known = {one.destination for route in settings.routes for one in route.subscriptions}
    if unknown := sorted(set(without) - known):
        raise RebuildError(f"{unknown[0]} is no destination: those are {', '.join(sorted(known))}")
    missing = [name for name in SCHEMAS if not exists(settings.warehouse, name)]
    if missing:
        raise RebuildError(
            f"no table {missing[0]} in the warehouse {settings.warehouse}: there is nothing to rebuild from"
        )
    return import_and_rebuild(settings, discards_checkpoint, lambda tables: None, reports, without, is_another_broker)


def import_and_rebuild(
    settings: Settings,
    discards_checkpoint: bool,
    bring_in: Callable[[Tables], None],
    reports: Reports,
    without: Collection[str] = (),
    is_another_broker: bool = False,
) -> dict[str, int]:
    """Takes the warehouse over, appends to its tables, and rebuilds the checkpoint from them.

    The old checkpoint is moved aside first, so that no job continues from it after an interruption. A backup becomes an
    ordinary warehouse, and its job reads the source topics again from the end of the backup; the warehouse that was
    backed up is taken over, too, if it can be reached.

    Args:
        discards_checkpoint: whether to move an existing checkpoint aside; False: a checkpoint is an error.
        bring_in: called with the tables, to append messages to them.
        reports: as of `rebuild`.
        without: destinations that are not to be read.
        is_another_broker: whether the warehouse is a backup whose messages are of another broker than the settings'.

    Returns:
        the counts that `rebuild` returns; with another broker those of `BrokerChange`, too.

    Raises:
        RebuildError: the job or maintenance runs, or there is a checkpoint that is not to be discarded; with another
            broker, the warehouse is no backup, or the settings leave out replicated messages.
        UnreadableDestinationError: a destination can't be read.
        PulsarError, pulsar.PulsarException: the source topics can't be read.
        ConnectedError, NewClusterError: of a backup: see `check_alone` and `check_broker`.
    """
    if is_another_broker and settings.replicated != "all":
        raise RebuildError("with another broker set replicated: all, else what was replicated to it is left out")
    settings = with_shard_count(settings, is_new=True)
    checkpoint = Path(local_path(settings.checkpoint))
    try:
        with checkpoint_lock(checkpoint).acquire(timeout=1), lock(settings).acquire(timeout=60):
            query = checkpoint / "query"
            if query.exists() and not discards_checkpoint:
                raise RebuildError(f"there is a checkpoint in {query}: --discard-checkpoint moves it aside")
            tables = Tables(settings.warehouse)
            is_known_broker = False
            if (backup := read_marker(settings.warehouse)) is not None:
                check_alone(settings)
                is_known_broker = is_another_broker or (
                    backup.made_at > 0 and check_broker(settings, tables, last_entries(tables, "entries"))
                )
                restore(settings.warehouse)
            elif is_another_broker:
                raise RebuildError(
                    f"the warehouse {settings.warehouse} is no backup: only a backup is restored with another broker"
                )
            tables.create(keep_versions_millis=settings.maintain.keep_versions_millis)
            if backup is not None and is_known_broker:
                _overtake(settings, backup.source, reports)
            epoch = max(tables.newest_epoch(), Checkpoint(checkpoint).epoch) + 1
            if query.exists():
                # The name has microseconds, because a script may rebuild twice within a second.
                beginnings = _beginnings_of_unread(settings, checkpoint) if backup is None else {}
                gaps = UndecidedGaps(settings).all() if backup is None else []
                query.rename(checkpoint / f"query.{datetime.now(UTC):%Y%m%dT%H%M%S%f}")
                for name, beginning in beginnings.items():
                    Beginnings(settings).keep(name, beginning)
                if gaps:
                    UndecidedGaps(settings).add(gaps)
            tables.take_over(epoch)
            _wait_for_overtaken(settings, settings.warehouse, reports)
            bring_in(tables)
            change = None
            if backup is not None and is_another_broker:
                change = change_broker(settings, tables, backup.made_at, reports.on_progress, reports.on_warning)
            reading = DestinationReading(without, None if change is None else change.renumbering)
            found = rebuild(settings, tables, checkpoint, reports=reports, destinations=reading)
            if change is not None:
                found |= change.counts
            elif backup is not None:
                rewind(settings, tables, last_entries(tables, "entries"), backup.made_at)
            if backup is not None:
                remove_marker(settings.warehouse)
            for old in sorted(checkpoint.glob(_OLD))[:-_OLD_KEPT]:
                shutil.rmtree(old, ignore_errors=True)
            return found
    except Timeout:
        raise RebuildError(
            f"a job or `delaylake maintain` runs on the checkpoint {checkpoint}: stop it first"
        ) from None


def _beginnings_of_unread(settings: Settings, checkpoint: Path) -> dict[str, Beginning]:
    """Returns where topic partitions began of which the job with the old checkpoint had not read any message."""
    try:
        newest = Checkpoint(checkpoint).newest_offset() or PreparedState(checkpoint).offset
    except (CheckpointError, OSError, ValueError):
        return {}
    read = newest.positions if newest is not None else {}
    return {name: beginning for name, beginning in Beginnings(settings).all().items() if name not in read}


def _overtake(settings: Settings, source: str, reports: Reports) -> None:
    """Takes over the warehouse that was backed up, if it still exists: a job that starts there again ends."""
    if source == local_path(settings.warehouse):
        return
    try:
        if not all(exists(source, name) for name in SCHEMAS):
            return
        tables = Tables(source)
        tables.take_over(tables.newest_epoch() + 1)
    except (OSError, DeltaError) as error:
        reports.on_warning(f"{source} can't be taken over ({one_line(error)}): make sure that no job goes on there")
        return
    _wait_for_overtaken(settings, source, reports)


def _wait_for_overtaken(settings: Settings, warehouse: str, reports: Reports) -> None:
    """Waits until a job that may still run, on another checkpoint, must have noticed that it is fenced.

    The rebuild finds the messages that this job sends until then at the destinations. On a cluster an executor that is
    cut off from its driver sends what it was given, up to a lookahead, also when the driver has ended.
    """
    status = known_status(warehouse)
    if status is None:
        return
    has_ended = status.state not in ("starting", "running")
    has_ended |= status.host == socket.gethostname() and not psutil.pid_exists(status.process_id)
    if has_ended and not status.is_on_cluster:  # its workers end with it, within 0.2 s
        return
    wait = max(STALE_MILLIS, settings.release.lookahead_ceiling_millis)
    while (left := status.updated_at + wait - time.time_ns() // 1_000_000) > 0:
        reports.on_progress("warehouse", "ms to wait for a job that ran just now", left)
        time.sleep(min(left / 1000, 0.5))
