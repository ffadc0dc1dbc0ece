"""The checks before a job goes on from a checkpoint, and its taking over of the warehouse."""

from __future__ import annotations

import logging
import threading

import pulsar
from deltalake.exceptions import DeltaError

from broker.client import PulsarError, connect
from broker.clusters.new_cluster import check_topics
from broker.pulsar_admin.admin_rest import AdminClient
from conf.errors import DelayLakeError, one_line
from conf.settings import Settings
from status.troubles import NO_BROKER, Troubles
from streaming.checkpoint.checkpoint import Checkpoint
from streaming.checkpoint.prepared import PreparedState
from streaming.release.last_sent import last_sent
from streaming.sinks.outcomes import last_published
from warehouse.backup.marker import read_marker
from warehouse.delta.tables import Tables
from warehouse.schemas import SCHEMAS

_log = logging.getLogger(__name__)

_ANSWER_SECONDS = 5  # how long the broker is given to answer at the start
_RETRY_SECONDS = 2  # from one try to the next


class StartError(DelayLakeError):
    """The job can't start. The message is one line, and says what to do."""


def check_checkpoint(settings: Settings, checkpoint: Checkpoint) -> None:
    """Makes sure that this program and its settings can go on from a checkpoint. Changes nothing.

    Raises:
        StartError: it has another number of shards: messages would be looked for in a state that lacks them.
        CheckpointError: another version has written it, or it is damaged.
    """
    checkpoint.check_version()
    rebuilt, shards = PreparedState(checkpoint.folder), settings.tracker.shards
    known = checkpoint.shards or (rebuilt.shards if rebuilt.offset is not None else shards)
    if known != shards:
        raise StartError(
            f"the checkpoint is of {known} shards, and tracker.shards is {shards}: set it back, or change it with "
            "`delaylake rebuild --discard-checkpoint`"
        )


def begin(settings: Settings, tables: Tables, checkpoint: Checkpoint) -> None:
    """Makes sure that the checkpoint and the tables go together, and takes the warehouse over.

    Raises:
        StartError, CheckpointError, WarehouseError: they don't. Nothing was changed, but for tables and columns that
            were missing and are there now.
        FencedError: somebody else has taken the warehouse over in the meantime.
    """
    check_checkpoint(settings, checkpoint)
    try:
        if read_marker(settings.warehouse) is not None:
            raise StartError(
                f"the warehouse {settings.warehouse} is a backup: run `delaylake rebuild --discard-checkpoint` first"
            )
        tables.create(keep_versions_millis=settings.maintain.keep_versions_millis)
    except (OSError, DeltaError) as error:
        raise StartError(
            f"the tables can't be made in {settings.warehouse} ({one_line(error)}): see `warehouse` in the settings"
        ) from error
    if not checkpoint.has_query and PreparedState(checkpoint.folder).offset is None:
        _require_empty(tables)
    epoch, newest = tables.newest_epoch(), checkpoint.newest_offset()
    checkpoint.check_not_behind(newest, _written(tables, checkpoint.app_id), epoch)
    # In the checkpoint before the tables: after a crash in between it is not taken for one that is behind.
    checkpoint.epoch = max(epoch, checkpoint.epoch) + 1
    checkpoint.write_version()
    checkpoint.shards = settings.tracker.shards
    tables.take_over(checkpoint.epoch)


def wait_for_broker(settings: Settings, troubles: Troubles, stopping: threading.Event) -> None:
    """Waits until the broker answers, or the job is told to stop; a trouble says so meanwhile, and after a stop, too.

    Any other answer than what was asked for, such as that rights are missing, is left to whoever needs it.
    """
    url = settings.pulsar.service_url
    # One client for all tries: of several hosts a new one begins with the first again.
    client = connect(settings.pulsar, operation_timeout_seconds=_ANSWER_SECONDS)
    try:
        while not stopping.is_set():
            try:
                client.get_topic_partitions(settings.control.topic)
            except (pulsar.ConnectError, pulsar.NotConnected, pulsar.ServiceUnitNotReady, pulsar.Timeout) as error:
                troubles.begin(NO_BROKER, url, f"it does not answer ({error}): trying again until it does")
                stopping.wait(_RETRY_SECONDS)
                continue
            except pulsar.PulsarException as error:
                _log.debug("asking the broker: %s", error)
            troubles.end(NO_BROKER, url)
            break
    finally:
        client.close()


def check_broker(settings: Settings, checkpoint: Checkpoint) -> None:
    """Makes sure that the broker has what the checkpoint knows of, and that it does not know more.

    Does nothing where the broker does not answer: nothing can be read or sent then, either.

    Raises:
        NewClusterError: a source topic is not the one that was read.
        CheckpointError: outcomes have been published of later ticks than the checkpoint has.
    """
    newest = checkpoint.newest_offset() or PreparedState(checkpoint.folder).offset
    if newest is None:
        return
    try:
        with AdminClient(settings.pulsar) as admin:
            check_topics(admin, newest.positions)
        published = last_published(settings, checkpoint.app_id, newest)
        checkpoint.check_not_behind(newest, {settings.control.outcome_topic: published}, checkpoint.epoch)
    except (PulsarError, pulsar.PulsarException) as error:
        _log.warning("whether the broker has what was read and published before is not known: %s", one_line(error))


def check_sent(settings: Settings, checkpoint: Checkpoint) -> None:
    """Makes sure that no destination has messages of later ticks than the checkpoint, as far as the broker answers.

    Raises:
        CheckpointError: one has.
    """
    if (newest := checkpoint.newest_offset()) is not None:
        sent = last_sent(settings, checkpoint, newest)
        checkpoint.check_not_behind(newest, sent, checkpoint.epoch)


def _require_empty(tables: Tables) -> None:
    """Raises StartError where tables have rows: a query that begins anew would deliver those messages again."""
    if (
        tables.sql("SELECT 1 FROM delayed_index LIMIT 1").num_rows
        or tables.sql("SELECT 1 FROM entries LIMIT 1").num_rows
    ):
        raise StartError("the warehouse has messages, but there is no checkpoint: run `delaylake rebuild` first")


def _written(tables: Tables, app_id: str) -> dict[str, int]:
    """Returns by table the last tick of which a checkpoint's job has written to it; -1: none.

    Its writers are called by its app id, and those of a lane have more after a colon: see `WrittenDown.writer`.
    """
    return {
        name: max(
            (n for app, n in tables.transactions(name).items() if app == app_id or app.startswith(f"{app_id}:")),
            default=-1,
        )
        for name in SCHEMAS
    }
