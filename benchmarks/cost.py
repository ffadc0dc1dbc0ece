"""Measures what a million messages cost in CPU time: the job and its broker, and Pulsar's own delayed delivery.

usage: cost.py [RATE [SECONDS]]

Both have the same load and consumer, one after the other: RATE (3,000) messages a second for SECONDS (60), 100 bytes
each, due 5 to 10 seconds after they are sent. CPU seconds are counted from the first message produced to the last one
received, of the job's processes by kind, and of the broker; memory is the sum of proportional set sizes (PSS) at the
end.
Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from benchmarks.on_time import NAMESPACE, Pace, run
from benchmarks.start import cpu_seconds, memory_mib
from broker.standalone import EmbeddedBroker
from tests.support.service.harness import Job


def broker_seconds(broker: EmbeddedBroker) -> float:
    times = psutil.Process(broker.status().pid).cpu_times()
    return times.user + times.system


def main() -> None:
    rate = int(sys.argv[1]) if len(sys.argv) > 1 else 3_000
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 60
    millions = rate * seconds / 1e6

    def per_million(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
        used = {name: round((after[name] - before.get(name, 0.0)) / millions, 1) for name in after}
        return {name: value for name, value in sorted(used.items(), key=lambda item: -item[1]) if value}

    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker(Path(folder) / "broker")
        broker.start(port=0, http_port=0)
        source = f"{NAMESPACE}/bench"
        job = Job(Path(folder), broker.settings, [{"source": source, "subscriptions": [{"name": "a"}]}])

        def measure(to: str, is_native: bool) -> tuple[dict[str, Any], float]:
            before = broker_seconds(broker)
            found = run(broker.settings, to.removesuffix("-a"), to, [Pace(rate, seconds)], is_native)
            return found, (broker_seconds(broker) - before) / millions

        try:
            job.start()
            before = cpu_seconds(job)
            ours, with_job = measure(f"{source}-a", is_native=False)
            used, memory = per_million(cpu_seconds(job), before), memory_mib(job)
            job.terminate()
            native, alone = measure(f"{NAMESPACE}/own", is_native=True)
        finally:
            job.stop()
            broker.kill()
    total = sum(used.values())
    print(
        json.dumps(
            {
                "benchmark": "cost",
                "rate": rate,
                "seconds": seconds,
                "cpu_seconds_per_million": {"job": round(total, 1), "its_broker": round(with_job, 1)},
                "job_by_process": used,
                "pss_mib": {"job": sum(memory.values()), "by_process": memory},
                "pulsar": {"cpu_seconds_per_million": round(alone, 1), "received": native["received"]},
                "received": ours["received"],
                "ratio": round(total / alone, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
