"""Spark's files on local disks are their owner's alone, and cost no program each."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pulsar
import pytest

from broker.standalone import EmbeddedBroker
from tests.support.service.harness import Collector, Job, now, wait_until


@pytest.mark.long
def test_spark_starts_no_program_to_set_the_mode_of_a_file(
    broker: EmbeddedBroker,
    pulsar_client: pulsar.Client,
    collector: Collector,
    topic: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (programs := tmp_path / "programs").mkdir()
    calls, chmod = tmp_path / "calls", programs / "chmod"
    chmod.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec {shutil.which("chmod")} "$@"\n')
    chmod.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    job = Job(tmp_path, broker.settings, [{"source": topic, "subscriptions": [{"name": "a"}]}])
    collector.collect(f"{topic}-a")
    try:
        job.start()
        pulsar_client.create_producer(topic).send(b"", properties={"deliverAt": str(now())})
        wait_until(lambda: collector.received[f"{topic}-a"], 60, f"the delivery\n{job.log}")
        job.terminate()
    finally:
        job.stop()
    query = tmp_path / "checkpoint" / "query"
    files = [file for part in ("offsets", "commits", "state") for file in (query / part).rglob("*") if file.is_file()]
    assert {file.parent.name for file in files} >= {"offsets", "commits", "0", "1"}
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert str(query) not in (calls.read_text() if calls.exists() else "")
