"""The program's manners: help everywhere, exit statuses, errors in one line, JSON alone on stdout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer

from conf.time_zones import TIME_ZONE_DATA_VERSION
from jobs import cli
from jobs.parsers import Misfire, parse_duration, parse_property, parse_time, recurrence_properties
from tests.conftest import RUN_SECONDS, Run

pytestmark = pytest.mark.slow


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


ALL_COMMANDS = list(commands(typer.main.get_command(cli.app)))


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["delaylake", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out, shown.err


def error_line(text: str) -> str:
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    return text


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", ALL_COMMANDS, ids=" ".join)
def test_every_command_explains_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], flag: str
) -> None:
    status, out, _ = run(capsys, monkeypatch, *command, flag)
    assert status == 0
    assert f"Usage: {' '.join(('delaylake', *command))}" in out
    assert "--config" in out


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(capsys, monkeypatch, "--version")[:2] == (0, "delaylake 0.1.0\n")
    assert run(capsys, monkeypatch, "version")[:2] == (
        0,
        f"delaylake 0.1.0\ntime zones {TIME_ZONE_DATA_VERSION}\n",
    )
    as_json = run(capsys, monkeypatch, "version", "--output", "json")[1]
    assert json.loads(as_json) == {"version": "0.1.0", "timeZones": TIME_ZONE_DATA_VERSION}


@pytest.mark.parametrize("path", ALL_COMMANDS, ids=" ".join)
def test_help_says_what_was_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, path: tuple[str, ...]
) -> None:
    """Rich takes `:-1:` for an emoji, and `[x]` for a style."""
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 300)
    status, out, _ = run(capsys, monkeypatch, *path, "--help")
    assert status == 0
    shown = " ".join(re.sub("[\u2500-\u257f]", " ", out).split())
    assert shown.isascii(), [c for c in shown if not c.isascii()]
    command: Any = typer.main.get_command(cli.app)
    for name in path:
        command = command.commands[name]
    for text in (command.help or "", *(getattr(p, "help", None) or "" for p in command.params)):
        assert " ".join(text.split()) in shown


@pytest.mark.parametrize("rule", ["FREQ=DAILY;UNTIL=20200101", "FREQ=DAILY;BYMONTHDAY=31;BYMONTH=1;UNTIL=20201231"])
def test_a_rule_without_a_time_to_come_is_told(delaylake_here: Run, rule: str) -> None:
    done = delaylake_here("schedules", "next", "3", "--repeat", rule)
    assert (done.returncode, done.stderr) == (0, "none: the rule has no such time\n")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nonsense"], "nonsense"),
        (["broker", "start", "--nonsense"], "--nonsense"),
        (["broker", "start", "--port", "99999"], "--port"),
        (["broker", "status", "--output", "yaml"], "yaml"),
        (["produce"], "TOPIC"),
        (["produce", "t"], "-m"),
        (["produce", "t", "-n", "0"], "-n"),
        (["run", "--report-every", "-1"], "--report-every"),
        (["produce", "t", "-m", "a", "--deliver-after", "10 m"], "as 90s"),
        (["produce", "t", "-m", "a", "--deliver-after", "10"], "10 what? 10s, 10m, 10h, 10d or 10ms"),
        (["topics", "reschedule", "t", "-s", "a", "--deliver-after", "10"], "10 what?"),
        (["produce", "t", "-m", "a", "--deliver-at", "2030-01-31T12:00:00"], "with a zone"),
        (["produce", "t", "-m", "a", "--deliver-at", "1900000000000", "--deliver-after", "1s"], "not both"),
        (["produce", "t", "-m", "a", "--deliver-at", "253402300800000"], "beyond the year 9999"),
        (["produce", "t", "-m", "a", "--deliver-at", "1960-01-01T00:00:00Z"], "negative"),
        (["produce", "t", "-m", "a", "--deliver-at", "1795251600"], "give milliseconds"),
        (["produce", "t", "-m", "a", "--deliver-after", "10s", "--property", "deliverAt=5"], "by an option of its own"),
        (["produce", "t", "-m", "a", "--property", "a=1", "--property", "a=2"], "a is given twice"),
        (["topics", "reschedule", "t", "-s", "a", "--deliver-at", "1795251600"], "give milliseconds"),
        (["topics", "cancel-delayed-message", "t", "-l", "-1", "-e", "0", "-t", "5"], "--ledgerId"),
        (["topics", "cancel-delayed-message", "t", "-l", "1", "-e", "0", "-t", "0"], "--deliverAt"),
        (["topics", "cancel-delayed-message", "t", "-l", "1", "-e", "0", "-t", "5", "-s", ""], "leave it out for all"),
        (["topics", "cancel-delayed-message", "t", "-l", "1", "--from-file", __file__], "not by both"),
        (["topics", "acknowledgeMessage", "t", "-l", "1", "-e", "9223372036854775808"], "--entryId"),
        (["topics", "skip-messages", "t", "-s", "a", "--messageId-triplet", "x"], "no message id"),
        (["topics", "skip-messages", "t", "-s", "a", "--messageId-base64", "!"], "no base64"),
        (["topics", "skip-messages", "t", "-s", "a", "--schedule-key", ""], "empty"),
        (["schedules", "show", "t", "1:"], "no message id"),
        (["backup", ""], "TARGET must be a path"),
        (["backup", "~/copy"], "TARGET must be a path"),
        (["backup", "s3://"], "TARGET must have a bucket"),
        (["schedules", "next", "3", "t", "--repeat", "0 9 * * *"], "a rule to try"),
        (["produce", "t", "-m", "a", "--property", "novalue"], "key=value"),
        (["produce", "t", "-m", "a", "--repeat", "61 * * * *"], "repeat"),
        (["produce", "t", "-m", "a", "--repeat", "@daily"], "cron expression"),
        (["produce", "t", "-m", "a", "--repeat", "@every 1d", "--time-zone", "Nowhere"], "timeZone"),
        (["produce", "t", "-m", "a", "--time-zone", "UTC"], "go with --repeat"),
        (["import", "t", "a.parquet", "--due-after", "1"], "it goes with --from"),
        (["import", "t", "--from-topic", "u", "--queue", "q"], "it goes with --from"),
        (["schedules", "pause", "t"], "--schedule-key"),
        (["schedules", "resume", "t", "7:0", "--schedule-key", "k"], "not by both"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: str
) -> None:
    status, out, err = run(capsys, monkeypatch, *arguments)
    assert (status, out) == (2, "")
    assert expected in error_line(err)
    assert "--help" in err


def test_an_expected_error_is_one_line_and_status_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for arguments in (
        ["--config", "nope.yaml", "produce", "t", "-m", "a"],
        ["produce", "t", "-m", "a", "--config", "nope.yaml"],
    ):
        status, out, err = run(capsys, monkeypatch, *arguments)
        assert (status, out) == (1, "")
        assert "nope.yaml" in error_line(err)


@pytest.mark.parametrize("command", ["cancel-delayed-message", "skip-messages"])
@pytest.mark.parametrize(("content", "expected"), [(b"\n \n", "has no ids"), (b"\xff\xfe", "is no text in UTF-8")])
def test_a_file_without_ids_is_an_error(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: str,
    content: bytes,
    expected: str,
) -> None:
    (file := tmp_path / "ids.txt").write_bytes(content)
    status, out, err = run(capsys, monkeypatch, "topics", command, "t", "-s", "a", "--from-file", str(file))
    assert (status, out) == (1, "")
    assert error_line(err) == f"error: {file} {expected}\n"


@pytest.mark.parametrize("command", [["import", "orders", "a.parquet"], ["rebuild"]], ids=str)
def test_without_a_broker_nothing_is_imported_or_rebuilt(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {
        "warehouse": f"file:{tmp_path}/warehouse",
        "checkpoint": f"file:{tmp_path}/checkpoint",
        "pulsar": {"service_url": "pulsar://127.0.0.1:1"},
        "routes": [{"source": "persistent://public/default/orders", "subscriptions": [{"name": "mail"}]}],
    }
    Path("settings.yaml").write_text(json.dumps(settings))
    pq.write_table(pa.table({"deliver_at": [1], "payload": [b""]}), "a.parquet")
    status, out, err = run(capsys, monkeypatch, "--config", "settings.yaml", *command)
    assert (status, out) == (1, "")
    assert error_line(err) == "error: no broker at pulsar://127.0.0.1:1\n"
    assert {one.name for one in tmp_path.iterdir()} == {"settings.yaml", "a.parquet"}


def test_an_unexpected_error_is_one_line_and_a_traceback_only_with_verbose(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("first\nsecond")

    monkeypatch.setattr("broker.standalone.EmbeddedBroker.status", fail)
    status, _, err = run(capsys, monkeypatch, "broker", "status")
    assert status == 1
    assert "RuntimeError: first second" in error_line(err)
    monkeypatch.setattr("sys.argv", ["delaylake", "broker", "status", "--verbose"])
    with pytest.raises(RuntimeError):
        cli.main()


def test_status_of_no_broker_is_json_alone_and_status_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    status, out, err = run(capsys, monkeypatch, "broker", "status", "--data-dir", str(tmp_path), "--output", "json")
    assert (status, err) == (1, "")
    assert json.loads(out)["state"] == "stopped"


def test_help_loads_neither_spark_nor_pulsar() -> None:
    loaded = "import sys, jobs.cli; print(sorted({'pyspark', 'pulsar', 'httpx'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_durations_have_a_unit() -> None:
    texts = ["250ms", "10s", "1.5m", "2h", "1d", "0s", " 10ms "]
    assert [parse_duration(text) for text in texts] == [250, 10_000, 90_000, 7_200_000, 86_400_000, 0, 10]
    for wrong in ("10", "1.5", "s", "-1s", "1w", "1 s 2", ""):
        with pytest.raises(typer.BadParameter):
            parse_duration(wrong)


def test_times_are_millis_or_iso_with_a_zone() -> None:
    assert parse_time("1900000000123") == 1_900_000_000_123
    assert parse_time("2030-01-31T12:00:00Z") == parse_time("2030-01-31T13:00:00+01:00") == 1_896_091_200_000
    for wrong in ("2030-01-31T12:00:00", "tomorrow", "-1", ""):
        with pytest.raises(typer.BadParameter):
            parse_time(wrong)


def test_a_property_may_hold_equals_signs() -> None:
    assert parse_property("a=b=c") == ("a", "b=c")
    assert parse_property("a=") == ("a", "")


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["topics", "get"], ["get-message-id-by-index"]),
        (["topics", "deliver"], ["deliver-now", "deliver-now-by-filter"]),
        (["pending", "topic", "--sub"], ["--subscription"]),
    ],
)
def test_bash_completes_commands_and_options(words: list[str], completed: list[str]) -> None:
    script = """
        source <(delaylake --show-completion)
        COMP_WORDS=(delaylake "$@"); COMP_CWORD=$#
        _delaylake_completion delaylake
        printf '%s\\n' "${COMPREPLY[@]}"
        """
    folder = Path(sys.executable).parent
    done = subprocess.run(
        ["bash", "-c", script, "bash", *words],
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=True,
    )
    assert sorted(done.stdout.split()) == completed


def test_the_reference_is_what_the_code_has() -> None:
    root = Path(__file__).parents[3]
    made = subprocess.run(
        [sys.executable, "docs/make_reference.py", "--check"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        check=False,
    )
    assert made.returncode == 0, "run docs/make_reference.py"


def test_options_of_a_recurring_message_become_its_properties() -> None:
    assert recurrence_properties(None, None, None, None, None) == {}
    assert recurrence_properties("0 9 * * MON", "Europe/Berlin", 1_900_000_000_000, 3, Misfire.SKIP) == {
        "repeat": "0 9 * * MON",
        "timeZone": "Europe/Berlin",
        "repeatUntil": "1900000000000",
        "repeatTimes": "3",
        "misfire": "skip",
    }
