"""What `delaylake import` prints."""

from __future__ import annotations

from checkpoint_from_tables.other_systems.importing import ImportPreview
from jobs.commands.tables.import_ import _text


def test_a_dry_run_names_the_reasons_of_most_jobs_and_counts_the_others() -> None:
    reasons = {f"expireAt {i} is not after the time": 1 for i in range(1_000)} | {"no job": 7}
    lines = _text(
        ImportPreview(items=1_010, rejected=1_007, reasons=reasons), {"of other queues": 5}, None
    ).splitlines()
    told = [line for line in lines if "can't be taken" in line]
    assert told[0] == "7 can't be taken: no job"
    assert told[-1] == "981 can't be taken, for 981 other reasons: all are in --output json"
    assert len(told) == 21
    assert sum(int(line.split()[0]) for line in told) == 1_007
    assert "5 left: of other queues" in lines


def test_a_dry_run_with_few_reasons_names_each() -> None:
    lines = _text(ImportPreview(items=3, rejected=2, reasons={"one": 1, "other": 1}), {}, None).splitlines()
    assert [line for line in lines if "can't" in line] == ["1 can't be taken: one", "1 can't be taken: other"]
