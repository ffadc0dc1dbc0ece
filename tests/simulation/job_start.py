"""A start of `delaylake run` in a simulation: what `streaming.query.DelayedDelivery` does, on a simulated Spark."""

from __future__ import annotations

import itertools
import json
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from status.alerts import Alerts
from status.status_writer import StatusWriter
from streaming.batch_schema import shard_keys
from streaming.checkpoint.checkpoint import Checkpoint
from streaming.checkpoint.payload_files import PayloadSweep
from streaming.checkpoint.prepared import last_routes
from streaming.crash_recovery import Restarts, begin, check_broker, check_sent
from streaming.operator.processor import Operator
from streaming.release.driver.releaser import Releaser, Run
from streaming.release.feedback import FeedbackFile
from streaming.sinks.batch_sink import BatchSink
from streaming.sinks.outcomes import OutcomePublisher
from streaming.source.reader import SourceReader
from tests.simulation.scheduler import Process
from tests.simulation.spark import Context, Query, State, StateDamagedError
from warehouse.delta.tables import Tables

if TYPE_CHECKING:
    from tests.simulation.world import World


class JobStart:
    """A start of the job.

    Args:
        process: in which it runs.
    """

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process
        self._settings = world.settings
        self._number = world.starts
        self._tables = Tables(self._settings.warehouse)
        self._checkpoint = Checkpoint(world.checkpoint)
        self._alerts = Alerts()

    def run(self) -> None:
        begin(self._settings, self._tables, self._checkpoint)
        if self._tables.epoch == self._tables.newest_epoch():  # else it stood still until another one had begun
            self._world.begun(self._settings)
        check_sent(self._settings, self._checkpoint)
        self._world.point("begun")
        if self._world.source_topics.are_made or self._world.terminated.are_made:
            self._world.scheduler.start(self._process, "status", self._tell)
        restarts = Restarts()
        for number in itertools.count():
            began = self._world.scheduler.now
            self._checkpoint.check_offsets()
            check_broker(self._settings, self._checkpoint)
            folder = self._world.disk.folder / f"run {self._number} {number}"
            folder.mkdir()
            try:
                error = self._run_once(number, folder)
            finally:  # where it is killed, too: its machine's tasks end with it, but for those that are sending
                shutil.rmtree(folder)
            self._tables.check_epoch()
            self._world.scheduler.wait(restarts.pause_after(error, self._world.scheduler.now - began, False))

    def _tell(self) -> None:
        """Makes the job's status each second, as it writes it."""
        writer = StatusWriter(self._settings.warehouse, 0, self._alerts.current)
        while True:
            self._world.scheduler.wait(1.0)
            self._world.told(self._process, writer.status())

    def _run_once(self, number: int, folder: Path) -> str:
        """Runs the query until it ends; returns why."""
        world, settings, checkpoint, tables = self._world, self._settings, self._checkpoint, self._tables
        keys = shard_keys(settings.tracker.shard_count)
        payloads = PayloadSweep(checkpoint.payload_folder)
        app_id = checkpoint.app_id_of(tables.epoch or 0)
        run = Run(
            app_id,
            FeedbackFile(folder / "feedback.json"),
            last_routes(checkpoint.folder),
            None if world.is_on_cluster else folder,  # as on a cluster: `DelayedDelivery` gives none
            checkpoint.release_folder,
            payloads,
        )
        context: Any = Context(
            world.scheduler,
            world.faults,
            world.begin_executor,
            world.begin_worker,
            world.begin_on_cluster if world.is_on_cluster else None,
            world.task_attempts,
        )
        releaser = Releaser(context, settings, tables, run, lambda rows: None, self._alerts)
        self._alerts.follow(folder / "troubles.json")
        run_id = f"run{self._number}.{number}"
        outcomes = OutcomePublisher(settings, app_id, tables.check_epoch)
        sink = BatchSink(tables, releaser, outcomes, checkpoint, run_id, lambda status: None, payloads)
        reader = SourceReader(
            {
                "settings": settings.model_dump_json(),
                "run": run_id,
                "feedback": str(folder / "feedback.json"),
                "troubles": str(folder / "troubles.json"),
                "shard_keys": json.dumps(keys),
                "epoch": str(checkpoint.epoch),
            }
        )
        tracker = settings.tracker.model_dump_json()

        def operator(state: State) -> Operator:
            return Operator(state, keys, tracker, settings.warehouse)

        query = Query(
            checkpoint.folder / "query",
            reader,
            operator,
            keys,
            sink,
            world.point,
            world.faults,
            run_id,
            world.may_hang,
            partial(world.has_read, self._process),
        )
        ended: list[str] = []
        is_damaged: list[StateDamagedError] = []

        def run_query() -> None:
            try:
                query.run()
                ended.append("")
            except AssertionError as error:
                world.break_off(str(error))
            except StateDamagedError as error:
                is_damaged.append(error)
                ended.append(str(error))
            except Exception as error:
                ended.append(f"{type(error).__name__}: {error}")

        world.scheduler.start(self._process, "query", run_query)
        while not ended and releaser.failure is None:
            world.scheduler.wait(0.2)
        world.trace(f"{self._process.name}: the query ends: {ended or releaser.failure}")
        releaser.stop_ticks()
        releaser.stop()
        reader.stop()
        outcomes.close()
        if is_damaged:
            raise is_damaged[0]
        return releaser.failure or ended[0]
