"""The job on a clock that jumps an hour ahead, and back."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pulsar
import pytest

from broker.standalone import EmbeddedBroker
from tests.conftest import PROGRAM
from tests.support.service.harness import Collector, Job, now, wait_until

pytestmark = pytest.mark.chaos  # it needs a C compiler

HOUR = 3_600_000
LATE_MILLIS = 10_000


@pytest.fixture
def clock_offset(tmp_path: Path) -> Path:
    """A library that shifts the wall clock of processes; with libfaketime Python can't sleep."""
    library = tmp_path / "clock_offset.so"
    source = Path(__file__).with_name("clock_offset.c")
    subprocess.run(["cc", "-O2", "-Wall", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, timeout=60)
    return library


def test_a_clock_that_jumps_an_hour_ahead_and_back_makes_nothing_early_and_little_late(
    broker: EmbeddedBroker,
    pulsar_client: pulsar.Client,
    topic: str,
    tmp_path: Path,
    collector: Collector,
    clock_offset: Path,
) -> None:
    offset = tmp_path / "offset"  # of the job's clock

    def set_clock(seconds: int) -> None:
        with open(offset, "r+b") as file:  # in place: it is mapped
            file.write((seconds * 10**9).to_bytes(8, "little", signed=True))

    offset.write_bytes(bytes(8))
    program = ("env", f"LD_PRELOAD={clock_offset}", f"CLOCK_OFFSET_FILE={offset}", str(PROGRAM))
    job = Job(tmp_path, broker.settings, [{"source": topic, "subscriptions": [{"name": "a"}]}])
    producer = pulsar_client.create_producer(topic)
    collector.collect(f"{topic}-a")
    due: dict[str, int] = {}

    def publish(name: str, n: int, first_due: int, step: int) -> set[str]:
        names = {f"{name} {i}" for i in range(n)}
        for i in range(n):
            due[f"{name} {i}"] = at = first_due + i * step
            producer.send_async(f"{name} {i}".encode(), None, properties={"deliverAt": str(at)})
        producer.flush()
        return names

    def there() -> dict[str, int]:
        return {m.payload.decode(): m.received_at for m in list(collector.received[f"{topic}-a"])}

    def come(names: set[str], seconds: float) -> None:
        wait_until(lambda: names <= there().keys(), seconds, f"all of {sorted(names)[0]} and more\n{job.log}")

    def late(names: set[str]) -> float:
        return max(there()[name] - due[name] for name in names)

    try:
        job.start(program)
        within, beyond = (
            publish("within the hour", 50, now() + HOUR // 2, 1_000),
            publish("beyond", 50, now() + 3 * HOUR, 0),
        )
        before = publish("before", 100, now() + 4_000, 20)
        come(before, 15)
        assert late(before) < LATE_MILLIS * job.pace
        assert there().keys() == before

        set_clock(3_600)
        come(within, 15)  # due by the machine's own clock
        ahead = publish("ahead", 100, now() + HOUR + 4_000, 20)
        come(ahead, 15)
        assert max(there()[name] + HOUR - due[name] for name in ahead) < LATE_MILLIS * job.pace

        set_clock(0)
        back, later = publish("back", 200, now() + 4_000, 20), publish("later", 50, now() + HOUR // 2, 1_000)
        at_once = publish("at once", 10, now() - 1_000, 0)
        come(back | at_once, 20)
        assert late(back | at_once) < LATE_MILLIS * job.pace
        assert not there().keys() & (later | beyond)
        steps = ("was set ahead by 3,6", "was set back by 3,6")
        wait_until(
            lambda: all(step in (tmp_path / "job.log").read_text() for step in steps), 10, "both steps are logged"
        )
        assert job.terminate() == 0
    finally:
        job.stop()
    received = [m.payload.decode() for m in collector.received[f"{topic}-a"]]
    assert sorted(received) == sorted(set(received)), "nothing twice"
    early = [row for row in job.rows("deliveries") if row["sent_at"] < row["deliver_at"]]
    assert not early, "never early by the machine's own clock"
