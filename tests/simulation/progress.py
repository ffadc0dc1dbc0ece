"""A file of results, a line each: a long run goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

from tests.simulation.world import Result

_ROOT = Path(__file__).parents[2]
# What decides the history of a seed.
_PACKAGES = (
    "admin",
    "broker",
    "checkpoint_from_tables",
    "conf",
    "jobs",
    "status",
    "streaming",
    "tests/simulation",
    "tracker",
    "warehouse",
)


class Progress:
    """The results of earlier runs, and of this one.

    Args:
        file: to which results are added; None: they are kept nowhere.
        rates: how often faults fall.

    Attributes:
        results: of earlier runs of the same code, with the same rates.
    """

    def __init__(self, file: Path | None, rates: str) -> None:
        self._file = file
        self._code = f"{_digest_code()} {rates}" if file else ""
        self.results: list[Result] = []
        if file is not None and file.exists():
            lines = file.read_text().splitlines()
            self.results = [result for line in lines if (result := self._read(line)) is not None]
            with file.open("a") as written:
                written.write("\n")  # the last line may be of a run that was killed while it wrote

    def add(self, result: Result) -> None:
        """Adds a result, without its history and what users did."""
        if self._file is not None:
            found = vars(result) | {
                "code": self._code,
                "history": [],
                "done": [],
                "fallen_at": list(result.fallen_at.items()),
            }
            with self._file.open("a") as file:
                file.write(json.dumps(found) + "\n")

    def _read(self, line: str) -> Result | None:
        try:
            found = json.loads(line)
        except ValueError:
            return None
        if found.pop("code") != self._code:
            return None
        found["points"] = Counter(found["points"])
        found["fallen"] = [(kind, number) for kind, number in found["fallen"]]
        found["fallen_at"] = Counter({(point, kind): n for (point, kind), n in found["fallen_at"]})
        return Result(**found)


def _digest_code() -> str:
    """Returns what changes with the code of service and simulator."""
    digest = hashlib.blake2b(digest_size=8)
    for package in _PACKAGES:
        for file in sorted((_ROOT / package).rglob("*")):
            if file.suffix in (".py", ".sql"):
                digest.update(str(file.relative_to(_ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
