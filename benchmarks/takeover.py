"""Measures how late messages come when the job is killed: with a standby that takes over, and with a new start.

usage: takeover.py [KILLS [RATE]]

RATE (1,000) messages a second are due 5 to 10 seconds after they are sent, and taken by a consumer. KILLS (10) times
the job is killed while a standby waits, and as often it is started anew: in turns. The gap of a kill is how late the
latest message came after it. There is no peer: Pulsar's own delayed delivery is a part of the broker. Prints one JSON
object.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.on_time import NAMESPACE, consume, produce
from broker.standalone import EmbeddedBroker
from tests.support.service.harness import Job, wait_until
from warehouse.audit.accounts import run_audit

SETTLING_SECONDS = 15  # before each kill: for what was late because of the one before
ROUND_SECONDS = 45


def gaps(kills: list[float], late: np.ndarray, at: np.ndarray) -> dict[str, Any]:
    """Returns what the messages after kills have: lateness in ms, of those that came before the next round.

    Args:
        kills: when, ms since the epoch.
        late: of each message, ms.
        at: when each came, ms since the epoch.
    """
    after = [late[(at > kill) & (at < kill + (ROUND_SECONDS - SETTLING_SECONDS) * 1000)] for kill in kills]
    latest = np.array([of_kill.max() for of_kill in after])
    return {
        "kills": len(kills),
        "gap_millis": {"p50": round(float(np.median(latest))), "max": round(float(latest.max()))},
        "late_millis_p99": round(float(np.percentile(np.concatenate(after), 99))),
    }


def main() -> None:
    n_kills = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    rate = int(sys.argv[2]) if len(sys.argv) > 2 else 1_000
    seconds = (2 * n_kills + 1) * ROUND_SECONDS
    kills: dict[str, list[float]] = {"standby": [], "start": []}
    results: Any = multiprocessing.Queue()
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker(Path(folder) / "broker")
        broker.start(port=0, http_port=0)
        source = f"{NAMESPACE}/bench"
        jobs: list[Job] = []

        def new_job() -> Job:
            jobs.append(Job(Path(folder), broker.settings, [{"source": source, "subscriptions": [{"name": "a"}]}]))
            return jobs[-1]

        consumer = multiprocessing.Process(
            target=consume,
            args=(broker.settings, f"{source}-a", rate * seconds, time.time() + seconds + 180, results),
        )
        producer = multiprocessing.Process(target=produce, args=(broker.settings, source, rate, seconds, False))
        try:
            job = new_job().start()
            consumer.start()
            results.get()
            producer.start()
            begin = time.time()
            for i in range(2 * n_kills):
                kind = ("standby", "start")[i % 2]
                time.sleep(max(0.0, begin + i * ROUND_SECONDS + SETTLING_SECONDS - time.time()))
                successor = new_job()
                if kind == "standby":
                    successor.start(is_standby=True)
                kills[kind].append(time.time() * 1000)
                job.kill9()
                if kind == "start":
                    successor.start()
                wait_until(successor.ready.is_set, 60, f"taken over\n{successor.log}")
                job = successor
            producer.join()
            late, at = results.get()
            consumer.join()
            assert job.terminate() == 0
            audit = run_audit(job.settings)
        finally:
            for job in jobs:
                job.stop()
            broker.kill()
    measured = {kind: gaps(of_kind, late, at) for kind, of_kind in kills.items()}
    print(
        json.dumps(
            {
                "benchmark": "takeover",
                "rate": rate,
                "sent": rate * seconds,
                "received": len(late),
                "audit": audit.findings,
                **measured,
                "gap_ratio": round(
                    measured["standby"]["gap_millis"]["p50"] / measured["start"]["gap_millis"]["p50"], 3
                ),
            }
        )
    )


if __name__ == "__main__":
    main()
