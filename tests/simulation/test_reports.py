"""What is told of many seeds, and how a long run goes on where it was."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.simulation.progress import Progress
from tests.simulation.reports import Summary
from tests.simulation.world import Result


def result(seed: int, *kinds: str, broken: str = "") -> Result:
    return Result(
        seed=seed,
        broken=broken,
        fallen=[(kind, number) for number, kind in enumerate(kinds)],
        points=Counter({"fsync": 3, "sink done": 1}),
        history=["a line"],
        seconds=0.5,
        messages=10,
        starts=2,
        fallen_at=Counter({("fsync", "crash"): kinds.count("crash")}),
    )


def test_a_summary_says_how_often_each_kind_point_and_pair_came() -> None:
    summary = Summary()
    summary.add(result(1, "crash", "slow", "slow", "crash"))
    summary.add(result(2, "crash", broken="twice"))
    told = json.loads(summary.to_json())
    assert told["faults"] == {"crash": 3, "slow": 2}
    assert told["seeds_with"] == {"crash": 2, "slow": 1}
    assert told["points"] == {"fsync": 6, "sink done": 2}
    assert told["faults_at"] == {"fsync": {"crash": 3}}
    assert told["pairs"] == {"crash": {"slow": 1}, "slow": {"crash": 1, "slow": 1}}
    assert told["broken"] == {"2": "twice"}
    assert told["total"] == {"faults": 5, "points": 8}
    assert told["faults_per_cpu_second"] == 5.0
    lines = summary.to_text().splitlines()
    assert lines[0] == "2 seeds, 5 faults, 20 messages, 4 starts, 0 rebuilds, 1 s of CPU, 5.0 faults/s"
    assert [line.split() for line in lines if line.startswith(("crash", "fsync"))] == [
        ["crash", "3", "2"],
        ["fsync", "6", "3"],
    ]
    assert lines[-1] == "BROKEN: seed 2: twice"


def test_results_are_kept_whole_but_for_the_history(tmp_path: Path) -> None:
    file, found = tmp_path / "progress", result(1, "crash", "slow", broken="early")
    Progress(file, "usual").add(found)
    with file.open("a") as written:
        written.write('{"seed": 2, "bro')  # of a run that was killed
    Progress(file, "usual").add(result(3))
    [first, second] = Progress(file, "usual").results
    assert vars(first) == vars(found) | {"history": []}
    assert second.seed == 3


def test_results_of_other_code_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "progress"
    Progress(file, "usual").add(result(1))
    monkeypatch.setattr("tests.simulation.progress._digest_code", lambda: "other")
    assert Progress(file, "usual").results == []


def test_results_with_other_rates_do_not_count(tmp_path: Path) -> None:
    file = tmp_path / "progress"
    Progress(file, "usual").add(result(1))
    assert len(Progress(file, "usual").results) == 1
    assert Progress(file, "many").results == []
