"""What a start does after a kill -9, or any other end of the run before, in this order.

1. The checkpoint is of this program and these settings (`check_program`).
2. Tables lack nothing, and an incomplete end of a table's log is removed (`begin`). So is that of Spark's offsets and
   commits (`Checkpoint.mend_logs`).
3. Checkpoint and tables go together: no table has a later tick (`check_tables`). The last offsets are those of their
   input: an older run that hung in the write of one has not replaced it (`Checkpoint.check_offsets`).
4. The job takes the warehouse over: from here on an older run that was only paused commits nothing more. What that run
   has committed since 3 is looked at, too.
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
This module asks; what the answers mean is decided in `streaming.start_checks`, without files, tables and broker.
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
from streaming.start_checks import (
    CheckpointFacts,
    StartError,
    WarehouseFacts,
    check_no_backup,
    check_not_behind,
    check_program,
    check_tables,
)
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


def check_checkpoint(settings: Settings, checkpoint: Checkpoint) -> None:
    """Checks that this program, with these settings, can continue from a checkpoint. Changes nothing.

    Raises:
        StartError, CheckpointError: as of `check_program`, or the checkpoint is damaged.
    """
    check_program(_read_checkpoint(checkpoint), settings.tracker.shard_count)


def begin(settings: Settings, tables: Tables, checkpoint: Checkpoint) -> None:
    """Checks that checkpoint and tables match, and takes the warehouse over: raises its epoch.

    Raises:
        StartError, CheckpointError, WarehouseError: they do not match. Nothing has been changed, except that missing
            tables and columns were created, and torn files removed; and the epoch, where an older job has written just
            before it was overtaken.
        FencedError: another job has taken the warehouse over in the meantime.
    """
    found = _read_checkpoint(checkpoint)
    check_program(found, settings.tracker.shard_count)
    try:
        check_no_backup(settings.warehouse, read_marker(settings.warehouse) is not None)
        tables.create(keep_versions_millis=settings.maintain.keep_versions_millis)
        for name in (*LATER, MESSAGE_SCHEMAS):
            drop_wrong_hint(tables.path(name))
    except (OSError, DeltaError) as error:
        raise StartError(
            f"the tables can't be made in {settings.warehouse} ({one_line(error)}): see `warehouse` in the settings"
        ) from error
    checkpoint.mend_logs()
    newest = _newest_tick(checkpoint)
    checkpoint.check_offsets()
    epoch = check_tables(found, newest, _read_warehouse(tables, checkpoint, found.is_new))
    # The checkpoint gets the epoch first: after a crash in between, the next start does not take it for an old copy.
    checkpoint.epoch = epoch
    checkpoint.write_version()
    checkpoint.shards = settings.tracker.shard_count
    tables.take_over(epoch)
    checkpoint.remove_input_after(-1 if newest is None else newest)
    # An older run, which goes on from another copy of the checkpoint, may have committed until now.
    check_not_behind(found.folder, _newest_tick(checkpoint), _last_ticks(tables, checkpoint.app_id))


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


def is_good_run(seconds: float) -> bool:
    """Whether a query that has run for so long is one that works: an earlier failure is over."""
    return seconds > _GOOD_RUN_SECONDS


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
        self.failures = 1 if is_good_run(run_seconds) else self.failures + 1
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
        check_not_behind(str(checkpoint.folder), newest.tick, {settings.control.outcome_topic: published})
    except PulsarError as error:
        _log.warning("whether the broker has what was read and published before is not known: %s", one_line(error))


def check_sent(settings: Settings, checkpoint: Checkpoint) -> None:
    """Checks that no destination has messages of a later tick than the checkpoint, as far as the broker answers.

    Raises:
        CheckpointError: a destination has.
    """
    if (newest := checkpoint.newest_offset()) is not None:
        sent = last_sent(settings, checkpoint, newest)
        check_not_behind(str(checkpoint.folder), newest.tick, sent)


def _newest_tick(checkpoint: Checkpoint) -> int | None:
    newest = checkpoint.newest_offset()
    return None if newest is None else newest.tick


def _read_checkpoint(checkpoint: Checkpoint) -> CheckpointFacts:
    prepared = PreparedState(checkpoint.folder)
    return CheckpointFacts(
        folder=str(checkpoint.folder),
        version=checkpoint.version,
        has_query=checkpoint.has_query,
        shards=checkpoint.shards,
        prepared_shards=prepared.shards if prepared.is_there else None,
        epoch=checkpoint.epoch,
    )


def _read_warehouse(tables: Tables, checkpoint: Checkpoint, is_new: bool) -> WarehouseFacts:
    """Asks the tables. Of a new checkpoint only whether they have messages: to ask more, it would get an app id."""
    has_messages = is_new and bool(
        tables.sql("SELECT 1 FROM delayed_index LIMIT 1").num_rows
        or tables.sql("SELECT 1 FROM entries LIMIT 1").num_rows
    )
    last_ticks = {} if has_messages else _last_ticks(tables, checkpoint.app_id)
    return WarehouseFacts(has_messages=has_messages, epoch=tables.newest_epoch(), last_ticks=last_ticks)


def _last_ticks(tables: Tables, app_id: str) -> dict[str, int]:
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
