"""The embedded broker, started and stopped as a user does it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pulsar
import pytest

from broker.client import connect
from broker.standalone import BrokerError, EmbeddedBroker
from tests.conftest import PROGRAM, RUN_SECONDS, Run

TOPIC = "persistent://public/default/kept"


@pytest.fixture
def own(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """A broker of the test's own, not started. It would look each second for topics that nobody uses."""
    broker = EmbeddedBroker(tmp_path / "broker", {"brokerDeleteInactiveTopicsFrequencySeconds": "1"})
    yield broker
    broker.kill()


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or ended and waits for its parent to notice."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def error_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.fullmatch(r"error: .*\n", done.stderr), done.stderr
    return done.stderr


def exchange(broker: EmbeddedBroker, send: list[bytes], expect: list[bytes]) -> None:
    client = connect(broker.settings)
    producer = client.create_producer(TOPIC, producer_name="p", initial_sequence_id=0)
    for data in send:
        producer.send(data, sequence_id=producer.last_sequence_id() + 1 or 1)
    reader = client.create_reader(TOPIC, pulsar.MessageId.earliest)
    assert [reader.read_next(60_000).data() for _ in expect] == expect
    assert not reader.has_message_available()
    client.close()


def test_start_status_and_stop(delaylake: Run, own: EmbeddedBroker) -> None:
    folder = ["--data-dir", str(own.data_dir)]
    free = ["--port", "0", "--http-port", "0"]

    done = delaylake("broker", "start", *folder, *free, "--detach", "--output", "json")
    assert (done.returncode, done.stderr) == (0, "")
    started = json.loads(done.stdout)
    assert started["state"] == "ready"
    assert not has_ended(started["pid"])
    assert os.getsid(started["pid"]) == started["pid"], "a session of its own: Ctrl-C in the terminal does not end it"

    done = delaylake("broker", "status", *folder, "--output", "json")
    assert (done.returncode, json.loads(done.stdout)) == (0, started)
    done = delaylake("broker", "status", *folder)
    assert done.stdout.startswith(f"ready: {started['service_url']}, {started['admin_url']}")

    assert f"already runs on {own.data_dir}" in error_line(delaylake("broker", "start", *folder, *free))

    done = delaylake("broker", "stop", *folder)
    assert (done.returncode, done.stdout) == (0, "stopped\n")
    assert has_ended(started["pid"])
    done = delaylake("broker", "stop", *folder, "--output", "json")
    assert (done.returncode, json.loads(done.stdout)["stopped"]) == (0, False)
    done = delaylake("broker", "status", *folder)
    assert (done.returncode, done.stdout) == (1, f"stopped, data in {own.data_dir}\n")


def test_data_are_kept_across_a_kill_and_a_stop(own: EmbeddedBroker) -> None:
    own.start(port=0, http_port=0)
    port, http_port = (int(url.rsplit(":", 1)[1]) for url in (own.settings.service_url, own.settings.admin_url))
    exchange(own, [b"1", b"2"], [b"1", b"2"])
    pid = own.status().pid
    own.kill()
    assert pid is not None
    assert not psutil.pid_exists(pid), "all of its threads have ended, and who started it knows of it"
    assert own.status().state == "stopped"
    with pytest.raises(BrokerError, match="no broker runs"):
        _ = own.settings

    own.start(port, http_port)
    exchange(own, [b"3"], [b"1", b"2", b"3"])
    time.sleep(3)  # nobody is connected, and the topic has no subscription
    exchange(own, [], [b"1", b"2", b"3"])
    assert own.stop()
    own.start(port, http_port)
    exchange(own, [], [b"1", b"2", b"3"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_in_the_foreground_it_ends_with_the_program(own: EmbeddedBroker, number: signal.Signals) -> None:
    arguments = ["broker", "start", "--data-dir", str(own.data_dir), "--port", "0", "--http-port", "0"]
    with subprocess.Popen([str(PROGRAM), *arguments], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout
        assert program.stdout.readline().startswith("ready: pulsar://127.0.0.1:")
        pid = own.status().pid
        program.send_signal(number)
        assert program.wait(timeout=RUN_SECONDS) == 0
    assert pid is not None
    assert has_ended(pid)


def test_in_the_foreground_a_broker_that_dies_is_an_error(own: EmbeddedBroker) -> None:
    arguments = ["broker", "start", "--data-dir", str(own.data_dir), "--port", "0", "--http-port", "0"]
    with subprocess.Popen(
        [str(PROGRAM), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout
        program.stdout.readline()
        own.kill()
        _, err = program.communicate(timeout=RUN_SECONDS)
    assert program.returncode == 1
    assert re.fullmatch(r"error: the broker was stopped from elsewhere, or crashed \(see .*broker.log\)\n", err)


@pytest.mark.parametrize("option", ["--port", "--http-port"])
def test_a_port_in_use_is_one_line(delaylake: Run, own: EmbeddedBroker, option: str) -> None:
    other = {"--port": "--http-port", "--http-port": "--port"}[option]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = delaylake("broker", "start", "--data-dir", str(own.data_dir), option, port, other, "0")
    assert f"port {port} is in use: choose another with {option}" in error_line(done)


def test_a_broker_that_ends_at_its_start_says_why(delaylake: Run, own: EmbeddedBroker) -> None:
    own.data_dir.mkdir()
    (own.data_dir / "metadata").write_text("not a folder")
    done = delaylake("broker", "start", "--data-dir", str(own.data_dir), "--port", "0", "--http-port", "0")
    line = error_line(done)
    assert line.startswith("error: the broker ended at its start: ")
    assert "metadata" in line
    assert str(own.log_file) in line
    assert own.status().state == "stopped"


def test_no_java_is_one_line(delaylake: Run, own: EmbeddedBroker) -> None:
    done = delaylake("broker", "start", "--data-dir", str(own.data_dir), env={"JAVA_HOME": "/nowhere"})
    assert "no java under JAVA_HOME (/nowhere): install a JDK 17 or newer" in error_line(done)


def test_a_folder_that_cannot_be_written_is_one_line(delaylake: Run) -> None:
    done = delaylake("broker", "start", "--data-dir", "/dev/null/broker", "--port", "0", "--http-port", "0")
    assert "can't write to /dev/null/broker" in error_line(done)


def test_a_state_file_of_a_process_id_that_came_back_is_stale(own: EmbeddedBroker) -> None:
    own.data_dir.mkdir()
    stale = {"pid": os.getpid(), "started_at": 1.0, "port": 1, "http_port": 2}
    (own.data_dir / "broker.json").write_text(json.dumps(stale))
    assert own.status().state == "stopped"
    assert own.stop() is False
