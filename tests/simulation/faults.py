"""Which faults fall, and when: a seed and the number of the opportunity decide, so that one left out moves no other."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

# (kind, number of the opportunity): names a fault of a seed, or something that a user does.
Fault = tuple[str, int]

# How often a fault falls on an opportunity. The first ones fall before a side effect of a process. Some fall in a share
# of the seeds only, which the rate that begins with "seeds with" says.
USUAL_RATES: Mapping[str, float] = {
    "crash": 0.004,
    "pause": 0.0015,
    "power loss": 0.001,
    "slow": 0.02,
    "task lost before": 0.05,
    "task lost after": 0.05,
    "task goes on": 0.03,
    "worker killed": 0.03,
    "executor cut off": 0.08,
    "seeds with a cluster": 0.2,
    "shard runs again": 0.1,
    "parts read again": 0.05,
    "connection lost": 0.003,
    "no answer": 0.004,
    "unload": 0.004,
    "acknowledgement lost": 0.3,
    "broker ends": 0.01,
    "topic offline": 0.01,
    "destination deleted": 0.02,
    "quota exceeded": 0.01,
    "checkpoint lost": 0.008,
    "checkpoint put back": 0.01,
    "clock jumps": 0.03,
    "settings edited": 0.2,
    "write hangs": 0.003,
    "crash after a late write": 0.5,
    "route edited": 0.2,
    "maintenance": 0.04,
    "backup": 0.06,
    "warehouse lost": 0.03,
    "seeds with backups": 0.17,
    "import": 0.04,
    "other system ends": 0.01,
    "seeds with imports": 0.12,
    "seeds with filters": 0.3,
    "seeds with a long pause": 0.1,
    "rebuilt elsewhere": 0.003,
    "replication stands still": 0.002,
    "replicator connects again": 0.03,
    "seeds with replication": 0.15,
    "source changed": 0.08,
    "seeds with a changed source": 0.25,
    "publish rate": 0.06,
    "seeds with publish rates": 0.2,
    "seeds with another broker": 0.07,
    "seeds with audits": 0.15,
    "seeds with slow backups": 0.3,
    "seeds with commands on a changed source": 0.5,
    "destination terminated": 0.04,
    "seeds with terminated destinations": 0.2,
    "seeds with partitions": 0.12,
    "partition added": 0.02,
    "seeds with partitioned destinations": 0.12,
    "power loss of a backup": 0.01,
}

# By how much more often a fault falls in a seed; what ends processes would else keep the job from doing anything.
_FACTORS_OF_ENDS: dict[str, tuple[int, ...]] = {
    "crash": (1, 2, 4),
    "pause": (1, 2, 4),
    "broker ends": (1, 2, 4),
    "power loss": (1,),
}
_FACTORS_OF_ENDS |= {kind: (1,) for kind in USUAL_RATES if kind.startswith("seeds with")}
_FACTORS = (1, 3, 6, 12)
_MOST = 0.5


def rates_of_seed(seed: int) -> dict[str, float]:
    """Returns how often each kind of fault falls in a seed: some fall as usual, others many times as often."""
    chance = random.Random(f"rates {seed}")
    return {
        kind: min(_MOST, rate * chance.choice(_FACTORS_OF_ENDS.get(kind, _FACTORS)))
        for kind, rate in USUAL_RATES.items()
    }


@dataclass
class Faults:
    """The faults of one simulation.

    Attributes:
        left_out: faults that do not fall, though the seed says so, and what users leave.
        are_over: no more fall.
        fallen: those that have, in their order.
        done: what users have done.
    """

    seed: int
    rates: Mapping[str, float] = field(default_factory=lambda: USUAL_RATES)
    left_out: Collection[Fault] = frozenset()
    are_over: bool = False
    fallen: list[Fault] = field(default_factory=list)
    done: list[Fault] = field(default_factory=list)
    opportunities: Counter[str] = field(default_factory=Counter)

    def is_done(self, kind: str) -> bool:
        """Whether a user does something that comes next by the seed."""
        number = self.opportunities[kind]
        self.opportunities[kind] += 1
        if (kind, number) in self.left_out:
            return False
        self.done.append((kind, number))
        return True

    def is_now(self, kind: str) -> bool:
        """Whether a fault of a kind falls on this opportunity."""
        number = self.opportunities[kind]
        self.opportunities[kind] += 1
        rate = self.rates.get(kind, 0.0)
        if self.are_over or not rate or (kind, number) in self.left_out:
            return False
        digest = hashlib.blake2b(f"{self.seed} {kind} {number}".encode(), digest_size=8).digest()
        if int.from_bytes(digest) >= rate * 2**64:
            return False
        self.fallen.append((kind, number))
        return True
