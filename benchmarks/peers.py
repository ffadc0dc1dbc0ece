"""Measures the job beside Pulsar's own delayed delivery, NATS and RocketMQ, one after the other on this machine.

usage: peers.py [--rates 3000,10000] [--seconds 60] [--messages 100000] [--pending 1000000] [--only NAME,...]
       peers.py --install

Each has the same load and a consumer: so many messages a second of 100 bytes, due 5 to 10 seconds after they are
sent, for so long; then MESSAGES due at one instant; then PENDING due within a day. Prints one JSON object with a row
for each figure: what it is of each system, the best, and how many times worse each is. CPU is that of the servers, for
the job with its broker; memory is what PENDING messages add: of a JVM to its heap after a full collection, else to the
proportional set size. Of lateness what counts is the distance from the time, at least a millisecond: to be early is no
better. What is not installed is left out, and named: --install fetches it with go, pip and Maven into the cache folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.peer_systems import NotInstalledError, Peer, nats_server, rocketmq_timer
from benchmarks.peer_systems.nats_server import Nats
from benchmarks.peer_systems.pulsar_systems import DelayLake, PulsarsOwn
from benchmarks.peer_systems.rocketmq_timer import RocketMq

SYSTEMS: dict[str, Callable[[], Peer]] = {
    "delaylake": DelayLake,
    "pulsar": PulsarsOwn,
    "nats": Nats,
    "rocketmq": RocketMq,
}
HIGHER_IS_BETTER = "drained_per_second"


def measure(peer: Peer, options: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Measures one system; yields each figure, with its name, as soon as it is known."""
    for rate in options.rates:
        before = peer.cpu_seconds()
        found = peer.paced(rate, options.seconds)
        yield f"cpu_seconds_per_million_at_{rate}", (peer.cpu_seconds() - before) / (rate * options.seconds / 1e6)
        for name in ("p50", "p99"):
            yield f"late_millis_{name}_at_{rate}", found["late_millis"][name]
        yield f"earliest_millis_at_{rate}", found["earliest_millis"]
        yield f"not_received_at_{rate}", int(rate * options.seconds) - found["received"]
    yield HIGHER_IS_BETTER, peer.burst(options.messages)["drained_per_second"]
    before = peer.memory_mib()
    peer.pend(options.pending)
    yield "memory_mib_of_pending", peer.memory_mib() - before


def compared(name: str, values: dict[str, float]) -> dict[str, Any]:
    """Returns a row: the values, the best system, and how many times worse each one is."""
    row: dict[str, Any] = {"values": {system: round(value, 1) for system, value in values.items()}}
    if name.startswith(("earliest", "not_received")):
        return row  # what should be 0
    sizes = {system: max(abs(value), 1.0) for system, value in values.items()}
    best = max(sizes, key=sizes.__getitem__) if name == HIGHER_IS_BETTER else min(sizes, key=sizes.__getitem__)
    ratios = {system: size / sizes[best] for system, size in sizes.items()}
    if name == HIGHER_IS_BETTER:
        ratios = {system: 1 / ratio for system, ratio in ratios.items()}
    return row | {"best": best, "times_worse": {system: round(ratio, 2) for system, ratio in ratios.items()}}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=lambda text: [int(rate) for rate in text.split(",")], default=[3_000, 10_000])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--pending", type=int, default=1_000_000)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SYSTEMS))
    parser.add_argument("--install", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.install:
        nats_server.install()
        rocketmq_timer.install()
        return
    rows: dict[str, dict[str, float]] = defaultdict(dict)
    left_out: dict[str, str] = {}
    for system in options.only:
        try:
            with SYSTEMS[system]() as peer:
                for row, value in measure(peer, options):
                    rows[row][system] = value
                    print(f"{system} {row} {value:.1f}", file=sys.stderr, flush=True)
        except NotInstalledError as error:
            left_out[system] = f"{error}: --install fetches it"
        except Exception as error:  # the others' figures are worth having
            left_out[system] = f"failed: {type(error).__name__}: {error}"[:500]
    result = {name: compared(name, values) for name, values in rows.items()}
    shown = {name: getattr(options, name) for name in ("rates", "seconds", "messages", "pending")}
    print(json.dumps({"benchmark": "peers", **shown, "left_out": left_out, "rows": result}))


if __name__ == "__main__":
    main()
