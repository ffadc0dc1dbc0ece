"""The commands in README.md and docs/, page by page on a running job: each is run, or it says here why not."""

from __future__ import annotations

import base64
import queue
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pulsar
import pytest
import yaml

from broker.standalone import EmbeddedBroker
from tests.conftest import RUN_SECONDS
from tests.support.service.harness import Api, Job, wait_until

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TOPIC = "persistent://public/default/orders"
DUE = 1_896_069_600_000  # 2030-01-31T06:00:00Z, within what filters in the docs mean

# How commands begin that are not run here, and why.
NOT_RUN = {
    "make ": "is how all tests are run; tests/acceptance/test_demo.py has what `make run` does",
    "export PATH=": "for the shell of whoever reads it",
    "python3 -m venv ": "all is installed",
    "pip install ": "all is installed",
    "pytest test_orders.py": "is the page's own file: tests/unit/clients/test_testing.py",
    "delaylake dev": "has a broker of its own: tests/integration/commands/test_dev.py",
    "delaylake consume": "waits for what arrives: tests/acceptance/test_tutorial.py",
    "delaylake run": "a job runs: tests/integration/delivery/test_job.py, test_standby.py",
    "OTEL_EXPORTER_OTLP_ENDPOINT=": "a job runs: tests/unit/streaming/release/task/test_traces.py",
    "delaylake api": "the API runs: tests/integration/admin/test_admin_api.py",
    "delaylake rebuild": "not beside a job: tests/integration/checkpoint_from_tables/test_disaster_drill.py",
    "delaylake import": "no job: tests/integration/checkpoint_from_tables/test_importing.py",
    "export DELAYLAKE_IMPORT_URL=": "is for `delaylake import`",
    "delaylake maintain --engine spark": "starts Spark for a minute: tests/integration/warehouse/test_engines.py",
    "delaylake audit --engine spark": "starts Spark for a minute: tests/integration/warehouse/test_engines.py",
    "delaylake pending TOPIC --stats --watch": "runs until it is interrupted: tests/unit/jobs/test_watch.py",
    "curl --cacert ": "needs TLS and a token: tests/integration/admin/test_api_security.py",
    "pulsar tokens ": "is Pulsar's own",
    "head -c 32 ": "makes a key for the containers",
    "docker ": "needs Docker: tests/acceptance/test_containers.py",
    "kubectl ": "needs a cluster: tests/unit/jobs/test_deployment.py",
    "export PYSPARK_PYTHON=": "is for `spark-submit`",
    "spark-submit ": "needs a cluster: tests/integration/restarts/test_cluster.py",
}


def commands(page: str) -> Iterator[str]:
    """Yields what a page has to be typed into a shell: where lines begin with a prompt, these, without it."""
    for language, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```$", page, re.M | re.S):
        if language not in ("", "sh", "bash", "console"):
            continue
        lines = [line.strip() for line in block.replace("\\\n", " ").splitlines()]
        typed = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")] or lines
        yield from (line.removeprefix(".venv/bin/") for line in typed if line and not line.startswith("#"))


class Docs:
    """What the docs speak of: a topic, a message of it that was delivered, and new ones that wait for each command."""

    def __init__(self, job: Job, api: Api, client: pulsar.Client, topic: str) -> None:
        self._job, self._api, self._topic = job, api, topic
        # What is sent until it is flushed is one entry.
        self._producer = client.create_producer(topic, batching_enabled=True, batching_max_publish_delay_ms=60_000)
        self._recurring = "7:0"
        # A retry needs the payload, which is kept of what had to wait. No filter of the docs means it: while its first
        # retry waits, it would be cancelled.
        self._delivered = self._entry(key="retried", region="us")
        id_ = f"{self._delivered.ledger_id()}:{self._delivered.entry_id()}"
        self._wait_until_listed(id_)
        self._delaylake(["topics", "deliver-now", topic, "-s", "billing", "--messageId-triplet", id_])
        wait_until(lambda: len(job.rows("deliveries")) == 4, 30, f"they are delivered\n{job.log}")

    def run(self, command: str, variables: dict[str, str]) -> None:
        """Runs a command, or sets a variable of the shell.

        Raises:
            AssertionError: it is none that can be run here, or it failed.
        """
        words = shlex.split(self._named(command, variables), comments=True)
        if words[0] == "delaylake":
            self._delaylake(words[1:])
        elif words[0] == "curl":
            done = subprocess.run(
                ["curl", "--fail-with-body", "--silent", "--show-error", *words[1:]],
                capture_output=True,
                text=True,
                timeout=RUN_SECONDS,
            )
            assert done.returncode == 0, done.stdout + done.stderr
        else:
            assert [re.fullmatch(r"\w+=\S+", word) is None for word in words] == [False], "it is not in NOT_RUN"
            name, _, value = words[0].partition("=")
            variables[name] = value

    def _delaylake(self, words: list[str]) -> None:
        if words[0] == "schedules" and self._recurring in words:
            self._wait_until_listed(self._recurring)
        is_by_filter = words[1:2] and words[1].endswith("-by-filter")
        if is_by_filter and not {"--yes", "--dry-run"} & {*words}:
            words = [*words, "--yes"]  # at a terminal it asks

        was_late = False

        def done() -> bool:
            nonlocal was_late
            done = self._job.command(*words)
            # What was sent, cancelled or delivered just now, the tables have some seconds later. Of what it meant some
            # may have been too late, or cancelled and listed still. The others are changed then: there is nothing
            # left when it comes again.
            if is_by_filter and ("tooLate" in done.stdout or "invalid" in done.stdout):
                was_late = True
                return False
            if is_by_filter and done.stdout.startswith("0 "):
                return was_late
            assert done.returncode == 0, done.stdout + done.stderr
            if words[0] == "produce" and "--repeat" in words:
                self._recurring = done.stdout.strip()
            return True

        wait_until(done, 30, f"what the filter means\n{self._job.log}")

    def _wait_until_listed(self, id_: str) -> None:
        ledger, entry = id_.split(":")[:2]
        sql = f"SELECT 1 FROM {{table}} WHERE ledger_id = {ledger} AND entry_id = {entry}"
        wait_until(lambda: self._job.rows("delayed_index", sql), 30, f"{id_} is listed\n{self._job.log}")

    def _named(self, command: str, variables: dict[str, str]) -> str:
        """Returns a command with the topic, the messages and the API of this test, instead of those in the docs."""
        for name, value in variables.items():
            command = command.replace(f"${name}", value)
        command = re.sub(r"(?<=\s)TOPIC\b", TOPIC, command).replace(TOPIC, self._topic)
        command = command.replace("persistent/public/default/orders", self._topic.replace("://", "/"))
        command = command.replace("http://127.0.0.1:8081", self._api.url)
        if command.startswith("delaylake schedules"):
            return command.replace("7:0", self._recurring)
        is_retry = command.startswith("delaylake topics retry ")
        message = self._delivered if is_retry else self._entry()
        ledger, entry = str(message.ledger_id()), str(message.entry_id())
        if command.startswith("delaylake topics restore "):
            words = ["topics", "skip-messages", self._topic, "-s", "billing", "--messageId-triplet"]
            skipped = self._job.command(*words, f"{ledger}:{entry}")
            assert skipped.returncode == 0, skipped.stderr
        (self._job.folder / "ids.txt").write_text(f"{ledger}:{entry}:3\n")
        command = re.sub(r"\b7:0\b", f"{ledger}:{entry}", command).replace("-l 7 -e 0", f"-l {ledger} -e {entry}")
        command = command.replace("ledgerId=7&entryId=0", f"ledgerId={ledger}&entryId={entry}")
        if '"7:1"' in command:
            other = self._entry()
            command = command.replace('"7:1"', f'"{other.ledger_id()}:{other.entry_id()}"')
        return command.replace("CAcQACAD", base64.b64encode(message.serialize()).decode())

    def _entry(self, key: str = "customer-7", region: str = "eu") -> pulsar.MessageId:
        """Sends an entry of four messages that are due at DUE, and returns the id of the last."""
        ids: queue.Queue[pulsar.MessageId] = queue.Queue()
        given = {"region": region, "deliverAt": str(DUE)}
        for _ in range(4):
            self._producer.send_async(
                b"x", lambda _, message_id: ids.put(message_id), partition_key=key, properties=given
            )
        self._producer.flush()
        return [ids.get(timeout=RUN_SECONDS) for _ in range(4)][-1]


def test_each_command_is_run_or_says_why_not(
    broker: EmbeddedBroker,
    pulsar_client: pulsar.Client,
    topic: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clean_environment: None,
) -> None:
    monkeypatch.chdir(tmp_path)
    [route] = yaml.safe_load((ROOT / "conf/delaylake.yaml").read_text())["routes"]
    subscriptions = [{"name": one["name"], "type": one.get("type", "Shared")} for one in route["subscriptions"]]
    job = Job(
        tmp_path,
        broker.settings,
        [{"source": topic, "subscriptions": [*subscriptions, {"name": "sms", "rate": {"messages_per_second": 200}}]}],
        tracker={"max_seal_interval_millis": 1_000},
    )
    try:
        job.start()
        api = Api(job.file)
        try:
            docs = Docs(job, api, pulsar_client, topic)
            n, wrong, used = 0, [], set()
            for page in PAGES:
                variables = {"URL": api.url}
                for command in commands(page.read_text()):
                    if listed := [begin for begin in NOT_RUN if command.startswith(begin)]:
                        used.update(listed)
                        continue
                    n += 1
                    try:
                        docs.run(command, variables)
                    except AssertionError as error:
                        wrong.append(f"{page.name}: {command}: {error}")
            assert not wrong, "\n".join(wrong)
            assert n > 60
            assert used == NOT_RUN.keys(), "what is listed is in the docs"
        finally:
            api.stop()
    finally:
        job.stop()
