"""What `delaylake run` says before it is ready."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from conf.files import FolderError
from conf.settings import PulsarSettings, Settings
from jobs.commands.run import _update_routes, run_job
from jobs.options import Output
from jobs.reporter import Reporter
from status.status_writer import StatusWriter
from streaming.checkpoint.checkpoint import Checkpoint
from streaming.checkpoint.offset import Offset
from tests.conftest import Run
from tests.support.tracker.messages import TOPIC
from warehouse.routes.known_routes import RoutesError, known_routes
from warehouse.routes.missing_routes import missing_routes

OTHER = "persistent://public/default/other"


def settings(folder: Path, **routes: list[str]) -> Settings:
    topics = {"t": TOPIC, "other": OTHER}
    return Settings(
        warehouse=f"file:{folder}/warehouse",
        checkpoint=f"file:{folder}/checkpoint",
        routes=[{"source": topics[t], "subscriptions": [{"name": n} for n in names]} for t, names in routes.items()],  # type: ignore[arg-type]
    )


def last_run(folder: Path, offset: Offset) -> None:
    """Leaves the offset log of a run, as Spark writes it."""
    offsets = folder / "checkpoint" / "query" / "offsets"
    offsets.mkdir(parents=True)
    for number in (9, 10):
        (offsets / str(number)).write_text(f"v1\n{{}}\n{json.dumps(offset.to_json() if number == 10 else {})}")
    (offsets / ".11.crc").touch()
    Checkpoint(folder / "checkpoint").write_version()


def test_a_missing_broker_is_said_before_anything_is_started_and_asked_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"pulsar://127.0.0.1:{free.getsockname()[1]}"
    said = []

    @contextmanager
    def spark(*_: object) -> Iterator[None]:
        said.extend(caplog.messages)
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr("jobs.commands.run._spark", spark)
    of = settings(tmp_path, t=["a"]).model_copy(update={"pulsar": PulsarSettings(service_url=url)})
    with pytest.raises(KeyboardInterrupt):
        run_job(of, Reporter(Output.TEXT, 0, 1))
    assert said == [f"no broker at {url}, trying again"]


@pytest.mark.parametrize("name", ["warehouse", "checkpoint"])
def test_a_folder_that_can_not_be_made_is_said_before_that_there_is_no_broker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    (tmp_path / "file").touch()
    of = settings(tmp_path, t=["a"]).model_copy(
        update={"pulsar": PulsarSettings(service_url="pulsar://127.0.0.1:1"), name: f"file:{tmp_path}/file/{name}"}
    )
    with pytest.raises(FolderError, match=rf"file/{name} can't be made .*`{name}` in the settings"):
        run_job(of, Reporter(Output.TEXT, 0, 1))
    assert not caplog.messages


def test_the_settings_file_is_named_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, delaylake_here: Run
) -> None:
    monkeypatch.setattr("jobs.commands.run.configure", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    Path("conf").mkdir()
    Path("conf/delaylake.yaml").write_text("routes: []")
    done = delaylake_here("run", "--output", "json")
    assert (done.returncode, done.stdout) == (1, "")
    assert caplog.messages[0] == f"settings: {tmp_path}/conf/delaylake.yaml"


def test_what_has_changed_since_the_last_run_is_said_line_by_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last_run(tmp_path, Offset(tick=3, routes=known_routes(settings(tmp_path, t=["a", "b"], other=["x"])).to_json()))
    now = settings(tmp_path, t=["c", "b"])
    status = StatusWriter(now.warehouse, 1)
    lines = [
        f"{OTHER}: the route was taken out: it is not read, and what waits is held back",
        f"{TOPIC}: subscription a was taken out: it gets nothing more",
        f"{TOPIC}: subscription c was added",
    ]
    missing = _update_routes(now, Reporter(Output.TEXT, 0, 1), status)
    assert (capsys.readouterr().out.splitlines(), [*missing]) == (lines, [OTHER])
    assert [*status.status().routes] == [OTHER, TOPIC]
    _update_routes(now, Reporter(Output.JSON, 0, 1), status)
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert events == [{"event": "changed", "text": line} for line in lines]


def test_a_start_without_a_checkpoint_keeps_what_the_last_run_had_routes_for(tmp_path: Path) -> None:
    """It is refused, and the rebuild that it asks for has to know them."""
    before, now = settings(tmp_path, t=["a", "b"], other=["x"]), settings(tmp_path, other=["x"])
    with StatusWriter(before.warehouse, 1) as status:
        status.routes(known_routes(before).to_json())
    for _ in range(2):
        with StatusWriter(now.warehouse, 1) as status:
            assert [*_update_routes(now, Reporter(Output.TEXT, 0, 1), status)] == [TOPIC]
        with StatusWriter(now.warehouse, 1):
            pass  # it ends before it looks at the routes
        [missing] = missing_routes(now)
        assert (missing.source, [s.name for s in missing.subscriptions]) == (TOPIC, ["a", "b"])


def test_the_first_run_says_nothing_of_routes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = settings(tmp_path, t=["a"])
    status = StatusWriter(now.warehouse, 1)
    assert not _update_routes(now, Reporter(Output.TEXT, 0, 1), status)
    assert capsys.readouterr().out == ""
    assert [*status.status().routes] == [TOPIC]


def test_more_subscriptions_than_a_checkpoint_can_tell_apart_are_refused_at_the_start(tmp_path: Path) -> None:
    before = settings(tmp_path, t=[f"s{i}" for i in range(60)])
    last_run(tmp_path, Offset(tick=3, routes=known_routes(before).to_json()))
    now = settings(tmp_path, t=["a", "b", "c", "d"])
    with pytest.raises(RoutesError, match="64 subscriptions"):
        _update_routes(now, Reporter(Output.TEXT, 0, 1), StatusWriter(now.warehouse, 1))


def test_the_job_goes_on_when_nobody_reads_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `delaylake run --output json | head -1`."""
    reader, writer = os.pipe()
    with open(writer, "w") as out:
        monkeypatch.setattr("sys.stdout", out)
        reporter = Reporter(Output.JSON, 0, 1)
        reporter.standby()
        assert json.loads(os.read(reader, 1000)) == {"event": "standby"}
        os.close(reader)
        reporter.changed(["one", "two"])
        reporter.standby()
