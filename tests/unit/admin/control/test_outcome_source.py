"""Outcomes count from the job's own producer only, whose name is in its status."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from admin.control import outcome_source
from admin.control.outcome_source import OutcomeSource
from status.job_status import JobStatus, write_status


@dataclass
class Published:
    name: str

    def producer_name(self) -> str:
        return self.name


@pytest.fixture(autouse=True)
def looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome_source, "_LOOK_SECONDS", 0.0)


def tell(folder: Path, producer: str) -> None:
    write_status(str(folder), JobStatus(state="running", updated_at=1, started_at=1, outcome_producer=producer))


def test_nobody_elses_outcome_is_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tell(tmp_path, "job-outcomes")
    source = OutcomeSource(str(tmp_path))
    assert source.is_of_job(Published("job-outcomes"))
    for name in ("forger", "job-outcomes-1", "job-outcome", ""):
        assert not source.is_of_job(Published(name))
        assert not source.is_of_job(Published(name))
    assert caplog.text.count("is not believed") == 4


def test_a_job_that_takes_another_name_is_believed_again(tmp_path: Path) -> None:
    tell(tmp_path, "job-outcomes")
    source = OutcomeSource(str(tmp_path))
    assert not source.is_of_job(Published("job-outcomes-1"))
    tell(tmp_path, "job-outcomes-1")
    assert source.is_of_job(Published("job-outcomes-1"))
    assert not source.is_of_job(Published("job-outcomes"))


def test_before_a_job_of_this_version_has_run_its_name_is_not_known(tmp_path: Path) -> None:
    source = OutcomeSource(str(tmp_path))
    assert source.is_of_job(Published("any"))
    tell(tmp_path, "")
    assert source.is_of_job(Published("any"))


def test_a_flood_of_forgers_is_not_one_of_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tell(tmp_path, "job-outcomes")
    source = OutcomeSource(str(tmp_path))
    for i in range(1_000):
        source.is_of_job(Published(f"forger{i}"))
    assert len(caplog.records) == 20
