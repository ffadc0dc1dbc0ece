"""What came of many seeds: how often each kind of fault fell, where, and after which other kind."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.world import Result


@dataclass
class Summary:
    """The sums of many results.

    Attributes:
        faults: how often each kind fell.
        seeds_with: in how many seeds each kind fell.
        points: how often each side effect was reached.
        faults_at: how often each kind of fault of a process fell, by side effect and kind.
        pairs: how often a kind was the next one after another one, in one seed.
        cpu_seconds: of all processes.
        broken: by seed the guarantee that does not hold.
    """

    seeds: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    seeds_with: Counter[str] = field(default_factory=Counter)
    points: Counter[str] = field(default_factory=Counter)
    faults_at: Counter[tuple[str, str]] = field(default_factory=Counter)
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    messages: int = 0
    starts: int = 0
    cpu_seconds: float = 0.0
    rebuilds: int = 0
    broken: dict[int, str] = field(default_factory=dict)

    def add(self, result: Result) -> None:
        kinds = [kind for kind, _ in result.fallen]
        self.seeds += 1
        self.faults.update(kinds)
        self.seeds_with.update(set(kinds))
        self.points += result.points
        self.faults_at += result.fallen_at
        self.pairs.update(itertools.pairwise(kinds))
        self.messages += result.messages
        self.starts += result.starts
        self.rebuilds += result.rebuilds
        self.cpu_seconds += result.seconds
        if result.broken:
            self.broken[result.seed] = result.broken

    @property
    def faults_per_second(self) -> float:
        """Faults a second of CPU time."""
        return self.faults.total() / self.cpu_seconds if self.cpu_seconds else 0.0

    def to_json(self) -> str:
        found = vars(self) | {
            "faults_at": _nested(self.faults_at),
            "pairs": _nested(self.pairs),
            "total": {"faults": self.faults.total(), "points": self.points.total()},
            "faults_per_cpu_second": round(self.faults_per_second, 1),
        }
        return json.dumps(found, indent=1)

    def to_text(self) -> str:
        """Makes tables to read: kinds of fault, side effects, and pairs of kinds."""
        kinds = [kind for kind, _ in self.faults.most_common()]
        at_points = sorted({kind for _, kind in self.faults_at}, key=kinds.index)
        parts = [
            f"{self.seeds} seeds, {self.faults.total()} faults, {self.messages} messages, {self.starts} starts,"
            f" {self.rebuilds} rebuilds, {self.cpu_seconds:.0f} s of CPU, {self.faults_per_second:.1f} faults/s",
            _table(["fault", "times", "seeds"], ([kind, self.faults[kind], self.seeds_with[kind]] for kind in kinds)),
            _table(
                ["side effect", "reached", *at_points],
                (
                    [point, n, *(self.faults_at[point, kind] or "" for kind in at_points)]
                    for point, n in sorted(self.points.items())
                ),
            ),
            _table(
                ["fault, and the next one:", *(f"({i})" for i in range(1, len(kinds) + 1))],
                (
                    [f"({i}) {one}", *(self.pairs[one, other] or "" for other in kinds)]
                    for i, one in enumerate(kinds, 1)
                ),
            ),
        ]
        parts += [f"BROKEN: seed {seed}: {why}" for seed, why in self.broken.items()]
        return "\n\n".join(parts)


def _nested(counts: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (one, other), n in sorted(counts.items()):
        found.setdefault(one, {})[other] = n
    return found


def _table(names: list[str], rows: Iterable[list[Any]]) -> str:
    lines = [names, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
    )
