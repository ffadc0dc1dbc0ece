"""Everybody sends for the worst beside honest traffic: it comes on time and once, nobody does what he may not.

`make attack` runs it for ATTACK_MINUTES; the figures are printed as JSON, and each has its bound below.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pulsar
import pytest
from fastapi.routing import iter_route_contexts

from admin.app import create_app
from admin.security.policy import policy_of
from broker.client import connect
from broker.standalone import EmbeddedBroker
from conf.api_settings import Operation
from tests.attack.attackers import Attackers, call, command, produce, stranger, wrong_refusal
from tests.support.clients.tokens import SECRET, encoded, token
from tests.support.service.harness import PATIENCE, Api, Collector, Job, check_exactly_once, now, wait_until

NAMESPACE = "persistent://public/default"
HONEST, SHOP = f"{NAMESPACE}/honest", f"{NAMESPACE}/shop"
RATE = 500  # honest messages a second
DELAYS = (1_500, 6_000)  # of honest messages, ms
LATE_MILLIS = 1_000  # p99 of the honest messages, on a machine that does nothing else: not in the short form
ROLES = [operation.value for operation in Operation]
SHORT_SECONDS = 35
_LEAST_INPUT = 32 << 20  # bytes: with less than that most of the disk is what the honest messages take

# Bounds of what the attackers can make the service take. `*_of_input`: for each byte that the attackers have sent.
BOUNDS: Mapping[str, float] = {
    "memory_mib": 4_500,  # of the job's processes together, at their most
    "api_memory_mib": 600,
    "disk_of_input": 4.0,  # warehouse and checkpoint
    "state_mib": 100,
    "files": 3_000,  # of warehouse and checkpoint
    "refusal_rows": 2_000,
    "log_mib": 5,
}


class Honest:
    """Messages at a steady rate, and what comes of them."""

    def __init__(self, client: pulsar.Client) -> None:
        self._producer = client.create_producer(HONEST, block_if_queue_full=True, batching_max_publish_delay_ms=5)
        self._collector = Collector(client).collect(f"{HONEST}-a")
        self._stopping = threading.Event()
        self.sent: dict[str, int] = {}
        self.failed: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        begin = time.monotonic()

        def answered(result: Any, _: Any) -> None:
            if result != pulsar.Result.Ok:
                self.failed.append(str(result))

        while not self._stopping.wait(0.02):
            while len(self.sent) < (time.monotonic() - begin) * RATE:
                n = len(self.sent)
                due = now() + DELAYS[0] + n * 7_919 % (DELAYS[1] - DELAYS[0])
                self.sent[f"{n}"] = due
                self._producer.send_async(b"%d" % n, answered, properties={"deliverAt": str(due)})
        self._producer.flush()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def close(self) -> None:
        self._collector.stop()

    @property
    def received(self) -> list[Any]:
        return list(self._collector.received[f"{HONEST}-a"])

    def late_millis(self) -> dict[str, float]:
        late = np.array([message.received_at - self.sent[message.payload.decode()] for message in self.received])
        return {name: round(float(np.percentile(late, q))) for name, q in (("p50", 50), ("p99", 99), ("max", 100))}


class Most(threading.Thread):
    """The most memory that the job's processes, and the API's, have had together, MiB, and how often it was looked."""

    def __init__(self, job: Job, api: Api) -> None:
        super().__init__(daemon=True)
        self._job, self._api = job, api
        self._stopping = threading.Event()
        self.mebibytes = {"memory_mib": 0.0, "api_memory_mib": 0.0}

    def run(self) -> None:
        assert self._job.process is not None
        while not self._stopping.wait(2):
            of_job = [psutil.Process(self._job.process.pid), *self._job.children()]
            for name, processes in (
                ("memory_mib", of_job),
                ("api_memory_mib", [psutil.Process(self._api.process.pid)]),
            ):
                total = 0
                for process in processes:
                    try:
                        total += process.memory_full_info().pss
                    except psutil.Error:
                        continue
                self.mebibytes[name] = max(self.mebibytes[name], total / 2**20)

    def stop(self) -> None:
        self._stopping.set()
        self.join()


def size_of(folder: Path) -> tuple[int, int]:
    """The files in a folder, and their bytes; files may go meanwhile."""
    n = size = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.stat(os.path.join(path, name)).st_size
                n += 1
            except FileNotFoundError:
                continue
    return n, size


def trespasses(job: Job, url: str, roles: Sequence[str]) -> Iterator[str]:
    """Calls every route as roles and as nobody, on both topics; yields what passed and may not, or is no line."""
    routes = [
        (route, method)
        for route in iter_route_contexts(create_app(job.settings).routes)
        for method in sorted(route.methods or ())
    ]
    with httpx.Client(base_url=url, timeout=60) as http:
        for role in [None, "nobody", *roles]:
            headers = {} if role is None else {"Authorization": f"Bearer {token(role)}"}
            for route, method in routes:
                needed = policy_of(route)
                if needed is None or route.path is None:
                    continue
                is_for_topic = "{topic}" in route.path
                for topic in ("honest", "shop") if is_for_topic else ("",):
                    path = route.path.replace(":path", "").format(
                        tenant="public", namespace="default", topic=topic, subscription="a", rest="x", n="5", id="7:0"
                    )
                    answer = http.request(method, path, headers=headers)
                    enough = {needed.value, Operation.ADMIN.value}
                    enough |= {Operation.SKIP.value} if needed is Operation.ACKNOWLEDGE else set()
                    may = role in enough and topic != "honest" and path != "/ui/settings"
                    is_refused = answer.status_code in (401, 403)
                    if is_refused is may:
                        yield f"{role}: {method} {path}: {answer.status_code}"
                    if method != "HEAD" and (wrong := wrong_refusal(answer)) is not None:
                        yield f"{role}: {method} {path}: {wrong}"


def attack(folder: Path, broker: EmbeddedBroker, seconds: float, seed: int, is_whole: bool = True) -> dict[str, Any]:
    """Attacks a job for some time; returns the figures. What must not be at all is asserted.

    Args:
        is_whole: whether all roles try all routes, and a checkpoint is made in the end from what the tables have.
    """
    roles = [{"role": name, "operations": [name], "topics": [SHOP]} for name in ROLES]
    job = Job(
        folder,
        broker.settings,
        [
            {"source": HONEST, "subscriptions": [{"name": "a"}]},
            {"source": SHOP, "subscriptions": [{"name": "a"}, {"name": "b", "type": "Exclusive"}]},
        ],
        auth={"enabled": True, "token_secret_key": f"data:;base64,{encoded(SECRET)}", "roles": roles},
        tracker={"max_recurring_messages": 50},
        maintain={"interval_millis": 10_000},
    )
    client, attackers = connect(broker.settings), Attackers()
    api: Api | None = None
    try:
        job.start()
        api = Api(job.file)
        honest, most = Honest(client), Most(job, api)
        most.start()
        wait_until(lambda: len(honest.received) > RATE, 60, f"honest messages come\n{job.log}")
        passed = list(trespasses(job, api.url, ROLES if is_whole else ROLES[:1]))
        attackers.start("producer", produce, broker.settings, SHOP, seed)
        attackers.start("commander", command, broker.settings, job.settings.control.topic, SHOP, seed)
        attackers.start("roles", call, api.url, ROLES, SHOP, HONEST, seed)
        attackers.start("stranger", stranger, api.url, SHOP, seed)
        attackers.wait_begun(60 * PATIENCE)
        began = time.monotonic()
        while time.monotonic() < began + seconds:
            assert job.process is not None
            assert job.process.poll() is None, job.log
            time.sleep(1)
        attackers.stop(60 * PATIENCE)
        honest.stop()
        wait_until(lambda: len(honest.received) >= len(honest.sent), 60, f"all honest messages\n{job.log}")
        most.stop()
        figures = _figures(job, most, attackers.told)
        figures |= {"seconds": seconds, "seed": seed, "attackers": attackers.told, "trespasses": passed}
        figures |= {"pace": round(job.pace, 1)}
        figures |= {"honest": {"sent": len(honest.sent), "late_millis": honest.late_millis()}}
        status = json.loads(job.command("status", "--output", "json").stdout)
        figures["state"], figures["troubles"] = status["state"], [one["text"][:200] for one in status["troubles"]]
        assert honest.failed == []
        check_exactly_once(honest.sent, honest.received)
        honest.close()
        if is_whole:
            assert job.terminate() == 0, job.log
            began = time.monotonic()
            job.rebuild()
            figures["rebuild_seconds"] = round(time.monotonic() - began)
        return figures
    finally:
        attackers.kill()
        job.stop()
        if api is not None:
            api.kill()
        client.close()


def _figures(job: Job, most: Most, told: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    warehouse, checkpoint = size_of(job.folder / "warehouse"), size_of(job.folder / "checkpoint")
    sent = sum(of_one.get("bytes", 0) for of_one in told.values())
    refused = job.rows("refusals", "SELECT count(*) AS n FROM {table}")[0]["n"]
    return {
        **{name: round(value) for name, value in most.mebibytes.items()},
        "sent_mib": round(sent / 2**20),
        "disk_mib": round((warehouse[1] + checkpoint[1]) / 2**20),
        "disk_of_input": round((warehouse[1] + checkpoint[1]) / max(sent, _LEAST_INPUT), 2),
        "state_mib": round(size_of(job.folder / "checkpoint" / "query" / "state")[1] / 2**20, 1),
        "files": warehouse[0] + checkpoint[0],
        "refusal_rows": refused,
        "log_mib": round(sum(file.stat().st_size for file in job.folder.glob("*.log")) / 2**20, 2),
    }


def check(figures: Mapping[str, Any]) -> None:
    wrong = {name: (figures[name], most) for name, most in BOUNDS.items() if figures[name] > most}
    told = {f"{who}: {what}" for who, answers in figures["attackers"].items() for what in answers}
    assert not wrong, wrong
    assert figures["trespasses"] == []
    assert [what for what in told if "wrong" in what or "failed" in what] == []
    assert figures["state"] == "running"
    answers = sum((Counter(of_one) for of_one in figures["attackers"].values()), Counter[str]())
    assert {"entries", "commands", "400", "401", "403"} <= answers.keys(), answers


@pytest.mark.long
def test_who_attacks_for_half_a_minute_harms_nobody(broker: EmbeddedBroker, tmp_path: Path) -> None:
    figures = attack(tmp_path, broker, SHORT_SECONDS, 41, is_whole=False)
    print(json.dumps(figures))
    check(figures)


@pytest.mark.chaos
def test_who_attacks_for_minutes_harms_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = 60 * float(os.environ.get("ATTACK_MINUTES") or 4)
    broker = EmbeddedBroker(tmp_path / "broker")
    broker.start(port=0, http_port=0)
    try:
        seed = int(os.environ.get("SEED") or time.time())
        figures = attack(tmp_path, broker, seconds, seed)
    finally:
        broker.kill()
    with capsys.disabled():
        print(json.dumps(figures), flush=True)
    check(figures)
    assert figures["honest"]["late_millis"]["p99"] <= LATE_MILLIS
