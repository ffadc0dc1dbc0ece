"""What a job makes sure of before it goes on from a checkpoint, and its taking over of the warehouse."""

from __future__ import annotations

import logging

import pulsar

from conf.errors import DelayLakeError, one_line
from conf.settings import Settings
from streaming.checkpoint import Checkpoint
from streaming.new_cluster import check_topics
from streaming.outcomes import OutcomePublisher
from streaming.pulsar_client import AdminClient, PulsarError
from streaming.rebuild import Rebuilt
from streaming.sender import lane_names
from streaming.tables import SCHEMAS, Tables

_log = logging.getLogger(__name__)


class StartError(DelayLakeError):
    """The job can't start. The message is one line, and says what to do."""


def begin(settings: Settings, tables: Tables, checkpoint: Checkpoint) -> None:
    """Makes sure that the checkpoint and the tables go together, and takes the warehouse over.

    Raises:
        StartError, CheckpointError, WarehouseError: they don't; nothing was changed but for columns that were added.
    """
    checkpoint.check_version()
    tables.create(keep_versions_millis=settings.maintain.keep_versions_millis)
    rebuilt = Rebuilt(checkpoint.folder)
    if not checkpoint.has_query and rebuilt.offset is None:
        _require_empty(tables)
    _check_shards(checkpoint, rebuilt, settings.tracker.shards)
    epoch = tables.newest_epoch()
    checkpoint.check_not_behind(checkpoint.newest_offset(), _written(tables, checkpoint.application), epoch)
    # First here: a start that ends in between begins with the same one.
    checkpoint.epoch = max(epoch, checkpoint.epoch) + 1
    checkpoint.write_version()
    checkpoint.shards = settings.tracker.shards
    tables.take_over(checkpoint.epoch)


def check_broker(settings: Settings, checkpoint: Checkpoint) -> None:
    """Makes sure that the broker has what the checkpoint knows of, and that it does not know more.

    Where the broker does not answer nothing is made sure of: nothing can be read or sent then, either.

    Raises:
        NewClusterError: a source topic is not the one that was read.
        CheckpointError: outcomes have been told of later ticks than the checkpoint has.
    """
    newest = checkpoint.newest_offset() or Rebuilt(checkpoint.folder).offset
    if newest is None:
        return
    try:
        with AdminClient(settings.pulsar) as admin:
            check_topics(admin, newest.positions)
        told = OutcomePublisher(settings, checkpoint.application).last_tick()
        checkpoint.check_not_behind(newest, {settings.control.outcome_topic: told}, checkpoint.epoch)
    except (PulsarError, pulsar.PulsarException) as error:
        _log.warning("whether the broker has what was read and told before is not known: %s", one_line(error))


def _require_empty(tables: Tables) -> None:
    """A query that begins anew would deliver again what the tables have of an earlier one."""
    if (
        tables.sql("SELECT 1 FROM delayed_index LIMIT 1").num_rows
        or tables.sql("SELECT 1 FROM entries LIMIT 1").num_rows
    ):
        raise StartError("the warehouse has messages, but there is no checkpoint: run `delaylake rebuild` first")


def _check_shards(checkpoint: Checkpoint, rebuilt: Rebuilt, shards: int) -> None:
    """With another number of shards a message would be looked for in a state that does not have it."""
    known = checkpoint.shards or (rebuilt.shards if rebuilt.offset is not None else shards)
    if known != shards:
        raise StartError(
            f"the checkpoint is of {known} shards, and tracker.shards is {shards}: set it back, or change it with "
            "`delaylake rebuild --discard-checkpoint`"
        )


def _written(tables: Tables, application: str) -> dict[str, int]:
    """By whom a checkpoint's job has written to a table the last tick of it."""
    lanes = [f"{application}:{lane}" for lane in lane_names()]
    by_lane = tables.written_by("deliveries", lanes)
    return {name: tables.written(name, application) for name in SCHEMAS} | {"deliveries": max(by_lane)}
