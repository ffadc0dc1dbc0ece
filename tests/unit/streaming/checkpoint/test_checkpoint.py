"""A checkpoint is gone on from only where the tables do not know more than it does."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from checkpoint_from_tables.new_checkpoint import rebuild_checkpoint
from conf.settings import Settings
from streaming.batch_schema import ShardStatus, output_rows, status_row
from streaming.checkpoint.batch_input import BatchInput, Received
from streaming.checkpoint.checkpoint import VERSION, Checkpoint, CheckpointError
from streaming.checkpoint.offset import Offset
from streaming.checkpoint.payload_files import ASIDE_BYTES, PayloadFiles, PayloadSweep
from streaming.crash_recovery import begin
from streaming.operator.schemas import OUTPUT_SCHEMA
from streaming.sinks import batch_sink
from streaming.sinks.batch_sink import BatchSink
from streaming.start_checks import StartError
from tests.support.tracker.messages import messages
from tests.support.warehouse.rebuilt import without_destinations
from tests.support.warehouse.tables import TOPIC, make, rows
from tracker.messages import concat, with_columns
from tracker.payload_refs import files_of
from tracker.schemas import OUTCOME_ROWS
from tracker.store import StateLostError
from tracker.tick import Effects as TickEffects
from tracker.wire.delaylake_pb2 import Result
from warehouse import durable
from warehouse.delta.fencing import FencedError
from warehouse.delta.tables import Tables, WarehouseError
from warehouse.maintenance.maintain import maintain
from warehouse.queries.index_rows import cancels_to_index, to_index, to_rejects
from warehouse.schemas import SCHEMAS

pytestmark = pytest.mark.slow


class Start:
    """A job's start, and what it writes afterwards."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings, self.folder = settings, folder
        self.tables = Tables(settings.warehouse)
        self.checkpoint = Checkpoint(folder)
        begin(settings, self.tables, self.checkpoint)

    def batch(self, tick: int, table: str | None = None, lane: str = "") -> None:
        """Begins a batch, and writes to a table in it. The batch before it has its offset, too."""
        for number in range(max(0, tick - 1), tick + 1):
            if not (self.folder / "query" / "offsets" / str(number)).exists():
                _log(self.folder, number, Offset(tick=number))
        if table is not None:
            self.tables.append(table, rows(table, [{"ledger_id": tick}]), {self.checkpoint.app_id + lane: tick})


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return make(tmp_path)[0]


def test_a_job_goes_on_from_its_own_checkpoint(settings: Settings, tmp_path: Path) -> None:
    job = Start(settings, tmp_path / "c")
    name = job.checkpoint.app_id
    job.batch(1, "delayed_index")
    job.batch(2, "deliveries", ":planned2")
    job.batch(3)
    again = Start(settings, tmp_path / "c")
    assert again.checkpoint.app_id == name
    assert again.tables.epoch == again.checkpoint.epoch == 2
    with pytest.raises(FencedError):
        job.batch(4, "entries")


def test_a_start_that_stood_still_leaves_the_app_id_that_another_start_has_given(tmp_path: Path) -> None:
    """On a volume that both write. Under another app id what is sent and committed again counts as new."""
    first = Checkpoint(tmp_path).app_id
    with mock.patch.object(Path, "exists", return_value=False):  # as it was when the other one looked
        late = Checkpoint(tmp_path).app_id
    assert late == first
    assert [file.name for file in (tmp_path / "query").iterdir()] == ["application"]


def test_a_checkpoint_on_a_file_system_without_hard_links_gets_an_app_id_too(tmp_path: Path) -> None:
    with mock.patch.object(os, "link", side_effect=OSError(errno.EOPNOTSUPP, "not supported")):
        first = Checkpoint(tmp_path).app_id
    assert Checkpoint(tmp_path).app_id == first
    assert [file.name for file in (tmp_path / "query").iterdir()] == ["application"]


@pytest.mark.parametrize(
    ("table", "lane"),
    [
        ("delayed_index", ""),
        ("outcomes", ""),
        ("entries", ""),
        ("rejects", ""),
        ("rejects", ":planned0:refused"),
        ("deliveries", ":short63"),
        ("deliveries", f":planned5:{TOPIC}:b"),  # what came late, of a destination that could not be written
        ("deliveries", f":short0:{TOPIC}:"),
    ],
)
def test_a_copy_of_the_checkpoint_is_refused_once_the_tables_have_more(
    settings: Settings, tmp_path: Path, table: str, lane: str
) -> None:
    job = Start(settings, tmp_path / "c")
    job.batch(1, "delayed_index")
    shutil.copytree(tmp_path / "c", tmp_path / "copy")
    job.batch(2, table, lane)
    with pytest.raises(CheckpointError, match=rf"went back: it ends with tick 1, {table} with 2; run `delaylake rebu"):
        Start(settings, tmp_path / "copy")
    job.batch(3, "entries")  # who was there first is not hindered by it
    Start(settings, tmp_path / "c")


def test_a_copy_from_before_the_last_start_is_refused(settings: Settings, tmp_path: Path) -> None:
    Start(settings, tmp_path / "c").batch(1, "delayed_index")
    shutil.copytree(tmp_path / "c", tmp_path / "copy")
    Start(settings, tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"older than the last start .* \(epoch 1, the warehouse has 2\)"):
        Start(settings, tmp_path / "copy")


def test_a_copy_without_any_offset_is_refused(settings: Settings, tmp_path: Path) -> None:
    job = Start(settings, tmp_path / "c")
    shutil.copytree(tmp_path / "c", tmp_path / "copy")
    job.batch(1, "rejects")
    with pytest.raises(CheckpointError, match="went back"):
        Start(settings, tmp_path / "copy")


def test_a_start_that_is_killed_while_it_takes_over_starts_again(settings: Settings, tmp_path: Path) -> None:
    Start(settings, tmp_path / "c").batch(1, "delayed_index")
    for at in range(5):
        n = 0

        def killed(
            self: Tables, name: str, epoch: int, at: int = at, begins: Callable[..., Any] = Tables._begin
        ) -> None:
            nonlocal n
            if n == at:
                raise KeyboardInterrupt
            n += 1
            begins(self, name, epoch)

        with mock.patch.object(Tables, "_begin", killed), pytest.raises(KeyboardInterrupt):
            Start(settings, tmp_path / "c")
    Start(settings, tmp_path / "c").batch(2, "delayed_index")


TORN = ("", "v1\n", 'v1\n{"batchWatermarkMs":0}', 'v1\n{"batchWatermarkMs":0}\n{"tick')


@pytest.mark.parametrize("text", TORN)
def test_an_offset_that_a_loss_of_power_has_torn_was_not_begun(settings: Settings, tmp_path: Path, text: str) -> None:
    query = tmp_path / "c" / "query"
    Start(settings, tmp_path / "c").batch(1, "delayed_index")
    (query / "commits").mkdir()
    for number in range(3):
        (query / "commits" / str(number)).write_text("v1\n{}")
    (query / "offsets" / "2").write_text(text)
    assert Start(settings, tmp_path / "c").checkpoint.newest_offset() == Offset(tick=1)
    assert sorted(file.name for file in (query / "offsets").iterdir()) == ["0", "1"]
    assert sorted(file.name for file in (query / "commits").iterdir()) == ["0", "1"]


@pytest.mark.parametrize("text", ["", "v1\n", 'v1\n{"next'])
def test_a_batch_whose_commit_a_loss_of_power_has_torn_runs_again(
    settings: Settings, tmp_path: Path, text: str
) -> None:
    query = tmp_path / "c" / "query"
    Start(settings, tmp_path / "c").batch(1, "delayed_index")
    (query / "commits").mkdir()
    for number, content in enumerate(["v1\n{}", text]):
        (query / "commits" / str(number)).write_text(content)
    assert Start(settings, tmp_path / "c").checkpoint.newest_offset() == Offset(tick=1)
    assert [file.name for file in (query / "commits").iterdir()] == ["0"]


@pytest.mark.parametrize("text", TORN)
def test_a_damaged_offset_is_refused_with_what_to_do(settings: Settings, tmp_path: Path, text: str) -> None:
    job = Start(settings, tmp_path / "c")
    job.batch(1)
    job.batch(2, "entries")
    offsets = tmp_path / "c" / "query" / "offsets"
    whole = (offsets / "1").read_text()
    (offsets / "1").write_text(text)  # and the one after it is there
    with pytest.raises(CheckpointError, match=r"offset 1 of .* is damaged .*rebuild --discard-checkpoint"):
        Start(settings, tmp_path / "c")
    (offsets / "1").write_text(whole)
    (offsets / "2").write_text(text)  # and a table has rows of its batch
    with pytest.raises(CheckpointError, match=r"ends with tick 1, entries with 2; run `delaylake rebuild"):
        Start(settings, tmp_path / "c")


def _log(folder: Path, number: int, end: Offset) -> None:
    (folder / "query" / "offsets").mkdir(parents=True, exist_ok=True)
    (folder / "query" / "offsets" / str(number)).write_text("v1\n{}\n" + json.dumps(end.to_json()))


@pytest.mark.parametrize("replaced", [7, 8])
def test_an_offset_that_a_job_which_hung_in_its_write_has_replaced_is_refused(
    settings: Settings, tmp_path: Path, replaced: int
) -> None:
    """The batch of the other offset may have been sent: another one would get its ticks and sequence ids."""
    job = Start(settings, tmp_path / "job")
    nothing = Received(messages([]), messages([]))
    taken_in = BatchInput(job.checkpoint.input_folder)
    for number in range(5, 9):
        end = Offset(tick=number + 3, run_id="own")
        _log(job.folder, number, end)
        taken_in.write(end, nothing)
        taken_in.forget(Offset(tick=number + 2))  # Spark has committed the batch before
    job.checkpoint.check_offsets()
    job.checkpoint.sync_begun(8)
    begin(settings, Tables(settings.warehouse), job.checkpoint)

    hung = Offset(tick=replaced + 3, run_id="overtaken")
    _log(job.folder, replaced, hung)
    if replaced == 8:  # and goes on, until it looks at the epoch
        taken_in.write(hung, nothing)
    refused = f"another job has replaced offset {replaced} of the checkpoint"
    with pytest.raises(CheckpointError, match=refused):
        begin(settings, Tables(settings.warehouse), job.checkpoint)
    with pytest.raises(CheckpointError, match=refused):
        job.checkpoint.sync_begun(replaced)


def test_a_checkpoint_that_lacks_the_offset_before_its_last_is_refused(settings: Settings, tmp_path: Path) -> None:
    """An older copy was put back while a job ran, which went on in it: Spark fails there, as often as it is started."""
    job = Start(settings, tmp_path / "c")
    for tick in (1, 2, 3):
        job.batch(tick)
    (tmp_path / "c" / "query" / "offsets" / "2").unlink()
    with pytest.raises(CheckpointError, match=r"has offset 3, and not 2: .*delaylake rebuild"):
        Start(settings, tmp_path / "c")


def test_input_whose_offset_the_disk_has_lost_keeps_no_job_from_its_tick(settings: Settings, tmp_path: Path) -> None:
    job = Start(settings, tmp_path / "job")
    taken_in = BatchInput(job.checkpoint.input_folder)
    kept, lost, other = Offset(tick=3), Offset(tick=4, run_id="before"), Offset(tick=4, run_id="after")
    _log(job.folder, 0, kept)
    for end in (kept, lost):
        taken_in.write(end, Received(messages([]), messages([])))
    begin(settings, Tables(settings.warehouse), job.checkpoint)
    assert taken_in.read(kept) is not None
    assert taken_in.read(lost) is None
    _log(job.folder, 1, other)
    taken_in.write(other, Received(messages([]), messages([])))
    job.checkpoint.sync_begun(1)
    begin(settings, Tables(settings.warehouse), job.checkpoint)


def test_the_number_of_shards_outlives_a_kill_in_mid_write(settings: Settings, tmp_path: Path) -> None:
    """As releases before wrote it in place."""
    Start(settings, tmp_path / "c").batch(1)
    for shard in range(2):
        (tmp_path / "c" / "query" / "state" / "0" / str(shard)).mkdir(parents=True)
    (tmp_path / "c" / "query" / "shards").write_text("")
    Start(settings, tmp_path / "c")
    more = settings.model_copy(update={"tracker": settings.tracker.model_copy(update={"shards": 3})})
    (tmp_path / "c" / "query" / "shards").write_text("")
    with pytest.raises(StartError, match=r"of 2 shards, and tracker\.shards is 3"):
        Start(more, tmp_path / "c")


def test_a_checkpoint_without_payloads_in_files_is_gone_on_from_and_then_closed_to_earlier_programs(
    settings: Settings, tmp_path: Path
) -> None:
    Start(settings, tmp_path / "c").batch(1)
    version = tmp_path / "c" / "query" / "version"
    version.write_text("2")
    Start(settings, tmp_path / "c")
    assert version.read_text() == "4"


def test_no_query_starts_again_on_a_checkpoint_that_was_removed_or_replaced(settings: Settings, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    Start(settings, folder).batch(1)
    checkpoint = Checkpoint(folder)
    epoch = checkpoint.epoch
    checkpoint.app_id_of(epoch)
    shutil.copytree(folder, tmp_path / "older")
    checkpoint.epoch = epoch + 1
    checkpoint.app_id_of(epoch + 1)
    for put_in_place in (None, tmp_path / "older"):
        shutil.rmtree(folder)
        if put_in_place is not None:
            shutil.copytree(put_in_place, folder)
        with pytest.raises(CheckpointError, match="was removed or replaced while the job ran"):
            checkpoint.app_id_of(epoch + 1)
        folder.mkdir(exist_ok=True)


def test_a_checkpoint_of_another_version_is_refused(settings: Settings, tmp_path: Path) -> None:
    Start(settings, tmp_path / "c").batch(1)
    version = tmp_path / "c" / "query" / "version"
    assert version.read_text() == str(VERSION)
    version.write_text(str(VERSION + 1))
    with pytest.raises(CheckpointError, match=r"newer delaylake .* start that one, or run `delaylake rebuild"):
        Start(settings, tmp_path / "c")
    version.unlink()  # of 0.1.0
    with pytest.raises(
        CheckpointError, match=r"older delaylake .* \(version 1, .* from 2\): run `delaylake rebuild --disc"
    ):
        Start(settings, tmp_path / "c")
    tables = Tables(settings.warehouse)
    assert tables.newest_epoch() == 1, "it has not taken the warehouse over"
    with without_destinations():
        rebuild_checkpoint(settings.model_copy(update={"checkpoint": f"file:{tmp_path}/c"}), discards_checkpoint=True)
    assert Start(settings, tmp_path / "c").tables.epoch == 3


def test_an_older_program_refuses_a_newer_warehouse(settings: Settings, tmp_path: Path) -> None:
    job = Start(settings, tmp_path / "c")
    with mock.patch("warehouse.delta.tables.VERSION", 3):
        Start(settings, tmp_path / "c")
    before = {name: job.tables.version(name) for name in SCHEMAS}
    words = r"a newer delaylake has written the warehouse .* \(version 3, this one knows 2\): use that one"
    with pytest.raises(WarehouseError, match=words):
        Start(settings, tmp_path / "c")
    with pytest.raises(WarehouseError, match=words):
        maintain(settings)
    with pytest.raises(WarehouseError, match=words):
        rebuild_checkpoint(settings, discards_checkpoint=True)
    assert {name: job.tables.version(name) for name in SCHEMAS} == before
    assert (tmp_path / "c" / "query").exists()


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files and folders that the system was told to write to the disk."""
    paths: list[str] = []

    def sync(path: Path) -> None:
        path.stat()
        paths.append(path.name)

    monkeypatch.setattr(durable, "_sync", sync)
    return paths


def test_what_spark_writes_is_on_the_disk_once_it_is_relied_on(
    settings: Settings, tmp_path: Path, synced: list[str]
) -> None:
    job = Start(settings, tmp_path / "c")
    state = tmp_path / "c" / "query" / "state" / "0" / "1"
    state.mkdir(parents=True)
    synced.clear()
    job.batch(3)
    job.checkpoint.sync_begun(3)
    assert synced == ["2", "3", "offsets"]
    (state / "3.changelog").touch()
    job.checkpoint.sync_done()
    assert sorted(synced) == ["1", "2", "2", "3", "3", "3.changelog", "offsets", "offsets"]
    synced.clear()
    (state / "4.changelog").touch()
    (state / "3.changelog").unlink()
    job.checkpoint.sync_soon()
    job.checkpoint.sync_done()
    assert sorted(synced) == ["1", "4.changelog"]


def test_rows_are_on_the_disk_when_they_count_as_written(settings: Settings, tmp_path: Path, synced: list[str]) -> None:
    job = Start(settings, tmp_path / "c")
    synced.clear()
    job.batch(1, "entries")
    commit, data = sorted(name for name in synced if "." in name)
    assert commit == f"{job.tables.version('entries'):020}.json"
    assert data.endswith(".parquet")
    assert sorted(name for name in synced if "." not in name) == ["_delta_log", "entries"]


class Effects:
    """A releaser, and a publisher of outcomes, that note what they are given."""

    lookahead_millis = sending = 0
    name = "outcomes"

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def submit(self, *_: object) -> None:
        self._events.append("released")

    def publish(self, *_: object) -> None:
        self._events.append("told")


def one_outcome(operation: str = "SKIP") -> list[dict[str, object]]:
    """What the operator puts out in a batch in which a skip is applied, or a message with a request id comes."""
    status = ShardStatus(shard=0, tick=1, now=1, cutoff=1, run_id="r", next_due=1, counts={"large_bytes": 0})
    outcome = {"request_id": "r", "topic": TOPIC, "subscription": "b", "partition": -1, "ledger_id": 1, "entry_id": 1}
    outcome |= {"batch_index": -1, "result": int(Result.APPLIED), "operation": operation}
    effects = TickEffects(outcomes=pa.Table.from_pylist([outcome], schema=OUTCOME_ROWS))
    rows = [*output_rows(0, 1, effects), status_row(status)]
    return [dict(zip(OUTPUT_SCHEMA.names, row, strict=True)) for row in rows]


def test_nothing_of_a_batch_is_released_or_told_before_it_is_on_the_disk_nor_by_who_was_overtaken(
    settings: Settings, tmp_path: Path, synced: list[str]
) -> None:
    job = Start(settings, tmp_path / "c")
    rows = one_outcome()
    batch, overtaken = mock.Mock(), mock.Mock()
    batch.toArrow.return_value.to_pylist.return_value = rows
    effects: Any = Effects(synced)
    sink = BatchSink(job.tables, effects, effects, job.checkpoint, "r", lambda status: None)
    job.batch(1)
    synced.clear()
    sink(batch, 1)
    assert synced[:4] == ["0", "1", "offsets", "released"]
    commit = f"{job.tables.version('outcomes'):020}.json"
    assert synced.index(commit) < synced.index("told")
    synced.clear()
    sink(batch, 1)
    assert synced[-1] == "told", "the job had ended in between: it is told, and not written down twice"
    assert commit == f"{job.tables.version('outcomes'):020}.json"

    def overtake() -> mock.Mock:
        Start(settings, tmp_path / "c")
        synced.clear()
        return mock.Mock(to_pylist=lambda: rows)

    overtaken.toArrow = overtake
    for late in (overtaken, batch):
        with pytest.raises(FencedError):
            sink(late, 1)
        assert not {"released", "told"} & set(synced)


def test_a_message_with_a_request_id_is_released_once_its_answer_is_in_the_table(
    settings: Settings, tmp_path: Path, synced: list[str]
) -> None:
    job = Start(settings, tmp_path / "c")
    batch, effects = mock.Mock(), Effects(synced)
    batch.toArrow.return_value.to_pylist.return_value = one_outcome("SCHEDULE")
    sink = BatchSink(job.tables, cast(Any, effects), cast(Any, effects), job.checkpoint, "r", lambda status: None)
    job.batch(1)
    synced.clear()
    sink(batch, 1)
    commit = f"{job.tables.version('outcomes'):020}.json"
    assert synced.index(commit) < synced.index("released") < synced.index("told")


def test_large_payloads_are_in_the_tables_and_their_files_are_gone_when_nobody_needs_them(
    settings: Settings, tmp_path: Path
) -> None:
    job = Start(settings, tmp_path / "c")
    payloads = [os.urandom(ASIDE_BYTES + i) for i in range(4)]
    files = PayloadFiles(job.checkpoint.payload_folder)
    aside = []
    for tick, payload in enumerate(payloads, 1):
        aside.append(files.put_aside(messages([(1, tick, 9_000)], payload=payload), tick))
    names = [next(iter(files_of(rows))) for rows in aside]
    releaser: Any = mock.Mock(lookahead_millis=0, sending=0)
    sweep = PayloadSweep(job.checkpoint.payload_folder)
    sink = BatchSink(job.tables, releaser, mock.Mock(), job.checkpoint, "r", lambda status: None, sweep)

    def batch(tick: int, referred: list[str], **effects: pa.Table) -> None:
        job.batch(tick)
        status = ShardStatus(
            shard=0,
            tick=tick,
            now=1,
            cutoff=1,
            run_id="r",
            next_due=1,
            counts={"large_bytes": 0},
            payload_files=referred,
        )
        output = [*output_rows(0, tick, TickEffects(**effects)), status_row(status)]
        listed = [dict(zip(OUTPUT_SCHEMA.names, row, strict=True)) for row in output]
        sink(mock.Mock(toArrow=lambda: mock.Mock(to_pylist=lambda: listed)), tick)

    batch(5, names)
    rejected = with_columns(aside[2], reason=pa.array(["no"]))
    batch(6, names[3:], bucket=concat(aside[:2]), rejects=rejected)
    index = job.tables.query("delayed_index", "SELECT entry_id, payload, payload_bytes FROM delayed_index ORDER BY 1")
    assert index["payload"].to_pylist() == payloads[:2]
    assert index["payload_bytes"].to_pylist() == [ASIDE_BYTES, ASIDE_BYTES + 1]
    assert job.tables.query("rejects", "SELECT payload FROM rejects")["payload"].to_pylist() == payloads[2:3]
    assert len(list(job.checkpoint.payload_folder.iterdir())) == 4, "the batch may run again"
    batch(7, names[3:])
    assert [file.name for file in job.checkpoint.payload_folder.iterdir()] == names[3:]


@pytest.mark.parametrize("table", ["delayed_index", "rejects"])
def test_many_bytes_are_appended_in_one_commit_and_their_payloads_read_part_by_part(
    table: str, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_sink, "_PART_BYTES", 3 * ASIDE_BYTES)
    job = Start(settings, tmp_path / "c")
    files = PayloadFiles(job.checkpoint.payload_folder)
    payloads = [os.urandom(ASIDE_BYTES) if n % 5 else b"small" for n in range(40)]
    bucket = concat(messages([(1, n, 9_000 - n)], payload=payload) for n, payload in enumerate(payloads))
    cancels = pa.table({"operation": ["CANCEL"], "topic": [TOPIC], "ledger_id": [1], "entry_id": [99]})
    others = [cancels_to_index(cancels, 1)] if table == "delayed_index" else []
    to_rows = to_index if table == "delayed_index" else to_rejects
    read: list[int] = []
    bring_back = PayloadFiles.bring_back

    def noted(files: PayloadFiles, rows: pa.Table) -> pa.Table:
        rows = bring_back(files, rows)
        read.append(rows.nbytes)
        return rows

    monkeypatch.setattr(PayloadFiles, "bring_back", noted)
    sink = BatchSink(job.tables, mock.Mock(), mock.Mock(), job.checkpoint, "r", lambda status: None)
    before = job.tables.version(table)
    for _ in range(2):  # the second time it is there
        sink._append_messages(table, files.put_aside(bucket, 1), to_rows, 1, *others)
    assert job.tables.version(table) == before + 1
    assert len(read) > 10
    assert max(read) < 5 * ASIDE_BYTES
    index = job.tables.query(table, f"SELECT * FROM {table}")
    if others:
        assert sorted(index["operation"].to_pylist()) == ["CANCEL"] + ["DELAY"] * 40
    found = dict(zip(index["entry_id"].to_pylist(), index["payload"].to_pylist(), strict=True))
    assert [found[n] for n in range(40)] == payloads
    [file] = Path(job.tables.path(table)).glob("*.parquet")
    footer = pq.ParquetFile(file).metadata
    assert footer.num_row_groups > 10, "a few rows are read without the others"

    bucket = files.put_aside(bucket, 2)
    for file in job.checkpoint.payload_folder.iterdir():
        file.unlink()
    with pytest.raises(StateLostError, match="is gone: run `delaylake rebuild"):
        sink._append_messages(table, bucket, to_rows, 2, *others)
    assert job.tables.version(table) == before + 1


def test_who_is_overtaken_while_a_batch_is_carried_out_tells_nothing_of_it(
    settings: Settings, tmp_path: Path, synced: list[str]
) -> None:
    """Stopped after the look at the epoch, and continued when another job has decided otherwise."""
    job = Start(settings, tmp_path / "c")
    batch = mock.Mock()
    batch.toArrow.return_value.to_pylist.return_value = one_outcome()
    told: Any = Effects(synced)
    releaser: Any = mock.Mock(submit=lambda *_: Start(settings, tmp_path / "c"))
    job.batch(1)
    with pytest.raises(FencedError):
        BatchSink(job.tables, releaser, told, job.checkpoint, "r", lambda status: None)(batch, 1)
    assert "told" not in synced
