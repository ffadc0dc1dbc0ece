"""Checks that a job may continue from its checkpoint, and takes the warehouse over."""

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
from status.alerts import NO_BROKER, Alerts
from streaming.checkpoint.checkpoint import Checkpoint
from streaming.checkpoint.prepared import PreparedState
from streaming.release.last_sent import last_sent
from streaming.sinks.outcomes import last_published
from warehouse.backup.marker import read_marker
from warehouse.delta.checkpoint_hint import drop_wrong_hint
from warehouse.delta.tables import Tables
from warehouse.schemas import LATER, MESSAGE_SCHEMAS, SCHEMAS

_log = logging.getLogger(__name__)

_ANSWER_SECONDS = 5  # how long the broker has to answer at the start
_RETRY_SECONDS = 2  # from one attempt to the next


class StartError(DelayLakeError):
    """The job can't start. The message is one line, and says what to do."""


def check_checkpoint(settings: Settings, checkpoint: Checkpoint) -> None:
    """Checks that this program, with these settings, can continue from a checkpoint. Changes nothing.

    Raises:
        StartError: the checkpoint has another number of shards, so shards would not find their messages in its state.
        CheckpointError: another version of the program has written the checkpoint, or it is damaged.
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
    """Checks that checkpoint and tables match, and takes the warehouse over: raises its epoch.

    Raises:
        StartError, CheckpointError, WarehouseError: they do not match. Nothing has been changed, except that missing
            tables and columns were created.
        FencedError: another job has taken the warehouse over in the meantime.
    """
    check_checkpoint(settings, checkpoint)
    try:
        if read_marker(settings.warehouse) is not None:
            raise StartError(
                f"the warehouse {settings.warehouse} is a backup: run `delaylake rebuild --discard-checkpoint` first"
            )
        tables.create(keep_versions_millis=settings.maintain.keep_versions_millis)
        for name in (*LATER, MESSAGE_SCHEMAS):
            drop_wrong_hint(tables.path(name))
    except (OSError, DeltaError) as error:
        raise StartError(
            f"the tables can't be made in {settings.warehouse} ({one_line(error)}): see `warehouse` in the settings"
        ) from error
    if not checkpoint.has_query and PreparedState(checkpoint.folder).offset is None:
        _require_empty(tables)
    epoch, newest = tables.newest_epoch(), checkpoint.newest_offset()
    checkpoint.check_not_behind(newest, _written(tables, checkpoint.app_id), epoch)
    # The checkpoint gets the epoch first: after a crash in between, the next start does not take it for an old copy.
    checkpoint.epoch = max(epoch, checkpoint.epoch) + 1
    checkpoint.write_version()
    checkpoint.shards = settings.tracker.shards
    tables.take_over(checkpoint.epoch)


def wait_for_broker(settings: Settings, alerts: Alerts, stopping: threading.Event) -> None:
    """Waits until the broker answers, or `stopping` is set. Until it answers there is an alert NO_BROKER.

    An error such as missing rights is an answer, too: whoever needs those rights reports it.
    """
    url = settings.pulsar.service_url
    # One client for all attempts: a new client would try the first of several hosts again.
    client = connect(settings.pulsar, operation_timeout_seconds=_ANSWER_SECONDS)
    try:
        while not stopping.is_set():
            try:
                client.get_topic_partitions(settings.control.topic)
            except (pulsar.ConnectError, pulsar.NotConnected, pulsar.ServiceUnitNotReady, pulsar.Timeout) as error:
                alerts.begin(NO_BROKER, url, f"it does not answer ({error}): trying again until it does")
                stopping.wait(_RETRY_SECONDS)
                continue
            except pulsar.PulsarException as error:
                _log.debug("asking the broker: %s", error)
            alerts.end(NO_BROKER, url)
            break
    finally:
        client.close()


def check_broker(settings: Settings, checkpoint: Checkpoint) -> None:
    """Checks that source topics are those that the checkpoint has read, and that no outcome is of a later tick.

    Does nothing where the broker does not answer: then nothing can be read or sent, either.

    Raises:
        NewClusterError: a source topic was made anew, in another cluster.
        CheckpointError: the outcome topic has outcomes of later ticks than the checkpoint.
    """
    newest = checkpoint.newest_offset() or PreparedState(checkpoint.folder).offset
    if newest is None:
        return
    try:
        with AdminClient(settings.pulsar) as admin:
            check_topics(admin, newest.positions)
        published = last_published(settings, checkpoint.app_id, newest)
        checkpoint.check_not_behind(newest, {settings.control.outcome_topic: published}, checkpoint.epoch)
    except PulsarError as error:
        _log.warning("whether the broker has what was read and published before is not known: %s", one_line(error))


def check_sent(settings: Settings, checkpoint: Checkpoint) -> None:
    """Checks that no destination has messages of a later tick than the checkpoint, as far as the broker answers.

    Raises:
        CheckpointError: a destination has.
    """
    if (newest := checkpoint.newest_offset()) is not None:
        sent = last_sent(settings, checkpoint, newest)
        checkpoint.check_not_behind(newest, sent, checkpoint.epoch)


def _require_empty(tables: Tables) -> None:
    """Raises StartError where tables have rows: a new query would deliver these messages again."""
    if (
        tables.sql("SELECT 1 FROM delayed_index LIMIT 1").num_rows
        or tables.sql("SELECT 1 FROM entries LIMIT 1").num_rows
    ):
        raise StartError("the warehouse has messages, but there is no checkpoint: run `delaylake rebuild` first")


def _written(tables: Tables, app_id: str) -> dict[str, int]:
    """Returns by table the last tick whose rows a checkpoint's job has written to it; -1: none.

    The names of its writers begin with the app id; those of lanes go on after a colon: see `ReleaseRecords.writer`.
    """
    return {
        name: max(
            (n for app, n in tables.transactions(name).items() if app == app_id or app.startswith(f"{app_id}:")),
            default=-1,
        )
        for name in SCHEMAS
    }
