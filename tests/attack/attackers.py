"""Attackers, each a process of its own: who may produce, who may command, roles of the admin API, and anybody."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx
import pulsar

from broker.client import connect
from conf.settings import PulsarSettings
from tests.attack.entries import Sender, commands
from tests.support.clients.raw_producer import RawProducer
from tests.support.clients.tokens import OTHER_SECRET, forged, token

_NICE = 10  # attackers have machines of their own: they take no CPU time that the service needs
_COMMANDS_A_SECOND = 50  # on the control topic, where only operators may produce
_AT_ONCE = 50  # entries between two waits for the broker

Told = dict[str, int]


class Attackers:
    """Processes that attack until they are stopped.

    Attributes:
        told: by attacker counts of what it has sent and of the answers; complete once they are stopped.
    """

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._stopping = self._context.Event()
        self._results: Any = self._context.Queue()
        self._begun = self._context.Semaphore(0)
        self._processes: dict[str, Any] = {}
        self.told: dict[str, Told] = {}

    def start(self, name: str, attack: Callable[..., Told], *arguments: Any) -> None:
        shared = (self._begun, self._stopping, self._results)
        process = self._context.Process(target=_run, args=(name, attack, *shared, arguments))
        process.daemon = True
        process.start()
        self._processes[name] = process

    def wait_begun(self, seconds: float) -> None:
        """Waits until all have begun."""
        for _ in self._processes:
            assert self._begun.acquire(timeout=seconds), "an attacker has not begun"

    def stop(self, seconds: float) -> None:
        """Ends all, and waits for what they tell."""
        self._stopping.set()
        for _ in self._processes:
            name, told = self._results.get(timeout=seconds)
            self.told[name] = told

    def kill(self) -> None:
        for process in self._processes.values():
            if process.is_alive():
                process.kill()
            process.join()


def _run(
    name: str, attack: Callable[..., Told], begun: Any, stopping: Any, results: Any, arguments: tuple[Any, ...]
) -> None:
    os.nice(_NICE)
    begun.release()
    try:
        results.put((name, attack(stopping, *arguments)))
    except BaseException as error:  # else nobody would know
        results.put((name, {f"failed: {type(error).__name__}: {error}": 1}))


def produce(stopping: Any, settings: PulsarSettings, topic: str, seed: int) -> Told:
    """Sends entries of all kinds as fast as the broker takes them, on connections that it may end."""
    told: Counter[str] = Counter()
    entries = Sender(random.Random(seed)).entries()
    while not stopping.is_set():
        with contextlib.suppress(OSError):
            producer = RawProducer(settings.service_url, topic)
            told["connections"] += 1
            while not stopping.is_set():
                for data, sequence_id, n in (next(entries) for _ in range(_AT_ONCE)):
                    producer.send(data, sequence_id, n)
                    told["entries"] += 1
                    told["bytes"] += len(data)
                producer.flush()
    return dict(told)


def command(stopping: Any, settings: PulsarSettings, control: str, topic: str, seed: int) -> Told:
    """Sends commands, and bytes that are none, to the control topic."""
    told: Counter[str] = Counter()
    client = connect(settings)
    producer = client.create_producer(control, send_timeout_millis=0, block_if_queue_full=True)
    for content in commands(random.Random(seed), topic):
        if stopping.wait(1 / _COMMANDS_A_SECOND):
            break
        with contextlib.suppress(pulsar.PulsarException):
            producer.send_async(content, None)
            told["commands"] += 1
    client.close()
    return dict(told)


def call(stopping: Any, url: str, roles: Sequence[str], own: str, others: str, seed: int) -> Told:
    """Calls the admin API as roles, each in its thread: what it may, what it may not, and what nobody can mean."""
    told = Counter[str]()
    threads = [
        threading.Thread(target=_call_on, args=(stopping, url, role, own, others, seed + i, told))
        for i, role in enumerate(roles)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return dict(told)


def _call_on(stopping: Any, url: str, role: str, own: str, others: str, seed: int, told: Counter[str]) -> None:
    chance = random.Random(seed)
    headers = {"Authorization": f"Bearer {token(role)}"}
    with httpx.Client(base_url=url, headers=headers, timeout=30) as http:
        for method, path, content in calls(chance, own, others):
            if stopping.is_set():
                return
            try:
                answer = http.request(method, path, **content)
            except httpx.HTTPError as error:
                told[type(error).__name__] += 1
                continue
            told[str(answer.status_code)] += 1
            if (wrong := wrong_refusal(answer)) is not None:
                told[f"wrong: {method} {path[:100]}: {wrong}"] += 1


def wrong_refusal(answer: httpx.Response) -> str | None:
    """What is wrong with an answer; None: nothing, or it is no refusal. A refusal is one line of JSON."""
    code = answer.status_code
    if code == 500:
        return f"500 {answer.text[:200]!r}"
    if code < 400 or not answer.url.path.startswith("/admin"):
        return None
    try:
        body = answer.json()
    except ValueError:
        return f"{code} {answer.text[:200]!r}"
    is_line = isinstance(body, dict) and list(body) == ["reason"] and len(body["reason"].splitlines()) == 1
    return None if is_line and len(body["reason"]) < 10_000 else f"{code} {answer.text[:200]!r}"


_BODIES: list[dict[str, Any]] = [
    {"content": b"x" * (1 << 20)},
    {"content": b"[" * 100_000},
    {"content": b'{"a":' * 50_000},
    {"content": b"\xff\xfe\x00"},
    {"content": json.dumps([f"{i}:0" for i in range(1_000)])},
    {"content": json.dumps({"messageIds": [f"{2**63}:0"], "deliverAt": 2**70})},
    {"content": json.dumps({"messageIds": ["7:0"], "deliverAt": -1})},
    {"content": json.dumps({"filter": {"dueBefore": 2**62, "subscription": "a"}, "dryRun": True})},
    {"content": json.dumps({"filter": {"subscription": "a"}, "max": 2**62, "dryRun": False})},
    {"content": json.dumps({"scheduleKeys": ["\u0000", "k" * 600, "7"], "deliverAt": 1})},
    {"content": json.dumps({"messageIds": ["AAAA", "CAcQACAD", "%%%", "=" * 400]})},
    {"content": json.dumps({"type": "messageId", "messageIds": [{"ledgerId": 1e300, "entryId": float("1e10")}]})},
    {"content": json.dumps({"7": "0", "x": "y"})},
    {"content": "1e999999"},
    {"content": "9" * 10_000},
]
_QUERIES: list[dict[str, str]] = [
    {"ledgerId": "7", "entryId": "0", "deliverAt": "1"},
    {"ledgerId": f"{2**63}", "entryId": "-1", "deliverAt": "9" * 5_000},
    {"ledgerId": "7", "entryId": "0", "deliverAt": f"{2**42}", "subscriptionNames": ",".join(["a"] * 1_000)},
    {"scheduleKey": "\x00"},
    {"subscriptionNames": "../../a", "ledgerId": "1", "entryId": "1", "deliverAt": "5"},
    {"limit": "1000000", "cursor": "AAAA" * 1_000},
    {"limit": "1000", "key": "' OR 1=1 --", "property": "a=b"},
    {"property": "=", "state": "all"},
    {"dueBefore": f"{2**64}", "dueFrom": "-1"},
    {"index": "9" * 30},
    {"n": "1", "token": "x" * 3_000},
    {"next": "1000000", "withEnded": "true"},
]
_HEADERS: list[dict[str, str]] = [
    {},
    {"Idempotency-Key": "again"},
    {"Idempotency-Key": "superseded"},
    {"Idempotency-Key": "k" * 5_000},
    {"Accept": "application/x-protobuf"},
    {"Prefer": "return=representation"},
    {"Content-Type": "multipart/form-data; boundary=x"},
    {"Content-Type": "application/x-www-form-urlencoded"},
    {"X-Forwarded-For": "10.0.0.1, evil"},
    {"Cookie": "delaylake_token=" + "x" * 3_000},
    {"Range": "bytes=0-"},
]
_SUBSCRIPTION = "/subscription/a/"
_POSTS = (
    *("/cancelDelayedMessage", "/acknowledgeMessage", "/dlq/redrive", "/schedules/pause", "/schedules/7:0/skipNext"),
    *(
        _SUBSCRIPTION + verb
        for verb in (
            "skipByMessageIds",
            "skip/0",
            "skip/5",
            "skip/-1",
            "skip/" + "9" * 30,
            "reschedule",
            "retry",
            "deliverNow",
            "restore",
        )
    ),
    *(_SUBSCRIPTION + verb for verb in ("cancel", "skip", "pause", "resume")),
)
_GETS = ("/delayed", "/delayed/stats", "/schedules", "/schedules/7:0", "/getMessageIdByIndex")
_ANYWHERE = (
    *("/", "/ui/messages", "/ui/schedule", "/ui/control", "/ui/settings", "/metrics", "/readyz", "/openapi.json"),
    *(
        "/ui/static/../../../etc/passwd",
        "/ui/static/%2e%2e/%2e%2e/etc/passwd",
        "/%00",
        "//",
        "/admin/v2/" + "x/" * 2_000,
    ),
)


def path_of(topic: str) -> str:
    return "/admin/v2/" + topic.replace("://", "/")


def calls(chance: random.Random, own: str, others: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields (method, path, arguments of httpx's request), without end.

    Args:
        own: the topic that the role may do something on.
        others: one on which it may do nothing.
    """
    parent = path_of(own).rpartition("/")[0]
    topics = [path_of(own)] * 6 + [path_of(others)] * 3
    topics += [
        f"{path_of(own)}-partition-0",
        f"{parent}/..%2Fdefault%2Fhonest",
        f"{parent}/%1b%5b2J",
        f"{parent}/{'t' * 3_000}",
    ]
    while True:
        headers = {"headers": chance.choice(_HEADERS), "params": chance.choice(_QUERIES)}
        kind = chance.random()
        if kind < 0.6:
            yield "POST", chance.choice(topics) + chance.choice(_POSTS), headers | chance.choice(_BODIES)
        elif kind < 0.85:
            yield "GET", chance.choice(topics) + chance.choice(_GETS), headers
        elif kind < 0.9:
            yield "DELETE", chance.choice(topics) + "/schedules/7:0", headers
        else:
            yield chance.choice(("GET", "POST", "PUT", "TRACE")), chance.choice(_ANYWHERE), headers


def stranger(stopping: Any, url: str, topic: str, seed: int) -> Told:
    """Calls without a token that counts, and holds sockets that say nothing, or too much."""
    chance, told = random.Random(seed), Counter[str]()
    address = urlsplit(url)
    held: list[socket.socket] = []
    shown = ["", "Bearer", "Bearer x.y.z", f"Bearer {token('root', OTHER_SECRET)}", "Basic cm9vdDpyb290"]
    shown.append(f"Bearer {forged({'alg': 'none'}, {'sub': 'root'}, None)}")
    with httpx.Client(base_url=url, timeout=30) as http:
        for method, path, content in calls(chance, topic, topic):
            if stopping.is_set():
                break
            if chance.random() < 0.1:
                with contextlib.suppress(OSError):
                    held.append(socket.create_connection((address.hostname or "", address.port or 0), timeout=5))
                    held[-1].sendall(
                        chance.choice((b"", b"GET / HTTP/1.1\r\nHost: x", b"\x16\x03" * 500, b"A" * 70_000))
                    )
                while len(held) > 300:
                    held.pop(0).close()
                told["sockets"] += 1
            content["headers"] = content["headers"] | {"Authorization": chance.choice(shown)}
            try:
                answer = http.request(method, path, **content)
            except httpx.HTTPError as error:
                told[type(error).__name__] += 1
                continue
            told[str(answer.status_code)] += 1
            if answer.status_code < 300 and path.startswith("/admin"):
                told[f"wrong: {method} {path[:100]}: {answer.status_code}"] += 1
            if (wrong := wrong_refusal(answer)) is not None:
                told[f"wrong: {method} {path[:100]}: {wrong}"] += 1
    for one in held:
        one.close()
    return dict(told)
