"""What a start does after a kill -9, or any other end of the run before, in this order.

1. The checkpoint is of this program and these settings (`check_checkpoint`).
2. Tables lack nothing, and an incomplete end of a table's log is removed (`begin`).
3. Checkpoint and tables go together: no table has a later tick (`Checkpoint.check_not_behind`).
4. The job takes the warehouse over: from here on an older run that was only paused commits nothing more.
5. The broker answers (`wait_for_broker`), and no destination has messages of a later tick (`check_sent`).
6. The broker is the one that was read, and has no later outcome (`check_broker`).
7. Spark runs the last batch again, whose offset it had logged. `streaming.checkpoint.batch_input` has its messages, and
   `streaming.checkpoint.time_zone_files` its time zones. Its tables take no row twice, its releases are not sent.
8. The run's first tick dispatches again all that is in flight, under the same names and sequence ids:
   `tracker.in_flight`. What a lane's table has is not sent again (`streaming.release.driver.releases`), nor what the
   broker has.
9. What was open for unwritable destinations goes on (`streaming.release.driver.unwritable_destinations`).
10. What no seal epoch made durable was not acknowledged: Pulsar sends it again, and known entries are skipped.

`recover` does the first five, `check_broker` is called before each run of the query; the rest is in the modules named.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

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

_RESTART_SECONDS = 1.0
_FAILURES_IN_A_ROW = 10
_FULL_DISK_SECONDS = 5.0
_GOOD_RUN_SECONDS = 60


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


def recover(
    settings: Settings, tables: Tables, checkpoint: Checkpoint, alerts: Alerts, stopping: threading.Event
) -> None:
    """Does steps 1 to 5 of a start.

    Args:
        settings: of the job.
        tables: of the warehouse.
        checkpoint: of the job, which holds its lock.
        alerts: records that the broker does not answer.
        stopping: ends waiting for the broker.

    Raises:
        StartError, CheckpointError, WarehouseError: settings, checkpoint, tables and destinations do not match.
        FencedError: another job has taken the warehouse over in the meantime.
    """
    begin(settings, tables, checkpoint)
    wait_for_broker(settings, alerts, stopping)
    check_sent(settings, checkpoint)


class GivenUpError(DelayLakeError):
    """The query has failed too often in a row. The message is one line."""


@dataclass
class Restarts:
    """When a query that has failed starts again. Time and failures are arguments.

    Attributes:
        failures: how often it has failed in a row; a run of _GOOD_RUN_SECONDS ends a row.
    """

    failures: int = 0

    def pause_after(self, error: str, run_seconds: float, is_disk_full: bool) -> float:
        """Returns how long to wait after a failure, seconds.

        Args:
            error: the failure, one line.
            run_seconds: how long the query has run.
            is_disk_full: whether a disk is full: waiting loses nothing, and only room helps, so it counts as none.

        Raises:
            GivenUpError: the query fails again and again.
        """
        if is_disk_full:
            return _FULL_DISK_SECONDS
        self.failures = 1 if run_seconds > _GOOD_RUN_SECONDS else self.failures + 1
        if self.failures >= _FAILURES_IN_A_ROW:
            raise GivenUpError(f"the query failed {self.failures} times in a row: {error}")
        return _RESTART_SECONDS * self.failures


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
        NewClusterError: a source topic was made again, in another cluster.
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
