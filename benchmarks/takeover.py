"""Measures how late messages come when the job is killed: with a standby that takes over, and with a new start.

usage: takeover.py [KILLS [STARTS [RATE]]]

RATE (1,000) messages a second are due 5 to 10 seconds after they are sent, and taken by a consumer. KILLS (10) times
the job is killed while a standby waits, and STARTS (KILLS) times it is started anew, in turns with the first kills. The
gap of a kill is how late the latest message came after it. There is no peer: Pulsar's own delayed delivery is a part
of the broker. Prints one JSON object.
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

from benchmarks.on_time import NAMESPACE, Pace, consume, produce
from broker.standalone import EmbeddedBroker
from tests.support.service.harness import Job, wait_until
from warehouse.audit.accounts import run_audit

SETTLING_SECONDS = {"standby": 4, "start": 15}  # before each kill: for what was late because of the one before
ROUND_SECONDS = {"standby": 28, "start": 45}
GAP_SECONDS = {"standby": 15, "start": 30}  # after each kill: what comes then is measured


def gaps(kills: list[float], gap_seconds: int, late: np.ndarray, at: np.ndarray) -> dict[str, Any]:
    """Returns what the messages after kills have: lateness in ms.

    Args:
        kills: when, ms since the epoch.
        gap_seconds: messages that came up to so long after a kill count.
        late: of each message, ms.
        at: when each came, ms since the epoch.
    """
    after = [late[(at > kill) & (at < kill + gap_seconds * 1000)] for kill in kills]
    latest = np.array([of_kill.max() for of_kill in after if len(of_kill)])  # a slow machine may kill after the last
    return {
        "kills": len(latest),
        "gap_millis": {f"p{p}": round(float(np.percentile(latest, p))) for p in (50, 99)}
        | {"max": round(float(latest.max()))},
        "late_millis_p99": round(float(np.percentile(np.concatenate(after), 99))),
    }


def main() -> None:
    n_kills = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    n_starts = int(sys.argv[2]) if len(sys.argv) > 2 else n_kills
    rate = int(sys.argv[3]) if len(sys.argv) > 3 else 1_000
    rounds = [
        kind for i in range(max(n_kills, n_starts)) for kind, n in (("standby", n_kills), ("start", n_starts)) if i < n
    ]
    seconds = sum(ROUND_SECONDS[kind] for kind in [*rounds, "start"])
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
        producer = multiprocessing.Process(target=produce, args=(broker.settings, source, [Pace(rate, seconds)], False))
        try:
            job = new_job().start()
            consumer.start()
            results.get()
            producer.start()
            begin_round = time.time()
            for kind in rounds:
                time.sleep(max(0.0, begin_round + SETTLING_SECONDS[kind] - time.time()))
                begin_round += ROUND_SECONDS[kind]
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
    measured = {kind: gaps(of_kind, GAP_SECONDS[kind], late, at) for kind, of_kind in kills.items() if of_kind}
    medians = [one["gap_millis"]["p50"] for one in measured.values()]
    print(
        json.dumps(
            {
                "benchmark": "takeover",
                "rate": rate,
                "sent": rate * seconds,
                "received": len(late),
                "audit": audit.findings,
                **measured,
                "gap_ratio": round(medians[0] / medians[1], 3) if len(medians) > 1 else None,
            }
        )
    )


if __name__ == "__main__":
    main()
