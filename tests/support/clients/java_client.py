"""Pulsar's own Java client, to produce and to consume: a JVM for a whole list of messages."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from broker.jvm.jars import jars
from tests.conftest import RUN_SECONDS

_PROGRAM = Path(__file__).parents[2] / "java" / "Messages.java"


def produce(service_url: str, messages: Iterable[dict[str, Any]], has_transactions: bool = False) -> dict[str, str]:
    """Sends messages; returns for each, by its name, the id: ledger:entry:partition:batchIndex.

    Args:
        messages: `topic` and `name`; `payload` in base64 (null: none), `size` of a made-up payload, or `n`, a number to
            make a value of the `schema` of. Optional: `schema`, `key`, `key_bytes` and `ordering_key` in base64,
            `properties`, `event_time`, `deliver_at` (Pulsar's own delay, ms since the epoch), `compression`, `batch`
            (how many at most), `chunk` (of how many bytes), `encrypted` (by name the URI of a public key),
            `transaction` (a name that begins with commit or abort).
            With `end` alone: that transaction ends here, not behind the last message.
    """
    options = ["transactions"] if has_transactions else []
    told = _run(["produce", service_url, *options], messages)
    failed = [line for line in told if "id" not in line]
    assert not failed, failed[:3]
    return {line["name"]: line["id"] for line in told}


def consume(service_url: str, topics: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What an application sees of the messages of topics.

    Args:
        topics: `topic`, `n` (how many messages to wait for; there may be more), and optional: `schema` (AUTO_CONSUME by
            default).
    """
    return _run(["consume", service_url], topics)


def make_key(folder: Path, name: str) -> Path:
    """A private key; its public one is beside it."""
    key = rsa.generate_private_key(public_exponent=65_537, key_size=2048)
    pem = serialization.Encoding.PEM
    private = folder / f"{name}-private.pem"
    private.write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption())
    )
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / f"{name}.pem").write_bytes(public)
    return private


def command() -> list[str]:
    """The program, to which `produce` or `consume` and the broker's URL are added."""
    return ["java", "-XX:TieredStopAtLevel=1", "-Xmx700m", "-cp", f"{jars('broker')}/*", str(_PROGRAM)]


def _run(arguments: list[str], lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [*command(), *arguments],
        input="\n".join(json.dumps(line) for line in lines),
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
