"""Pulsar's own Go client, to produce and to consume: tests/go/messages.go, which `make pulsars` builds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RUN_SECONDS

_PROGRAM = Path(sys.executable).parents[1] / "go" / "messages"


def skip_without_it() -> None:
    """Skips a test where the program is not there."""
    if not _PROGRAM.exists():
        pytest.skip("there is no program with Pulsar's Go client: `make pulsars` builds it with Go 1.25+")


def produce(service_url: str, messages: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Sends messages; returns for each, by its name, the id: ledger:entry:partition:batchIndex.

    Args:
        messages: `topic` and `name`; `payload` in base64, `size` of a made-up payload, or `n`, a number to make a value
            of the `schema` of. Optional: `key` and `ordering_key` in base64, `properties`, `event_time`, `deliver_at`
            (ms since the epoch) and `deliver_after` (ms), which are Pulsar's own delays, `compression`, `batch` (how
            many at most), `by_key` (each batch has one key), `chunk` (of how many bytes), `encrypted` (the file of a
            public key).
    """
    told = _run(["produce", service_url], messages)
    failed = [line for line in told if "id" not in line]
    assert not failed, failed[:3]
    return {line["name"]: line["id"] for line in told}


def consume(service_url: str, topics: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What an application sees of the messages of topics.

    Args:
        topics: `topic`, `n` (how many messages to wait for; there may be more), and optional: `schema`.
    """
    return _run(["consume", service_url], topics)


def _run(arguments: list[str], lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [str(_PROGRAM), *arguments],
        input="\n".join(json.dumps(line) for line in lines),
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
